"""The metrics of a federation: means over clients, and fairness between clients and classes.

Fairness between clients is measured as in Ditto (ICML 2021, arXiv 2012.04221): the population
variance of the benign clients' accuracies, and their worst and best 10 %. Fairness between classes
is measured as in FedTilt. The mathematics is in :mod:`pl_fed.functional.fairness`.

Departs from Ditto's code: ``accuracy`` is the unweighted mean over clients. The code prints the
mean over samples, which is ``accuracy_weighted`` here. Departs from FLAME's code: variances are
over the population (n, not n − 1), and of the client's mean loss, not of the sum over its samples.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from pl_fed.functional.client_figures import ClientFigure
from pl_fed.functional.fairness import (
    best_mean,
    class_std,
    jain_index,
    population_std,
    population_var,
    standard_error,
    worst_mean,
)
from pl_fed.functional.group_fairness import GROUP_FIGURES, measure_groups

SUCCESS = "backdoor_success"
"""Name of the success of a backdoor."""

TAKEN_NAMES = ("accuracy", "loss", "class_std", "samples", "byzantine", SUCCESS)
"""Reserved names: no metric of a task may have them."""

_CORRECT, _BENIGN, _TRAINED, _LOSS_SAMPLES = "/correct", "/benign", "/trained", "/loss_samples"
"""Columns of the clients' table that are no metric, by names that no metric has."""

_LOSSES = ("loss", "loss_var")
STATISTICS = ("", "_weighted", "_std", "_var", "_worst10", "_best10", "_jain")
"""Endings of the names of statistics over clients."""
_OF_GAPS = ("", "_worst10", "_undefined")  # endings of the statistics of clients' own gaps
_RANKED = ("_worst10", "_best10")
TRAINED_STATISTICS = ("_trained", "_trained_std", "_trained_worst10")
"""Endings of the names of the statistics over the clients that took part in a round."""
STANDARD_ERROR = "_se"
"""Ending of the name of a mean's standard error, if the evaluated clients are a random sample."""


