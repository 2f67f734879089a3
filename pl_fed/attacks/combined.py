"""Several attacks in one."""

from collections.abc import Sequence

from torch import Tensor

from pl_fed.attacks.base import Attack, apply_attacks
from pl_fed.types import Batch, ClientContext, RoundContext


class Combined(Attack):
    """Combined attack: several attacks, one after the other.

    Ditto's attack A2 is A1 (random labels) and then random updates; A3 is A1 and then model
    replacement.

    Args:
        attacks: The attacks, at least one. Each receives the poisoned batch of the attack before
            it, and that attack's forged uploads as the attackers' own.

    Shape:
        - ``honest``: [h, d].
        - ``own``: [b, d].
        - output: [b, d].

    Raises:
        ValueError: If ``attacks`` is empty, or holds anything but attacks.

    Example:
        >>> import torch
        >>> from pl_fed.attacks import ModelReplacement, SignFlipping
        >>> attack = Combined([ModelReplacement(factor=10.0), SignFlipping()])
        >>> attack.forge(torch.zeros(2, 1), torch.ones(1, 1), RoundContext())
        tensor([[-10.]])
    """

    def __init__(self, attacks: list[Attack]) -> None:
        if not attacks or not all(isinstance(attack, Attack) for attack in attacks):
            raise ValueError(
                f"Expected argument `attacks` to be a list of attacks, at least one, but got"
                f" {attacks}."
            )
        self.attacks: Sequence[Attack] = tuple(attacks)
        self.needs_inputs = any(attack.needs_inputs for attack in attacks)

    @property
    def poisons(self) -> bool:
        """Whether at least one attack changes training data."""
        return any(attack.poisons for attack in self.attacks)

    @property
    def forges(self) -> bool:
        """Whether at least one attack replaces uploads."""
        return any(attack.forges for attack in self.attacks)

    @property
    def triggers(self) -> bool:
        """Whether at least one attack hides a trigger in models."""
        return any(attack.triggers for attack in self.attacks)

    @property
    def needs_simulation(self) -> bool:
        """Whether at least one attack calls ``context.simulate_merge``."""
        return any(attack.needs_simulation for attack in self.attacks)

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the batch after all attacks."""
        return apply_attacks(batch, [attack for attack in self.attacks if attack.poisons], context)

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return the uploads after all attacks."""
        for attack in self.attacks:
            own = attack.forge(honest, own, context)
        return own

    def trigger(self, batch: Batch) -> Batch:
        """Return the samples with all triggers, and the targets and mask of the last one."""
        triggered = batch
        for attack in self.attacks:
            if attack.triggers:  # with the true targets, which decide the mask
                triggered = attack.trigger(batch._replace(inputs=triggered.inputs))
        return triggered
