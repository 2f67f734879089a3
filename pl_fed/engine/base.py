"""The chunk of clients, the contract of the engines that run it, and shared tools of engines."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, ModelRows, Objective
from pl_fed.data.batches import Batches
from pl_fed.devices import note_devices
from pl_fed.nets.dropout import Draws
from pl_fed.random import key, random_bits

ROUND_NUMBERS = (
    "cohort",
    "byzantine",
    "forged",
    "clipped",
    "dropped",
    "rejected",
    "update_norm",
    "benign_distance",
)
"""Numbers that the round reports under ``train/``, beside the outputs of ``training_step``."""

ATTACK_NUMBERS = (
    "attackers",
    "flagged",
    "flagged_attackers",
    "detection_precision",
    "detection_recall",
    "attack_distance",
    "attack_cosine",
)
"""Numbers that a round with attackers reports, as well."""

TAKEN_NUMBERS = (
    *ROUND_NUMBERS,
    *ATTACK_NUMBERS,
    "small_cohort",
    "upload_bytes",
    "download_bytes",
)
"""Names under ``train/`` that no output of ``training_step`` may have."""

_MOST_IDS = 5  # ids of clients in a note


@dataclass
class Chunk:
    """Chunk: clients that an engine trains together, with their objective, minibatches and rows.

    Attributes:
        clients: Ids of the clients, int64 [clients], on the CPU.
        objective: The objective of the local steps.
        batches: The clients' minibatches.
        steps: The number of steps of each client on each trained model, by the model's name.
        round: The clients' rows. Engines read :meth:`ClientRound.readable_rows` and the trained
            models (possibly one expanded row), and replace these models by new tensors.
        on_done: Called with the number of clients that have completed their steps so far.
        skipped: The indices of the steps that ``training_step`` skipped, by the position of the
            client; set by the engine.
        rates: The learning rate of each parameter group in each step of each client, float64
            [clients, steps, groups], on the CPU; ``None`` if those of the optimizer hold.
        place: The stage of the run, for the note of an error: see :meth:`add_note`.
    """

    clients: Tensor
    objective: Objective
    batches: Batches
    steps: dict[str, list[int]]
    round: ClientRound
    on_done: Callable[[int], None] = lambda _: None
    skipped: dict[int, list[int]] = field(default_factory=dict)
    place: str = "round {round}, {clients}"
    rates: Tensor | None = None

    def add_note(self, error: Exception, positions: Iterable[int], step: int | None = None) -> None:
        """Add a note to an error in a local step: the round, the clients and the step.

        Args:
            error: The error.
            positions: Positions of the clients that may have caused it.
            step: The local step that caused it; ``None`` if that is unknown.
        """
        clients = name_clients(self.clients[position] for position in positions)
        place = self.place.format(round=self.batches.round, clients=clients)
        error.add_note(f"In {place}" + ("." if step is None else f", local step {step}."))
        note_devices(error)

    @contextmanager
    def note_errors(self, positions: Iterable[int]) -> Iterator[None]:
        """Add a note to an error within the context: the round and the clients.

        Args:
            positions: Positions of the clients that may cause it.
        """
        try:
            yield
        except Exception as error:
            self.add_note(error, positions)
            raise

    def count_taken_steps(self) -> dict[str, list[int]]:
        """Return the number of steps that each client has taken, by trained model."""
        skipped = [self.skipped.get(position, []) for position in range(len(self.clients))]
        return {
            model: [
                count - sum(index < count for index in own) for count, own in zip(counts, skipped)
            ]
            for model, counts in self.steps.items()
        }

    @property
    def idle(self) -> list[bool]:
        """Whether each client has taken no step; empty if each has taken one."""
        if not self.skipped and all(self.batches.steps):
            return []
        idle = [not any(counts) for counts in zip(*self.count_taken_steps().values())]
        return idle if any(idle) else []

    def plan_steps(self, batches_per_step: int, position: int, length: int) -> list[bool]:
        """Return whether the optimizer steps after each minibatch of a client.

        As in Lightning, ``batches_per_step`` minibatches make up an optimizer step, or fewer at the
        end of a pass over the client's data. They are also fewer at the end of the work on a model.

        Args:
            batches_per_step: The number of minibatches in an optimizer step.
            position: The position of the client.
            length: The length of the plan: the client's number of minibatches, or that of a stack.
                In a stack, a client's last step waits for the next step of longer clients. Its
                numbers do not depend on that.

        Example: five minibatches, in passes of three. ::

            chunk.plan_steps(2, position=0, length=5)  # [False, True, True, False, True]
        """
        if batches_per_step == 1:
            return [True] * length
        last, per_pass = self.batches.steps[position], self.batches.pass_lengths[position]
        ends = {*range(0, last, per_pass), *(counts[position] for counts in self.steps.values())}
        # a client's last minibatch closes no window: a stack goes on, and its own end closes it
        ends = {end for end in ends if end < last} | {length}
        plan: list[bool] = []
        num_waiting = 0
        for number in range(1, length + 1):
            num_waiting += 1
            plan.append(num_waiting == batches_per_step or number in ends)
            if plan[-1]:
                num_waiting = 0
        return plan

    def truncate(self, most_steps: int) -> "Chunk":
        """Return a chunk of the same clients and rows with at most ``most_steps`` steps each."""
        steps = {
            model: [min(count, most_steps) for count in counts]
            for model, counts in self.steps.items()
        }
        rates = None if self.rates is None else self.rates[:, :most_steps]
        batches, round = self.batches.truncate(most_steps), self.round.copy()
        return replace(self, batches=batches, steps=steps, round=round, rates=rates, skipped={})

    def draw_keys(self, draws: Draws) -> Tensor:
        """Return the keys of the random draws of the clients' layers in each step.

        Args:
            draws: The draws of the layers.

        Returns:
            int64 [clients, steps]; zeros if no layer draws.
        """
        batches = self.batches
        if not draws.wanted:
            return torch.zeros(len(self.clients), batches.max_steps, dtype=torch.int64)
        keys = [key(batches.seed, "layers", batches.round, client) for client in batches.clients]
        return random_bits(torch.tensor(keys)[:, None], torch.arange(batches.max_steps))


@dataclass(frozen=True)
class Clipping:
    """Gradient clipping of the local steps, separately for each model of each client.

    Args:
        value: The largest norm, or the largest absolute value; ``None`` for no clipping.
        algorithm: ``"norm"`` or ``"value"``.
    """

    value: float | None = None
    algorithm: str = "norm"

    def clip(self, gradients: list[Tensor], stacked: bool = False) -> list[Tensor]:
        """Return the clipped gradients of a model, as ``torch.nn.utils`` clips them.

        Args:
            gradients: The gradients of the model's parameters.
            stacked: Whether their first dimension is that of clients.
        """
        value = self.value
        if not value or not gradients:
            return gradients
        if self.algorithm == "value":
            return [gradient.clamp(-value, value) for gradient in gradients]
        norm = torch.linalg.vector_norm
        flat = [g.reshape(len(g), -1) for g in gradients] if stacked else gradients
        norms = torch.stack([norm(gradient, dim=-1 if stacked else None) for gradient in flat])
        factor = (value / (norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        return [gradient * expand_to(factor, gradient) for gradient in gradients]


@dataclass(frozen=True)
class LocalSettings:
    """Local settings: mixed precision, gradient clipping and accumulation of all local steps.

    Attributes:
        autocast: Returns the context of ``training_step`` (mixed precision).
        clipping: Gradient clipping.
        batches_per_step: The number of minibatches whose gradients make up an optimizer step: see
            :meth:`Chunk.plan_steps`.
    """

    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    clipping: Clipping = Clipping()
    batches_per_step: int = 1

    def casts(self, device: torch.device) -> bool:
        """Return whether the steps run in mixed precision on a device."""
        with self.autocast():
            return torch.is_autocast_enabled(device.type)


class CannotStackError(RuntimeError):
    """Error: an engine cannot run the net, optimizer or objective for many clients at once."""


class CannotCompileError(RuntimeError):
    """Error: an engine cannot compile the step, or the compiled step gives other numbers."""


class Engine(ABC):
    """Engine: runs the local steps of a chunk of clients.

    Args:
        settings: Mixed precision, gradient clipping and accumulation.
    """

    def __init__(self, settings: LocalSettings) -> None:
        self.settings = settings

    @abstractmethod
    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk: replace its rows by the rows after the local steps.

        Args:
            client: The algorithm; the engine may overwrite its models.
            optimizer: The local optimizer over the client's own parameters, with this round's
                options (such as learning rates).
            chunk: The clients.

        Returns:
            The mean of each output of ``training_step`` over each client's steps, by name,
            [clients]; at least ``loss``.
        """