class ClientMetrics(Metric):
    """Client metrics: accuracy, loss and fairness over benign clients with evaluated samples.

    The states are sums for each client, and processes add them up. Therefore a client may be
    evaluated in parts and in any process.

    A client that never took part has an untrained model of its own, and a figure over such clients
    is about the sampler. As long as a benign client with evaluated samples never took part, three
    statistics of accuracy, loss and each metric of the task are also over the other clients alone:
    ``accuracy_trained`` (the mean), ``accuracy_trained_std`` and ``accuracy_trained_worst10``.

    Args:
        num_clients: Number of clients, at least 1; ids are 0 to ``num_clients - 1``.
        num_classes: Number of classes, or 0 for targets without classes. Then there is no accuracy,
            but all statistics of the loss.
        benign: A mask of the clients to include, bool [num_clients]; ``None`` includes all.
        backdoor: Whether to measure the success of a backdoor: the share of a client's samples that
            a model assigns to the attacker's class after the trigger is added.
            ``backdoor_success`` is the unweighted mean over the clients with such samples,
            ``backdoor_success_worst10`` the mean over the tenth of them with the largest success,
            and ``backdoor_success_max`` that of the worst client.
        measures: Names of the task's metrics, and whether larger values are better. If they are,
            the worst 10 % of the clients are the clients with the smallest values. With ``None``,
            which is unknown, there are no worst and best clients. Clients with an undefined metric
            are not in its statistics.
        trained: A mask of the clients that took part in a round, bool [num_clients]; ``None``
            includes all.
        has_loss: Whether the evaluation gives a loss. Without one, the sums of losses are NaN, and
            no metric is about them.
        sampled: Share of the clients that are drawn at random for the evaluation. With it, each
            mean over clients has a standard error: ``accuracy_se``. ``None`` if all clients are
            evaluated.
        figures: Further statistics over clients of accuracy, loss and each metric of the task. A
            figure that needs worst clients is left out for a metric of unknown direction.
        num_groups: Number of groups of samples, or 0. With groups and classes, there are gaps
            between groups: ``group/equalized_odds`` over the samples of all included clients
            together, and ``group/client_equalized_odds``, the mean of the clients' own gaps, with
            ``_worst10`` and the number of clients without a gap, ``_undefined``. The other figures
            are those of ``pl_fed.functional.group_fairness.GROUP_FIGURES``.

    Shape of :meth:`update`, with C = max(1, num_classes):
        - ``clients``: ids, int64 [n]; an id may occur more than once.
        - ``correct``, ``count``: correct samples and samples of each true class, [n, C].
        - ``loss_sum``: sum of the losses over the samples, [n].
        - ``has_loss``: whether the loss is defined, bool [n]; by default it is. A client without a
          counted token, say, is not in the statistics of the loss. NaN is a defined loss: that of a
          diverged model.
        - ``measures``: each client's own value of each metric, [n]; NaN if it is undefined.
        - ``misled``, ``triggered``: samples misled by a trigger, and samples with a trigger, [n].
        - ``groups``: counts by group and class, [n, 3, groups, C]; needed with groups.

    Raises:
        TypeError: If ``benign`` or ``trained`` is not a bool tensor.
        ValueError: If a number is out of range or a shape does not fit.

    Example:
        >>> metric = ClientMetrics(num_clients=3, num_classes=2)
        >>> correct, count = torch.tensor([[1, 2], [1, 0]]), torch.tensor([[2, 2], [4, 0]])
        >>> metric.update(torch.tensor([0, 2]), correct, count, loss_sum=torch.tensor([2.0, 6.0]))
        >>> metric.compute()["accuracy"], metric.compute()["accuracy_weighted"]
        (tensor(0.5000, dtype=torch.float64), tensor(0.5000, dtype=torch.float64))
        >>> metric.per_client()["loss"]
        tensor([0.5000,    nan, 1.5000], dtype=torch.float64)
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = None

    correct: Tensor
    count: Tensor
    loss_sum: Tensor
    loss_samples: Tensor
    benign: Tensor
    trained: Tensor
    misled: Tensor
    triggered: Tensor
    values: Tensor
    group_counts: Tensor

    def __init__(
        self,
        num_clients: int,
        num_classes: int,
        benign: Tensor | None = None,
        backdoor: bool = False,
        measures: Mapping[str, bool | None] | None = None,
        trained: Tensor | None = None,
        has_loss: bool = True,
        sampled: float | None = None,
        figures: Sequence[ClientFigure] = (),
        num_groups: int = 0,
    ) -> None:
        super().__init__()
        if num_clients < 1:
            raise ValueError(
                f"Expected argument `num_clients` to be at least 1 but got {num_clients}."
            )
        if num_classes < 0:
            raise ValueError(
                f"Expected argument `num_classes` to be at least 0 but got {num_classes}."
            )
        self.num_clients = num_clients
        self.num_classes = num_classes
        self.backdoor = backdoor
        self.has_loss = has_loss
        self.sampled = sampled
        self.figures = tuple(figures)
        self.num_groups = num_groups if num_classes else 0
        self.measures = dict(measures or {})
        for name, mask in (("benign", benign), ("trained", trained)):
            self.register_buffer(name, _copy_mask(name, mask, num_clients), persistent=False)
        table = torch.zeros(num_clients, max(1, num_classes), dtype=torch.int64)
        self.add_state("correct", default=table, dist_reduce_fx="sum")
        self.add_state("count", default=table.clone(), dist_reduce_fx="sum")
        # float64: a float32 sum would depend on the distribution of the samples over processes
        losses = torch.zeros(num_clients, dtype=torch.float64)
        self.add_state("loss_sum", default=losses, dist_reduce_fx="sum")
        self.add_state("loss_samples", default=table[:, 0].clone(), dist_reduce_fx="sum")
        if self.measures:
            values = losses.new_zeros(num_clients, len(self.measures))
            self.add_state("values", default=values, dist_reduce_fx="sum")
        if self.num_groups:
            counts = torch.zeros(num_clients, 3, num_groups, num_classes, dtype=torch.int64)
            self.add_state("group_counts", default=counts, dist_reduce_fx="sum")
        if backdoor:
            samples = torch.zeros(num_clients, dtype=torch.int64)
            self.add_state("misled", default=samples, dist_reduce_fx="sum")
            self.add_state("triggered", default=samples.clone(), dist_reduce_fx="sum")

    def update(
        self,
        clients: Tensor,
        correct: Tensor,
        count: Tensor,
        loss_sum: Tensor,
        misled: Tensor | None = None,
        triggered: Tensor | None = None,
        measures: Mapping[str, Tensor] | None = None,
        groups: Tensor | None = None,
        has_loss: Tensor | None = None,
    ) -> None:
        """Add the results of evaluated clients; the class documents the shapes."""
        expected = (len(clients), max(1, self.num_classes))
        for name, table in (("correct", correct), ("count", count)):
            if table.shape != expected:
                raise ValueError(
                    f"Expected argument `{name}` to be of shape {list(expected)} "
                    f"but got shape {list(table.shape)}."
                )
        columns = {
            "loss_sum": loss_sum,
            "has_loss": has_loss,
            "misled": misled,
            "triggered": triggered,
            **(measures or {}),
        }
        for name, values in columns.items():
            if values is not None and values.shape != expected[:1]:
                raise ValueError(
                    f"Expected argument `{name}` to be of shape {list(expected[:1])} "
                    f"but got shape {list(values.shape)}."
                )
        if self.num_groups:
            self._add_groups(clients, groups)
        self.correct.index_add_(0, clients, correct.to(torch.int64))
        self.count.index_add_(0, clients, count.to(torch.int64))
        loss_samples = count.to(torch.int64).sum(1)
        if has_loss is not None:
            loss_sum = loss_sum.masked_fill(~has_loss, 0)
            loss_samples = loss_samples * has_loss
        self.loss_sum.index_add_(0, clients, loss_sum.double())
        self.loss_samples.index_add_(0, clients, loss_samples)
        for column, name in enumerate(self.measures):
            values = (measures or {})[name].double()
            self.values[:, column].index_add_(0, clients, values)
        if misled is not None and triggered is not None:
            self.misled.index_add_(0, clients, misled.to(torch.int64))
            self.triggered.index_add_(0, clients, triggered.to(torch.int64))

    def _add_groups(self, clients: Tensor, groups: Tensor | None) -> None:
        """Add the counts of clients by group and class."""
        expected = (len(clients), *self.group_counts.shape[1:])
        if groups is None or groups.shape != expected:
            got = None if groups is None else f"shape {list(groups.shape)}"
            raise ValueError(
                f"Expected argument `groups` to be of shape {list(expected)} but got {got}."
            )
        self.group_counts.index_add_(0, clients, groups)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics of :meth:`compute`.

        The success of a backdoor is missing there if no sample could be misled. The statistics of a
        task's metric are missing if it is undefined for all clients; ``<metric>_undefined`` is the
        number of clients without a value. The statistics over the clients that took part are not
        among the names: they end when every client has taken part.
        """
        suffixes = (*STATISTICS, "_undefined")
        measures = [
            f"{name}{suffix}"
            for name, higher_is_better in self.measures.items()
            for suffix in suffixes
            if higher_is_better is not None or suffix not in _RANKED
        ]
        if self.sampled is not None:
            measures += [f"{name}{STANDARD_ERROR}" for name in self._directions]
        figures = [name for name, *_ in self._list_figures()]
        if self.num_classes == 0:
            losses = (*_LOSSES, *(f"loss{suffix}" for suffix in STATISTICS))
            return _join_names(measures, losses if self.has_loss else (), figures)
        accuracies = (f"accuracy{suffix}" for suffix in STATISTICS)
        endings = ("", "_worst10", "_max") if self.backdoor else ()
        success = tuple(f"{SUCCESS}{ending}" for ending in endings)
        class_stds = ("class_std_mean", "class_std_std")
        groups = [f"group/{name}" for name in GROUP_FIGURES] if self.num_groups else []
        groups += [
            f"group/client_{name.removeprefix('group/')}{ending}"
            for name in list(groups)
            for ending in _OF_GAPS
        ]
        return _join_names(accuracies, _LOSSES, class_stds, measures, success, figures, groups)

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics by name, float64 scalars; empty if no benign client was evaluated.

        They are on the CPU, where Lightning reads each number without waiting for a GPU.
        """
        clients = self._columns()
        included = clients.pop(_BENIGN) & (clients["samples"] > 0)
        if not included.any():
            return {}
        trained = clients.pop(_TRAINED)[included]
        clients = {name: column[included] for name, column in clients.items()}
        statistics = self._statistics_of_all(clients)
        statistics |= self._standard_errors(clients)
        for name, value in self._compute_figures(clients).items():
            statistics.setdefault(name, value)
        if self.num_groups:
            statistics |= self._group_statistics(clients)
        return statistics | self._statistics_of_trained(clients, trained)

    @property
    def _directions(self) -> dict[str, bool | None]:
        """The metrics with one value for each client, and whether larger values are better."""
        accuracies: dict[str, bool | None] = {"accuracy": True} if self.num_classes else {}
        losses: dict[str, bool | None] = {"loss": False} if self.has_loss else {}
        return {**accuracies, **losses, **self.measures}

    def _group_statistics(self, clients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gaps over all samples of the included clients, and over clients."""
        pooled = measure_groups(self.group_counts[self.benign].sum(0))
        statistics = {f"group/{name}": value.cpu() for name, value in pooled.items()}
        for name in GROUP_FIGURES:
            values, title = clients[f"group_{name}"], f"group/client_{name}"
            is_higher_better = name == GROUP_FIGURES[-1]
            defined = ~values.isnan()
            found = _statistics(
                title, values[defined], clients["samples"][defined], is_higher_better
            )
            found[f"{title}_undefined"] = values.isnan().sum().double()
            statistics |= {
                f"{title}{end}": found[f"{title}{end}"] for end in _OF_GAPS if title + end in found
            }
        return statistics

    def _list_figures(self) -> Iterator[tuple[str, str, ClientFigure]]:
        """Yield the name of each further statistic, its metric, and the figure."""
        for metric, higher_is_better in self._directions.items():
            for figure in self.figures:
                if higher_is_better is not None or not figure.is_ranked:
                    yield f"{metric}_{figure.name}", metric, figure

    def _compute_figures(self, clients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the further statistics over the clients with a defined value of the metric."""
        numbers = {}
        for name, metric, figure in self._list_figures():
            values = clients[metric][_is_defined(clients, metric)]
            if len(values):
                number = figure.compute(values.numpy(), self._directions[metric])
                numbers[name] = torch.tensor(number, dtype=torch.float64)
        return numbers

    def _standard_errors(self, clients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the standard errors of the means over a sample of at least two clients."""
        if self.sampled is None:
            return {}
        errors = {}
        for name in self._directions:
            values = clients[name][_is_defined(clients, name)]
            if len(values) > 1:
                errors[f"{name}{STANDARD_ERROR}"] = standard_error(values, self.sampled)
        return errors

    def _statistics_of_all(self, clients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the metrics over clients, from the columns of their table."""
        measures: dict[str, Tensor] = {}
        for name, higher_is_better in self.measures.items():
            measures |= _statistics_of(clients, name, higher_is_better)
            measures[f"{name}_undefined"] = clients[name].isnan().sum().double()
        if self.num_classes == 0 and not self.has_loss:
            return measures
        all_losses = _statistics_of(clients, "loss", higher_is_better=False)
        losses = {name: all_losses[name] for name in _LOSSES if name in all_losses}
        if self.num_classes == 0:
            return measures | losses | all_losses
        samples, accuracy, class_stds = (
            clients[name] for name in ("samples", "accuracy", "class_std")
        )
        return {
            "accuracy": accuracy.mean(),
            "accuracy_weighted": clients[_CORRECT].sum().double() / samples.sum(),
            "accuracy_std": population_std(accuracy),
            "accuracy_var": population_var(accuracy),
            "accuracy_worst10": worst_mean(accuracy),
            "accuracy_best10": best_mean(accuracy),
            "accuracy_jain": jain_index(accuracy),
            **losses,
            "class_std_mean": class_stds.mean(),
            "class_std_std": population_std(class_stds),
            **measures,
            **_success_statistics(clients),
        }

    def _statistics_of_trained(
        self, clients: Mapping[str, Tensor], trained: Tensor
    ) -> dict[str, Tensor]:
        """Return the statistics over the clients that took part; empty if all or none took part.

        Args:
            clients: The columns of the clients' table.
            trained: Whether each client took part, bool [clients].
        """
        if trained.all() or not trained.any():
            return {}
        metrics = {}
        of_trained = {name: column[trained] for name, column in clients.items()}
        for name, higher_is_better in self._directions.items():
            statistics = _statistics_of(of_trained, name, higher_is_better)
            for ending in TRAINED_STATISTICS:
                if (of_all := f"{name}{ending.removeprefix('_trained')}") in statistics:
                    metrics[f"{name}{ending}"] = statistics[of_all]
        return metrics

    def per_client(self) -> dict[str, Tensor]:
        """Return a table of all clients, benign and Byzantine, summed over the processes.

        Every process must call this method, like :meth:`compute`.

        Returns:
            Columns on the CPU: ``samples`` and ``byzantine`` (int64; 1 for an attacker),
            ``accuracy``, ``loss`` and ``class_std`` (float64), each [num_clients]; NaN for a client
            without evaluated samples, and for a loss that is undefined. Accuracy and ``class_std``
            are also NaN for targets without classes. A column for each metric of the task. With
            groups, ``group_equalized_odds`` and the other gaps; NaN if undefined. With
            ``backdoor``, the column ``backdoor_success``; NaN if no sample could be misled.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            columns = self._columns()
            for name in (_CORRECT, _TRAINED, _LOSS_SAMPLES):
                del columns[name]
            return columns | {"byzantine": (~columns.pop(_BENIGN)).to(torch.int64)}

    def per_class(self) -> tuple[Tensor, Tensor]:
        """Return the accuracy of all clients, benign and Byzantine, in each class.

        Every process must call this method, like :meth:`compute`; it sums over the processes.

        Returns:
            Accuracy (float64; NaN if a client has no evaluated sample of a class) and number of
            samples (int64), each [num_clients, num_classes]; no columns without classes.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            correct, count = self.correct[:, : self.num_classes], self.count[:, : self.num_classes]
            return correct.double() / count, count.clone()

    def per_group(self) -> tuple[Tensor, Tensor]:
        """Return the accuracy of all clients, benign and Byzantine, in each group.

        Every process must call this method, like :meth:`compute`; it sums over the processes.

        Returns:
            Accuracy (float64; NaN if a client has no evaluated sample of a group) and number of
            samples (int64), each [num_clients, num_groups]; no columns without groups.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            if not self.num_groups:
                return self.loss_sum.new_zeros(self.num_clients, 0), self.count[:, :0].clone()
            samples, _, correct = self.group_counts.sum(-1).unbind(1)
            return correct.double() / samples, samples

    def _columns(self) -> dict[str, Tensor]:
        """Return the columns of the clients' table, on the CPU."""
        columns = {**self._device_columns(), _BENIGN: self.benign, _TRAINED: self.trained}
        if not self.benign.is_cuda:
            return columns
        joined = torch.stack([column.double() for column in columns.values()]).cpu()  # one copy
        return {name: row.to(columns[name].dtype) for name, row in zip(columns, joined)}

    def _device_columns(self) -> dict[str, Tensor]:
        samples = self.count.sum(dim=1)
        if self.num_classes == 0:
            accuracy = class_stds = torch.full_like(self.loss_sum, torch.nan)
        else:
            accuracy = self.correct.sum(dim=1).double() / samples  # 0 / 0 is NaN
            class_stds = class_std(self.correct, self.count)
        columns = {
            _CORRECT: self.correct.sum(dim=1),
            "samples": samples,
            "accuracy": accuracy,
            _LOSS_SAMPLES: self.loss_samples,
            "loss": self.loss_sum / self.loss_samples,
            "class_std": class_stds,
        }
        for column, name in enumerate(self.measures):
            columns[name] = self.values[:, column].masked_fill(samples == 0, torch.nan)
        if self.num_groups:
            gaps = measure_groups(self.group_counts)
            columns |= {f"group_{name}": values for name, values in gaps.items()}
        if self.backdoor:
            columns[SUCCESS] = self.misled.double() / self.triggered
        return columns


def _copy_mask(name: str, mask: Tensor | None, num_clients: int) -> Tensor:
    """Return a copy of a mask of clients; ``None`` includes all.

    Raises:
        TypeError: If it is not a bool tensor.
        ValueError: If it has another shape.
    """
    if mask is None:
        return torch.ones(num_clients, dtype=torch.bool)
    if mask.dtype != torch.bool:
        raise TypeError(f"Expected argument `{name}` to be a bool tensor but got {mask.dtype}.")
    if mask.shape != (num_clients,):
        raise ValueError(
            f"Expected argument `{name}` to be of shape [{num_clients}] "
            f"but got shape {list(mask.shape)}."
        )
    return mask.clone()


def _join_names(*groups: Iterable[str]) -> tuple[str, ...]:
    """Return the names of several groups without repetition, in order."""
    return tuple(dict.fromkeys(name for group in groups for name in group))


def _is_defined(clients: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the mask of the clients with a defined value of a metric, bool [clients].

    A loss of NaN is defined if samples count in it: the model has diverged.
    """
    return clients[_LOSS_SAMPLES] > 0 if name == "loss" else ~clients[name].isnan()


def _statistics_of(
    clients: Mapping[str, Tensor], name: str, higher_is_better: bool | None
) -> dict[str, Tensor]:
    """Return the statistics of a metric over the clients with a defined value of it.

    Args:
        clients: The columns of the clients' table.
        name: The name of the metric.
        higher_is_better: As for :func:`_statistics`.
    """
    defined = _is_defined(clients, name)
    return _statistics(name, clients[name][defined], clients["samples"][defined], higher_is_better)


def _statistics(
    name: str, values: Tensor, samples: Tensor, higher_is_better: bool | None
) -> dict[str, Tensor]:
    """Return the statistics of a metric over clients; empty without a client.

    Args:
        name: The name of the metric.
        values: The value of each client, [clients].
        samples: The number of samples of each client, [clients].
        higher_is_better: Whether the clients with the smallest values are the worst; ``None`` if
            unknown, and then no client is the worst or the best.
    """
    if not len(values):
        return {}
    largest = torch.where(values.isnan().any(), torch.nan, best_mean(values))
    worst, best = worst_mean(values), largest
    if not higher_is_better:
        worst, best = best, worst
    ranked = {} if higher_is_better is None else {f"{name}_worst10": worst, f"{name}_best10": best}
    return {
        name: values.mean(),
        f"{name}_weighted": (values * samples).sum() / samples.sum(),
        f"{name}_std": population_std(values),
        f"{name}_var": population_var(values),
        **ranked,
        f"{name}_jain": jain_index(values),
    }


def _success_statistics(clients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return mean, worst 10 % and maximum of a backdoor's success over clients with a trigger.

    Empty without a backdoor or a sample to mislead.
    """
    success = clients.get(SUCCESS)
    if success is None or success.isnan().all():
        return {}
    defined = success[~success.isnan()]
    return {
        SUCCESS: success.nanmean(),
        f"{SUCCESS}_worst10": best_mean(defined),  # the worst clients have the largest success
        f"{SUCCESS}_max": defined.max(),
    }
