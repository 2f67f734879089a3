"""``python experiments/benchmarks/compare.py main``: did a change make a round slower?

The working tree and a git revision run the same federations in one process each, with one thread,
and take turns round by round. The script prints the medians, and the median and quartiles of the
ratio of the two rounds of a turn. A row is slower, or faster, if the median ratio differs from 1 by
more than two of its standard errors and by more than 2 %. A standard error is 0.93 times the
distance of the quartiles over the root of the number of turns; equal processes may differ by 2 %.
``--rows`` selects rows of ``targets.py``. Both sides use the working tree's code of the benchmark.
On a shared machine, use ``--clock cpu``. To measure the noise, compare a clean tree with ``HEAD``.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from cases import CASES, Case
from fit import fit
from race import ROOT, WARM, environment
from report import table
from settings import Settings

HEADER = ["round", "before, ms", "now, ms", "now / before", "quartiles", "turns", ""]
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


def compare(case: Case, before: Path, settings: Settings) -> list[str]:
    """Return a line of the table."""
    sides = [Side(tree, case, settings) for tree in (before, ROOT)]
    for side in sides:
        for _ in range(settings.warmup + WARM):
            side.round()
    turns: list[list[float]] = []
    until = time.perf_counter() + settings.seconds
    while time.perf_counter() < until or len(turns) < settings.turns:
        order = sides if len(turns) % 2 else sides[::-1]
        seconds = {side: side.round() for side in order}
        turns.append([seconds[side] for side in sides])
    for side in sides:
        side.end()
    medians = [1e3 * statistics.median(seconds) for seconds in zip(*turns)]
    first, ratio, third = statistics.quantiles([now / old for old, now in turns], n=4)
    noise = max(2 * 0.93 * (third - first) / math.sqrt(len(turns)), 0.02)
    verdict = "the same within noise"
    if abs(ratio - 1) > noise:
        verdict = "slower" if ratio > 1 else "faster"
    return [
        case.title,
        *(f"{median:.2f}" for median in medians),
        f"{ratio:.3f} ± {noise:.3f}",
        f"{first:.3f} to {third:.3f}",
        str(len(turns)),
        verdict,
    ]


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
    Settings.add_to(parser)
    arguments = parser.parse_args()
    print(table(HEADER, []), end="")
    with source_of(arguments.revision) as before:
        for name in arguments.rows:
            line = compare(CASES[name], before, Settings.from_arguments(arguments))
            print(table(line, []).splitlines()[0], flush=True)


if __name__ == "__main__":
    main()
