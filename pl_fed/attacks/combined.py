"""Several attacks in one."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

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
        self.trains = any(attack.trains for attack in attacks)
        self.needs_net = any(attack.needs_net for attack in attacks)

    @property
    def poisons(self) -> bool:
        """Whether at least one attack changes training data."""
        return any(attack.poisons for attack in self.attacks)

    @property
    def forges(self) -> bool:
        """Whether at least one attack replaces uploads."""
        return any(attack.forges for attack in self.attacks)

    @property
    def forges_losses(self) -> bool:
        """Whether at least one attack reports other losses."""
        return any(attack.forges_losses for attack in self.attacks)

    @property
    def triggers(self) -> bool:
        """Whether at least one attack hides a trigger in models."""
        return any(attack.triggers for attack in self.attacks)

    @property
    def needs_simulation(self) -> bool:
        """Whether at least one attack calls ``context.simulate_merge``."""
        return any(attack.needs_simulation for attack in self.attacks)

    def list_parts(self) -> list[Attack]:
        """Return the attack, and those that are combined in it, at any depth."""
        return [self, *(part for attack in self.attacks for part in attack.list_parts())]

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the batch after all attacks."""
        return apply_attacks(batch, [attack for attack in self.attacks if attack.poisons], context)

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return the uploads after all attacks."""
        for attack in self.attacks:
            own = attack.forge(honest, own, context)
        return own

    @property
    def trigger_version(self) -> int:  # type: ignore[override]
        """A number that changes with the trigger of an attack: the sum of their versions."""
        return sum(attack.trigger_version for attack in self.attacks)

    def try_training(self, net: nn.Module, batch: Batch, context: ClientContext) -> None:
        """Refuse a net or samples that do not fit an attack that trains."""
        for attack in self.attacks:
            if attack.trains:
                attack.try_training(net, batch, context)

    def set_net(self, net: nn.Module) -> None:
        """Give each attack that needs it a copy of the user's net."""
        for attack in self.attacks:
            if attack.needs_net:
                attack.set_net(copy.deepcopy(net))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the attacks by their position, without empty ones."""
        states = {
            str(position): attack.state_dict() for position, attack in enumerate(self.attacks)
        }
        return {position: state for position, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states of the attacks.

        Raises:
            ValueError: If a state belongs to another attack.
        """
        positions = [str(position) for position in range(len(self.attacks))]
        if unknown := [name for name in state if name not in positions]:
            raise ValueError(
                f"Expected a checkpoint with states of the {len(self.attacks)} attacks of Combined"
                f" but got {', '.join(unknown)}: resume with the attack of the checkpoint."
            )
        for position, attack in enumerate(self.attacks):
            attack.load_state_dict(state.get(str(position), {}))

    def reset(self) -> None:
        """Return to the states before the first run of each attack."""
        for attack in self.attacks:
            attack.reset()

    def forge_losses(self, losses: Tensor, context: RoundContext) -> Tensor:
        """Return the losses after all attacks."""
        for attack in self.attacks:
            losses = attack.forge_losses(losses, context)
        return losses

    def trigger(self, batch: Batch) -> Batch:
        """Return the samples with all triggers, and the targets and mask of the last one."""
        triggered = batch
        for attack in self.attacks:
            if attack.triggers:  # with the true targets, which decide the mask
                triggered = attack.trigger(batch._replace(inputs=triggered.inputs))
        return triggered
