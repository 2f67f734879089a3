"""How a chunk of clients is run: the contract, and what every engine shares."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.data.batches import Batches
from pl_fed.functional.dropout import Draws
from pl_fed.functional.random import hashed, key

ROUND_NUMBERS = (
    *("cohort", "byzantine", "forged", "clipped", "dropped", "rejected"),
    *("update_norm", "benign_distance"),
)
"""What a round itself reports under ``train/``, beside what ``training_step`` gives."""


@dataclass
class Chunk:
    """Clients that are run together, and the rows they are run on.

    Attributes:
        clients: Their ids, int64 [clients], on the CPU.
        batches: Their minibatches.
        steps: For each trained model, how many steps each client takes on it.
        rows: ``broadcast`` [numel]; for each trained model a row per client [clients, numel], at
            first that before the local steps, perhaps one row that is repeated; in the end that
            after them, in a new tensor; and what engines leave alone: the client's states, and
            models that are not trained.
        statistics: For each trained model the running statistics [clients, numel], likewise.
        on_done: To be called, as clients are done, with how many of the chunk's are.
    """

    clients: Tensor
    batches: Batches
    steps: dict[str, list[int]]
    rows: dict[str, Tensor]
    statistics: dict[str, Tensor] = field(default_factory=dict)
    on_done: Callable[[int], None] = lambda _: None

    def shortened(self, most_steps: int) -> "Chunk":
        """Return the same with fewer steps: the rows are the same, too."""
        batches = self.batches.shortened(most_steps)
        steps = {model: [min(n, most_steps) for n in each] for model, each in self.steps.items()}
        return Chunk(self.clients, batches, steps, dict(self.rows), dict(self.statistics))

    def centres(self, trains: Iterable[str]) -> dict[str, Tensor]:
        """Rows that ``training_step`` may read: all but the live models.

        Of the running statistics it may read those of the broadcast, where there are any.
        """
        return {
            name: row
            for name, row in self.rows.items()
            if name not in trains
            and (not name.endswith("_statistics") or (name == "broadcast_statistics" and len(row)))
        }

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
        return hashed(torch.tensor(keys)[:, None], torch.arange(batches.max_steps))


@dataclass(frozen=True)
class Clipping:
    """Gradient clipping of the local steps, for each model of each client by itself.

    Args:
        value: The largest norm, or the largest absolute value; ``None`` for no clipping.
        algorithm: ``"norm"`` or ``"value"``.
    """

    value: float | None = None
    algorithm: str = "norm"


class Engine(ABC):
    """Runs the local steps of a chunk of clients.

    Args:
        autocast: Gives the context in which ``training_step`` runs (mixed precision).
        clipping: Gradient clipping of the local steps.
    """

    def __init__(
        self,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        clipping: Clipping | None = None,
    ) -> None:
        self.autocast = autocast
        self.clipping = clipping or Clipping()

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
            For ``loss``, and whatever else ``training_step`` gives, the mean over each client's
            steps, [clients].
        """


def casts(autocast: Callable[[], AbstractContextManager[Any]], device: torch.device) -> bool:
    """Return whether a context is one of mixed precision on a device."""
    with autocast():
        return torch.is_autocast_enabled(device.type)


def new_rows(like: Tensor) -> Tensor:
    """Return rows to be written, [clients, numel], where ``like`` may be one that is repeated."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def built_anew(
    client: Client, optimizer: torch.optim.Optimizer, leaves: Mapping[str, list[Tensor]]
) -> torch.optim.Optimizer:
    """Build the local optimizer anew, as each round does, with the options of this round.

    Args:
        client: The algorithm.
        optimizer: The optimizer that Lightning's schedules and callbacks know.
        leaves: What to build it over, for each trained model.
    """
    anew = client.build_optimizer(leaves)
    for group, known in zip(anew.param_groups, optimizer.param_groups):
        group.update({name: value for name, value in known.items() if name != "params"})
    return anew


def as_outputs(outputs: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what ``training_step`` gave as a dict.

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
    kind = outputs["loss"].dtype  # of flags and counts, whose means are wanted
    return {n: v if v.is_floating_point() else v.to(kind) for n, v in outputs.items()}
