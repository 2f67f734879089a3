"""The contract between an algorithm and a round: models, states, uploads and proposals."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from pl_fed.data.batches import BatchRule, LocalWork
from pl_fed.devices import to_device
from pl_fed.trees import Tree, leaves, tree_map
from pl_fed.types import Batch

RESERVED_NAMES = ("broadcast", "samples", "validation_samples", "client", "class_counts")
"""Names of rows that every round has; no state and no model may have these names."""

RowDefault = float | Tensor | Callable[[], Tensor]
"""The first row of a state: one number, a tensor [length], or a function that returns one."""


@dataclass(frozen=True)
class Model:
    """Model: the settings of one of an algorithm's models.

    Args:
        trained: Whether ``training_step`` trains the model.
        kept: Whether each client keeps the parameters from round to round. Otherwise the model
            begins each round at the broadcast, as the model ``"global"`` always does. Clients
            always keep the running statistics of trained models.
        evaluated: Whether the model has metrics. The last evaluated model gives predictions.
        validated: Whether its loss on the client's validation data is computed at the end of a
            round: see ``ClientRound.validation_losses``.
        work: The local work on the model in a round, :class:`~pl_fed.data.batches.LocalWork`;
            ``None`` for the client's local work.
        lr: The learning rate of the model; ``None`` for that of the optimizer.
        options: Further options of its parameter group in the optimizer, such as ``momentum``.

    Raises:
        TypeError: If ``work`` is no local work, or ``lr`` is no number.

    Example:
        >>> Model(lr=0.1, options={"momentum": 0.9}).group_options
        {'lr': 0.1, 'momentum': 0.9}
    """

    trained: bool = True
    kept: bool = True
    evaluated: bool = True
    validated: bool = False
    work: LocalWork | None = None
    lr: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.work, LocalWork | None):
            raise TypeError(
                "Expected argument `work` of a Model to be a pl_fed.data.batches.LocalWork, such as"
                f" LocalWork(steps=2) or LocalWork(epochs=2), or None, but got {self.work!r}."
            )
        if isinstance(self.lr, bool) or not isinstance(self.lr, int | float | Tensor | None):
            raise TypeError(
                f"Expected argument `lr` of a Model to be a number, or None, but got {self.lr!r}."
            )

    @property
    def group_options(self) -> dict[str, Any]:
        """The options of the model's parameter group in the optimizer."""
        return dict(self.options) if self.lr is None else {"lr": self.lr, **self.options}


