"""A trial of local steps before training: their changes besides the models, for each client.

It takes three local steps, with gradients and the optimizer, of two clients A and B on two copies
of the algorithm: A then B, and B then A. A client's numbers must not depend on the client before
it. The attributes that make them depend, or that differ at the end, carry one client's values to
the next.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import or_
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.kept_parts import STOP, kept_parts, lay_rows, restore_values, user_names
from pl_fed.clients.model_guard import restore_models
from pl_fed.clients.optimizer_options import OptionGuard
from pl_fed.data.batches import BatchRule
from pl_fed.devices import is_out_of_memory
from pl_fed.engine.base import Chunk
from pl_fed.engine.one_by_one import OneByOne
from pl_fed.nets.gradient_hooks import list_step_hooks
from pl_fed.nets.kept_values import Changes, KeptValues
from pl_fed.nets.rows import buffers_outside_rows
from pl_fed.preflight.step_facts import StepFacts
from pl_fed.preflight.trial import Trial, lend_optimizer
from pl_fed.random import fork_all_generators, read_global_state
from pl_fed.text import first_line
from pl_fed.trees import count_sample_bytes
from pl_fed.types import Batch

_STEPS, _SAMPLES = 3, 8
_PAIRS = 3  # of clients that are tried, if steps fail
_BATCH_BYTES = 1 << 19  # inputs of a minibatch: large images take time


def find_step_facts(trial: Trial, batch_size: int) -> StepFacts:
    """Take local steps on copies of an algorithm, and return their changes.

    Without two clients with data, the same client takes the place of the second one. A client whose
    steps fail leaves its place to a smaller one. Facts stay unknown if Python cannot copy the
    algorithm, or all tried clients fail, for example without a state that only a fit provides: a
    real error appears in the first round.

    Args:
        trial: The algorithm and its samples.
        batch_size: Samples in a minibatch.

    Raises:
        ValueError: If the local optimizer cannot step from the gradients of the objective.
    """
    sizes = trial.data.train.sizes
    ids = sizes.argsort(descending=True, stable=True)[: 2 * _PAIRS].tolist()
    ids = [number for number in ids if int(sizes[number])]
    most = max(2, min(_SAMPLES, _BATCH_BYTES // max(1, count_sample_bytes(trial.data.inputs))))
    for _ in range(_PAIRS):
        if not ids:
            break
        pair = ids[0], ids[:2][-1]
        width = min(most, batch_size, *(int(sizes[number]) for number in pair))
        try:
            with restore_values(trial.client):  # a hook of a copy may write into the original
                runs, leaks = _run_in_both_orders(trial, pair, width)
        except Exception as error:
            if isinstance(error, _OptimizerError) or is_out_of_memory(error):
                raise
            failed = {k for k in pair if _find_step_error(trial, k, width) is not None}
            if not failed:
                break
            ids = [number for number in ids if number not in failed]
        else:
            return _read_facts(trial.client, runs, leaks)
    return StepFacts()


def explain_smallest_minibatch(trial: Trial, rule: BatchRule) -> str | None:
    """Return the sentence about minibatches of one sample, if the net fails on them.

    A net with BatchNorm does.

    Args:
        trial: The algorithm and its samples.
        rule: The split of samples into minibatches.

    Returns:
        The number of clients with such a minibatch, and the remedy; ``None`` if there is none, or
        if a step fails on two samples, too.
    """
    sizes = trial.data.train.sizes.tolist()
    single = [number for number, size in enumerate(sizes) if rule.smallest_batch(size) == 1]
    if not single:
        return None
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    error = _find_step_error(trial, largest, width=1)
    if error is None or _find_step_error(trial, largest, width=2) is not None:
        return None
    return (
        f"Expected local steps of {type(trial.client.global_model).__name__} to take minibatches of"
        f" one sample, which {len(single)} of {len(sizes)} clients have, but that failed"
        f" ({first_line(error)}): set `data.min_batch` to 2, which leaves such minibatches out."
    )


def _find_step_error(trial: Trial, number: int, width: int) -> Exception | None:
    """Return the error of a client's local steps on ``width`` samples; ``None`` without one."""
    try:
        with restore_values(trial.client):
            _run_steps(trial, [number], width)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error
    return None


