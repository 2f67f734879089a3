"""Traces of ``training_step``: what they read as constants, and what they refuse to read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from pl_fed.clients.base import Client
from pl_fed.engine.base import CannotCompileError
from pl_fed.torch_internals import (
    MovedInTorchError,
    OperatorMode,
    takes_number_out,
    trace_graph,
    writes_in_place,
)

_PLAIN = (int, float, complex, str, type(None))
_MIRRORS = {"_flat_weights", "_flat_weight_refs"}  # a recurrent layer's own lists of its parameters
_BOOKKEEPING = {
    "constructor_arguments",
    "_rows",
    "_readable",
    "_objective",
    "_states",
    "_server_states",
    "models",
    "_task_data",
}
_NOT_READ = {*vars(LightningModule()), *_BOOKKEEPING, *_MIRRORS} - {"training"}  # changes no step


def trace(client: Client, function: Callable[..., Any], *tensors: Any) -> GraphModule:
    """Return a function of tensors as a graph, in which numbers of Python are constants.

    Args:
        client: The algorithm that it runs.
        function: The function.
        *tensors: The arguments that it is traced on.

    Raises:
        CannotCompileError: If it reads the trainer, or a number out of a tensor, which would be
            constants of the graph. Or if torch no longer traces as it did.
    """
    try:
        with _trainer_unread(client), _NumbersUnread(), _ArraysUnread():
            return trace_graph(function, *tensors)
    except MovedInTorchError as error:
        raise CannotCompileError(str(error)) from error


def loosen_views(graph: GraphModule) -> GraphModule:
    """Return a graph whose views may be copies, as ``torch.vmap`` may lay tensors out otherwise.

    A graph that writes in place stays as it is: it may write through a view.
    """
    nodes = list(graph.graph.nodes)
    if not any(writes_in_place(node.target) for node in nodes):
        for node in nodes:
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
        graph.recompile()
    return graph


def plain_attributes(client: Client) -> Iterator[object]:
    """Yield whatever Python code of the client and its modules may read besides tensors.

    These are numbers and strings; the identities of tensors that are neither parameters nor
    buffers; and the printed form of anything else, such as a list or a dataclass.
    """
    for module in client.modules():
        for name, value in vars(module).items():
            if name in _NOT_READ:
                continue
            if isinstance(value, _PLAIN):
                yield name, value
            elif isinstance(value, Tensor):
                yield name, id(value)
            else:
                yield name, repr(value)


@contextmanager
def _trainer_unread(client: Client) -> Iterator[None]:
    """Refuse reading the trainer, whose numbers would be those of the first round for ever."""
    try:
        trainer = client.trainer
    except RuntimeError:  # there is none
        trainer = None
    client.trainer = _Unreadable()  # type: ignore[assignment]
    try:
        yield
    finally:
        client.trainer = trainer


class _Unreadable:
    def __getattr__(self, name: str) -> NoReturn:
        raise CannotCompileError(f"`training_step` reads the trainer ({name})")


class _ArraysUnread(TorchFunctionMode):
    """Refuses arrays and lists of a tensor's numbers, which no dispatcher sees."""

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


class _NumbersUnread(OperatorMode):
    """Refuses numbers that are taken out of tensors which are no inputs of the step."""

    def run(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that gives tensors, and refuse any other."""
        if takes_number_out(operator):
            raise CannotCompileError("`training_step` takes a number out of a tensor (.item())")
        return operator(*args, **kwargs)
