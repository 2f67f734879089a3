"""A trial of an algorithm before training: one client, two of its samples, no optimizer step."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import RESERVED_NAMES, ClientRound
from pl_fed.clients.kept_parts import restore_values
from pl_fed.clients.round_rules import StepRows
from pl_fed.data.batches import BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.engine.base import LocalSettings, as_outputs
from pl_fed.random import fork_torch_rng
from pl_fed.rounds.checks import explain_log, place_batch
from pl_fed.rounds.features import compute_features, keeps_features
from pl_fed.rounds.step_facts import (
    StepFacts,
    StepTrial,
    copy_client,
    find_step_error,
    find_step_facts,
)
from pl_fed.text import first_line
from pl_fed.trees import select, tree_map
from pl_fed.types import Batch

_NUM_SAMPLES = 2


def try_client(
    client: Client, data: ClientData, augment: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Try an algorithm's part of a round on one client, to find errors before training.

    The trial runs ``begin``, ``training_step`` in evaluation mode, and ``end_round`` on a copy of
    the algorithm. No parameter, buffer, attribute or random generator of the algorithm changes. It
    raises pl_fed's own errors about the algorithm's contract only. Other errors may come from a
    state that only a fit provides; real ones appear again in the first round.

    Args:
        client: The algorithm, after :meth:`Client.check`. There is no trial if Python cannot copy
            it.
        data: The clients' data.
        augment: Changes the inputs of each minibatch.

    Raises:
        TypeError: If ``training_step`` or ``end_round`` returns a value of another type.
        ValueError: If a row, an upload, a state or a proposal does not fit.
    """
    sizes = data.train.sizes
    if not int(sizes.sum()):
        return
    trial = _copy(client)
    if trial is None:
        return
    client_id = int(sizes.gt(0).nonzero()[0])
    with (
        restore_values(client),  # such as what the copy changes in the trainer
        fork_torch_rng(client.device),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        trial.eval()
        try:
            _run(trial, data, client_id, augment)
        except (TypeError, ValueError) as error:
            if str(error).startswith("Expected "):
                raise
        except Exception:  # the algorithm may need a state that only a fit provides
            return


def try_steps(
    client: Client,
    data: ClientData,
    augment: Callable[[Tensor], Tensor] | None,
    settings: LocalSettings,
    batch_size: int,
) -> StepFacts:
    """Try local steps with gradients and the optimizer, and return what they change.

    Args:
        client: The algorithm, after :func:`try_client`.
        data: The clients' data.
        augment: Changes the inputs of each minibatch.
        settings: Precision and gradient clipping of the local steps.
        batch_size: Samples in a minibatch.
    """
    trial = StepTrial(client, data, _prepare_batch, _new_round, augment, settings)
    return find_step_facts(trial, batch_size)


def explain_smallest_minibatch(
    client: Client,
    data: ClientData,
    augment: Callable[[Tensor], Tensor] | None,
    settings: LocalSettings,
    rule: BatchRule,
) -> str | None:
    """Return the sentence about minibatches of one sample, if the net fails on them.

    A net with BatchNorm does.

    Args:
        client: The algorithm, after :func:`try_steps`.
        data: The clients' data.
        augment: Changes the inputs of each minibatch.
        settings: Precision and gradient clipping of the local steps.
        rule: How samples become minibatches.

    Returns:
        The number of clients with such a minibatch, and the remedy; ``None`` if there is none, or
        if a step fails on two samples, too.
    """
    sizes = data.train.sizes.tolist()
    single = [number for number, size in enumerate(sizes) if rule.smallest_batch(size) == 1]
    if not single:
        return None
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    trial = StepTrial(client, data, _prepare_batch, _new_round, augment, settings)
    error = find_step_error(trial, largest, samples=1)
    if error is None or find_step_error(trial, largest, samples=2) is not None:
        return None
    return (
        f"Expected local steps of {type(client.global_model).__name__} to take minibatches of one"
        f" sample, which {len(single)} of {len(sizes)} clients have, but that failed"
        f" ({first_line(error)}): set `data.min_batch` to 2, which leaves such minibatches out."
    )


def _copy(client: Client) -> Client | None:
    """Return a copy with the same trainer, or ``None`` if Python cannot copy the algorithm."""
    try:
        return copy_client(client)
    except Exception:  # for example an attribute with a lock or an open file
        return None


def _run(
    trial: Client, data: ClientData, client_id: int, augment: Callable[[Tensor], Tensor] | None
) -> None:
    """Run a round of one client, and check its results."""
    batch = _first_batch(trial, data, client_id)
    if augment is not None:
        batch = batch._replace(inputs=augment(batch.inputs))
    lengths = {name: len(row) for name, row in trial.state_defaults().items()}
    with _note_errors(client_id, "begin"):
        round = _new_round(trial, data, client_id)
        planned = StepRows(round.steps)
        planned.read_changed(trial.run_begin(round))
        _check_names("begin", trial, round)
        for name, model in round.models.items():
            numel = trial.row("global").layout.numel
            _check_row("begin", f"the parameters of model `{name}`", model.parameters, numel)
    with (
        _note_errors(client_id, "training_step"),
        explain_log(),
        trial.reading(round.client_rows(0)),
    ):
        outputs = as_outputs(trial.objective.step(batch, 0))
    for name in trial.trained:
        round.models[name] = round.models[name].clone()
    example = round.broadcast.parameters
    round.step_means = {name: out.detach().reshape(1).to(example) for name, out in outputs.items()}
    round.validation_losses = {name: example.new_zeros(1) for name in trial.validated}
    with _note_errors(client_id, "end_round"):
        upload, states = trial.run_end_round(round)
        _check_names("end_round", trial, round)
        _check_upload(trial, upload)
        for name, length in lengths.items():
            _check_row("end_round", f"state `{name}`", states[name], length)
        for name, proposal in round.proposals.items():
            if name not in round.server_states:
                names = ", ".join(round.server_states) or "none"
                raise ValueError(
                    f"Expected `end_round` to propose server states ({names}) but got {name!r}:"
                    " declare it by add_server_state."
                )
            length = len(round.server_states[name])
            _check_row("end_round", f"the proposal of `{name}`", proposal, length)


def _new_round(trial: Client, data: ClientData, client_id: int) -> ClientRound:
    """Return the client's first round, of one local step."""
    round = trial.new_round(samples=int(data.train.sizes[client_id]))
    round.ids = round.ids.new_tensor([client_id])
    round.validation_samples.fill_(int(data.val.sizes[client_id]))
    if trial.reads_validation:
        inputs, targets = (select(tree, 0) for tree in data.pad_part("val", round.ids.cpu()))
        batch = _prepare_batch(trial, Batch(inputs, targets))
        round.validation_inputs = tree_map(lambda leaf: leaf.flatten()[None], batch.inputs)
        round.validation_targets = tree_map(lambda leaf: leaf.flatten()[None], batch.targets)
    return round


def _first_batch(trial: Client, data: ClientData, client_id: int) -> Batch:
    """Return the client's first two samples."""
    index = data.train.samples(client_id)[:_NUM_SAMPLES]
    batch = _prepare_batch(trial, data.batch(index))
    index = index.to(batch.device)
    return batch._replace(samples=index, visits=torch.zeros_like(index))


def _prepare_batch(trial: Client, batch: Batch) -> Batch:
    """Return a batch as in the local steps: placed, and with features if the net keeps them."""
    net, batch = trial.global_model, place_batch(trial, batch)
    if keeps_features(net) and batch.size:
        with torch.no_grad():
            batch = batch._replace(inputs=compute_features(net, batch.inputs))
    return batch


def _check_names(hook: str, trial: Client, round: ClientRound) -> None:
    """Refuse undeclared states and models, and extra rows with a reserved name."""
    models = ("global", *trial.trained, *trial.evaluated, *trial.validated)
    states = [name for name in trial.state_defaults() if name.isidentifier() and name not in models]
    _check_declared(hook, "states", round.states, states, "add_state")
    _check_declared(hook, "models", round.models, models, "models=")
    taken = (*RESERVED_NAMES, *round.states, *round.server_states)
    for name in round.extra:
        if name in taken:
            raise ValueError(
                f"Expected `{hook}` to add extra rows under names other than the reserved ones"
                f" ({', '.join(taken)}) but got {name!r}: choose another name."
            )


def _check_declared(
    hook: str, kind: str, names: Iterable[str], declared: Iterable[str], declaration: str
) -> None:
    """Refuse names of undeclared states or models: no client keeps them and no engine trains them.

    Args:
        hook: The method that wrote the states or models.
        kind: ``"states"`` or ``"models"``.
        names: The written names.
        declared: The declared names.
        declaration: The code that declares a name, for the error message.
    """
    declared = tuple(dict.fromkeys(declared))
    for name in names:
        if name not in declared:
            raise ValueError(
                f"Expected `{hook}` to write {kind} that are declared"
                f" ({', '.join(declared) or 'none'}) but got {name!r}: declare it by {declaration},"
                " or write client.extra."
            )


def _check_upload(trial: Client, upload: object) -> None:
    if upload is None and "global" not in trial.trained:
        return
    if not isinstance(upload, Tensor):
        raise TypeError(
            "Expected `end_round` to return uploads, a tensor [clients, numel], but got"
            f" {type(upload).__name__}: return super().end_round(client) to send the change by the"
            " local steps."
        )
    _check_row("end_round", "uploads", upload, trial.row("global").layout.numel)


def _check_row(hook: str, name: str, row: object, length: int) -> None:
    """Refuse a value that is not a row of one client, [1, length]."""
    if not isinstance(row, Tensor) or list(row.shape) != [1, length]:
        got = f"shape {list(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
        raise ValueError(
            f"Expected `{hook}` to leave {name} of shape [1, {length}] for one client but got"
            f" {got}."
        )


@contextmanager
def _note_errors(client_id: int, hook: str) -> Iterator[None]:
    """Add a note with the trial, the client and the method to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"In the trial before the first round, client {client_id}, `{hook}`.")
        raise
