"""Several attacks at once."""

from collections.abc import Sequence

from torch import Tensor

from pl_fed.attacks.base import Attack, poisoned
from pl_fed.types import Batch, ClientContext, RoundContext


class Combined(Attack):
    """Poison and forge by several attacks, one after the other.

    Ditto's attacks A2 and A3 are A1, random labels, and then random updates or model replacement.

    Args:
        attacks: At least one. Each gets the batch that the one before it poisoned, and takes the
            uploads that it forged for the attackers' own.

    Shape:
        - ``honest``: [h, d].
        - ``own``: [b, d].
        - output: [b, d].

    Raises:
        ValueError: If there is no attack.

    Example:
        >>> import torch
        >>> from pl_fed.attacks import ModelReplacement, SignFlipping
        >>> attack = Combined([ModelReplacement(factor=10.0), SignFlipping()])
        >>> attack.forge(torch.zeros(2, 1), torch.ones(1, 1), RoundContext())
        tensor([[-10.]])
    """

    def __init__(self, attacks: list[Attack]) -> None:
        if not attacks or not all(isinstance(each, Attack) for each in attacks):
            raise ValueError(
                f"Expected argument `attacks` to be a list of attacks, at least one, but got"
                f" {attacks}."
            )
        self.attacks: Sequence[Attack] = tuple(attacks)
        self.needs_inputs = any(each.needs_inputs for each in attacks)

    @property
    def poisons(self) -> bool:
        """Whether one of them changes training data."""
        return any(each.poisons for each in self.attacks)

    @property
    def forges(self) -> bool:
        """Whether one of them replaces uploads."""
        return any(each.forges for each in self.attacks)

    @property
    def triggers(self) -> bool:
        """Whether one of them hides a trigger."""
        return any(each.triggers for each in self.attacks)

    @property
    def needs_merged(self) -> bool:
        """Whether one of them tries out the defence."""
        return any(each.needs_merged for each in self.attacks)

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the batch after all of them."""
        return poisoned(batch, [each for each in self.attacks if each.poisons], context)

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return the uploads after all of them."""
        for each in self.attacks:
            own = each.forge(honest, own, context)
        return own

    def trigger(self, batch: Batch) -> Batch:
        """Return the samples with all triggers, with the targets that the last of them wants."""
        shown = batch
        for each in self.attacks:
            if each.triggers:  # by its true targets it says which samples it misleads
                shown = each.trigger(batch._replace(inputs=shown.inputs))
        return shown