@dataclass(frozen=True)
class Objective:
    """Objective: a function that local steps minimise, the models that they train, the optimizer.

    Args:
        step: Returns the loss of one minibatch of ONE client, as ``Client.training_step`` does.
        models: The trained models by name, each with its ``work``.
        optimizer: Builds the local optimizer from parameter groups.
        accumulates: Whether the trainer's ``accumulate_grad_batches`` applies. Otherwise each
            minibatch is an optimizer step.

    Example:
        >>> def step(batch, batch_idx):
        ...     return batch.inputs.mean()
        >>> objective = Objective(step, {"w": Model()}, torch.optim.SGD)
        >>> optimizer = objective.build_optimizer({"w": [torch.zeros(2)]})
        >>> objective.trained, optimizer.param_groups[0]["name"]
        (('w',), 'w')
    """

    step: Callable[[Batch, int], Tensor | dict[str, Tensor]]
    models: Mapping[str, Model]
    optimizer: OptimizerCallable
    accumulates: bool = True

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Names of the trained models."""
        return tuple(self.models)

    def work(self, model: str) -> LocalWork:
        """Return the local work on a model."""
        return self.models[model].work or LocalWork()

    def count_steps(self, rule: BatchRule, sizes: Sequence[int]) -> dict[str, list[int]]:
        """Return the number of steps of each client in a round, by trained model.

        Args:
            rule: The split of samples into minibatches.
            sizes: The number of training samples of each client.
        """
        steps = {}
        for model in self.trained:
            by_size = {size: rule.count(self.work(model), size) for size in set(sizes)}
            steps[model] = [by_size[size] for size in sizes]
        return steps

    def build_optimizer(self, parameters: Mapping[str, list[Tensor]]) -> torch.optim.Optimizer:
        """Build the local optimizer, with one parameter group for each trained model.

        The optimizer of a LightningModule may have several groups for each model, with names such
        as ``"global.0"`` and ``"global.1"``.

        Args:
            parameters: The tensors of each trained model, by its name.
        """
        groups = [
            {"params": parameters[name], "name": name, **model.group_options}
            for name, model in self.models.items()
        ]
        return self.optimizer(groups)


def model_of_group(group: Mapping[str, Any]) -> str:
    """Return the trained model of a parameter group, from the name of the group.

    Example:
        >>> model_of_group({"name": "global"}), model_of_group({"name": "global.1"})
        ('global', 'global')
    """
    return str(group.get("name")).partition(".")[0]


@dataclass
class ModelRows:
    """Model rows: parameters and running statistics of one model, or of a model of many clients.

    Attributes:
        parameters: Trainable parameters, flat: [clients, numel], or [numel] for one model.
        statistics: Running statistics (BatchNorm's, as a rule), flat: [clients, length] or
            [length]; of length 0 if the net has none.

    Example:
        >>> ModelRows(torch.tensor([1.0, 2.0]), torch.empty(0)).expand(3)[1].parameters
        tensor([1., 2.])
    """

    parameters: Tensor
    statistics: Tensor

    def __getitem__(self, index: int | Tensor) -> "ModelRows":
        """Return the rows of one client or of several, by position."""
        index = self._move(index)
        return ModelRows(self.parameters[index], self.statistics[index])

    def __setitem__(self, index: int | Tensor, rows: "ModelRows") -> None:
        """Write the rows of one client or of several, by position."""
        index = self._move(index)
        self.parameters[index] = rows.parameters
        self.statistics[index] = rows.statistics

    def _move(self, index: int | Tensor) -> int | Tensor:
        """Return an index on the device of the rows: one on the CPU would wait for the GPU."""
        return to_device(index, self.parameters) if isinstance(index, Tensor) else index

    def expand(self, clients: int) -> "ModelRows":
        """Return one model as the rows of many clients, without copying it."""
        return ModelRows(self.parameters.expand(clients, -1), self.statistics.expand(clients, -1))

    def clone(self) -> "ModelRows":
        """Return a copy."""
        return ModelRows(self.parameters.clone(), self.statistics.clone())

    def copy_(self, other: "ModelRows") -> None:
        """Write the numbers of another model in place."""
        self.parameters.copy_(other.parameters)
        self.statistics.copy_(other.statistics)

    @classmethod
    def choose(cls, models: "Sequence[ModelRows]", choice: Tensor) -> "ModelRows":
        """Return the chosen one of several models for each client.

        Args:
            models: The candidates, each with rows of all clients.
            choice: Position of each client's chosen candidate, int64 [clients].
        """
        clients = torch.arange(len(choice), device=choice.device)
        parameters = torch.stack([model.parameters for model in models])
        statistics = torch.stack([model.statistics for model in models])
        return cls(parameters[choice, clients], statistics[choice, clients])


class MissingModelError(KeyError):
    """Missing model: ``client.models`` has no model of a name."""

    def __str__(self) -> str:
        """Return the message without the quotes of a key."""
        return str(self.args[0])


class ClientModels(dict[str, ModelRows]):
    """Client models: the models of a round's clients by name.

    Raises:
        MissingModelError: If a hook reads a model that the round does not have.

    Example:
        >>> "global" in ClientModels(), ClientModels().get("global")
        (False, None)
    """

    def __missing__(self, name: str) -> ModelRows:
        remedy = "declare further models by the argument `models` of `Client`"
        if name == "global":
            remedy = "read the global model at the start of the round as `client.broadcast`"
        raise MissingModelError(
            f"Expected a name in `client.models` ({', '.join(self) or 'empty at this stage'}) but"
            f" got {name!r}: {remedy}."
        )


SampleFunction = Callable[[Batch], Tree]
"""A pure function of a minibatch of ONE client, and of its models and rows; it honours the mask."""


@dataclass(frozen=True)
class Visit:
    """Visit: the results of a function on a minibatch of each of several clients.

    Attributes:
        positions: Positions of the clients in the round, int64 [clients].
        first: The place of the first sample of the minibatch among each client's samples.
        mask: The samples that are no padding, bool [clients, batch].
        samples: Ids of the samples, int64 [clients, batch].
        results: The results: a tensor [clients, ...], or a tuple or dict of tensors.
    """

    positions: Tensor
    first: int
    mask: Tensor
    samples: Tensor
    results: Tree


@dataclass
class ClientRound:
    """Client round: the rows of several clients in a round.

    ``begin`` prepares it before the local steps, and ``end_round`` closes it after them.

    Attributes:
        ids: Ids of the clients, int64 [clients].
        samples: Number of training samples, [clients, 1], in the parameters' dtype.
        validation_samples: Number of validation samples, [clients, 1], in the parameters' dtype.
        broadcast: The global model w^t at the start of the round: one model.
        models: The trained and the evaluated models, by name, each of all clients. ``begin`` may
            replace them; in ``end_round`` they are the models after the local steps. They contain
            ``"global"`` in ``end_round`` if it is trained or validated.
        states: The states that each client keeps between rounds, by name, [clients, length].
            ``begin`` and ``end_round`` may replace them. Clients keep the rows after ``end_round``.
        server_states: The states of the server, by name, [length]: read only.
        optimizer_states: The states of the local optimizers that clients keep, by trained model,
            [clients, length]; empty if every round begins with new optimizers. Engines replace
            them.
        steps: The number of local steps of each client on each trained model, int64 [clients, 1].
            Each local step takes one minibatch, also if gradients accumulate.
            Empty before an evaluation. ``begin`` may replace them, for clients of unequal speed; a
            client with 0 takes no step.
        preparation_steps: The number of steps of each client on each model of
            ``Client.preparation``, int64 [clients, 1]; empty before an evaluation. ``begin`` may
            replace them.
        lr: The learning rate of each trained model for a local step of this round, [1]: read only.
            Empty before an evaluation. If a model has several parameter groups, it is that of the
            first one: see ``Client.refuse_mixed_options``. If gradients accumulate over k
            minibatches, it is the optimizer's rate divided by k: ``steps * lr`` stays the length of
            the local training. With a schedule over local steps it is the mean rate of each
            client's steps, [clients, 1], for the same reason.
        extra: Rows that ``begin`` adds for ``training_step`` to read, by name: [clients, length],
            or [length] for a row that all clients share.
        validation_losses: In ``end_round``, the mean loss of each validated model on the clients'
            validation data, [clients]; NaN without such data.
        validation_scores: In ``end_round``, the score of each validated model on the clients'
            validation data by ``federation.monitor``, [clients]: lower is better. Empty unless
            ``federation.monitor`` is a metric other than the loss.
        step_means: In ``end_round``, the means over the local steps of the scalars that
            ``training_step`` returned, by name, [clients]; at least ``"loss"``. 0 for a client
            that took no step.
        proposals: Set by ``end_round``: each client's proposal for the next value of a server
            state, by name, [clients, length]. The server takes the mean.
        global_statistics: Set by ``end_round``: running statistics that each client proposes for
            the global model, [clients, length]. By default those of the trained global model. If
            the global model is evaluated but not trained, those of the last trained model.
        center_losses: The mean loss of each center over each client's training data, [clients,
            centers]; NaN without any. ``None`` for algorithms without ``Client.add_centers``.
        class_counts: Number of training samples of each class, [clients, classes], in the
            parameters' dtype: before any attack on data, and with those that a round leaves out.
            ``None`` unless the algorithm ``reads_class_counts``.
        group: Set by ``begin``: the center of each client in this round, int64 [clients].
        visit_samples: Lets a function visit all of the clients' samples of a part of the data: see
            ``Client.own_sums``. ``None`` for a round without data.
        validation_inputs: All validation inputs of each client, [clients, numbers], for each tensor
            of an input; only if the algorithm ``reads_validation``.
        validation_targets: The targets of the validation inputs, [clients, numbers] each.

    Example:
        >>> ones, broadcast = torch.ones(2, 1), ModelRows(torch.zeros(3), torch.empty(0))
        >>> client = ClientRound(torch.tensor([4, 7]), 10 * ones, 0 * ones, broadcast)
        >>> client.states["step_size"] = 0.1 * ones
        >>> len(client), client.client_rows(1)["step_size"]
        (2, tensor([0.1000]))
    """

    ids: Tensor
    samples: Tensor
    validation_samples: Tensor
    broadcast: ModelRows
    models: dict[str, ModelRows] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    server_states: dict[str, Tensor] = field(default_factory=dict)
    optimizer_states: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, Tensor] = field(default_factory=dict)
    preparation_steps: dict[str, Tensor] = field(default_factory=dict)
    lr: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, Tensor] = field(default_factory=dict)
    validation_losses: dict[str, Tensor] = field(default_factory=dict)
    validation_scores: dict[str, Tensor] = field(default_factory=dict)
    step_means: dict[str, Tensor] = field(default_factory=dict)
    proposals: dict[str, Tensor] = field(default_factory=dict)
    global_statistics: Tensor | None = None
    center_losses: Tensor | None = None
    class_counts: Tensor | None = None
    group: Tensor | None = None
    visit_samples: "Callable[[ClientRound, SampleFunction, str], Iterator[Visit]] | None" = None
    validation_inputs: Tree = None
    validation_targets: Tree = None

    def __post_init__(self) -> None:
        self.models = ClientModels(self.models)

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.ids)

    def copy(self) -> "ClientRound":
        """Return a round that shares all tensors; this one stays when rows of it are replaced."""
        return replace(
            self,
            models=dict(self.models),
            states=dict(self.states),
            optimizer_states=dict(self.optimizer_states),
            steps=dict(self.steps),
            preparation_steps=dict(self.preparation_steps),
            extra=dict(self.extra),
            proposals=dict(self.proposals),
        )

    def select(self, positions: Tensor) -> "ClientRound":
        """Return the round of a part of the clients, after ``begin``.

        Args:
            positions: Positions of the clients, int64 [n].
        """
        moved = to_device(positions, self.ids)  # positions on the CPU would wait for the GPU

        def pick(tensor: Tensor) -> Tensor:
            """Return the rows of the clients; an algorithm may have tensors on the CPU."""
            return tensor[moved if tensor.device == moved.device else positions]

        def rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            """Select rows of clients; all clients share a tensor of one dimension."""
            return {n: t if t.dim() == 1 else pick(t) for n, t in tensors.items()}

        return replace(
            self,
            ids=pick(self.ids),
            samples=pick(self.samples),
            validation_samples=pick(self.validation_samples),
            class_counts=tree_map(pick, self.class_counts),
            center_losses=tree_map(pick, self.center_losses),
            group=tree_map(pick, self.group),
            validation_inputs=tree_map(pick, self.validation_inputs),
            validation_targets=tree_map(pick, self.validation_targets),
            models={name: model[moved] for name, model in self.models.items()},
            states=rows(self.states),
            optimizer_states=rows(self.optimizer_states),
            steps=rows(self.steps),
            preparation_steps=rows(self.preparation_steps),
            lr=rows(self.lr),
            extra=rows(self.extra),
        )

    def readable_rows(self) -> dict[str, Tensor]:
        """Return the rows that ``training_step`` may read, by the names of ``Client.read``.

        Returns:
            [clients, length] each, or [length] for a row that all clients share.
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
        if self.class_counts is not None:
            rows["class_counts"] = self.class_counts
        if len(self.broadcast.statistics):
            rows["broadcast.statistics"] = self.broadcast.statistics
        validation = {"inputs": self.validation_inputs, "targets": self.validation_targets}
        for name, tree in validation.items():
            rows |= zip(validation_rows(name, tree), leaves(tree))
        return rows

    def client_rows(self, position: int) -> dict[str, Tensor]:
        """Return the rows that ``training_step`` may read for ONE client, [length] each.

        Args:
            position: The position of the client.

        Example:
            >>> ids, size = torch.tensor([4, 7]), torch.ones(2, 1)
            >>> broadcast = ModelRows(torch.zeros(3), torch.zeros(0))
            >>> ClientRound(ids, size, size, broadcast).client_rows(1)["client"]
            tensor([7])
        """
        return select_rows(self.readable_rows(), position)

    def best_by_validation(
        self, models: Sequence[str], otherwise: int, min_samples: int = 1
    ) -> Tensor:
        """Return the position of the best model on each client's validation data.

        The best model has the lowest loss, or the best ``federation.monitor`` if that is set.

        Args:
            models: Names of validated models.
            otherwise: The position for clients with fewer validation samples than ``min_samples``.
            min_samples: The number of validation samples from which on a client chooses.

        Returns:
            Positions in ``models``, int64 [clients].
        """
        scores = self.validation_scores or self.validation_losses
        losses = torch.stack([scores[model] for model in models], 1)
        best = losses.nan_to_num(torch.inf).argmin(1)
        return torch.where(self.validation_samples[:, 0] >= min_samples, best, otherwise)


def select_rows(rows: Mapping[str, Tensor], position: int) -> dict[str, Tensor]:
    """Return ONE client's rows of :meth:`ClientRound.readable_rows`, [length] each."""
    return {name: row if row.dim() == 1 else row[position] for name, row in rows.items()}


def validation_rows(name: str, tree: Tree) -> list[str]:
    """Return the names of the rows of validation inputs or targets.

    Example:
        >>> validation_rows("inputs", torch.zeros(1)), validation_rows("inputs", [torch.zeros(1)])
        (['validation.inputs'], ['validation.inputs.0'])
    """
    if isinstance(tree, Tensor):
        return [f"validation.{name}"]
    return [f"validation.{name}.{place}" for place in range(len(leaves(tree)))]
