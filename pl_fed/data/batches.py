"""The minibatches of a chunk of clients: drawn by key, gathered by index."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pl_fed.data.client_data import ClientData
from pl_fed.functional.random import generator, hashed, key
from pl_fed.types import Batch

_GATHER_BYTES = 1 << 26  # a client's round is gathered at once up to this size


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
        self._orders = [self._order(position) for position in range(len(self.clients))]
        self._stack: tuple[Tensor, Tensor] | None = None

    @property
    def max_steps(self) -> int:
        """Steps of the client that has most to do."""
        return max(self.steps, default=0)

    def of(self, position: int) -> Iterator[Batch]:
        """Yield the minibatches of one client of the chunk, each of its true size, unmasked."""
        order, bounds = self._orders[position]
        sample_bytes = self.data.x[0].nbytes if len(self.data.x) else 1
        if self.augment is None and len(order) * sample_bytes <= _GATHER_BYTES:
            x, y, _, _ = self._gather(order, position)
            for begin, end in bounds:
                yield Batch(x[begin:end], y[begin:end])
            return
        for step, (begin, end) in enumerate(bounds):
            yield self._augmented(self._gather(order[begin:end], position), position, step)

    def at(self, step: int) -> Batch:
        """Return the minibatches of all clients of the chunk at one step, stacked.

        Returns:
            ``x`` [clients, batch, ...], ``y`` [clients, batch, ...], ``mask`` [clients, batch],
            false where a client has fewer samples or nothing left to do, and ``samples``.
        """
        table, counts = self._table()
        index = table[:, step]
        positions = torch.arange(index.shape[1], device=index.device)
        mask = positions < counts[:, step, None]
        if self.augment is None and not self.poison:
            return Batch(self.data.x[index], self.data.y[index], mask, index)
        x, y = self.data.x[index], self.data.y[index]
        changed = range(len(self.clients)) if self.augment else self._poisoned()
        for position in changed:
            count = int(counts[position, step])
            if count:
                batch = self._gather(index[position, :count], position)
                batch = self._augmented(batch, position, step)
                x[position, :count], y[position, :count] = batch.x, batch.y
        return Batch(x, y, mask, index)

    def _poisoned(self) -> list[int]:
        return [i for i, client in enumerate(self.clients) if client in self.poison]

    def _gather(self, index: Tensor, position: int) -> Batch:
        batch = Batch(self.data.x[index], self.data.y[index], None, index)
        poison = self.poison.get(self.clients[position])
        return batch if poison is None else poison(batch)

    def _augmented(self, batch: Batch, position: int, step: int) -> Batch:
        if self.augment is None:
            return batch
        client = self.clients[position]
        devices = [batch.x.device] if batch.x.is_cuda else []
        with torch.random.fork_rng(devices):
            seed = generator(self.seed, "augment", self.round, client, step).initial_seed()
            torch.manual_seed(seed)
            return batch._replace(x=self.augment(batch.x))

    def _order(self, position: int) -> tuple[Tensor, list[tuple[int, int]]]:
        """The samples of a client in the order in which it takes them, and each step's bounds."""
        samples = self.data.train.samples(self.clients[position])
        size, batch_size = len(samples), self.rule.batch_size
        per_pass = self.rule.per_pass(size)
        used = min(size, per_pass * batch_size)
        bounds, orders = [], []
        for step in range(self.steps[position]):
            index, batch = divmod(step, per_pass)
            if batch == 0:
                orders.append(self._pass(samples, position, index)[:used])
            begin = index * used + batch * batch_size
            bounds.append((begin, min(begin + batch_size, (index + 1) * used)))
        return (torch.cat(orders) if orders else samples[:0]), bounds

    def _pass(self, samples: Tensor, position: int, index: int) -> Tensor:
        if not self.rule.shuffle:
            return samples
        draw = key(self.seed, "batches", self.round, self.clients[position], index)
        counters = torch.arange(len(samples), device=samples.device)
        return samples[hashed(draw, counters).argsort()]

    def _table(self) -> tuple[Tensor, Tensor]:
        """Sample ids [clients, steps, batch] and how many of them count [clients, steps]."""
        if self._stack is None:
            width = min(self.rule.batch_size, max(self.sizes, default=0))
            shape = (len(self.clients), self.max_steps, width)
            table = torch.zeros(shape, dtype=torch.int64)
            counts = torch.zeros(shape[:2], dtype=torch.int64)
            for position, (order, bounds) in enumerate(self._orders):
                begin, end = torch.tensor(bounds, dtype=torch.int64).view(-1, 2).unbind(1)
                slots = begin[:, None] + torch.arange(width)
                inside = slots < end[:, None]
                found = order.cpu()[slots.clamp(max=max(len(order) - 1, 0))]
                table[position, : len(bounds)] = torch.where(inside, found, 0)
                counts[position, : len(bounds)] = end - begin
            device = self.data.x.device
            self._stack = (table.to(device), counts.to(device))
        return self._stack
