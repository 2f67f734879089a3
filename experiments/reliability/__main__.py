"""Campaigns of faults: kills, mutated configs, broken files, hostile uploads, and more.

python -m experiments.reliability --minutes 60 --seed 7

Each case draws a fault by the campaign's seed, its kind and its number, and runs in forks. A case
is one row of cases.csv and is not repeated: a stopped campaign goes on. The script writes table.md.
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
from typing import NamedTuple

import torch

from experiments.reliability import (
    configs,
    data_files,
    files,
    interference,
    kills,
    processes,
    races,
    soak,
    uploads,
)
from experiments.reliability.forks import call_in_fork
from experiments.tables import markdown

HERE = Path(__file__).parent
COLUMNS = ("kind", "seed", "number", "case", "fault")
Run = Callable[[random.Random, Path], tuple[str, str]]


class Kind(NamedTuple):
    """Kind of faults.

    Attributes:
        run: Runs a case in a folder, and returns its description and its fault, if any.
        share: The number of cases in each cycle of the campaign.
        is_forked: Whether the cases run in a fork, which all of a cycle share. The other kinds run
            commands, which are forks.
    """

    run: Run
    share: int
    is_forked: bool = False


KINDS: dict[str, Kind] = {
    "hostile upload": Kind(uploads.run, 20, is_forked=True),
    "extreme upload": Kind(uploads.run_extreme, 20, is_forked=True),
    "non-interference": Kind(interference.run, 20, is_forked=True),
    "soak": Kind(soak.run, 1, is_forked=True),
    "mutated config": Kind(configs.run, 12),
    "broken file": Kind(files.run, 6),
    "broken data file": Kind(data_files.run, 6),
    "kill or signal": Kind(kills.run, 4),
    "full disk": Kind(kills.run_on_full_disk, 1),
    "two processes": Kind(processes.run, 1),
    "race": Kind(races.run, 2),
}
SECONDS = 600.0  # after which the cases of a fork count as faults


def run_cases(kind: str, seed: int, numbers: list[int], scratch: Path) -> list[dict[str, str]]:
    """Run cases of a kind, and return their rows."""
    if not KINDS[kind].is_forked:
        results = [_run_case(kind, seed, number, scratch) for number in numbers]
    else:
        together = call_in_fork(
            lambda: [_run_case(kind, seed, number, scratch) for number in numbers], SECONDS
        )
        results = together.value or [
            _run_in_own_fork(kind, seed, number, scratch) for number in numbers
        ]
    return [
        dict(zip(COLUMNS, (kind, str(seed), str(number), *result)))
        for number, result in zip(numbers, results)
    ]


def _run_case(kind: str, seed: int, number: int, scratch: Path) -> tuple[str, str]:
    """Run a case, and return its description and its fault."""
    folder = scratch / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        return KINDS[kind].run(random.Random(f"{seed}, {kind}, {number}"), folder)
    except Exception as error:
        return "", f"{type(error).__name__}: {str(error)[:300]}"


def _run_in_own_fork(kind: str, seed: int, number: int, scratch: Path) -> tuple[str, str]:
    """Run a case after a fork of several cases has failed."""
    result = call_in_fork(lambda: _run_case(kind, seed, number, scratch), SECONDS)
    return result.value or ("", result.failure)


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
        for kind, numbers in _list_portions(kinds):
            new = [number for number in numbers if (kind, str(seed), str(number)) not in done]
            new = new[: None if most is None else most - count]
            if new:
                rows = run_cases(kind, seed, new, Path(scratch))
                writer.writerows(
                    {name: ascii(text)[1:-1] for name, text in row.items()} for row in rows
                )
                file.flush()
            count += len(new)
            if time.monotonic() > end or count == most:
                return


def _list_portions(kinds: list[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield kinds with the numbers of the next cases, cycle after cycle without end.

    The cases of a fork come together.
    """
    for cycle in itertools.count():
        for kind in kinds:
            numbers = [*range(cycle * KINDS[kind].share, (cycle + 1) * KINDS[kind].share)]
            if KINDS[kind].is_forked:
                yield kind, numbers
            else:
                yield from ((kind, [number]) for number in numbers)


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
    gc.freeze()  # a collection in a fork would copy the memory of all imports
    path = options.out / "cases.csv"
    run_campaign(path, options.seed, 60 * options.minutes, options.kinds)
    (options.out / "table.md").write_text(make_table(read_cases(path)), encoding="utf-8")


if __name__ == "__main__":
    main()
