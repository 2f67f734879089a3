"""Trials of local steps before training, which run once for equal algorithms and data.

A trial takes as long as a few short rounds, and returns a record that depends on its input alone.
Tests set up the same federation again and again.
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

import pl_fed.federation
from pl_fed.clients import Client
from pl_fed.data.client_data import ClientData
from pl_fed.types import Population

TRIALS = ("try_round", "find_step_facts", "explain_smallest_minibatch")
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


@contextmanager
def equal_trials_shared():
    """Let federations with equal algorithms and data share their trials of local steps."""
    with ExitStack() as stack:
        for name in TRIALS:
            function = getattr(pl_fed.federation, name)
            if not isinstance(function, SharedTrial):
                stack.enter_context(
                    mock.patch.object(pl_fed.federation, name, SharedTrial(function))
                )
        yield


class SharedTrial:
    """Shared trial: a function of federations that runs once for equal arguments."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments):
        key = describe(self.function.__name__, *arguments)
        if key is None:
            return self.function(*arguments)
        if key not in _results:
            _results[key] = self.function(*arguments)
        return _results[key]
