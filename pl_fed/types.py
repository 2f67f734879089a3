"""The small frozen records that the floors of pl_fed hand to each other."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pl_fed.trees import Tree, leaves, select


class Batch(NamedTuple):
    """Samples of ONE client.

    Attributes:
        inputs: Inputs: a tensor [batch, ...], or a tuple or dict of such, each of its own dtype.
        targets: Targets of the same structures: class ids (int64), real values, or others that the
            task takes.
        mask: Which samples count, bool [batch]; ``None`` means all of them. Padding has mask
            ``False`` and must not change a loss.
        samples: Ids of the samples in the data set, int64 [batch]. They key every random change of
            a sample, so that a sample is changed in the same way in whatever batch it comes.
        visits: How often the round had come to the sample before: which pass over the client's data
            this is, int64 [batch]. Only attacks are told; ``None`` stands for the first pass.
    """

    inputs: Tree
    targets: Tree
    mask: Tensor | None = None
    samples: Tensor | None = None
    visits: Tensor | None = None

    def part(self, which: slice) -> "Batch":
        """Return some of the samples, such as every second one, with a mask.

        Padding comes last: ``slice(0, None, 2)`` takes the same samples whether or not there is
        any, which ``slice(0, len(targets) // 2)`` does not. A part may be empty; its loss is 0.

        Example:
            >>> batch = Batch(torch.zeros(3, 1), torch.tensor([5, 6, 7]))
            >>> batch.part(slice(1, None, 2)).targets, batch.part(slice(1, None, 2)).mask
            (tensor([6]), tensor([True]))
        """
        mask = self.mask
        if mask is None:
            mask = torch.ones(self.size, dtype=torch.bool, device=self.device)
        samples, visits = (
            None if each is None else each[which] for each in (self.samples, self.visits)
        )
        inputs, targets = select(self.inputs, which), select(self.targets, which)
        return Batch(inputs, targets, mask[which], samples, visits)

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(leaves(self.targets)[0])

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return leaves(self.targets)[0].device


@dataclass(frozen=True)
class Population:
    """Of how many clients a federation is.

    Attributes:
        clients: How many there are.
        cohort: How many take part in a round.
        samples: How many training samples they have together.
    """

    clients: int = 1
    cohort: int = 1
    samples: int = 1

    @property
    def share(self) -> float:
        """Which share of the clients takes part in a round."""
        return self.cohort / self.clients


@dataclass(frozen=True)
class ClientContext:
    """What a data attack may know of the byzantine client whose batch it poisons.

    Attributes:
        seed: The seed of the federation.
        round: The round, from 0.
        client: The client's id.
        num_classes: Number of classes, or 0 where the targets are real values.
    """

    seed: int
    round: int
    client: int
    num_classes: int


@dataclass(frozen=True)
class RoundContext:
    """What an aggregator or an attack on uploads may know of the round.

    Attributes:
        seed: The seed of the federation.
        round: The round, from 0.
        num_byzantine: How many byzantine uploads the server expects among those it merges.
        clients: Ids of the clients whose uploads are given, int64 [n].
        losses: Mean training loss of each of them over its local steps, [n].
        start_losses: Mean loss of w^t, which the round began with, over all training data of each,
            [n]; empty unless the aggregator's ``needs_start_losses`` asks for it.
        attackers: Ids of those whose uploads an attack forges, int64 [b]: aggregators learn none.
        known: Ids of those whose honest uploads an attack is given, int64 [h]: likewise.
        broadcast: The global model w^t that the round began with, [d]; empty where uploads are
            merged in slices of the coordinates.
        root: What the server's own data adds to w^t, [d]: see ``Aggregator.needs_root``; empty
            unless that asks for it. Where uploads are merged in slices it is sliced likewise.
        sum: Adds up a tensor over the slices of the coordinates that an aggregator is given one of
            at a time; the identity where it is given all of them.
        note: Called with a word and a number for the round's log: ``"clipped"`` uploads were made
            shorter, ``"dropped"`` ones left out. Numbers of one word add up.
        net: Returns a copy of the global model w^t, as the user's net in evaluation mode: for
            attackers that train in their own way. ``None`` for aggregators.
        samples: Returns all training samples of an attacker, by its id, as they are before any
            attack on data. ``None`` for aggregators.
        merged: Gives what the server would make of the round if the attackers uploaded these rows
            [b, d]; ``None`` if attackers cannot know. An aggregator is not told.
    """

    seed: int = 0
    round: int = 0
    num_byzantine: int = 0
    clients: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    losses: Tensor = field(default_factory=lambda: torch.empty(0))
    start_losses: Tensor = field(default_factory=lambda: torch.empty(0))
    attackers: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    known: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    broadcast: Tensor = field(default_factory=lambda: torch.empty(0))
    root: Tensor = field(default_factory=lambda: torch.empty(0))
    sum: Callable[[Tensor], Tensor] = lambda part: part
    note: Callable[[str, float | Tensor], None] = lambda *_: None
    net: Callable[[], nn.Module] | None = None
    samples: Callable[[int], Batch] | None = None
    merged: Callable[[Tensor], Tensor] | None = None

    def of(self, chosen: Tensor) -> "RoundContext":
        """Return what is known of some of the clients, by a mask or by their positions."""
        here = chosen.to(self.losses.device)
        start = self.start_losses[here] if len(self.start_losses) else self.start_losses
        return replace(
            self, clients=self.clients[chosen.cpu()], losses=self.losses[here], start_losses=start
        )