def _run_in_both_orders(
    trial: Trial, pair: tuple[int, int], width: int
) -> "tuple[list[_Run], bool]":
    """Return the runs A, B and, on another copy, B, A; and whether a client's numbers leak."""
    forwards, backwards = _run_steps(trial, pair, width), _run_steps(trial, pair[::-1], width)
    runs = [*forwards, *backwards]
    leaks = not (forwards[0].agrees(backwards[1]) and forwards[1].agrees(backwards[0]))
    if leaks and not any(run.changes.attributes | run.changes.outside for run in runs):
        again = _run_steps(trial, pair[::-1], width)
        # if the same order gives other numbers, too, the draws have no key, and nothing leaks
        leaks = backwards[0].agrees(again[0])
    return runs, leaks


def _read_facts(client: Client, runs: "list[_Run]", leaks: bool) -> StepFacts:
    """Return the facts of the four runs: A, B, and on another copy B, A."""
    first_a, second_b, first_b, second_a = runs
    changes = reduce(or_, (run.changes for run in runs))
    different = {
        name
        for name in changes.attributes | changes.outside
        if first_a.differs(second_a, name) or first_b.differs(second_b, name)
    }
    memory = different if leaks else different & changes.attributes
    memory |= changes.attributes & {STOP}
    if leaks and not memory:
        memory |= changes.attributes or changes.outside
    parameters = dict(client.named_parameters(remove_duplicate=False))
    frozen = {name for name, tensor in parameters.items() if not tensor.requires_grad}
    replaced = changes.replaced_parameters
    changed = {
        name
        for name in changes.buffers | changes.replaced_buffers
        if not name.endswith("num_batches_tracked")
    }
    in_rows: set[str] = set()
    counters: set[str] = set()
    for model in client.trained:
        in_rows |= {f"{model}_model.{name}" for name in client.statistics(model).layout.names}
        outside = buffers_outside_rows(client.model(model))
        counters |= changed & {f"{model}_model.{name}" for name in outside}
    counters = {name for name in counters if _is_saved(client, name)}
    names = partial(user_names, client)
    return StepFacts(
        net=type(client.global_model).__name__,
        frozen_parameters=names(changes.frozen_parameters | (replaced & frozen)),
        replaced_parameters=names(replaced - frozen),
        toggled=names(changes.toggled),
        reshaped_buffers=names(set().union(*(run.reshaped for run in runs))),
        counters=names(counters),
        attributes=names(memory),
        scratch=tuple(sorted(changes.attributes - memory)),
        outside=tuple(sorted(changes.outside - memory)),
        shared=names((different & changes.outside) - memory),
        reset_buffers=names(changed - in_rows - counters),
        moved_parameters=names(changes.moved_parameters),
        optimizer_options=tuple(sorted(set().union(*(run.options for run in runs)))),
        draws_globally=any(run.draws for run in runs),
        reads_optimizer=any(run.reads for run in runs),
        leaks=leaks and not memory,
    )


def _is_saved(client: Client, name: str) -> bool:
    """Return whether a buffer is saved with its module."""
    owner, _, own_name = name.rpartition(".")
    return own_name in client.get_submodule(owner).state_dict(keep_vars=True)


@dataclass
class _Run:
    """A client's local steps in a trial.

    Attributes:
        results: The client's rows and the means of its outputs after the steps.
        changes: The changes by all steps.
        values: The attributes, and values outside of modules, after each step and at the end.
        reshaped: Buffers that a step gave another shape.
        draws: Whether the steps have drawn from a global generator of Python or NumPy.
        reads: Whether the steps have read the optimizer or its schedule.
        options: Options of the optimizer that a step changed.
    """

    results: list[Tensor] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes)
    values: list[Mapping[str, Hashable]] = field(default_factory=list)
    reshaped: set[str] = field(default_factory=set)
    draws: bool = False
    reads: bool = False
    options: set[str] = field(default_factory=set)

    def add(self, values: KeptValues, changes: Changes) -> None:
        """Add the values of modules after a step, and the changes by the step."""
        self.changes |= changes
        self.values.append({**values.attributes, **values.outside})

    def note_read(self) -> None:
        """Note that a step has read the optimizer or its schedule."""
        self.reads = True

    def differs(self, other: "_Run", name: str) -> bool:
        """Return whether an attribute has other values in another run of the same client."""
        return any(a.get(name) != b.get(name) for a, b in zip(self.values, other.values))

    def agrees(self, other: "_Run") -> bool:
        """Return whether another run gave the same numbers within rounding."""
        return len(self.results) == len(other.results) and all(
            a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-8, equal_nan=True)
            for a, b in zip(self.results, other.results)
        )


