"""The metrics of a federation: how good a model is on average, and for whom.

Fairness between clients as Ditto measures it (ICML 2021, arXiv 2012.04221: the population variance
of the benign clients' accuracies; its worst and best 10 %), between classes as FedTilt does. The
mathematics is in :mod:`pl_fed.functional.fairness`.

Departs from Ditto's code: ``accuracy`` is the unweighted mean over clients, and the mean over
samples that its code prints is ``accuracy_weighted``. Departs from FLAME's code: variances are over
the population (n, not n − 1), and of the client's loss for each sample, not of its sum.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torchmetrics import Metric

from pl_fed.functional.fairness import (
    best_mean,
    class_std,
    jain_index,
    population_std,
    population_var,
    worst_mean,
)

TAKEN_NAMES = ("accuracy", "loss", "class_std", "samples", "backdoor_success")
"""Names that no metric of a task may have."""

_LOSSES = ("loss", "loss_var")
_FIGURES = ("", "_weighted", "_std", "_var", "_worst10", "_best10", "_jain")


class ClientMetrics(Metric):
    """Accuracy, loss and fairness over the benign clients that have an evaluated sample.

    The states are sums for each client; processes add them up, so that a client may be evaluated in
    parts, anywhere.

    Args:
        num_clients: Number of clients, at least 1; ids are 0 to ``num_clients - 1``.
        num_classes: Number of classes, or 0 for targets that are none, which have no accuracy: then
            there are all figures of the loss.
        benign: Which clients count, bool [num_clients]; ``None`` means all of them.
        backdoor: Whether the success of a backdoor is measured too: the share of a client's samples
            that are taken for the attacker's class once they show its trigger.
            ``backdoor_success`` is the unweighted mean over the clients that have such a sample.
        measures: The names of the task's metrics, and whether larger values are better: the worst
            10 % of the clients are those with the smallest ones then. Clients for whom a metric is
            undefined are not in its figures.

    Shape of :meth:`update`, with C = max(1, num_classes):
        - ``clients``: ids, int64 [n]; one may come more than once.
        - ``correct``, ``count``: correct samples and samples of each true class, [n, C].
        - ``loss_sum``: sum of the losses over the samples, [n].
        - ``measures``: each client's own value of each metric, [n]; NaN where it is undefined.
        - ``misled``, ``triggered``: samples that a trigger misled, and those that showed it, [n].

    Raises:
        TypeError: If ``benign`` is not a bool tensor.
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
    benign: Tensor
    misled: Tensor
    triggered: Tensor
    values: Tensor

    def __init__(
        self,
        num_clients: int,
        num_classes: int,
        benign: Tensor | None = None,
        backdoor: bool = False,
        measures: Mapping[str, bool] | None = None,
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
        if benign is None:
            benign = torch.ones(num_clients, dtype=torch.bool)
        if benign.dtype != torch.bool:
            raise TypeError(
                f"Expected argument `benign` to be a bool tensor but got {benign.dtype}."
            )
        if benign.shape != (num_clients,):
            raise ValueError(
                f"Expected argument `benign` to be of shape [{num_clients}] "
                f"but got shape {list(benign.shape)}."
            )
        self.num_clients = num_clients
        self.num_classes = num_classes
        self.backdoor = backdoor
        self.measures = dict(measures or {})
        self.register_buffer("benign", benign.clone(), persistent=False)
        table = torch.zeros(num_clients, max(1, num_classes), dtype=torch.int64)
        self.add_state("correct", default=table, dist_reduce_fx="sum")
        self.add_state("count", default=table.clone(), dist_reduce_fx="sum")
        # float64: a float32 sum would depend on how the samples are shared out
        losses = torch.zeros(num_clients, dtype=torch.float64)
        self.add_state("loss_sum", default=losses, dist_reduce_fx="sum")
        if self.measures:
            values = losses.new_zeros(num_clients, len(self.measures))
            self.add_state("values", default=values, dist_reduce_fx="sum")
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
    ) -> None:
        """Add what was evaluated of some clients; see the class for the shapes."""
        expected = (len(clients), max(1, self.num_classes))
        for name, table in (("correct", correct), ("count", count)):
            if table.shape != expected:
                raise ValueError(
                    f"Expected argument `{name}` to be of shape {list(expected)} "
                    f"but got shape {list(table.shape)}."
                )
        sums = {"loss_sum": loss_sum, "misled": misled, "triggered": triggered, **(measures or {})}
        for name, each in sums.items():
            if each is not None and each.shape != expected[:1]:
                raise ValueError(
                    f"Expected argument `{name}` to be of shape {list(expected[:1])} "
                    f"but got shape {list(each.shape)}."
                )
        self.correct.index_add_(0, clients, correct.to(torch.int64))
        self.count.index_add_(0, clients, count.to(torch.int64))
        self.loss_sum.index_add_(0, clients, loss_sum.double())
        for place, name in enumerate(self.measures):
            values = self.values[:, place]
            values.index_add_(0, clients, (measures or {})[name].double())
        if misled is not None and triggered is not None:
            self.misled.index_add_(0, clients, misled.to(torch.int64))
            self.triggered.index_add_(0, clients, triggered.to(torch.int64))

    @property
    def names(self) -> tuple[str, ...]:
        """What :meth:`compute` gives; ``backdoor_success`` only if somebody could be misled.

        Of a metric that is undefined for all clients it gives nothing.
        """
        measures = [f"{name}{figure}" for name in self.measures for figure in _FIGURES]
        if self.num_classes == 0:
            losses = dict.fromkeys((*_LOSSES, *(f"loss{figure}" for figure in _FIGURES)))
            return (*measures, *losses)
        accuracies = (f"accuracy{figure}" for figure in _FIGURES)
        success = ("backdoor_success",) if self.backdoor else ()
        others = (*_LOSSES, "class_std_mean", "class_std_std")
        return (*accuracies, *others, *measures, *success)

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics by name, float64 scalars; none if no benign client was evaluated."""
        clients = self._columns()
        counted = self.benign & (clients["samples"] > 0)
        if not counted.any():
            return {}
        clients = {name: column[counted] for name, column in clients.items()}
        loss = clients["loss"]
        losses = {"loss": loss.mean(), "loss_var": population_var(loss)}
        measures: dict[str, Tensor] = {}
        for name, higher_is_better in self.measures.items():
            measures |= _figures(name, clients[name], clients["samples"], higher_is_better)
        if self.num_classes == 0:
            return measures | losses | _figures("loss", loss, clients["samples"], False)
        samples, accuracy, class_stds = (
            clients[name] for name in ("samples", "accuracy", "class_std")
        )
        return {
            "accuracy": accuracy.mean(),
            "accuracy_weighted": self.correct[counted].sum().double() / samples.sum(),
            "accuracy_std": population_std(accuracy),
            "accuracy_var": population_var(accuracy),
            "accuracy_worst10": worst_mean(accuracy),
            "accuracy_best10": best_mean(accuracy),
            "accuracy_jain": jain_index(accuracy),
            **losses,
            "class_std_mean": class_stds.mean(),
            "class_std_std": population_std(class_stds),
            **measures,
            **_mean_success(clients),
        }

    def per_client(self) -> dict[str, Tensor]:
        """Return a table of all clients, byzantine ones too, summed over the processes.

        Every process must call it, as :meth:`compute`.

        Returns:
            Columns ``samples`` (int64), ``accuracy``, ``loss`` and ``class_std`` (float64), each
            [num_clients]; NaN where a client was not evaluated, or its targets are real values.
            A column for each metric of the task. If it is measured ``backdoor_success`` too; NaN
            where no sample could be misled.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return self._columns()

    def per_class(self) -> tuple[Tensor, Tensor]:
        """Return how each client does in each class, byzantine clients too, summed likewise.

        Every process must call it, as :meth:`compute`.

        Returns:
            Accuracy (float64, NaN where a client has no evaluated sample of a class) and samples
            (int64), each [num_clients, num_classes]; no columns where targets are real values.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            correct, count = self.correct[:, : self.num_classes], self.count[:, : self.num_classes]
            return correct.double() / count, count.clone()

    def _columns(self) -> dict[str, Tensor]:
        samples = self.count.sum(dim=1)
        if self.num_classes == 0:
            accuracy = class_stds = torch.full_like(self.loss_sum, torch.nan)
        else:
            accuracy = self.correct.sum(dim=1).double() / samples  # 0 / 0 is NaN
            class_stds = class_std(self.correct, self.count)
        columns = {
            "samples": samples,
            "accuracy": accuracy,
            "loss": self.loss_sum / samples,
            "class_std": class_stds,
        }
        for place, name in enumerate(self.measures):
            columns[name] = self.values[:, place].masked_fill(samples == 0, torch.nan)
        if self.backdoor:
            columns["backdoor_success"] = self.misled.double() / self.triggered
        return columns


def _figures(
    name: str, values: Tensor, samples: Tensor, higher_is_better: bool
) -> dict[str, Tensor]:
    """Return the figures of a metric over the clients for which it is defined.

    Args:
        name: The metric.
        values: Of each client, [clients].
        samples: How many samples each client has, [clients].
        higher_is_better: Whether the worst clients are those with the smallest values.
    """
    if name != "loss":  # a loss that is no number is one of a model that has diverged
        defined = ~values.isnan()
        values, samples = values[defined], samples[defined]
    if not len(values):
        return {}
    largest = torch.where(values.isnan().any(), torch.nan, best_mean(values))
    worst, best = worst_mean(values), largest
    if not higher_is_better:
        worst, best = best, worst
    return {
        name: values.mean(),
        f"{name}_weighted": (values * samples).sum() / samples.sum(),
        f"{name}_std": population_std(values),
        f"{name}_var": population_var(values),
        f"{name}_worst10": worst,
        f"{name}_best10": best,
        f"{name}_jain": jain_index(values),
    }


def _mean_success(clients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return how often a trigger misleads, if there is one, and a client that it may mislead."""
    success = clients.get("backdoor_success")
    if success is None or success.isnan().all():
        return {}
    return {"backdoor_success": success.nanmean()}
