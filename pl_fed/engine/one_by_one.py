"""The engine ``one_by_one``: one client after the other on the client's own modules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import select_rows
from pl_fed.engine.base import (
    Chunk,
    Engine,
    allocate_models,
    as_outputs,
    rebuild_optimizer,
    restore_rates,
    set_rates,
    stack_outputs,
)
from pl_fed.engine.optimizer_states import OptimizerStates
from pl_fed.nets.own_buffers import OwnBuffers
from pl_fed.random import fork_all_generators, fork_torch_rng, key
from pl_fed.tasks.base import SkippedStepError
from pl_fed.types import Batch


class _TrainedModel(NamedTuple):
    """Trained model: a model of a client, with its steps and gradient hooks.

    Attributes:
        name: The name of the model.
        parameters: Its parameters.
        steps: The client's number of steps on it.
        hooked_net: Its module if it has hooks on its gradients; otherwise ``None``.
    """

    name: str
    parameters: list[Tensor]
    steps: int
    hooked_net: nn.Module | None


class OneByOne(Engine):
    """One by one: runs the clients of a chunk in turn, eagerly, with any net and any optimizer."""

    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows: see :meth:`Engine.run`."""
        batches, models = chunk.batches, _WorkingModels(client, chunk)
        rows, states = chunk.round.readable_rows(), OptimizerStates(client, chunk)
        keys: list[list[int]] = chunk.draw_keys(client.draws).tolist()
        outputs = []
        try:
            with _fork_generators(client) as seed, restore_rates(optimizer, chunk.rates):
                for position, client_id in enumerate(batches.clients):
                    seed(key(batches.seed, "torch", batches.round, client_id))
                    models.load(position)
                    own = rebuild_optimizer(chunk.objective, optimizer, models.parameters)
                    states.load(own, models.parameters, position)
                    with client.reading(select_rows(rows, position)):
                        means = self._train(client, own, chunk, models, keys[position], optimizer)
                    states.store(own, models.parameters, position)
                    outputs.append(means)
                    chunk.on_done(position + 1)
        finally:  # also after an exception of one client
            models.restore_buffers()
            client.zero_grad()
            client.draws.start(0)
        models.hand_over()
        states.hand_over()
        return stack_outputs(outputs)

    def _train(
        self,
        client: Client,
        optimizer: torch.optim.Optimizer,
        chunk: Chunk,
        models: "_WorkingModels",
        keys: list[int],
        trainer_optimizer: torch.optim.Optimizer,
    ) -> dict[str, Tensor]:
        """Take one client's steps, and store each model after its last step.

        An exception has a note of the round, the client and the step.

        Args:
            client: The algorithm.
            optimizer: The optimizer of the client.
            chunk: The clients.
            models: The models, loaded for the client.
            keys: The key of the layers' draws in each step.
            trainer_optimizer: The optimizer of the trainer, whose rates a step may read.

        Returns:
            The means of the outputs of the steps.
        """
        position = models.position
        models.keep_completed(0)
        totals: dict[str, Tensor] = {}
        taken, per_step = 0, self.settings.batches_per_step
        is_waiting = False  # whether gradients wait for the optimizer
        rates = None if chunk.rates is None else chunk.rates[position]
        plan = chunk.plan_steps(per_step, position, chunk.batches.steps[position])
        for step, batch in enumerate(_load_minibatches(chunk, position)):
            client.draws.start(keys[step])
            set_rates(trainer_optimizer, rates, step)
            if not is_waiting:
                optimizer.zero_grad()
            outputs: dict[str, Tensor] = {}
            try:
                with self.settings.autocast():
                    outputs = as_outputs(chunk.objective.step(batch, step))
                loss = outputs["loss"]
                _drop_left_gradients(client, optimizer, is_waiting)
                (loss if per_step == 1 else loss / per_step).backward()
            except SkippedStepError:
                chunk.skipped.setdefault(position, []).append(step)
            except Exception as error:
                chunk.add_note(error, [position], step)
                raise
            models.own_buffers.adopt()  # those that a step has replaced
            models.restore_completed(step)
            if outputs:
                taken += 1
                is_waiting = True
                models.call_hooks("on_after_backward", optimizer, step)
            if is_waiting and plan[step]:
                is_waiting = False
                models.call_hooks("on_before_optimizer_step", optimizer, step)
                set_rates(optimizer, rates, step)
                self._move(optimizer, models.trained, step)
            models.keep_completed(step + 1)
            for name, value in outputs.items():
                value = value.detach()
                totals[name] = totals[name] + value if name in totals else value
        return {name: total / taken for name, total in totals.items()}

    def _move(
        self, optimizer: torch.optim.Optimizer, trained: list[_TrainedModel], step: int
    ) -> None:
        """Let the optimizer move the models that still train, by their clipped gradients.

        Args:
            optimizer: The optimizer of the client.
            trained: The trained models.
            step: The index of the step.
        """
        for model in trained:
            if step >= model.steps:
                _clear_gradients(model.parameters)
            elif self.settings.clipping.value:
                self._clip(model.parameters)
        optimizer.step()

    def _clip(self, parameters: list[Tensor]) -> None:
        """Replace the gradients of a model by its clipped gradients."""
        moved = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = self.settings.clipping.clip([cast(Tensor, p.grad) for p in moved])
        for parameter, gradient in zip(moved, gradients):
            parameter.grad = gradient


