"""Passes over all of the clients' own samples: each client's models and rows, without a step."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, SampleFunction, Visit
from pl_fed.data.client_data import ClientData
from pl_fed.devices import to_device
from pl_fed.engine.rule import trains_convolutions
from pl_fed.nets.calls import swap_tensors
from pl_fed.nets.modes import evaluation_mode, full_precision
from pl_fed.nets.own_buffers import restore_buffers
from pl_fed.text import first_line
from pl_fed.trees import Tree, leaves, tree_map
from pl_fed.types import Batch

_BATCH = 512  # samples of one client in a minibatch
_STACK_BATCH = 4096  # samples in a minibatch of several clients

Stack = tuple[Any, Any, Any]
"""Tensors by name, rows by name and the fields of a batch; for several clients, or their dims."""


@dataclass
class OwnSamples:
    """Own samples: lets a function of an algorithm visit all samples of each client.

    Several clients are visited at once under ``torch.vmap`` on a GPU, and on a CPU if no
    convolution is trained; otherwise, and if the function cannot be stacked, one by one.

    Args:
        client: The algorithm.
        data: The clients' data.
        load: Returns samples by their ids, as local steps get them, without augmentation.
        most: The largest number of samples of a client, for a trial; ``None`` for all samples.

    Attributes:
        stacks: Whether several clients are visited at once; ``None`` decides by the rule above.
    """

    client: Client
    data: ClientData
    load: Callable[[Tensor], Batch]
    most: int | None = None
    stacks: bool | None = None

    def visit(self, round: ClientRound, function: SampleFunction, part: str) -> Iterator[Visit]:
        """Yield the results of a function on minibatches of all samples of each client.

        Models are in evaluation mode and full precision, without gradients.

        Args:
            round: The clients, with their models and rows.
            function: The function of a minibatch of ONE client.
            part: ``train``, ``val`` or ``test``.

        Raises:
            ValueError: If the net reads its own parameters in place of those of a client.
        """
        client, pass_ = self.client, _Pass(self, round, function, part)
        client.check_other_weights()
        with (
            torch.no_grad(),
            full_precision(client.device),
            evaluation_mode(client),
            restore_buffers(client),
        ):
            if not self._stacks(round):
                yield from pass_.visit_one_by_one()
                return
            stack = pass_.visit_stacked()
            try:
                first = next(stack)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # an error without stacking appears again below
                self.stacks = False
                reason = first_line(error)
                rank_zero_info(f"Clients' samples are visited one by one, not stacked: {reason}.")
                yield from pass_.visit_one_by_one()
            else:
                yield first
                yield from stack

    def _stacks(self, round: ClientRound) -> bool:
        """Return whether to visit several clients at once."""
        net = self.client.model("global")
        if len(round) == 1 or not self.client.averages_samples or self.client.mixes_samples:
            return False
        if self.stacks is None:
            return self.client.device.type == "cuda" or not trains_convolutions(net)
        return self.stacks


class _Pass:
    """A pass of a function over the samples of a round's clients.

    Args:
        source: The samples.
        round: The clients, with their models and rows.
        function: The function of a minibatch of ONE client.
        part: ``train``, ``val`` or ``test``.
    """

    def __init__(
        self, source: OwnSamples, round: ClientRound, function: SampleFunction, part: str
    ) -> None:
        self.client, self.load = source.client, source.load
        self.round = round
        self.function = function
        self.train, self.part = source.data.train, source.data.part(part)
        self.ids = round.ids.cpu()
        sizes = self.part.sizes[self.ids]
        self.sizes = sizes if source.most is None else sizes.clamp(max=source.most)
        own = source.data.own_batches
        self.width = _BATCH if own is None else own.size
        models = dict(round.models)
        models.setdefault("global", round.broadcast)
        self.tensors: dict[str, Tensor] = {}
        for name, rows in models.items():
            parameters = self.client.row(name).layout.views(rows.parameters)
            statistics = self.client.statistics(name).layout.views(rows.statistics)
            named = {**parameters, **statistics}
            self.tensors |= {f"{name}_model.{key}": named[key] for key in named}
        self.shared = set()
        if "global" not in round.models:
            self.shared = {name for name in self.tensors if name.startswith("global_model.")}
        self.rows = round.readable_rows()

    def visit_one_by_one(self) -> Iterator[Visit]:
        """Yield the results of each client alone, in minibatches."""
        for position in range(len(self.round)):
            positions = torch.tensor([position])
            for first in range(0, max(1, int(self.sizes[position])), self.width):
                batch = self._load_batch(positions, first, self.width)
                tensors, rows, fields = (
                    tree_map(lambda leaf: leaf[0], tree)
                    for tree in self._select(positions, batch, expands=True)
                )
                results = self._call(tensors, rows, fields)
                yield _record(positions, first, batch, tree_map(lambda leaf: leaf[None], results))

    def visit_stacked(self) -> Iterator[Visit]:
        """Yield the results of all clients with further samples at once, in minibatches."""
        width = min(self.width, max(1, _STACK_BATCH // len(self.round)))
        for first in range(0, max(1, int(self.sizes.max())), width):
            positions = (self.sizes > first).nonzero().flatten()
            if not first:
                positions = torch.arange(len(self.round))
            batch = self._load_batch(positions, first, width)
            stack = self._select(positions, batch, expands=False)
            dims = (
                {name: None if name in self.shared else 0 for name in self.tensors},
                {name: None if row.dim() == 1 else 0 for name, row in self.rows.items()},
                0,
            )
            results = torch.vmap(self._call, in_dims=dims, randomness="error")(*stack)
            yield _record(positions, first, batch, results)

    def _load_batch(self, positions: Tensor, first: int, width: int) -> Batch:
        """Return a minibatch of some clients, [clients, samples, ...], padded with own samples.

        Args:
            positions: The positions of the clients, int64.
            first: The place of the first sample among each client's samples.
            width: The largest number of samples of a client.
        """
        sizes, part, ids = self.sizes[positions], self.part, self.ids[positions]
        slots = first + torch.arange(max(1, min(width, int(sizes.max()) - first)))
        is_sample = slots < sizes[:, None]
        places = part.offsets[ids][:, None] + torch.where(is_sample, slots, 0)
        samples = part.index if len(part.index) else self.train.index  # no client has any
        index = samples[to_device(places.clamp(max=len(samples) - 1), samples)]
        is_empty = sizes == 0
        if is_empty.any():
            starts = self.train.offsets[ids].clamp(max=len(self.train.index) - 1)
            own = self.train.index[to_device(starts, index)]
            index = torch.where(to_device(is_empty[:, None], index), own[:, None], index)
        flat = self.load(index.flatten())
        mask = to_device(is_sample.flatten(), leaves(flat.targets)[0])
        batch = Batch(flat.inputs, flat.targets, mask, flat.samples)
        return Batch(*(tree_map(lambda t: t.unflatten(0, index.shape), leaf) for leaf in batch[:4]))

    def _select(self, positions: Tensor, batch: Batch, expands: bool) -> Stack:
        """Return the tensors and rows of some clients, and the fields of their batch.

        Args:
            positions: The positions of the clients, int64.
            batch: Their batch.
            expands: Whether tensors that all clients share get a first dimension for clients.
        """
        index = to_device(positions, leaves(batch.targets)[0])
        all_clients = len(positions) == len(self.round)

        def select(tensor: Tensor, is_shared: bool) -> Tensor:
            """Select the rows of the clients."""
            if is_shared:
                return tensor[None] if expands else tensor
            return tensor if all_clients else tensor[index]

        tensors = {name: select(t, name in self.shared) for name, t in self.tensors.items()}
        rows = {name: select(row, row.dim() == 1) for name, row in self.rows.items()}
        return tensors, rows, [*batch[:4]]

    def _call(self, tensors: Mapping[str, Tensor], rows: Mapping[str, Any], fields: Any) -> Tree:
        """Return the result of the function for ONE client."""
        with self.client.reading(rows), swap_tensors(self.client, tensors):
            return self.function(Batch(*fields))


def _record(positions: Tensor, first: int, batch: Batch, results: Tree) -> Visit:
    """Return the record of a visit of some clients with a batch [clients, samples, ...]."""
    mask, samples = cast(Tensor, batch.mask), cast(Tensor, batch.samples)
    return Visit(to_device(positions, mask), first, mask, samples, results)
