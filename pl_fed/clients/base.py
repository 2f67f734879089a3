"""The base of every algorithm: a client, with its global and its personal models."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pl_fed.data.batches import LocalWork
from pl_fed.functional.arguments import check_integers, check_optimizers
from pl_fed.functional.calls import functional_call
from pl_fed.functional.dropout import Draws, key_dropouts
from pl_fed.functional.losses import (
    RowDistance,
    masked_mean,
    sample_means,
    sample_weights,
    squared_distance,
)
from pl_fed.functional.rows import (
    Row,
    RowLayout,
    copy_trainable,
    frozen_modules,
    running_statistics,
    trainable_parameters,
)
from pl_fed.metrics import ClientMetrics
from pl_fed.types import Batch, Population

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import OptimizerLRScheduler


class FederationLike(Protocol):
    """What a client needs of the federation that it is part of."""

    def setup(self, client: "Client", datamodule: Any, stage: str, loads: bool) -> None:
        """Make ready for a stage."""

    def evaluate(self, part: str, clients: Tensor) -> None:
        """Add clients to the metrics of a part of the data."""

    def predict(self, clients: Tensor) -> list[dict[str, Any]]:
        """Give each client's predictions."""

    def metrics(self, part: str) -> Mapping[str, ClientMetrics]:
        """Return a part's metrics by model."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it over."""


