"""The tensors that a batched local step reads and changes."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ModelRows
from pl_fed.engine.step import LocalStep, Tensors
from pl_fed.nets.rows import RowLayout, counters


class StepBuffers:
    """Step buffers: the state and the rows of a :class:`LocalStep`, reused in all rounds.

    A compiled step writes into these tensors, so they must stay the same objects.

    Args:
        step: The step.

    Attributes:
        leaves: Parameters of each trained model, as separate tensors.
        totals: Sums over the steps of the outputs of ``training_step``.
        rows: The rows that the objective may read. Rows as long as a model are split into its
            tensors by name, for distances between them and models.
    """

    def __init__(self, step: LocalStep) -> None:
        self.step = step
        client, lead = step.client, () if step.size is None else (step.size,)
        self._layouts = {model: client.row(model).layout for model in step.trained}
        self.leaves = {
            model: _allocate(layout, lead, client.row(model).data)
            for model, layout in self._layouts.items()
        }
        self._statistics: dict[str, RowLayout] = {}
        self._buffers: Tensors = {}
        self._counters: list[tuple[Tensor, Tensor]] = []
        if step.size is None:
            self._copy_buffers(client)
        self._momenta: Tensors = {}
        self.totals: dict[str, Tensor] = {}
        self.rows: dict[str, Any] = {}

    @property
    def state(self) -> dict[str, Any]:
        """The tensors that the step changes, under the names of :class:`LocalStep`."""
        return {
            "leaves": self.leaves,
            "buffers": self._buffers,
            "momenta": self._momenta,
            "totals": self.totals,
        }

    @property
    def example(self) -> Tensor:
        """A tensor of the parameters' dtype and device."""
        return next(iter(self.leaves[self.step.trained[0]].values()))

    def load(self, models: Mapping[str, ModelRows], rows: Mapping[str, Tensor]) -> None:
        """Begin a round: load models and rows, and set momenta and totals to zero.

        Args:
            models: The rows of each trained model: of at most as many clients as the stack has, or
                of one client without a stack.
            rows: Rows that the objective may read, [clients, length], or [length] for a row that
                all clients share.
        """
        for model, layout in self._layouts.items():
            _copy(layout.views(models[model].parameters), self.leaves[model])
        for model, layout in self._statistics.items():
            _copy(layout.views(models[model].statistics), self._buffers[model])
        for counter, value in self._counters:
            counter.copy_(value)
        layout, size = self._layouts[self.step.trained[0]], self.step.size
        for name, row in rows.items():
            if self.totals and name not in self.rows:
                continue  # the step does not read it
            lead = (size,) if size is not None and row.dim() == 2 else ()
            if row.shape[-1] != layout.numel:
                _fill(self.rows.setdefault(name, row.new_zeros(*lead, row.shape[-1])), row)
                continue
            if name not in self.rows:
                self.rows[name] = _allocate(layout, lead, row)
            _copy(layout.views(row), self.rows[name])
        for group in (*self._momenta.values(), self.totals):
            for tensor in group.values():
                tensor.zero_()

    def write(self, models: Mapping[str, ModelRows]) -> None:
        """End a round: write the models into rows of the shapes of :meth:`load`."""
        for model, layout in self._layouts.items():
            _copy(self.leaves[model], layout.views(models[model].parameters))
        for model, layout in self._statistics.items():
            _copy(self._buffers[model], layout.views(models[model].statistics))

    def prepare(self, gradients: Tensors, outputs: Mapping[str, Tensor]) -> None:
        """Make momenta and totals for the gradients and outputs of a first trial."""
        for model, update in zip(self.step.trained, self.step.updates or []):
            if update.momentum:
                self._momenta[model] = {
                    name: gradient.new_zeros(gradient.shape)
                    for name, gradient in gradients[model].items()
                }
        for name, value in outputs.items():
            self.totals[name] = value.new_zeros(value.shape)

    def drop_unread_rows(self) -> None:
        """Drop the rows that the objective has not read."""
        for name in self.rows.keys() - self.step.function.rows_read:
            del self.rows[name]
            del self.step.row_dims[name]

    def _copy_buffers(self, client: Client) -> None:
        """Make copies of running statistics and counters; the step changes the copies."""
        for model in self.step.trained:
            row = client.statistics(model)
            if row.layout.numel:
                self._statistics[model] = row.layout
                self._buffers[model] = _allocate(row.layout, (), row.data)
            for name, buffer in counters(client.model(model)).items():
                counter = buffer.clone()
                self._buffers.setdefault(model, {})[name] = counter
                self._counters.append((counter, buffer))


def _copy(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Copy tensors by name."""
    for name in sources.keys() & targets.keys():
        _fill(targets[name], sources[name])


def _fill(target: Tensor, source: Tensor) -> None:
    """Copy the first clients, as many as both tensors have."""
    if source.dim() == target.dim() > 0 and source.shape[0] != target.shape[0]:
        clients = min(source.shape[0], target.shape[0])
        source, target = source[:clients], target[:clients]
    target.copy_(source)


def _allocate(layout: RowLayout, lead: tuple[int, ...], like: Tensor) -> dict[str, Tensor]:
    return {
        name: like.new_zeros((*lead, *shape)) for name, shape in zip(layout.names, layout.shapes)
    }
