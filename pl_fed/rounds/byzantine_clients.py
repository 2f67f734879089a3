"""The Byzantine clients of a federation, and their attacks on data and uploads."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from pl_fed.attacks import Attack
from pl_fed.attacks.adversary import Adversary
from pl_fed.attacks.base import apply_attacks
from pl_fed.nets.fingerprints import is_by_user, read_values
from pl_fed.nets.rows import usable_rows
from pl_fed.preflight.memory_trial import check_attack_memory
from pl_fed.random import fork_all_generators, generator, key
from pl_fed.types import Batch, ClientContext, RoundContext


class ByzantineClients:
    """Byzantine clients: drawn by the seed, they poison their data and forge their uploads.

    Args:
        adversary: The settings of the attack.

    Attributes:
        is_byzantine: A mask of the Byzantine clients in the current round, bool [clients].
    """

    def __init__(self, adversary: Adversary) -> None:
        self.adversary = adversary
        self.attack = adversary.attack
        self.corruption = adversary.corruption
        self.is_byzantine = torch.empty(0, dtype=torch.bool)
        self.seed = 0
        self.num_classes = 0
        self._own_samples: Callable[[int], Tensor] | None = None
        self._has_tried_memory = False

    def setup(
        self,
        num_clients: int,
        num_classes: int,
        seed: int,
        own_samples: Callable[[int], Tensor] | None = None,
    ) -> None:
        """Draw the Byzantine clients, and reset their attack and the corruption.

        Args:
            num_clients: Number of clients.
            num_classes: Number of classes, or 0.
            seed: The seed of the federation.
            own_samples: Returns the ids of a client's training samples; with privacy only. Then
                the position of a sample among them keys its draws. Without it, its id does: its
                place in the data set, and so the number of other clients' samples. With it,
                attackers with the knowledge ``own`` know only themselves of the cohort, so that
                their uploads depend on no benign client.

        Raises:
            ValueError: If an id is not the id of a client.
        """
        for attack in self.attacks_on_data:
            attack.reset()
        self.seed, self.num_classes, self._own_samples = seed, num_classes, own_samples
        if self.adversary.ids is not None:
            self.is_byzantine = mark_byzantine(self.adversary.ids, num_clients)
        else:
            self.is_byzantine = draw_byzantine(self.adversary.fraction or 0.0, num_clients, seed)
        if not self.is_byzantine.any():
            self._warn_no_byzantine(num_clients)
        if self.is_byzantine.all():
            rank_zero_warn("All clients are Byzantine, so there are no metrics of benign clients.")

    def _warn_no_byzantine(self, num_clients: int) -> None:
        """Warn that no client is Byzantine although an attack or a fraction is set."""
        if self.adversary.fraction:
            rank_zero_warn(
                "No client is Byzantine: `federation.adversary.fraction` ="
                f" {self.adversary.fraction} of {num_clients} clients is less than one client, and"
                " is rounded down."
            )
        elif self.attack is not None:
            rank_zero_warn(
                f"No client is Byzantine, so {type(self.attack).__name__} does nothing: set"
                " `federation.adversary.fraction`, for example 0.2."
            )

    def warn_of_late_start(self, rounds: float) -> None:
        """Warn that the attack does nothing, because it begins after the last round.

        Args:
            rounds: The number of rounds of the run.
        """
        start = self.adversary.start_round
        if self.attack is not None and 0 < rounds <= start:
            rank_zero_warn(
                f"{type(self.attack).__name__} does nothing: it begins after {start} rounds, and"
                f" the run has {rounds}. Lower `federation.adversary.start_round`, or raise"
                " `trainer.max_epochs`."
            )

    def set_net(self, copy_net: Callable[[], nn.Module]) -> None:
        """Give the attack a copy of the user's net if its trigger runs a model.

        Args:
            copy_net: Returns a copy of the global model in evaluation mode.
        """
        if self.attack is not None and self.attack.needs_net:
            self.attack.set_net(copy_net())

    def begin(self, round: int) -> None:
        """Begin a round: draw its Byzantine clients if ``redraw`` is set."""
        if self.adversary.redraw:
            self.is_byzantine = draw_byzantine(
                self.adversary.fraction or 0.0, len(self.is_byzantine), self.seed, round
            )

    @property
    def triggers(self) -> bool:
        """Whether the attack hides a backdoor trigger in models."""
        return self.attack is not None and self.attack.triggers

    @property
    def fraction(self) -> float:
        """The fraction of all clients that is Byzantine."""
        return int(self.is_byzantine.count_nonzero()) / len(self.is_byzantine)

    @property
    def byzantine_ids(self) -> tuple[int, ...]:
        """Ids of the Byzantine clients of the round, ascending."""
        return tuple(self.is_byzantine.nonzero().flatten().tolist())

    @property
    def attacks_on_data(self) -> list[Attack]:
        """The attack and the corruption, without ``None``."""
        return [attack for attack in (self.attack, self.corruption) if attack is not None]

    def assume_byzantine(self, context: RoundContext, num_broken: int = 0) -> RoundContext:
        """Return a context with the number of Byzantine uploads that the aggregator should assume.

        Args:
            context: The context of the round, without broken uploads.
            num_broken: Number of uploads that were left out as broken.
        """
        expected = self.count_expected_byzantine(len(context.clients), num_broken)
        return replace(context, num_byzantine=expected)

    def count_expected_byzantine(self, num_uploads: int, num_broken: int = 0) -> int:
        """Return the number of Byzantine uploads that the aggregator should assume.

        Args:
            num_uploads: Number of uploads that the aggregator merges.
            num_broken: Number of other uploads that were left out as broken.
        """
        if self.adversary.expected is None:
            return math.floor(self.fraction * num_uploads + 1e-9)
        return max(0, self.adversary.expected - num_broken)

    def mark_attackers(self, clients: Tensor, round: int) -> Tensor:
        """Return a mask of the clients that attack in a round, bool [clients].

        Args:
            clients: Client ids, int64 [clients].
            round: The round, from 0.
        """
        byzantine = self.is_byzantine[clients]
        return byzantine if self.adversary.attacks_in(round) else torch.zeros_like(byzantine)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the attack and the corruption, for a checkpoint."""
        return {
            name: attack.state_dict()
            for name, attack in (("attack", self.attack), ("corruption", self.corruption))
            if attack is not None and attack.state_dict()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states that :meth:`state_dict` returned.

        Raises:
            ValueError: If the states belong to another attack.
        """
        for name, attack in (("attack", self.attack), ("corruption", self.corruption)):
            if attack is not None:
                attack.load_state_dict(state.get(name, {}))

    def poison(self, clients: Tensor, round: int) -> dict[int, Callable[[Batch], Batch]]:
        """Return the functions that change the training batches of clients, by client id.

        Clients without an attack on their data are left out.

        Args:
            clients: Client ids, int64 [clients].
            round: The round, from 0.
        """
        is_attacker = self.mark_attackers(clients, round).tolist()
        if self.corruption is None and not any(is_attacker):
            return {}
        byzantine = self.byzantine_ids
        poison: dict[int, Callable[[Batch], Batch]] = {}
        for client, attacks in zip(clients.tolist(), is_attacker):
            context = ClientContext(self.seed, round, client, self.num_classes, byzantine)
            candidates = [self.corruption, self.attack if attacks else None]
            data_attacks = [attack for attack in candidates if attack and attack.poisons]
            if data_attacks:
                change = partial(apply_attacks, attacks=data_attacks, context=context)
                if self._own_samples is not None:
                    own, _ = self._own_samples(client).sort()
                    change = partial(_key_by_position, poison=change, own=own)
                poison[client] = change
        return poison

    def forges(self, cohort: Tensor, round: int) -> bool:
        """Return whether Byzantine clients of a cohort replace their uploads."""
        forges = self.attack is not None and self.attack.forges
        return forges and bool(self.mark_attackers(cohort, round).any())

    def forge_losses(self, context: RoundContext, attackers: Tensor) -> RoundContext:
        """Return the context with the losses that the attackers of a cohort report.

        Args:
            context: The context of the round.
            attackers: A mask of the attackers, bool [cohort].

        Raises:
            ValueError: If the attack does not return one loss for each attacker.
        """
        if self.attack is None or not self.attack.forges_losses:
            return context
        own = replace(context, attackers=context.clients[attackers.cpu()])
        reported = {}
        for name in ("losses", "start_losses"):
            losses = getattr(context, name).clone()
            if len(losses):
                marked = attackers.to(losses.device)
                forged = self.attack.forge_losses(losses[marked], own)
                if forged.shape != losses[marked].shape:
                    raise ValueError(
                        f"Expected `forge_losses` of {type(self.attack).__name__} to give losses"
                        f" of shape {list(losses[marked].shape)} but got {list(forged.shape)}."
                    )
                losses[marked] = forged.to(losses)
            reported[name] = losses
        return replace(context, **reported)

    def forge(
        self,
        uploads: Tensor,
        attackers: Tensor,
        valid: Tensor,
        context: RoundContext,
        simulate_merge: Callable[..., Tensor],
    ) -> Tensor:
        """Let the attackers of a cohort replace their uploads, in place.

        Args:
            uploads: The honest uploads of all clients, [cohort, numel]; the attackers' rows are
                replaced.
            attackers: A mask of the attackers, bool [cohort].
            valid: A mask of the valid uploads, bool [cohort].
            context: The context of the round, with nets and samples for attackers that train.
            simulate_merge: Returns the update that the server would merge from forged uploads
                [attackers, numel], for attackers that know the honest uploads.

        Returns:
            ``uploads``.

        Raises:
            ValueError: If the attack does not return rows of real numbers of the required shape.
        """
        if self.attack is None:
            return uploads
        knows_own = self.adversary.knowledge == "own"
        visible = valid & (attackers if knows_own else ~attackers)
        ids, own = context.clients, uploads[attackers]
        context = replace(
            context,
            attackers=ids[attackers.cpu()],
            byzantine=self.byzantine_ids,
            observed=ids[visible.cpu()],
        )
        if knows_own:
            empty = uploads.new_empty(0)
            context = replace(
                context,
                losses=empty,
                start_losses=empty,
                group_counts=context.group_counts[:0],
                num_samples=0,
                root=empty,
            )
            if self._own_samples is not None:  # with privacy
                context = _hide_cohort(context)
        else:
            context = replace(context, simulate_merge=simulate_merge)
        forged = self._forge(uploads[visible], own, context)
        rows = usable_rows(forged, (len(own), own.shape[1]), own)
        if rows is None:
            raise ValueError(
                f"Expected `forge` of {type(self.attack).__name__} to give uploads of shape"
                f" {list(own.shape)} but got {_describe_forged(forged, own)}."
            )
        uploads[attackers] = rows
        return uploads

    def _forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return the uploads that the attack forges; draws of a user's class have a key.

        A user's attack that changes attributes is tried after its first call; not one that trains,
        whose base class keeps what an attacker has.

        Raises:
            ValueError: If a checkpoint lacks a part of the attack's memory.
        """
        attack = cast(Attack, self.attack)
        if not any(map(is_by_user, attack.list_parts())):
            return attack.forge(honest, own, context)

        def forge(attack: Attack) -> Tensor:
            seed(key(context.seed, "forge", context.round, context.center))
            return attack.forge(honest, own, context)

        with fork_all_generators(own.device) as seed:
            if self._has_tried_memory or attack.trains:
                return forge(attack)
            self._has_tried_memory = True
            attributes, before = read_values(attack), _copy(attack)
            forged = forge(attack)
            if before is not None and read_values(attack) != attributes:
                check_attack_memory(before, forge)
            return forged


def _copy(attack: Attack) -> Attack | None:
    """Return a copy of an attack; ``None`` if Python cannot copy it."""
    try:
        copied = copy.deepcopy(attack)
    except Exception:  # for example an attribute with a lock
        return None
    return None if copied is attack else copied


def _key_by_position(batch: Batch, poison: Callable[[Batch], Batch], own: Tensor) -> Batch:
    """Return poisoned samples; their positions among the client's own samples key the draws.

    Args:
        batch: Samples of one client.
        poison: The attack.
        own: The ids of the client's training samples, in ascending order.
    """
    if batch.samples is None:
        return poison(batch)
    positions = torch.searchsorted(own.to(batch.samples.device), batch.samples)
    return poison(batch._replace(samples=positions))._replace(samples=batch.samples)


def _hide_cohort(context: RoundContext) -> RoundContext:
    """Return the context of attackers that know only themselves of the cohort."""
    samples_of = context.samples

    def samples(client: int) -> Batch:
        """Return the training samples of a Byzantine client, inside or outside of the cohort."""
        if client not in context.byzantine or samples_of is None:
            raise ValueError(
                "Expected an attack to read samples of Byzantine clients alone for"
                f" `federation.privacy` but got client {client}."
            )
        return samples_of(client)

    attackers = context.attackers
    return replace(context, clients=attackers, num_byzantine=len(attackers), samples=samples)


def _describe_forged(forged: object, own: Tensor) -> str:
    """Return a description of unusable forged uploads, for an error message."""
    if not isinstance(forged, Tensor):
        return type(forged).__name__
    if forged.is_nested or forged.shape == own.shape:
        kind = "nested" if forged.is_nested else forged.layout
        return f"{forged.dtype}, {kind}, on {forged.device}: give real numbers as `own` has them"
    return str(list(forged.shape))


def draw_byzantine(
    fraction: float, num_clients: int, seed: int, round: int | None = None
) -> Tensor:
    """Draw Byzantine clients.

    Args:
        fraction: Fraction of the clients, in [0, 1]; the number of clients is rounded down.
        num_clients: Number of clients.
        seed: The seed of the federation.
        round: The round, if each round draws its own Byzantine clients.

    Returns:
        A mask of the Byzantine clients, bool [clients].

    Example:
        >>> int(draw_byzantine(0.5, num_clients=5, seed=0).sum())
        2
    """
    byzantine = torch.zeros(num_clients, dtype=torch.bool)
    count = math.floor(fraction * num_clients + 1e-9)
    if count:
        key = () if round is None else (round,)
        draw = generator(seed, "byzantine", *key)
        byzantine[torch.randperm(num_clients, generator=draw)[:count]] = True
    return byzantine


def mark_byzantine(ids: list[int], num_clients: int) -> Tensor:
    """Return a mask of the clients with the given ids, bool [clients].

    Raises:
        ValueError: If an id is not the id of a client.

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
