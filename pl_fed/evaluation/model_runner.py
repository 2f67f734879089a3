"""Runs models on the clients' samples: in batches, one by one, or several clients at once."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, ModelRows
from pl_fed.clients.model_guard import restore_models
from pl_fed.data.client_data import ClientData
from pl_fed.engine.channels_last import ChannelsLast
from pl_fed.engine.own_samples import OwnSamples
from pl_fed.engine.products import FasterProducts, is_mkl_slow
from pl_fed.engine.rule import trains_convolutions
from pl_fed.evaluation.restored_values import RestoredValues
from pl_fed.nets.calls import READS_OWN_WEIGHTS, Net, reads_own_weights
from pl_fed.tasks import LightningTask
from pl_fed.text import first_line
from pl_fed.torch_internals import has_operator_modes
from pl_fed.trees import Tree, gather, tree_map

_BATCH = 1024  # samples in a batch
_CONVOLUTION_BATCH = 128  # samples in a batch of a convolutional net on a CPU, to fit the caches
_STACK_BATCH = 4096  # samples in a batch of a stack of models
_ROWS_BYTES = 1 << 25  # bytes of the clients' rows that are loaded at once


class ModelRunner:
    """Model runner: runs the global model and the personal models on the clients' samples.

    The global model sees samples of several clients in one batch, unless it mixes the samples of a
    batch. Personal models of several clients run at once under ``torch.vmap`` if this is faster: on
    a GPU, and on a CPU if no convolution is trained.

    Args:
        client: The algorithm.
        begin: Returns clients, by their ids, at the start of an evaluation.
        restored: Undoes the changes of an evaluation.
        stacked: See the attribute.

    Attributes:
        stacked: Whether personal models of several clients run at once; ``None`` decides by the
            rule above. It becomes ``False`` if the models cannot be stacked.
    """

    def __init__(
        self,
        client: Client,
        begin: Callable[[Tensor], ClientRound],
        restored: RestoredValues,
        stacked: bool | None = None,
    ) -> None:
        self.client = client
        self.restored = restored
        self.stacked = stacked
        self._begin = begin
        self._checked_models: set[str] = set()  # they can be called with other weights
        net = client.model("global")
        self._convolves = any(isinstance(layer, nn.Conv2d) for layer in net.modules())
        self._mixes_samples = client.mixes_samples

    def load_clients(
        self, clients: Tensor, sizes: Tensor, model: str, rows: ModelRows | None = None
    ) -> Iterator[int]:
        """Yield the position of each client with samples while its model is loaded.

        Args:
            clients: Client ids, int64 [clients].
            sizes: Number of samples of each client.
            model: The name of the model.
            rows: The clients' models; by default those at the start of an evaluation.
        """
        if model == "global" and rows is None:
            for position in self.order_clients(sizes, model):
                yield position
                self.restored.restore()
            return
        for positions in self.split_clients(sizes):
            own = self._begin(clients[positions]).models[model] if rows is None else rows[positions]
            with restore_models(self.client, [model]):
                for number, position in enumerate(positions.tolist()):
                    self.client.model_rows(model).copy_(own[number])
                    yield position
                    self.restored.restore()

    def order_clients(self, sizes: Tensor, model: str, rows: ModelRows | None = None) -> list[int]:
        """Return the positions of the clients with samples, in the order of `load_clients`."""
        if model == "global" and rows is None:
            order: list[int] = sizes.nonzero().flatten().tolist()
            return order
        return [p for positions in self.split_clients(sizes) for p in positions.tolist()]

    def run(
        self, data: ClientData, part: str, clients: Tensor, models: Iterable[str]
    ) -> Iterator[tuple[str, Tensor, Tensor, Tree]]:
        """Yield (model, positions of clients, sample ids, outputs) in batches."""
        personal = [model for model in models if model != "global"]
        if "global" in models:
            samples = self.samples(data, part, clients)
            module = self.client.model("global")
            for position, index in samples.batches():
                outputs = self.predict(module, data.inputs_of(index))
                self.restored.restore()
                yield "global", position, index, outputs
        if not personal:
            return
        for positions in self.split_clients(data.part(part).sizes[clients]):
            start = self._begin(clients[positions])
            samples = self.samples(data, part, clients[positions])
            positions = positions.to(data.device)
            for model in personal:
                if self.client.predicts_by_net:
                    runs = self.run_personal(model, start.models[model], samples)
                else:
                    runs = self._run_hook(model, start, data, part)
                for position, index, outputs in runs:
                    yield model, positions[position], index, outputs

    def samples(self, data: ClientData, part: str, clients: Tensor) -> "SampleBatches":
        """Return the samples of clients, in batches of a size that suits the net.

        The steps of a LightningModule get batches of the size of the part's own dataloader: a log
        may depend on the batch. Otherwise batches of the data set's own have the size of
        minibatches.
        """
        size = _CONVOLUTION_BATCH if self._convolves_on_cpu else _BATCH
        if data.own_batches is not None:
            size = data.own_batches.size
        if isinstance(self.client.task, LightningTask):
            size = data.evaluation_sizes.get(part, size)
        return SampleBatches(data, part, clients, size, separates=self._mixes_samples)

    @property
    def _convolves_on_cpu(self) -> bool:
        return self._convolves and self.client.device.type == "cpu"

    def split_clients(self, sizes: Tensor) -> Iterator[Tensor]:
        """Yield positions of clients with samples, in groups that fit into memory together."""
        positions = sort_by_size(sizes)
        if len(positions):  # a split of nothing has one part
            yield from positions.split(self.max_clients)

    @property
    def max_clients(self) -> int:
        """The largest number of clients for which rows are loaded at once."""
        row = self.client.row("global").data
        return max(1, _ROWS_BYTES // (row.nbytes * len(self.client.models)))

    def run_personal(
        self, model: str, rows: ModelRows, samples: "SampleBatches"
    ) -> Iterator[tuple[Tensor, Tensor, Tree]]:
        """Yield (positions of clients, sample ids, outputs) of the clients' own models."""
        if len(samples.sizes) > 1 and samples.sizes.any() and self._stacks(model):
            stack = self._run_stacked(model, rows, samples)
            try:
                first = next(stack)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # an error without stacking appears again below
                self.stacked = False
                reason = first_line(error)
                rank_zero_info(f"Personal models are evaluated one by one, not stacked: {reason}.")
            else:
                yield first
                yield from stack
                return
        yield from self._run_one_by_one(model, rows, samples)

    def _run_hook(
        self, model: str, start: ClientRound, data: ClientData, part: str
    ) -> Iterator[tuple[Tensor, Tensor, Tree]]:
        """Yield (positions of clients, sample ids, outputs) of the algorithm's ``predict``."""
        own = OwnSamples(self.client, data, data.batch, stacks=self.stacked)
        for visit in own.visit(start, partial(self.client.predict, model), part):
            valid = visit.mask.flatten().nonzero().flatten()
            position = visit.positions[valid.div(visit.mask.shape[1], rounding_mode="floor")]
            outputs = tree_map(lambda leaf: leaf.flatten(0, 1), visit.results)
            yield position, visit.samples.flatten()[valid], gather(outputs, valid)

    def _stacks(self, model: str) -> bool:
        """Return whether to run a personal model of several clients at once."""
        device = self.client.device.type
        if not self.client.averages_samples:  # one by one, as a client's outputs are collected
            return False
        if self._mixes_samples:  # a stack has padding
            return False
        if torch.is_autocast_enabled(device):  # autocast has no effect under vmap
            return False
        if self.stacked is None:
            return device == "cuda" or not trains_convolutions(self.client.model(model))
        return self.stacked

    def _run_one_by_one(
        self, model: str, rows: ModelRows, samples: "SampleBatches"
    ) -> Iterator[tuple[Tensor, Tensor, Tree]]:
        module = self.client.model(model)
        with restore_models(self.client, [model]):
            for number in range(len(samples.sizes)):
                self.client.model_rows(model).copy_(rows[number])
                for position, index in samples.client_batches(number):
                    inputs = samples.data.inputs_of(index)
                    yield position, index, self.predict(module, inputs)
                self.restored.restore()

    def predict(self, module: nn.Module, inputs: Tree) -> Tree:
        """Return a model's outputs; on a CPU with faster kernels."""
        on_cpu = self.client.device.type == "cpu" and has_operator_modes()
        with (
            ChannelsLast(replaces_images=True) if on_cpu and self._convolves else nullcontext(),
            FasterProducts() if on_cpu and is_mkl_slow() else nullcontext(),
        ):
            return self.client.task.predict(module, inputs)

    def _run_stacked(
        self, model: str, rows: ModelRows, samples: "SampleBatches"
    ) -> Iterator[tuple[Tensor, Tensor, Tree]]:
        client, task = self.client, self.client.task
        module = client.model(model)
        tensors = client.row(model).layout.views(rows.parameters)
        tensors |= client.statistics(model).layout.views(rows.statistics)
        stack = torch.vmap(
            lambda weights, inputs: task.predict(Net(module, weights), inputs), randomness="error"
        )

        def predict(table: Tensor) -> Tree:
            """Return the outputs of the first clients for samples by their ids."""
            weights = {name: tensor[: len(table)] for name, tensor in tensors.items()}
            flat_inputs = samples.data.inputs_of(table.flatten())
            return stack(
                weights, tree_map(lambda leaf: leaf.unflatten(0, table.shape), flat_inputs)
            )

        for table, valid in samples.padded_tables():
            if model not in self._checked_models:
                if reads_own_weights([client.row(model).data], lambda: predict(table[:, :1])):  # noqa: B023
                    raise RuntimeError(READS_OWN_WEIGHTS)
                self._checked_models.add(model)
            flat_outputs = tree_map(lambda leaf: leaf.flatten(0, 1), predict(table))
            position = valid.div(table.shape[1], rounding_mode="floor")
            yield position, table.flatten()[valid], gather(flat_outputs, valid)


