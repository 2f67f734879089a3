"""The contract of a task."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from pl_fed.configurable import Configurable
from pl_fed.functional.losses import averages_samples, masked_mean
from pl_fed.tasks.directions import Directions, metric_direction
from pl_fed.trees import Tree, clone, leaves, select
from pl_fed.types import Batch

_NO_LOGS: AbstractContextManager[Any] = nullcontext({})


class SkippedStepError(Exception):
    """Error: ``training_step`` returned ``None``, which skips the step as in Lightning."""


class Task(Configurable, ABC):
    """Task: a kind of learning problem, with its loss, predictions and metrics.

    A task sees the samples of one client and knows nothing of federated learning. A subclass
    defines :meth:`losses`. If its loss exists only for a whole batch, it also defines
    :meth:`batch_loss`. The config names the class by its path.

    Attributes:
        averages_samples: Whether the loss of a batch is the mean of the losses of its samples.
            pl_fed tests it on the clients' data before training. If it is not, pl_fed calls
            :meth:`batch_loss` on batches without padding.
        changes_inputs: Whether the net changes its inputs in place, and so gets a copy of them: the
            next model has the same minibatch. Determined before training.
        mixes_samples: Whether the net's outputs for a sample depend on the other samples of its
            batch in evaluation mode, too, so that each client is evaluated alone. Determined before
            training.
        runs_steps: Whether the module has steps of its own (:class:`pl_fed.tasks.LightningTask`),
            which replace losses, metrics and predictions of outputs.
        class_dim: The dimension of the classes in the outputs of a task with classes.
        further_metrics: Metrics besides :meth:`metrics`, by name (``federation.metrics``).
        directions: Declared directions (``federation.lower_is_better``, ``higher_is_better``).

    Example:
        >>> class Distance(Task):
        ...     def losses(self, outputs, targets):
        ...         return (outputs - targets).abs().sum(1)
        >>> net, batch = torch.nn.Identity(), Batch(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]))
        >>> Distance().loss(net, batch), Distance().loss(net, batch.part(slice(0, 1)))
        (tensor(2.), tensor(1.))
    """

    averages_samples: bool = True
    changes_inputs: bool = False
    mixes_samples: bool = False
    runs_steps: bool = False
    class_dim: int = 1
    further_metrics: Mapping[str, Metric] = {}
    directions: Directions = Directions()

    @property
    def name(self) -> str:
        """The name of the task's loss in messages."""
        return type(self).__name__

    def predict(self, net: Callable[..., Any], inputs: Tree) -> Tree:
        """Return a net's outputs: ``net(inputs)``, ``net(*inputs)`` or ``net(**inputs)``.

        Args:
            net: The net.
            inputs: A tensor [batch, ...], or a tuple or dict of tensors.

        Returns:
            A tensor [batch, ...], or a tuple or dict of tensors.
        """
        if self.changes_inputs:
            inputs = clone(inputs)
        if isinstance(inputs, dict):
            return net(**inputs)
        if isinstance(inputs, tuple | list):
            return net(*inputs)
        return net(inputs)

    @abstractmethod
    def losses(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the loss of each sample, [batch], times its weight if samples have weights.

        Algorithms call it under ``torch.vmap``, also on samples that are padding.

        Raises:
            ValueError: If the loss exists only for a whole batch.
        """

    def weights(self, targets: Tree) -> Tensor | None:
        """Return the weight of each sample in the mean, [batch]; ``None`` if all weights are 1."""
        return None

    def batch_loss(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the loss of a batch without padding; training minimises and logs this loss."""
        return masked_mean(self.losses(outputs, targets), None, self.weights(targets))

    def loss(self, net: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the loss of a net on a batch, without the samples that ``batch.mask`` excludes."""
        return self.mean_loss(self.predict(net, batch.inputs), batch)

    def mean_loss(self, outputs: Tree, batch: Batch) -> Tensor:
        """Return the loss of outputs, without the samples that ``batch.mask`` excludes."""
        if not self.averages_samples:
            return self._unpadded_loss(outputs, batch)
        weights = self.weights(batch.targets)
        if batch.mask is None and weights is None:
            return self.batch_loss(outputs, batch.targets)
        return masked_mean(self.losses(outputs, batch.targets), batch.mask, weights)

    def _unpadded_loss(self, outputs: Tree, batch: Batch) -> Tensor:
        """Return the loss of the samples that the mask selects; 0 if it selects none."""
        targets = batch.targets
        if batch.mask is not None:
            selected = batch.mask.nonzero().flatten()
            if not len(selected):
                return 0 * leaves(outputs)[0].sum()
            outputs, targets = select(outputs, selected), select(targets, selected)
        return self.batch_loss(outputs, targets)

    def is_sample_mean(self, outputs: Tree, targets: Tree) -> bool:
        """Return whether the batch loss is the mean of the samples' losses, also with padding."""
        return averages_samples(self.batch_loss, self.losses, outputs, targets, self.weights)

    def training_logs(
        self, batch_idx: Any
    ) -> AbstractContextManager[Mapping[int, Mapping[str, Tensor]]]:
        """Return a context of a local step with the values that the step logs; none by default.

        Args:
            batch_idx: The index of the local step.

        Returns:
            A context with the logged values by the id of the module and by name.
        """
        return _NO_LOGS

    def list_gradient_hooks(self, net: nn.Module) -> list[str]:
        """Return the names of the methods of a net that read or change gradients; none by default.

        The engine ``one_by_one`` alone calls them, by :meth:`call_gradient_hook`.
        """
        return []

    def call_gradient_hook(
        self, hook: str, net: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Call a method of a net that reads or changes gradients, if the net has it.

        Args:
            hook: ``on_after_backward``, after each minibatch, or ``on_before_optimizer_step``.
            net: The net.
            optimizer: The local optimizer.
        """

    def without_logs(self) -> AbstractContextManager[Any]:
        """Return a context that drops logged values."""
        return _NO_LOGS

    # Evaluation

    def metric_directions(self) -> Mapping[str, bool | None]:
        """Return the names of all metrics, and whether larger values are better.

        A metric of torchmetrics knows its direction, unless ``federation.lower_is_better`` or
        ``federation.higher_is_better`` has its name; ``None`` is unknown.
        """
        return self._directions_of(self.all_metrics())

    def metric_names(self) -> set[str]:
        """Return all names of the metrics, for checks of settings."""
        return {*self.metric_directions()}

    def further_directions(self) -> dict[str, bool | None]:
        """Return the names and directions of the further metrics."""
        return self._directions_of(self.further_metrics)

    def _directions_of(self, metrics: Mapping[str, Any]) -> dict[str, bool | None]:
        declared = {name: self.directions.find(name) for name in metrics}
        return {
            name: metric_direction(metric) if declared[name] is None else declared[name]
            for name, metric in metrics.items()
        }

    def has_loss(self, part: str) -> bool:
        """Return whether an evaluation of a part (``val`` or ``test``) gives a loss."""
        return True

    def metric_name(self, name: str) -> str:
        """Return the name of a metric in the logs, for its name in ``federation.monitor``."""
        return name

    def metrics(self) -> MetricCollection | dict[str, Any]:
        """Return the task's metrics besides the loss, by name; none by default.

        pl_fed computes each metric for every client, and updates it with the result of
        :meth:`metric_inputs`.
        """
        return {}

    def all_metrics(self) -> dict[str, Any]:
        """Return new metrics by name: :meth:`metrics` and the further metrics."""
        return {**dict(self.metrics().items()), **copy.deepcopy(dict(self.further_metrics))}

    def metric_inputs(self, outputs: Tree, targets: Tree) -> tuple[Any, Any]:
        """Return the arguments of a metric's ``update``: predictions and targets."""
        return outputs, targets

    def predictions(self, outputs: Tree) -> dict[str, Tensor]:
        """Return the predictions for a client's samples: columns [samples, ...] by name.

        One column is ``prediction``, by default the outputs.
        """
        return {"prediction": outputs}

    def num_classes(self, data_classes: int) -> int:
        """Return the number of classes if each sample has exactly one class, and 0 otherwise.

        Args:
            data_classes: Number of classes of the data; 0 unless each target is a class id.
        """
        return 0

    # Checks before training

    def check_inputs(self, inputs: Tree) -> None:
        """Refuse inputs that do not fit the task.

        Args:
            inputs: All inputs.

        Raises:
            ValueError: If the inputs do not fit.
        """

    def check_loss(self, net: nn.Module, inputs: Tree, targets: Tree, loss: Tensor) -> None:
        """Refuse a net with a loss of its own that differs from the task's.

        Args:
            net: The net.
            inputs: The inputs of a few samples.
            targets: The targets of these samples.
            loss: The task's loss for these samples.

        Raises:
            ValueError: If the losses differ.
        """

    def check_targets(self, targets: Tree, data_classes: int) -> None:
        """Refuse data that do not fit the task.

        Args:
            targets: All targets.
            data_classes: Number of classes of the data; 0 unless each target is a class id.

        Raises:
            ValueError: If the targets do not fit.
        """

    def check_outputs(self, outputs: Tree, targets: Tree, data_classes: int) -> None:
        """Refuse a net that does not fit the task.

        Args:
            outputs: The net's outputs for a few samples.
            targets: The targets of these samples.
            data_classes: Number of classes of the data; 0 unless each target is a class id.

        Raises:
            ValueError: If the outputs do not fit.
        """


def check_tensor(outputs: object) -> None:
    """Raise ``ValueError`` unless a net's outputs are a tensor."""
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"Expected argument `net` to return a tensor but got {type(outputs).__name__}."
        )


def as_floats(outputs: Tensor) -> Tensor:
    """Return outputs in float32 or wider."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))
