"""Results of the board: collected from run folders, and averaged over seeds."""

import csv
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from experiments.experiment import Row, read_csv, shorten, write_csv
from experiments.papers import interval
from pl_fed.studies.cell_folder import State
from pl_fed.studies.results import make_row
from pl_fed.studies.study import Study

HERE = Path(__file__).parent
TABLE = HERE / "results.csv"
NONE = "none"
SHARE = 0.2  # Byzantine clients of the main board
AXES = ("algorithm", "attack", "defence", "share", "seed")
MODELS = ("global", "personal")
SUCCESS = "backdoor_success"
STATISTICS = (
    *("accuracy", "accuracy_std", "accuracy_worst10", "accuracy_best10"),
    *(SUCCESS, f"{SUCCESS}_worst10", f"{SUCCESS}_max"),
)
ATTACK = (
    *("detection_precision", "detection_recall", "attack_distance", "attack_cosine"),
    *("global_durability", "global_outlasts", "personal_durability", "personal_outlasts"),
)
MAIN, SEEDS, SHARES = "attack_board", "attack_board_seeds", "attack_board_shares"
DURABILITY, PERSONAL_SIDE = "attack_board_durability", "attack_board_personal_side"
OTHER_DATA = {
    "attack_board_writers": "writers of MNIST",
    "attack_board_objects": "CIFAR-10 and a small CNN",
}
REFERENCE = "Mean"
EDGE_CASE = "edge case"  # its samples are of another data set, so that no benign client objects
AIMED = ("PFedBA", "Bad-PFL", "A3FL", "Neurotoxin")
"""Attacks that were made for personal models, or to outlast training."""


def collect(studies: Iterable[Path]) -> None:
    """Write the numbers of all finished runs of study files into results.csv."""
    rows = {_key(row): row for row in read_csv(TABLE)}
    for path in studies:
        for status in Study.from_file(path).read_states():
            if status.state not in (State.DONE, State.DIVERGED):
                continue
            numbers = make_row(status)
            labels = {"share": str(SHARE), **status.cell.labels}
            row = {name: str(labels[name]) for name in AXES}
            row |= {"study": Study.from_file(path).spec.name, "status": str(status.state)}
            names = [f"test/{model}/{name}" for model in MODELS for name in STATISTICS]
            names += [f"attack/{name}" for name in ATTACK]
            row |= {n: shorten(numbers[n]) for n in names if numbers.get(n) is not None}
            row |= _measure_halves(status.folder.path)
            rows[_key(row)] = row
    columns = dict.fromkeys(name for row in rows.values() for name in row)
    write_csv(TABLE, [{name: row.get(name, "") for name in columns} for row in rows.values()])


def _key(row: Row) -> tuple[str, ...]:
    return (row["study"], *(row[name] for name in AXES))


def _measure_halves(folder: Path) -> Row:
    """Return the mean accuracy of each half of the benign clients, by model."""
    clients = [row for row in read_csv(folder / "per_client.csv") if row["byzantine"] == "0"]
    if not clients:
        return {}
    variety = measure_variety(folder)
    sizes = {row["client"]: float(row["train_samples"]) for row in clients}
    numbers: Row = {}
    pairs = (("small", "large", sizes), ("few", "many", variety))
    for model, (low, high, values) in itertools.product(MODELS, pairs):
        column = f"{model}_accuracy"
        ordered = sorted(clients, key=lambda row: (values[row["client"]], int(row["client"])))
        halves = (ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :])
        for name, half in zip((low, high), halves):
            accuracies = [float(row[column]) for row in half if row.get(column)]
            if accuracies:
                numbers[f"{model}_{name}"] = shorten(statistics.mean(accuracies))
    return numbers