def sort_by_size(sizes: Tensor) -> Tensor:
    """Return the positions of clients with samples in descending order of size.

    Clients of similar size need little padding.
    """
    return sizes.argsort(descending=True, stable=True)[: int((sizes > 0).sum())]


class SampleBatches:
    """Sample batches: the ids of clients' samples in batches.

    Args:
        data: The data of the federation.
        part: ``train``, ``val`` or ``test``.
        clients: Client ids, int64 [clients].
        batch: Number of samples in a batch.
        separates: Whether the samples of two clients are never in one batch.
    """

    def __init__(
        self,
        data: ClientData,
        part: str,
        clients: Tensor,
        batch: int,
        separates: bool = False,
    ) -> None:
        self.data = data
        self.separates = separates
        self.part = data.part(part)
        self.batch = batch
        self.begins = self.part.offsets[clients]
        self.sizes = self.part.sizes[clients]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (positions of clients, sample ids) of all clients, in batches."""
        if self.separates:
            for client in self.sizes.nonzero().flatten().tolist():
                yield from self.client_batches(client)
            return
        if not self.sizes.any():
            return
        index = self.part.index
        begins = self.begins - (self.sizes.cumsum(0) - self.sizes)
        places = torch.arange(int(self.sizes.sum())) + begins.repeat_interleave(self.sizes)
        position = torch.repeat_interleave(self.sizes).to(index.device)
        places = places.to(index.device)
        batches = zip(position.split(self.batch), places.split(self.batch))
        for batch_position, batch_places in batches:
            yield batch_position, index[batch_places]

    def client_batches(self, position: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (position, repeated for each sample; sample ids) of one client, in batches."""
        begin, size = int(self.begins[position]), int(self.sizes[position])
        for index in self.part.index[begin : begin + size].split(self.batch):
            yield torch.full_like(index, position), index

    def padded_tables(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield padded tables of sample ids; clients must be in descending order of size.

        Yields:
            Sample ids [clients, width] of the clients with further samples; and the positions of
            the samples, without padding, in the flattened table, int64.
        """
        device, index = self.part.index.device, self.part.index
        width = max(1, _STACK_BATCH // len(self.sizes))
        for first in range(0, int(self.sizes[0]), width):
            remaining = self.sizes[self.sizes > first] - first
            slots = torch.arange(min(width, int(remaining[0])))
            is_sample = slots < remaining[:, None]
            begins = (self.begins[: len(remaining)] + first)[:, None]
            places = begins + slots.minimum(remaining[:, None] - 1)
            yield index[places.to(device)], is_sample.flatten().nonzero().flatten().to(device)
