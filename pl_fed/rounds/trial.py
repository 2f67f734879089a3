"""A trial of an algorithm before training: one client, two of its samples, no optimizer step."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import RESERVED_NAMES, ClientRound
from pl_fed.data.client_data import ClientData
from pl_fed.engine.base import as_outputs
from pl_fed.random import fork_torch_rng
from pl_fed.rounds.checks import explain_log, place_batch
from pl_fed.rounds.features import features_of, keeps_features
from pl_fed.trees import select, tree_map
from pl_fed.types import Batch

_SAMPLES = 2


def try_client(
    client: Client, data: ClientData, augment: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Run an algorithm's part of a round on one client, so that its mistakes show before training.

    It runs ``begin``, ``training_step`` in evaluation mode, and ``end_round`` on a copy of the
    client: no parameter, buffer, attribute or random generator of the client changes. Mistakes
    against the contract, which pl_fed words itself, are raised. Other errors of the algorithm are
    not: it may need what only a fit gives it. If they are real, the first round raises them.

    Args:
        client: The algorithm, after :meth:`Client.check`. Nothing is tried if it cannot be copied.
        data: The clients' data.
        augment: Changes the inputs of each minibatch.

    Raises:
        TypeError: If ``training_step`` or ``end_round`` returns something of another type.
        ValueError: If a row that is read, an upload, a state or a proposal does not fit.
    """
    sizes = data.train.sizes
    if not int(sizes.sum()):
        return
    trial = _copy(client)
    if trial is None:
        return
    one = int(sizes.gt(0).nonzero()[0])
    with fork_torch_rng(client.device), torch.inference_mode(False), torch.enable_grad():
        trial.eval()
        try:
            _run(trial, data, one, augment)
        except (TypeError, ValueError) as error:
            if str(error).startswith("Expected "):
                raise
        except Exception:  # the algorithm may need what only a fit gives it
            return


def _copy(client: Client) -> Client | None:
    """Return a copy that belongs to the same trainer, or ``None`` if Python cannot copy it."""
    try:
        trial = copy.deepcopy(client)
    except Exception:  # a lock or an open file among its attributes, say
        return None
    trial.renew_rows()
    with suppress(RuntimeError):  # the client belongs to no trainer
        trial.trainer = client.trainer
    return trial


def _run(
    trial: Client, data: ClientData, one: int, augment: Callable[[Tensor], Tensor] | None
) -> None:
    """Run the trial of one client, by its id."""
    batch = _batch(trial, data, one)
    if augment is not None:
        batch = batch._replace(inputs=augment(batch.inputs))
    lengths = {name: len(row) for name, row in trial.state_defaults().items()}
    with _noting(one, "begin"):
        round = trial.run_begin(_new_round(trial, data, one))
        _check_names("begin", trial, round)
        for name, model in round.models.items():
            numel = trial.row("global").layout.numel
            _check_row("begin", f"the parameters of model `{name}`", model.parameters, numel)
    with _noting(one, "training_step"), explain_log(), trial.reading(round.of_one(0)):
        outputs = as_outputs(trial.objective.step(batch, 0))
    for name in trial.trained:
        round.models[name] = round.models[name].clone()
    like = round.broadcast.parameters
    round.step_means = {n: value.detach().reshape(1).to(like) for n, value in outputs.items()}
    round.validation_losses = {name: like.new_zeros(1) for name in trial.validated}
    with _noting(one, "end_round"):
        upload, kept = trial.run_end_round(round)
        _check_names("end_round", trial, round)
        _check_upload(trial, upload)
        for name, length in lengths.items():
            _check_row("end_round", f"state `{name}`", kept[name], length)
        for name, proposal in round.proposals.items():
            if name not in round.server_states:
                names = ", ".join(round.server_states) or "none"
                raise ValueError(
                    f"Expected `end_round` to propose server states ({names}) but got {name!r}:"
                    " declare it by add_server_state."
                )
            length = len(round.server_states[name])
            _check_row("end_round", f"the proposal of `{name}`", proposal, length)


