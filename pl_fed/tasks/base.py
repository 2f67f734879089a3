"""What every task keeps to."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from pl_fed.configurable import Configurable
from pl_fed.functional.losses import averages_samples, masked_mean
from pl_fed.trees import Tree, leaves, select
from pl_fed.types import Batch


class Task(Configurable, ABC):
    """What a net is trained for: how it turns a batch into a loss, predictions and metrics.

    A task sees the samples of one client and knows nothing of federated learning. A new one is a
    class in a file of its own, named in the config by its path. It defines :meth:`losses`; or, for
    a loss that is only known for a batch as a whole, :meth:`batch_loss` as well.

    Attributes:
        averages_samples: Whether the loss of a batch is the mean of the losses of its samples.
            pl_fed finds out on the clients' data before training. Where it is not,
            :meth:`batch_loss` is called on batches without padding.

    Example:
        >>> class Distance(Task):
        ...     def losses(self, outputs, targets):
        ...         return (outputs - targets).abs().sum(1)
        >>> net, batch = torch.nn.Identity(), Batch(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]))
        >>> Distance().loss(net, batch), Distance().loss(net, batch.part(slice(0, 1)))
        (tensor(2.), tensor(1.))
    """

    averages_samples: bool = True

    @property
    def name(self) -> str:
        """What messages call the task's loss."""
        return type(self).__name__

    def predict(self, net: Callable[..., Any], inputs: Tree) -> Tree:
        """Return a net's outputs: ``net(inputs)``, ``net(*inputs)`` or ``net(**inputs)``.

        Args:
            net: The net.
            inputs: A tensor [batch, ...], or a tuple or dict of such.

        Returns:
            A tensor [batch, ...], or a tuple or dict of such.
        """
        if isinstance(inputs, dict):
            return net(**inputs)
        if isinstance(inputs, tuple | list):
            return net(*inputs)
        return net(inputs)

    @abstractmethod
    def losses(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the loss of each sample, [batch]; times its weight, where there are weights.

        Algorithms call it under ``torch.vmap``, and on samples that are padding.

        Raises:
            ValueError: If the loss is only known for a batch as a whole.
        """

    def weights(self, targets: Tree) -> Tensor | None:
        """Return how much each sample counts in the mean, [batch]; ``None`` if all count once."""
        return None

    def batch_loss(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the loss of samples none of which is padding: what is minimised and logged."""
        return masked_mean(self.losses(outputs, targets), None, self.weights(targets))

    def loss(self, net: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the loss of a net over the samples of a batch that count."""
        return self.mean_loss(self.predict(net, batch.inputs), batch)

    def mean_loss(self, outputs: Tree, batch: Batch) -> Tensor:
        """Return the loss of outputs over the samples of a batch that count."""
        if not self.averages_samples:
            return self._unpadded_loss(outputs, batch)
        weights = self.weights(batch.targets)
        if batch.mask is None and weights is None:
            return self.batch_loss(outputs, batch.targets)
        return masked_mean(self.losses(outputs, batch.targets), batch.mask, weights)

    def _unpadded_loss(self, outputs: Tree, batch: Batch) -> Tensor:
        """Return the loss of the samples that count, taken alone; 0 without any."""
        targets = batch.targets
        if batch.mask is not None:
            counting = batch.mask.nonzero().flatten()
            if not len(counting):
                return 0 * leaves(outputs)[0].sum()
            outputs, targets = select(outputs, counting), select(targets, counting)
        return self.batch_loss(outputs, targets)

    def agrees(self, outputs: Tree, targets: Tree) -> bool:
        """Return whether the loss of samples is the mean of their losses, also beside padding."""
        return averages_samples(self.batch_loss, self.losses, outputs, targets, self.weights)

    # What is measured

    def metrics(self) -> MetricCollection | dict[str, Any]:
        """Return what is measured beside the loss, by name: computed for each client by itself.

        Each metric is updated by :meth:`measured`. By default there is none.
        """
        return {}

    def measured(self, outputs: Tree, targets: Tree) -> tuple[Any, Any]:
        """Return predictions and targets as the metrics take them."""
        return outputs, targets

    def predictions(self, outputs: Tree) -> dict[str, Tensor]:
        """Return what ``predict`` gives of a client's samples: columns [samples, ...] by name.

        One is called ``prediction``. By default these are the outputs.
        """
        return {"prediction": outputs}

    def num_classes(self, data_classes: int) -> int:
        """Return of how many classes a sample has one; 0 where it has none, or several.

        Args:
            data_classes: What the data say: 0 unless each target is a class id.
        """
        return 0

    # What is checked before training

    def check_targets(self, targets: Tree, data_classes: int) -> None:
        """Refuse data that the task does not fit.

        Args:
            targets: All targets.
            data_classes: See :meth:`num_classes`.

        Raises:
            ValueError: If they do not fit.
        """

    def check_outputs(self, outputs: Tree, targets: Tree, data_classes: int) -> None:
        """Refuse a net that the task does not fit.

        Args:
            outputs: What the net gives for a few samples.
            targets: Their targets.
            data_classes: See :meth:`num_classes`.

        Raises:
            ValueError: If they do not fit.
        """


def check_tensor(outputs: object) -> None:
    """Raise ``ValueError`` unless a net gives a tensor."""
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"Expected argument `net` to give a tensor but got {type(outputs).__name__}."
        )


def as_floats(outputs: Tensor) -> Tensor:
    """Return outputs in float32 at least."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))
