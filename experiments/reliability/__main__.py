"""Campaigns of faults: kills, mutated configs, broken files, hostile uploads, and more.

python -m experiments.reliability --minutes 60 --seed 7

Each case draws a fault by the campaign's seed, its kind and its number, and runs in a fork. A case
is one row of cases.csv and is not repeated: a stopped campaign goes on. The script writes table.md.
"""

import argparse
import csv
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from experiments.reliability import configs, data_files, files, interference, kills, soak, uploads
from experiments.reliability.forks import call_in_fork
from experiments.tables import markdown

HERE = Path(__file__).parent
COLUMNS = ("kind", "seed", "number", "case", "fault")
Fault = Callable[[random.Random, Path], tuple[str, str]]
KINDS: dict[str, tuple[Fault, int]] = {  # with the number of cases in each cycle of the campaign
    "hostile upload": (uploads.run, 20),
    "extreme upload": (uploads.run_extreme, 16),
    "non-interference": (interference.run, 20),
    "mutated config": (configs.run, 16),
    "broken file": (files.run, 8),
    "broken data file": (data_files.run, 8),
    "kill or signal": (kills.run, 4),
    "full disk": (kills.run_on_full_disk, 1),
    "soak": (soak.run, 1),
}
SECONDS = 600.0  # after which a case counts as a fault


def draw_cases(seed: int, kinds: list[str]) -> Iterator[tuple[str, int]]:
    """Yield the kind and the number of each case, without end."""
    numbers = dict.fromkeys(kinds, 0)
    draw = random.Random(f"{seed}, order")
    while True:
        cycle = [kind for kind in kinds for _ in range(KINDS[kind][1])]
        draw.shuffle(cycle)
        for kind in cycle:
            yield kind, numbers[kind]
            numbers[kind] += 1


def run_case(kind: str, seed: int, number: int, scratch: Path) -> dict[str, str]:
    """Run a case in a fork, and return its row."""
    folder = scratch / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    draw = random.Random(f"{seed}, {kind}, {number}")
    result = call_in_fork(lambda: KINDS[kind][0](draw, folder), SECONDS)
    case, fault = result.value or ("", result.failure)
    return dict(zip(COLUMNS, (kind, str(seed), str(number), case, fault)))


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
    end, count = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory() as scratch, path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not done:
            writer.writeheader()
        for kind, number in draw_cases(seed, kinds):
            if time.monotonic() > end or count == most:
                return
            if (kind, str(seed), str(number)) not in done:
                row = run_case(kind, seed, number, Path(scratch))
                writer.writerow({name: ascii(text)[1:-1] for name, text in row.items()})
                file.flush()
                count += 1


def make_table(rows: list[dict[str, str]]) -> str:
    """Return the numbers of tried and failed cases of each kind, with the failures' seeds."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        failed = [f"{row['seed']}/{row['number']}" for row in own if row["fault"]]
        lines.append([kind, str(len(own)), str(len(failed)), ", ".join(failed)])
    failures = sum(bool(row["fault"]) for row in rows)
    lines.append(["all", str(len(rows)), str(failures), ""])
    return markdown(["kind", "tried", "failed", "failures: seed/number"], lines)


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
    path = options.out / "cases.csv"
    run_campaign(path, options.seed, 60 * options.minutes, options.kinds)
    (options.out / "table.md").write_text(make_table(read_cases(path)), encoding="utf-8")


if __name__ == "__main__":
    main()
