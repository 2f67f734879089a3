"""Trials of local steps before training: once for equal algorithms and data, or not at all.

A trial takes as long as a few short rounds, and returns a record that depends on its input alone.
Tests set up the same federation again and again. Rounds without a Trainer need no trial.
"""

import copyreg
import hashlib
import io
import marshal
import pickle
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, FunctionType, ModuleType
from unittest import mock

import torch
from lightning.pytorch import Trainer

from pl_fed.clients import Client
from pl_fed.data.client_data import ClientData
from pl_fed.federation import set_up
from pl_fed.preflight.step_facts import StepFacts
from pl_fed.types import Population

# the result of each trial that finds nothing
TRIALS = {
    "find_own_reads": False,
    "refuse_unusable_loss": None,
    "try_round": None,
    "find_step_facts": StepFacts(),
    "explain_smallest_minibatch": None,
}
MOST_BYTES = 1 << 20  # a larger tensor is not read
_held = {}  # classes by their id, which stays theirs


class Description(pickle.Pickler):
    """Description: bytes that are equal for equal objects, with all their tensors and functions.

    Of data it has sizes and types, and nothing of trainers and numbers of clients.
    """

    def persistent_id(self, value):
        if isinstance(value, Trainer | Population):
            return type(value).__name__
        if isinstance(value, type | ModuleType | BuiltinFunctionType):
            _held[id(value)] = value
            return id(value)
        return None

    def reducer_override(self, value):
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            code = marshal.dumps(value.__code__)
            return tuple, ((code, cells, value.__defaults__, value.__kwdefaults__, vars(value)),)
        if isinstance(value, torch.Tensor):
            if value.numel() * value.element_size() > MOST_BYTES:
                raise pickle.PicklingError("a large tensor")
            layout = (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            content = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            return tuple, ((type(value), *layout, content, vars(value)),)
        if isinstance(value, torch.Generator):
            return tuple, ((value.get_state(),),)
        if isinstance(value, ClientData):
            sizes = [part.sizes.tolist() for part in (value.train, value.val, value.test)]
            types = (value.num_classes, value.dtype, value.mapped, value.keeps_integers)
            return tuple, ((value.kinds, sizes, types, value.redraw, value.entries),)
        if isinstance(value, Client):
            state = {**value.__getstate__(), "_task_data": None}  # has an id
            return copyreg.__newobj__, (type(value),), state
        return NotImplemented


def describe(*values):
    """Return a digest that is equal for equal values; ``None`` if they cannot be described."""
    description = io.BytesIO()
    try:
        Description(description).dump(values)
    except Exception:  # an attribute with a lock, or a large tensor
        return None
    return hashlib.sha256(description.getvalue()).digest()


_results = {}  # of earlier trials, by a digest of their input
_latest = (None, None)  # a set-up tries the same algorithm three times: it and its digest


def describe_trial(trial):
    """Return the digest of a trial's algorithm and data; a set-up changes neither meanwhile."""
    global _latest
    if _latest[0] is not trial:
        _latest = (trial, describe(trial))
    return _latest[1]


@contextmanager
def equal_trials_shared():
    """Let federations with equal algorithms and data share their trials of local steps."""
    with ExitStack() as stack:
        for name in TRIALS:
            function = getattr(set_up, name)
            if not isinstance(function, SharedTrial):
                stack.enter_context(mock.patch.object(set_up, name, SharedTrial(function)))
        yield


@contextmanager
def trials_skipped():
    """Let federations take the algorithm as tried: every trial finds nothing.

    For rounds whose numbers are compared. The trials change no number; ``tests/preflight`` and each
    fit by a Trainer hold them.
    """
    with ExitStack() as stack:
        for name, result in TRIALS.items():
            stack.enter_context(mock.patch.object(set_up, name, lambda *_, result=result: result))
        yield


class SharedTrial:
    """Shared trial: a function of federations that runs once for equal arguments."""

    def __init__(self, function):
        self.function = function

    def __call__(self, trial, *arguments):
        digest = describe_trial(trial)
        if digest is None:
            return self.function(trial, *arguments)
        key = self.function.__name__, digest, describe(*arguments)
        if key not in _results:
            _results[key] = self.function(trial, *arguments)
        return _results[key]
