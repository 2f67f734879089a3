"""Results of the same clients in two groups of runs."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pl_fed.reports import configs
from pl_fed.reports.group import Group, is_lower_better
from pl_fed.reports.run import Run

_FACTOR = 1.96  # of a standard error, for 95 %


class Pairs(NamedTuple):
    """Pairs of results: one for each benign client and seed that both groups have.

    Attributes:
        before: The results of the reference, [pairs].
        after: The results of the other group, [pairs].
        lower_is_better: Whether smaller results are better.
        num_diverged: The number of further clients with a result in the reference alone, as their
            models have diverged in the other group. They are worse off.
    """

    before: NDArray[np.float64]
    after: NDArray[np.float64]
    lower_is_better: bool
    num_diverged: int = 0

    @property
    def differences(self) -> NDArray[np.float64]:
        """The differences, [pairs]."""
        return self.after - self.before

    @property
    def gains(self) -> NDArray[np.float64]:
        """The differences, positive where a client is better off, [pairs]."""
        return -self.differences if self.lower_is_better else self.differences

    @property
    def half_width(self) -> float | None:
        """Half of the width of a 95 % interval of the mean; ``None`` for a single pair."""
        number = len(self.differences)
        if number < 2:
            return None
        return _FACTOR * float(self.differences.std(ddof=1)) / math.sqrt(number)

    def describe(self) -> dict[str, Any]:
        """Return the mean difference, its interval, and the clients that win and lose."""
        mean, half = float(self.differences.mean()), self.half_width
        interval = None if half is None else f"{mean - half:+.3f} to {mean + half:+.3f}"
        return {
            "difference": None if self.num_diverged else mean,
            "interval": None if self.num_diverged else interval,
            "better": self._describe_share((self.gains > 0).sum()),
            "worse": self.worse_off,
        }

    @property
    def worse_off(self) -> str:
        """The number of clients that are worse off, as text."""
        return self._describe_share((self.gains < 0).sum() + self.num_diverged)

    def _describe_share(self, number: int) -> str:
        return f"{number} of {len(self.gains) + self.num_diverged}"


def pair_clients(
    reference: Group, group: Group, columns: tuple[str, str], metric: str
) -> Pairs | None:
    """Return the pairs of two groups, or ``None`` without any.

    Args:
        reference: The reference.
        group: The other group.
        columns: The columns of ``per_client.csv`` of the reference and of the other group.
        metric: The metric in these columns.
    """
    pairs = list(_match_results(reference, group, columns))
    if not pairs:
        return None
    before, after = (np.concatenate(values) for values in zip(*pairs))
    lower = is_lower_better([*reference.runs, *group.runs], metric)
    return _drop_diverged(before, after, lower)


def pair_models(group: Group, columns: tuple[str, str], metric: str) -> Pairs | None:
    """Return the results of two models of the same clients in each run, or ``None`` without any.

    Args:
        group: The group.
        columns: The columns of ``per_client.csv`` of the reference model and of the other model.
        metric: The metric in these columns.
    """
    runs = [run for run in group.tested_runs if all(column in run.clients for column in columns)]
    if not runs:
        return None
    tables = [
        np.stack([run.clients[column][run.benign] for column in columns])
        for run in group.first_of_seeds(runs)
    ]
    results = np.concatenate(tables, axis=1)
    before, after = results[:, np.isfinite(results[0])]
    return _drop_diverged(before, after, is_lower_better(group.runs, metric))


def _drop_diverged(
    before: NDArray[np.float64], after: NDArray[np.float64], lower_is_better: bool
) -> Pairs | None:
    """Return the pairs with finite results, or ``None`` without any; the others are counted."""
    is_finite = np.isfinite(after)
    if not is_finite.any():
        return None
    diverged = int((~is_finite).sum())
    return Pairs(before[is_finite], after[is_finite], lower_is_better, diverged)


def _match_results(
    reference: Group, group: Group, columns: tuple[str, str]
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Yield the results of the same benign clients in each pair of runs of equal seed and data."""
    for run, other in match_runs(reference, group, columns):
        before, after = run.clients[columns[0]], other.clients[columns[1]]
        valid = run.benign & other.benign & np.isfinite(before)
        yield before[valid], after[valid]


def match_runs(
    reference: Group, group: Group, columns: tuple[str, str]
) -> Iterator[tuple[Run, Run]]:
    """Yield the pairs of runs of equal seed and data with results of their clients.

    Of several runs of one seed, the first one is compared: its clients are not counted twice.

    Args:
        reference: The reference.
        group: The other group.
        columns: The columns of ``per_client.csv`` of the reference and of the other group.
    """
    runs = [run for run in reference.tested_runs if columns[0] in run.clients]
    for run in reference.first_of_seeds(runs):
        for other in group.tested_runs:
            if columns[1] in other.clients and _have_same_clients(run, other):
                yield run, other
                break


def _have_same_clients(run: Run, other: Run) -> bool:
    """Return whether two runs have the same clients: equal seeds and settings of the data."""
    if len(run.benign) != len(other.benign):
        return False
    return _data_settings(run) == _data_settings(other)


def _data_settings(run: Run) -> tuple[str, dict[str, Any]]:
    settings = configs.settings(run.config)
    data = {key: value for key, value in settings.items() if key.startswith("data.")}
    return configs.describe_seeds(run.config), data