def _new_round(trial: Client, data: ClientData, one: int) -> ClientRound:
    """Return the client's first round, of one local step."""
    round = trial.new_round(samples=int(data.train.sizes[one]))
    round.ids = round.ids.new_tensor([one])
    round.validation_samples.fill_(int(data.val.sizes[one]))
    if trial.reads_validation:
        inputs, targets = (select(tree, 0) for tree in data.pad_part("val", torch.tensor([one])))
        batch = as_trained_on(trial, Batch(inputs, targets))
        round.validation_inputs = tree_map(lambda leaf: leaf.flatten()[None], batch.inputs)
        round.validation_targets = tree_map(lambda leaf: leaf.flatten()[None], batch.targets)
    return round


def _batch(trial: Client, data: ClientData, one: int) -> Batch:
    """Return the client's first two samples."""
    index = data.train.samples(one)[:_SAMPLES]
    batch = as_trained_on(trial, data.batch(index))
    index = index.to(batch.device)
    return batch._replace(samples=index, visits=torch.zeros_like(index))


def as_trained_on(trial: Client, batch: Batch) -> Batch:
    """Return samples as the local steps get them, features for the inputs that have some."""
    net, batch = trial.global_model, place_batch(trial, batch)
    if keeps_features(net) and batch.size:
        with torch.no_grad():
            batch = batch._replace(inputs=features_of(net, batch.inputs))
    return batch


def _check_names(hook: str, trial: Client, round: ClientRound) -> None:
    """Refuse states and models that are not declared, and extra rows that hide others."""
    models = ("global", *trial.trained, *trial.evaluated)
    states = [name for name in trial.state_defaults() if name.isidentifier() and name not in models]
    _check_declared(hook, "states", round.states, states, "add_state")
    _check_declared(hook, "models", round.models, models, "models=")
    taken = (*RESERVED_NAMES, *round.states, *round.server_states)
    for name in round.extra:
        if name in taken:
            raise ValueError(
                f"Expected `{hook}` to add extra rows under names other than those that a round has"
                f" ({', '.join(taken)}) but got {name!r}: choose another name."
            )


def _check_declared(
    hook: str, kind: str, names: Iterable[str], declared: Iterable[str], by: str
) -> None:
    """Refuse names of states or models that no client keeps and no engine trains.

    Args:
        hook: The method that wrote them.
        kind: ``"states"`` or ``"models"``.
        names: The names that are written.
        declared: The names that are declared.
        by: How an algorithm declares another one.
    """
    declared = tuple(dict.fromkeys(declared))
    for name in names:
        if name not in declared:
            raise ValueError(
                f"Expected `{hook}` to write {kind} that are declared"
                f" ({', '.join(declared) or 'none'}) but got {name!r}: declare it by {by}, or write"
                " client.extra."
            )


def _check_upload(trial: Client, upload: object) -> None:
    if upload is None and "global" not in trial.trained:
        return
    if not isinstance(upload, Tensor):
        raise TypeError(
            "Expected `end_round` to return uploads, a tensor [clients, numel], but got"
            f" {type(upload).__name__}: return super().end_round(client) sends what the local steps"
            " changed."
        )
    _check_row("end_round", "uploads", upload, trial.row("global").layout.numel)


def _check_row(hook: str, name: str, row: object, length: int) -> None:
    """Refuse what is no row of one client, [1, length]."""
    if not isinstance(row, Tensor) or list(row.shape) != [1, length]:
        got = f"shape {list(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
        raise ValueError(
            f"Expected `{hook}` to leave {name} of shape [1, {length}] for one client but got"
            f" {got}."
        )


@contextmanager
def _noting(one: int, hook: str) -> Iterator[None]:
    """Note on an error that it comes from the trial, with the client and the method."""
    try:
        yield
    except Exception as error:
        error.add_note(f"In the trial before the first round, client {one}, `{hook}`.")
        raise
