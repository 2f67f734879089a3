"""The Byzantine clients of a federation: which, when, what they know, and what they do."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from pl_fed.attacks import Attack
from pl_fed.attacks.base import apply_attacks
from pl_fed.nets.rows import finite_rows, usable_rows
from pl_fed.random import generator
from pl_fed.rounds.adversary import Adversary
from pl_fed.types import Batch, ClientContext, RoundContext


class ByzantineClients:
    """Byzantine clients: draws them, and lets them poison their data and forge their uploads.

    Args:
        adversary: The settings of the attack.

    Attributes:
        is_byzantine: Which clients are Byzantine in the present round, bool [clients].
    """

    def __init__(self, adversary: Adversary) -> None:
        self.adversary = adversary
        self.attack = adversary.attack
        self.corruption = adversary.corruption
        self.is_byzantine = torch.empty(0, dtype=torch.bool)
        self.seed = 0
        self.num_classes = 0

    def setup(self, num_clients: int, num_classes: int, seed: int) -> None:
        """Draw the Byzantine clients.

        Raises:
            ValueError: If an id is not a client's.
        """
        self.seed, self.num_classes = seed, num_classes
        if self.adversary.ids is not None:
            self.is_byzantine = mark_byzantine(self.adversary.ids, num_clients)
        else:
            self.is_byzantine = draw_byzantine(self.adversary.fraction or 0.0, num_clients, seed)
        if not self.is_byzantine.any():
            self._warn_of_none(num_clients)
        if self.is_byzantine.all():
            rank_zero_warn("All clients are Byzantine, so there are no metrics of benign clients.")

    def _warn_of_none(self, num_clients: int) -> None:
        """Warn if no client is Byzantine though an attack or a fraction is given."""
        if self.adversary.fraction:
            rank_zero_warn(
                "No client is Byzantine: `federation.adversary.fraction` ="
                f" {self.adversary.fraction} of {num_clients} clients is less than one, and is"
                " rounded down."
            )
        elif self.attack is not None:
            rank_zero_warn(
                f"No client is Byzantine, so {type(self.attack).__name__} does nothing: set"
                " `federation.adversary.fraction`, for example 0.2."
            )

    def begin(self, round: int) -> None:
        """Begin a round: draw its Byzantine clients if each round draws others."""
        if self.adversary.redraw:
            self.is_byzantine = draw_byzantine(
                self.adversary.fraction or 0.0, len(self.is_byzantine), self.seed, round
            )

    @property
    def triggers(self) -> bool:
        """Whether byzantine clients hide a trigger in models."""
        return self.attack is not None and self.attack.triggers

    @property
    def share(self) -> float:
        """Which share of all clients is byzantine."""
        return int(self.is_byzantine.count_nonzero()) / len(self.is_byzantine)

    @property
    def attacks_on_data(self) -> list[Attack]:
        """The attack and the corruption, as far as there are any."""
        return [attack for attack in (self.attack, self.corruption) if attack is not None]

    def expect(self, context: RoundContext, num_broken: int = 0) -> RoundContext:
        """Return the round with the number of Byzantine uploads that the aggregator assumes.

        Args:
            context: The round, without the broken uploads.
            num_broken: How many uploads were left out as broken.
        """
        expected = self.expected_byzantine(len(context.clients), num_broken)
        return replace(context, num_byzantine=expected)

    def expected_byzantine(self, num_uploads: int, num_broken: int = 0) -> int:
        """Return how many Byzantine uploads the aggregator assumes.

        Args:
            num_uploads: How many uploads it merges.
            num_broken: How many more were left out as broken.
        """
        if self.adversary.expected is None:
            return math.floor(self.share * num_uploads + 1e-9)
        return max(0, self.adversary.expected - num_broken)

    def attacks(self, clients: Tensor, round: int) -> Tensor:
        """Return which of some clients attack in a round, bool [clients]."""
        acting = self.is_byzantine[clients]
        return acting if round >= self.adversary.start_round else torch.zeros_like(acting)

    def state_dict(self) -> dict[str, Any]:
        """Return what attack and corruption keep between rounds, for a checkpoint."""
        return {
            name: attack.state_dict()
            for name, attack in (("attack", self.attack), ("corruption", self.corruption))
            if attack is not None and attack.state_dict()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: If it is of another attack.
        """
        for name, attack in (("attack", self.attack), ("corruption", self.corruption)):
            if attack is not None:
                attack.load_state_dict(state.get(name, {}))

    def poison(self, clients: Tensor, round: int) -> dict[int, Callable[[Batch], Batch]]:
        """Return, by id, what happens to the training data of some clients."""
        attacks = self.attacks(clients, round).tolist()
        if self.corruption is None and not any(attacks):
            return {}
        found: dict[int, Callable[[Batch], Batch]] = {}
        for one, hostile in zip(clients.tolist(), attacks):
            context = ClientContext(self.seed, round, one, self.num_classes)
            steps = [self.corruption, self.attack if hostile else None]
            poisoning = [each for each in steps if each and each.poisons]
            if poisoning:
                found[one] = partial(apply_attacks, attacks=poisoning, context=context)
        return found

    def forges(self, cohort: Tensor, round: int) -> bool:
        """Whether byzantine clients of a cohort replace their uploads."""
        forges = self.attack is not None and self.attack.forges
        return forges and bool(self.attacks(cohort, round).any())

    def forge(
        self,
        sent: Tensor,
        finite: Tensor,
        context: RoundContext,
        merge: Callable[[Tensor, Tensor], Tensor],
        net: Callable[[], nn.Module] | None = None,
        samples: Callable[[int], Batch] | None = None,
    ) -> Tensor:
        """Let the byzantine clients of a cohort replace their uploads.

        Args:
            sent: What all would send [cohort, numel]; theirs are changed.
            finite: Which of these uploads are whole, bool [cohort].
            context: The round.
            merge: Gives what the server would make of uploads [cohort, numel] of which some are
                whole, bool [cohort]; it remembers nothing of that.
            net: Returns a copy of the global model, for attackers that train.
            samples: Returns the training samples of a client, likewise.

        Returns:
            ``sent``.

        Raises:
            ValueError: If the attack gives anything but rows of real numbers of that shape.
        """
        if self.attack is None:
            return sent
        byzantine = self.attacks(context.clients, context.round).to(sent.device)
        known = finite & (byzantine if self.adversary.knowledge == "own" else ~byzantine)
        ids, own = context.clients, sent[byzantine]
        context = replace(
            context,
            attackers=ids[byzantine.cpu()],
            known=ids[known.cpu()],
            net=net,
            samples=samples,
        )
        if self.adversary.knowledge == "own":
            none = sent.new_empty(0)
            context = replace(context, losses=none, start_losses=none, root=none)
        else:
            context = replace(context, merged=_Trials(sent, byzantine, finite, merge))
        forged = self.attack.forge(sent[known], own, context)
        rows = usable_rows(forged, (len(own), own.shape[1]), own)
        if rows is None:
            raise ValueError(
                f"Expected `forge` of {type(self.attack).__name__} to give uploads of shape"
                f" {list(own.shape)} but got {_described(forged, own)}."
            )
        sent[byzantine] = rows
        return sent


