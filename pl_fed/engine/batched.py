"""Local steps as functions of tensors, for many clients at once or one client after the other."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ModelRows, Objective, select_rows
from pl_fed.devices import numbers_on, to_device
from pl_fed.engine.base import (
    CannotCompileError,
    CannotStackError,
    Chunk,
    Engine,
    LocalSettings,
    allocate_models,
    allocate_rows,
    stack_outputs,
)
from pl_fed.engine.buffers import StepBuffers
from pl_fed.engine.external_optimizers import ExternalOptimizer, StackOptimizer
from pl_fed.engine.optimizer_states import OptimizerStates
from pl_fed.engine.step import (
    LocalStep,
    Tensors,
    have_same_gradients,
    read_options,
    read_updates,
)
from pl_fed.engine.tracing import plain_attributes
from pl_fed.nets.calls import READS_OWN_WEIGHTS
from pl_fed.nets.gradient_hooks import have_gradient_hooks, list_step_hooks
from pl_fed.nets.own_buffers import restore_buffers
from pl_fed.random import fork_all_generators, fork_torch_rng, key, read_global_state
from pl_fed.text import first_line
from pl_fed.trees import clone, count_samples, leaves, read_versions, tree_map
from pl_fed.types import Batch

_MAX_PREPARED_STEPS = 4  # compiling does not pay off for steps that change from round to round


class BatchedRunner(Engine):
    """Batched runner: an engine that runs clients by :class:`LocalStep`, compiled or not.

    A compiled step (forward, backward, clipping, and SGD's update in place) is traced once and
    compiled for the current shapes. Tracing runs ``training_step`` once as Python: it may read
    tensors, and plain attributes of the client and its modules. A change of such an attribute
    recompiles the step. The runner refuses steps that read the trainer or draw from torch's own
    generators.

    Args:
        settings: Mixed precision, gradient clipping and accumulation.
        size: The number of stacked clients; ``None`` for clients in turn.
        compiled: Whether the step is compiled.
        mode: ``mode`` of ``torch.compile``; ``"reduce-overhead"`` takes CUDA graphs.
    """

    def __init__(
        self,
        settings: LocalSettings,
        size: int | None = None,
        compiled: bool = False,
        mode: str | None = None,
    ) -> None:
        super().__init__(settings)
        self.size = size
        self.compiled = compiled
        self.mode = mode
        self._objective: Objective | None = None
        self._steps: dict[Hashable, PreparedStep] = {}

    def prepare(
        self,
        client: Client,
        optimizer: torch.optim.Optimizer,
        chunk: Chunk,
        rows: dict[str, Tensor],
    ) -> "PreparedStep":
        """Return the prepared step for a chunk; it is built on its first use.

        Args:
            client: The algorithm.
            optimizer: The local optimizer.
            chunk: The clients.
            rows: The rows that the objective may read.

        Raises:
            CannotCompileError: If too many rounds need different steps, or the module or the
                optimizer has hooks of single steps.
        """
        objective = chunk.objective
        _check_step(client, optimizer, chunk)
        if self._objective is not objective:
            self._objective, self._steps = objective, {}
        own, data = client.row(objective.trained[0]).data, chunk.batches.data
        dims = {name: None if row.dim() == 1 else 0 for name, row in rows.items()}
        updates = None  # kept states and sums of gradients are in an external optimizer
        is_external = bool(chunk.round.optimizer_states) or self.settings.batches_per_step > 1
        if self.compiled and not is_external:
            updates = read_updates(objective, optimizer)
        traced = self.compiled or self.settings.casts(client.device)
        signature = (
            (chunk.batches.width, *data.kinds),
            (own.device, own.dtype, *dims.items()),
            (type(optimizer), chunk.rates is None, *(updates or ())),
            *(plain_attributes(client) if traced else ()),
        )
        if signature not in self._steps:
            if len(self._steps) == _MAX_PREPARED_STEPS:
                if self.compiled:
                    raise CannotCompileError(
                        "shapes, options or attributes of the client change from round to round"
                    )
                self._steps.clear()
            step = LocalStep(
                client,
                objective,
                updates,
                settings=self.settings,
                size=self.size,
                row_dims=dims,
                compiled=self.compiled,
            )
            self._steps[signature] = PreparedStep(step, self.mode)
        prepared, total = self._steps[signature], chunk.batches.steps
        prepared.ends_early |= any(list(steps) != list(total) for steps in chunk.steps.values())
        return prepared


class StackedRunner(BatchedRunner):
    """Stacked runner: all clients of a chunk take each step together.

    Clients of unequal size get masked batches, and a client that has completed its steps does not
    move. A compiled stack always has the same size; with fewer clients, places stay empty.
    """

    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows: see :meth:`Engine.run`.

        Raises:
            CannotCompileError: If the step cannot be compiled; the rows are unchanged then.
            CannotStackError: If clients have different running statistics, or an eager step changes
                a buffer or draws from a global generator; the rows are unchanged then.
        """
        batches, models, clients = chunk.batches, chunk.round.models, len(chunk.clients)
        rows = chunk.round.readable_rows()
        _load_statistics(client, {model: models[model] for model in chunk.objective.trained})
        step = self.prepare(client, optimizer, chunk, rows)
        with torch.no_grad(), chunk.note_errors(range(clients)):
            step.buffers.load(models, rows)
            inputs = StepInputs(step, optimizer, chunk)
            external = step.make_stack_optimizer(optimizer, chunk)
            runs_module = step.is_eager and client.task.runs_steps
            with _refuse_shared_changes(client) if runs_module else nullcontext():
                for index in range(batches.max_steps):
                    batch = drop_unsupported_mask(step.client, batches.stack_step(index))
                    # a traced step keeps its mask: the fields of its batch may not change
                    if step.is_eager and clients == self.size and batches.is_full(index):
                        batch = batch._replace(mask=None)
                    gradients = step(inputs.build_stack(index, batch), is_full=True)
                    if external is not None:
                        external.step(index, gradients)
            trained = {  # stacked nets do not change running statistics
                model: ModelRows(allocate_rows(models[model].parameters), models[model].statistics)
                for model in chunk.objective.trained
            }
            step.buffers.write(trained)
            models.update(trained)
            if external is not None:
                external.hand_over()
            chunk.on_done(clients)
            totals = step.buffers.totals
            return {name: total[:clients] / inputs.ends[-1] for name, total in totals.items()}


def _load_statistics(client: Client, models: Mapping[str, ModelRows]) -> None:
    """Load the running statistics that all clients of a stack have.

    A stacked step reads the buffers of the modules. The clients' rows differ from them, for
    example, after a callback has changed a buffer of the global model.

    Raises:
        CannotStackError: If the clients' statistics of a model differ.
    """
    for model, rows in models.items():
        own, statistics = client.statistics(model), rows.statistics
        if not own.layout.numel:
            continue
        if bool((statistics != statistics[0]).any()):
            raise CannotStackError(f"clients have different buffers of model `{model}`")
        own.data.copy_(statistics[0])


@contextmanager
def _refuse_shared_changes(client: Client) -> Iterator[None]:
    """Refuse changes that a stack makes once for all its clients, and restore what they changed.

    A module's steps may begin with them after the trial before training, such as a queue that
    fills from an epoch on.

    Raises:
        CannotStackError: If the block changes a buffer, or draws from a global generator.
    """
    with restore_buffers(client) as changed, fork_all_generators():
        state = read_global_state()
        yield
        draws_globally = read_global_state() != state
    if changed:
        raise CannotStackError(f"training changes a buffer of the net ({changed[0]})")
    if draws_globally:
        raise CannotStackError("`training_step` draws from a global generator of Python or NumPy")


class TurnRunner(BatchedRunner):
    """Turn runner: one client after the other takes its steps.

    Minibatches are not padded; full ones go through the compiled step.
    """

    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows: see :meth:`Engine.run`.

        Raises:
            CannotCompileError: If the step cannot be compiled; the rows are unchanged then.
        """
        batches, models, width = chunk.batches, chunk.round.models, chunk.batches.width
        rows = chunk.round.readable_rows()
        step = self.prepare(client, optimizer, chunk, rows)
        trained = allocate_models(models, chunk.objective.trained)
        inputs, outputs = StepInputs(step, optimizer, chunk), []
        states = OptimizerStates(step.client, chunk)
        with (
            torch.no_grad(),
            chunk.note_errors(range(len(chunk.clients))),
            fork_torch_rng(step.client.device) as seed,
        ):
            for position, client_id in enumerate(batches.clients):
                seed(key(batches.seed, "torch", batches.round, client_id))
                own = {model: before[position] for model, before in models.items()}
                step.buffers.load(own, select_rows(rows, position))
                external = step.make_external_optimizer(optimizer, chunk, position)
                if external is not None:
                    states.load(external.optimizer, external.parameters, position)
                minibatches = batches.iterate_client(position)
                for index, numbers in enumerate(inputs.build_client(position, minibatches)):
                    gradients = step(numbers, count_samples(numbers["targets"]) == width)
                    if external is not None:
                        external.step(index, gradients)
                step.buffers.write({model: after[position] for model, after in trained.items()})
                if external is not None:
                    states.store(external.optimizer, external.parameters, position)
                count, totals = batches.steps[position], step.buffers.totals
                outputs.append({name: total / count for name, total in totals.items()})
                chunk.on_done(position + 1)
        models.update(trained)
        states.hand_over()
        return stack_outputs(outputs)


def _check_step(client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk) -> None:
    """Refuse hooks and reads of single steps: a step is a function of tensors."""
    if any(map(have_gradient_hooks, client.trained_parameters.values())):
        raise CannotCompileError("a parameter has a hook on its gradient")
    if any(list_step_hooks(optimizer)):
        raise CannotCompileError("the local optimizer has hooks on its steps")
    if hooks := client.task.list_gradient_hooks(client.global_model):
        raise CannotCompileError(f"the module has hooks of single steps (`{'`, `'.join(hooks)}`)")
    if client.draws_globally:
        raise CannotCompileError(
            "`training_step` draws from the global generator of Python or NumPy"
        )
    if chunk.rates is not None and client.reads_optimizer:
        raise CannotCompileError(
            "`training_step` reads the optimizer or its schedule, whose rates are those of each"
            " client's step"
        )


class PreparedStep:
    """Prepared step: a local step with its buffers; if compiled, it compiles on its first use.

    Args:
        step: The step.
        mode: ``mode`` of ``torch.compile``.

    Attributes:
        buffers: The state and the rows of the step.
        ends_early: Whether a model completes its steps before others of its client.
    """

    def __init__(self, step: LocalStep, mode: str | None) -> None:
        self.step = step
        self.ends_early = False
        self.buffers = StepBuffers(step)
        self.client = step.client
        self.mode = mode
        self._run: Any = None  # the compiled step

    def __call__(self, inputs: dict[str, Any], is_full: bool) -> Tensors:
        """Take a step, and return the gradients for an external optimizer.

        Args:
            inputs: The inputs of :class:`LocalStep`.
            is_full: Whether the inputs have the shapes of the compiled step.

        Raises:
            CannotCompileError: If the step cannot be compiled.
        """
        if not self.buffers.totals:
            self._try(self._prepare, inputs)
        if self.step.compiled and is_full:
            if self._run is None:
                self._run = self._try(self._compile, inputs)
            tensors = leaves(inputs)
            if self._run.takes(tensors):
                return self._run(tensors)  # type: ignore[no-any-return]
        return self.step(self.buffers.state, inputs)

    @property
    def is_eager(self) -> bool:
        """Whether the step is neither compiled nor traced: its inputs may change their kind."""
        return not self.step.traced

    def compute_outputs(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the outputs of ``training_step`` without taking a step."""
        return self.step.gradients(clone(self.buffers.state), inputs)[1]

    def make_external_optimizer(
        self, optimizer: torch.optim.Optimizer, chunk: Chunk, position: int
    ) -> ExternalOptimizer | None:
        """Return a client's optimizer for a step that contains no update; otherwise ``None``."""
        if self.step.updates is not None:
            return None
        settings, length = self.step.settings, chunk.batches.steps[position]
        return ExternalOptimizer(
            self.step.objective,
            optimizer,
            self.buffers.leaves,
            {model: [steps[position]] for model, steps in chunk.steps.items()},
            chunk.plan_steps(settings.batches_per_step, position, length),
            settings,
            None if chunk.rates is None else chunk.rates[position],
            stacked=False,
        )

    def make_stack_optimizer(
        self, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> StackOptimizer | None:
        """Return the optimizer of a stack whose step contains no update; otherwise ``None``."""
        if self.step.updates is not None:
            return None
        states = OptimizerStates(self.client, chunk)
        settings, leaves = self.step.settings, self.buffers.leaves
        return StackOptimizer(self.step.objective, optimizer, leaves, states, settings)

    def _prepare(self, inputs: dict[str, Any]) -> None:
        """Make buffers for the outputs of one trial; drop the rows that the step does not read."""
        forked = fork_torch_rng(self.client.device)
        with restore_buffers(self.client) as changed, forked as seed:
            seed(0)
            state = clone(self.buffers.state)
            versions = read_versions(state["leaves"])
            gradients, outputs = self.step.gradients(state, inputs)
        if changed:
            raise CannotCompileError(f"training changes a buffer of the net ({changed[0]})")
        if self.step.compiled and self.step.size is None:
            if self.ends_early and read_versions(state["leaves"]) != versions:
                raise CannotCompileError(
                    "a step changes trained parameters in place, also those of a model that has"
                    " completed its steps"
                )
            self._compare_gradients(gradients, inputs)
        # later eager steps may read other rows; in mixed precision it has been traced with all rows
        if self.step.compiled and not self.step.casts:
            self.buffers.drop_unread_rows()
        self.buffers.prepare(gradients, outputs)

    def _compare_gradients(self, gradients: Tensors, inputs: dict[str, Any]) -> None:
        """Refuse a step if a graph would give other gradients.

        Raises:
            CannotCompileError: With the reason.
        """
        with restore_buffers(self.client), fork_torch_rng(self.client.device) as seed:
            seed(0)
            expected = self.step.backward_gradients(clone(self.buffers.state), inputs)
            if not have_same_gradients(gradients, expected):
                raise CannotCompileError(
                    "`loss.backward()` has other gradients than torch.autograd.grad, as for"
                    " activation checkpoints with use_reentrant=True"
                )
            seed(0)
            if self.step.reads_own_weights(self.buffers.state, inputs):
                raise CannotCompileError(READS_OWN_WEIGHTS)

    def _compile(self, inputs: dict[str, Any]) -> Any:
        from pl_fed.engine.compiled import CompiledStep

        return CompiledStep(self.step, self.buffers.state, inputs, self.mode)

    def _try(self, function: Callable[[dict[str, Any]], Any], inputs: dict[str, Any]) -> Any:
        """Call a function outside of a step, and restore torch's generators.

        Raises:
            CannotCompileError: If it fails for a compiled step. If the error has another cause, the
                eager step will raise it again.
        """
        with fork_torch_rng(self.client.device):
            if not self.step.compiled:
                return function(inputs)
            try:
                return function(inputs)
            except (torch.OutOfMemoryError, CannotCompileError):
                raise
            except Exception as error:
                reason = first_line(error)
                if " " not in reason and str(error):  # a KeyError's key
                    reason = f"{type(error).__name__} {reason}"
                raise CannotCompileError(reason) from error


class StepInputs:
    """Step inputs: makes the inputs of a chunk's steps, as :class:`LocalStep` defines them.

    Args:
        prepared: The step with its buffers.
        optimizer: The local optimizer, with this round's options.
        chunk: The clients.

    Attributes:
        ends: The number of steps of each client on each trained model, and, last, on any of them,
            int64 [models + 1, clients].
    """

    def __init__(
        self, prepared: PreparedStep, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> None:
        device, batches, size = prepared.client.device, chunk.batches, prepared.step.size
        self._rows = prepared.buffers.rows
        self._width = batches.width
        self._size = size or 0
        index = torch.arange(batches.max_steps, device=device)
        self._index = index.unbind()
        self._traced = prepared.step.traced
        self._first_end = min(batches.steps, default=0)  # before, all clients run
        self._is_compiled = prepared.step.compiled
        self._options = read_options(optimizer, prepared.buffers.example)
        self._rates: Tensor | None = None  # [clients, steps, groups]
        if chunk.rates is not None and prepared.step.updates is not None:
            example = prepared.buffers.example
            self._rates = to_device(chunk.rates, example, example.dtype)
            if size is not None:
                self._rates = pad_to_shape(self._rates, (size,))
        self.ends = numbers_on(index, [*chunk.steps.values(), batches.steps])
        draws = chunk.draw_keys(prepared.client.draws)
        self._draws = to_device(draws, index)  # [clients, steps]
        if size is None:  # [clients, steps, models + 1]
            self._running = index[:, None] < self.ends.T[:, None]
        else:  # [steps, models + 1, clients]
            ends = pad_to_shape(self.ends, (len(self.ends), size))
            self._running = index[:, None, None] < ends
            self._draws = pad_to_shape(self._draws, (size, batches.max_steps))

    def build_client(self, position: int, batches: Iterable[Batch]) -> Iterator[dict[str, Any]]:
        """Yield the inputs of one client's steps.

        To take the numbers of all its steps apart at once is faster than step by step.

        Args:
            position: The position of the client in the chunk.
            batches: The client's minibatches.
        """
        numbers = zip(self._index, self._draws[position].unbind(), self._running[position].unbind())
        for number, (batch, (index, draw, running)) in enumerate(zip(batches, numbers)):
            yield {
                **{name: tree for name, tree in batch._asdict().items() if tree is not None},
                "index": index,
                "draw": draw,
                "rows": self._rows,
                "running": running,
                "options": self._list_options(number, position),
            }

    def build_stack(self, index: int, batch: Batch, width: int | None = None) -> dict[str, Any]:
        """Return the inputs of a step of all clients, padded to the size of the stack.

        Args:
            index: The index of the step.
            batch: The clients' minibatches.
            width: The number of samples of a padded minibatch; by default that of a full one.
        """
        shape = (self._size, width or self._width)
        fields = {name: tree for name, tree in batch._asdict().items() if tree is not None}
        if batch.samples is None or batch.samples.shape != shape:
            fields = tree_map(lambda leaf: pad_to_shape(leaf, shape), fields)
        if self._is_compiled and index >= self._first_end:  # see `add_products_in_place`
            running = self._running[index, -1]
            fields["inputs"] = tree_map(lambda leaf: blank(leaf, running), fields["inputs"])
        return {
            **fields,
            "index": self._index[index] if self._traced else index,
            "draw": self._draws[:, index],
            "rows": self._rows,
            "running": self._running[index],
            "options": self._list_options(index, slice(None)),
        }

    def _list_options(self, index: int, clients: int | slice) -> Tensor:
        """Return SGD's numbers in a step, [groups, 4]; for a stack with rates, [..., clients]."""
        options = self._options[index > 0]
        if self._rates is None:
            return options
        rates = self._rates[clients, index].movedim(-1, 0)  # [groups] or [groups, clients]
        others = options[:, 1:]
        if rates.dim() == 2:
            others = others[..., None].expand(-1, -1, rates.shape[1])
        return torch.cat([rates[:, None], others], dim=1)


def drop_unsupported_mask(client: Client, batch: Batch) -> Batch:
    """Return minibatches without their mask if the task's loss does not support padding.

    Such minibatches have no padding: only clients that have completed their steps have masked
    samples.
    """
    return batch if client.averages_samples else batch._replace(mask=None)


def blank(samples: Tensor, running: Tensor) -> Tensor:
    """Return samples with zeros for the clients that do not run; integers stay the same.

    Example:
        >>> blank(torch.tensor([[torch.nan], [2.0]]), torch.tensor([False, True]))
        tensor([[0.],
                [2.]])
    """
    if not samples.is_floating_point():
        return samples
    return torch.where(running.view(-1, *[1] * (samples.dim() - 1)), samples, 0)


def pad_to_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Pad the first dimensions with zeros, for missing clients and samples.

    Example:
        >>> pad_to_shape(torch.ones(1, 2), (2, 3))
        tensor([[1., 1., 0.],
                [0., 0., 0.]])
    """
    if tensor.shape[: len(shape)] == shape:
        return tensor
    padded = tensor.new_zeros(*shape, *tensor.shape[len(shape) :])
    padded[tuple(slice(length) for length in tensor.shape[: len(shape)])] = tensor
    return padded
