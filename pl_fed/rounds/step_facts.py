"""Facts about local steps: what they change besides the parameters that they train.

A trial before training finds them. It takes three local steps, with gradients and the optimizer, of
two clients A and B on two copies of the algorithm: A then B, and B then A. A client's numbers must
not depend on the client before it. The attributes that make them depend, or that differ at the end,
carry one client's values to the next.
"""

import copy
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound
from pl_fed.clients.kept_parts import STOP, kept_parts, lay_rows, user_name
from pl_fed.clients.model_guard import ModelGuard
from pl_fed.clients.optimizer_options import OptionGuard
from pl_fed.data.client_data import ClientData
from pl_fed.engine.base import Chunk, LocalSettings
from pl_fed.engine.one_by_one import OneByOne
from pl_fed.nets.kept_values import Changes, KeptValues, ValueGuard
from pl_fed.nets.rows import buffers_outside_rows
from pl_fed.random import fork_all_generators
from pl_fed.trees import Tree, count_sample_bytes
from pl_fed.types import Batch

_T = TypeVar("_T")
_STEPS, _SAMPLES = 3, 8
_BATCH_BYTES = 1 << 19  # inputs of a minibatch: large images take time


@dataclass(frozen=True)
class StepFacts:
    """Step facts: names of what local steps change besides the parameters that they train.

    Attributes:
        net: The class of the net.
        frozen_parameters: Frozen parameters that a step changes or replaces.
        replaced_parameters: Trained parameters that a step replaces by other tensors.
        toggled: Parameters whose ``requires_grad`` a step changes.
        reshaped_buffers: Buffers that a step replaces by tensors of another shape.
        counters: Saved integer buffers that a step changes and that no row contains.
        attributes: Attributes that carry values from one client to the next.
        scratch: Attributes that a step changes, and that carry nothing to the next client.
        outside: Values of classes, files and functions that a step changes without an effect on
            another client's numbers.
        shared: Those of them that are not equal for a client with another client before it.
        reset_buffers: Buffers that no row contains, which begin anew with every client.
        moved_parameters: Parameters that a step moves in memory, by ``.data = ...``.
        optimizer_options: Options of the trainer's optimizer that a step changes.
        draws_globally: Whether steps draw from the global generators of Python or NumPy.
        leaks: Whether a client's numbers depend on the client before it for another reason.
    """

    net: str = ""
    frozen_parameters: tuple[str, ...] = ()
    replaced_parameters: tuple[str, ...] = ()
    toggled: tuple[str, ...] = ()
    reshaped_buffers: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    reset_buffers: tuple[str, ...] = ()
    moved_parameters: tuple[str, ...] = ()
    optimizer_options: tuple[str, ...] = ()
    draws_globally: bool = False
    leaks: bool = False


@dataclass(frozen=True)
class StepTrial:
    """Step trial: all that local steps on a copy of an algorithm need.

    Attributes:
        client: The algorithm, after its checks. Nothing of it changes.
        data: The clients' data.
        prepare: Returns a batch as in local steps, for an algorithm.
        new_round: Returns the first round of one client, for an algorithm.
        augment: Changes the inputs of each minibatch.
        settings: Precision and clipping of the local steps.
    """

    client: Client
    data: ClientData
    prepare: Callable[[Client, Batch], Batch]
    new_round: Callable[[Client, ClientData, int], ClientRound]
    augment: Callable[[Tree], Tree] | None
    settings: LocalSettings

    def run(self, clients: Iterable[int], samples: int) -> "list[_Run]":
        """Take the local steps of clients one after the other on a new copy of the algorithm.

        Args:
            clients: The clients' ids.
            samples: Samples in a minibatch.
        """
        steps = _CopySteps(self, samples)
        return [steps.run(number) for number in clients]

    def attempt(self, run: Callable[[], _T]) -> _T | Exception:
        """Return the result of runs, or their exception; a device without memory raises it.

        A hook of a copy may write into the original, which gets its values back.
        """
        lay_rows(self.client)
        guard = ValueGuard(kept_parts(self.client))
        try:
            return run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return error
        finally:
            guard.restore()