def name_clients(clients: Iterable[int | Tensor]) -> str:
    """Return clients by their ids in words, for the note of an error.

    Example:
        >>> name_clients([3]), name_clients([3, 1, 4, 1, 5, 9, 2])
        ('client 3', 'clients 3, 1, 4, 1, 5, ... (7 in all)')
    """
    ids = [int(client) for client in clients]
    if len(ids) == 1:
        return f"client {ids[0]}"
    more = f", ... ({len(ids)} in all)" if len(ids) > _MOST_IDS else ""
    return f"clients {', '.join(map(str, ids[:_MOST_IDS]))}{more}"


def are_close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether numbers agree where the expected ones are finite.

    A client that overflows must not decide how all clients are trained.

    Args:
        actual: The numbers to compare.
        expected: The right numbers.
        tolerance: The largest difference, as a part of the largest expected number.

    Example:
        >>> are_close(torch.tensor([1.0, 2.0]), torch.tensor([1.001, torch.inf]), tolerance=1e-2)
        True
    """
    is_finite = expected.isfinite()
    actual, expected = actual[is_finite].double(), expected[is_finite].double()
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(actual, expected, rtol=0, atol=tolerance * scale + 1e-6)


def expand_to(numbers: Tensor, leaf: Tensor) -> Tensor:
    """Reshape numbers [clients] to broadcast with a leaf; return one number unchanged."""
    return numbers.view(-1, *([1] * (leaf.dim() - 1))) if numbers.dim() else numbers


def allocate_rows(like: Tensor) -> Tensor:
    """Return new rows [clients, numel] without values; ``like`` may be one expanded row."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def allocate_models(models: Mapping[str, ModelRows], names: Iterable[str]) -> dict[str, ModelRows]:
    """Return new rows without values for some of the clients' models, by name."""
    return {
        name: ModelRows(
            allocate_rows(models[name].parameters), allocate_rows(models[name].statistics)
        )
        for name in names
    }


