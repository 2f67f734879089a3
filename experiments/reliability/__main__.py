"""Campaign of faults: kills, full disks, races, mutated configs and broken files.

python -m experiments.reliability --minutes 60 --seed 7

Each case draws a fault by the campaign's seed, its kind and its number. A case is one row of
cases.csv and is not repeated: a stopped campaign goes on. The script writes table.md.
"""

import argparse
import csv
import gc
import itertools
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from experiments.reliability import configs, files, kills, races

HERE = Path(__file__).parent
COLUMNS = ("kind", "seed", "number", "case", "fault")
Run = Callable[[random.Random, Path], tuple[str, str]]
KINDS: dict[str, tuple[Run, int]] = {  # the run of a case, and the cases in each cycle
    "mutated config": (configs.run, 12),
    "broken file": (files.run, 6),
    "kill or signal": (kills.run, 4),
    "full disk": (kills.run_on_full_disk, 1),
    "race": (races.run, 2),
}


def run_case(kind: str, seed: int, number: int, scratch: Path) -> tuple[str, str]:
    """Run a case, and return its description and its fault; no fault is an empty text."""
    folder = scratch / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run, _ = KINDS[kind]
    try:
        return run(random.Random(f"{seed}, {kind}, {number}"), folder)
    except Exception as error:
        return "", f"{type(error).__name__}: {str(error)[:300]}"


def read_cases(path: Path) -> list[dict[str, str]]:
    """Return the rows of earlier campaigns."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run_campaign(
    path: Path, seed: int, seconds: float, kinds: list[str], most: int | None = None
) -> None:
    """Add cases to a file until the time, or the number of cases, is over.

    Args:
        path: The path of cases.csv.
        seed: The seed of the campaign.
        seconds: The duration; the last case may take longer.
        kinds: The kinds of faults.
        most: The largest number of new cases; ``None`` for no limit.
    """
    done = {(row["kind"], row["seed"], row["number"]) for row in read_cases(path)}
    new = (
        (kind, number)
        for kind, number in list_cases(kinds)
        if (kind, str(seed), str(number)) not in done
    )
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch, path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not done:
            writer.writerow(COLUMNS)
        for kind, number in itertools.islice(new, most):
            case = (kind, str(seed), str(number), *run_case(kind, seed, number, Path(scratch)))
            writer.writerow(ascii(text)[1:-1] for text in case)
            file.flush()
            if time.monotonic() > end:
                return


def list_cases(kinds: list[str]) -> Iterator[tuple[str, int]]:
    """Yield kinds and numbers of cases, cycle after cycle without end."""
    for cycle in itertools.count():
        for kind in kinds:
            _, share = KINDS[kind]
            yield from ((kind, number) for number in range(cycle * share, (cycle + 1) * share))


def make_table(rows: list[dict[str, str]]) -> str:
    """Return the numbers of tried and failed cases of each kind, with the failures' seeds."""
    lines = ["| kind | tried | failed | failures: seed/number |", "| --- | --- | --- | --- |"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        failed = [f"{row['seed']}/{row['number']}" for row in own if row["fault"]]
        lines.append(f"| {kind} | {len(own)} | {len(failed)} | {', '.join(failed)} |")
    failures = sum(bool(row["fault"]) for row in rows)
    return "\n".join([*lines, f"| all | {len(rows)} | {failures} |  |"]) + "\n"


def main() -> None:
    """Run a campaign, and write its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="duration of the campaign")
    parser.add_argument("--seed", type=int, default=7, help="seed of the campaign")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--out", type=Path, default=HERE, help="folder of cases.csv and table.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    gc.freeze()  # a collection in a fork would copy the memory of all imports
    path = options.out / "cases.csv"
    run_campaign(path, options.seed, 60 * options.minutes, options.kinds)
    (options.out / "table.md").write_text(make_table(read_cases(path)), encoding="utf-8")


if __name__ == "__main__":
    main()
