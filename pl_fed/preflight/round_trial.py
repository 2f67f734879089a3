"""A trial of an algorithm before training: one client, two of its samples, no optimizer step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import RESERVED_NAMES, ClientRound
from pl_fed.clients.kept_parts import kept_parts
from pl_fed.devices import is_out_of_memory
from pl_fed.nets.fingerprints import is_by_user
from pl_fed.nets.kept_values import KeptValues
from pl_fed.preflight.explanations import explain_step
from pl_fed.preflight.memory_trial import check_hooks, check_rows
from pl_fed.preflight.trial import Trial, TrialRound


def try_round(trial: Trial) -> None:
    """Try an algorithm's part of a round on one client, to find errors before training.

    The trial runs ``begin``, the step of a preparation with ``end_preparation``, ``training_step``
    in evaluation mode, and ``end_round`` on a copy of the algorithm; and ``begin`` of an evaluation
    with ``predict``, if the algorithm has its own. No parameter, buffer, attribute or global
    generator changes. It raises a lack of memory, and errors in pl_fed's words ("Expected ...")
    about the algorithm's contract. Other errors may come from a state that only a fit provides;
    real ones appear again in the first round.

    Args:
        trial: The algorithm, after :meth:`Client.check`, and its samples. There is no trial if
            Python cannot copy it.

    Raises:
        TypeError: If ``training_step`` or ``end_round`` returns a value of another type.
        ValueError: If a row, an upload, a state or a proposal does not fit.
    """
    clients = trial.data.train.sizes.nonzero().flatten()
    if not len(clients):
        return
    try:
        with trial.lend_copy() as (copied, _):
            parts = kept_parts(copied.client) if is_by_user(trial.client) else []
            before = KeptValues.record(parts)
            draws = _run(copied, int(clients[0]))
            changed = before.changes(KeptValues.record(parts))
    except Exception as error:  # no copy, or a state is missing that only a fit provides
        if is_out_of_memory(error):
            raise
        if isinstance(error, TypeError | ValueError) and str(error).startswith("Expected "):
            raise
        return
    names = changed.attributes | changed.outside
    if is_by_user(trial.client) and (names or draws):
        check_hooks(trial, int(clients[0]), names)
    if not type(trial.client).end_round.__module__.startswith("pl_fed."):
        check_rows(trial, int(clients[0]))


def _run(trial: Trial, number: int) -> bool:
    """Run a round of one client on a copy of the algorithm, and check its results.

    Returns:
        Whether a hook draws from a global generator.
    """
    client = trial.client
    lengths = {name: len(row) for name, row in client.state_defaults().items()}
    run = TrialRound(trial, number)
    round = run.round
    with _note_errors(number, "begin"):
        run.begin()
        _check_names("begin", client, round)
        numel = client.row("global").layout.numel
        for name, model in round.models.items():
            _check_row("begin", f"the parameters of model `{name}`", model.parameters, numel)
    with _note_errors(number, "preparation"):
        run.prepare()
    with _note_errors(number, "end_preparation"):
        run.end_preparation()
    with _note_errors(number, "training_step"), explain_step():
        run.train()
    with _note_errors(number, "end_round"):
        upload, states = run.end()
        _check_names("end_round", client, round)
        _check_upload(client, upload)
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
    if not client.predicts_by_net:
        _try_predict(trial, number)
    return run.draws


def _try_predict(trial: Trial, number: int) -> None:
    """Let the own models of one client predict a few of its samples, as in an evaluation."""
    client = trial.client
    start = replace(trial.new_round(number), steps={}, preparation_steps={}, lr={})
    with _note_errors(number, "begin"):
        client.run_begin(start)
    for model in client.evaluated:
        if model != "global" and start.visit_samples is not None:
            with _note_errors(number, "predict"):
                list(start.visit_samples(start, partial(client.predict, model), "train"))


def _check_names(hook: str, client: Client, round: ClientRound) -> None:
    """Refuse undeclared states and models, and extra rows with a reserved name."""
    prepared = client.preparation.trained if client.preparation else ()
    models = ("global", *client.trained, *client.evaluated, *client.validated, *prepared)
    states = [
        name for name in client.state_defaults() if name.isidentifier() and name not in models
    ]
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


def _check_upload(client: Client, upload: object) -> None:
    if upload is None and "global" not in client.trained:
        return
    if not isinstance(upload, Tensor):
        raise TypeError(
            "Expected `end_round` to return uploads, a tensor [clients, numel], but got"
            f" {type(upload).__name__}: return super().end_round(client) to send the change by the"
            " local steps."
        )
    _check_row("end_round", "uploads", upload, client.row("global").layout.numel)


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