def stack_outputs(outputs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the outputs of several clients as tensors [clients], by name.

    A client without outputs took no step: it gets 0.
    """
    zeros = {name: torch.zeros_like(out) for own in outputs for name, out in own.items()}
    return {
        name: torch.stack([own.get(name, zero) for own in outputs]) for name, zero in zeros.items()
    }


def rebuild_optimizer(
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, list[Tensor]],
) -> torch.optim.Optimizer:
    """Build a local optimizer with an empty state and this round's options.

    Args:
        objective: The objective; it builds the optimizer.
        optimizer: The optimizer with the current options, set by Lightning's schedules and
            callbacks.
        parameters: The tensors that the new optimizer moves, by trained model.
    """
    rebuilt = objective.build_optimizer(parameters)
    for group, current in zip(rebuilt.param_groups, optimizer.param_groups):
        group.update({name: value for name, value in current.items() if name != "params"})
    return rebuilt


def set_rates(optimizer: torch.optim.Optimizer, rates: Tensor | None, step: int) -> None:
    """Set the learning rates of a client's step.

    Args:
        optimizer: The optimizer of one client, or of clients with equal rates.
        rates: The rates of the client, [steps, groups]; ``None`` changes nothing.
        step: The index of the step.
    """
    if rates is not None:
        for group, rate in zip(optimizer.param_groups, rates[step].tolist()):
            group["lr"] = rate


@contextmanager
def restore_rates(optimizer: torch.optim.Optimizer, rates: Tensor | None) -> Iterator[None]:
    """Restore the rates of the trainer's optimizer at the end of the context.

    Args:
        optimizer: The optimizer; it takes no step itself, but steps may read its rates.
        rates: The rates of the clients; ``None`` if those of the optimizer hold.
    """
    before = [] if rates is None else [group["lr"] for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before):
            group["lr"] = rate


def as_outputs(outputs: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of ``training_step`` as a dict of tensors without dimensions.

    Raises:
        TypeError: If ``outputs`` is neither a loss nor a dict of tensors with ``loss``.
        ValueError: If a name is also in :data:`TAKEN_NUMBERS`, or a tensor is no scalar.
    """
    if isinstance(outputs, Tensor):
        outputs = {"loss": outputs}
    if not isinstance(outputs, dict) or "loss" not in outputs:
        raise TypeError(
            "Expected `training_step` to return a loss, or a dict with the tensor `loss`, but got"
            f" {type(outputs).__name__}."
        )
    if taken := [name for name in TAKEN_NUMBERS if name in outputs]:
        raise ValueError(
            "Expected `training_step` to return names that a round does not report itself but got"
            f" `{'`, `'.join(taken)}`."
        )
    for name, value in outputs.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"Expected `training_step` to return tensors but got {type(value).__name__} for"
                f" `{name}`."
            )
        if value.numel() != 1:
            raise ValueError(
                f"Expected `training_step` to return scalars but got shape {list(value.shape)} for"
                f" `{name}`."
            )
    dtype = outputs["loss"].dtype  # for flags and counts, too: they need means
    return {
        name: value.reshape(()) if value.is_floating_point() else value.reshape(()).to(dtype)
        for name, value in outputs.items()
    }