def find_step_facts(trial: StepTrial, batch_size: int = _SAMPLES) -> StepFacts:
    """Take local steps on copies of an algorithm, and return what they change.

    Without two clients with data, the same client takes the place of the second one. Facts stay
    unknown if Python cannot copy the algorithm, or a step fails, for example without a state that
    only a fit provides: a real error appears in the first round.

    Args:
        trial: The algorithm, and what its steps need.
        batch_size: Samples in a minibatch.
    """
    sizes = trial.data.train.sizes
    ids = sizes.argsort(descending=True, stable=True)[:2].tolist()
    ids = [number for number in ids if int(sizes[number])]
    if not ids:
        return StepFacts()
    most = max(2, min(_SAMPLES, _BATCH_BYTES // max(1, count_sample_bytes(trial.data.inputs))))
    width = min(most, batch_size, *(int(sizes[number]) for number in ids))
    outcome = trial.attempt(lambda: _run_in_both_orders(trial, (ids[0], ids[-1]), width))
    if isinstance(outcome, Exception):
        return StepFacts()
    runs, leaks = outcome
    return _read_facts(trial.client, runs, leaks)


def _run_in_both_orders(
    trial: StepTrial, pair: tuple[int, int], width: int
) -> "tuple[list[_Run], bool]":
    """Return the runs A, B and, on another copy, B, A; and whether a client's numbers leak."""
    forwards, backwards = trial.run(pair, width), trial.run(pair[::-1], width)
    runs = [*forwards, *backwards]
    leaks = not (forwards[0].agrees(backwards[1]) and forwards[1].agrees(backwards[0]))
    if leaks and not any(run.changes.attributes | run.changes.outside for run in runs):
        again = trial.run(pair[::-1], width)
        leaks = backwards[0].agrees(again[0])  # otherwise its draws have no key
    return runs, leaks


def find_step_error(trial: StepTrial, number: int, samples: int) -> Exception | None:
    """Return the error of local steps on minibatches of some samples; ``None`` without one.

    Args:
        trial: The algorithm, and what its steps need.
        number: The client.
        samples: Samples in a minibatch.
    """
    outcome = trial.attempt(lambda: trial.run([number], samples))
    return outcome if isinstance(outcome, Exception) else None


def _read_facts(client: Client, runs: "list[_Run]", leaks: bool) -> StepFacts:
    """Return the facts of the four runs: A, B, and on another copy B, A."""
    first_a, second_b, first_b, second_a = runs
    changes = Changes()
    for run in runs:
        changes |= run.changes
    pairs = ((first_a, second_a), (first_b, second_b))
    names_of_values = changes.attributes | changes.outside
    different = {n for n in names_of_values if any(a.differs(b, n) for a, b in pairs)}
    memory = different if leaks else different & changes.attributes
    memory |= changes.attributes & {STOP}
    if leaks and not memory:
        memory |= changes.attributes or changes.outside
    outside = _buffers_outside_rows(client)
    trained = {f"{model}_model.{name}" for model in client.trained for name in outside[model]}
    changed = changes.buffers | changes.replaced_buffers

    def names(found: Any) -> tuple[str, ...]:
        return tuple(dict.fromkeys(user_name(client, name) for name in sorted(found)))

    own = dict(client.named_buffers(remove_duplicate=False))
    counters = {name for name in changed & trained if _is_counter(client, name, own.get(name))}
    in_rows = {
        f"{model}_model.{name}"
        for model in client.trained
        for name in client.statistics(model).layout.names
    }
    silent = {name for name in changed if name.endswith("num_batches_tracked")}
    return StepFacts(
        net=type(client.global_model).__name__,
        frozen_parameters=names(
            changes.frozen_parameters | _frozen(client, changes.replaced_parameters)
        ),
        replaced_parameters=names(
            changes.replaced_parameters - _frozen(client, changes.replaced_parameters)
        ),
        toggled=names(changes.toggled),
        reshaped_buffers=names(set().union(*(run.reshaped for run in runs))),
        counters=names(counters - silent),
        attributes=names(memory),
        scratch=tuple(sorted(changes.attributes - memory)),
        outside=tuple(sorted(changes.outside - memory)),
        shared=names((different & changes.outside) - memory),
        reset_buffers=names(changed - in_rows - counters - silent),
        moved_parameters=names(changes.moved_parameters),
        optimizer_options=tuple(sorted(set().union(*(run.options for run in runs)))),
        draws_globally=any(run.draws for run in runs),
        leaks=leaks and not memory,
    )


def _buffers_outside_rows(client: Client) -> dict[str, dict[str, Tensor]]:
    return {model: buffers_outside_rows(client.model(model)) for model in client.trained}


def _frozen(client: Client, names: frozenset[str]) -> frozenset[str]:
    """Return the frozen ones among parameters."""
    parameters = dict(client.named_parameters(remove_duplicate=False))
    return frozenset(n for n in names if n in parameters and not parameters[n].requires_grad)


def _owner(client: Client, name: str) -> nn.Module:
    return client.get_submodule(name.rpartition(".")[0])


def _is_counter(client: Client, name: str, buffer: Tensor | None) -> bool:
    """Return whether a buffer is one of integers that is saved with its module."""
    if buffer is None or buffer.is_floating_point():
        return False
    return name.rpartition(".")[2] in _owner(client, name).state_dict(keep_vars=True)


@dataclass
class _Run:
    """A client's local steps in a trial.

    Attributes:
        results: The client's rows and the means of its outputs after the steps.
        changes: What any step changed.
        values: The attributes, and values outside of modules, after each step and at the end.
        reshaped: Buffers that a step replaced by tensors of another shape.
        draws: Whether the steps have drawn from a global generator of Python or NumPy.
        options: Options of the optimizer that a step changed.
    """

    results: list[Tensor] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes)
    values: list[Mapping[str, Hashable]] = field(default_factory=list)
    reshaped: set[str] = field(default_factory=set)
    draws: bool = False
    options: set[str] = field(default_factory=set)

    def differs(self, other: "_Run", name: str) -> bool:
        """Return whether an attribute has other values in another run of the same client."""
        return any(a.get(name) != b.get(name) for a, b in zip(self.values, other.values))

    def agrees(self, other: "_Run") -> bool:
        """Return whether another run gave the same numbers within rounding."""
        return len(self.results) == len(other.results) and all(
            a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-8, equal_nan=True)
            for a, b in zip(self.results, other.results)
        )


