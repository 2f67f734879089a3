"""The choice of an engine and of its number of clients at a time."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.engine.base import (
    CannotCompileError,
    CannotStackError,
    Chunk,
    Engine,
    LocalSettings,
)
from pl_fed.engine.batched import StackedRunner, TurnRunner
from pl_fed.engine.one_by_one import OneByOne
from pl_fed.engine.options import EngineName, EngineOptions
from pl_fed.engine.rule import WorkFacts, choose_engine
from pl_fed.engine.stackable import check_stackable, measure_saved_bytes
from pl_fed.engine.timing import Candidate, Speed, describe, measure, parse_speeds
from pl_fed.state import total_memory
from pl_fed.text import describe_error
from pl_fed.trees import count_sample_bytes

EAGER = ("one_by_one", "stacked")
COMPILED = ("one_by_one_compiled", "stacked_compiled")
STACKED = ("stacked", "stacked_compiled")
UNNAMED = ("auto", "fastest")

_EAGER_FALLBACKS = {
    "stacked_compiled": "stacked",
    "stacked": "one_by_one",  # in mixed precision, the stacked engine traces, too
    "one_by_one_compiled": "one_by_one",
}
_ONE_BY_ONE_FALLBACKS = {"stacked": "one_by_one", "stacked_compiled": "one_by_one_compiled"}

_MIN_SECONDS_FOR_EAGER = 10.0  # of local work; below, timing the eager engines does not pay off
_MIN_SECONDS_FOR_COMPILED = 60.0  # of local work; below, compiling does not pay off

_TYPICAL_STEP_SECONDS = 5e-4  # of one client

_ROWS_BYTES = 1 << 23  # rows of a chunk that runs one by one
_STACK_SHARE = 0.25  # of a device's memory, for a stack; client states take a share of the free one

TRIED_CLIENTS = 16
"""The largest number of clients in the trial that clients can be stacked."""

_STACK_BYTES = 5 << 20  # rows of a stack on a CPU: fastest if they fit into a cache


@dataclass(frozen=True)
class Workload:
    """Workload: the local work of an engine.

    Attributes:
        client: The algorithm.
        optimizer: The local optimizer.
        cohort: Ids of the clients that this process runs in the next round.
        load: Makes a chunk of clients, given their ids.
        rounds: The number of rounds of the run; 0 if it is unknown.
        seconds: The time limit of the run.
        steps: Returns the number of steps of each client on each trained model, given the
            clients' ids. A choice by the length of the run needs it.
        settings: Mixed precision, gradient clipping and accumulation.
        agree: Returns the first process's argument, so that all processes make the same choice.
    """

    client: Client
    optimizer: torch.optim.Optimizer
    cohort: Tensor
    load: Callable[[Tensor], Chunk]
    rounds: float = 0.0
    seconds: float = math.inf
    steps: Callable[[Tensor], dict[str, list[int]]] = lambda _: {}
    settings: LocalSettings = field(default_factory=LocalSettings)
    agree: Callable[[Any], Any] = lambda choice: choice

    @cached_property
    def example(self) -> Chunk:
        """A chunk of one client."""
        return self.load(self.cohort[:1])

    def count_steps(self) -> float:
        """Return the number of local steps of the run; 0 if the number of rounds is unknown."""
        steps = sum(max(counts) for counts in zip(*self.steps(self.cohort).values()))
        return self.rounds * steps if steps else 0.0


class EngineChoice:
    """Engine choice: runs chunks by the configured engine, or by another one if it is unsuitable.

    ``auto`` chooses by a rule (:mod:`pl_fed.engine.rule`). ``fastest`` times the engines before the
    first round and takes the fastest. It does so in long runs only: a run of seconds ends before a
    step is compiled. The choice belongs to the run: it is in the checkpoint, and a resumed run
    keeps it.

    Args:
        options: The engine of the config, its chunk size and compile mode.

    Attributes:
        settings: Mixed precision, gradient clipping and accumulation, as last passed to
            :meth:`choose`.
        current: The engine in use; ``None`` before the first round.
        size: The number of clients that it runs at a time; ``None`` before the first round.
        speeds: The measured speeds, by engine.
        activity: The preparation that runs now, as text for progress bars; mostly empty.
        device: The device of a choice for evaluations; ``None`` for that of the rounds.
    """

    def __init__(self, options: EngineOptions = EngineOptions()) -> None:
        self.options = options
        self.settings = LocalSettings()
        self.current: str | None = None if options.name in UNNAMED else options.name
        self.size = options.chunk_size
        self.speeds: dict[str, Speed] = {}
        self.activity = ""
        self.device: torch.device | None = None
        self._client: Client | None = None
        self._engines: dict[Any, Engine] = {}
        self._stackable: bool | None = None
        self._activation_bytes = 0  # of a client in a stack; 0: not measured

    @property
    def stacks(self) -> bool:
        """Whether the clients of a chunk are stacked. Their numbers of steps should be similar."""
        return self.current in STACKED

    @property
    def is_settled(self) -> bool:
        """Whether later rounds try no client before their local steps."""
        return self.size is not None and (not self.stacks or self._stackable is not None)

    def choose(self, work: Workload) -> None:
        """Choose the engine of a round and of all later rounds."""
        if self._client is not None and self._client is not work.client:
            self._begin(work.client)
        self._client, self.settings = work.client, work.settings
        if self.current is None:
            find = self._find_fastest if self.options.name == "fastest" else self._apply_rule
            self.current = work.agree(find(work) if len(work.cohort) else None)
            self.activity = ""
        if not len(work.cohort):
            return
        if self.stacks and not self._can_stack(work, rank_zero_warn):
            self.current = _ONE_BY_ONE_FALLBACKS[str(self.current)]
            self.size = self.options.chunk_size
        if self.size is None:
            self.size = self.clients_at_a_time(self.current, work)

    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows by the chosen engine: see :meth:`Engine.run`.

        If a stack or a compiled step fails, the chunk runs one by one.
        """
        name = self.current or "one_by_one"
        if name in COMPILED and not self._engines:
            self.activity = f"Compiling the local steps for the engine {name}"
        try:
            return self._get_engine(name, self.size or 1).run(client, optimizer, chunk)
        except CannotCompileError as error:
            self.current = _EAGER_FALLBACKS[name]
            _warn_eager(error)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if name == "one_by_one":
                raise
            return self._run_one_by_one(client, optimizer, chunk, error)
        finally:
            self.activity = ""
        return self.run(client, optimizer, chunk)

    def _run_one_by_one(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk, error: Exception
    ) -> dict[str, Tensor]:
        """Train a chunk one by one after an error of another engine, and keep this engine then.

        The trials see first steps only: a step may branch on data from a later one on. If a client
        fails one by one, too, the error is its own, and the engine stays.
        """
        outputs = self._get_engine("one_by_one", 1).run(client, optimizer, chunk)
        name, self.current = self.current, "one_by_one"
        rank_zero_warn(
            f"Clients are run one by one from round {chunk.batches.round} on, as the engine"
            f" {name} failed: {describe_error(error)}."
        )
        return outputs

    def halve(self) -> bool:
        """Halve the number of clients at a time, after a device ran out of memory.

        Returns:
            Whether fewer clients are possible.
        """
        if self.size is None or self.size < 2:
            return False
        self.size //= 2
        self._engines = {}  # their buffers hold a stack of the old size
        return True

    def clients_at_a_time(self, name: str | None, work: Workload) -> int:
        """Return the number of clients that an engine runs at a time."""
        if self.options.chunk_size is not None:
            return self.options.chunk_size
        row, cohort = work.client.row("global").data, len(work.cohort)
        if name not in STACKED:
            return max(1, min(cohort, _ROWS_BYTES // row.nbytes))
        models, batches = len(work.example.objective.trained), work.example.batches
        activations = 2 * self._activation_bytes  # as much again for the backward pass
        if not activations:
            activations = 64 * count_sample_bytes(batches.data.inputs) * batches.width
        # a row, its gradient, two of optimizer state, two temporary ones
        needed = 6 * models * row.nbytes + activations
        most = int(_STACK_SHARE * total_memory(row.device) / needed)
        if row.device.type == "cpu":
            most = min(most, _STACK_BYTES // (models * row.nbytes))
        chunks = math.ceil(cohort / max(1, min(cohort, most)))
        return math.ceil(cohort / chunks)  # chunks of equal sizes, so that a stack is full

    def choose_for_evaluation(
        self, device: torch.device, earlier: "EngineChoice | None"
    ) -> "EngineChoice":
        """Return a choice for the few local steps before an evaluation.

        It takes the engine of the rounds; before their choice, the default engine of a device.

        Args:
            device: The device of the models.
            earlier: The choice for the evaluation before; it is returned if it still holds.
        """
        name: Any = self.current or self.options.name
        options = replace(self.options, name=default_engine(device) if name in UNNAMED else name)
        if earlier is not None and (earlier.options, earlier.device) == (options, device):
            return earlier
        choice = EngineChoice(options)
        choice.device = device
        return choice

    def state_dict(self) -> dict[str, Any]:
        """Return the choice. A resumed run must keep it to give the same numbers bit for bit."""
        return {
            "asked": self.options.name,
            "engine": self.current,
            "size": self.size,
            "speeds": {name: asdict(speed) for name, speed in self.speeds.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the choice of a checkpoint, unless the config has another engine or chunk size.

        Raises:
            ValueError: If the checkpoint's engine is unknown or its chunk size is below 1.
        """
        engine, size = state["engine"], state["size"]
        if engine not in (None, *EAGER, *COMPILED) or (size is not None and size < 1):
            raise ValueError(
                f"Expected a checkpoint whose engine is one of {', '.join(EAGER + COMPILED)}, with"
                f" at least 1 client at a time, but got one with {engine!r} and {size}."
            )
        self._begin(None)
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # damaged: unknown speeds
            self.speeds = parse_speeds(state["speeds"])
        keeps_engine = self.options.name in (*UNNAMED, state["asked"])
        if keeps_engine:
            self.current = engine
        if self.options.chunk_size is None and (keeps_engine or self.options.name == engine):
            self.size = size

    def _begin(self, client: Client | None) -> None:
        """Drop the choice for another client."""
        self._client, self._engines, self._stackable = client, {}, None
        self._activation_bytes = 0
        self.current, self.size = (
            None if self.options.name in UNNAMED else self.options.name,
            self.options.chunk_size,
        )

    def _apply_rule(self, work: Workload) -> str:
        """Return the engine of the rule; it asks whether clients stack only if that matters."""
        if work.example.batches.data.own_batches is not None:
            return "one_by_one"
        # a time limit (`max_time`) bounds the steps by a typical time of one
        steps = min(work.count_steps(), work.seconds / _TYPICAL_STEP_SECONDS)
        stack = min(len(work.cohort), self.clients_at_a_time("stacked", work))
        facts = WorkFacts.collect(work.client, work.example.objective, stack, steps)
        name = choose_engine(facts)
        if name in STACKED and not self._can_stack(work, lambda _: None):
            return choose_engine(replace(facts, stack=1))
        return name

    def _find_fastest(self, work: Workload) -> str:
        """Time the engines if the run is long enough, and return the fastest."""
        default = default_engine(work.client.device)
        if default in STACKED and not self._can_stack(work, rank_zero_warn):
            default = "one_by_one"
        steps = work.count_steps()
        if not steps:
            return default
        self.speeds = self._measure(work, steps, default)
        if not self.speeds:
            return default
        steps = min(steps, work.seconds / min(speed.step for speed in self.speeds.values()))
        fastest = min(self.speeds, key=lambda name: self.speeds[name].total(steps))
        rank_zero_info(
            f"Clients are run by the engine {fastest}; microseconds for a step of a client:"
            f" {describe(self.speeds)}."
        )
        return fastest

    def _measure(self, work: Workload, steps: float, default: str) -> dict[str, Speed]:
        """Time the engines that may pay off for a number of steps, and return their speeds."""
        candidate = self._make_candidate(default, work)
        candidate.seconds_per_step(1)  # to warm up
        step = candidate.seconds_per_step(2)
        seconds = min(step * steps, work.seconds)
        names: tuple[str, ...] = EAGER if seconds > _MIN_SECONDS_FOR_EAGER else ()
        if seconds > _MIN_SECONDS_FOR_COMPILED:
            names += COMPILED
        if names and not self._can_stack(work, lambda _: None):
            names = tuple(name for name in names if name not in STACKED)
        candidates = {name: self._make_candidate(name, work) for name in names}
        speeds, errors = measure(candidates, step, CannotCompileError)
        if errors:
            _warn_eager(errors[0])
        return speeds

    def _make_candidate(self, name: str, work: Workload) -> Candidate:
        size = self.clients_at_a_time(name, work)

        def run(chunk: Chunk) -> dict[str, Tensor]:
            """Train a chunk by the engine."""
            self.activity = f"Timing the engine {name}, once for this run"
            return self._get_engine(name, size).run(work.client, work.optimizer, chunk)

        return Candidate(run, lambda: work.load(work.cohort[:size]))

    def _get_engine(self, name: str, size: int) -> Engine:
        """Return an engine; it is built once, because it contains compiled steps."""
        stack_size = size if name in STACKED else None
        key = (name, stack_size, self.settings)
        if key not in self._engines:
            if name == "one_by_one":
                self._engines[key] = OneByOne(self.settings)
            else:
                kind = TurnRunner if stack_size is None else StackedRunner
                compiled, mode = name in COMPILED, self.options.compile_mode
                self._engines[key] = kind(self.settings, stack_size, compiled, mode)
        return self._engines[key]

    def _can_stack(self, work: Workload, warn: Callable[[str], object]) -> bool:
        """Return whether clients can be stacked; check once, and warn if they cannot."""
        if self._stackable is None:
            size = min(TRIED_CLIENTS, self.clients_at_a_time("stacked", work))
            try:
                chunk = work.load(work.cohort[:size])
                check_stackable(work.client, work.optimizer, chunk, self.settings)
                if self.options.chunk_size is None:
                    self._activation_bytes = measure_saved_bytes(
                        work.client, work.optimizer, chunk, self.settings
                    )
                self._stackable = True
            except CannotStackError as error:
                self._stackable = False
                warn(f"Clients are run one by one, as they cannot be stacked: {error}.")
        return self._stackable


def default_engine(device: torch.device) -> EngineName:
    """Return an engine for short work on a device."""
    return "stacked" if device.type == "cuda" else "one_by_one"


def _warn_eager(error: Exception) -> None:
    rank_zero_warn(f"Local steps run eagerly, as they cannot be compiled: {error}.")