class Client(LightningModule, ABC):
    """One client: a global and a personal model, and the objective that trains them.

    A new algorithm is a subclass in one file: it says in :attr:`trains` which models its
    ``training_step`` trains, and gives that objective. ``training_step`` must be a pure function of
    the parameters, the buffers and the batch of ONE client, as it is also run for many clients at
    once under ``torch.vmap``: no data-dependent Python branches, no ``.item()``.

    A round of a client: its models are filled from what the server sent and from what the client
    keeps (:meth:`states`, :meth:`begin`); ``training_step`` and the optimizer move them; then
    :meth:`end_round` says what is kept, and what is sent.

    Args:
        net: Any classifier: a module that turns a batch of inputs into logits [batch, classes].
            Parameters with requires_grad=False are frozen: they exist once, are in no row, and
            submodules that are frozen as a whole stay in evaluation mode. If ``net.keep_features``
            is true, ``net.features(x)`` is computed once for all samples, by what is frozen, and
            takes the place of the inputs, which the net's forward must allow.
        optimizer: Builds the local optimizer from parameters; built anew each round.
        lr_scheduler: Builds a learning-rate schedule from the optimizer; stepped once a round.
        local_steps: Minibatch steps of a round; or give ``local_epochs``.
        local_epochs: Passes over the client's data in a round; 1 if neither is given.
        criterion: Turns outputs and targets into a mean loss: a module with ``reduction``, as
            ``torch.nn.CrossEntropyLoss``, the default. Where it is not the mean of one loss for
            each sample, as ``reduction="none"`` gives them, it is called on whole minibatches,
            without padding: clients whose minibatches are of several sizes are run one by one.

    Attributes:
        averages_samples: Whether the criterion is the mean of one loss for each sample; found out
            on the data before training.
        global_model: The model w, given by the server at the start of a round.
        personal_model: The model v_k that the client keeps; it shares what is frozen.
        adaptation_work: How long the personal model is trained by :meth:`adaptation_step` before
            each evaluation; ``None``, the default, if it is not.
        population: Of how many clients it is one; known from :meth:`check` on.
        models: Names of all models: these two, and whatever else is trained. The module of model
            ``"x"`` is ``x_model``.

    Raises:
        TypeError: If the net is no module, or a LightningModule that has steps or hooks of its own,
            or the optimizer or the schedule cannot be called.
        ValueError: If the net has no trainable parameter, the local work is below 1, or the
            criterion's ``reduction`` is not ``"mean"``.
    """

    global_model: nn.Module
    personal_model: nn.Module

    trains: tuple[str, ...] = ("global",)
    """Which models ``training_step`` trains: ``"global"``, ``"personal"``, and any further personal
    ones, such as ``"personal_1"``, which exist because they are named here. Where their number
    depends on an argument, set it before ``super().__init__``."""

    keeps_mean = False
    """Whether the global model is to be the plain mean of what all clients keep: an aggregator that
    counts samples is refused then, and of any server optimizer but SGD with learning rate 1 there
    is a warning. A client that is left out of a round as broken changes nothing of the mean where
    uploads are changes of it: if part of the clients are in a round, or :attr:`sends_changes`. Else
    the mean is that of those who are left, until the next round."""

    sends_changes = False
    """Whether uploads are changes of that mean also where all clients are in each round."""

    server_means: tuple[str, ...] = ()
    """Which :meth:`server_states` are to be means of what all clients keep, as ``keeps_mean`` says
    of the global model: a client that is left out of a round as broken changes nothing of them."""

    reads_validation = False
    """Whether ``training_step`` reads the client's validation data, by :meth:`validation_batch`."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=0.05),
        lr_scheduler: LRSchedulerCallable | None = None,
        local_steps: int | None = None,
        local_epochs: int | None = None,
        criterion: nn.Module | None = None,
    ) -> None:
        super().__init__()
        check_work(local_steps, local_epochs)
        for argument, given in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
            if given is not None and not callable(given):
                raise TypeError(
                    f"Expected argument `{argument}` to be a callable, as a class of torch.optim"
                    f" with its options by functools.partial, but got {given!r}."
                )
        if not isinstance(net, nn.Module):
            raise TypeError(
                f"Expected argument `net` to be a torch.nn.Module but got {net!r}: where it comes"
                " from a config, annotate it in the subclass's __init__ (net: torch.nn.Module)."
            )
        _check_plain(net)
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.local_work = LocalWork(local_steps, local_epochs or 1)
        self.draws = Draws()
        trainable_parameters(net)  # says so if there is none
        self.models = tuple(dict.fromkeys(("global", "personal", *self.trains)))
        for name in self.models:
            model = net if name == "global" else copy_trainable(net)
            key_dropouts(model, self.draws)
            self.add_module(f"{name}_model", model)
        self.criterion = nn.CrossEntropyLoss() if criterion is None else criterion
        if getattr(self.criterion, "reduction", None) != "mean":
            raise ValueError(
                'Expected argument `criterion` to be a loss with `reduction="mean"`, as'
                f" torch.nn.CrossEntropyLoss(), but got {type(self.criterion).__name__} with"
                f" {getattr(self.criterion, 'reduction', 'no reduction')!r}."
            )
        self.sample_criterion = copy.deepcopy(self.criterion)
        setattr(self.sample_criterion, "reduction", "none")  # noqa: B010 (for mypy)
        self.averages_samples = True
        self.adaptation_work: LocalWork | None = None
        self.population = Population()
        self.centres: Mapping[str, Any] = {}
        self._rows: dict[str, Row] = {}

    # What an algorithm says

    @abstractmethod
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Return the objective of one local step, for ONE client.

        Args:
            batch: The client's minibatch; honour its mask (:meth:`loss` does).
            batch_idx: Which of the round's local steps this is, from 0.

        Returns:
            The loss; or a dict with ``loss`` and scalars that are averaged over the steps and the
            cohort and logged as ``train/<name>``.
        """

    def adaptation_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Return the objective by which the personal model is adapted before each evaluation.

        It begins as :meth:`begin` gives it, at the global model as a rule, is trained by the local
        optimizer on the client's training data for :attr:`adaptation_work`, and is not kept.

        Args:
            batch: See :meth:`training_step`, as for the rest.
            batch_idx: Which step it is, from 0.
        """
        raise NotImplementedError(
            f"Expected {type(self).__name__} to define `adaptation_step`, as its"
            " `adaptation_work` is given."
        )

    def begin(self, rows: dict[str, Tensor]) -> None:
        """Fill the personal models of a chunk of clients, before a round and before an evaluation.

        The global model always begins at the broadcast. A personal one begins, before this is
        called, at the state of its name if there is one, and else at the broadcast.

        Args:
            rows: ``broadcast`` [numel]; whatever :meth:`states` names, [clients, their length], and
                whatever :meth:`server_states` names, [their length]; ``samples`` and
                ``validation_samples`` [clients, 1], the numbers of samples to train on and to
                validate with; ``client`` [clients, 1], the ids, int64; and each personal model that
                is trained or evaluated, by name [clients, numel]: to be written here. Running
                statistics go beside them, as ``broadcast_statistics`` and ``<model>_statistics``.
                Which numbers of a row are those of a layer ``self.row(model).layout.positions``
                tells. Before a round, and not before an evaluation, there are ``<model>_steps``
                [clients, 1], int64: how many steps a trained model is about to take, and
                ``<model>_lr`` [1], its learning rate. Rows that are added here are there in
                ``training_step`` and at the end of the round, too.
        """

    def end_round(self, rows: dict[str, Tensor]) -> Tensor | None:
        """Close the round on a chunk of clients, and say what they upload.

        Args:
            rows: What :meth:`begin` was given, with the trained models as they are after the local
                steps, ``global`` [clients, numel] among them, and the losses of :meth:`validates`.
                What ``training_step`` gave is there as ``mean_<name>`` [clients], the mean over the
                steps (``mean_loss``, at least).
                What is written into states is kept. If ``global_statistics`` are there at the end,
                their mean becomes the server's; where no step trains the global model, but it is
                evaluated, they are those of the model that is trained, if nothing is written. The
                mean of a server state is taken, too, if there is a row for each client in the end,
                [clients, its length].

        Returns:
            The uploads [clients, numel], which the server merges and adds to w^t: w_k − w^t here.
            An algorithm that sends models u_k, whose mean is the next w, returns u_k − w^t too.
            ``None`` if nothing is sent. Uploads, states and proposals are dense floating-point
            tensors, and states keep their dtypes: of anything else the clients count as broken.
        """
        return rows["global"] - rows["broadcast"] if "global" in self.trains else None

    def receive(self, clients: Tensor, uploads: Tensor) -> dict[str, Tensor]:
        """Return how uploads change what the server keeps, beside what was proposed of it.

        It is given them as they came, so that what an attacker forged counts here, too.

        Args:
            clients: Whose they are, int64 [clients]; those of one process, of several.
            uploads: Those that are not broken, [clients, numel].

        Returns:
            For each of some :meth:`server_states` what is added to it, [its length]: summed over
            processes, so that without clients it is 0.
        """
        return {}

    def states(self) -> dict[str, Tensor]:
        """Return what a client keeps between rounds: for each name the row of a new client.

        By default the personal models that are trained. Their running statistics are always kept.
        Names are the algorithm's own: none that :meth:`begin` lists, none that begins with
        ``mean_`` or ends with ``_statistics``, ``_steps``, ``_lr`` or ``_loss``.
        """
        return {name: self.row(name).data for name in self.trains if name != "global"}

    def server_states(self) -> dict[str, Tensor]:
        """Return what the server keeps beside the global model: for each name its first row.

        Clients get them with the broadcast, and each of the cohort may propose what they become:
        see :meth:`end_round`. The mean of the proposals is taken whatever the aggregator is, and
        attacks on uploads leave them as they are; what follows from uploads is for
        :meth:`receive`. Their names are no model's and none of :meth:`states`, beside what holds
        for those.
        """
        return {}

    def check(self, federation: Any) -> None:
        """Refuse a federation that the algorithm does not fit, before anything is trained.

        Args:
            federation: The :class:`pl_fed.Federation`, with its ``datamodule``; :attr:`population`
                is known by now.

        Raises:
            ValueError: If it does not.
        """

    def evaluates(self) -> tuple[str, ...]:
        """Return the models that have metrics, the one that gives predictions last.

        ``"global"`` is evaluated as the server has it; others are a client's own, as :meth:`begin`
        gives them.
        """
        return self.trains

    def validates(self) -> tuple[str, ...]:
        """Return the models whose losses on a client's validation data end a round.

        :meth:`end_round` finds them as ``<model>_loss`` [clients], NaN where there is no such data:
        what to choose among candidates by.
        """
        return ()

    def work(self, model: str) -> LocalWork:
        """Return how long a model is trained in a round."""
        return self.local_work

    def group_options(self, model: str) -> dict[str, Any]:
        """Return options of the optimizer that are a model's own, such as ``lr``."""
        return {}

    # What an algorithm builds on

    def adapter(self) -> "Client":
        """Return the same client, on the same models, as one whose step is the adaptation's."""
        adapter, work = copy.copy(self), self.adaptation_work or self.local_work
        adapter.trains = ("personal",)
        adapter.training_step = MethodType(type(self).adaptation_step, adapter)  # type: ignore[method-assign]
        adapter.work = lambda _: work  # type: ignore[assignment, method-assign]
        return adapter

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a model over the samples of a batch that count."""
        return self._mean_loss(model(batch.x), batch)

    def loss_at(self, name: str, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the mean loss of a model whose parameters are replaced, as a function of them.

        It is what gradients within an objective are taken of, by ``torch.func.grad``, and they may
        be differentiated once more::

            gradient = torch.func.grad(lambda at: self.loss_at("global", at, batch))
            at = self.parameters_of("global")
            step = {name: at[name] - 0.1 * g for name, g in gradient(at).items()}
            return self.loss_at("global", step, batch)

        Args:
            name: The model.
            parameters: By name, as :meth:`parameters_of` gives them; others stay the model's own.
            batch: See :meth:`training_step`.
        """
        outputs = functional_call(self.model(name), dict(parameters), (batch.x,))
        return self._mean_loss(outputs, batch)

    def _mean_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        if not self.averages_samples:
            return self._batch_loss(outputs, batch)
        weights = sample_weights(self.criterion, batch.y)
        if batch.mask is None and weights is None:
            mean: Tensor = self.criterion(outputs, batch.y)
            return mean
        return masked_mean(self.sample_losses(outputs, batch.y), batch.mask, weights)

    def _batch_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the criterion's own value on the samples that count; 0 without any."""
        targets = batch.y
        if batch.mask is not None:
            chosen = batch.mask.nonzero().flatten()
            if not len(chosen):
                return 0 * outputs.sum()
            outputs, targets = outputs[chosen], targets[chosen]
        value: Tensor = self.criterion(outputs, targets)
        return value

    def sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, shape [batch].

        Raises:
            ValueError: If the criterion has none.
        """
        losses: Tensor = self.sample_criterion(outputs, targets)
        if losses.shape[:1] != targets.shape[:1]:
            raise ValueError(
                f'Expected {type(self.criterion).__name__} with reduction="none" to give a loss for'
                f" each of {len(targets)} samples but got shape {list(losses.shape)}."
            )
        return sample_means(losses)

    def refuse_batch_criterion(self, why: str) -> None:
        """Raise ``ValueError`` if the criterion is not the mean of one loss for each sample.

        Args:
            why: What the losses of single samples are needed for.
        """
        if not self.averages_samples:
            raise ValueError(
                "Expected argument `criterion` to be the mean of what it gives for each sample with"
                f' reduction="none" but got {type(self.criterion).__name__}, which is another'
                f" number on these data: {why}."
            )

    def squared_distance(self, model: str, centre: str = "broadcast") -> Tensor:
        """Return ‖model − centre‖² over the trainable parameters.

        Args:
            model: The name of a model that is trained.
            centre: ``"broadcast"``, the w^t that the round began with, or the name of a state of
                :meth:`states` that is as long. It is a copy: it does not move with the model.

        Raises:
            ValueError: If the centre is neither.
        """
        row, where = self.row(model), self._centre(centre)
        if isinstance(where, Tensor):
            distance: Tensor = RowDistance.apply(  # type: ignore[no-untyped-call]
                row.data, where, row.layout, *row.tensors.values()
            )
            return distance
        live = self.parameters_of(model)
        return squared_distance(list(live.values()), [where[name] for name in live])

    def distance_to_broadcast(self) -> Tensor:
        """Return ‖v − w^t‖²: the personal model's distance to what the server sent."""
        return self.squared_distance("personal", "broadcast")

    def inner_product(self, model: str, centre: str) -> Tensor:
        """Return ⟨model, centre⟩ over the trainable parameters: a term whose gradient is a row.

        Args:
            model: See :meth:`squared_distance`, as for the rest.
            centre: A row as long as the model.
        """
        where = self.tensors_at(centre)
        return torch.stack(
            [(p * where[n]).sum() for n, p in self.parameters_of(model).items()]
        ).sum()

    def kept(self, name: str) -> Tensor:
        """Return, within ``training_step``, a row that :meth:`begin` was given: the ONE client's.

        Args:
            name: That of a state, of a server state, ``"broadcast"``, ``"broadcast_statistics"``
                where there are any, ``"samples"``, ``"validation_samples"``, ``"client"``,
                ``"<model>_steps"``, ``"<model>_lr"``, or of a row that :meth:`begin` added.

        Returns:
            Shape [its length]. It does not move with the models.

        Raises:
            ValueError: If there is none of that name.
        """
        where = self._centre(name)
        if isinstance(where, Tensor):
            return where
        return torch.cat([tensor.flatten() for tensor in where.values()])

    def validation_batch(self, batch: Batch) -> Batch:
        """Return, within ``training_step``, all validation data of the client: see its mask.

        It is not attacked and not augmented. :attr:`reads_validation` must be true.

        Args:
            batch: A minibatch, whose samples have the same shape.
        """
        x = self.kept("validation_x").unflatten(0, (-1, *batch.x.shape[1:]))
        y = self.kept("validation_y").unflatten(0, (-1, *batch.y.shape[1:]))
        mask = torch.arange(len(y), device=y.device) < self.kept("validation_samples")[0]
        return Batch(x, y, mask)

    def tensors_at(self, name: str) -> dict[str, Tensor]:
        """Return the same of a row as long as a model, cut into parameters: see :meth:`loss_at`."""
        where = self._centre(name)
        return self.row("global").layout.views(where) if isinstance(where, Tensor) else dict(where)

    def _centre(self, name: str) -> Any:
        if name not in self.centres:
            raise ValueError(
                f"Expected argument `centre` to be one of {', '.join(self.centres)} but got"
                f" {name!r}."
            )
        return self.centres[name]

    def model(self, name: str) -> nn.Module:
        """Return a model by its name.

        Raises:
            ValueError: If there is none of that name.
        """
        if name not in self.models:
            raise ValueError(
                f"Expected a model's name, one of {', '.join(self.models)}, but got {name!r}."
            )
        model: nn.Module = getattr(self, f"{name}_model")
        return model

    def parameters_of(self, name: str) -> dict[str, Tensor]:
        """Return a model's trainable parameters by name: under vmap, those of the one client."""
        live = dict(self.model(name).named_parameters())
        return {each: live[each] for each in self.row(name).layout.names}

    def row(self, name: str) -> Row:
        """Return the flat row of a model's trainable parameters."""
        if name not in self._rows:
            tensors = trainable_parameters(self.model(name))
            self._rows[name] = Row(tensors, RowLayout.of(tensors.items()))
        return self._rows[name]

    def statistics(self, name: str) -> Row:
        """Return the flat row of a model's running statistics (BatchNorm's, as a rule)."""
        key = f"{name}_statistics"
        if key not in self._rows:
            tensors = running_statistics(self.model(name))
            self._rows[key] = Row(tensors, RowLayout.of(tensors.items()))
        return self._rows[key]

    def renew_rows(self) -> None:
        """Forget the rows of models whose tensors were replaced by others, as by a callback."""
        for key, row in list(self._rows.items()):
            if not row.is_of(self.model(key.removesuffix("_statistics"))):
                del self._rows[key]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Client":
        """Move or cast the models, as PyTorch does; their rows are made anew."""
        super()._apply(fn, recurse)
        self._rows.clear()
        return self

    def refuse_running_statistics(self, why: str) -> None:
        """Raise ``ValueError`` if the net has running statistics (BatchNorm's, as a rule).

        Args:
            why: What they do not go with: as a rule a gradient within an objective, as
                :meth:`loss_at` takes it, which cannot change them.
        """
        if self.statistics("global").layout.numel:
            names = ", ".join(self.statistics("global").layout.names)
            raise ValueError(
                f"Expected argument `net` to have no running statistics but got {names}: {why}."
            )

    @property
    def leaves(self) -> dict[str, list[Tensor]]:
        """The tensors of each trained model."""
        return {name: list(self.row(name).tensors.values()) for name in self.trains}

    def build_optimizer(self, leaves: Mapping[str, list[Tensor]]) -> torch.optim.Optimizer:
        """Build the local optimizer over tensors of each trained model, one group a model."""
        groups = [
            {"params": leaves[name], "name": name, **self.group_options(name)}
            for name in self.trains
        ]
        return self.optimizer(groups)

    # What Lightning calls

    @classmethod
    def load_from_checkpoint(cls, *_: Any, **__: Any) -> "Client":  # type: ignore[override]
        """Refuse: a checkpoint holds all clients.

        Raises:
            TypeError: With what to do instead.
        """
        raise TypeError(
            f"Expected {cls.__name__} to be loaded with its federation, as by trainer.fit or"
            " trainer.test with `ckpt_path`, but got load_from_checkpoint: a checkpoint holds all"
            " clients. `python -m pl_fed export` writes single models."
        )

    def configure_optimizers(self) -> "OptimizerLRScheduler":
        """Return the local optimizer and its schedule, which moves once a round.

        Raises:
            ValueError: If the optimizer needs a closure, which a local step does not give it.
        """
        leaves = self.leaves
        check_optimizers(optimizer=self.optimizer(leaves[self.trains[0]]))
        optimizer = self.build_optimizer(leaves)
        if self.lr_scheduler is None:
            return optimizer
        scheduler = self.lr_scheduler(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau) and not hasattr(scheduler, "monitor"):
            raise ValueError(
                "Expected argument `lr_scheduler` to say what it watches, as"
                " lightning.pytorch.cli.ReduceLROnPlateau does by `monitor`, but got"
                " torch.optim.lr_scheduler.ReduceLROnPlateau."
            )
        config: dict[str, Any] = {"scheduler": scheduler, "interval": "epoch"}
        if hasattr(scheduler, "monitor"):
            config["monitor"] = scheduler.monitor
        return {"optimizer": optimizer, "lr_scheduler": config}  # type: ignore[return-value]

    @property
    def federation(self) -> FederationLike:
        """The federation that this client is part of."""
        found: FederationLike | None = getattr(self.trainer, "federation", None)
        if found is None:
            raise TypeError(
                "Expected a client to be fitted by `pl_fed.Trainer(federation=...)` but got"
                f" {type(self.trainer).__module__}.{type(self.trainer).__name__}."
            )
        return found

    def setup(self, stage: str) -> None:
        """Make the federation ready, in the trainer's precision before a checkpoint is loaded."""
        self.trainer.precision_plugin.convert_module(self)
        data, loads = (
            getattr(self.trainer, "datamodule", None),
            getattr(self.trainer, "loads", False),
        )
        self.federation.setup(self, data, stage, loads)

    def train(self, mode: bool = True) -> "Client":
        """Set training mode; what is frozen as a whole stays in evaluation mode."""
        super().train(mode)
        for name in self.models:
            for frozen in frozen_modules(self.model(name)):
                frozen.eval()
        return self

    def on_validation_epoch_start(self) -> None:
        """Forget what was counted before."""
        _reset(self.federation.metrics("val"))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Evaluate a batch of clients, given by their ids, on their validation data."""
        self.federation.evaluate("val", batch)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics under ``val/``."""
        self._log_metrics("val")

    def on_test_epoch_start(self) -> None:
        """Forget what was counted before."""
        _reset(self.federation.metrics("test"))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Evaluate a batch of clients, given by their ids, on their test data."""
        self.federation.evaluate("test", batch)

    def on_test_epoch_end(self) -> None:
        """Log the metrics under ``test/``."""
        self._log_metrics("test")

    def predict_step(self, batch: Tensor, batch_idx: int) -> list[dict[str, Any]]:
        """Give the personalised predictions of a batch of clients, on their test data."""
        return self.federation.predict(batch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the federation's state."""
        checkpoint["federation"] = self.federation.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the federation's state, or say why it does not fit."""
        if "federation" not in checkpoint:
            raise ValueError(
                "Expected a checkpoint written by pl_fed but got one without a federation's state."
            )
        self.federation.load_state_dict(checkpoint["federation"])

    def _log_metrics(self, part: str) -> None:
        for model, metrics in self.federation.metrics(part).items():
            for name, value in metrics.compute().items():
                self.log(
                    f"{part}/{model}/{name}",
                    value.to(torch.float32),
                    prog_bar=part == "val" and name == "accuracy",
                    batch_size=1,
                )


