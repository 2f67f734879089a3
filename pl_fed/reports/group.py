"""Runs that differ in nothing but the seed: what they have in common, and how far they differ."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pl_fed.reports import configs
from pl_fed.reports.labels import labels
from pl_fed.reports.run import Run, in_order


class Curve(NamedTuple):
    """A metric over rounds: the mean over the runs that have it, and their range."""

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    runs: list[int]


class Final(NamedTuple):
    """A metric in the end: the mean over runs, their standard deviation, range, and number.

    The deviation is that of a sample (n − 1); ``None`` for a single run.
    """

    mean: float
    std: float | None
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Final":
        """Return that of the values of one or more runs."""
        known = len(values) > 1 and all(map(math.isfinite, values))
        low, high = min(values), max(values)
        mean = min(max(sum(values) / len(values), low), high)  # which rounding may put outside
        return cls(mean, statistics.stdev(values) if known else None, low, high, len(values))

    def __str__(self) -> str:
        """Four digits, as in the table that a fit ends with."""
        return f"{self.mean:.4f}" + ("" if self.std is None else f" ± {self.std:.4f}")


@dataclass(frozen=True)
class Group:
    """Runs of one config but for the seed.

    Attributes:
        number: Its number in pictures and tables, from 1.
        label: Its short name: in what it differs from the others.
        runs: Its runs.
    """

    number: int
    label: str
    runs: tuple[Run, ...]

    @property
    def title(self) -> str:
        """Number and name."""
        return f"{self.number} {self.label}"

    @property
    def config(self) -> configs.Config:
        """The config of the first run."""
        return self.runs[0].config

    @property
    def tested(self) -> list[Run]:
        """The runs that came to their test."""
        return [run for run in self.runs if run.tested]

    @property
    def seeds(self) -> str:
        """Tell of how many seeds, or of how many runs, the group is."""
        return self.seeds_of(self.runs)

    def seeds_of(self, some: Sequence[Run]) -> str:
        """Tell the same of some of its runs."""
        runs, seeds = len(some), len({configs.seed(run.config) for run in some})
        if runs == seeds:
            return f"{runs} seeds" if runs > 1 else "1 seed"
        return f"{runs} runs of {seeds} seed{'s' if seeds > 1 else ''}"

    def curve(self, metric: str) -> Curve:
        """Return a metric over rounds; infinite values are left out."""
        found: dict[int, list[float]] = {}
        for run in self.runs:
            for round, value in run.curve(metric).items():
                if math.isfinite(value):
                    found.setdefault(round, []).append(value)
        values = [found[round] for round in sorted(found)]
        return Curve(
            sorted(found),
            [statistics.fmean(each) for each in values],
            [min(each) for each in values],
            [max(each) for each in values],
            [len(each) for each in values],
        )

    def final(self, metric: str) -> Final | None:
        """Return a metric in the end, if a run has it."""
        values = self.finals(metric)
        return Final.of(values) if values else None

    def finals(self, metric: str) -> list[float]:
        """Return a metric in the end of each run that has it."""
        return [value for run in self.runs if (value := run.final(metric)) is not None]


def grouped(runs: Iterable[Run]) -> list[Group]:
    """Put runs together that differ in nothing but the seed, in the order of the first of each."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        keys = [configs.identity(each) for each in (run.config, *run.earlier.values())]
        key = f"{keys} {list(run.earlier)}" if run.config else str(run.folder.resolve())
        found.setdefault(key, []).append(run)
    given = [each for each in found.values() if each[0].config]
    names = iter(labels([each[0].config for each in given]))
    called = [
        next(names) + changed(each[0]) if each[0].config else each[0].name
        for each in found.values()
    ]
    numbered = enumerate(zip(called, found.values()), 1)
    return [Group(number, label, tuple(each)) for number, (label, each) in numbered]


def changed(run: Run) -> str:
    """Tell from which rounds on a run had another config, if it had one."""
    rounds = " and ".join(str(round) for round in sorted(run.earlier))
    return f" (from round {rounds} on)" if rounds else ""


def models_of(groups: Sequence[Group], part: str) -> list[str]:
    """Return the models that any run evaluated on ``"val"`` or ``"test"``."""
    return in_order(model for each in groups for run in each.runs for model in run.models(part))


def measure_of(groups: Sequence[Group], part: str) -> str:
    """Return the metric that runs are shown by.

    It is ``federation.monitor`` where all configs name the same; else the accuracy; else the first
    metric of a task, by the alphabet; else the loss.
    """
    runs = [run for each in groups for run in each.runs]
    names = {
        name.split("/", 2)[2]
        for run in runs
        for name in run.metrics
        if name.startswith(f"{part}/") and name.count("/") == 2
    }
    monitors = {str(configs.dotted(run.config).get("federation.monitor")) for run in runs}
    for name in (*(monitors if len(monitors) == 1 else ()), "accuracy", *measures_in(names)):
        if name in names:
            return name
    return "loss"


def measures_in(names: Iterable[str]) -> list[str]:
    """Return a task's own metrics, which have a mean over the worst clients, in order.

    Args:
        names: Metrics, without the part of the data and the model.

    Example:
        >>> measures_in(["mae_worst10", "mae", "loss_worst10", "accuracy_worst10"])
        ['mae']
    """
    found = {name.removesuffix("_worst10") for name in names if name.endswith("_worst10")}
    return sorted(found - {"accuracy", "loss"})


def measures_of_run(run: Run) -> list[str]:
    """Return the metrics of a run's task, in order."""
    return measures_in(name.split("/", 2)[-1] for name in run.metrics)


def is_lower_better(runs: Iterable[Run], measure: str) -> bool:
    """Return whether smaller values of a metric are better: those of the best clients are."""
    if measure in ("accuracy", "loss"):
        return measure == "loss"
    for run in runs:
        for name in run.metrics:
            if name.endswith(f"/{measure}_worst10"):
                worst, best = run.final(name), run.final(f"{name.removesuffix('worst10')}best10")
                if worst is not None and best is not None and worst != best:
                    return worst > best
    return False


def with_metric(groups: Iterable[Group], metric: str) -> Iterator[Group]:
    """Yield the groups of which a run has a metric."""
    return (group for group in groups if any(metric in run.metrics for run in group.runs))
