"""Errors of users' code, with an explanation."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pl_fed.devices import is_out_of_memory
from pl_fed.text import find_code_line
from pl_fed.trees import Tree, leaves
from pl_fed.types import Batch

_EXPLAINED = (
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    MisconfigurationException,
)


def call_or_explain(
    expected: str,
    call: Callable[[], Any],
    remedies: Mapping[str, str] | None = None,
    explains_own: bool = True,
) -> Any:
    """Return the value of a function, or raise its error with an explanation.

    Args:
        expected: The beginning of the new message.
        call: The function.
        remedies: Endings of the new message, by words in the message of the error, or in the line
            of the user's code.
        explains_own: Whether to explain errors that pl_fed's own code raises. Otherwise the
            function is the user's own code, and the explanation ends in its line.

    Raises:
        ValueError: If the function fails.
    """
    try:
        return call()
    except _EXPLAINED as error:
        if is_out_of_memory(error) or (not explains_own and _is_own(error)):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        line = "" if explains_own else find_code_line(error)
        for words, remedy in (remedies or {}).items():
            if words in reason or words in line:
                reason = f"{reason.rstrip('.')}{remedy}."
        place = f" ({line})" if line else ""
        raise ValueError(f"{expected} failed: {reason}{place}") from error


def list_shapes(tree: Tree) -> str:
    """Return the shapes of the tensors of a tree in words.

    Example:
        >>> import torch
        >>> list_shapes((torch.zeros(2, 3), torch.zeros(2)))
        '[2, 3], [2]'
    """
    return ", ".join(str(list(leaf.shape)) for leaf in leaves(tree))


def _is_own(error: BaseException) -> bool:
    """Return whether pl_fed's own code raised an error."""
    place, module = error.__traceback__, ""
    while place is not None:
        module, place = str(place.tb_frame.f_globals.get("__name__")), place.tb_next
    return module.split(".")[0] == "pl_fed"


@contextmanager
def explain_step() -> Iterator[None]:
    """Add a remedy to errors in ``training_step`` about batches, logs or gradients."""
    try:
        yield
    except ValueError as error:
        if not _unpacks_batch(error):
            raise
        raise ValueError(
            "Expected `training_step` to read `batch.inputs`, `batch.targets` and `batch.mask`, of"
            f" a batch with {len(Batch._fields)} fields, but got {find_code_line(error)}."
        ) from error
    except MisconfigurationException as error:
        if "self.log" not in str(error):
            raise
        raise ValueError(
            "Expected `training_step` to return the values to log, in a dict with `loss` and other"
            " scalars, but got a call of `self.log`: pl_fed may train many clients at once."
        ) from error
    except RuntimeError as error:
        if "requires_grad_() " not in str(error) or "functorch transform" not in str(error):
            raise
        raise ValueError(
            "Expected `training_step` not to call `requires_grad_()` under an algorithm that"
            f" differentiates the step, but got {find_code_line(error)}: take this gradient by"
            " `torch.func.grad`, or choose another algorithm."
        ) from error


def _unpacks_batch(error: ValueError) -> bool:
    """Return whether the line that raised an error unpacks a batch into a few names."""
    place, values = error.__traceback__, dict[str, Any]()
    while place is not None:
        values, place = place.tb_frame.f_locals, place.tb_next
    return "values to unpack" in str(error) and any(isinstance(v, Batch) for v in values.values())
