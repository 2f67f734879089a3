"""The section ``federation.engine``: the engine of the local steps."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from pl_fed.arguments import check_choice, check_integers

EngineName = Literal[
    "auto", "fastest", "one_by_one", "stacked", "one_by_one_compiled", "stacked_compiled"
]
"""``one_by_one``: one client after the other; ``stacked``: many at once under ``torch.vmap``. Both
run eagerly or with compiled local steps. ``auto`` chooses by a rule, ``fastest`` by a stopwatch."""

_PATH = "federation.engine"


@dataclass(frozen=True)
class EngineOptions:
    """Engine options: the engine that runs the local steps, and its settings.

    Args:
        name: The engine: ``"one_by_one"``; ``"stacked"``, many clients at once under vmap;
            ``"one_by_one_compiled"`` and ``"stacked_compiled"``, with compiled local steps;
            ``"auto"`` chooses by a rule from the device, the net, the cohort and the length of the
            run; ``"fastest"`` times the engines, so that equal runs may differ by rounding.
        chunk_size: Number of clients that the engine runs at a time, at least 1; ``None`` takes a
            number that suits the engine and fits into memory.
        compile_mode: ``mode`` of ``torch.compile``, for example ``"reduce-overhead"`` for CUDA
            graphs.
        keep_optimizer_state: Whether each client keeps the state of its local optimizer between
            rounds, such as SGD's momentum and Adam's moments and step count. By default every
            round begins with a new local optimizer.

    Raises:
        TypeError: If ``chunk_size`` is no integer, or ``keep_optimizer_state`` is no boolean.
        ValueError: If ``name`` or ``compile_mode`` is unknown, or ``chunk_size`` is below 1.

    Example:
        >>> EngineOptions("stacked", chunk_size=10)
        EngineOptions(name='stacked', chunk_size=10, compile_mode=None, keep_optimizer_state=False)
    """

    name: EngineName = "auto"
    chunk_size: int | None = None
    compile_mode: str | None = None
    keep_optimizer_state: bool = False

    def __post_init__(self) -> None:
        check_choice(get_args(EngineName), **{f"{_PATH}.name": self.name})
        if self.chunk_size is not None:
            check_integers(1, **{f"{_PATH}.chunk_size": self.chunk_size})
        if self.compile_mode is not None:
            _check_compile_mode(self.compile_mode)
        if not isinstance(self.keep_optimizer_state, bool):
            raise TypeError(
                f"Expected argument `{_PATH}.keep_optimizer_state` to be true or false but got"
                f" {self.keep_optimizer_state!r}."
            )


def _check_compile_mode(mode: str) -> None:
    """Refuse a mode that torch.compile does not have."""
    try:
        torch.compile(lambda: None, mode=mode)  # compiles nothing yet
    except RuntimeError as error:
        raise ValueError(
            f"Expected argument `{_PATH}.compile_mode` to be a mode of torch.compile but got"
            f" {mode!r}: {error}."
        ) from error
