"""Trials before training: a user's own classes carry nothing from round to round unsaved.

A resumed run begins with new objects, and engines and processes share the clients of a round among
several calls. So a class must give the same numbers with its declared memory alone.
"""

import copy
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from pl_fed.aggregators import Aggregator
from pl_fed.attacks import Attack
from pl_fed.nets.kept_values import KeptValues, Part
from pl_fed.preflight.trial import Trial, TrialRound
from pl_fed.random import fork_all_generators
from pl_fed.trees import are_equal, leaves, tree_map
from pl_fed.types import Batch, RoundContext

_AUGMENTED = 4  # samples of a minibatch that tries modules for a memory
_ROUNDING = 1e-3  # of the largest number of a row, between one client and two in a call


def check_hooks(trial: Trial, number: int, changed: Collection[str]) -> None:
    """Check if the hooks of a user's algorithm pass values to their next call unsaved.

    ``begin``, a preparation, ``training_step`` and ``end_round`` run three times on one copy, with
    equal rows: twice under equal seeds of the global generators, and then under another one. A
    warning tells of hooks that draw from these.

    Args:
        trial: The algorithm and its samples.
        number: The id of a client with samples.
        changed: The attributes that the hooks change.

    Raises:
        ValueError: If the same rows give other results in the second call.
    """
    name = type(trial.client).__name__
    try:
        results = []
        with trial.lend_copy() as (copied, seed):
            for draw in (0, 0, 1):
                seed(draw)
                results.append(_run_hooks(copied, number))
        keeps_values = not are_equal(results[0], results[1])
        draws = not are_equal(results[1], results[2])
    except Exception:  # a real error appears in the first round
        return
    if keeps_values:
        names = f", by `{'`, `'.join(sorted(changed))}`" if changed else ""
        raise ValueError(
            f"Expected `begin`, `training_step` and `end_round` of {name} to give the same for the"
            f" same rows but a second call gave other numbers{names}: the clients of a round are"
            " shared among several calls, and a checkpoint holds no attributes, so keep values by"
            " `add_state` or `add_server_state`, and read the round from `self.current_epoch`."
        )
    if draws:
        rank_zero_warn(
            f"`begin` or `end_round` of {name} draws from a global generator: other engines,"
            " numbers of processes and a resumed run draw other numbers. Draw by a key of seed,"
            " round and client, as `pl_fed.random.normals` does."
        )


def check_rows(trial: Trial, number: int) -> None:
    """Check if ``end_round`` of a user's algorithm computes the rows of each client by themselves.

    The round of a client ends twice, alone and beside another client with another model. A hook
    that draws from a global generator is not checked.

    Args:
        trial: The algorithm and its samples.
        number: The id of a client with samples.

    Raises:
        ValueError: If the rows of the client differ by more than rounding.
    """
    try:
        with trial.lend_copy() as (copied, seed):
            seed(0)
            run = TrialRound(copied, number)
            run.start()
            beside = run.repeat(2)
            rows, rows_beside = _end(run), _end(beside)
            if run.draws or beside.draws:
                return
        is_own = all(_are_close(row, two[:1]) for row, two in zip(rows, rows_beside, strict=True))
    except Exception:  # a real error appears in the first round
        return
    if not is_own:
        raise ValueError(
            f"Expected `end_round` of {type(trial.client).__name__} to compute the upload, states"
            " and proposals of a client from its own rows but got others beside another client: the"
            " clients of a round are shared among several calls, in chunks that depend on the"
            " engine, so compute row by row, as by `upload.norm(dim=1, keepdim=True)`."
        )


def _run_hooks(trial: Trial, number: int) -> list[Tensor]:
    """Run the hooks of one client's round, and return the rows that they wrote."""
    run = TrialRound(trial, number)
    run.start()
    round = run.round
    written = [rows.parameters for rows in round.models.values()]
    written += [*round.extra.values(), *round.states.values()]
    written = [row.detach().clone() for row in written]
    return [*written, *_end(run)]


def _end(run: TrialRound) -> list[Tensor]:
    """Return the rows that ``end_round`` writes."""
    upload, states = run.end()
    written = [*states.values(), *run.round.proposals.values()]
    return [*written, *([] if upload is None else [upload])]


def _are_close(row: Tensor, other: Tensor) -> bool:
    """Return whether two rows are equal but for rounding; also if they are not finite."""
    if not row.numel():
        return True
    difference, largest = (row - other).double().abs(), row.double().abs().max()
    return not bool((difference > _ROUNDING * largest).any())


