"""Minibatches of a chunk of clients, in a random order that depends on seed, round and client."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from pl_fed.data.augmentation import Augmentation
from pl_fed.data.client_data import ClientData
from pl_fed.devices import numbers_on, to_device
from pl_fed.random import fork_all_generators, key, random_bits
from pl_fed.trees import Tree, count_sample_bytes, gather, split, tree_map
from pl_fed.types import Batch

_GATHER_BYTES = 1 << 20  # largest block of one client's samples, in bytes: fits into the cache
_DEVICE_BYTES = 1 << 28  # largest block, and largest total of cached blocks, on a GPU
_CACHED_BYTES = 1 << 24  # largest total of the blocks that `stack_step` caches, in bytes
_LAST = torch.iinfo(torch.int64).max  # sorts behind every random number


@dataclass(frozen=True)
class LocalWork:
    """Local work: the length of a model's training in a round, in steps or epochs.

    Args:
        steps: Number of minibatch steps, or ``None`` to count epochs.
        epochs: Number of passes over the client's data; used if ``steps`` is ``None``.
    """

    steps: int | None = None
    epochs: int = 1


@dataclass(frozen=True)
class BatchRule:
    """Batch rule: splits a client's samples into minibatches.

    Args:
        batch_size: Samples in a minibatch.
        drop_last: Whether a pass leaves out its last, smaller minibatch (never its only one).
        shuffle: Whether each pass has its own random order; else passes use the client's order.
        limit: Maximum number of steps in a round: an int, a fraction of the client's steps as a
            float, or ``None`` for no limit.
        min_batch: Samples in the smallest minibatch, from 1 to ``batch_size``. A pass leaves out a
            smaller last one, and a client with fewer samples in all takes no step.

    Example:
        >>> BatchRule(batch_size=10).count(LocalWork(epochs=2), size=25)
        6
    """

    batch_size: int
    drop_last: bool = False
    shuffle: bool = True
    limit: int | float | None = None
    min_batch: int = 1

    def batches_per_pass(self, size: int) -> int:
        """Return the number of minibatches in one pass over ``size`` samples."""
        full, remainder = divmod(size, self.batch_size)
        is_dropped = remainder < self.min_batch or (self.drop_last and full > 0)
        return full if is_dropped else full + 1

    def smallest_batch(self, size: int) -> int:
        """Return the samples in the smallest minibatch of a client; 0 if it takes no step.

        Example:
            >>> [BatchRule(10).smallest_batch(21), BatchRule(10, min_batch=2).smallest_batch(21)]
            [1, 10]
        """
        batches = self.batches_per_pass(size)
        last = size - (batches - 1) * self.batch_size
        return min(self.batch_size, last) if batches else 0

    def is_uniform(self, sizes: Tensor) -> bool:
        """Return whether all minibatches of clients with these sizes have the same size.

        Example:
            >>> BatchRule(10).is_uniform(torch.tensor([20, 30]))
            True
            >>> BatchRule(10).is_uniform(torch.tensor([20, 25]))
            False
        """
        if not len(sizes):
            return True
        width = min(self.batch_size, int(sizes.max()))
        remainders = sizes % max(1, width)
        short = (remainders > 0) & (remainders >= self.min_batch)
        return not bool((short & (sizes < width) if self.drop_last else short).any())

    def count(self, work: LocalWork, size: int) -> int:
        """Return the number of steps of a client with ``size`` samples in a round."""
        batches = self.batches_per_pass(size)
        steps = work.epochs * batches if work.steps is None else work.steps
        if not batches:
            return 0
        if isinstance(self.limit, float):
            return max(1, int(steps * self.limit))
        return steps if self.limit is None else min(steps, self.limit)


class Batches:
    """Minibatches of one chunk of clients in one round.

    The key (seed, "batches", t, k, p) determines the order of client k's samples in pass p of round
    t. The order does not depend on chunk, engine or process.

    Args:
        data: The data of all clients.
        clients: Ids of the clients in the chunk, int64 [clients].
        steps: Number of steps of each client.
        rule: Splits samples into minibatches.
        seed: Seed of the federation.
        round: The round, from 0.
        poison: Byzantine client id → change of its minibatches by the data attack.
        augment: Change of the inputs of each minibatch. Random draws depend on seed, round, client
            and step.

    Attributes:
        pass_lengths: Number of minibatches in one pass over each client's data, at least 1.
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
        self._keyed: Augmentation | None = None  # the augmentation, if a call serves all clients
        if isinstance(augment, Augmentation) and augment.is_keyed:
            self._keyed = augment
        self.sizes: list[int] = data.train.sizes[clients].tolist()
        self._last_blocks: dict[int, tuple[int, list[Batch]]] = {}
        self._last_rows: tuple[int, Tree] | None = None
        self._offsets = data.train.offsets[clients]
        per_pass = [rule.batches_per_pass(size) for size in self.sizes]
        self._pass_sizes = [
            min(size, batches * rule.batch_size) for size, batches in zip(self.sizes, per_pass)
        ]
        self.pass_lengths = [max(1, batches) for batches in per_pass]
        self._passes = [-(-n // batches) for n, batches in zip(steps, self.pass_lengths)]

    @property
    def max_steps(self) -> int:
        """Largest number of steps of a client."""
        return max(self.steps, default=0)

    @property
    def width(self) -> int:
        """Samples in a full minibatch: the batch size, or the largest client's samples if fewer."""
        return min(self.rule.batch_size, self.data.train.largest)

    def truncate(self, max_steps: int) -> "Batches":
        """Return the first minibatches: at most ``max_steps`` of each client."""
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

    def sample_ids(self) -> Tensor:
        """Return the ids of the samples of all steps, client after client, int64 [n]."""
        orders = [self._order(position) for position in range(len(self.clients))]
        return torch.cat(orders) if orders else self.data.train.index[:0]

    def iterate_client(self, position: int) -> Iterator[Batch]:
        """Yield the minibatches of the client at a position in the chunk, without padding."""
        if self.data.own_batches is not None:
            self.data.own_batches.read_ahead(lambda: self._iterate_inputs(position))
        for step, batch in enumerate(self._iterate_samples(position)):
            yield from self._augment_batches([batch], [position], step)

    def _iterate_inputs(self, first: int) -> Iterator[Tensor]:
        """Yield the rows of all minibatches from the client at a position on."""
        for position in range(first, len(self.clients)):
            for batch in self._iterate_samples(position):
                yield cast(Tensor, batch.inputs)

    def _iterate_samples(self, position: int) -> Iterator[Batch]:
        """Yield the minibatches of the client at a position, before their augmentation."""
        blocks = self._blocks(position, self._steps_per_block(self._block_bytes[0]))
        return chain.from_iterable(blocks)

    def stack_step(self, step: int) -> Batch:
        """Return the stacked minibatches of all clients of the chunk at one step.

        Returns:
            ``inputs`` [clients, batch, ...], ``targets`` [clients, batch, ...], and ``mask`` and
            ``samples`` [clients, batch]. The mask is ``False`` behind the samples of a client's
            smaller minibatch, and for a client without further steps. These places hold the
            client's own first sample: another client's could overflow, and 0 · NaN is NaN.
        """
        table, masks = self._table
        index = table[step]
        rows, shape = self._gather_step(table, step), index.shape
        inputs, targets = (tree_map(lambda t: t.view(*shape, *t.shape[1:]), tree) for tree in rows)
        augments_each = self.augment is not None and self._keyed is None
        changes_all = augments_each or self.data.redraw is not None
        changed = range(len(self.clients)) if changes_all else self._poisoned_positions
        positions = [position for position in changed if step < self.steps[position]]
        if positions:
            batches = [self._cached_batch(position, step) for position in positions]
            if augments_each:
                batches = self._augment_batches(batches, positions, step)
            for position, batch in zip(positions, batches):
                _write(inputs, batch.inputs, position)
                _write(targets, batch.targets, position)
        if self._keyed is not None:
            keys = self._sample_keys(range(len(self.clients)), step, shape[1])
            flat = self._keyed(tree_map(lambda leaf: leaf.flatten(0, 1), inputs), keys.flatten())
            inputs = tree_map(lambda leaf: leaf.view(*shape, *leaf.shape[1:]), flat)
        return Batch(inputs, targets, masks[step], index)

    def is_full(self, step: int) -> bool:
        """Return whether all clients have a minibatch of the full width at a step."""
        return step in self._full_steps

    @cached_property
    def _full_steps(self) -> set[int]:
        """The steps at which all clients have a minibatch of the full width."""
        kinds = {pair: i for i, pair in enumerate(zip(self.sizes, self.steps))}
        sizes = [self._batch_sizes(position) for position in kinds.values()]
        return {
            step
            for step in range(min(self.steps, default=0))
            if all(own[step] == self.width for own in sizes)
        }

    @cached_property
    def _poisoned_positions(self) -> list[int]:
        return [i for i, client in enumerate(self.clients) if client in self.poison]

    @property
    def _block_bytes(self) -> tuple[int, int]:
        """The largest block of a client's samples, and the largest total of cached blocks.

        A block that is poisoned on a GPU launches as many kernels for one step as for all.
        """
        if self.data.device.type == "cpu":
            return _GATHER_BYTES, _CACHED_BYTES
        return _DEVICE_BYTES, _DEVICE_BYTES

    @property
    def _sample_bytes(self) -> int:
        return max(1, count_sample_bytes(self.data.inputs))

    def _gather_rows(self, index: Tensor) -> tuple[Tree, Tree]:
        return self.data.inputs_of(index), gather(self.data.targets, index)

    def _gather_step(self, table: Tensor, step: int) -> tuple[Tree, Tree]:
        """Return the samples of all clients at one step, [clients · batch, ...].

        The rows of memory maps go to a GPU in blocks of steps: each copy waits for the GPU.

        Args:
            table: Sample ids, int64 [steps, clients, batch].
            step: The step.
        """
        if not (self.data.mapped and table.is_cuda):
            return self._gather_rows(table[step].flatten())
        length = max(1, _DEVICE_BYTES // max(1, table[0].numel() * self._sample_bytes))
        number, offset = divmod(step, length)
        if self._last_rows is None or self._last_rows[0] != number:
            block = table[number * length : (number + 1) * length].flatten(1)
            rows = self._gather_rows(block.flatten())
            self._last_rows = number, tree_map(lambda t: t.unflatten(0, block.shape), rows)
        inputs, targets = tree_map(lambda t: t[offset], self._last_rows[1])
        return inputs, targets

    def _steps_per_block(self, max_bytes: int) -> int:
        """Return the number of minibatches that are gathered and poisoned at once."""
        return max(1, max_bytes // (self.width * self._sample_bytes))

    def _cached_batch(self, position: int, step: int) -> Batch:
        """Return a client's minibatch; caches its block until the client's next block."""
        most, total = self._block_bytes
        length = self._steps_per_block(min(most, total // len(self.clients)))
        number, offset = divmod(step, length)
        cached = self._last_blocks.get(position)
        if cached is None or cached[0] != number:
            cached = number, next(self._blocks(position, length, number * length))
            self._last_blocks[position] = cached
        return cached[1][offset]

    def _blocks(self, position: int, length: int, first: int = 0) -> Iterator[list[Batch]]:
        """Yield one client's minibatches from step ``first`` on, in blocks of ``length`` steps."""
        sizes, order = self._batch_sizes(position), self._order(position)
        done = sum(sizes[:first])
        for begin in range(first, len(sizes), length):
            lengths = sizes[begin : begin + length]
            index = order[done : done + sum(lengths)]
            batch = self._gather_batch(index, position, done)
            pieces = zip(
                split(batch.inputs, lengths), split(batch.targets, lengths), index.split(lengths)
            )
            yield [Batch(inputs, targets, None, samples) for inputs, targets, samples in pieces]
            done += len(index)

    def _gather_batch(self, index: Tensor, position: int, done: int) -> Batch:
        """Return poisoned samples of one client, after ``done`` samples of it in this round."""
        inputs, targets = self._read_samples(index, position, done)
        batch = Batch(inputs, targets, None, index)
        poison = self.poison.get(self.clients[position])
        if poison is None:
            return batch
        taken = torch.arange(done, done + len(index), device=index.device)
        visits = taken // self._pass_sizes[position]
        return poison(batch._replace(visits=visits))._replace(visits=None)

    def _read_samples(self, index: Tensor, position: int, done: int) -> tuple[Tree, Tree]:
        """Return inputs and targets of one client's samples, drawn anew if these are random."""
        if self.data.redraw is None:
            return self._gather_rows(index)
        client = self.clients[position]
        keys = [
            key(self.seed, "data set", self.round, client, done + number)
            for number in range(len(index))
        ]
        return self.data.read_samples(index, keys)

    def _augment_batches(
        self, batches: list[Batch], positions: Sequence[int], step: int
    ) -> list[Batch]:
        """Return the augmented minibatches of clients at one step; each has draws of its own.

        The generators of torch, NumPy and Python are saved and restored once for all clients.
        """
        if self.augment is None or not batches:
            return batches
        augmented = []
        if self._keyed is not None:
            for batch, position in zip(batches, positions):
                keys = self._sample_keys([position], step, batch.size)[0]
                augmented.append(batch._replace(inputs=self._keyed(batch.inputs, keys)))
            return augmented
        augment = self.augment
        with fork_all_generators(batches[0].device) as seed:
            for batch, position in zip(batches, positions):
                seed(key(self.seed, "augment", self.round, self.clients[position], step))
                if isinstance(augment, Augmentation) and augment.reads_keys:
                    keys = self._sample_keys([position], step, batch.size)[0]
                    inputs = augment(batch.inputs, keys)
                else:
                    inputs = augment(batch.inputs)
                augmented.append(batch._replace(inputs=inputs))
        return augmented

    def _sample_keys(self, positions: Sequence[int], step: int, size: int) -> Tensor:
        """Return the keys of the samples of clients at a step for augmentations, [clients, size].

        They depend on round, client, step and the place in the minibatch.
        """
        keys = [
            key(self.seed, "augment", self.round, self.clients[position], step)
            for position in positions
        ]
        index = self.data.train.index
        return random_bits(
            numbers_on(index, keys)[:, None], torch.arange(size, device=index.device)
        )

    def _batch_sizes(self, position: int) -> list[int]:
        """Return the number of samples of each step of one client."""
        per_pass = self.pass_lengths[position]
        last = self._pass_sizes[position] - (per_pass - 1) * self.rule.batch_size
        one_pass = [self.rule.batch_size] * (per_pass - 1) + [last]
        return (one_pass * self._passes[position])[: self.steps[position]]

    def _order(self, position: int) -> Tensor:
        """Return the sample ids of one client in training order, pass after pass."""
        order = self._orders[position, : self._passes[position], : self._pass_sizes[position]]
        return order.reshape(-1)[: sum(self._batch_sizes(position))]

    @cached_property
    def _orders(self) -> Tensor:
        """Sample ids in training order, int64 [clients, passes, samples].

        The ids behind a client's own samples and passes are arbitrary.
        """
        passes, longest = max(self._passes, default=0), max(self.sizes, default=0)
        index = self.data.train.index
        slots = torch.arange(longest, device=index.device)
        if self.rule.shuffle:
            keys = [
                [key(self.seed, "batches", self.round, client, number) for number in range(passes)]
                for client in self.clients
            ]
            numbers = random_bits(numbers_on(index, keys)[..., None], slots)
            if min(self.sizes, default=0) < longest:
                beyond = slots >= numbers_on(index, self.sizes)[:, None, None]
                numbers.masked_fill_(beyond, _LAST)
            slots = numbers.argsort(dim=-1)
        else:
            slots = slots.expand(len(self.clients), passes, longest)
        positions = slots + to_device(self._offsets, index)[:, None, None]
        return index[positions.clamp_(max=max(len(index) - 1, 0))]

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """Sample ids and their mask, both [steps, clients, batch]; each client pads by itself."""
        orders = self._orders
        places, mask = _lay_out_steps(
            per_pass=tuple(self.pass_lengths),
            pass_sizes=tuple(self._pass_sizes),
            steps=tuple(self.steps),
            batch_size=self.rule.batch_size,
            width=min(self.rule.batch_size, orders.shape[2]),
            orders=orders.shape,
            device=orders.device,
        )
        return orders.flatten()[places], mask


@lru_cache(maxsize=1)  # chunks of the same clients follow each other, round after round
def _lay_out_steps(
    per_pass: tuple[int, ...],
    pass_sizes: tuple[int, ...],
    steps: tuple[int, ...],
    batch_size: int,
    width: int,
    orders: torch.Size,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the places of all steps' samples in flat orders, and their mask.

    Both are [steps, clients, width]; a place behind the mask is the client's first.

    Args:
        per_pass: Number of minibatches in a pass, by client.
        pass_sizes: Number of samples in a pass, by client.
        steps: Number of steps, by client.
        batch_size: Number of samples in a full minibatch.
        width: The largest number of samples in a minibatch.
        orders: The shape of the orders, [clients, passes, samples].
        device: The device of the orders.
    """
    with torch.inference_mode(False):  # an evaluation may be the first to ask
        like = torch.empty(0, device=device)
        rows = numbers_on(like, [per_pass, pass_sizes, steps])
        step = torch.arange(max(steps, default=0), device=device)[:, None]
        slots = (step % rows[0] * batch_size)[..., None] + torch.arange(width, device=device)
        mask = (slots < rows[1][:, None]) & (step < rows[2])[..., None]
        client = torch.arange(len(steps), device=device)
        row = client * orders[1] + step // rows[0]  # a row of orders is one pass
        own_first = client[:, None] * (orders[1] * orders[2])
        return torch.where(mask, row[..., None] * orders[2] + slots, own_first), mask


def _write(stack: Tree, tree: Tree, position: int) -> None:
    """Write one client's samples into the first rows at its position in a stack of clients."""

    def write(target: Tensor, source: Tensor) -> None:
        """Write the samples of one tensor."""
        target[position, : len(source)] = source

    tree_map(write, stack, tree)  # by key: a change of the batch may have another order of keys
