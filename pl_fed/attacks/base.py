"""What every attack keeps to."""

from abc import ABC
from typing import Self

from torch import Tensor

from pl_fed.types import Batch, ClientContext, RoundContext


class Attack(ABC):  # noqa: B024 (either method may be left as it is)
    """What byzantine clients do: poison their training data, forge their uploads, or both.

    A subclass overrides :meth:`poison`, :meth:`forge` or both; the other is the identity. An attack
    has no memory: all it draws is keyed by the context, so that neither the engine, nor the chunks,
    nor a stop and resume changes it.

    Raises:
        TypeError: If ``Attack`` itself is made: it would attack nothing. Leave the attack out.

    Example:
        >>> import torch
        >>> class SignFlip(Attack):
        ...     def forge(self, honest, own, context):
        ...         return -own
        >>> SignFlip().forge(torch.zeros(2, 1), torch.ones(1, 1), RoundContext())
        tensor([[-1.]])
    """

    def __new__(cls, *_: object, **__: object) -> Self:
        """Refuse to make the base class, which has no abstract method to do it."""
        if cls is Attack:
            raise TypeError("Expected a subclass of `Attack` to be made but got `Attack` itself.")
        return super().__new__(cls)

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the training samples of a byzantine client as it pretends that they are.

        Called on any grouping of the client's training samples (a batch, or all of them at once),
        and never on validation or test samples. What happens to a sample depends on the sample,
        its ``batch.samples`` and the context only, so that the grouping does not matter.

        Args:
            batch: Samples of one client; not changed.
            context: The round and the client.

        Returns:
            A batch of the same shapes.
        """
        return batch

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return what the byzantine clients upload.

        Args:
            honest: Uploads of the benign clients of the cohort, shape [h, d]; not changed.
            own: What the byzantine clients would upload honestly, shape [b, d]; not changed.
            context: The round.

        Returns:
            Shape [b, d].
        """
        return own
