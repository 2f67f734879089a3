"""Traces of ``training_step``, and what may not be in it then."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from pl_fed.clients.base import Client
from pl_fed.torch_internals import (
    MovedInTorchError,
    OperatorMode,
    takes_number_out,
    trace_graph,
)


class CannotCompileError(RuntimeError):
    """A step that cannot be compiled, or not so that it gives the same numbers."""


def trace(client: Client, function: Callable[..., Any], *tensors: Any) -> GraphModule:
    """Return a function of tensors as a graph, in which numbers of Python are constants.

    Args:
        client: The algorithm that it runs.
        function: The function.
        *tensors: What it is tried on.

    Raises:
        CannotCompileError: If it reads what would be the same for ever then: the trainer, or a
            number out of a tensor. Or if torch no longer traces as it did.
    """
    try:
        with _trainer_unread(client), _NumbersUnread(), _ArraysUnread():
            return trace_graph(function, *tensors)
    except MovedInTorchError as error:
        raise CannotCompileError(str(error)) from error


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
