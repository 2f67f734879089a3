"""The contract between an algorithm and a round: its models, its states, and what travels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from pl_fed.data.batches import LocalWork
from pl_fed.trees import Tree, leaves
from pl_fed.types import Batch

RESERVED_NAMES = ("broadcast", "samples", "validation_samples", "client")
"""Names that ``Client.read`` gives to what every round has, so that no state may have them."""

RowDefault = float | Tensor | Callable[[], Tensor]
"""The first row of a state: one number, a tensor [length], or a function that returns one."""


@dataclass(frozen=True)
class Model:
    """One of an algorithm's models, and all that concerns it.

    Args:
        trained: Whether ``training_step`` trains it.
        kept: Whether each client keeps its parameters from round to round. One that is not kept
            begins each round at the broadcast. It has no meaning for the model ``"global"``, which
            always begins at the broadcast. Running statistics of trained models are always kept.
        evaluated: Whether it has metrics. The last evaluated model gives predictions.
        validated: Whether its loss on the client's validation data is computed at the end of a
            round: see :attr:`ClientRound.validation_losses`.
        work: How long it is trained in a round; ``None`` for the client's local work.
        lr: Its learning rate; ``None`` for that of the optimizer.
        options: Further options of its parameter group in the optimizer, such as ``momentum``.
    """

    trained: bool = True
    kept: bool = True
    evaluated: bool = True
    validated: bool = False
    work: LocalWork | None = None
    lr: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group_options(self) -> dict[str, Any]:
        """The options of its parameter group in the optimizer."""
        return dict(self.options) if self.lr is None else {"lr": self.lr, **self.options}


@dataclass(frozen=True)
class Objective:
    """A function that local steps minimise, with the models they train and their optimizer.

    Args:
        step: Returns the loss of one minibatch of ONE client, as ``Client.training_step`` does.
        models: The models that it trains, by name, each with its ``work``.
        optimizer: Builds the local optimizer from parameter groups.
    """

    step: Callable[[Batch, int], Tensor | dict[str, Tensor]]
    models: Mapping[str, Model]
    optimizer: OptimizerCallable

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Names of the models that it trains."""
        return tuple(self.models)

    def work(self, model: str) -> LocalWork:
        """Return how long a model is trained."""
        return self.models[model].work or LocalWork()

    def build_optimizer(self, parameters: Mapping[str, list[Tensor]]) -> torch.optim.Optimizer:
        """Build the local optimizer, with one parameter group for each trained model.

        Args:
            parameters: The tensors of each model.
        """
        groups = [
            {"params": parameters[name], "name": name, **model.group_options}
            for name, model in self.models.items()
        ]
        return self.optimizer(groups)


@dataclass
class ModelRows:
    """A model of many clients, or of all of them: parameters and running statistics.

    Attributes:
        parameters: Trainable parameters, flat: [clients, numel], or [numel] of one model.
        statistics: Running statistics (BatchNorm's, as a rule), flat: [clients, length] or
            [length]; of length 0 where the net has none.
    """

    parameters: Tensor
    statistics: Tensor

    def __getitem__(self, index: int | Tensor) -> "ModelRows":
        """Return the rows of one client or of several, by position."""
        return ModelRows(self.parameters[index], self.statistics[index])

    def __setitem__(self, index: int | Tensor, rows: "ModelRows") -> None:
        """Write the rows of one client or of several, by position."""
        self.parameters[index] = rows.parameters
        self.statistics[index] = rows.statistics

    def expand(self, clients: int) -> "ModelRows":
        """Return one model as the rows of many clients, without copying it."""
        return ModelRows(self.parameters.expand(clients, -1), self.statistics.expand(clients, -1))

    def clone(self) -> "ModelRows":
        """Return a copy."""
        return ModelRows(self.parameters.clone(), self.statistics.clone())

    @classmethod
    def choose(cls, models: "Sequence[ModelRows]", choice: Tensor) -> "ModelRows":
        """Return for each client its chosen one of several models.

        Args:
            models: The candidates, each of all clients.
            choice: Position of the chosen candidate, int64 [clients].
        """
        clients = torch.arange(len(choice), device=choice.device)
        parameters = torch.stack([model.parameters for model in models])
        statistics = torch.stack([model.statistics for model in models])
        return cls(parameters[choice, clients], statistics[choice, clients])