def _run_steps(trial: Trial, numbers: Iterable[int], width: int) -> list[_Run]:
    """Take the local steps of clients one after the other on a new copy of the algorithm.

    Args:
        trial: The algorithm and its samples.
        numbers: The clients' ids.
        width: Samples in a minibatch.
    """
    trial = trial.copy()
    trial.client.train()
    return [_run_client(trial, number, width) for number in numbers]


def _run_client(trial: Trial, number: int, width: int) -> _Run:
    """Take the local steps of a client on a copy of the algorithm, and return their changes."""
    client, run = trial.client, _Run()
    with (
        fork_all_generators() as seed,
        torch.inference_mode(False),
        torch.enable_grad(),
        restore_models(client, {"global", *client.trained}),
    ):
        seed(0)
        samples = trial.data.train.samples(number)
        places = torch.arange(_STEPS * width).to(samples.device) % len(samples)
        minibatches = [trial.load_minibatch(samples[step]) for step in places.split(width)]
        round = client.run_begin(trial.new_round(number))
        optimizer = client.objective.build_optimizer(client.trained_parameters)
        modules = [m for m in map(client.model, client.models) if hasattr(m, "training_step")]
        lend_optimizer(modules, client, optimizer, on_read=run.note_read)
        lay_rows(client)
        before = KeptValues.record(kept_parts(client))
        options = OptionGuard([optimizer])

        def step(batch: Batch, index: int) -> Any:
            state = read_global_state()
            outputs = client.objective.step(batch, index)
            run.draws |= read_global_state() != state
            after = KeptValues.record(kept_parts(client), reads_frozen=False)
            run.add(after, before.changes(after))
            run.reshaped |= _find_reshaped(before, after)
            run.options |= {*options.restore()}
            return outputs

        def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
            optimizer = client.objective.optimizer(parameters)
            _explain_step_errors(optimizer)
            return optimizer

        batches = SimpleNamespace(  # as an engine reads them
            clients=[number],
            seed=0,
            round=0,
            steps=[_STEPS],
            pass_lengths=[_STEPS],
            max_steps=_STEPS,
            iterate_client=lambda _: iter(minibatches),
        )
        chunk = Chunk(
            torch.tensor([number]),
            replace(client.objective, step=step, optimizer=build_optimizer),
            cast(Any, batches),
            {model: [_STEPS] for model in client.trained},
            round,
        )
        try:
            outputs = OneByOne(trial.settings).run(client, optimizer, chunk)
        except RuntimeError:
            if not run.reshaped:  # no engine can put such a buffer back
                raise
            return run
        after = KeptValues.record(kept_parts(client))
    changes = before.changes(after)
    run.add(after, replace(changes, buffers=frozenset(), replaced_buffers=frozenset()))
    for model in client.trained:
        rows = chunk.round.models[model]
        run.results += [rows.parameters.clone(), rows.statistics.clone()]
    run.results += [value.clone() for value in outputs.values()]
    return run


class _OptimizerError(ValueError):
    """Optimizer error: a local optimizer refuses the gradients, or needs more than them."""


def _explain_step_errors(optimizer: torch.optim.Optimizer) -> None:
    """Let the steps of an optimizer without hooks raise one sentence.

    A hook is the user's own code, and may need a state that only a fit provides.
    """
    step = optimizer.step
    if any(list_step_hooks(optimizer)):
        return

    def step_or_explain() -> Any:
        try:
            return step()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise _OptimizerError(
                f"Expected the local optimizer {type(optimizer).__name__} to step from the"
                f" gradients of the objective alone but that failed ({first_line(error)}): choose"
                " another `model.optimizer`, such as torch.optim.Adam."
            ) from error

    vars(optimizer)["step"] = step_or_explain


def _find_reshaped(before: KeptValues, after: KeptValues) -> set[str]:
    """Return the buffers that got another shape, also in place."""
    return {
        name
        for name, record in before.tensors.items()
        if not record.is_parameter
        and name in after.tensors
        and after.tensors[name].shape != record.shape
    }
