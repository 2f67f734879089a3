"""The mean loss of each client on its data, as in training, from batches of outputs."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.kept_parts import task_parts
from pl_fed.evaluation.sample_collector import SampleCollector
from pl_fed.nets.kept_values import ValueGuard
from pl_fed.trees import Tree, count_samples


class ClientLosses(ABC):
    """Client losses: the mean loss of each client, accumulated over batches of samples.

    Args:
        client: The algorithm; its task defines the loss.
        num_clients: Number of clients.
        device: The device of the outputs.
    """

    def __init__(self, client: Client, num_clients: int, device: torch.device) -> None:
        self.client = client
        self._losses = torch.zeros(num_clients, dtype=torch.float64, device=device)
        self._weights = torch.zeros_like(self._losses)

    @classmethod
    def create(cls, client: Client, sizes: Tensor, device: torch.device) -> "ClientLosses":
        """Return the client losses for the criterion of an algorithm.

        Args:
            client: The algorithm.
            sizes: Number of samples of each client, int64 [clients].
            device: The device of the outputs.
        """
        if client.averages_samples:
            return SampleMeans(client, len(sizes), device)
        return CriterionValues(client, sizes, device)

    @abstractmethod
    def add(self, positions: Tensor, outputs: Tree, targets: Tree) -> None:
        """Add samples; ``positions`` are the positions of their clients, int64 [samples]."""

    def forget(self, position: int) -> None:
        """Reset the loss of the client at a position."""
        self._losses[position] = self._weights[position] = 0

    @property
    def is_defined(self) -> Tensor:
        """Whether a sample counts in the mean loss of each client, bool [clients].

        None does if all labels are ignored, or all classes have the weight 0.
        """
        return self._weights != 0

    @property
    def means(self) -> Tensor:
        """The mean losses, float64 [clients]; 0 for a client without a sample that counts."""
        return self._losses / torch.where(self._weights == 0, 1, self._weights)


class SampleMeans(ClientLosses):
    """Sample means: the mean of the samples' losses, weighted by the weights of their classes."""

    def add(self, positions: Tensor, outputs: Tree, targets: Tree) -> None:
        """Add samples; ``positions`` are the positions of their clients, int64 [samples]."""
        losses = self.client.sample_losses(outputs, targets)
        weights = self.client.sample_weights(targets)
        weights = torch.ones_like(losses) if weights is None else weights
        self._losses.index_add_(0, positions, losses.double())
        self._weights.index_add_(0, positions, weights.double())


class CriterionValues(ClientLosses):
    """Criterion values: the value of the criterion on all samples of a client together.

    If a client's outputs take more than 256 MB, it is the mean of the values on parts of the
    samples, weighted by the parts' sizes. For such a criterion this may be another number.

    Args:
        client: The algorithm.
        sizes: Number of samples of each client; the outputs of a complete client are released.
        device: The device of the outputs.
    """

    def __init__(self, client: Client, sizes: Tensor, device: torch.device) -> None:
        super().__init__(client, len(sizes), device)
        self._collector = SampleCollector(sizes.tolist())
        self._guard = ValueGuard(task_parts(client))

    def add(self, positions: Tensor, outputs: Tree, targets: Tree) -> None:
        """Add samples; ``positions`` are the positions of their clients, int64 [samples]."""
        for position, own_outputs, own_targets in self._collector.add(positions, outputs, targets):
            num_samples = count_samples(own_targets)
            loss = self.client.task.batch_loss(own_outputs, own_targets)
            self._losses[position] += loss.double() * num_samples
            self._weights[position] += num_samples
            self._guard.restore()

    def forget(self, position: int) -> None:
        """Reset the loss of the client at a position."""
        super().forget(position)
        self._collector.forget(position)
