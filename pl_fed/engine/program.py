"""A local step, compiled or not, and the tensors that it runs on."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ModelRows
from pl_fed.engine.compiled_step import CompiledStep
from pl_fed.engine.step import LocalStep, Tensors, cloned, tensors_of
from pl_fed.engine.tracing import CannotCompileError
from pl_fed.nets.rows import RowLayout, buffers_outside_rows, counters
from pl_fed.random import fork_torch_rng
from pl_fed.trees import tree_map

_PLAIN = (int, float, complex, str, type(None))
_MIRRORS = {"_flat_weights", "_flat_weight_refs"}  # a recurrent layer's own lists of its parameters
_BOOKKEEPING = {
    "constructor_arguments",
    "_rows",
    "_readable",
    "_objective",
    "_states",
    "_server_states",
    "models",
    "_task_told_by",
}
_NOT_READ = {*vars(LightningModule()), *_BOOKKEEPING, *_MIRRORS} - {"training"}  # changes no step
_TOLERANCE = {True: 5e-2, False: 1e-3}  # of mixed precision, and without; relative


class Program:
    """A :class:`LocalStep` and the tensors that it changes, which are kept from round to round.

    Args:
        step: The step.
        client: The algorithm.
        size: How many clients are stacked, or ``None`` for one that is not.
        compiled: Whether the step is compiled.
        mode: ``mode`` of ``torch.compile``.

    Attributes:
        leaves: Parameters of each trained model, each a tensor of its own.
        totals: Sums over the steps of what ``training_step`` gives.
        rows: What the objective may read: rows as long as a model, cut into its tensors by name,
            so that models may be pulled to them; and others as they are.
    """

    def __init__(
        self, step: LocalStep, client: Client, size: int | None, compiled: bool, mode: str | None
    ) -> None:
        self.step = step
        self.client = client
        self.size = size
        self.compiled = compiled
        self.mode = mode
        lead = () if size is None else (size,)
        self.layouts = {model: client.row(model).layout for model in step.trained}
        self.leaves = {
            model: _empty(layout, lead, client.row(model).data)
            for model, layout in self.layouts.items()
        }
        self.statistics: dict[str, RowLayout] = {}
        self.buffers: Tensors = {}
        self.counters: list[tuple[Tensor, Tensor]] = []
        if size is None:
            self._own_buffers()
        self.momenta: Tensors = {}
        self.totals: dict[str, Tensor] = {}
        self.rows: dict[str, Any] = {}
        self._compiled: CompiledStep | None = None
        self._flat_state: list[Tensor] = []

    @property
    def example(self) -> Tensor:
        """A tensor of the parameters' dtype and device."""
        return next(iter(self.leaves[self.step.trained[0]].values()))

    def load(self, models: Mapping[str, ModelRows], rows: Mapping[str, Tensor]) -> None:
        """Begin a round: load models and rows, and reset what was summed.

        Args:
            models: Each trained model of the clients, at most as many as there is room for; or of
                one client, where clients are not stacked.
            rows: Rows that the objective may read, [clients, length], or [length] that is all
                clients'.
        """
        for model, layout in self.layouts.items():
            self._copy(layout.views(models[model].parameters), self.leaves[model])
        for model, layout in self.statistics.items():
            self._copy(layout.views(models[model].statistics), self.buffers[model])
        for counter, value in self.counters:
            counter.copy_(value)
        layout = self.layouts[self.step.trained[0]]
        for name, row in rows.items():
            if self.totals and name not in self.rows:
                continue  # it is not read
            lead = (self.size,) if self.size is not None and row.dim() == 2 else ()
            if row.shape[-1] != layout.numel:
                _fill(self.rows.setdefault(name, row.new_zeros(*lead, row.shape[-1])), row)
                continue
            if name not in self.rows:
                self.rows[name] = _empty(layout, lead, row)
            self._copy(layout.views(row), self.rows[name])
        for group in (*self.momenta.values(), self.totals):
            for each in group.values():
                each.zero_()

    def write(self, models: Mapping[str, ModelRows]) -> None:
        """End a round: write the models into rows of shapes as in :meth:`load`."""
        for model, layout in self.layouts.items():
            self._copy(self.leaves[model], layout.views(models[model].parameters))
        for model, layout in self.statistics.items():
            self._copy(self.buffers[model], layout.views(models[model].statistics))

    def __call__(self, inputs: dict[str, Any], whole: bool) -> Tensors:
        """Take a step, and return the gradients that are still to be followed.

        Args:
            inputs: See :class:`LocalStep`.
            whole: Whether they are of the shapes that the step is compiled for.

        Raises:
            CannotCompileError: If it cannot be.
        """
        if not self.totals:
            self._tried(self._prepare, inputs)
        if not self.compiled or not whole:
            return self.step(self._state(), inputs)
        if self._compiled is None:
            self._compiled = self._tried(self._compile, inputs)
        given = tensors_of(inputs)
        if not self._compiled.takes(given):
            return self.step(self._state(), inputs)
        return self._compiled(self._flat_state, given)

    def outputs(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return what ``training_step`` gives, without a step."""
        return self.step.gradients(cloned(self._state()), inputs)[1]

    def _state(self) -> dict[str, Any]:
        return {
            "leaves": self.leaves,
            "buffers": self.buffers,
            "momenta": self.momenta,
            "totals": self.totals,
        }

    def _tried(self, function: Callable[[dict[str, Any]], Any], inputs: dict[str, Any]) -> Any:
        """Do what a step by itself would not, and leave torch's generators as they were."""
        with fork_torch_rng(self.client.device):
            if not self.compiled:
                return function(inputs)
            try:
                return function(inputs)
            except (torch.OutOfMemoryError, CannotCompileError):
                raise
            except Exception as error:  # if it is not the compiling, it will come again eagerly
                first, *_ = str(error).strip().splitlines() or [""]
                if " " not in first:  # a KeyError's key
                    first = f"{type(error).__name__} {first}".strip()
                raise CannotCompileError(first.rstrip(".")) from error

    def _prepare(self, inputs: dict[str, Any]) -> None:
        """Make room for what one trial gives; forget rows that a compiled step does not read."""
        with self._buffers_kept():
            found, outputs = self.step.gradients(cloned(self._state()), inputs)
        # an eager step may read others later; in mixed precision it has been traced, with all
        forgets = self.compiled and not self.step.casts
        for name in self.rows.keys() - self.step.function.rows_read if forgets else ():
            del self.rows[name]
            del self.step.row_dims[name]
        self.momenta = {
            model: {name: torch.zeros_like(gradient) for name, gradient in found[model].items()}
            for model, update in zip(self.step.trained, self.step.updates or [])
            if update.momentum
        }
        self.totals = {name: torch.zeros_like(value) for name, value in outputs.items()}

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Refuse a trial that changes a buffer which neither a row nor the step holds."""
        buffers = [
            (name, buffer, buffer.clone())
            for model in self.step.trained
            for name, buffer in buffers_outside_rows(self.client.model(model)).items()
        ]
        yield
        changed = [name for name, buffer, kept in buffers if not buffer.equal(kept)]
        for _, buffer, kept in buffers:
            buffer.copy_(kept)
        if changed:
            raise CannotCompileError(f"training changes a buffer of the net ({changed[0]})")

    def _compile(self, inputs: dict[str, Any]) -> CompiledStep:
        """Compile the step, and see that it does what it does eagerly."""
        eager, compiled = cloned(self._state()), cloned(self._state())
        # what was traced as a constant shows by other numbers
        others = {**inputs, "inputs": tree_map(_scaled, inputs["inputs"])}
        eager["gradients"] = self.step(eager, others)
        with _silent():
            program = CompiledStep(self.client, self.step, self._state(), inputs, self.mode)
            compiled["gradients"] = program(tensors_of(compiled), tensors_of(others))
        for one, other in zip(tensors_of(eager), tensors_of(compiled), strict=True):
            if not _close(one, other, _TOLERANCE[self.step.casts]):
                raise CannotCompileError("a compiled step gave other numbers than an eager one")
        self._flat_state = tensors_of(self._state())
        return program

    def _own_buffers(self) -> None:
        """Give the step buffers to change: running statistics, and counters."""
        for model in self.step.trained:
            row = self.client.statistics(model)
            if row.layout.numel:
                self.statistics[model] = row.layout
                self.buffers[model] = _empty(row.layout, (), row.data)
            for name, buffer in counters(self.client.model(model)).items():
                own = buffer.clone()
                self.buffers.setdefault(model, {})[name] = own
                self.counters.append((own, buffer))

    def _copy(self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Copy by name."""
        for name in sources.keys() & targets.keys():
            _fill(targets[name], sources[name])


def plain_attributes(client: Client) -> Iterator[object]:
    """Yield what Python code of the client and its modules may read besides tensors.

    Numbers and strings; the identities of tensors that are neither parameters nor buffers; and how
    anything else, such as a list or a dataclass, is printed.
    """
    for module in client.modules():
        for name, value in vars(module).items():
            if name in _NOT_READ:
                continue
            if isinstance(value, _PLAIN):
                yield name, value
            elif isinstance(value, Tensor):
                yield name, id(value)
            else:
                yield name, repr(value)


def _fill(target: Tensor, source: Tensor) -> None:
    """Copy as many clients as both have."""
    if source.dim() == target.dim() > 0 and len(source) != len(target):
        fewer = min(len(source), len(target))
        source, target = source[:fewer], target[:fewer]
    target.copy_(source)


def _empty(layout: RowLayout, lead: tuple[int, ...], like: Tensor) -> dict[str, Tensor]:
    return {
        name: torch.zeros((*lead, *shape), dtype=like.dtype, device=like.device)
        for name, shape in zip(layout.names, layout.shapes)
    }


def _scaled(numbers: Tensor) -> Tensor:
    """Return other numbers of the same kind."""
    return 0.75 * numbers if numbers.is_floating_point() else numbers


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    one, other = one.double(), other.double()
    scale = float(one.abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=tolerance * scale + 1e-6, equal_nan=True)


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the compiler's pages of logs back: what goes wrong is said in one sentence."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
