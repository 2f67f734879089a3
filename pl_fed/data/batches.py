"""The minibatches of a chunk of clients: drawn by key, gathered by index."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pl_fed.data.client_data import ClientData
from pl_fed.random import fork_torch_rng, key, random_bits
from pl_fed.trees import Tree, bytes_of_sample, gather, leaves, split, tree_map
from pl_fed.types import Batch

_GATHER_BYTES = 1 << 20  # of a client's samples are gathered, and poisoned, at once: stays in cache
_KEEP_BYTES = 1 << 24  # of all clients of a chunk that goes step by step, together
_LAST = torch.iinfo(torch.int64).max  # sorts behind every random number


@dataclass(frozen=True)
class LocalWork:
    """How long a model is trained in a round: so many minibatch steps, or so many passes.

    Args:
        steps: Number of minibatch steps; or ``None``.
        epochs: Number of passes over the client's data; used where ``steps`` is ``None``.
    """

    steps: int | None = None
    epochs: int = 1


@dataclass(frozen=True)
class BatchRule:
    """How a client's samples become minibatches.

    Args:
        batch_size: Samples in a minibatch.
        drop_last: Whether a pass leaves out its last, smaller minibatch (never its only one).
        shuffle: Whether each pass has an order of its own; else it is the client's own order.
        limit: Most steps of a round: an int, a fraction of the client's steps, or ``None``.

    Example:
        >>> BatchRule(batch_size=10).count(LocalWork(epochs=2), size=25)
        6
    """

    batch_size: int
    drop_last: bool = False
    shuffle: bool = True
    limit: int | float | None = None

    def batches_per_pass(self, size: int) -> int:
        """Return the number of minibatches in one pass over ``size`` samples."""
        full, rest = divmod(size, self.batch_size)
        return full if rest == 0 or (self.drop_last and full > 0) else full + 1

    def samples_per_pass(self, size: int) -> int:
        """Return the number of samples that one pass over ``size`` samples takes."""
        return min(size, self.batches_per_pass(size) * self.batch_size)

    def is_uniform(self, sizes: Tensor) -> bool:
        """Return whether all minibatches of clients of some sizes have as many samples.

        Example:
            >>> BatchRule(10).is_uniform(torch.tensor([20, 30]))
            True
            >>> BatchRule(10).is_uniform(torch.tensor([20, 25]))
            False
        """
        if not len(sizes):
            return True
        width = min(self.batch_size, int(sizes.max()))
        short = sizes % max(1, width) > 0
        return not bool((short & (sizes < width) if self.drop_last else short).any())

    def count(self, work: LocalWork, size: int) -> int:
        """Return the number of steps of a client with ``size`` samples."""
        steps = work.epochs * self.batches_per_pass(size) if work.steps is None else work.steps
        if isinstance(self.limit, float):
            return max(1, int(steps * self.limit))
        return steps if self.limit is None else min(steps, self.limit)


class Batches:
    """The minibatches of one chunk of clients in one round.

    The order of client k's samples in pass p of round t comes from the key (seed, "batches", t, k,
    p): it is the same in whatever chunk, engine or process the client is trained.

    Args:
        data: The data of the federation.
        clients: The chunk, int64 [clients].
        steps: How many steps each of them runs.
        rule: How samples become minibatches.
        seed: The seed of the federation.
        round: The round, from 0.
        poison: What the data attack does to a batch, by client id, for the byzantine ones.
        augment: Applied to the inputs of each minibatch; its draws are keyed too.
    """

    def __init__(
        self,
        data: ClientData,
        clients: Tensor,
        steps: list[int],
        rule: BatchRule,
        seed: int,
        round: int,
        poison: dict[int, Callable[[Batch], Batch]] | None = None,
        augment: Callable[[Tree], Tree] | None = None,
    ) -> None:
        self.data = data
        self.clients: list[int] = clients.tolist()
        self.steps = steps
        self.rule = rule
        self.seed = seed
        self.round = round
        self.poison = poison or {}
        self.augment = augment
        self.sizes: list[int] = data.train.sizes[clients].tolist()
        self._last_blocks: dict[int, tuple[int, list[Batch]]] = {}
        self._begins = data.train.offsets[clients]
        self._used = [rule.samples_per_pass(size) for size in self.sizes]
        self._passes = [-(-n // rule.batches_per_pass(size)) for n, size in zip(steps, self.sizes)]

    @property
    def max_steps(self) -> int:
        """Steps of the client that has most to do."""
        return max(self.steps, default=0)

    @property
    def width(self) -> int:
        """Samples of a full minibatch: fewer than the rule says if no client has as many."""
        return min(self.rule.batch_size, self.data.train.largest)

    def truncate(self, max_steps: int) -> "Batches":
        """Return the first of them."""
        return Batches(
            self.data,
            torch.tensor(self.clients),
            [min(steps, max_steps) for steps in self.steps],
            self.rule,
            self.seed,
            self.round,
            self.poison,
            self.augment,
        )

    def iterate_client(self, position: int) -> Iterator[Batch]:
        """Yield the minibatches of one client of the chunk, each of its true size, unmasked."""
        blocks = self._blocks(position, self._steps_at_once(_GATHER_BYTES))
        for step, batch in enumerate(chain.from_iterable(blocks)):
            yield self._augmented(batch, position, step)

    def stack_step(self, step: int) -> Batch:
        """Return the minibatches of all clients of the chunk at one step, stacked.

        Returns:
            ``inputs`` [clients, batch, ...], ``targets`` [clients, batch, ...], ``mask`` [clients,
            batch], false where a client has fewer samples or nothing left to do, and ``samples``.
        """
        table, masks = self._table
        index = table[step]
        rows = self._rows(index.flatten())
        inputs, targets = (tree_map(lambda t: t.unflatten(0, index.shape), tree) for tree in rows)
        for position in range(len(self.clients)) if self.augment else self._poisoned:
            if step < self.steps[position]:
                batch = self._augmented(self._kept(position, step), position, step)
                _write(inputs, batch.inputs, position)
                _write(targets, batch.targets, position)
        return Batch(inputs, targets, masks[step], index)

    @cached_property
    def _poisoned(self) -> list[int]:
        return [i for i, client in enumerate(self.clients) if client in self.poison]

    @property
    def _sample_bytes(self) -> int:
        return max(1, bytes_of_sample(self.data.inputs))

    def _rows(self, index: Tensor) -> tuple[Tree, Tree]:
        return self.data.inputs_of(index), gather(self.data.targets, index)

    def _steps_at_once(self, most: int) -> int:
        """Return how many minibatches of a client are gathered and poisoned at once."""
        return max(1, most // (self.width * self._sample_bytes))

    def _kept(self, position: int, step: int) -> Batch:
        """Return a client's minibatch, of a block that is kept as long as it is used."""
        at_once = self._steps_at_once(min(_GATHER_BYTES, _KEEP_BYTES // len(self.clients)))
        number, place = divmod(step, at_once)
        kept = self._last_blocks.get(position)
        if kept is None or kept[0] != number:
            kept = number, next(self._blocks(position, at_once, number * at_once))
            self._last_blocks[position] = kept
        return kept[1][place]

    def _blocks(self, position: int, at_once: int, first: int = 0) -> Iterator[list[Batch]]:
        """Yield the minibatches of one client from a step on, so many at once."""
        sizes, order = self._batch_sizes(position), self._order(position)
        done = sum(sizes[:first])
        for begin in range(first, len(sizes), at_once):
            some = sizes[begin : begin + at_once]
            index = order[done : done + sum(some)]
            batch = self._gather(index, position, done)
            parts = zip(split(batch.inputs, some), split(batch.targets, some), index.split(some))
            yield [Batch(inputs, targets, None, samples) for inputs, targets, samples in parts]
            done += len(index)

    def _gather(self, index: Tensor, position: int, done: int) -> Batch:
        """Return samples of one client, of which it has taken so many before in this round."""
        inputs, targets = self._rows(index)
        batch = Batch(inputs, targets, None, index)
        poison = self.poison.get(self.clients[position])
        if poison is None:
            return batch
        visits = torch.arange(done, done + len(index), device=index.device) // self._used[position]
        return poison(batch._replace(visits=visits))._replace(visits=None)

    def _augmented(self, batch: Batch, position: int, step: int) -> Batch:
        if self.augment is None:
            return batch
        draw = key(self.seed, "augment", self.round, self.clients[position], step)
        with fork_torch_rng(batch.device) as seed:
            seed(draw)
            return batch._replace(inputs=self.augment(batch.inputs))

    def _batch_sizes(self, position: int) -> list[int]:
        """The number of samples of each step of one client."""
        per_pass, used = self.rule.batches_per_pass(self.sizes[position]), self._used[position]
        last = used - (per_pass - 1) * self.rule.batch_size
        one_pass = [self.rule.batch_size] * (per_pass - 1) + [last]
        return (one_pass * self._passes[position])[: self.steps[position]]

    def _order(self, position: int) -> Tensor:
        """The samples of one client in the order in which it takes them, pass after pass."""
        order = self._orders[position, : self._passes[position], : self._used[position]]
        return order.reshape(-1)[: sum(self._batch_sizes(position))]

    @cached_property
    def _orders(self) -> Tensor:
        """Sample ids in the order in which they are taken, int64 [clients, passes, samples].

        Clients of fewer samples or passes have whatever ids follow.
        """
        passes, longest = max(self._passes, default=0), max(self.sizes, default=0)
        index = self.data.train.index
        slots = torch.arange(longest, device=index.device)
        if self.rule.shuffle:
            keys = [
                [key(self.seed, "batches", self.round, client, number) for number in range(passes)]
                for client in self.clients
            ]
            numbers = random_bits(_on(index, keys)[..., None], slots)
            if min(self.sizes, default=0) < longest:
                beyond = slots >= _on(index, self.sizes)[:, None, None]
                numbers.masked_fill_(beyond, _LAST)
            slots = numbers.argsort(dim=-1)
        else:
            slots = slots.expand(len(self.clients), passes, longest)
        places = slots + self._begins.to(index.device)[:, None, None]
        return index[places.clamp_(max=max(len(index) - 1, 0))]

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """Sample ids and which of them count, both [steps, clients, batch]."""
        orders, size = self._orders, self.rule.batch_size
        counts_per_pass = [self.rule.batches_per_pass(size) for size in self.sizes]
        per_pass, used, steps = _on(orders, [counts_per_pass, self._used, self.steps])
        step = torch.arange(self.max_steps, device=orders.device)[:, None]
        width = min(size, max(self.sizes, default=0))
        slots = (step % per_pass * size)[..., None] + torch.arange(width, device=orders.device)
        counts = (slots < used[:, None]) & (step < steps)[..., None]
        client = torch.arange(len(steps), device=orders.device)
        row = client * orders.shape[1] + step // per_pass  # of the orders, one pass each
        place = row[..., None] * orders.shape[2] + slots
        return orders.flatten()[torch.where(counts, place, 0)], counts


def _write(stack: Tree, tree: Tree, position: int) -> None:
    """Write one client's first samples into those of a stack of clients."""
    for target, source in zip(leaves(stack), leaves(tree), strict=True):
        target[position, : len(source)] = source


def _on(like: Tensor, numbers: list[Any]) -> Tensor:
    """Return int64 numbers on a tensor's device."""
    return torch.tensor(numbers, dtype=torch.int64, device=like.device)
