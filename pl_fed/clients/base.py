"""The base of every algorithm: a client, with its global and its personal models."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from pl_fed.arguments import check_instances
from pl_fed.clients.argument_checks import check_builders, check_net, check_work
from pl_fed.clients.client_rounds import ClientRounds, DeclaredState
from pl_fed.clients.contract import (
    RESERVED_NAMES,
    ClientRound,
    Model,
    Objective,
    RowDefault,
    validation_rows,
)
from pl_fed.configurable import Configurable
from pl_fed.data.batches import LocalWork
from pl_fed.data.client_data import ClientData, move_tree
from pl_fed.functional.losses import RowDistance, squared_distance
from pl_fed.nets.calls import Net
from pl_fed.nets.dropout import Draws, key_dropouts
from pl_fed.nets.rows import (
    copy_trainable,
    trainable_parameters,
)
from pl_fed.tasks import Classification, CriterionTask, Task, choose_task
from pl_fed.trees import Tree, leaves, rows_of, tree_map
from pl_fed.types import Batch, Population


class Client(Configurable, ClientRounds, ABC):
    """One client: a global and a personal model, and the objective that trains them.

    A new algorithm is a subclass in one file. It declares its models in ``super().__init__``, its
    states by :meth:`add_state`, and defines :meth:`training_step`.

    A round of a client: :meth:`begin` prepares its models from the broadcast and from what the
    client keeps; :meth:`training_step` and the optimizer train them; :meth:`end_round` updates the
    states and returns the upload.

    Args:
        net: A module that turns a batch of inputs into outputs, as logits [batch, classes].
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
        task: The kind of learning problem, in place of ``criterion``: see :mod:`pl_fed.tasks`.
            By default it is told by the criterion and the data: classification where the targets
            are class ids.
        models: The algorithm's models by name, in the order of their optimizer groups and metrics.
            ``"global"`` and ``"personal"`` exist in any case; here they are trained or evaluated.
            By default the global model is trained, as in FedAvg.

    Attributes:
        task: The kind of learning problem; told by the data from set-up on, if none is given.
        takes_integers: Whether the net takes integer inputs as they are; else they become
            floating-point numbers. Found out before training.
        global_model: The model w, given by the server at the start of a round.
        personal_model: The model v_k that the client keeps; it shares what is frozen.
        models: All models, by name. The module of model ``"x"`` is ``x_model``.
        trained: Names of the models that ``training_step`` trains.
        evaluated: Names of the models that have metrics; the last one gives predictions.
        validated: Names of the models whose validation losses close a round.
        adaptation: Local training of personal models before each evaluation, from the global
            model; its results are not kept. ``None`` for algorithms without.
        population: Sizes of the federation; known from :meth:`check` on.

    Raises:
        TypeError: If the net is no module, or a LightningModule that has steps or hooks of its own,
            or the optimizer or the schedule cannot be called.
        ValueError: If the net has no trainable parameter, no model is trained, the local work is
            below 1, or the criterion's ``reduction`` is not ``"mean"``.
    """

    global_model: nn.Module
    personal_model: nn.Module

    mean_of: Literal["cohort", "clients"] = "cohort"
    """Whose mean the global model is: of the cohort's uploads, or of what all clients keep. For
    ``"clients"`` an upload says how much the client moves that mean (:meth:`upload_change`); an
    aggregator that counts samples is refused, and of any server optimizer but SGD with learning
    rate 1 there is a warning."""

    uploads_changes = False
    """For ``mean_of = "clients"``: whether uploads are changes of the mean also where all clients
    take part in each round. A broken upload then leaves the mean as it was."""

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
        models: Mapping[str, Model] | None = None,
        task: Task | None = None,
    ) -> None:
        super().__init__()
        check_work(local_steps, local_epochs)
        check_builders(optimizer=optimizer, lr_scheduler=lr_scheduler)
        check_net(net)
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.local_work = LocalWork(local_steps, local_epochs or 1)
        self.draws = Draws()
        trainable_parameters(net)  # raises if there is none
        key_dropouts(net, self.draws)
        self.add_module("global_model", net)
        self._readable: Mapping[str, Any] = {}
        self.set_models({"global": Model()} if models is None else models)
        check_instances(Task, task=task)
        if task is not None and criterion is not None:
            raise ValueError(
                "Expected only one of `task` and `criterion` but got both: give the criterion to"
                f" the task, as {type(task).__name__}(criterion=...)."
            )
        self.takes_integers = True
        self._task_is_open = task is None
        self._task_told_by: tuple[int, ...] = ()
        if task is None:
            task = Classification() if criterion is None else CriterionTask(criterion)
        self._set_task(task)
        self.adaptation: Objective | None = None
        self.population = Population()

    def _set_task(self, task: Task) -> None:
        """Take a task, whose modules belong to the client from now on: they move with it."""
        self.task = task
        for name, module in vars(task).items():
            if isinstance(module, nn.Module):
                setattr(self, name if name.endswith("criterion") else f"task_{name}", module)

    def choose_task(self, targets: Tree, data_classes: int) -> None:
        """Take the task that criterion and data tell, if none was given.

        Args:
            targets: All targets.
            data_classes: Number of classes, if each target is a class id; else 0.
        """
        if not self._task_is_open or not isinstance(self.task, CriterionTask):
            return
        data = (data_classes, *map(id, leaves(targets)))
        if self._task_told_by != data:
            self._task_told_by = data
            task = choose_task(self.task.criterion, targets, data_classes)
            if type(task) is not type(self.task):
                self._set_task(task)

    def classes_of(self, data: ClientData) -> int:
        """Return of how many classes each sample has one; 0 if the task has none."""
        self.choose_task(data.targets, data.num_classes)
        return self.task.num_classes(data.num_classes)

    @property
    def averages_samples(self) -> bool:
        """Whether the loss of a batch is the mean of one loss for each sample."""
        return self.task.averages_samples

    # What an algorithm declares

    def set_models(self, models: Mapping[str, Model]) -> None:
        """Declare the models, in place of those declared before.

        An algorithm declares its models in ``super().__init__``; one that derives from another
        algorithm may declare others afterwards.

        Args:
            models: By name; the order is that of optimizer groups and metrics.

        Raises:
            ValueError: If no model is trained, or a name is taken or no identifier.
        """
        for name in models:
            self._check_name(name, "model", taken=(*self._states, *self._server_states))
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
                model = copy_trainable(self.global_model)
                key_dropouts(model, self.draws)
                self.add_module(f"{name}_model", model)
        trained = {
            name: replace(self.models[name], work=self.models[name].work or self.local_work)
            for name in self.trained
        }
        self._objective = Objective(self._run_training_step, trained, self.optimizer)

    def add_state(self, name: str, default: RowDefault, mean: str | None = None) -> None:
        """Declare a state: a row that each client keeps between rounds.

        It is read as ``self.read(name)`` in ``training_step``, and read and replaced as
        ``client.states[name]`` in ``begin`` and ``end_round``.

        Args:
            name: Its name.
            default: The row of a new client: a number, a tensor [length], or a function that
                returns a tensor, as :meth:`initial_row` and :meth:`zero_row`.
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

        Clients read it, and may propose what it becomes (:attr:`ClientRound.proposals`). The server
        takes the mean of the proposals, whatever the aggregator is; attacks on uploads do not
        change proposals.

        Args:
            name: Its name.
            default: Its first value: see :meth:`add_state`.

        Raises:
            ValueError: If the name is taken or no identifier.
        """
        self._check_name(name, "server state", taken=self._taken_names)
        self._server_states[name] = default

    @property
    def _taken_names(self) -> tuple[str, ...]:
        return (*self.models, *self._states, *self._server_states)

    def _check_name(self, name: str, kind: str, taken: tuple[str, ...]) -> None:
        if not name.isidentifier():
            raise ValueError(f"Expected the name of a {kind} to be an identifier but got {name!r}.")
        if name in RESERVED_NAMES:
            raise ValueError(
                f"Expected the name of a {kind} not to be one of {', '.join(RESERVED_NAMES)},"
                f" which every round has, but got {name!r}."
            )
        if name in taken:
            raise ValueError(
                f"Expected the name of a {kind} to differ from those of other models and states"
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
        Python branch and no ``.item()``: it is also run for many clients at once by ``torch.vmap``.

        Args:
            batch: The client's minibatch; honour its mask (:meth:`loss` does).
            batch_idx: Which of the round's local steps this is, from 0.

        Returns:
            The loss; or a dict with ``loss`` and scalars that are averaged over the steps and the
            cohort and logged as ``train/<name>``.
        """

    def begin(self, client: ClientRound) -> None:
        """Prepare personal models and states, before a round and before an evaluation.

        A personal model begins at the row that the client keeps of it, or at the broadcast if none
        is kept. Whatever is to begin elsewhere is written here.

        Args:
            client: Some clients' round. Before an evaluation its ``steps`` and ``lr`` are empty.
        """

    def end_round(self, client: ClientRound) -> Tensor | None:
        """Close the round: update the states and return the uploads.

        Args:
            client: Some clients' round, with the models as the local steps left them.

        Returns:
            The uploads [clients, numel], which the server merges and adds to w^t: by default
            w_k − w^t. An algorithm that sends models u_k, whose mean is the next w, returns
            u_k − w^t. ``None`` if nothing is sent. Uploads, states and proposals are dense
            floating-point tensors; with anything else the clients count as broken.
        """
        if "global" not in self.trained:
            return None
        return client.models["global"].parameters - client.broadcast.parameters

    # Further hooks, which few algorithms need

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse a federation that the algorithm does not fit, before anything is trained.

        Args:
            data: The clients' data.
            population: How many clients and samples there are; also :attr:`population`.

        Raises:
            ValueError: If the federation does not fit.
        """

    def receive(self, clients: Tensor, uploads: Tensor) -> dict[str, Tensor]:
        """Return how uploads change the server's states, beside what was proposed.

        Uploads are as the server got them, so that forged ones count here, too.

        Args:
            clients: The clients that sent them, int64 [clients]; those of one process.
            uploads: Their valid uploads, [clients, numel].

        Returns:
            For some server states the change that is added, [length]: it is summed over processes.
        """
        return {}

    # What an algorithm builds on

    def loss(self, model: str, batch: Batch) -> Tensor:
        """Return the mean loss of a model over the samples of a batch that count."""
        return self.task.loss(self.model(model), batch)

    def outputs_of(self, model: str, batch: Batch) -> Tree:
        """Return what a model makes of a batch."""
        return self.task.predict(self.model(model), batch.inputs)

    def place(self, tree: Tree) -> Tree:
        """Return inputs or targets where the models are, real numbers in their precision."""
        row = self.row("global").data
        return move_tree(tree, row.device, row.dtype)

    def loss_at(self, model: str, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the mean loss of a model whose parameters are replaced, as a function of them.

        Args:
            model: The model.
            parameters: By name, as :meth:`parameters_of` gives them; others stay the model's own.
            batch: See :meth:`training_step`.
        """
        return self.task.loss(Net(self.model(model), dict(parameters)), batch)

    def gradient_at(
        self, model: str, parameters: Mapping[str, Tensor], batch: Batch
    ) -> dict[str, Tensor]:
        """Return the gradient of :meth:`loss_at`, which may be differentiated once more.

        Example: the loss after one step of gradient descent, differentiable in ``at``::

            at = self.parameters_of("global")
            gradient = self.gradient_at("global", at, batch)
            moved = {name: at[name] - 0.1 * gradient[name] for name in at}
            return self.loss_at("global", moved, batch)
        """
        gradient: dict[str, Tensor] = torch.func.grad(lambda at: self.loss_at(model, at, batch))(
            dict(parameters)
        )
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
        """Return the weight that each sample's loss carries, [batch]; ``None`` if it has none."""
        return self.task.weights(targets)

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

    def squared_distance(self, model: str, to: str = "broadcast") -> Tensor:
        """Return the squared distance ‖model − centre‖² over the trainable parameters.

        Args:
            model: The name of a trained model.
            to: The centre: ``"broadcast"``, the w^t that the round began with, or a row as long as
                the model, by its name: see :meth:`read`. It does not move with the model.
        """
        row, centre = self.row(model), self._find(to)
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
        """Return, within ``training_step``, a row of the ONE client; it does not move.

        Args:
            name: Name of a state, of a server state, or of a row that :meth:`begin` added to
                ``extra``; or ``"broadcast"``, ``"samples"``, ``"validation_samples"``,
                ``"client"`` (the id), ``"<model>.steps"``, ``"<model>.lr"``; or
                ``"broadcast.statistics"`` where the net has running statistics.

        Returns:
            Shape [length].

        Raises:
            ValueError: If there is no such row.
        """
        row = self._find(name)
        if isinstance(row, Tensor):
            return row
        return torch.cat([tensor.flatten() for tensor in row.values()])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return, within ``training_step``, a row as long as a model, cut into its parameters.

        Args:
            name: See :meth:`read`.
        """
        row = self._find(name)
        return self.row("global").layout.views(row) if isinstance(row, Tensor) else dict(row)

    def _find(self, name: str) -> Any:
        """Return a row, or its tensors by name where an engine has cut it into parameters."""
        if name not in self._readable:
            names = ", ".join(self._readable) or "none outside of a round"
            raise ValueError(
                f"Expected argument `name` to be a row that a round has ({names}) but got"
                f" {name!r}: declare a state by add_state, or add a row in begin to client.extra."
            )
        return self._readable[name]

    @contextmanager
    def reading(self, rows: Mapping[str, Any]) -> Iterator[None]:
        """Let ``training_step`` read these rows of ONE client, within a ``with`` statement."""
        before, self._readable = self._readable, rows
        try:
            yield
        finally:
            self._readable = before

    def validation_batch(self, batch: Batch) -> Batch:
        """Return, within ``training_step``, all validation data of the client: see its mask.

        It is not attacked and not augmented. :attr:`reads_validation` must be true.

        Args:
            batch: A minibatch, whose samples have the same shape.
        """
        inputs = self._validation_tree("inputs", batch.inputs)
        targets = self._validation_tree("targets", batch.targets)
        places = torch.arange(rows_of(targets), device=batch.device)
        return Batch(inputs, targets, places < self.read("validation_samples")[0])

    def _validation_tree(self, name: str, like: Tree) -> Tree:
        """Return validation inputs or targets, of which a round has a row for each tensor."""
        names = iter(validation_rows(name, like))
        return tree_map(lambda t: self.read(next(names)).unflatten(0, (-1, *t.shape[1:])), like)

    def upload_change(self, now: Tensor, before: Tensor, broadcast: Tensor) -> Tensor:
        """Return the uploads by which w becomes the mean of what all clients keep.

        If all clients take part in each round, an upload is the client's row less w^t. Else it is
        the change of the client's row, times cohort / clients: its mean over the cohort is the
        change of the mean over all clients. A forged change stays in w until the end.

        Args:
            now: What the clients keep from now on, [clients, numel].
            before: What they kept until now, [clients, numel].
            broadcast: w^t, [numel].
        """
        if self.population.cohort == self.population.clients:
            return now - broadcast
        return self.population.share * (now - before)

    def parameters_of(self, model: str) -> dict[str, Tensor]:
        """Return a model's trainable parameters by name: under vmap, those of the ONE client."""
        parameters = dict(self.model(model).named_parameters())
        return {name: parameters[name] for name in self.row(model).layout.names}

    def refuse_running_statistics(self, reason: str) -> None:
        """Raise ``ValueError`` if the net has running statistics (BatchNorm's, as a rule).

        Args:
            reason: Why they do not fit the algorithm: as a rule it takes a gradient within the
                objective, as :meth:`gradient_at` does, which cannot change them.
        """
        if self.statistics("global").layout.numel:
            names = ", ".join(self.statistics("global").layout.names)
            raise ValueError(
                f"Expected argument `net` to have no running statistics but got {names}: {reason}."
            )