@dataclass
class ClientRound:
    """All that some clients have in a round: ``begin`` prepares it, ``end_round`` closes it.

    Attributes:
        ids: The clients, int64 [clients].
        samples: Number of training samples, [clients, 1], in the parameters' dtype.
        validation_samples: Number of validation samples, [clients, 1], in that dtype too.
        broadcast: The global model w^t, which the round began with: one model.
        models: The trained and the evaluated models, by name, each of all clients. Before the
            local steps ``begin`` may replace them; in ``end_round`` they are as the steps left
            them. ``"global"`` is among them in ``end_round`` if it is trained.
        states: What each client keeps between rounds, by name, [clients, length]. ``begin`` and
            ``end_round`` may replace them; what they are after ``end_round`` is kept.
        server_states: What the server keeps beside the global model, by name, [length]: read only.
        steps: For each trained model, how many steps each client takes in this round, int64
            [clients, 1]. Empty before an evaluation.
        lr: For each trained model, its learning rate in this round, [1]. Empty before an
            evaluation.
        extra: Rows that ``begin`` adds for ``training_step`` to read, by name: [clients, length],
            or [length] if it is the same for all clients.
        validation_losses: In ``end_round``, for each validated model, its mean loss on the
            clients' validation data, [clients]; NaN without such data.
        validation_scores: In ``end_round``, for each validated model, its score on the clients'
            validation data by ``federation.monitor``, [clients]: lower is better. Empty unless that
            is set to another metric than the loss.
        step_means: In ``end_round``, by name, the mean over the local steps of all that
            ``training_step`` returned, ``"loss"`` at least, [clients].
        proposals: Set by ``end_round``: what each client proposes that a server state becomes, by
            name, [clients, length]. The server takes the mean.
        global_statistics: Set by ``end_round``: running statistics that each client proposes for
            the global model, [clients, length]. By default those of the trained global model; or,
            if it is evaluated but not trained, those of the last trained model.
        validation_inputs: All validation inputs of each client, [clients, numbers], for each tensor
            of an input; only if the algorithm ``reads_validation``.
        validation_targets: The targets of the validation inputs, [clients, numbers] each.
    """

    ids: Tensor
    samples: Tensor
    validation_samples: Tensor
    broadcast: ModelRows
    models: dict[str, ModelRows] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    server_states: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, Tensor] = field(default_factory=dict)
    lr: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, Tensor] = field(default_factory=dict)
    validation_losses: dict[str, Tensor] = field(default_factory=dict)
    validation_scores: dict[str, Tensor] = field(default_factory=dict)
    step_means: dict[str, Tensor] = field(default_factory=dict)
    proposals: dict[str, Tensor] = field(default_factory=dict)
    global_statistics: Tensor | None = None
    validation_inputs: Tree = None
    validation_targets: Tree = None

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.ids)

    def copy(self) -> "ClientRound":
        """Return a round with the same tensors, in dictionaries of its own."""
        return replace(
            self,
            models=dict(self.models),
            states=dict(self.states),
            extra=dict(self.extra),
            proposals=dict(self.proposals),
        )

    def select(self, positions: Tensor) -> "ClientRound":
        """Return the round of some of the clients, as ``begin`` left it.

        Args:
            positions: Their positions, int64 [n].
        """

        def rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            """Select rows of clients; what has one dimension is the same for all of them."""
            return {n: t if t.dim() == 1 else t[positions] for n, t in tensors.items()}

        return replace(
            self,
            ids=self.ids[positions],
            samples=self.samples[positions],
            validation_samples=self.validation_samples[positions],
            models={name: model[positions] for name, model in self.models.items()},
            states=rows(self.states),
            steps=rows(self.steps),
            extra=rows(self.extra),
        )

    def readable(self) -> dict[str, Tensor]:
        """Return the rows that ``training_step`` may read, by the names of ``Client.read``.

        Returns:
            [clients, length] each, or [length] where it is the same for all clients.
        """
        rows = {
            "broadcast": self.broadcast.parameters,
            "samples": self.samples,
            "validation_samples": self.validation_samples,
            "client": self.ids[:, None],
            **self.states,
            **self.server_states,
            **self.extra,
            **{f"{model}.steps": steps for model, steps in self.steps.items()},
            **{f"{model}.lr": lr for model, lr in self.lr.items()},
        }
        if len(self.broadcast.statistics):
            rows["broadcast.statistics"] = self.broadcast.statistics
        validation = {"inputs": self.validation_inputs, "targets": self.validation_targets}
        for name, tree in validation.items():
            rows |= zip(validation_rows(name, tree), leaves(tree))
        return rows

    def of_one(self, position: int) -> dict[str, Tensor]:
        """Return the rows that ``training_step`` may read for ONE client, [length] each.

        Args:
            position: The position of the client.

        Example:
            >>> ids, size = torch.tensor([4, 7]), torch.ones(2, 1)
            >>> broadcast = ModelRows(torch.zeros(3), torch.zeros(0))
            >>> ClientRound(ids, size, size, broadcast).of_one(1)["client"]
            tensor([7])
        """
        rows = self.readable().items()
        return {name: row if row.dim() == 1 else row[position] for name, row in rows}

    def best_by_validation(
        self, models: Sequence[str], otherwise: int, min_samples: int = 1
    ) -> Tensor:
        """Return which of some models is best on the validation data, for each client.

        That is the lowest loss, or ``federation.monitor`` where it is set.

        Args:
            models: Names of validated models.
            otherwise: The position taken by clients with fewer than ``min_samples``.
            min_samples: How many validation samples are enough to choose by.

        Returns:
            Positions in ``models``, int64 [clients].
        """
        scores = self.validation_scores or self.validation_losses
        losses = torch.stack([scores[model] for model in models], 1)
        best = losses.nan_to_num(torch.inf).argmin(1)
        return torch.where(self.validation_samples[:, 0] >= min_samples, best, otherwise)


def validation_rows(name: str, tree: Tree) -> list[str]:
    """Return the names of the rows that hold validation inputs or targets.

    Example:
        >>> validation_rows("inputs", torch.zeros(1)), validation_rows("inputs", [torch.zeros(1)])
        (['validation.inputs'], ['validation.inputs.0'])
    """
    if isinstance(tree, Tensor):
        return [f"validation.{name}"]
    return [f"validation.{name}.{place}" for place in range(len(leaves(tree)))]
