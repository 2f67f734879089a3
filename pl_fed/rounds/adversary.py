"""The adversary: which clients are byzantine, when, what they know, and what they do."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from pl_fed.attacks import Attack
from pl_fed.attacks.base import poisoned
from pl_fed.functional.arguments import check_choice, check_integers
from pl_fed.functional.random import generator
from pl_fed.functional.rows import finite_rows, usable_rows
from pl_fed.types import Batch, ClientContext, RoundContext

Knowledge = Literal["all", "own"]


class Adversary:
    """Byzantine clients, and what is wrong with everybody's data.

    Args:
        attack: What byzantine clients do.
        byzantine: Which they are: a fraction of the clients (rounded down), or a list of ids.
        redraw: Whether each round draws other ones (a fraction is needed).
        start: The first round in which they attack.
        know: Which honest uploads of a round they know: all, or what they would send themselves.
        corruption: What is wrong with every client's training data.
        num_byzantine: How many Byzantine uploads the aggregator assumes in a round; ``None`` for
            the number to be expected, of all clients' share.

    Attributes:
        is_byzantine: Which clients are byzantine, in the round at hand, bool [clients].

    Raises:
        ValueError: If an argument is out of range, or they do not fit together.
    """

    def __init__(
        self,
        attack: Attack | None = None,
        byzantine: float | list[int] = 0.0,
        redraw: bool = False,
        start: int = 0,
        know: Knowledge = "all",
        corruption: Attack | None = None,
        num_byzantine: int | None = None,
    ) -> None:
        byzantine = _fraction_or_ids(byzantine)
        if byzantine and attack is None:
            raise ValueError(
                f"Expected argument `attack` to be given with `byzantine` = {byzantine} but got"
                " None."
            )
        if redraw and isinstance(byzantine, list):
            raise ValueError(
                "Expected argument `byzantine` to be a fraction with `redraw_byzantine` but got"
                f" {byzantine}."
            )
        check_integers(0, byzantine_from=start)
        check_choice(("all", "own"), attackers_know=know)
        if know == "own" and attack is not None and attack.needs_merged:
            raise ValueError(
                'Expected argument `attackers_know` to be "all" for'
                f" {type(attack).__name__}, which tries its factor out against the defence, but"
                ' got "own".'
            )
        if corruption is not None and corruption.forges:
            raise ValueError(
                "Expected argument `corruption` to change data only but got"
                f" {type(corruption).__name__}, which forges uploads: give it as `attack`."
            )
        self.attack = attack
        self.byzantine = byzantine
        self.redraw = redraw
        self.start = start
        self.know = know
        self.corruption = corruption
        self.num_byzantine = num_byzantine
        self.is_byzantine = torch.empty(0, dtype=torch.bool)
        self.seed = 0
        self.num_classes = 0

    def setup(self, num_clients: int, num_classes: int, seed: int) -> None:
        """Draw who is byzantine.

        Raises:
            ValueError: If an id is not a client's.
        """
        self.seed, self.num_classes = seed, num_classes
        self.is_byzantine = draw_byzantine(self.byzantine, num_clients, seed)
        if not self.is_byzantine.any():
            if isinstance(self.byzantine, float) and self.byzantine:
                rank_zero_warn(
                    f"Nobody is byzantine: `byzantine` = {self.byzantine} of {num_clients} clients"
                    " is less than one, and is rounded down."
                )
            elif self.attack is not None:
                rank_zero_warn(
                    f"Nobody is byzantine, and so {type(self.attack).__name__} does nothing: say"
                    " by `byzantine` who is."
                )
        if self.is_byzantine.all():
            rank_zero_warn("Everybody is byzantine, and so there are no metrics of benign clients.")

    def begin(self, round: int) -> None:
        """Begin a round: draw anew who is byzantine, if that is so."""
        if self.redraw:
            drawn = draw_byzantine(self.byzantine, len(self.is_byzantine), self.seed, round)
            self.is_byzantine = drawn

    @property
    def triggers(self) -> bool:
        """Whether byzantine clients hide a trigger in models."""
        return self.attack is not None and self.attack.triggers

    @property
    def share(self) -> float:
        """Which share of all clients is byzantine."""
        return int(self.is_byzantine.sum()) / len(self.is_byzantine)

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
        if self.num_byzantine is None:
            expected = math.floor(self.share * len(context.clients) + 1e-9)
        else:
            expected = max(0, self.num_byzantine - num_broken)
        return replace(context, num_byzantine=expected)

    def attacks(self, clients: Tensor, round: int) -> Tensor:
        """Return which of some clients attack in a round, bool [clients]."""
        acting = self.is_byzantine[clients]
        return acting if round >= self.start else torch.zeros_like(acting)

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
                found[one] = partial(poisoned, attacks=poisoning, context=context)
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
        known = finite & (byzantine if self.know == "own" else ~byzantine)
        ids, own = context.clients, sent[byzantine]
        context = replace(
            context,
            attackers=ids[byzantine.cpu()],
            known=ids[known.cpu()],
            net=net,
            samples=samples,
        )
        if self.know == "own":
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


def _fraction_or_ids(byzantine: Any) -> float | list[int]:
    """Return who is byzantine, if it is what it should be."""
    if isinstance(byzantine, Tensor | np.ndarray):
        byzantine = byzantine.tolist()
    ids = isinstance(byzantine, Collection) and not isinstance(byzantine, str | Mapping)
    if ids and all(type(client) is int for client in byzantine):
        if repeated := [client for client, count in Counter(byzantine).items() if count > 1]:
            raise ValueError(
                f"Expected argument `byzantine` to be different client ids but got {repeated} more"
                " than once."
            )
        return list(byzantine)
    if byzantine == 0 or (isinstance(byzantine, float) and 0 < byzantine <= 1):
        return float(byzantine)
    hint = ": give [1] for client 1, or 1.0 for everybody" if byzantine == 1 else ""
    raise ValueError(
        "Expected argument `byzantine` to be a fraction in [0, 1] or a list of client ids but got"
        f" {byzantine!r}{hint}."
    )


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
    byzantine: float | list[int], num_clients: int, seed: int, round: int | None = None
) -> Tensor:
    """Return which clients are byzantine, bool [clients].

    Args:
        byzantine: A fraction of the clients (rounded down), drawn by the seed, or their ids.
        num_clients: Number of clients.
        seed: The seed of the federation.
        round: The round that they are drawn for, if they change.

    Raises:
        ValueError: If an id is not a client's.

    Example:
        >>> draw_byzantine([1], num_clients=3, seed=0)
        tensor([False,  True, False])
    """
    chosen = torch.zeros(num_clients, dtype=torch.bool)
    if isinstance(byzantine, int | float):
        count = math.floor(byzantine * num_clients + 1e-9)
        if not count:
            return chosen
        when = () if round is None else (round,)
        draw = generator(seed, "byzantine", *when)
        chosen[torch.randperm(num_clients, generator=draw)[:count]] = True
        return chosen
    unknown = [k for k in byzantine if not 0 <= k < num_clients]
    if unknown:
        raise ValueError(
            f"Expected argument `byzantine` to be client ids from 0 to {num_clients - 1} but got"
            f" {unknown}."
        )
    chosen[byzantine] = True
    return chosen
