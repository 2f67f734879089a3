"""Small frozen records that the rooms of pl_fed exchange."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pl_fed.nets.rows import RowLayout
from pl_fed.trees import Tree, count_samples, leaves, select


class Batch(NamedTuple):
    """Samples of ONE client.

    Attributes:
        inputs: Inputs: a tensor [batch, ...], or a tuple or dict of tensors, of any dtypes.
        targets: Targets with the same kinds of structure: class ids (int64), real values, or any
            other targets of the task.
        mask: The mask of samples that count, bool [batch]; ``None`` means all samples. Padding has
            mask ``False`` and must not change a loss.
        samples: Ids of the samples in the data set, int64 [batch]. They key every random change of
            a sample, so that the change does not depend on the batch.
        visits: Number of earlier passes of the round over the sample, int64 [batch]; the first pass
            has 0. Only attacks receive it; ``None`` stands for the first pass.
    """

    inputs: Tree
    targets: Tree
    mask: Tensor | None = None
    samples: Tensor | None = None
    visits: Tensor | None = None

    def part(self, index: slice) -> "Batch":
        """Return a slice of the samples, such as every second sample, with a mask.

        Padding comes last. Therefore ``slice(0, None, 2)`` selects the same samples with and
        without padding; ``slice(0, len(targets) // 2)`` does not. A part may be empty; its loss
        is 0.

        Example:
            >>> batch = Batch(torch.zeros(3, 1), torch.tensor([5, 6, 7]))
            >>> batch.part(slice(1, None, 2)).targets, batch.part(slice(1, None, 2)).mask
            (tensor([6]), tensor([True]))
        """
        mask = self.mask
        if mask is None:
            mask = torch.ones(self.size, dtype=torch.bool, device=self.device)
        samples = None if self.samples is None else self.samples[index]
        visits = None if self.visits is None else self.visits[index]
        inputs, targets = select(self.inputs, index), select(self.targets, index)
        return Batch(inputs, targets, mask[index], samples, visits)

    @property
    def size(self) -> int:
        """Number of samples."""
        return count_samples(self.targets)

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        return leaves(self.targets)[0].device


@dataclass(frozen=True)
class SampleEntries:
    """Sample entries: the places of inputs and target in the samples of a data set.

    It restores a batch in the structure of the data set, which the steps of a LightningModule read.

    Attributes:
        inputs: The keys of a dict, or the positions in a tuple, of the inputs.
        target: The key or the position of the target.
        kind: The dataclass or named tuple of the samples, or of the batch of the user's own
            ``collate_fn``; ``None`` for dicts and tuples. Unused fields are ``None``.

    Example:
        >>> SampleEntries(("image",), "mask").join(1, 2), SampleEntries((0, 2), 1).join((1, 3), 2)
        ({'image': 1, 'mask': 2}, (1, 2, 3))
    """

    inputs: tuple[str | int, ...]
    target: str | int
    kind: Callable[..., Any] | None = None

    def join(self, inputs: Tree, targets: Tree) -> Tree:
        """Return a batch as the data set's dict or tuple; it lacks unused entries.

        An entry that is both an input and the target has the values of the input if these are
        real numbers [batch, ...], perhaps normalized or augmented. Tokens keep the type of
        the target, and attacks on labels change the target.
        """
        entries = {self.inputs[0]: inputs}
        if len(self.inputs) > 1 and isinstance(inputs, dict):
            entries = {name: inputs[name] for name in self.inputs}
        elif len(self.inputs) > 1:
            entries = dict(zip(self.inputs, inputs, strict=True))
        own = entries.get(self.target)
        if not (isinstance(own, Tensor) and own.is_floating_point() and own.dim() > 1):
            entries[self.target] = targets
        if self.kind is not None:
            names = list(inspect.signature(self.kind).parameters)
            keys = names if isinstance(self.target, str) else range(len(names))
            return self.kind(*(entries.get(key) for key in keys))
        if isinstance(self.target, str):
            return entries
        return tuple(entries[position] for position in sorted(entries, key=int))


@dataclass(frozen=True)
class Population:
    """The size of a federation.

    Attributes:
        clients: Number of clients.
        cohort: Number of clients in a round's cohort; the expected one if it varies.
        samples: Number of training samples of all clients.
        cohort_varies: Whether cohorts have several sizes.
    """

    clients: int = 1
    cohort: int = 1
    samples: int = 1
    cohort_varies: bool = False

    @property
    def is_full(self) -> bool:
        """Whether all clients take part in each round."""
        return self.cohort == self.clients and not self.cohort_varies

    @property
    def share(self) -> float:
        """The cohort's share of all clients."""
        return self.cohort / self.clients


@dataclass(frozen=True)
class ClientContext:
    """The knowledge of an attack on data about the Byzantine client and the round.

    Attributes:
        seed: The seed of the federation.
        round: The round, from 0.
        client: Id of the client.
        num_classes: Number of classes; 0 unless each target is a class id.
        attackers: Ids of the federation's Byzantine clients of the round in ascending order, also
            of those that are not in the cohort.
    """

    seed: int
    round: int
    client: int
    num_classes: int
    attackers: tuple[int, ...] = ()


@dataclass(frozen=True)
class RoundContext:
    """The knowledge of an aggregator or an attack on uploads about the round.

    Attributes:
        seed: The seed of the federation.
        round: The round, from 0.
        num_byzantine: Number of Byzantine uploads that the server expects among the merged ones.
        clients: Ids of the clients of the uploads, int64 [n].
        losses: Mean training loss of each client over its local steps, [n]; NaN for a client that
            took no step.
        start_losses: Mean loss of the broadcast w^t over all training data of each client, [n];
            empty unless the aggregator's ``needs_start_losses`` is set.
        group_counts: Counts of each client's training samples by group and class, by the
            predictions of the broadcast w^t, int64 [n, 3, groups, classes] as in
            ``pl_fed.functional.group_fairness``; empty unless the aggregator's
            ``needs_group_counts`` is set.
        attackers: Ids of the clients that forge their uploads, int64 [b]; empty for aggregators.
        byzantine: Ids of all Byzantine clients of the round in ascending order, inside and outside
            of the cohort; empty for aggregators.
        observed: Ids of the clients of the honest uploads that the attack observes, int64 [h];
            empty for aggregators.
        broadcast: The global model w^t at the start of the round, [d]; empty if the server merges
            uploads in slices of the coordinates.
        center: The position of ``broadcast`` among the global models; 0 if there is one.
        root: The update of w^t that the server trains on its own data, [d]; empty unless the
            aggregator's ``needs_root`` is set. With slices, it is the slice of that update.
        sum: Adds up a tensor over the slices of the coordinates, if the server merges uploads in
            slices; the identity otherwise.
        note: Adds a number to the round's log, by a word: ``"clipped"`` for uploads that the
            aggregator shortens, ``"dropped"`` for uploads that it leaves out.
        net: Returns a copy of the global model w^t plus an update [d], or of w^t without one, as
            the user's net in evaluation mode: for attackers that train in their own way, and for
            aggregators with ``needs_net``; ``None`` for other aggregators.
        inputs: A batch of the net's inputs without samples, for their shapes and dtypes: for
            aggregators with ``needs_net``; ``None`` for others.
        samples: Returns all training samples of an attacker, by its id, before any attack on data;
            none if they are fewer than ``data.min_batch``. ``None`` for aggregators.
        num_clients: Number of clients of the federation; 0 if it is unknown.
        num_samples: Number of training samples of all clients of the federation; 0 if it is
            unknown, as with privacy.
        num_rounds: Number of rounds of the run; infinite without a limit, and 0 if it is unknown.
        layout: The position of each parameter tensor in an upload; ``None`` if it is unknown, or
            if the server merges uploads in slices.
        unsent: Positions of the parameters that clients keep to themselves, int64; an upload is 0
            there. Empty unless clients share only a part of the net. With slices, the positions are
            those in a whole upload.
        project: Returns the short rows that clients send in place of rows [..., d], as LpProj's;
            ``None`` for other algorithms, and for aggregators.
        frozen: Names of parameters that keep their first values in local steps, such as FedBABU's
            head. Empty for aggregators.
        frozen_values: Returns these first values by name for an attacker, by its id, where they are
            not those of ``broadcast``: pFedFDA's head. Empty for aggregators.
        reject: Adds client ids to those whose uploads the aggregator leaves out, or detects as
            Byzantine: see :meth:`reject_rows`.
        weigh: Receives client ids and the weights of their uploads: see :meth:`weigh_rows`.
        simulate_merge: Returns the server's merged update if the attackers upload some rows [b, d].
            Its argument ``reject`` receives the ids of the clients whose uploads the aggregator
            would leave out. ``None`` if the attackers do not know the server, and for aggregators.
    """

    seed: int = 0
    round: int = 0
    num_byzantine: int = 0
    clients: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    losses: Tensor = field(default_factory=lambda: torch.empty(0))
    start_losses: Tensor = field(default_factory=lambda: torch.empty(0))
    group_counts: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    attackers: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    byzantine: tuple[int, ...] = ()
    observed: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    broadcast: Tensor = field(default_factory=lambda: torch.empty(0))
    root: Tensor = field(default_factory=lambda: torch.empty(0))
    sum: Callable[[Tensor], Tensor] = lambda part: part
    note: Callable[[str, float | Tensor], None] = lambda *_: None
    net: Callable[..., nn.Module] | None = None
    inputs: Tree | None = None
    samples: Callable[[int], Batch] | None = None
    simulate_merge: Callable[..., Tensor] | None = None
    num_clients: int = 0
    num_samples: int = 0
    num_rounds: float = 0
    center: int = 0
    layout: RowLayout | None = None
    unsent: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    project: Callable[[Tensor], Tensor] | None = None
    frozen: tuple[str, ...] = ()
    frozen_values: Callable[[int], Mapping[str, Tensor]] = lambda _: {}
    reject: Callable[[Tensor], None] = lambda _: None
    weigh: Callable[[Tensor, Tensor], None] = lambda *_: None

    def select_sent(self, rows: Tensor) -> Tensor:
        """Return the numbers of updates or models [..., d] that clients send.

        Example:
            >>> RoundContext(unsent=torch.tensor([1])).select_sent(torch.tensor([1.0, 2.0, 3.0]))
            tensor([1., 3.])
        """
        if self.project is not None:
            return self.project(rows)
        if not len(self.unsent):
            return rows
        is_sent = torch.ones(rows.shape[-1], dtype=torch.bool, device=rows.device)
        is_sent[self.unsent.to(rows.device)] = False
        return rows[..., is_sent]

    def reject_rows(self, rejected: Tensor) -> None:
        """Report uploads that the aggregator leaves out of its result.

        It logs their number as ``"dropped"``, and reports their clients to ``reject``, if the
        context has ids.

        Args:
            rejected: A mask of the uploads, bool [n].

        Example:
            >>> context = RoundContext(clients=torch.tensor([7, 3, 5]), note=print, reject=print)
            >>> context.reject_rows(torch.tensor([False, True, True]))
            dropped tensor(2)
            tensor([3, 5])
        """
        self.note("dropped", rejected.count_nonzero())
        if len(self.clients):
            self.reject(self.clients[rejected.cpu()])

    def weigh_rows(self, weights: Tensor) -> None:
        """Report the weights of the uploads in an aggregator's weighted mean.

        Running statistics, and the algorithm's states that are averaged with the weights of the
        uploads, get the same weights.

        Args:
            weights: Numbers of at least 0, [n].

        Example:
            >>> context = RoundContext(clients=torch.tensor([7, 3]), weigh=print)
            >>> context.weigh_rows(torch.tensor([0.25, 0.75]))
            tensor([7, 3]) tensor([0.2500, 0.7500])
        """
        if len(self.clients):
            self.weigh(self.clients, weights)

    def mix_clients(self) -> "RoundContext":
        """Return the context of rows that mix several clients' uploads, such as their means.

        To leave out such a row rejects no single client: :meth:`reject_rows` only counts it.
        Weights of such rows are those of no client.

        Example:
            >>> context = RoundContext(clients=torch.tensor([7, 3, 5]), note=print, reject=print)
            >>> context.mix_clients().reject_rows(torch.tensor([False, True, True]))
            dropped tensor(2)
        """
        return replace(self, reject=lambda _: None, weigh=lambda *_: None)

    def select(self, index: Tensor) -> "RoundContext":
        """Return the context of some of the clients.

        Args:
            index: Mask of the clients, bool [n], or their positions, int64.
        """
        on_device = index.to(self.losses.device)
        start = self.start_losses[on_device] if len(self.start_losses) else self.start_losses
        counts = self.group_counts
        return replace(
            self,
            clients=self.clients[index.cpu()],
            losses=self.losses[on_device] if len(self.losses) else self.losses,
            start_losses=start,
            group_counts=counts[index.to(counts.device)] if len(counts) else counts,
        )
