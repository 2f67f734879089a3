"""The benefit of a federation over local training, client by client: who should join?"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pl_fed.functional.rank_correlation import rank_correlation
from pl_fed.reports import configs
from pl_fed.reports.group import choose_metric, is_higher_better
from pl_fed.reports.run import Run, read_run, sort_models

_COLUMNS = ("client", "train_samples", "test_samples")
_LARGEST_LOSS = "largest loss"
_SETTINGS = (  # of the data, with those below them: they decide each client's samples
    *("dataset", "partitioner", "num_clients", "split", "val_fraction", "test_fraction", "skew"),
    *("root_samples", "central", "held_out_clients", "stable_cut"),
)


@dataclass(frozen=True)
class Benefit:
    """Benefit: the results of the same clients with and without a federation.

    Attributes:
        clients: The ids of the clients: benign ones with a result in both runs, int64 [clients].
        alone: Their results by local training, [clients].
        joined: Their results in the federation, [clients].
        train_samples: Their numbers of training samples, [clients]; NaN if unknown.
        lower_is_better: Whether smaller results are better.
        num_diverged: The number of further clients whose result in the federation is infinite or
            NaN, and that by local training is not. Shares count them among those that lose.

    Example:
        >>> ids, alone = np.arange(4), np.array([0.5, 0.5, 0.75, 1.0])
        >>> joined = np.array([0.75, 0.5, 1.0, 0.5])
        >>> benefit = Benefit(ids, alone, joined, np.array([9.0, 9.0, 5.0, 40.0]))
        >>> benefit.share_gaining, benefit.mean_gain, benefit.mean_loss, benefit.largest_loss
        (0.5, 0.25, 0.5, 0.5)
    """

    clients: NDArray[np.int64]
    alone: NDArray[np.float64]
    joined: NDArray[np.float64]
    train_samples: NDArray[np.float64]
    lower_is_better: bool = False
    num_diverged: int = 0

    @property
    def gains(self) -> NDArray[np.float64]:
        """The differences from local training, positive where a client is better off, [clients]."""
        differences = self.joined - self.alone
        return -differences if self.lower_is_better else differences

    @property
    def mean(self) -> float:
        """The mean of all finite gains."""
        return float(self.gains.mean())

    @property
    def share_gaining(self) -> float:
        """The share of the clients that are better off."""
        return float((self.gains > 0).sum() / (len(self.gains) + self.num_diverged))

    @property
    def share_losing(self) -> float:
        """The share of the clients that are worse off."""
        losing = (self.gains < 0).sum() + self.num_diverged
        return float(losing / (len(self.gains) + self.num_diverged))

    @property
    def mean_gain(self) -> float | None:
        """The mean gain of the clients that gain; ``None`` without any."""
        gaining = self.gains > 0
        return float(self.gains[gaining].mean()) if gaining.any() else None

    @property
    def mean_loss(self) -> float | None:
        """The mean finite loss of the clients that lose, above 0; ``None`` without any."""
        losing = self.gains < 0
        return float(-self.gains[losing].mean()) if losing.any() else None

    @property
    def largest_loss(self) -> float:
        """The largest loss of a client; 0 if no client loses, and infinite if one has diverged."""
        return np.inf if self.num_diverged else max(0.0, float(-self.gains.min()))

    @property
    def is_harmful(self) -> bool:
        """Whether a client is worse off."""
        return self.share_losing > 0

    def correlate(self, values: NDArray[np.float64]) -> float | None:
        """Return Spearman's rank correlation of the gains with a property of the clients.

        Args:
            values: The property of each client, [clients].

        Returns:
            The correlation in [−1, 1]; ``None`` if the property is undefined or always the same.
        """
        if not np.isfinite(values).all():
            return None
        correlation = rank_correlation(self.gains, values)
        return correlation if np.isfinite(correlation) else None


def measure_benefit(
    folder: str | Path, local: str | Path, metric: str | None = None, model: str | None = None
) -> Benefit:
    """Return the benefit of a federation over local training, from the folders of two runs.

    Both runs need a test, and the same clients with the same samples: equal seeds and settings of
    the data.

    Args:
        folder: The folder of the federation's run.
        local: The folder of the run of local training (:class:`pl_fed.clients.Local`).
        metric: The metric; ``None`` for the accuracy, or the task's first metric.
        model: The federation's model; ``None`` for the personal one, or else the global one.

    Raises:
        NoFitError: If a folder has no run.
        ValueError: If a run lacks the results, the clients differ, or neither run tells whether
            larger values of the metric are better.

    Example: the clients that lose by joining. ::

        benefit = measure_benefit("runs/ditto/seed=0", "runs/local/seed=0")
        print(benefit.clients[benefit.gains < 0], benefit.share_gaining)
    """
    federation, alone = read_run(Path(folder)), read_run(Path(local))
    for name, run in (("folder", federation), ("local", alone)):
        if not run.clients:
            raise ValueError(
                f"Expected argument `{name}` to be the folder of a run with a test but got"
                f" {run.folder}: run `python -m pl_fed test` for it first."
            )
    name = choose_metric([federation, alone], "test") if metric is None else metric
    columns = find_column(federation, name, model), find_column(alone, name, None)
    if reason := find_difference_of_clients(federation, alone):
        raise ValueError(
            "Expected arguments `folder` and `local` to be runs of the same clients but got other"
            f" {reason} in {alone.folder} than in {federation.folder}: give both runs the same"
            " seed and the same `data`."
        )
    is_higher = is_higher_better([federation, alone], name)
    if is_higher is None:
        raise ValueError(
            f"Expected argument `metric` to be one with a known direction but got {name}: list it"
            " in `federation.lower_is_better` or `federation.higher_is_better`, and test the runs"
            " again, or choose another metric."
        )
    benefit = compare_runs(federation, alone, columns, lower_is_better=not is_higher)
    if benefit is None:
        raise ValueError(
            f"Expected arguments `folder` and `local` to have benign clients with a test {name} in"
            f" both runs but got none in {federation.folder} and {alone.folder}."
        )
    return benefit


def compare_runs(
    run: Run, local: Run, columns: tuple[str, str], lower_is_better: bool
) -> Benefit | None:
    """Return the benefit of a run over local training of the same clients, or ``None`` without any.

    Args:
        run: The run of the federation.
        local: The run of local training.
        columns: The columns of ``per_client.csv`` of the federation and of local training.
        lower_is_better: Whether smaller results are better.
    """
    joined, alone = run.clients[columns[0]], local.clients[columns[1]]
    measured = run.benign & local.benign & np.isfinite(alone)
    valid = measured & np.isfinite(joined)
    if not valid.any():
        return None
    num_diverged = int((measured & ~valid).sum())
    ids = run.clients.get("client", np.arange(len(valid))).astype(np.int64)
    samples = run.clients.get("train_samples", np.full(len(valid), np.nan))
    return Benefit(
        ids[valid], alone[valid], joined[valid], samples[valid], lower_is_better, num_diverged
    )


def find_difference_of_clients(run: Run, other: Run) -> str:
    """Return how the clients of two runs differ, as a noun; empty if they are the same.

    Clients are the same if the seed and the settings of the data split, their ids and their
    numbers of samples are.
    """
    seeds = _find_seed(run), _find_seed(other)
    if None not in seeds and seeds[0] != seeds[1]:
        return f"data of the seed {seeds[1]} instead of {seeds[0]}"
    settings = [_select_settings(table.config) for table in (run, other)]
    for key in dict.fromkeys([*settings[0], *settings[1]]) if all(settings) else ():
        if settings[0].get(key) != settings[1].get(key):
            return f"values of `{key}`"
    if len(run.benign) != len(other.benign):
        return f"numbers of clients ({len(other.benign)} instead of {len(run.benign)})"
    for name in _COLUMNS:
        both = [table.clients[name] for table in (run, other) if name in table.clients]
        if len(both) == 2 and not np.array_equal(both[0], both[1]):
            return f"values of `{name}`"
    return ""


def find_column(run: Run, metric: str, model: str | None) -> str:
    """Return the column of a model's results; by default of the model that clients use.

    Args:
        run: The run.
        metric: The metric.
        model: The model; ``None`` for the personal one, or else the global one.

    Raises:
        ValueError: If ``per_client.csv`` has no such column.
    """
    columns = [name for name in run.clients if name.endswith(f"_{metric}")]
    models = sort_models(name.removesuffix(f"_{metric}") for name in columns)
    if tested := run.models("test"):  # otherwise, a longer name of a metric may end like this one
        models = [name for name in models if name in tested]
    if (model is None and not models) or (model is not None and model not in models):
        names = ", ".join(name for name in run.clients if "_" in name)
        raise ValueError(
            f"Expected a column of the test {metric} of the model {model or 'personal or global'}"
            f" in per_client.csv of {run.folder} but got {names}: set `metric` or `model`."
        )
    return f"{model or models[0]}_{metric}"


def _find_seed(run: Run) -> int | None:
    """Return the seed of a run's data split; ``None`` if it is unknown."""
    seeds = run.summary.get("seeds")
    found = seeds.get("data") if isinstance(seeds, Mapping) else None
    flat = configs.flatten(run.config)
    for value in (found, flat.get("data.seed"), flat.get("seed_everything")):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _select_settings(config: configs.Config) -> dict[str, Any]:
    """Return the settings of a config that decide each client's samples, without the seed.

    Settings that are ``None`` or false are left out: configs of earlier versions may lack them.
    """
    flat = configs.flatten(config)
    return {
        key: value
        for key, value in flat.items()
        for name in _SETTINGS
        if value is not None and value is not False
        if key == f"data.{name}" or key.startswith(f"data.{name}.")
    }


