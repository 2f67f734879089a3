"""Results of the boards: collected from run folders, with gains over local training."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from experiments.attack_board.results import measure_variety
from experiments.experiment import Row, read_csv, shorten, write_csv
from pl_fed.statistics import RankComparison, compare_ranks, paired_differences
from pl_fed.statistics.ranks import block_ranks
from pl_fed.studies.cell_folder import State
from pl_fed.studies.results import make_row
from pl_fed.studies.spec import read_spec_file
from pl_fed.studies.study import Study
from pl_fed.studies.tables import NOTHING_CHOSEN

HERE = Path(__file__).parent
TABLE = HERE / "results.csv"
BOARDS = (
    *("labels_small", "labels_large", "features", "sizes", "writers", "vehicle"),
    *("objects", "objects_cnn", "topics", "roles"),
)
LOCAL, FINETUNING = "Local", "finetuning"
ONE_MODEL = ("FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "MOON")
FAIR = ("q-FFL", "TERM", "FedMGDA+", "AFL", "FedFV", "AdaFed", "AAggFF", "UPGrad", "PropFair")
KEY = ("board", "tuning", "method", "seed")
TUNED, DEFAULTS = "tuned", "defaults"
METRICS = {
    "accuracy": "test/personal/accuracy",
    "worst10": "test/personal/accuracy_worst10",
    "std": "test/personal/accuracy_std",
    "held_out": "test/held_out/personal/accuracy",
}
"""Columns of the results, and the metrics that they are read from."""

ACCURACIES = ("accuracy", "worst10", "held_out")


def open_study(board: str, tuning: str = TUNED) -> Study:
    """Return the study of a board, or the same one with the default values of all arguments."""
    spec = read_spec_file(HERE / f"{board}.yaml")
    if tuning == DEFAULTS:
        spec = replace(spec, name=f"{spec.name}_{DEFAULTS}", tune=None)
    return Study.from_spec(spec)


# Collect


def collect(boards: Iterable[str], tuning: str) -> None:
    """Write the numbers of the finished runs of some boards into results.csv.

    The tuned values go to ``tuned/<board>.csv``.
    """
    rows = {tuple(row[name] for name in KEY): row for row in read_csv(TABLE)}
    for board in boards:
        study = open_study(board, tuning)
        found = list(_read_runs(board, tuning, study))
        rows |= {tuple(row[name] for name in KEY): row for row in found}
        if found and tuning == TUNED:
            tuned = study.report().parent / "tables" / "tuned.csv"  # once a tuning has ended
            add_tuned_values(HERE / "tuned" / f"{board}.csv", read_csv(tuned))
    columns = dict.fromkeys(name for row in rows.values() for name in row)
    write_csv(TABLE, [{name: row.get(name, "") for name in columns} for row in rows.values()])


def add_tuned_values(path: Path, rows: Iterable[Row]) -> None:
    """Write the tuned values of some methods into a file; those of other methods stay."""
    ended = {row["method"]: row for row in rows if row["chosen"] != NOTHING_CHOSEN}
    if ended:
        path.parent.mkdir(exist_ok=True)
        write_csv(path, list(({row["method"]: row for row in read_csv(path)} | ended).values()))


def _read_runs(board: str, tuning: str, study: Study) -> Iterator[Row]:
    """Yield the row of each finished run of a study."""
    ended = [s for s in study.read_states() if s.state in (State.DONE, State.DIVERGED)]
    folders = {(s.cell.values["method"], s.cell.seed): s.folder.path for s in ended}
    for status in ended:
        method, seed = status.cell.values["method"], status.cell.seed
        numbers = make_row(status)
        row = dict(zip(KEY, (board, tuning, method, str(seed))), status=str(status.state))
        for column, metric in METRICS.items():
            name = metric if metric in numbers else metric.replace("/personal/", "/global/")
            if numbers.get(name) is not None:
                row[column] = shorten(numbers[name])
        sent = (numbers.get("counts/bytes_up"), numbers.get("counts/bytes_down"))
        row["megabytes"] = shorten(sum(float(number or 0) for number in sent) / 1e6)
        row |= _measure_time(status.folder.read_summary())
        if method != LOCAL and (LOCAL, seed) in folders and status.state is State.DONE:
            row |= measure_gains(folders[method, seed], folders[LOCAL, seed])
        yield row


def _measure_time(summary: Mapping[str, Any]) -> Row:
    seconds = summary.get("seconds", {}).get("rounds")
    return {} if seconds is None else {"seconds": shorten(seconds)}


def measure_gains(run: Path, local: Path) -> Row:
    """Return the gains in accuracy of the training clients over local training.

    Halves of the clients: with fewer and more samples for training, and with less and more varied
    classes.
    """
    alone, joined = _read_accuracies(local), _read_accuracies(run)
    gains = {client: joined[client] - alone[client] for client in alone}
    values = list(gains.values())
    row = {
        "gain": shorten(statistics.mean(values)),
        "gaining": shorten(statistics.mean(value > 0 for value in values)),
        "losing": shorten(statistics.mean(value < 0 for value in values)),
        "largest_loss": shorten(min(0.0, *values)),
    }
    samples = {r["client"]: float(r["train_samples"]) for r in read_csv(local / "per_client.csv")}
    variety = measure_variety(local)
    for (low, high), order in ((("small", "large"), samples), (("few", "many"), variety)):
        ordered = sorted(gains, key=lambda client: (order[client], int(client)))
        half = len(ordered) // 2
        row[f"gain_{low}"] = shorten(statistics.mean(gains[c] for c in ordered[:half]))
        row[f"gain_{high}"] = shorten(statistics.mean(gains[c] for c in ordered[half:]))
    return row


def _read_accuracies(folder: Path) -> dict[str, float]:
    """Return the accuracy of each training client: of its personal model, or of the global one."""
    rows = [r for r in read_csv(folder / "per_client.csv") if r.get("held_out", "0") != "1"]
    model = "personal" if rows[0].get("personal_accuracy") else "global"
    return {row["client"]: float(row[f"{model}_accuracy"]) for row in rows}


# Read


class Results:
    """Results: the numbers of all boards by board, method and seed.

    Args:
        rows: The rows of results.csv.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.boards = [board for board in BOARDS if any(r["board"] == board for r in rows)]
        self.methods = list(dict.fromkeys(row["method"] for row in rows))
        self._rows = {tuple(row[name] for name in KEY): row for row in rows}
        self.seeds = sorted({row["seed"] for row in rows}, key=int)

    @cached_property
    def complete_boards(self) -> list[str]:
        """The boards with results of every method."""
        return [b for b in self.boards if len(self.methods_of(b)) == len(self.methods)]

    def values(self, column: str, board: str, method: str, tuning: str = TUNED) -> list[float]:
        """Return a number for each seed; a run that diverged has an accuracy of 0.

        Empty without all seeds.
        """
        numbers = []
        for seed in self.seeds:
            row = self._rows.get((board, tuning, method, seed), {})
            if row.get(column):
                numbers.append(float(row[column]))
            elif row.get("status") == State.DIVERGED and column in ACCURACIES:
                numbers.append(0.0)
        return numbers if len(numbers) == len(self.seeds) else []

    def mean(self, column: str, board: str, method: str, tuning: str = TUNED) -> float | None:
        """Return the mean of a number over seeds; ``None`` without it."""
        values = self.values(column, board, method, tuning)
        return statistics.mean(values) if values else None

    def methods_of(self, board: str, column: str = "accuracy") -> list[str]:
        """Return the methods with results on a board, the best first."""
        means = {
            m: value for m in self.methods if (value := self.mean(column, board, m)) is not None
        }
        return sorted(means, key=lambda method: -means[method])

    def differences(
        self, board: str, method: str, other: str, column: str = "accuracy"
    ) -> list[float]:
        """Return the differences of two tuned methods, one for each seed."""
        first, second = (self.values(column, board, name) for name in (method, other))
        return list(paired_differences(first, second)) if first and second else []

    def rank(self, methods: Sequence[str], column: str = "accuracy") -> RankComparison | None:
        """Return the average ranks of methods over seeds.

        A seed is a block. Its score of a method is the mean of its ranks over the complete boards.
        """
        boards = self.complete_boards
        present = [m for m in methods if boards and all(self.values(column, b, m) for b in boards)]
        if len(present) < 3 or len(self.seeds) < 2:
            return None
        scores = np.array(
            [[self.values(column, b, m) for m in present] for b in boards]
        )  # [boards, methods, seeds]
        ranks = np.stack(
            [block_ranks(scores[:, :, seed]).mean(0) for seed in range(len(self.seeds))]
        )
        return compare_ranks(ranks, present, higher_is_better=False)

    def family(self, name: str) -> list[str]:
        """Return the methods of a family: ``one model``, ``fair`` or ``personal``."""
        members: Mapping[str, Callable[[str], bool]] = {
            "one model": lambda method: method in ONE_MODEL,
            "fair": lambda method: method in FAIR or method == "FedAvg",
            "personal": lambda method: method not in (*ONE_MODEL, *FAIR),
        }
        return [method for method in self.methods if members[name](method)]
