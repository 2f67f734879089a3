"""Traces of ``training_step``: the constants that they contain, and the reads that they refuse."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from pl_fed.clients.base import Client
from pl_fed.clients.kept_parts import CLIENT_BOOKKEEPING
from pl_fed.engine.base import CannotCompileError
from pl_fed.nets.kept_values import MIRRORS
from pl_fed.torch_internals import (
    MovedInTorchError,
    OperatorMode,
    takes_number_out,
    trace_graph,
    writes_in_place,
)

_PLAIN = {bool, int, float, complex, str, type(None)}
# a change of these attributes changes no step
_IGNORED_ATTRIBUTES = {*CLIENT_BOOKKEEPING, *MIRRORS} - {"training"}


def trace(client: Client, function: Callable[..., Any], *tensors: Any) -> GraphModule:
    """Return a function of tensors as a graph; numbers of Python become constants.

    Args:
        client: The algorithm that the function runs.
        function: The function.
        *tensors: The arguments for the trace.

    Raises:
        CannotCompileError: If the function reads the trainer, or a number out of a tensor: these
            would be constants of the graph. Or if torch has moved its internals.
    """
    try:
        with _forbid_trainer(client), _ForbidNumbers(), _ForbidArrays():
            return trace_graph(function, *tensors)
    except MovedInTorchError as error:
        raise CannotCompileError(str(error)) from error


def loosen_views(graph: GraphModule) -> GraphModule:
    """Let a graph copy where a view is impossible, since ``torch.vmap`` may change memory layouts.

    A graph that writes in place stays unchanged: it may write through a view.
    """
    nodes = list(graph.graph.nodes)
    if not any(writes_in_place(node.target) for node in nodes):
        for node in nodes:
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
        graph.recompile()
    return graph


def plain_attributes(client: Client) -> Iterator[object]:
    """Yield the values that Python code of the client, its modules and its task may read.

    These are numbers and strings, the identities of tensors, the printed form of other values, such
    as a list or a dataclass, and the classes of the modules, since a callback may replace one. The
    rows of trained models are inputs of a step; new numbers in other tensors reach its graph.
    """
    rows = (row(model) for row in (client.row, client.statistics) for model in client.trained)
    inputs = {id(tensor) for row in rows for tensor in row.tensors.values()}
    for part in _list_parts(client):
        yield type(part)
        for name, value in vars(part).items():
            if name in ("_parameters", "_buffers"):
                for key, tensor in value.items():
                    if id(tensor) not in inputs:
                        yield key, _Identity(tensor)
            elif name in _IGNORED_ATTRIBUTES:
                continue
            elif type(value) in _PLAIN:
                yield name, value
            elif isinstance(value, Tensor):
                yield name, _Identity(value)
            else:
                yield name, repr(value)


def _list_parts(client: Client) -> list[Any]:
    """Return the modules of a client, its task, and the modules of the task.

    The task of a LightningModule is pl_fed's own, with values that steps change.
    """
    parts: list[Any] = [*client.modules()]
    if not client.task.runs_steps:
        parts.append(client.task)
        for value in vars(client.task).values():
            if isinstance(value, nn.Module) and value not in parts:
                parts += value.modules()
    return parts


class _Identity:
    """Identity of a value: it equals itself alone, and stays in memory, so no other has its id."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@contextmanager
def _forbid_trainer(client: Client) -> Iterator[None]:
    """Refuse reads of the trainer: its numbers would stay those of the first round."""
    try:
        trainer = client.trainer
    except RuntimeError:  # without a trainer
        trainer = None
    client.trainer = _ForbiddenTrainer()  # type: ignore[assignment]
    try:
        yield
    finally:
        client.trainer = trainer


class _ForbiddenTrainer:
    """Forbidden trainer: raises an error on every read."""

    def __getattr__(self, name: str) -> NoReturn:
        raise CannotCompileError(f"`training_step` reads the trainer ({name})")


class _ForbidArrays(TorchFunctionMode):
    """Forbid arrays: refuses arrays and lists of a tensor's numbers; no dispatcher sees them."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (Tensor.numpy, Tensor.tolist, Tensor.__array__):
            raise CannotCompileError(
                f"`training_step` takes numbers out of a tensor (.{func.__name__}())"
            )
        return func(*args, **(kwargs or {}))


class _ForbidNumbers(OperatorMode):
    """Forbid numbers: refuses reads of numbers out of tensors that are no inputs of the step."""

    def run(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that returns tensors, and refuse others."""
        if takes_number_out(operator):
            raise CannotCompileError(
                "`training_step` takes a number out of a tensor (.item(), or a branch such as"
                " `if batch_idx == 0`)"
            )
        return operator(*args, **kwargs)
