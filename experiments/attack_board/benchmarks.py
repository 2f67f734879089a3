"""Published figures of BackFed beside ours.

python -m experiments.attack_board.benchmarks                                    # the page
python -m experiments.attack_board.benchmarks experiments/attack_board/backfed.yaml  # of these runs
"""

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from experiments.attack_board.results import HERE
from experiments.experiment import Row, read_csv, shorten, write_csv
from experiments.papers import markdown
from pl_fed.studies.cell_folder import State
from pl_fed.studies.study import Study

BAND = 0.10
"""Largest difference that counts as agreement: BackFed's cells are read from curves of one run."""

OURS = HERE / "benchmarks.csv"
_WINDOW = 50  # rounds
_FIGURES = {"success": "val/central/backdoor_success", "accuracy": "val/central/accuracy"}
_KEYS = ("study", "server_lr", "attack", "moment", "figure")


def collect(studies: Iterable[Path]) -> None:
    """Write our figures of all finished runs under a plain mean into benchmarks.csv."""
    rows = {_key(row): row for row in read_csv(OURS)}
    for path in studies:
        study = Study.from_file(path)
        for status in study.read_states():
            labels = status.cell.values
            if status.state is State.DONE and labels["defence"] == "Mean":
                history = read_csv(status.folder.path / "metrics.csv")
                stop = _find_stop(history)
                for moment, figure, value in measure(history, stop):
                    row = {"study": study.spec.name, **{k: labels[k] for k in _KEYS[1:3]}}
                    row |= {"moment": moment, "figure": figure, "ours": shorten(value)}
                    rows[_key(row)] = row
    write_csv(OURS, list(rows.values()))


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in _KEYS)


def _find_stop(history: Iterable[Row]) -> int:
    """Return the first round after the last one with a forged or poisoned upload."""
    attacked = [int(row["round"]) for row in history if row.get("train/attack_distance")]
    return max(attacked, default=-1) + 1


def measure(history: Iterable[Row], stop: int) -> Iterable[tuple[str, str, float]]:
    """Yield moment, figure and value: at the end of the attack, and over the last 50 rounds.

    Args:
        history: The rows of ``metrics.csv``.
        stop: The first round without an attack.
    """
    rows = list(history)
    for figure, column in _FIGURES.items():
        curve = {int(row["round"]): float(row[column]) for row in rows if row.get(column)}
        if attacked := [round for round in curve if round < stop]:
            yield "end of attack", figure, curve[max(attacked)]
        if later := [round for round in curve if round >= stop]:
            last = [curve[round] for round in later if round > max(later) - _WINDOW]
            yield "last 50 rounds", figure, statistics.mean(last)


def make_page() -> str:
    """Return the table of published figures beside ours."""
    ours = {_key(row): row["ours"] for row in read_csv(OURS)}
    rows = []
    for row in read_csv(HERE / "published.csv"):
        value = ours.get(_key(row))
        published = float(row["published"])
        cells = [row[name] for name in _KEYS] + [f"{published:.3f}"]
        if value is None:
            rows.append([*cells, "not run", ""])
            continue
        difference = float(value) - published
        sign = "✓" if abs(difference) <= BAND else "✗"
        rows.append([*cells, f"{float(value):.3f}", f"{difference:+.3f} {sign}"])
    head = [*_KEYS, "published", "ours", "difference"]
    return "\n".join(
        [
            "# Benchmarks: published figures beside ours\n",
            "BackFed's figures are coordinates of curves in its repository; FLPoison's and"
            f" BackFed's tables could not be read. ✓ is a difference of at most {BAND:.2f}.\n",
            markdown(head, rows, align="---:"),
        ]
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        collect(map(Path, sys.argv[1:]))
    (HERE / "benchmarks.md").write_text(make_page(), encoding="utf-8")