def _described(forged: object, own: Tensor) -> str:
    """Return what an attack forged that are no uploads."""
    if not isinstance(forged, Tensor):
        return type(forged).__name__
    if forged.is_nested or forged.shape == own.shape:
        kind = "nested" if forged.is_nested else forged.layout
        return f"{forged.dtype}, {kind}, on {forged.device}: give real numbers as `own` has them"
    return str(list(forged.shape))


class _Trials:
    """What the server would make of a round, whatever rows the attackers uploaded."""

    def __init__(
        self,
        sent: Tensor,
        byzantine: Tensor,
        finite: Tensor,
        merge: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.sent, self.byzantine, self.finite, self.merge = sent, byzantine, finite, merge
        self.rows: Tensor | None = None  # one copy for all trials

    def __call__(self, rows: Tensor) -> Tensor:
        if self.rows is None:
            self.rows = self.sent.clone()
        self.rows[self.byzantine] = rows.to(self.rows)
        whole = self.finite.clone()
        whole[self.byzantine] = finite_rows(self.rows[self.byzantine])
        return self.merge(self.rows, whole)


def draw_byzantine(
    fraction: float, num_clients: int, seed: int, round: int | None = None
) -> Tensor:
    """Draw Byzantine clients.

    Args:
        fraction: Share of the clients, rounded down.
        num_clients: Number of clients.
        seed: The seed of the federation.
        round: The round that they are drawn for, if each round draws others.

    Returns:
        Which clients are Byzantine, bool [clients].

    Example:
        >>> int(draw_byzantine(0.5, num_clients=5, seed=0).sum())
        2
    """
    drawn = torch.zeros(num_clients, dtype=torch.bool)
    count = math.floor(fraction * num_clients + 1e-9)
    if count:
        key = () if round is None else (round,)
        generated = generator(seed, "byzantine", *key)
        drawn[torch.randperm(num_clients, generator=generated)[:count]] = True
    return drawn


def mark_byzantine(ids: list[int], num_clients: int) -> Tensor:
    """Return which clients have one of some ids, bool [clients].

    Raises:
        ValueError: If an id is not a client's.

    Example:
        >>> mark_byzantine([1], num_clients=3)
        tensor([False,  True, False])
    """
    unknown = [client for client in ids if not 0 <= client < num_clients]
    if unknown:
        raise ValueError(
            "Expected argument `federation.adversary.ids` to be client ids from 0 to"
            f" {num_clients - 1} but got {unknown}: there are {num_clients} clients."
        )
    marked = torch.zeros(num_clients, dtype=torch.bool)
    marked[ids] = True
    return marked
