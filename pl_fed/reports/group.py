"""Groups of runs that differ only in the seed: their means, and their spread over runs."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pl_fed.reports import configs
from pl_fed.reports.labels import labels
from pl_fed.reports.run import Run, sort_models


class Curve(NamedTuple):
    """Curve: the mean and the range of a metric over the seeds with a value, for each round.

    Attributes:
        rounds: The rounds with a value.
        mean: The mean over seeds in each round.
        low: The smallest value in each round.
        high: The largest value in each round.
        runs: The number of seeds with a value in each round: runs of one seed count once.
    """

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    runs: list[int]


class Final(NamedTuple):
    """The last value of a metric: its mean, standard deviation and range over runs.

    Attributes:
        mean: The mean over runs.
        std: The sample standard deviation (n − 1); ``None`` for a single run.
        low: The smallest value.
        high: The largest value.
        runs: The number of runs.
    """

    mean: float
    std: float | None
    low: float
    high: float
    runs: int

    @classmethod
    def summarize(cls, values: Sequence[float]) -> "Final":
        """Return the statistics of the last values of one or more runs."""
        has_std = len(values) > 1 and all(map(math.isfinite, values))
        low, high = min(values), max(values)
        mean = min(max(sum(values) / len(values), low), high)  # rounding may leave the range
        return cls(mean, statistics.stdev(values) if has_std else None, low, high, len(values))

    def __str__(self) -> str:
        """Return the mean and deviation with four decimals, as in the summary of a fit."""
        return f"{self.mean:.4f}" + ("" if self.std is None else f" ± {self.std:.4f}")


@dataclass(frozen=True)
class Group:
    """Runs of one config that differ only in the seed.

    Attributes:
        number: The number of the group in pictures and tables, from 1.
        label: A short name: the algorithm and the differences from the other groups.
        runs: The runs of the group.
    """

    number: int
    label: str
    runs: tuple[Run, ...]

    @property
    def title(self) -> str:
        """The number and the label."""
        return f"{self.number} {self.label}"

    @property
    def config(self) -> configs.Config:
        """The config of the first run."""
        return self.runs[0].config

    @property
    def tested_runs(self) -> list[Run]:
        """The runs with a test."""
        return [run for run in self.runs if run.has_test]

    @cached_property
    def _seeds(self) -> dict[int, str]:
        """The seed of each run, by the run's identity; a run without a seed is one by itself."""
        return {
            id(run): configs.describe_seeds(run.config) or f"run {number}"
            for number, run in enumerate(self.runs)
        }

    @property
    def has_repeated_seeds(self) -> bool:
        """Whether two runs have the same seed."""
        return len(set(self._seeds.values())) < len(self.runs)

    def first_of_seeds(self, runs: Iterable[Run]) -> list[Run]:
        """Return the first of some runs of the group for each seed.

        Two runs of one seed are the same experiment twice: their clients are no further clients.
        """
        first: dict[str, Run] = {}
        for run in runs:
            first.setdefault(self._seeds[id(run)], run)
        return list(first.values())

    @property
    def seeds(self) -> str:
        """The number of seeds in words, and the number of runs if it differs."""
        return self.describe_seeds(self.runs)

    def describe_seeds(self, runs: Sequence[Run]) -> str:
        """Return in words how many seeds some runs of the group have."""
        num_runs, num_seeds = len(runs), len({self._seeds[id(run)] for run in runs})
        if num_runs == num_seeds:
            return f"{num_runs} seeds" if num_runs > 1 else "1 seed"
        return f"{num_runs} runs of {num_seeds} seed{'s' if num_seeds > 1 else ''}"

    def curve(self, metric: str) -> Curve:
        """Return a metric over rounds, without infinite values."""
        if metric not in self._curves:
            self._curves[metric] = self._compute_curve(metric)
        return self._curves[metric]

    @cached_property
    def _curves(self) -> dict[str, Curve]:
        """The curves so far: a picture asks for a curve several times."""
        return {}

    def _compute_curve(self, metric: str) -> Curve:
        if len(self.runs) == 1:
            rounds, own = self.runs[0].table.finite_points(metric)
            return Curve(rounds, own, own, own, [1] * len(own))
        values_by_round: dict[int, list[float]] = {}
        for values in self._seed_curves(metric):
            for round, value in values.items():
                if math.isfinite(value):
                    values_by_round.setdefault(round, []).append(value)
        rounds = sorted(values_by_round)
        columns = [values_by_round[round] for round in rounds]
        return Curve(
            rounds,
            [statistics.fmean(values) for values in columns],
            [min(values) for values in columns],
            [max(values) for values in columns],
            [len(values) for values in columns],
        )

    def _seed_curves(self, metric: str) -> Iterator[Mapping[int, float]]:
        """Yield a metric by round for each seed; the mean of the finite values of its runs."""
        runs_by_seed: dict[str, list[Run]] = {}
        for run in self.runs:
            runs_by_seed.setdefault(self._seeds[id(run)], []).append(run)
        for runs in runs_by_seed.values():
            if len(runs) == 1:
                yield runs[0].curve(metric)
                continue
            values: dict[int, list[float]] = {}
            for run in runs:
                for round, value in run.curve(metric).items():
                    if math.isfinite(value):
                        values.setdefault(round, []).append(value)
            yield {round: statistics.fmean(column) for round, column in values.items()}

    def final(self, metric: str) -> Final | None:
        """Return the last value of a metric, or ``None`` if no run has it.

        It is ``None``, too, if it is undefined in a run: the others would make it look better.
        """
        if any(run.is_undefined(metric) for run in self.runs):
            return None
        return self.summarize(lambda run: run.final(metric))

    def finals(self, metric: str) -> list[float]:
        """Return the last value of a metric for each seed; the mean of runs of one seed."""
        return self._results_by_seed(lambda run: run.final(metric))

    def summarize(self, read: Callable[[Run], float | None]) -> Final | None:
        """Return the statistics over the seeds of a result of each run, or ``None`` without any."""
        values = self._results_by_seed(read)
        return Final.summarize(values) if values else None

    def _results_by_seed(self, read: Callable[[Run], float | None]) -> list[float]:
        """Return a result for each seed; the mean of runs of one seed.

        Runs of one seed are no independent runs, so they would make a spread too small.
        """
        values: dict[str, list[float]] = {}
        for run in self.runs:
            if (value := read(run)) is not None:
                values.setdefault(self._seeds[id(run)], []).append(value)
        return [v[0] if len(v) == 1 else statistics.fmean(v) for v in values.values()]


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Group runs that differ only in the seed; groups keep the order of their first runs.

    A run without a config is a group by itself.
    """
    runs_by_key: dict[str, list[Run]] = {}
    for run in runs:
        keys = [configs.identity(config) for config in (run.config, *run.earlier_configs.values())]
        key = f"{keys} {list(run.earlier_configs)}" if run.config else str(run.folder.resolve())
        runs_by_key.setdefault(key, []).append(run)
    members = list(runs_by_key.values())
    names = iter(labels([runs[0].config for runs in members if runs[0].config]))
    group_labels = [
        next(names) + describe_restart(runs[0]) if runs[0].config else runs[0].name
        for runs in members
    ]
    numbered = enumerate(zip(group_labels, members), 1)
    return [Group(number, label, tuple(runs)) for number, (label, runs) in numbered]


def describe_restart(run: Run) -> str:
    """Return a note on the rounds from which a run had a new config, or an empty string."""
    rounds = " and ".join(str(round) for round in sorted(run.earlier_configs))
    return f" (from round {rounds} on)" if rounds else ""


def list_models(groups: Sequence[Group], part: str) -> list[str]:
    """Return the models that any run evaluated on ``"val"`` or ``"test"`` data."""
    return sort_models(
        model for group in groups for run in group.runs for model in run.models(part)
    )


def main_metric(groups: Sequence[Group], part: str) -> str:
    """Return the metric that a report shows: that of all runs, by :func:`choose_metric`."""
    return choose_metric([run for group in groups for run in group.runs], part)


def choose_metric(runs: Sequence[Run], part: str) -> str:
    """Return the metric by which runs are compared.

    The candidates are ``federation.monitor`` if it is the same in all configs, accuracy, the
    metrics of tasks by the alphabet, and loss. The first that any run has is returned.

    Args:
        runs: The runs.
        part: ``"val"`` or ``"test"``.
    """
    names = {
        name.split("/", 2)[2]
        for name in set().union(*(run.metrics for run in runs))
        if name.startswith(f"{part}/") and name.count("/") == 2
    }
    monitors = {str(configs.flatten(run.config).get("federation.monitor")) for run in runs}
    monitored: set[str] = monitors if len(monitors) == 1 else set()
    ranked = [name for name in task_metrics(names) if f"{name}_worst10" in names]
    for name in (*monitored, "accuracy", *ranked):
        if name in names:
            return name
    return "loss"


def task_metrics(names: Iterable[str]) -> list[str]:
    """Return a task's own metrics in alphabetical order: those with statistics over clients.

    Args:
        names: Names of metrics, without the part of the data and the model.

    Example:
        >>> task_metrics(["mae_worst10", "mae", "mae_trained_worst10", "accuracy_worst10"])
        ['mae']
        >>> task_metrics(["group/client_accuracy_gap_worst10"])
        []
    """
    names = {name for name in names if not name.startswith("group/")}  # gaps between groups
    endings = ("_worst10", "_jain")  # without a direction, a metric has no worst clients
    metrics = {name.removesuffix(e) for e in endings for name in names if name.endswith(e)}
    over_trained_clients = {f"{name}_trained" for name in names}
    return sorted(metrics - over_trained_clients - {"accuracy", "loss", "backdoor_success"})


def list_task_metrics(run: Run) -> list[str]:
    """Return the metrics of a run's task in alphabetical order."""
    return task_metrics(name.split("/", 2)[-1] for name in run.metrics if name.count("/") < 3)


def is_higher_better(runs: Iterable[Run], metric: str) -> bool | None:
    """Return whether larger values of a metric are better; ``None`` if no run knows it.

    ``summary.json`` has the directions. In an earlier run without them, the worst and the best 10 %
    of clients show that of a task's own metric.
    """
    if metric in ("accuracy", "loss"):
        return metric == "accuracy"
    runs = list(runs)
    for run in runs:
        directions = run.summary.get("higher_is_better")
        if isinstance(directions, Mapping) and isinstance(
            is_higher := directions.get(metric), bool
        ):
            return is_higher
    for run in runs:
        for name in run.metrics:
            if name.endswith(f"/{metric}_worst10"):
                worst, best = run.final(name), run.final(f"{name.removesuffix('worst10')}best10")
                if worst is not None and best is not None and worst != best:
                    return worst < best
    return None


def is_lower_better(runs: Iterable[Run], metric: str) -> bool:
    """Return whether smaller values of a metric are better, for metrics with worst clients."""
    return is_higher_better(runs, metric) is False


def groups_with_metric(groups: Iterable[Group], metric: str) -> Iterator[Group]:
    """Yield the groups with at least one run that has a metric."""
    return (group for group in groups if any(metric in run.metrics for run in group.runs))