def read_attributes(module: nn.Module) -> Mapping[str, Hashable]:
    """Return fingerprints of the attributes of a module that a checkpoint does not hold."""
    parts = [Part(name, part) for name, part in module.named_modules()]
    return KeptValues.record(parts).attributes


def check_aggregator_memory(build: Callable[[], Aggregator], context: RoundContext) -> None:
    """Check if an aggregator merges the same after its saved memory is loaded.

    Args:
        build: Returns an aggregator without memory of any round.
        context: The context of a round, with the losses and the model that an aggregator reads.

    Raises:
        ValueError: If it merges otherwise.
    """
    n, draw = len(context.clients), torch.Generator().manual_seed(0)
    first, second = torch.randn(2, n, len(context.broadcast), generator=draw)
    weights = torch.ones(n, dtype=torch.int64)
    aggregator, resumed = build(), build()
    try:
        aggregator(first, weights, context)
        resumed.load_state_dict(aggregator.state_dict())
        results = [merge(second, weights, context) for merge in (aggregator, resumed)]
        is_saved = are_equal(results[:1], results[1:])
    except Exception:  # such memory has its own error
        return
    if not is_saved:
        raise ValueError(
            "Expected argument `aggregator` to keep its memory of earlier rounds by `add_memory`"
            f" but {type(aggregator.final_aggregator).__name__} merges otherwise after its saved"
            " memory is loaded: a checkpoint holds no other attributes, so a resumed run differs."
        )


def check_attack_memory(attack: Attack, forge: Callable[[Attack], object]) -> None:
    """Check if an attack forges the same after its saved state is loaded.

    Args:
        attack: A copy of the attack before it forged for the first time.
        forge: Returns the uploads that an attack forges.

    Raises:
        ValueError: If it forges otherwise.
    """
    try:
        resumed = copy.deepcopy(attack)
        forge(attack)
        resumed.load_state_dict(copy.deepcopy(attack.state_dict()))
        is_saved = are_equal([forge(attack)], [forge(resumed)])
    except Exception:  # such a state has its own error
        return
    if not is_saved:
        raise ValueError(
            "Expected argument `attack` to return its memory of earlier rounds by `state_dict` but"
            f" {type(attack).__name__} forges otherwise after `load_state_dict` of it: a checkpoint"
            " holds no other attributes, so a resumed run differs."
        )


def warn_of_augmentation_memory(trial: Trial) -> None:
    """Warn if modules of ``data.augment`` have a memory: see :func:`augmentation_remembers`."""
    if augmentation_remembers(trial):
        rank_zero_warn(
            f"{name_augmentation(trial)} of `data.augment` changes samples by those of earlier"
            " calls, so that a resumed run, and other engines and processes, get other samples:"
            " keep no values between calls, and draw from the global generators of torch, NumPy or"
            " Python."
        )


def name_augmentation(trial: Trial) -> str:
    """Return the names of the classes of ``data.augment``."""
    modules = getattr(trial.augment, "modules", ())
    return ", ".join(type(module).__name__ for module in modules)


def augmentation_remembers(trial: Trial) -> bool:
    """Return whether modules of ``data.augment`` change samples by those of earlier calls.

    So does a module that keeps a mean of its inputs, or draws from a generator of its own. Its
    result for some samples then differs after a call for others.

    Args:
        trial: The algorithm and its samples.
    """
    if trial.augment is None:
        return False
    index = trial.data.train.index
    own, others = trial.load(index[:_AUGMENTED]), trial.load(index[-_AUGMENTED:])
    try:
        alone, again = (_augment_last(trial, own) for _ in range(2))
        after_others = _augment_last(trial, others, own)
    except Exception:  # it cannot be copied, or fails: a real error appears in another trial
        return False
    # without equal results, it has draws that no seed repeats
    return are_equal(alone, again) and not are_equal(alone, after_others)


def _augment_last(trial: Trial, *batches: Batch) -> list[Tensor]:
    """Return the last of some minibatches as a copy of the modules augments them in turn."""
    trial = replace(trial, augment=copy.deepcopy(trial.augment))
    augmented: list[Tensor] = []
    with fork_all_generators(batches[0].device) as seed:
        for batch in batches:
            seed(0)
            inputs = tree_map(torch.clone, batch.inputs)  # a module may change them in place
            augmented = leaves(trial.augment_batch(batch._replace(inputs=inputs)).inputs)
    return augmented