def measure_variety(folder: Path) -> dict[str, float]:
    """Return the effective number of classes of each client: exp of the entropy of its labels."""
    samples: dict[str, list[float]] = {}
    with (folder / "per_class.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            samples.setdefault(row["client"], []).append(float(row["samples"]))
    variety = {}
    for client, counts in samples.items():
        shares = np.array(counts) / max(1.0, sum(counts))
        shares = shares[shares > 0]
        variety[client] = float(np.exp(-(shares * np.log(shares)).sum()))
    return variety


class Board:
    """Board: the results of studies with the same setting.

    Args:
        rows: Their rows of results.csv.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self.algorithms = self._list("algorithm")
        self.attacks = [attack for attack in self._list("attack") if attack != NONE]
        self.defences = self._list("defence")
        self.shares = sorted({float(row["share"]) for row in self.rows})
        self._cells: dict[tuple[str, str, str, float], list[Row]] = {}
        for row in self.rows:
            key = row["algorithm"], row["attack"], row["defence"], float(row["share"])
            self._cells.setdefault(key, []).append(row)

    def _list(self, axis: str) -> list[str]:
        return list(dict.fromkeys(row[axis] for row in self.rows))

    def has_personal(self, algorithm: str) -> bool:
        """Return whether an algorithm has personal models."""
        return any(
            row.get("test/personal/accuracy") for row in self.rows if row["algorithm"] == algorithm
        )

    def has_global(self, algorithm: str) -> bool:
        """Return whether an algorithm evaluates its global model."""
        return any(
            row.get("test/global/accuracy") for row in self.rows if row["algorithm"] == algorithm
        )

    def model_of(self, algorithm: str) -> str:
        """Return the model that clients use: the personal one, if there is one."""
        return "personal" if self.has_personal(algorithm) else "global"

    def values(
        self,
        column: str,
        algorithm: str,
        attack: str,
        defence: str,
        share: float = SHARE,
    ) -> dict[str, float]:
        """Return a number of a cell by seed; 0 is the accuracy of a diverged run."""
        numbers = {}
        for row in self._cells.get((algorithm, attack, defence, share), []):
            if row.get(column):
                numbers[row["seed"]] = float(row[column])
            elif row["status"] == State.DIVERGED and column.endswith("/accuracy"):
                numbers[row["seed"]] = 0.0
        return numbers

    def mean(self, column: str, *cell: str, share: float = SHARE) -> float | None:
        """Return the mean of a number over the seeds of a cell; ``None`` without a run."""
        values = self.values(column, *cell, share=share)
        return statistics.mean(values.values()) if values else None

    def sound(
        self, algorithm: str, attack: str, defence: str, share: float = SHARE
    ) -> float | None:
        """Return the sound accuracy: accuracy times the share of samples that no trigger misleads.

        For an attack without a trigger it is the accuracy.
        """
        values = self.sound_values(algorithm, attack, defence, share)
        return statistics.mean(values.values()) if values else None

    def sound_values(
        self, algorithm: str, attack: str, defence: str, share: float = SHARE
    ) -> dict[str, float]:
        """Return the sound accuracy by seed."""
        model = self.model_of(algorithm)
        accuracies = self.values(f"test/{model}/accuracy", algorithm, attack, defence, share)
        success = self.values(f"test/{model}/{SUCCESS}", algorithm, attack, defence, share)
        if attack == NONE:
            return accuracies
        # a diverged seed has no success
        return {seed: number * (1 - success.get(seed, 0)) for seed, number in accuracies.items()}

    def format_sound(self, algorithm: str, attack: str, defence: str, share: float = SHARE) -> str:
        """Return the sound accuracy as text, with its interval if there are several seeds."""
        return interval([*self.sound_values(algorithm, attack, defence, share).values()])

    def worst(
        self, algorithm: str, defence: str, without: Sequence[str] = ()
    ) -> tuple[float, str] | None:
        """Return the lowest sound accuracy over the attacks, and the attack.

        ``None`` if an attack that the plain mean has met is missing: the worst case of a few
        attacks is not comparable with that of all.

        Args:
            algorithm: The algorithm.
            defence: The defence.
            without: Attacks that do not count.
        """
        counting = [attack for attack in self.attacks if attack not in without]
        cells = []
        for attack in counting:
            value = self.sound(algorithm, attack, defence)
            if value is not None:
                cells.append((value, attack))
            elif self.sound(algorithm, attack, REFERENCE) is not None:
                return None
        return min(cells, default=None)

    def worst_values(self, algorithm: str, defence: str) -> list[float]:
        """Return the sound accuracy under the worst attack for each seed."""
        worst = self.worst(algorithm, defence)
        if worst is None:
            return []
        return [*self.sound_values(algorithm, worst[1], defence).values()]

    def average(self, measure: Callable[[str], float | None]) -> float | None:
        """Return the mean of a measure over the algorithms; ``None`` if one lacks it."""
        values = [measure(algorithm) for algorithm in self.algorithms]
        present = [value for value in values if value is not None]
        return statistics.mean(present) if present and len(present) == len(values) else None

    def sort_defences(self) -> list[str]:
        """Return the defences by their worst case, averaged over algorithms, the best first."""

        def score(defence: str) -> float:
            value = self.average(lambda a: (self.worst(a, defence) or (None,))[0])
            return -1.0 if value is None else value

        return sorted(self.defences, key=score, reverse=True)

    def list_triggered(self) -> list[str]:
        """Return the attacks with a trigger."""
        columns = [f"test/{model}/{SUCCESS}" for model in MODELS]
        return [
            attack
            for attack in self.attacks
            if any(row.get(c) for row in self.rows if row["attack"] == attack for c in columns)
        ]


def differences(first: Sequence[float | None], second: Sequence[float | None]) -> list[float]:
    """Return first − second where both are present."""
    return [a - b for a, b in zip(first, second) if a is not None and b is not None]
