"""``python experiments/benchmarks/compare.py main``: did a change make a round slower?

The working tree and a git revision run the same federations in a process each, with one thread, and
take turns round by round. Equal processes differ by up to 10 %, for as long as they live, by where
their memory lies; so ``--pairs`` pairs of processes follow each other. The script prints the
medians over all rounds, the ratio of each pair (the median over its turns), and their mean. A row
is slower, or faster, if the mean differs from 1 by more than two of its standard errors and by more
than 2 %. ``--rows`` selects rows of ``targets.py``. Both sides use the working tree's code of the
benchmark. On a shared machine, use ``--clock cpu``. To measure the noise, compare a clean tree with
``HEAD``.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import torch
from cases import CASES, Case
from fit import fit
from race import ROOT, WARM, environment
from report import print_row, table
from settings import Settings

HEADER = ["round", "before, ms", "now, ms", "now / before", "by pair", "turns", ""]
DEFAULT = ["logistic-10", "mlp", "ditto", "FlameCNN"]


class Side:
    """Side of the comparison: a process that fits with a source tree's pl_fed, round by round.

    Args:
        tree: The root of the source tree.
        case: The federation to run.
        settings: Settings of the timing.
    """

    def __init__(self, tree: Path, case: Case, settings: Settings) -> None:
        arguments = [case.as_text(), json.dumps(asdict(settings))]
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *arguments],
            env=environment(tree, settings.device),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def round(self) -> float:
        """Run a round; return its seconds."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("A side of the comparison ended: its error is above.")
        return line

    def end(self) -> None:
        """End the fit."""
        self.process.stdin.close()
        self.process.wait()


def serve(case: Case, settings: Settings) -> None:
    """Run a side: answer each line of the input with the seconds of a round."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other prints must not mix with the answers
    torch.set_num_threads(1)

    def continue_after_round(seconds: float | None) -> bool:
        print(-1 if seconds is None else seconds, file=answers, flush=True)
        return bool(sys.stdin.readline())

    fit(case, case.data(), settings, 1, continue_after_round)


def compare(case: Case, before: Path, settings: Settings, pairs: int) -> list[str]:
    """Return a line of the table."""
    trees = (before, ROOT)
    turns = [take_turns(case, trees, settings, settings.seconds / pairs) for _ in range(pairs)]
    ratios = [statistics.median(now / old for old, now in pair) for pair in turns]
    medians = [1e3 * statistics.median(seconds) for seconds in zip(*chain(*turns))]
    ratio = statistics.mean(ratios)
    noise = max(2 * statistics.stdev(ratios) / math.sqrt(pairs), 0.02)
    verdict = "the same within noise"
    if abs(ratio - 1) > noise:
        verdict = "slower" if ratio > 1 else "faster"
    return [
        case.title,
        *(f"{median:.2f}" for median in medians),
        f"{ratio:.3f} ± {noise:.3f}",
        ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios)),
        str(sum(map(len, turns))),
        verdict,
    ]


def take_turns(
    case: Case, trees: Sequence[Path], settings: Settings, seconds: float
) -> list[list[float]]:
    """Return the seconds of the rounds of a process for each tree, turn by turn."""
    sides = [Side(tree, case, settings) for tree in trees]
    for side in sides:
        for _ in range(settings.warmup + WARM):
            side.round()
    turns: list[list[float]] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(turns) < settings.turns:
        order = sides if len(turns) % 2 else sides[::-1]
        times = {side: side.round() for side in order}
        turns.append([times[side] for side in sides])
    for side in sides:
        side.end()
    return turns


@contextmanager
def source_of(revision: str) -> Iterator[Path]:
    """Unpack a revision into a temporary folder, for a while."""
    with tempfile.TemporaryDirectory() as folder:
        packed, tree = Path(folder) / "tree.tar", Path(folder) / "tree"
        subprocess.run(["git", "-C", str(ROOT), "archive", "-o", str(packed), revision], check=True)
        with tarfile.open(packed) as archive:
            archive.extractall(tree, filter="data")
        yield tree


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        case, settings = sys.argv[2:]
        serve(Case.from_text(case), Settings(**json.loads(settings)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="the git revision to compare with")
    parser.add_argument("--rows", nargs="+", choices=CASES, default=DEFAULT, metavar="ROW")
    parser.add_argument("--pairs", type=int, default=5, help="of processes, at least 2")
    Settings.add_to(parser)
    arguments = parser.parse_args()
    if arguments.pairs < 2:
        parser.error(f"Expected `--pairs` of at least 2 but got {arguments.pairs}.")
    print(table(HEADER, []), end="")
    with source_of(arguments.revision) as before:
        for name in arguments.rows:
            settings = Settings.from_arguments(arguments)
            line = compare(CASES[name], before, settings, arguments.pairs)
            print_row(line)


if __name__ == "__main__":
    main()
