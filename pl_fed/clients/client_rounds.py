"""The part of a client that rounds call: its rows, its declared states, begin and end."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from lightning.pytorch.cli import LRSchedulerCallable
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pl_fed.arguments import check_finite_options, check_optimizers
from pl_fed.clients.contract import (
    ClientRound,
    Model,
    ModelRows,
    Objective,
    RowDefault,
    model_of_group,
)
from pl_fed.clients.host import FederationModule
from pl_fed.clients.module_optimizer import ModuleOptimizer
from pl_fed.clients.optimizer_layout import OptimizerLayout, find_optimizer_layouts
from pl_fed.clients.round_rules import call_hook
from pl_fed.compressors import Compressor
from pl_fed.devices import numbers_on
from pl_fed.nets.rows import (
    Row,
    RowLayout,
    frozen_modules,
    running_statistics,
    trainable_parameters,
    usable_rows,
)
from pl_fed.optimizers import LocalSchedule
from pl_fed.text import quote
from pl_fed.types import Population

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import OptimizerLRScheduler

COMPRESSION = "compression."
"""The beginning of the names of rows that clients keep for the codec of uploads."""


@dataclass(frozen=True)
class DeclaredState:
    """Declared state: its initial row, and the server state that is its mean over all clients."""

    default: RowDefault
    mean: str | None


class ClientRounds(FederationModule):
    """Client rounds: the part of a client that rounds call and no algorithm overrides.

    :meth:`run_begin` fills in a round and calls the algorithm's ``begin``. :meth:`run_end_round`
    calls its ``end_round`` and collects the rows that clients keep. Rounds read and write models as
    flat rows (:meth:`row`, :meth:`statistics`).

    Attributes:
        keeps_optimizer_state: Whether clients keep the states of their local optimizers between
            rounds; set by the federation.
        compressor: The codec of the uploads; clients may keep rows for it. ``None`` without
            compression. Set by the federation.
        draws_globally: Whether local steps draw from the global generators of Python or NumPy; the
            federation finds out in a trial. The engine ``one_by_one`` then seeds them, too.
        reads_optimizer: Whether local steps read the trainer's optimizer or schedule; the
            federation finds out in a trial. Its rates are those of a step one by one alone.
        evaluation_parts: The names of submodules of a LightningModule that its author has set to
            evaluation mode. They stay in it, as in a plain fit.
        default_parts: For each argument that names parts of the net, and that the user has left
            out, the parts that it names by default.
    """

    models: dict[str, Model]
    trained: tuple[str, ...]
    evaluated: tuple[str, ...]
    validated: tuple[str, ...]
    population: Population
    num_centers: int
    measures_centers: bool
    objective: Objective
    preparation: Objective | None
    lr_scheduler: LRSchedulerCallable | None
    local_schedule: LocalSchedule | None

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[str, DeclaredState] = {}
        self._server_states: dict[str, RowDefault] = {}
        self._rows: dict[str, Row] = {}
        self.keeps_optimizer_state = False
        self.compressor: Compressor | None = None
        self.draws_globally = False
        self.reads_optimizer = False
        self.evaluation_parts: tuple[str, ...] = ()
        self.default_parts: dict[str, tuple[str, ...]] = {}
        self._optimizer_layouts: dict[str, OptimizerLayout] | None = None

    def begin(self, client: ClientRound) -> None:
        """Prepare personal models and states; see ``Client.begin``."""
        raise NotImplementedError

    def end_round(self, client: ClientRound) -> Tensor | None:
        """Close the round and return the uploads; see ``Client.end_round``."""
        raise NotImplementedError

    def configure_optimizers(self) -> "OptimizerLRScheduler":
        """Return the local optimizer and its schedule; Lightning steps the schedule once a round.

        Raises:
            ValueError: If the optimizer needs a closure, or a ``ReduceLROnPlateau`` schedule has no
                ``monitor``.
        """
        parameters = self.trained_parameters
        if isinstance(self.objective.optimizer, ModuleOptimizer):
            self.objective.optimizer.restart()
        check_optimizers(optimizer=self.objective.optimizer(next(iter(parameters.values()))))
        optimizer = self.objective.build_optimizer(parameters)
        scheduler = self.build_schedule(optimizer)
        self.local_schedule = scheduler if isinstance(scheduler, LocalSchedule) else None
        if scheduler is None:
            return optimizer
        check_finite_options(lr_scheduler=optimizer)
        if isinstance(scheduler, ReduceLROnPlateau) and not hasattr(scheduler, "monitor"):
            raise ValueError(
                "Expected argument `lr_scheduler` to have a monitored metric but got"
                " torch.optim.lr_scheduler.ReduceLROnPlateau: use"
                " lightning.pytorch.cli.ReduceLROnPlateau with `monitor`."
            )
        config: dict[str, Any] = {"scheduler": scheduler, "interval": "epoch"}
        if hasattr(scheduler, "monitor"):
            config["monitor"] = scheduler.monitor
        return {"optimizer": optimizer, "lr_scheduler": config}  # type: ignore[return-value]

    def build_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the schedule of the local optimizer, or ``None`` without one."""
        if self.lr_scheduler is not None:
            return self.lr_scheduler(optimizer)
        build = self.objective.optimizer
        return build.build_schedule(optimizer) if isinstance(build, ModuleOptimizer) else None

    def model(self, name: str) -> nn.Module:
        """Return a model by its name.

        Raises:
            ValueError: If no model has this name.
        """
        if name not in self.models:
            raise ValueError(
                f"Expected a model's name, one of {', '.join(self.models)}, but got {name!r}."
            )
        model: nn.Module = getattr(self, f"{name}_model")
        return model

    def state_defaults(self) -> dict[str, Tensor]:
        """Return a new client's rows by name, [length] each.

        A client keeps its declared states, the parameters of kept models under the model's name,
        and the running statistics of trained models as ``<model>.statistics``.
        """
        rows = {
            name: self.row(name).data
            for name in self.trained
            if name != "global" and self.models[name].kept
        }
        rows |= {
            name: self._default_row(name, state.default) for name, state in self._states.items()
        }
        for name in self.trained:
            if name != "global":
                rows[f"{name}.statistics"] = self.statistics(name).data
        return rows

    def store_defaults(self) -> dict[str, Tensor]:
        """Return all rows of a new client by name, [length] each.

        They are those of :meth:`state_defaults`, the kept states of local optimizers as
        ``<model>.optimizer``, and those of :attr:`compression_defaults`.
        """
        like, layouts = self.row("global").data, self.optimizer_layouts
        states = {
            optimizer_state_name(model): like.new_zeros(layout.numel)
            for model, layout in layouts.items()
        }
        return {**self.state_defaults(), **states, **self.compression_defaults}

    @property
    def compression_defaults(self) -> dict[str, Tensor]:
        """The rows that a new client keeps for the codec, zeros, as ``compression.<name>``."""
        if self.compressor is None or (layout := self.sent_layout) is None:
            return {}
        like = self.row("global").data
        dtype = torch.promote_types(like.dtype, torch.float32)
        lengths = self.compressor.memory_lengths(layout)
        return {
            f"{COMPRESSION}{name}": like.new_zeros(length, dtype=dtype)
            for name, length in lengths.items()
        }

    @property
    def sent_layout(self) -> RowLayout | None:
        """The layout of the part of an upload that crosses the network."""
        raise NotImplementedError

    @property
    def optimizer_layouts(self) -> dict[str, OptimizerLayout]:
        """The layouts of the optimizer states that clients keep, by trained model; may be empty."""
        if not self.keeps_optimizer_state:
            return {}
        if self._optimizer_layouts is None:
            parameters = self.trained_parameters
            self._optimizer_layouts = find_optimizer_layouts(self.objective, parameters)
        return self._optimizer_layouts

    def server_state_defaults(self) -> dict[str, Tensor]:
        """Return the initial row of each server state, [length]."""
        return {name: self._default_row(name, row) for name, row in self._server_states.items()}

    @property
    def has_server_states(self) -> bool:
        """Whether the server keeps any state beside the global model."""
        return bool(self._server_states)

    @property
    def state_means(self) -> dict[str, str]:
        """The server states that are means of a state over all clients, by the state's name."""
        return {name: state.mean for name, state in self._states.items() if state.mean is not None}

    def _default_row(self, name: str, default: RowDefault) -> Tensor:
        """Return a state's initial row, in the dtype and on the device of the parameters.

        Raises:
            ValueError: If the default is no row of numbers.
        """
        example = self.row("global").data
        row = default() if callable(default) else default
        if isinstance(row, int | float):
            return example.new_tensor([float(row)])
        if not isinstance(row, Tensor) or row.dim() != 1:
            shape = f"shape {list(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
            raise ValueError(
                f"Expected the default of state `{name}` to be a number or a tensor [length] but"
                f" got {shape}."
            )
        return row.to(example)

    def new_round(self, clients: int = 1, samples: int = 1, steps: int = 1) -> ClientRound:
        """Return the first round of new clients, for a trial without a federation.

        The global model and the states are those before the first round; the learning rates are
        the optimizer's. If the algorithm reads :attr:`population`, set it before.

        Args:
            clients: The number of clients; their ids are 0, 1, ...
            samples: The number of training samples of each client.
            steps: The number of local steps of each client on each trained model.

        Example: a test of an algorithm. ::

            client = FedProx(net, mu=1.0)
            round = client.run_begin(client.new_round(clients=2, samples=5))
            with client.reading(round.client_rows(0)):
                loss = client.training_step(batch, 0)
            upload, kept = client.run_end_round(round)
        """
        broadcast = self.model_rows("global").clone()
        like = broadcast.parameters
        defaults = self.state_defaults()
        optimizer = self.objective.build_optimizer(self.trained_parameters)
        ids = torch.arange(clients, device=like.device)
        return ClientRound(
            ids=ids,
            samples=like.new_full((clients, 1), samples),
            validation_samples=like.new_zeros(clients, 1),
            broadcast=broadcast,
            states={name: row.repeat(clients, 1) for name, row in defaults.items()},
            server_states={n: row.clone() for n, row in self.server_state_defaults().items()},
            steps={name: ids.new_full((clients, 1), steps) for name in self.trained},
            preparation_steps={
                name: ids.new_full((clients, 1), steps)
                for name in (self.preparation.trained if self.preparation else ())
            },
            lr=read_rates(optimizer, like),
            center_losses=like.new_zeros(clients, self.num_centers)
            if self.measures_centers
            else None,
        )

    def run_begin(self, client: ClientRound) -> ClientRound:
        """Fill in the clients' models, let ``begin`` prepare them, and return the round.

        Args:
            client: The round; its ``states`` are all rows that the clients keep, under the names of
                :meth:`state_defaults`.
        """
        client_states = client.states
        client.states = {name: client_states[name] for name in self._states}
        prepared = self.preparation.trained if self.preparation and client.steps else ()
        for name in dict.fromkeys((*self.trained, *self.evaluated, *self.validated, *prepared)):
            if name == "global":
                continue
            model = client.broadcast.expand(len(client))
            parameters, statistics = (
                client_states.get(name),
                client_states.get(f"{name}.statistics"),
            )
            client.models[name] = ModelRows(
                model.parameters.clone() if parameters is None else parameters,
                model.statistics.clone() if statistics is None else statistics,
            )
        call_hook("begin", self.begin, client)
        in_round = "global" in (*self.trained, *self.validated)
        if in_round and client.steps:  # an evaluation has no local steps
            client.models["global"] = client.broadcast.expand(len(client))
        return client

    def run_end_round(self, client: ClientRound) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Let ``end_round`` close the round; return its uploads and the rows that clients keep.

        For each server state that is a mean of states, add proposals to ``client.proposals``.

        Args:
            client: The round after the local steps.

        Returns:
            The uploads, and rows [clients, length] under the names of :meth:`store_defaults`.
        """
        before = {name: client.states[name].clone() for name in self.state_means}
        upload = call_hook("end_round", self.end_round, client)
        for name, mean in self.state_means.items():
            start = before[name]
            row = usable_rows(client.states[name], (len(start), start.shape[1]), start)
            if row is not None:  # otherwise the uploads are broken
                change = self.population.share * (row - start)
                client.proposals.setdefault(mean, client.server_states[mean] + change)
        if client.global_statistics is None and "global" in (*self.trained, *self.evaluated):
            source = "global" if "global" in self.trained else self.trained[-1]
            client.global_statistics = client.models[source].statistics
        client_states = dict(client.states)
        for name in self.trained:
            if name != "global":
                if self.models[name].kept:
                    client_states[name] = client.models[name].parameters
                client_states[f"{name}.statistics"] = client.models[name].statistics
        for name, rows in client.optimizer_states.items():
            client_states[optimizer_state_name(name)] = rows
        return upload, client_states

    def row(self, name: str) -> Row:
        """Return the flat row of a model's trainable parameters.

        Raises:
            ValueError: If these are others than those of the global model: models begin as copies.
        """
        if name not in self._rows:
            tensors = trainable_parameters(self.model(name))
            self._check_copy(name, tensors)
            self._rows[name] = Row(tensors, RowLayout.from_tensors(tensors.items()))
        return self._rows[name]

    def _check_copy(self, name: str, trainable: Mapping[str, Tensor]) -> None:
        """Refuse a copy of the net with other trainable parameters than the global model."""
        changed = sorted(trainable.keys() ^ trainable_parameters(self.model("global")).keys())
        if changed:
            raise ValueError(
                f"Expected the models of {type(self).__name__} to train the same parameters but got"
                f" another `requires_grad` for {quote(changed)} of the global model than of"
                f" `{name}`: freeze parts of the net before you give it to the algorithm, which"
                " makes copies of it."
            )

    def statistics(self, name: str) -> Row:
        """Return the flat row of a model's running statistics (BatchNorm's, as a rule)."""
        key = f"{name}.statistics"
        if key not in self._rows:
            tensors = running_statistics(self.model(name))
            layout = RowLayout.from_tensors(tensors.items())
            self._rows[key] = Row(tensors, layout, neighbor=self.row(name).example)
        return self._rows[key]

    def model_rows(self, name: str) -> ModelRows:
        """Return both rows of a model: writing into them changes the model."""
        return ModelRows(self.row(name).data, self.statistics(name).data)

    def renew_rows(self) -> None:
        """Drop the cached rows of models with replaced tensors (by a callback, for example)."""
        for key, row in list(self._rows.items()):
            if not row.belongs_to(self.model(key.removesuffix(".statistics"))):
                del self._rows[key]

    @property
    def trained_parameters(self) -> dict[str, list[Tensor]]:
        """The trainable parameters of each trained model."""
        return {name: list(self.row(name).tensors.values()) for name in self.trained}

    def train(self, mode: bool = True) -> Self:
        """Set training mode; entirely frozen submodules stay in evaluation mode.

        So do :attr:`evaluation_parts`.
        """
        super().train(mode)
        for name in self.models:
            for frozen in frozen_modules(self.model(name)):
                frozen.eval()
            parts = dict(self.model(name).named_modules()) if self.evaluation_parts else {}
            for part in self.evaluation_parts:
                if part in parts:  # an algorithm may replace the head
                    parts[part].training = False
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the models, as PyTorch does, and drop their cached rows."""
        super()._apply(fn, recurse)
        self._rows.clear()
        self._optimizer_layouts = None  # its tensors may be on another device
        return self


def read_rates(
    optimizer: torch.optim.Optimizer, like: Tensor, batches_per_step: int = 1
) -> dict[str, Tensor]:
    """Return the learning rate of each trained model for a local step, [1] each.

    It is NaN if the optimizer has none.

    Args:
        optimizer: The local optimizer; its first parameter group of a model has the rate.
        like: A tensor with the models' dtype and device.
        batches_per_step: The number of minibatches in a step of the optimizer. Each has its part of
            the rate.
    """
    rates: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        lr = group.get("lr")  # None of an optimizer that finds its own rate, such as Adafactor
        lr = math.nan if lr is None else float(lr) / batches_per_step
        rate = numbers_on(like, [lr], like.dtype)
        rates.setdefault(model_of_group(group), rate)
    return rates


def optimizer_state_name(model: str) -> str:
    """Return the name under which clients keep the state of a model's local optimizer."""
    return f"{model}.optimizer"
