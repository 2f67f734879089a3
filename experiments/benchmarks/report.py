"""Report: tables, and the file ``results.md`` with a section for each script."""

import csv
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.md"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def print_row(cells: Sequence[str]) -> None:
    """Print a row of a table whose head stands above."""
    print(f"| {' | '.join(cells)} |", flush=True)


def machine(device: str) -> str:
    """Describe the machine, the versions and the command of a measurement."""
    cpu = f"{_cpu()}, {os.cpu_count()} cores"
    hardware = torch.cuda.get_device_name() if device == "cuda" else cpu
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    command = f"python experiments/benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}"
    return (
        f"{hardware}; {versions}, Lightning {lightning.__version__}; pl_fed at {_revision()};"
        f" one thread a process. `{command.strip()}`"
    )


def save(section: str, text: str) -> None:
    """Write a section into ``results.md``, in place of the section with the same name."""
    old = RESULTS.read_text() if RESULTS.exists() else "# Measured\n"
    begin, end = f"<!-- {section} -->", f"<!-- /{section} -->"
    new = f"{begin}\n\n{text.strip()}\n\n{end}"
    found = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if found.search(old):
        RESULTS.write_text(found.sub(lambda _: new, old))
    else:
        RESULTS.write_text(f"{old.rstrip()}\n\n{new}\n")


def save_rows(name: str, rows: Sequence[dict[str, object]]) -> None:
    """Write plain numbers to a CSV file beside ``results.md``."""
    with (HERE / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def _revision() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(asked, cwd=HERE, capture_output=True, text=True)
    return done.stdout.strip() or "an unknown revision"
