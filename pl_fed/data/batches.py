"""The minibatches of a chunk of clients: drawn by key, gathered by index."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pl_fed.data.client_data import ClientData
from pl_fed.functional.random import hashed, key, seeded_torch
from pl_fed.types import Batch

_GATHER_BYTES = 1 << 20  # a client's round up to this size is gathered at once: it stays in cache


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

    def per_pass(self, size: int) -> int:
        """Return the number of minibatches in one pass over ``size`` samples."""
        full, rest = divmod(size, self.batch_size)
        return full if rest == 0 or (self.drop_last and full > 0) else full + 1

    def used(self, size: int) -> int:
        """Return the number of samples that one pass over ``size`` samples takes."""
        return min(size, self.per_pass(size) * self.batch_size)

    def count(self, work: LocalWork, size: int) -> int:
        """Return the number of steps of a client with ``size`` samples."""
        steps = work.epochs * self.per_pass(size) if work.steps is None else work.steps
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
        augment: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.data = data
        self.clients = clients.tolist()
        self.steps = steps
        self.rule = rule
        self.seed = seed
        self.round = round
        self.poison = poison or {}
        self.augment = augment
        self.sizes: list[int] = data.train.sizes[clients].tolist()
        self._bounds = [self._bounds_of(*each) for each in zip(self.sizes, steps)]
        self._orders = self._draw_orders()

    @property
    def max_steps(self) -> int:
        """Steps of the client that has most to do."""
        return max(self.steps, default=0)

    def of(self, position: int) -> Iterator[Batch]:
        """Yield the minibatches of one client of the chunk, each of its true size, unmasked."""
        order, bounds = self._orders[position], self._bounds[position]
        sample_bytes = self.data.x[0].nbytes if len(self.data.x) else 1
        if self.augment is None and len(order) * sample_bytes <= _GATHER_BYTES:
            x, y, _, _ = self._gather(order, position)
            sizes = [end - begin for begin, end in bounds]  # they follow each other without gaps
            for one in zip(x.split(sizes), y.split(sizes), order.split(sizes)):
                yield Batch(one[0], one[1], None, one[2])
            return
        for step, (begin, end) in enumerate(bounds):
            yield self._augmented(self._gather(order[begin:end], position), position, step)

    def at(self, step: int) -> Batch:
        """Return the minibatches of all clients of the chunk at one step, stacked.

        Returns:
            ``x`` [clients, batch, ...], ``y`` [clients, batch, ...], ``mask`` [clients, batch],
            false where a client has fewer samples or nothing left to do, and ``samples``.
        """
        table, masks = self._table
        index = table[:, step]
        x, y = self._rows(index.flatten())
        x, y = x.unflatten(0, index.shape), y.unflatten(0, index.shape)
        for position in range(len(self.clients)) if self.augment else self._poisoned():
            if step < self.steps[position]:
                begin, end = self._bounds[position][step]
                batch = self._gather(self._orders[position][begin:end], position)
                batch = self._augmented(batch, position, step)
                x[position, : end - begin], y[position, : end - begin] = batch.x, batch.y
        return Batch(x, y, masks[:, step], index)

    def _poisoned(self) -> list[int]:
        return [i for i, client in enumerate(self.clients) if client in self.poison]

    def _rows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        # index_select takes a quarter of the time of data[index]
        return self.data.x.index_select(0, index), self.data.y.index_select(0, index)

    def _gather(self, index: Tensor, position: int) -> Batch:
        x, y = self._rows(index)
        batch = Batch(x, y, None, index)
        poison = self.poison.get(self.clients[position])
        return batch if poison is None else poison(batch)

    def _augmented(self, batch: Batch, position: int, step: int) -> Batch:
        if self.augment is None:
            return batch
        draw = key(self.seed, "augment", self.round, self.clients[position], step)
        with seeded_torch(batch.x.device) as seed:
            seed(draw)
            return batch._replace(x=self.augment(batch.x))

    def _bounds_of(self, size: int, steps: int) -> list[tuple[int, int]]:
        """Where the minibatch of each step begins and ends in the client's order."""
        per_pass, used = self.rule.per_pass(size), self.rule.used(size)
        bounds = []
        for step in range(steps):
            index, batch = divmod(step, per_pass)
            begin = index * used + batch * self.rule.batch_size
            bounds.append((begin, min(begin + self.rule.batch_size, (index + 1) * used)))
        return bounds

    def _draw_orders(self) -> list[Tensor]:
        """The samples of each client in the order in which it takes them, pass after pass."""
        passes = [-(-steps // self.rule.per_pass(n)) for steps, n in zip(self.steps, self.sizes)]
        numbers = self._numbers(passes) if self.rule.shuffle else iter(())
        orders = []
        for client, size, count, bounds in zip(self.clients, self.sizes, passes, self._bounds):
            samples, used = self.data.train.samples(client), self.rule.used(size)
            if self.rule.shuffle:
                parts = [samples[next(numbers).argsort()[:used]] for _ in range(count)]
            else:
                parts = [samples[:used]] * count
            orders.append(torch.cat(parts)[: bounds[-1][1]] if parts else samples[:0])
        return orders

    def _numbers(self, passes: list[int]) -> Iterator[Tensor]:
        """For each pass of each client a random number for each sample; hashed all at once."""
        keys, sizes = [], []
        for client, size, count in zip(self.clients, self.sizes, passes):
            for index in range(count):
                keys.append(key(self.seed, "batches", self.round, client, index))
                sizes.append(size)
        device = self.data.train.index.device
        lengths = torch.tensor(sizes, dtype=torch.int64, device=device)
        begins = lengths.cumsum(0) - lengths
        counters = torch.arange(sum(sizes), device=device) - begins.repeat_interleave(lengths)
        spread = torch.tensor(keys, dtype=torch.int64, device=device).repeat_interleave(lengths)
        return iter(hashed(spread, counters).split(sizes))

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """Sample ids and which of them count, both [clients, steps, batch]."""
        width = min(self.rule.batch_size, max(self.sizes, default=0))
        shape = (len(self.clients), self.max_steps, width)
        table = torch.zeros(shape, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.bool)
        for position, (order, bounds) in enumerate(zip(self._orders, self._bounds)):
            begin, end = torch.tensor(bounds, dtype=torch.int64).view(-1, 2).unbind(1)
            slots = begin[:, None] + torch.arange(width)
            inside = slots < end[:, None]
            found = order.cpu()[slots.clamp(max=max(len(order) - 1, 0))]
            table[position, : len(bounds)] = torch.where(inside, found, 0)
            mask[position, : len(bounds)] = inside
        return table.to(self.data.x.device), mask.to(self.data.x.device)
