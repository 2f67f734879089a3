"""The mean loss of each client on its data, as training takes it, from batches of outputs."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.evaluation.waiting import WaitingSamples
from pl_fed.trees import Tree, rows_of


class ClientLosses(ABC):
    """The losses of some clients, of whose samples batches come one after the other.

    Args:
        client: The algorithm, whose task is taken.
        number: How many clients there are.
        device: Where the outputs are.
    """

    def __init__(self, client: Client, number: int, device: torch.device) -> None:
        self.client = client
        self._losses = torch.zeros(number, dtype=torch.float64, device=device)
        self._weights = torch.zeros_like(self._losses)

    @classmethod
    def of(cls, client: Client, sizes: Tensor, device: torch.device) -> "ClientLosses":
        """Return losses that fit the criterion of an algorithm.

        Args:
            client: The algorithm.
            sizes: How many samples each of the clients has, int64 [clients].
            device: Where the outputs are.
        """
        if client.averages_samples:
            return SampleMeans(client, len(sizes), device)
        return CriterionValues(client, sizes, device)

    @abstractmethod
    def add(self, positions: Tensor, outputs: Tree, targets: Tree) -> None:
        """Add samples, of the clients at these positions, int64 [samples]."""

    def forget(self, position: int) -> None:
        """Begin anew with the client at a position."""
        self._losses[position] = self._weights[position] = 0

    @property
    def means(self) -> Tensor:
        """The losses, float64 [clients]; 0 where no sample counts."""
        return self._losses / torch.where(self._weights == 0, 1, self._weights)


class SampleMeans(ClientLosses):
    """The mean of the losses of single samples, by the weights of their classes."""

    def add(self, positions: Tensor, outputs: Tree, targets: Tree) -> None:
        """Add samples, of the clients at these positions."""
        losses = self.client.sample_losses(outputs, targets)
        weights = self.client.sample_weights(targets)
        weights = torch.ones_like(losses) if weights is None else weights
        self._losses.index_add_(0, positions, losses.double())
        self._weights.index_add_(0, positions, weights.double())


class CriterionValues(ClientLosses):
    """The value of the criterion on all samples of a client together.

    Where a client's outputs take more than 256 MB it is the mean of the values on parts of them,
    weighted by their numbers of samples, which for such a criterion may be another number.

    Args:
        client: The algorithm.
        sizes: How many samples each client has: complete clients are not kept.
        device: Where the outputs are.
    """

    def __init__(self, client: Client, sizes: Tensor, device: torch.device) -> None:
        super().__init__(client, len(sizes), device)
        self._waiting = WaitingSamples(sizes.tolist())

    def add(self, positions: Tensor, outputs: Tree, targets: Tree) -> None:
        """Add samples, of the clients at these positions."""
        for position, own, wanted in self._waiting.add(positions, outputs, targets):
            number = rows_of(wanted)
            self._losses[position] += self.client.task.batch_loss(own, wanted).double() * number
            self._weights[position] += number

    def forget(self, position: int) -> None:
        """Begin anew with the client at a position."""
        super().forget(position)
        self._waiting.forget(position)
