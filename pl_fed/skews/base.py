"""What every skew keeps to."""

from abc import ABC, abstractmethod

from torch import Tensor

from pl_fed.configurable import Configurable


class Skew(Configurable, ABC):
    """Change the inputs of each client in a way of its own, once, before training.

    All parts are changed alike, train, validation and test: it is how the client's data are. All
    that is drawn is keyed by the seed, the client and the sample's place among the client's.

    Attributes:
        after_normalizing: Whether inputs are normalised before they are changed.

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
        """Return a client's inputs as they are with it.

        Args:
            x: Inputs of the client, [samples, ...]; not changed.
            client: Its id, from 0.
            num_clients: Number of clients.
            seed: The seed of the data.

        Returns:
            Of the shape of ``x``.
        """


def require_images(x: Tensor, skew: Skew, channels: int | None = None) -> None:
    """Raise ``ValueError`` unless inputs are images [samples, channels, height, width]."""
    if x.ndim != 4 or channels not in (None, x.shape[1]):
        wanted = "channels" if channels is None else str(channels)
        raise ValueError(
            f"Expected inputs of shape [samples, {wanted}, height, width] for"
            f" {type(skew).__name__} but got {list(x.shape)}."
        )
