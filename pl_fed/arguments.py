"""Checks of arguments, with one form of error message."""

import inspect
import math
import numbers
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `pl_fed report` starts faster without torch
    from torch.optim import Optimizer


_LONGEST_VALUE = 120  # characters of a value in a message
_MAX_COUNT = 2**31 - 1  # products of two counts fit into 64 bits
_LARGEST = (2 - 2**-23) * 2.0**127  # of float32


def check_integers(minimum: int, maximum: int = _MAX_COUNT, **arguments: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless all arguments are integers within bounds.

    Args:
        minimum: The smallest valid value.
        maximum: The largest valid value.
        **arguments: The values by argument name.
    """
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"Expected argument `{name}` to be an integer but got {value!r}.")
        if value < minimum:
            raise ValueError(
                f"Expected argument `{name}` to be at least {minimum} but got {value}."
            )
        if value > maximum:
            raise ValueError(f"Expected argument `{name}` to be at most {maximum} but got {value}.")


def check_instances(kind: type, **arguments: object) -> None:
    """Raise ``TypeError`` unless all arguments are instances of a class, or ``None``.

    Args:
        kind: The class.
        **arguments: The values by argument name.
    """
    for name, value in arguments.items():
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"Expected argument `{name}` to be an object of a subclass of {kind.__name__} but"
                f" got {_describe(value)}."
            )


def _describe(value: object) -> str:
    """Return a value in a few words: tensors and tables have long representations."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    is_short = len(text) <= _LONGEST_VALUE and text.isprintable()
    return text if is_short else f"an object of type {type(value).__name__}"


def check_nonnegative(**arguments: float) -> None:
    """Raise an error unless all arguments are finite numbers of at least 0."""
    for name, value in arguments.items():
        _check_number(name, value)
        if not 0 <= value < math.inf:
            raise ValueError(
                f"Expected argument `{name}` to be at least 0, and finite, but got {value}."
            )


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"Expected argument `{name}` to be a number but got {value!r}.")


def check_finite(**arguments: float | None) -> None:
    """Raise ``ValueError`` unless all arguments are finite numbers, or ``None``."""
    for name, value in arguments.items():
        if value is not None and (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ValueError(f"Expected argument `{name}` to be a finite number but got {value!r}.")


def check_choice(choices: Collection[str | None], **arguments: str | None) -> None:
    """Raise ``ValueError`` unless all arguments are among the choices."""
    for name, value in arguments.items():
        if value not in choices:
            words = [repr(word) for word in choices]
            expected = f"{', '.join(words[:-1])} or {words[-1]}"
            raise ValueError(f"Expected argument `{name}` to be {expected} but got {value!r}.")


def check_optimizers(**arguments: "Optimizer") -> None:
    """Raise ``ValueError`` if the step of an optimizer evaluates the loss itself, as in L-BFGS."""
    for name, value in arguments.items():
        closure = inspect.signature(type(value).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"Expected argument `{name}` to build an optimizer that takes a gradient, as"
                f" torch.optim.SGD, but got {type(value).__name__}, which needs a closure that"
                " evaluates the loss."
            )


def check_finite_options(**optimizers: "Optimizer") -> None:
    """Raise ``ValueError`` if an option of an optimizer is no number of float32, such as NaN."""
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for option, value in group.items():
                values = value if isinstance(value, tuple | list) else (value,)
                if option != "params" and not all(map(_is_finite, values)):
                    raise ValueError(
                        f"Expected argument `{name}` to build an optimizer with options that are"
                        f" finite in float32 but got {option} = {value}."
                    )


def check_not_differentiable(**optimizers: "Optimizer") -> None:
    """Raise ``ValueError`` if an optimizer has ``differentiable=True``, unused in pl_fed."""
    for name, optimizer in optimizers.items():
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise ValueError(
                f"Expected argument `{name}` to build an optimizer without differentiable steps but"
                " got differentiable = True: leave it out."
            )


def _is_finite(value: object) -> bool:
    """Return whether a value is finite in float32, in which an optimizer multiplies by it."""
    return not isinstance(value, float | int) or abs(value) <= _LARGEST


def check_positive(**arguments: float) -> None:
    """Raise an error unless all arguments are finite numbers above 0."""
    for name, value in arguments.items():
        _check_number(name, value)
        if not 0 < value < math.inf:
            raise ValueError(
                f"Expected argument `{name}` to be above 0, and finite, but got {value}."
            )


def check_interval(interval: str, **arguments: float) -> None:
    """Raise an error unless all arguments are numbers in an interval.

    Args:
        interval: The interval, such as ``"[0, 1)"``, which has 0, but not 1.
        **arguments: The values by argument name.
    """
    low, high = map(float, interval[1:-1].split(","))
    has_low, has_high = interval[0] == "[", interval[-1] == "]"
    for name, value in arguments.items():
        _check_number(name, value)
        is_end = (has_low and value == low) or (has_high and value == high)
        if not (low < value < high or is_end):
            raise ValueError(f"Expected argument `{name}` to be in {interval} but got {value}.")


def check_shares(**arguments: float) -> None:
    """Raise an error unless all arguments are numbers in [0, 1]."""
    check_interval("[0, 1]", **arguments)


def check_at_most(maximum: float, **arguments: float) -> None:
    """Raise ``ValueError`` unless all arguments are at most ``maximum``."""
    for name, value in arguments.items():
        if not value <= maximum:
            raise ValueError(f"Expected argument `{name}` to be at most {maximum} but got {value}.")


def check_writable(**arguments: str | Path) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless all arguments are writable folders.

    For a folder that does not exist, the nearest existing parent must be writable.
    """
    for name, value in arguments.items():
        if not isinstance(value, (str, Path)):
            raise TypeError(f"Expected argument `{name}` to be a folder but got {value!r}.")
        path = Path(value)
        folders = (path, *path.parents)
        try:
            with TemporaryFile(dir=next(folder for folder in folders if folder.exists())):
                pass
        except OSError as error:
            raise ValueError(
                f"Expected argument `{name}` to be a folder that can be written but got {path}:"
                f" {error.strerror}."
            ) from None