def describe_benefit(benefit: Benefit) -> dict[str, Any]:
    """Return the figures of a benefit by their headings in tables."""
    return {
        "share that gains": benefit.share_gaining,
        "mean gain of these": benefit.mean_gain,
        "share that loses": benefit.share_losing,
        "mean loss of these": benefit.mean_loss,
        _LARGEST_LOSS: benefit.largest_loss,
        "correlation with training samples": benefit.correlate(benefit.train_samples),
        "correlation with the local result": benefit.correlate(
            -benefit.alone if benefit.lower_is_better else benefit.alone
        ),
    }


def average_figures(benefits: Sequence[Benefit]) -> dict[str, float | None]:
    """Return the figures of benefits by their headings: means over the seeds that have them.

    The mean and the largest loss are those of the seeds with a client that loses. The largest loss
    is 0 if there is no such seed.

    Args:
        benefits: The benefit for each seed.
    """
    rows = [describe_benefit(benefit) for benefit in benefits]
    harmful = [row for row, benefit in zip(rows, benefits) if benefit.is_harmful]
    means: dict[str, float | None] = {}
    for name in rows[0]:
        selected = harmful if harmful and name == _LARGEST_LOSS else rows
        numbers = [row[name] for row in selected if row[name] is not None]
        means[name] = statistics.fmean(numbers) if numbers else None
    return means
