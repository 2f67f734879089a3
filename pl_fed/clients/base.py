"""The base of every algorithm: a client, with its global and its personal models."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from pl_fed.arguments import check_integers
from pl_fed.clients.argument_checks import (
    check_builders,
    check_copies,
    check_net,
    check_work,
    choose_net_task,
)
from pl_fed.clients.client_rounds import ClientRounds, DeclaredState
from pl_fed.clients.contract import (
    RESERVED_NAMES,
    ClientRound,
    Model,
    Objective,
    RowDefault,
    SampleFunction,
    Visit,
    validation_rows,
)
from pl_fed.clients.heads import find_head, record_features
from pl_fed.clients.module_optimizer import ModuleOptimizer, names_no_optimizer
from pl_fed.configurable import Configurable
from pl_fed.data.batches import LocalWork
from pl_fed.data.client_data import ClientData, PartName, move_tree
from pl_fed.devices import to_device
from pl_fed.functional.losses import RowDistance, squared_distance
from pl_fed.nets.calls import READS_OWN_WEIGHTS, Net
from pl_fed.nets.copies import detach_attributes, remove_compilation
from pl_fed.nets.dropout import Draws, key_dropouts
from pl_fed.nets.modes import mixes_samples
from pl_fed.nets.rows import (
    RowLayout,
    copy_trainable,
    count_as_numbers,
    evaluation_parts,
    mark_infinite_buffers,
    trainable_parameters,
)
from pl_fed.optimizers import LocalSchedule
from pl_fed.tasks import Classification, CriterionTask, Task, find_task_class
from pl_fed.tasks.module_steps import build_layers, has_training_step, list_hooks
from pl_fed.tasks.one_process import one_process
from pl_fed.trees import Tree, count_samples, leaves, tree_map
from pl_fed.types import Batch, Population

CONSTANT_BUFFER = "register a constant buffer with persistent=False"
"""The remedy for a saved buffer that no step changes: it counts as a running statistic."""


class Client(Configurable, ClientRounds, ABC):
    """One client: a global and a personal model, and the objective that trains them.

    A new algorithm is a subclass in one file. It declares its models in ``super().__init__``, its
    states by :meth:`add_state`, and defines :meth:`training_step`.

    In a round, :meth:`begin` prepares the client's models from the broadcast and from its states.
    :meth:`training_step` and the optimizer train them. :meth:`end_round` updates the states and
    returns the upload.

    Args:
        net: A module that turns a batch of inputs into outputs, as logits [batch, classes].
            Parameters with requires_grad=False are frozen: all models share them, and no row
            contains them. Entirely frozen submodules stay in evaluation mode. If
            ``net.keep_features`` is true, the frozen submodules compute ``net.features(x)`` once
            for all samples. The features replace the inputs, so ``net.forward`` must accept them.
        optimizer: Builds the local optimizer from parameter groups, one dict with ``params`` and
            ``name`` for each trained model, in each round; SGD with learning rate 0.05 by default.
        lr_scheduler: Builds a learning-rate schedule from the optimizer; stepped once a round. A
            :class:`~pl_fed.optimizers.LocalSchedule` also changes the rate within a round.
        local_steps: Minibatch steps in a round; or give ``local_epochs``.
        local_epochs: Passes over the client's data in a round; 1 if neither is given.
        criterion: Turns outputs and targets into a mean loss: a module with ``reduction``, such as
            ``torch.nn.CrossEntropyLoss``, the default. It may differ from the mean of the sample
            losses that ``reduction="none"`` gives. pl_fed then calls it on whole minibatches,
            without padding, and runs clients with minibatches of several sizes one by one.
        models: The algorithm's models by name, in the order of their optimizer groups and metrics.
            ``"global"`` and ``"personal"`` always exist; list them to train or evaluate them.
            By default the global model is trained, as in FedAvg.
        task: The kind of learning problem, instead of ``criterion``: see :mod:`pl_fed.tasks`. By
            default the criterion and the data determine it: classification for class ids.

    Attributes:
        task: The kind of learning problem; from set-up on that of the data, if none was given.
        takes_integers: Whether the net accepts integer inputs; otherwise they are converted to
            floating-point numbers. Determined before training.
        reads_own_weights: Whether the net also reads its parameters from a list, an object or a
            function, and so its own in place of other ones. Determined before training.
        global_model: The model w, sent by the server at the start of a round.
        personal_model: The model v_k of the client; it shares the frozen parameters.
        models: The settings of all models, by name. The module of model ``"x"`` is ``x_model``.
        trained: Names of the models that ``training_step`` trains.
        evaluated: Names of the models that have metrics; the last one gives predictions.
        validated: Names of the models with a validation loss at the end of a round.
        objective: The objective of the local steps: ``training_step`` with the trained models.
        adaptation: Local training of personal models before each evaluation, from the global
            model; its results are discarded. ``None`` for algorithms without adaptation.
        preparation: Local training of models other than the global one in each round, after
            :meth:`begin` and before the local steps; ``None`` for algorithms without preparation.
            :meth:`end_preparation` follows. ``federation.systems`` does not count its steps.
        num_centers: The number of centers: see :meth:`add_centers`; 0 for one global model.
        measures_centers: Whether ``client.center_losses`` is measured.
        population: Sizes of the federation; set before :meth:`check`.
        local_schedule: The schedule over the local steps of a round; ``None`` without one. The
            trainer sets it.

    Raises:
        TypeError: If the net is no module, or a LightningModule with its own steps or hooks, or the
            optimizer or the schedule is not callable.
        ValueError: If the net has no trainable parameter, no model is trained, the local work is
            below 1, or the criterion's ``reduction`` is not ``"mean"``.

    Example:
        >>> class Proximal(Client):
        ...     def training_step(self, batch, batch_idx):
        ...         pull = 0.05 * self.squared_distance("global", to="broadcast")
        ...         return self.loss("global", batch) + pull
        >>> sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        >>> Proximal(nn.Linear(2, 2), optimizer=sgd, local_epochs=2).trained
        ('global',)
    """

    global_model: nn.Module
    personal_model: nn.Module

    mean_of: Literal["cohort", "clients"] = "cohort"
    """The definition of the global model: the mean of the cohort's uploads, or the mean of the
    rows that all clients keep. For ``"clients"`` an upload is the client's change of that mean
    (``upload_change``). An aggregator that weighs by samples is then refused. A server
    optimizer other than SGD with learning rate 1 gives a warning."""

    uploads_changes = False
    """For ``mean_of = "clients"``: whether uploads are changes of the mean even if all clients take
    part in each round. A broken upload then leaves the mean unchanged."""

    normalizer = ""
    """The name of a server state of one number. Clients propose the amount τ_k of their local work
    for it, and the server merges uploads times τ / τ_k, with the mean τ of the cohort, as FedNova.
    Empty for algorithms whose uploads are merged as they are."""

    weigher = ""
    """The name of a server state of one number. Clients propose the weight F_k ≥ 0 of their upload
    for it, and the server merges uploads times F_k / F, with the mean F of the cohort, as FedAS.
    Empty for algorithms without such weights."""

    weighted_states: tuple[str, ...] = ()
    """Names of server states whose mean weighs clients as the aggregator does, by samples or by
    weights of its own, as that of running statistics. Other states are means with equal
    weights."""

    needs_plain_step = False
    """Whether the server must only add the merged update: any other ``server_optimizer`` than SGD
    with learning rate 1 is refused."""

    needs_plain_mean = False
    """Whether the server must merge by the mean with equal weights, and only add it. Attacks that
    forge uploads are then refused."""

    single_batch_reason = ""
    """The reason for one minibatch in each optimizer step: ``trainer.accumulate_grad_batches`` is
    then refused. Empty if gradients may accumulate."""

    reads_rates = False
    """Whether ``training_step`` needs the learning rate of its own step: a schedule over local
    steps is then refused, because ``<model>.lr`` is the mean rate of a client's steps."""

    new_client_reason = ""
    """The reason for a missing own model of a client that never took part, also after local
    training: ``data.held_out_clients`` is then refused. Empty if it has one."""

    reads_class_counts = False
    """Whether the algorithm reads its clients' numbers of training samples by class, as
    ``client.class_counts`` and ``read("class_counts")``. Data without class ids are refused."""

    head: str | None = None
    """The name of the module that turns features into outputs: see :meth:`features_of`. ``None`` is
    the last module with trainable parameters."""

    reads_validation = False
    """Whether ``training_step`` reads the client's validation data, by ``validation_batch``."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=0.05),
        lr_scheduler: LRSchedulerCallable | None = None,
        local_steps: int | None = None,
        local_epochs: int | None = None,
        criterion: nn.Module | None = None,
        models: Mapping[str, Model] | None = None,
        task: Task | None = None,
    ) -> None:
        super().__init__()
        check_work(local_steps, local_epochs)
        check_builders(optimizer=optimizer, lr_scheduler=lr_scheduler)
        net = remove_compilation(net)
        check_net(net)
        build_layers(net)
        if "configure_optimizers" in list_hooks(net) and names_no_optimizer(optimizer):
            optimizer = ModuleOptimizer(net, schedules=lr_scheduler is None)
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.local_schedule: LocalSchedule | None = None
        self.local_work = LocalWork(local_steps, local_epochs or 1)
        self.draws = Draws()
        detach_attributes(net)
        trainable_parameters(net)  # raises if there are none
        key_dropouts(net, self.draws)
        count_as_numbers(net)
        mark_infinite_buffers(net)
        self.add_module("global_model", net)
        self.evaluation_parts = evaluation_parts(net) if has_training_step(net) else ()
        self._readable: Mapping[str, Any] = {}
        self.set_models({"global": Model()} if models is None else models)
        self.takes_integers = True
        self.reads_own_weights = False
        own_task = choose_net_task(net, criterion, task)
        self._task_is_open = task is None
        self._task_data: tuple[Any, ...] = ()
        self._set_task(own_task or Classification())
        self.adaptation: Objective | None = None
        self.preparation: Objective | None = None
        self.num_centers = 0
        self.measures_centers = False
        self.population = Population()

    def _set_task(self, task: Task) -> None:
        """Set the task, and register its modules in the client, so that they move with it."""
        self.task = task
        for name, module in vars(task).items():
            if isinstance(module, nn.Module):
                setattr(self, name if name.endswith("criterion") else f"task_{name}", module)

    def choose_task(self, targets: Tree, data_classes: int) -> None:
        """Determine the task from the criterion and the data, if none was given.

        Args:
            targets: All targets.
            data_classes: Number of classes, if each target is a class id; else 0.
        """
        if not self._task_is_open or not isinstance(self.task, CriterionTask):
            return
        # later tensors may get the id of one that is freed
        data = (data_classes, *((id(leaf), leaf.shape, leaf.dtype) for leaf in leaves(targets)))
        if self._task_data != data:
            self._task_data = data
            kind = find_task_class(self.task.criterion, targets, data_classes)
            if kind is not type(self.task):  # a new task copies the criterion, with its hooks
                self._set_task(kind(self.task.criterion))

    def count_classes(self, data: ClientData) -> int:
        """Return the number of classes; 0 if the task has none."""
        self.choose_task(data.targets, data.num_classes)
        return self.task.num_classes(data.num_classes)

    @property
    def averages_samples(self) -> bool:
        """Whether the loss of a batch is the mean of its sample losses."""
        return self.task.averages_samples

    @property
    def mixes_samples(self) -> bool:
        """Whether the net mixes the samples of a batch in evaluation mode, too."""
        return self.task.mixes_samples or mixes_samples(self.global_model)

    def _run_training_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Return the outputs of ``training_step``, with the logs of a LightningModule."""
        with one_process(), self.task.training_logs(batch_idx) as logs:
            outputs = self.training_step(batch, batch_idx)
        return self._add_logs(outputs, logs) if logs else outputs

    def _add_logs(
        self, outputs: Tensor | dict[str, Tensor], logs: Mapping[int, Mapping[str, Tensor]]
    ) -> Tensor | dict[str, Tensor]:
        """Add logged values to the outputs; with the model's name if several models log.

        A logged loss of the name ``loss`` is left out: it is part of the objective.
        """
        models = {id(self.model(name)): name for name in self.models}
        named = {
            f"{models[module]}/{name}" if len(logs) > 1 else name: value
            for module, values in logs.items()
            for name, value in values.items()
        }
        if not isinstance(outputs, dict):
            outputs = {"loss": outputs}
        loss = outputs.get("loss")
        if not isinstance(loss, Tensor):  # the engine refuses the outputs
            return outputs
        logged = {name: value.to(loss) for name, value in named.items() if name not in outputs}
        return {**outputs, **logged}

    # Declarations of an algorithm

    def set_models(self, models: Mapping[str, Model]) -> None:
        """Declare the models; they replace those declared before.

        An algorithm declares its models in ``super().__init__``. A subclass of another algorithm
        may replace them afterwards.

        Args:
            models: The models by name, in the order of optimizer groups and metrics.

        Raises:
            TypeError: If a value is no :class:`Model`.
            ValueError: If no model is trained, or a name is taken or no identifier.
        """
        for name, settings in models.items():
            self._check_name(name, "model", taken=(*self._states, *self._server_states))
            if not isinstance(settings, Model):
                raise TypeError(
                    f"Expected argument `models` of {type(self).__name__} to have a Model for each"
                    f" name but got {settings!r} for {name!r}: give pl_fed.clients.Model()."
                )
        unused = Model(trained=False, kept=False, evaluated=False)
        self.models = {**models}
        for name in ("global", "personal"):
            self.models.setdefault(name, unused)
        self.trained = tuple(name for name, model in models.items() if model.trained)
        self.evaluated = tuple(name for name, model in models.items() if model.evaluated)
        self.validated = tuple(name for name, model in models.items() if model.validated)
        if not self.trained:
            raise ValueError(
                f"Expected argument `models` of {type(self).__name__} to have a trained model but"
                f" got {', '.join(models) or 'none'}."
            )
        for name in self.models:
            if not hasattr(self, f"{name}_model"):
                if self.models[name] != unused:
                    check_copies(self.global_model)
                model = copy_trainable(self.global_model)
                key_dropouts(model, self.draws)
                self.add_module(f"{name}_model", model)
        trained = {
            name: replace(self.models[name], work=self.models[name].work or self.local_work)
            for name in self.trained
        }
        self.objective = Objective(self._run_training_step, trained, self.optimizer)

    def add_state(self, name: str, default: RowDefault, mean: str | None = None) -> None:
        """Declare a state: a row that each client keeps between rounds.

        ``training_step`` reads it by ``self.read(name)``. ``begin`` and ``end_round`` read and
        replace ``client.states[name]``.

        Args:
            name: The name of the state.
            default: The row of a new client: a number, a tensor [length], or a function that
                returns a tensor, such as :meth:`initial_row` and :meth:`zero_row`.
            mean: Name of a server state that is the mean of all clients' rows.

        Raises:
            ValueError: If a name is taken or no identifier.
        """
        self._check_name(name, "state", taken=self._taken_names)
        if mean is not None:
            self._check_name(mean, "server state", taken=(*self._taken_names, name))
            self._server_states[mean] = default
        self._states[name] = DeclaredState(default, mean)

    def add_server_state(self, name: str, default: RowDefault) -> None:
        """Declare a state of the server: a row that it keeps beside the global model.

        Clients read it, and may propose its next value (``ClientRound.proposals``). The server
        takes the mean of the proposals with any aggregator. Attacks on uploads do not change
        proposals.

        Args:
            name: The name of the state.
            default: The initial value: a number, a tensor [length], or a function that returns a
                tensor.

        Raises:
            ValueError: If the name is taken or no identifier.
        """
        self._check_name(name, "server state", taken=self._taken_names)
        self._server_states[name] = default

    def add_centers(
        self, count: int, rows: Callable[[], Tensor], needs_losses: bool = True
    ) -> None:
        """Declare centers: several global models; each client trains one of them in a round.

        ``begin`` reads ``client.center_losses`` and sets ``client.group``, the center of each
        client; :meth:`centers_of` returns the rows. The upload is a change of this center. The
        server merges the uploads of each center by an aggregator and an optimizer of its own, and
        attackers forge among the uploads of their center. The server state ``"centers"`` holds all.

        Args:
            count: The number of centers, at least 2.
            rows: Returns the initial centers, [centers, numel], from the initial global model.
            needs_losses: Whether ``client.center_losses`` is measured: a pass over each client's
                training data for each center, before a round and an evaluation.

        """
        check_integers(2, count=count)
        self.num_centers = count
        self.measures_centers = needs_losses
        self._draw_rows = rows
        self.add_server_state("centers", self._flatten_centers)

    def _flatten_centers(self) -> Tensor:
        """Return the initial centers as one row; a method, so that a copy has its own."""
        return self._draw_rows().flatten()

    def centers_of(self, client: ClientRound) -> Tensor:
        """Return the centers of the round, [centers, numel]."""
        return client.server_states["centers"].view(self.num_centers, -1)

    @property
    def _taken_names(self) -> tuple[str, ...]:
        return (*self.models, *self._states, *self._server_states)

    def _check_name(self, name: str, kind: str, taken: tuple[str, ...]) -> None:
        if not name.isidentifier():
            raise ValueError(f"Expected the name of a {kind} to be an identifier but got {name!r}.")
        if name in RESERVED_NAMES:
            raise ValueError(
                f"Expected the name of a {kind} to differ from the reserved names"
                f" {', '.join(RESERVED_NAMES)} but got {name!r}."
            )
        if name in taken:
            raise ValueError(
                f"Expected the name of a {kind} to differ from the names of other models and states"
                f" but got {name!r} twice."
            )

    def initial_row(self) -> Tensor:
        """Return the parameters of the global model before the first round, [numel]."""
        return self.row("global").data

    def zero_row(self) -> Tensor:
        """Return a row of zeros as long as a model, [numel]."""
        return torch.zeros_like(self.initial_row())

    @abstractmethod
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Return the objective of one local step, for ONE client.

        It must be a pure function of the models, the states and the batch, with no data-dependent
        Python branch and no ``.item()``: ``torch.vmap`` runs it for many clients at once.

        Args:
            batch: The client's minibatch; honour its mask (:meth:`loss` does).
            batch_idx: Index of the local step in the round, from 0.

        Returns:
            The loss; or a dict with ``loss`` and scalars that are averaged over the steps and the
            cohort and logged as ``train/<name>``.
        """

    def begin(self, client: ClientRound) -> None:
        """Prepare personal models and states, before a round and before an evaluation.

        By default a personal model begins at the row that the client keeps, or at the broadcast if
        the model is not kept. Override this method to begin elsewhere.

        Args:
            client: The round of several clients. Before an evaluation ``steps`` and ``lr`` are
                empty.
        """

    def end_preparation(self, client: ClientRound) -> None:
        """Use the models that ``preparation`` has trained, before the local steps of a round.

        Args:
            client: The round of several clients after :meth:`begin`, with the prepared models.
        """

    def end_round(self, client: ClientRound) -> Tensor | None:
        """Close the round: update the states and return the uploads.

        Args:
            client: The round of several clients, with the models after the local steps.

        Returns:
            The uploads [clients, numel]; the server merges them and adds the result to w^t. The
            default is w_k − w^t. An algorithm that sends models u_k with the next w as their mean
            returns u_k − w^t. An algorithm without uploads returns ``None``. Uploads, states and
            proposals must be dense floating-point tensors; otherwise the uploads are broken.
        """
        if "global" not in self.trained:
            return None
        return client.models["global"].parameters - client.broadcast.parameters

    # Further hooks; few algorithms need them

    def predict(self, model: str, batch: Batch) -> Tree:
        """Return the outputs of a client's own model for evaluations and predictions.

        By default those of the net. Override it if a client predicts by more than a net, such as
        its stored features; the task's loss, metrics and predictions then read these outputs, such
        as log-probabilities. Like ``training_step``, it sees ONE client, its models and its rows
        by :meth:`read`, after :meth:`begin` of the evaluation. The global model and the validation
        losses of ``end_round`` use the outputs of the net. ``export`` refuses clients' own models.

        Args:
            model: The name of an evaluated model other than ``"global"``.
            batch: Samples of the client, padded. Do not read the targets.
        """
        return self.outputs_of(model, batch)

    @property
    def predicts_by_net(self) -> bool:
        """Whether clients predict by their nets alone, without a :meth:`predict` of their own."""
        return type(self).predict is Client.predict

    def restore_net(self, net: nn.Module) -> None:
        """Remove from a copy of a model what the algorithm has added to the user's net.

        By default, algorithms add nothing. pl_fed calls it for models that leave it, as in exports.

        Args:
            net: A copy of a model, as it is evaluated; it changes in place.
        """

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse a federation that does not fit the algorithm, before training.

        Args:
            data: The clients' data.
            population: The numbers of clients and samples; also ``population``.

        Raises:
            ValueError: If the federation does not fit.
        """

    def receive(self, clients: Tensor, uploads: Tensor) -> dict[str, Tensor]:
        """Return changes of server states by uploads; they add to the mean of the proposals.

        The uploads include forged ones.

        Args:
            clients: Ids of the clients that sent the uploads, int64 [clients], of one process.
            uploads: The valid uploads, [clients, numel].

        Returns:
            The change of each affected server state, [length]; pl_fed sums it over processes.
        """
        return {}

    def update_body(self, server_states: Mapping[str, Tensor]) -> None:
        """Change what all models share, after the server has moved the global model or the centers.

        Args:
            server_states: The states of the server after the round, by name, [length] each.
        """

    # Tools for algorithms

    def loss(self, model: str, batch: Batch) -> Tensor:
        """Return the mean loss of a model over the samples of a batch that count.

        The loss of a LightningModule is that of its ``training_step``.
        """
        return self.task.loss(self.model(model), batch)

    def outputs_of(self, model: str, batch: Batch) -> Tree:
        """Return the outputs of a model on a batch."""
        return self.task.predict(self.model(model), batch.inputs)

    def features_of(
        self, model: str, batch: Batch, parameters: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return the features of a batch: the inputs of the model's head, [batch, features].

        It runs the model once; gradients flow through the features to its body.

        Args:
            model: The name of the model.
            batch: The client's minibatch.
            parameters: Replacements by name, as in :meth:`loss_at`; the model's own by default.

        Raises:
            ValueError: If the net does not return the outputs of its :attr:`head` for one tensor.
                The trial before training finds it.

        Example: the loss of the head alone, on features without a gradient. ::

            features = self.features_of("personal", batch).detach()
            return self.mean_loss(self.head_of("personal", features), batch)
        """
        module, head = self.model(model), self._head_name(model)
        net = self.net_at(model, parameters) if parameters else module
        return record_features(module, head, lambda: self.task.predict(net, batch.inputs))

    def head_of(
        self, model: str, features: Tensor, parameters: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return the outputs of a model's head for features, such as logits [batch, classes].

        Args:
            model: The name of the model.
            features: The features, [batch, features], as from :meth:`features_of`.
            parameters: Replacements by the names of the model; the model's own by default.
        """
        head = self._head_name(model)
        module, prefix = self.model(model).get_submodule(head), f"{head}." if head else ""
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in (parameters or {}).items()
            if name.startswith(prefix)
        }
        outputs: Tensor = (Net(module, tensors) if tensors else module)(features)
        return outputs

    def _head_name(self, model: str) -> str:
        return find_head(self.row(model).layout.names, self.head)

    def own_sums(
        self, client: ClientRound, function: SampleFunction, part: PartName = "train"
    ) -> Tensor:
        """Return the sum of a function over all of each client's own samples, [clients, ...].

        For :meth:`begin`, also before an evaluation, and :meth:`end_round`. The function sees a
        minibatch of ONE client, as ``training_step`` does: with the models of ``client.models``
        (and the broadcast as ``"global"``), and rows by :meth:`read`. Models are in evaluation mode
        without gradients, samples are not augmented or attacked, and each counts once. All engines
        give the same sums within rounding.

        Args:
            client: The round.
            function: Returns the sum over the samples of a minibatch that ``batch.mask``, bool
                [batch], selects: a tensor of a fixed shape. It must be pure, as ``training_step``.
            part: The part of the clients' data: ``"train"``, ``"val"`` or ``"test"``.

        Raises:
            ValueError: If the round has no data.

        Example: the sum of each client's features, [clients, features]. ::

            def sum_features(batch):
                features = self.features_of("personal", batch)
                return torch.where(batch.mask[:, None], features, 0).sum(0)

            sums = self.own_sums(client, sum_features)
        """
        visits = self._visit_samples(client, function, part)
        like: Tensor = visits[0].results
        sums = like.new_zeros(len(client), *like.shape[1:])
        for visit in visits:
            sums.index_add_(0, visit.positions, visit.results)
        return sums

    def own_values(
        self, client: ClientRound, function: SampleFunction, part: PartName = "train"
    ) -> Tensor:
        """Return a function's values for all of each client's own samples.

        It is :meth:`own_sums` without the sum: ``client.samples`` are the numbers of training
        samples, ``client.validation_samples`` those of validation samples.

        Args:
            client: The round.
            function: Returns a value for each sample of a minibatch, [batch, ...].
            part: The part of the clients' data.

        Returns:
            [clients, samples, ...], at least one sample, with zeros behind a client's last one.
        """
        visits = self._visit_samples(client, function, part)
        like: Tensor = visits[0].results
        length = max(visit.first + visit.mask.shape[1] for visit in visits)
        values = like.new_zeros(len(client), length, *like.shape[2:])
        for visit in visits:
            mask = visit.mask.view(*visit.mask.shape, *[1] * (like.dim() - 2))
            places = slice(visit.first, visit.first + visit.mask.shape[1])
            values[visit.positions, places] = torch.where(mask, visit.results, 0)
        return values

    def _visit_samples(
        self, client: ClientRound, function: SampleFunction, part: str
    ) -> list[Visit]:
        if client.visit_samples is None:
            raise ValueError(
                "Expected a round of a federation, or `visit_samples` in the ClientRound of a test,"
                " but got a round without data."
            )
        return list(client.visit_samples(client, function, part))

    @property
    def device(self) -> torch.device:
        """The device of the models. In ``setup``, Lightning's own property is ahead of them."""
        return self.row("global").example.device

    def place(self, tree: Tree) -> Tree:
        """Return inputs or targets on the models' device, real numbers in the models' dtype."""
        row = self.row("global").data
        return move_tree(tree, row.device, row.dtype)

    def net_at(self, model: str, tensors: Mapping[str, Tensor]) -> Net:
        """Return a model to be called with other parameters and buffers in place of its own.

        Args:
            model: The name of the model.
            tensors: Replacements by name; the model keeps its other tensors.

        Raises:
            ValueError: If the net reads its own parameters in place of the other ones. The trial
                before training finds it.
        """
        self.check_other_weights()
        return Net(self.model(model), dict(tensors))

    def check_other_weights(self) -> None:
        """Refuse a net that reads its own parameters in a call with other ones."""
        if self.reads_own_weights:
            raise ValueError(
                f"Expected argument `net` to be called with other weights by {type(self).__name__}"
                f" but {READS_OWN_WEIGHTS}: read them from the layers in each step, for example by"
                " `self.parameters()`."
            )

    def loss_at(self, model: str, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the mean loss of a model at other parameters, as a function of them.

        Args:
            model: The name of the model.
            parameters: Replacements by name, as from :meth:`parameters_of`; the model keeps its
                other parameters.
            batch: The client's minibatch.
        """
        return self.task.loss(self.net_at(model, parameters), batch)

    def gradient_at(
        self, model: str, parameters: Mapping[str, Tensor], batch: Batch
    ) -> dict[str, Tensor]:
        """Return the gradient of :meth:`loss_at`; it may be differentiated once more.

        Example: the loss after one step of gradient descent, differentiable in ``at``::

            at = self.parameters_of("global")
            gradient = self.gradient_at("global", at, batch)
            moved = {name: at[name] - 0.1 * gradient[name] for name in at}
            return self.loss_at("global", moved, batch)
        """
        with self.task.without_logs():  # the logs must not leave the gradient's transform
            gradient: dict[str, Tensor] = torch.func.grad(
                lambda at: self.loss_at(model, at, batch)
            )(dict(parameters))
        return gradient

    def mean_loss(self, outputs: Tree, batch: Batch) -> Tensor:
        """Return the mean loss of outputs over the samples of a batch that count."""
        return self.task.mean_loss(outputs, batch)

    def sample_losses(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the loss of each sample, shape [batch].

        Raises:
            ValueError: If the task has none.
        """
        return self.task.losses(outputs, targets)

    def sample_weights(self, targets: Tree) -> Tensor | None:
        """Return the weight of each sample's loss, [batch]; ``None`` without weights."""
        return self.task.weights(targets)

    def refuse_batch_criterion(self, reason: str) -> None:
        """Raise ``ValueError`` if the criterion is not the mean of sample losses.

        Args:
            reason: The reason that the algorithm needs sample losses.
        """
        if not self.averages_samples:
            raise ValueError(
                "Expected argument `criterion` to be the mean of the sample losses that"
                f' reduction="none" gives but got {self.task.name}, with a different'
                f" value on these data: {reason}."
            )

    def refuse_module_steps(self, reason: str) -> None:
        """Raise ``ValueError`` if the net is a LightningModule with a ``training_step``.

        Args:
            reason: The predicate of the sentence, such as "predicts by more than a net".
        """
        if self.task.runs_steps:
            raise ValueError(
                f"Expected a net without steps of its own for {type(self).__name__}, which"
                f" {reason}, but got {type(self.global_model).__name__}: set"
                " `model.init_args.net` to its module that returns outputs."
            )

    def squared_distance(self, model: str, to: str = "broadcast") -> Tensor:
        """Return the squared distance ‖model − centre‖² over the trainable parameters.

        Args:
            model: The name of a trained model.
            to: The name of the centre: ``"broadcast"``, w^t, or a row as long as the model: see
                :meth:`read`. The centre has no gradient.
        """
        row, centre = self.row(model), self._find_row(to)
        if isinstance(centre, Tensor):
            distance: Tensor = RowDistance.apply(  # type: ignore[no-untyped-call]
                row.data, centre, row.layout, *row.tensors.values()
            )
            return distance
        parameters = self.parameters_of(model)
        return squared_distance(list(parameters.values()), [centre[name] for name in parameters])

    def inner_product(self, model: str, other: str) -> Tensor:
        """Return the inner product ⟨model, row⟩ over the trainable parameters.

        Args:
            model: The name of a trained model.
            other: The name of a row as long as the model: see :meth:`read`.
        """
        row = self.tensors(other)
        parameters = self.parameters_of(model)
        products = [(parameters[name] * row[name]).sum() for name in parameters]
        return torch.stack(products).sum()

    def read(self, name: str) -> Tensor:
        """Return a row of the ONE client within ``training_step``; it has no gradient.

        Args:
            name: Name of a state, of a server state, or of a row that :meth:`begin` added to
                ``extra``; or ``"broadcast"``, ``"samples"``, ``"validation_samples"``,
                ``"client"`` (the id), ``"class_counts"``, ``"<model>.steps"``, ``"<model>.lr"``; or
                ``"broadcast.statistics"`` if the net has running statistics.

        Returns:
            Shape [length].

        Raises:
            ValueError: If no row has this name.
        """
        row = self._find_row(name)
        if isinstance(row, Tensor):
            return row
        return torch.cat([tensor.flatten() for tensor in row.values()])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return a row as long as a model, split into parameters, within ``training_step``.

        Args:
            name: The name of the row: see :meth:`read`.
        """
        row = self._find_row(name)
        return self.row("global").layout.views(row) if isinstance(row, Tensor) else dict(row)

    def _find_row(self, name: str) -> Any:
        """Return a row, or its tensors by name if an engine has split it into parameters."""
        if name not in self._readable:
            names = ", ".join(self._readable) or "none outside of a round"
            raise ValueError(
                f"Expected argument `name` to be a row of the round ({names}) but got {name!r}:"
                " declare a state by add_state, or add a row in begin to client.extra."
            )
        return self._readable[name]

    @contextmanager
    def reading(self, rows: Mapping[str, Any]) -> Iterator[None]:
        """Let ``training_step`` read these rows of ONE client within a ``with`` block."""
        before, self._readable = self._readable, rows
        try:
            yield
        finally:
            self._readable = before

    def validation_batch(self, batch: Batch) -> Batch:
        """Return all validation data of the client within ``training_step``; honour its mask.

        The data are neither attacked nor augmented. :attr:`reads_validation` must be true.

        Args:
            batch: A minibatch with samples of the same shape.
        """
        inputs = self._validation_tree("inputs", batch.inputs)
        targets = self._validation_tree("targets", batch.targets)
        places = torch.arange(count_samples(targets), device=batch.device)
        return Batch(inputs, targets, places < self.read("validation_samples")[0])

    def _validation_tree(self, name: str, like: Tree) -> Tree:
        """Return validation inputs or targets; the round has one row for each of their tensors."""
        names = iter(validation_rows(name, like))
        return tree_map(lambda t: self.read(next(names)).unflatten(0, (-1, *t.shape[1:])), like)

    @property
    def sends_uploads(self) -> bool:
        """Whether clients send anything to the server."""
        return "global" in self.trained or type(self).end_round is not Client.end_round

    @property
    def shared_numbers(self) -> int:
        """The number of values of the global model and its running statistics that are exchanged.

        Override it in an algorithm whose clients send a shorter row, or keep parts to themselves.
        """
        return len(self.row("global").data) + len(self.statistics("global").data)

    @property
    def sent_layout(self) -> RowLayout | None:
        """The layout of the part of an upload that crosses the network; by default the whole row.

        ``None`` if clients send a row of another form. Override it with :attr:`shared_numbers`.
        """
        return self.row("global").layout

    @property
    def project(self) -> Callable[[Tensor], Tensor] | None:
        """A function to the short rows that clients send in place of rows as long as the net.

        ``None`` if clients send parameters, as by default.
        """
        return None

    @property
    def unsent_positions(self) -> Tensor:
        """The positions of the parameters that clients keep to themselves, int64; none by default.

        Uploads are 0 there.
        """
        layout = self.row("global").layout
        sent = layout if self.sent_layout is None else self.sent_layout
        unsent = [name for name in layout.names if name not in sent.names]
        return layout.positions(*unsent) if unsent else torch.empty(0, dtype=torch.int64)

    def restrict_rows(self, rows: Tensor) -> Tensor:
        """Return rows as the server receives them: 0 at :attr:`unsent_positions`, by default.

        The server's own update and forged uploads are such rows, too. Override it in an algorithm
        whose uploads are rows of another form.

        Args:
            rows: Changes of the global model, [clients, numel].
        """
        unsent = to_device(self.unsent_positions, rows)
        return rows.index_fill(1, unsent, 0) if len(unsent) else rows

    @property
    def frozen_parameters(self) -> tuple[str, ...]:
        """Names of parameters that keep their first values in local steps; none by default."""
        return ()

    def frozen_values(
        self, server_states: Mapping[str, Tensor], class_counts: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the values of frozen parameters in local steps, if not the broadcast's, by name.

        By default all have the broadcast's values. Attackers that train, and the server of FLTrust,
        read them: they train the body of a net under the same head as clients.

        Args:
            server_states: The states of the server at the start of the round, by name.
            class_counts: Counts of the trainer's samples by class, [classes]; ``None`` unless
                :attr:`reads_class_counts` is set.
        """
        return {}

    @property
    def root_work(self) -> tuple[str, LocalWork]:
        """The trained model that gives the server's root update its optimizer, and its local work.

        By default the global model, or else the first trained one.
        """
        model = "global" if "global" in self.trained else self.trained[0]
        return model, self.objective.work(model)

    @property
    def upload_numbers(self) -> int:
        """The number of values that a client sends in a round: shared ones, and proposals."""
        return self._exchanged_numbers

    @property
    def exact_numbers(self) -> int:
        """The number of further values that a client sends in full beside a compressed upload; 0.

        Override it if the server reads them from the upload otherwise.
        """
        return 0

    @property
    def download_numbers(self) -> int:
        """The number of values that a client receives: shared ones, and states of the server."""
        return self._exchanged_numbers

    @property
    def _exchanged_numbers(self) -> int:
        if not self.sends_uploads:
            return 0
        states = sum(len(row) for row in self.server_state_defaults().values())
        return self.shared_numbers + states

    def upload_change(self, now: Tensor, before: Tensor, broadcast: Tensor) -> Tensor:
        """Return the uploads that make w the mean of the rows that all clients keep.

        If all clients take part in each round, an upload is the client's row minus w^t. Otherwise
        it is the change of the client's row times cohort / clients: the cohort's mean of these is
        the change of the mean over all clients. A forged change stays in w until the end.

        Args:
            now: The clients' new rows, [clients, numel].
            before: The clients' previous rows, [clients, numel].
            broadcast: w^t, [numel].
        """
        if self.population.is_full:
            return now - broadcast
        return self.population.share * (now - before)

    def parameters_of(self, model: str) -> dict[str, Tensor]:
        """Return a model's trainable parameters by name; under vmap, those of the ONE client."""
        parameters = dict(self.model(model).named_parameters())
        return {name: parameters[name] for name in self.row(model).layout.names}

    def refuse_mixed_options(self, reason: str, *options: str) -> None:
        """Raise ``ValueError`` if the optimizer of a LightningModule has groups that differ.

        Args:
            reason: The reason that the algorithm needs one value for all parameters.
            *options: Names of options, such as ``"lr"``.
        """
        parameters = list(self.row(self.trained[0]).tensors.values())
        groups = self.objective.optimizer(parameters).param_groups
        for option in options:
            values = [group.get(option) for group in groups]
            if any(value != values[0] for value in values):
                raise ValueError(
                    f"Expected a local optimizer with one `{option}` for all parameters, because"
                    f" {reason}, but got {', '.join(map(str, values))}: set `model.optimizer`."
                )

    def refuse_running_statistics(self, reason: str) -> None:
        """Raise ``ValueError`` if the net has running statistics (BatchNorm's, as a rule).

        A saved buffer of floating-point numbers counts as one: a step might change it.

        Args:
            reason: The reason that they do not fit the algorithm. Often the objective contains a
                gradient, as from :meth:`gradient_at`; its computation cannot update statistics.
        """
        if names := self.statistics("global").layout.names:
            raise ValueError(
                f"Expected argument `net` to have no running statistics but got {', '.join(names)},"
                f" and {reason}: use GroupNorm for BatchNorm, and {CONSTANT_BUFFER}."
            )