class _CopySteps:
    """A copy of an algorithm that takes clients' local steps one by one.

    Args:
        trial: The algorithm, and what its steps need.
        width: Samples in a minibatch.
    """

    def __init__(self, trial: StepTrial, width: int) -> None:
        self.client = copy_client(trial.client).train()
        self.trial = trial
        self.width = width
        self._engine = OneByOne(trial.settings)

    def run(self, number: int) -> _Run:
        """Take the local steps of a client, and return what they changed."""
        client, found = self.client, _Run()
        with (
            fork_all_generators() as seed,
            torch.inference_mode(False),
            torch.enable_grad(),
            ModelGuard(client, {"global", *client.trained}),
        ):
            seed(0)
            batches = [self._batch(number, step) for step in range(_STEPS)]
            round = client.run_begin(self.trial.new_round(client, self.trial.data, number))
            optimizer = client.objective.build_optimizer(client.trained_parameters)
            patch_optimizers(client, optimizer)
            lay_rows(client)
            before = KeptValues.record(kept_parts(client))
            options = OptionGuard([optimizer])

            def step(batch: Batch, index: int) -> Any:
                state = _global_state()
                outputs = client.objective.step(batch, index)
                found.draws |= _global_state() != state
                after = KeptValues.record(kept_parts(client), reads_frozen=False)
                found.changes |= before.changes(after)
                found.values.append({**after.attributes, **after.outside})
                found.reshaped |= _find_reshaped(before, after)
                found.options |= {*options.restore()}
                return outputs

            chunk = Chunk(
                torch.tensor([number]),
                replace(client.objective, step=step),
                cast(Any, _TrialBatches(number, batches)),
                {model: [_STEPS] for model in client.trained},
                round,
            )
            try:
                outputs = self._engine.run(client, optimizer, chunk)
            except RuntimeError:
                if not found.reshaped:  # no engine can put such a buffer back
                    raise
                return found
            after = KeptValues.record(kept_parts(client))
        changes = before.changes(after)
        found.changes |= replace(changes, buffers=frozenset(), replaced_buffers=frozenset())
        found.values.append({**after.attributes, **after.outside})
        for model in client.trained:
            rows = chunk.round.models[model]
            found.results += [rows.parameters.clone(), rows.statistics.clone()]
        found.results += [value.clone() for value in outputs.values()]
        return found

    def _batch(self, number: int, step: int) -> Batch:
        """Return a client's minibatch of one step."""
        samples = self.trial.data.train.samples(number)
        places = (torch.arange(self.width) + step * self.width) % len(samples)
        index = samples[places.to(samples.device)]
        batch = self.trial.prepare(self.client, self.trial.data.batch(index))
        if self.trial.augment is not None:
            batch = batch._replace(inputs=self.trial.augment(batch.inputs))
        return batch._replace(samples=index.to(batch.device), visits=None, mask=None)


def _global_state() -> Any:
    """Return the states of the global generators of Python and NumPy, to be compared."""
    kind, numbers, *counts = np.random.get_state()  # noqa: NPY002
    return random.getstate(), kind, bytes(np.asarray(numbers)), counts


def _find_reshaped(before: KeptValues, after: KeptValues) -> set[str]:
    """Return the buffers that became tensors of another shape."""
    return {
        name
        for name, record in before.tensors.items()
        if not record.is_parameter
        and name in after.tensors
        and after.tensors[name].tensor.shape != record.tensor.shape
    }


class _TrialBatches:
    """The minibatches of one client in a trial, as an engine reads them."""

    seed = round = 0

    def __init__(self, number: int, batches: list[Batch]) -> None:
        self.clients = [number]
        self.steps = [len(batches)]
        self.max_steps = len(batches)
        self._batches = batches

    def iterate_client(self, _: int) -> Iterator[Batch]:
        """Yield the minibatches of the client."""
        yield from self._batches


def copy_client(client: Client) -> Client:
    """Return a copy of an algorithm with the same trainer.

    Raises:
        Exception: If Python cannot copy it, for example an attribute with a lock.
    """
    trial = copy.deepcopy(client)
    trial.renew_rows()
    with suppress(RuntimeError):  # the client has no trainer
        trial.trainer = client.trainer
        for model in trial.models:
            if hasattr(trial.model(model), "training_step"):
                trial.model(model).trainer = client.trainer  # type: ignore[assignment]
    return trial


def patch_optimizers(client: Client, optimizer: torch.optim.Optimizer) -> None:
    """Give the modules of a trial their optimizer and schedule: a trainer has none before a fit."""
    schedule = client.build_schedule(optimizer)
    for model in client.models:
        module = client.model(model)
        if hasattr(module, "training_step"):
            vars(module)["optimizers"] = lambda *_, **__: optimizer
            vars(module)["lr_schedulers"] = lambda: schedule