def check_work(steps: int | None, epochs: int | None, prefix: str = "local") -> None:
    """Refuse local work that is below 1 or counted twice.

    Raises:
        ValueError: If it is.
    """
    if steps is not None and epochs is not None:
        raise ValueError(
            f"Expected only one of `{prefix}_steps` and `{prefix}_epochs` but got both:"
            f" {steps} and {epochs}."
        )
    for name, value in ((f"{prefix}_steps", steps), (f"{prefix}_epochs", epochs)):
        if value is not None:
            check_integers(1, **{name: value})


def _check_plain(net: nn.Module) -> None:
    """Refuse a net that is a LightningModule with steps or hooks, which nothing would call.

    Raises:
        TypeError: If it is; it says what to give instead.
    """
    kind = type(net)
    bases = kind.__mro__
    names = [base.__name__ for base in bases]  # pytorch_lightning has a class of its own
    if "LightningModule" not in names:
        return
    place = names.index("LightningModule")
    defined = dict.fromkeys(name for base in bases[:place] for name in vars(base))
    ignored = [
        name
        for name in defined
        if not name.startswith("_") and hasattr(bases[place], name) and not hasattr(nn.Module, name)
    ]
    if ignored:
        raise TypeError(
            "Expected argument `net` to be a module that turns inputs into outputs but got the"
            f" LightningModule {kind.__name__}, whose `{'`, `'.join(ignored)}` would not be called:"
            " give the module that it trains as `net`, its loss as `criterion` and its optimizer as"
            " `optimizer`."
        )


def _reset(metrics: Mapping[str, ClientMetrics]) -> None:
    for metric in metrics.values():
        metric.reset()