def _load_minibatches(chunk: Chunk, position: int) -> Iterator[Batch]:
    """Yield the minibatches of a client; an exception has a note of the round and the client."""
    with chunk.note_errors([position]):
        yield from chunk.batches.iterate_client(position)


@contextmanager
def _fork_generators(client: Client) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds torch's generators, and all global ones if the steps need it.

    A LightningModule may begin to draw from them after the trial before training.
    """
    draws_globally = client.draws_globally or client.task.runs_steps
    fork = fork_all_generators if draws_globally else fork_torch_rng
    with fork(client.device) as seed:
        yield seed


_SMALL = 1 << 12  # numbers of a buffer that is copied without a comparison


def _clear_gradients(parameters: list[Tensor]) -> None:
    """Remove the gradients of parameters, so that optimizers skip these."""
    for parameter in parameters:
        parameter.grad = None


def _drop_left_gradients(
    client: Client, optimizer: torch.optim.Optimizer, is_waiting: bool
) -> None:
    """Drop the gradients that ``backward`` of a module's step has left, as Lightning does.

    Gradients of earlier minibatches that wait for the optimizer stay.
    """
    if client.task.runs_steps and not is_waiting:
        for group in optimizer.param_groups:
            _clear_gradients(group["params"])


class _WorkingModels:
    """Working models: the client's own models; they hold the models of one client at a time.

    Args:
        client: The algorithm.
        chunk: The clients; :meth:`hand_over` replaces their models.

    Attributes:
        parameters: The parameters of each trained model.
        position: The position of the loaded client in the chunk.
        trained: The trained models of the loaded client.
    """

    def __init__(self, client: Client, chunk: Chunk) -> None:
        names = chunk.objective.trained
        self.client = client
        self.models = chunk.round.models
        self.steps = chunk.steps
        self.own = {name: client.model_rows(name) for name in names}
        self.after = allocate_models(self.models, names)
        self.parameters = {name: list(client.row(name).tensors.values()) for name in names}
        self.position = 0
        self.trained: list[_TrainedModel] = []
        # no row contains these buffers, such as BatchNorm's number of batches or a criterion's
        self.own_buffers = OwnBuffers(client)
        in_rows = {
            id(buffer) for name in names for buffer in client.statistics(name).tensors.values()
        }
        buffers = self.own_buffers.name_buffers().values()
        outside = {id(buffer): buffer for buffer in buffers if id(buffer) not in in_rows}
        self.counters = [(buffer, buffer.clone()) for buffer in outside.values()]

    def load(self, position: int) -> None:
        """Load the models of a client."""
        self.position, self.trained = position, []
        for name, own in self.own.items():
            own.copy_(self.models[name][position])
            net, steps = self.client.model(name), self.steps[name][position]
            hooked = net if self.client.task.list_gradient_hooks(net) else None
            self.trained.append(_TrainedModel(name, self.parameters[name], steps, hooked))
        self.restore_buffers()

    def restore_buffers(self) -> None:
        """Restore the buffers outside of rows to their values before the first client.

        Buffers that a failed step has replaced return to their places first.
        """
        self.own_buffers.put_back()
        for buffer, value in self.counters:
            # a large one is as a rule a constant: reading it takes half the time of a copy
            if buffer.numel() <= _SMALL or not torch.equal(buffer, value):
                buffer.copy_(value)

    def call_hooks(self, hook: str, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Call a hook of the models that still train: see :meth:`Task.call_gradient_hook`."""
        for model in self.trained:
            if model.hooked_net is not None and step < model.steps:
                self.client.task.call_gradient_hook(hook, model.hooked_net, optimizer)

    def keep_completed(self, num_steps: int) -> None:
        """Write the models that train for this number of steps into the client's new rows."""
        for model in self.trained:
            if model.steps == num_steps:
                self.after[model.name][self.position] = self.own[model.name]

    def restore_completed(self, num_steps: int) -> None:
        """Restore the buffers of the models that train for at most this number of steps.

        The steps of other models may call them, in training mode.
        """
        for model in self.trained:
            if model.steps <= num_steps:
                statistics = self.after[model.name].statistics[self.position]
                self.own[model.name].statistics.copy_(statistics)

    def hand_over(self) -> None:
        """Replace the chunk's models by the trained models."""
        self.models.update(self.after)
