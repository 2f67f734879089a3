"""The contract of a skew."""

from abc import ABC, abstractmethod

from torch import Tensor

from pl_fed.configurable import Configurable


class Skew(Configurable, ABC):
    """Skew: a change of the inputs that depends on the client, made once before training.

    A skew changes training, validation and test samples in the same way, because it is a property
    of the client's data. Seed, client and the position of a sample in the client's data key all
    draws.

    Attributes:
        after_normalizing: Whether pl_fed normalises inputs before the change.

    Example:
        >>> import torch
        >>> class Brighter(Skew):
        ...     def change(self, x, client, num_clients, seed):
        ...         return x + client / num_clients
        >>> Brighter().change(torch.zeros(1, 2), client=1, num_clients=4, seed=0)
        tensor([[0.2500, 0.2500]])
    """

    after_normalizing: bool = False

    @abstractmethod
    def change(self, x: Tensor, client: int, num_clients: int, seed: int) -> Tensor:
        """Return the changed inputs of a client.

        Args:
            x: Inputs of the client, [samples, ...]; not changed.
            client: Id of the client, from 0.
            num_clients: Number of clients.
            seed: The seed of the data.

        Returns:
            A tensor of the shape of ``x``.
        """


def require_images(x: Tensor, skew: Skew, channels: int | None = None) -> None:
    """Raise ``ValueError`` unless inputs are images [samples, channels, height, width]."""
    if x.ndim != 4 or channels not in (None, x.shape[1]):
        expected = "channels" if channels is None else str(channels)
        raise ValueError(
            f"Expected inputs of shape [samples, {expected}, height, width] for"
            f" {type(skew).__name__} but got {list(x.shape)}."
        )
