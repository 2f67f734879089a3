"""A chunk of clients, the contract of the engines that run it, and the tools that they share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Objective
from pl_fed.data.batches import Batches
from pl_fed.nets.dropout import Draws
from pl_fed.random import key, random_bits

ROUND_NUMBERS = (
    *("cohort", "byzantine", "forged", "clipped", "dropped", "rejected"),
    *("update_norm", "benign_distance"),
)
"""Numbers that a round itself reports under ``train/``, beside those of ``training_step``."""


@dataclass
class Chunk:
    """Clients that are trained together, with their objective, minibatches and rows.

    Attributes:
        clients: Their ids, int64 [clients], on the CPU.
        objective: What their local steps minimise.
        batches: Their minibatches.
        steps: For each trained model, how many steps each client takes on it.
        round: Their rows. Engines read its trained models, perhaps one row that is repeated, and
            replace them by new tensors; and they read :meth:`ClientRound.readable`.
        on_done: Called, as clients are done, with the number of clients done so far.
        place: Where the local steps are, for the note of an error: see :meth:`add_note`.
    """

    clients: Tensor
    objective: Objective
    batches: Batches
    steps: dict[str, list[int]]
    round: ClientRound
    on_done: Callable[[int], None] = lambda _: None
    place: str = "round {round}, {clients}"

    def add_note(self, error: Exception, positions: Iterable[int], step: int | None = None) -> None:
        """Note on an error in a local step: the round, the clients and the step.

        Args:
            error: The error.
            positions: Positions of the clients that it may come from.
            step: The local step; ``None`` if the error may come from any of them.
        """
        clients = name_clients(self.clients[position] for position in positions)
        place = self.place.format(round=self.batches.round, clients=clients)
        error.add_note(f"In {place}" + ("." if step is None else f", local step {step}."))

    def shortened(self, most_steps: int) -> "Chunk":
        """Return a chunk of the same clients and rows with at most so many steps."""
        batches = self.batches.truncate(most_steps)
        steps = {
            model: [min(count, most_steps) for count in counts]
            for model, counts in self.steps.items()
        }
        return Chunk(
            self.clients, self.objective, batches, steps, self.round.copy(), place=self.place
        )

    def draw_keys(self, draws: Draws) -> Tensor:
        """Return keys of the draws that the clients' layers make in each step.

        Args:
            draws: Those of the layers.

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
    """Gradient clipping of the local steps, for each model of each client by itself.

    Args:
        value: The largest norm, or the largest absolute value; ``None`` for no clipping.
        algorithm: ``"norm"`` or ``"value"``.
    """

    value: float | None = None
    algorithm: str = "norm"


@dataclass(frozen=True)
class LocalSettings:
    """How every local step is computed.

    Attributes:
        autocast: Gives the context in which ``training_step`` runs (mixed precision).
        clipping: Gradient clipping.
    """

    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    clipping: Clipping = Clipping()

    def casts(self, device: torch.device) -> bool:
        """Return whether the steps run in mixed precision on a device."""
        with self.autocast():
            return torch.is_autocast_enabled(device.type)


class CannotStackError(RuntimeError):
    """A net, an optimizer or an objective that cannot be run for many clients at once."""


class CannotCompileError(RuntimeError):
    """A step that cannot be compiled, or not so that it gives the same numbers."""


class Engine(ABC):
    """Runs the local steps of a chunk of clients.

    Args:
        settings: How every local step is computed.
    """

    def __init__(self, settings: LocalSettings) -> None:
        self.settings = settings

    @abstractmethod
    def run(
        self, client: Client, optimizer: torch.optim.Optimizer, chunk: Chunk
    ) -> dict[str, Tensor]:
        """Train the chunk's rows: exchange them for those after the local steps.

        Args:
            client: The algorithm; its models are used as work space.
            optimizer: The local optimizer over the client's own parameters, whose options (learning
                rates, above all) hold for this round.
            chunk: The clients.

        Returns:
            For ``loss``, and all other outputs of ``training_step``, the mean over each client's
            steps, [clients].
        """


def name_clients(clients: Iterable[int | Tensor], most: int = 5) -> str:
    """Return clients in words, for the note of an error.

    Args:
        clients: Their ids.
        most: The number of ids that are named.

    Example:
        >>> name_clients([3]), name_clients([3, 1, 4, 1, 5, 9, 2])
        ('client 3', 'clients 3, 1, 4, 1, 5, ... (7 in all)')
    """
    ids = [int(client) for client in clients]
    if len(ids) == 1:
        return f"client {ids[0]}"
    more = f", ... ({len(ids)} in all)" if len(ids) > most else ""
    return f"clients {', '.join(map(str, ids[:most]))}{more}"


@contextmanager
def restored(buffers: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Restore buffers after a trial, and name those that it changed in the list that it yields."""
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        changed += [name for name, buffer in buffers.items() if not before[name].equal(buffer)]
        for name in changed:
            buffers[name].copy_(before[name])


def new_rows(like: Tensor) -> Tensor:
    """Return rows to be written, [clients, numel], where ``like`` may be one that is repeated."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def select_rows(rows: Mapping[str, Tensor], position: int) -> dict[str, Tensor]:
    """Return the rows that ONE client of a chunk may read: see :meth:`ClientRound.readable`."""
    return {name: row if row.dim() == 1 else row[position] for name, row in rows.items()}


def stack_outputs(outputs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the outputs of several clients as tensors [clients], by name."""
    return {name: torch.stack([single[name] for single in outputs]) for name in outputs[0]}


def rebuild_optimizer(
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, list[Tensor]],
) -> torch.optim.Optimizer:
    """Build the local optimizer without memory, as each round does, with this round's options.

    Args:
        objective: The objective, which builds it.
        optimizer: The optimizer that Lightning's schedules and callbacks know.
        parameters: The tensors of each trained model that the new optimizer moves.
    """
    rebuilt = objective.build_optimizer(parameters)
    for group, current in zip(rebuilt.param_groups, optimizer.param_groups):
        group.update({name: value for name, value in current.items() if name != "params"})
    return rebuilt


def as_outputs(outputs: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of ``training_step`` as a dict.

    Raises:
        TypeError: If it is neither a loss nor a dict of tensors with one.
        ValueError: If a name is one of the round's own numbers, under ``train/`` too, or a tensor
            is no scalar.
    """
    if isinstance(outputs, Tensor):
        outputs = {"loss": outputs}
    if not isinstance(outputs, dict) or "loss" not in outputs:
        raise TypeError(
            "Expected `training_step` to return a loss, or a dict with the tensor `loss`, but got"
            f" {type(outputs).__name__}."
        )
    if taken := [name for name in ROUND_NUMBERS if name in outputs]:
        raise ValueError(
            "Expected `training_step` to return names that a round does not have itself but got"
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
    dtype = outputs["loss"].dtype  # of flags and counts too, so that they have means
    return {n: v if v.is_floating_point() else v.to(dtype) for n, v in outputs.items()}
