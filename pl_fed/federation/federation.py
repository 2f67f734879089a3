"""The federation: its checked arguments, and the session that a trainer sets up from them."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from pl_fed.aggregators import Aggregator, Chain, Mean, PreAggregator
from pl_fed.arguments import (
    check_at_most,
    check_choice,
    check_instances,
    check_integers,
    check_shares,
)
from pl_fed.attacks.adversary import Adversary
from pl_fed.clients.base import Client
from pl_fed.clients.client_rounds import COMPRESSION
from pl_fed.compressors import Compressor
from pl_fed.configurable import Configurable
from pl_fed.data.client_data import ClientData
from pl_fed.data.module import FederatedData, global_seed
from pl_fed.distributed.work_share import gather_states, select_home_states
from pl_fed.engine import EngineChoice, EngineOptions
from pl_fed.evaluation.monitor import Tables
from pl_fed.evaluation.smoothing import Smoothing
from pl_fed.federation.set_up import SessionSetup
from pl_fed.functional.client_figures import read_figures
from pl_fed.metrics import ClientMetrics
from pl_fed.metrics.named import name_metrics
from pl_fed.privacy import DifferentialPrivacy
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.rounds.client_matching import ClientRecords, find_matching
from pl_fed.rounds.federated_evaluation import (
    ModelSelection,
    UntrainedModels,
)
from pl_fed.rounds.identity import (
    CHECKPOINT_FORMAT,
    check_identity,
    check_model_identity,
    check_optimizer_identity,
    federation_identity,
    has_identity,
    optimizer_identity,
)
from pl_fed.rounds.privacy import RoundPrivacy, load_privacy
from pl_fed.rounds.round import Report, RoundHooks
from pl_fed.rounds.server import Server
from pl_fed.rounds.session import Session
from pl_fed.rounds.settings import RunSettings
from pl_fed.rounds.small_cohorts import SmallCohortRule
from pl_fed.rounds.storage import StorageOptions
from pl_fed.samplers import Sampler, Uniform
from pl_fed.state import ClientStore
from pl_fed.systems import Systems
from pl_fed.tasks.directions import Directions


class Federation(Configurable):
    """Federation: everything around the clients, from the sampler to the server and the adversary.

    Args:
        sampler: Draws the cohort of a round.
        aggregator: Merges the uploads; the uniform mean by default.
        pre_aggregators: Change the uploads before the aggregator, one after the other.
        server_optimizer: Builds the optimizer that moves the global model. Its gradient is the
            negative merged update: SGD with learning rate 1 is FedAvg, other optimizers are FedOpt.
        adversary: The Byzantine clients and their attack.
        max_rejected: Largest share of broken clients among a round's benign clients, in [0, 1]; the
            run stops above it. A client is broken if its losses, models or upload hold NaN or
            infinity. It is also broken if its upload or a state has a wrong length, or is not a
            tensor of real numbers. Broken clients are left out; their states stay as before the
            round.
        small_cohort: Effect of a cohort that is too small for the aggregator, such as some of
            Poisson sampling, or a cohort without its broken uploads. ``"skip"`` makes no step,
            keeps all states, and counts the round under ``train/small_cohort``. ``"raise"`` ends
            the run. A round with privacy always makes its noisy step.
        on_client_error: Effect of an exception in the local work of a client, for example
            because a file of its data is broken. ``"raise"`` ends the run, with the client, the
            round and the step; ``"leave_out"`` counts the client as broken. With privacy it is
            always left out: the end of the run would tell that the client took part. A client that
            fails in the adaptation before an evaluation is evaluated without it.
        engine: Options of the engine, which runs the local steps.
        storage: Options for the clients' states between rounds.
        model_selection: The data that choose each client's ``hybrid`` model (FLAME, section IV):
            the better of its own model and the global model, by ``monitor`` and then by loss.
            ``"validation"`` takes the client's validation data. ``"test"`` takes its test data, as
            in the paper's experiments; this leaks the test data, so the metrics have the name
            ``hybrid_by_test_data``. ``None`` evaluates no hybrid model.
        monitor: The metric that chooses hybrid models, and that summaries show first:
            ``"accuracy"``, ``"loss"``, or a metric of the task. It also chooses λ (DittoChoice,
            MAPPER). ``None`` takes the accuracy, or the task's first metric, but the loss for λ.
        lower_is_better: Names or patterns (``*_kl``) of metrics with small values for good models.
            A metric of torchmetrics knows its direction. A logged number has one if it is named
            here or in ``higher_is_better``, or if the last word of its name is loss, error, nll,
            mse, rmse, mae, mape or perplexity (lower), or acc, accuracy, f1 or auroc (higher). A
            metric of unknown direction has no worst and best clients, and chooses no model.
        higher_is_better: Names or patterns of metrics with large values for good models.
        metrics: Further metrics, any of torchmetrics with one number as value. Each is computed
            for every client, and has the same statistics over clients as accuracy. A list names
            them by their classes: ``BinaryAUROC`` is ``binary_auroc``; a dict gives other names.
            They take what the task's own metrics take: probabilities for classification and
            multi-label classification, all numbers in one dimension for regression, else the
            outputs. Clients with an undefined value, such as the AUROC of one class, are left out
            and counted.
        untrained_models: The model that evaluations, predictions and exports use as the personal
            model of a client that never took part, and so has an untrained model of its own.
            ``"global"`` takes the global model. ``None`` takes the untrained model.
        evaluate_clients: Number (an int) or share (a float in (0, 1]) of the clients with
            validation data that validations evaluate, for federations with very many clients. They
            are drawn once: each validation of a run sees the same clients. Each mean over clients
            then has a standard error, such as ``val/global/accuracy_se``. Tests always evaluate all
            clients. ``None`` validates all clients.
        statistics: Further statistics over clients of accuracy, loss and each metric, in all
            metrics of a run: ``gini``, ``cv`` (coefficient of variation), ``entropy``,
            ``normalized_entropy``, ``kl``, ``angle``, ``gap`` (largest minus smallest client),
            ``worst<k>``, ``best<k>`` and ``q<k>`` (quantiles) with any percentage k. ``[gini,
            worst5]`` adds ``accuracy_gini``, ``loss_gini`` and so on. Those of shares are NaN if a
            client's value is negative, or all are 0.
        privacy: Client-level differential privacy of the global model; ``None`` for no privacy.
        initial_model: A file with the weights with which the global model begins: a checkpoint of
            Lightning, a state dict (``torch.save``), safetensors, or a checkpoint of pl_fed, of
            which it takes the global model. Personal models and states begin as for a new net with
            these weights. Names may differ by one prefix, as those of a LightningModule and of the
            net within it. A checkpoint that the trainer loads (``ckpt_path``) replaces them. With
            privacy, the file counts as public. ``None`` keeps the weights of ``model.net``.
        systems: The clients' speed, bandwidth and availability, with deadlines on a simulated
            clock; ``None`` for equal clients that always answer.
        compression: The codec of the uploads, forged ones included; the server receives what the
            codec carries. ``None`` sends them in full.
        seed: Seed of all draws; ``None`` takes Lightning's global seed, or 0.
        held_out_rounds: Number of local rounds, at least 1, in which a held-out client
            (``data.held_out_clients``) trains its personal model before an evaluation, if the
            algorithm does not adapt it by itself. It starts from the global model.
        match_clients: Whether a checkpoint of other clients or other samples may be loaded. Its
            clients are matched by the names of their owners. New clients start from the global
            model, and the states of missing ones stay in later checkpoints. ``False`` refuses such
            a checkpoint.
        smoothing: The noisy copies of the global model whose votes a test measures (CRFL), as a
            model named ``smoothed``; ``None`` for no votes.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument is out of range.

    Example:
        Ten clients per round, a median, and random labels at a fifth of the clients:

        >>> from pl_fed.aggregators import Median
        >>> from pl_fed.attacks import RandomLabels
        >>> from pl_fed.samplers import Uniform
        >>> adversary = Adversary(RandomLabels(), fraction=0.2)
        >>> federation = Federation(Uniform(cohort_size=10), Median(), adversary=adversary)
        >>> federation.adversary.fraction
        0.2
    """

    def __init__(
        self,
        sampler: Sampler | None = None,
        aggregator: Aggregator | None = None,
        pre_aggregators: list[PreAggregator] | None = None,
        server_optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=1.0),
        adversary: Adversary = Adversary(),
        max_rejected: float = 0.5,
        small_cohort: SmallCohortRule = "skip",
        on_client_error: Literal["raise", "leave_out"] = "raise",
        engine: EngineOptions = EngineOptions(),
        storage: StorageOptions = StorageOptions(),
        model_selection: ModelSelection = "validation",
        monitor: str | None = None,
        metrics: dict[str, Metric] | list[Metric] | None = None,
        lower_is_better: list[str] | None = None,
        higher_is_better: list[str] | None = None,
        untrained_models: UntrainedModels = None,
        evaluate_clients: int | float | None = None,
        privacy: DifferentialPrivacy | None = None,
        initial_model: str | Path | None = None,
        systems: Systems | None = None,
        compression: Compressor | None = None,
        seed: int | None = None,
        held_out_rounds: int = 1,
        match_clients: bool = False,
        statistics: list[str] | None = None,
        smoothing: Smoothing | None = None,
    ) -> None:
        pre_aggregators = pre_aggregators or []
        check_instances(Sampler, sampler=sampler)
        check_instances(Aggregator, aggregator=aggregator)
        check_instances(list, pre_aggregators=pre_aggregators)
        for pre_aggregator in pre_aggregators:
            check_instances(PreAggregator, pre_aggregators=pre_aggregator)
        _check_sections(adversary, engine, storage)
        check_shares(max_rejected=max_rejected)
        check_choice(("raise", "leave_out"), on_client_error=on_client_error)
        if seed is not None:
            check_integers(-(2**63), 2**63 - 1, seed=seed)
        check_integers(1, **{"federation.held_out_rounds": held_out_rounds})
        check_choice(("skip", "raise"), small_cohort=small_cohort)
        check_choice(("validation", "test", None), model_selection=model_selection)
        check_choice(("global", None), untrained_models=untrained_models)
        self.sampler = Uniform() if sampler is None else sampler
        defence: Aggregator = Mean() if aggregator is None else aggregator
        if pre_aggregators:
            defence = Chain(pre_aggregators, defence)
        self.server = Server(defence, server_optimizer)
        self.adversary = adversary
        self.byzantine_clients = ByzantineClients(adversary)
        self.max_rejected = max_rejected
        self.small_cohort = small_cohort
        self.held_out_rounds = held_out_rounds
        check_instances(bool, match_clients=match_clients)
        check_instances(Smoothing, smoothing=smoothing)
        self.smoothing = smoothing
        self.match_clients = match_clients
        self.on_client_error = on_client_error
        self.engine = engine
        self.engine_choice = EngineChoice(engine)
        self.storage = storage
        self.model_selection = model_selection
        self.untrained_models = untrained_models
        if evaluate_clients is not None:
            _check_evaluated(evaluate_clients)
        self.evaluate_clients = evaluate_clients
        check_instances(str, monitor=monitor)
        check_instances(DifferentialPrivacy, privacy=privacy)
        self.privacy = privacy
        self.initial_model = None if initial_model is None else Path(initial_model)
        check_instances(Systems, systems=systems)
        self.systems = systems
        check_instances(Compressor, compression=compression)
        self.compression = compression
        self.monitor = monitor
        for name, declared in (
            ("lower_is_better", lower_is_better),
            ("higher_is_better", higher_is_better),
        ):
            check_instances(list, **{name: declared})
            for pattern in declared or ():
                check_instances(str, **{name: pattern})
        self.directions = Directions(tuple(lower_is_better or ()), tuple(higher_is_better or ()))
        self.further_metrics = name_metrics(metrics)
        self.figures = read_figures(statistics)
        self.seed = global_seed() if seed is None else seed
        self._session: Session | None = None
        self._trains = False  # whether the session is that of a fit
        self._spent_privacy: RoundPrivacy | None = None  # of a replaced session

    def setup(
        self,
        client: Client,
        datamodule: Any,
        stage: str,
        loads: bool = False,
        settings: RunSettings = RunSettings(),
    ) -> None:
        """Check all parts against each other before training, and build the session.

        The states of clients and server stay if the client is the same object and the data have
        the same clients, also after the data are loaded again.

        Args:
            client: The algorithm.
            datamodule: The data.
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
            loads: Whether the trainer loads a checkpoint after the setup.
            settings: The trainer's settings.

        Raises:
            TypeError: If the data is not a :class:`~pl_fed.data.FederatedData`.
            ValueError: If cohort, Byzantine clients or the net's outputs do not fit the data; if
                the processes have different data; if ``keep_features`` is impossible; if an
                evaluation would run clients' own models on the data of other clients; or if another
                client or other data would begin the privacy budget again.
        """
        if not isinstance(datamodule, FederatedData):
            raise TypeError(
                "Expected argument `datamodule` to be a pl_fed.data.FederatedData but got"
                f" {type(datamodule).__name__}."
            )
        data, previous = datamodule.clients, self._session
        if previous is not None and not previous.states.belong_to(client, data, self.seed):
            if stage != "fit" and not loads:
                previous.states.check_replaceable(client)
            privacy = previous.rounds.privacy
            if privacy is not None and privacy.rounds:
                self._spent_privacy = privacy
            previous = None
        if stage == "fit" and not loads:
            self._check_budget(previous)
        replaces = previous is None and self._session is not None
        # the earlier session stays if this one is refused
        with self._keep_parts() if replaces else nullcontext():
            setup = SessionSetup(self, client, datamodule, settings, previous)
            self._session = setup.run(stage, loads)
        self._trains = stage == "fit"

    @contextmanager
    def _keep_parts(self) -> Iterator[None]:
        """Restore the server, the Byzantine clients and their attacks after an exception."""
        attacks = copy.deepcopy(self.byzantine_clients.state_dict())
        parts = [(part, dict(vars(part))) for part in (self.server, self.byzantine_clients)]
        try:
            yield
        except BaseException:
            for part, values in parts:
                vars(part).update(values)
            self.byzantine_clients.load_state_dict(attacks)
            raise

    def _check_budget(self, previous: Session | None) -> None:
        """Refuse a fit that would begin a spent budget again, with the noise of earlier rounds."""
        continued = None if previous is None else previous.rounds.privacy
        if continued is not None and continued.rounds and self.privacy is None:
            raise ValueError(
                "Expected `federation.privacy` to stay once rounds have spent budget but got None:"
                " further rounds would not be in the budget; restore it, or use a new Federation."
            )
        if self._spent_privacy is not None and self._spent_privacy is not continued:
            self._spent_privacy.check_nothing_spent()

    @property
    def session(self) -> Session:
        """The parts that a trainer sets up: client, data, states, rounds and evaluation.

        Raises:
            RuntimeError: If no trainer has set up the federation.
        """
        if self._session is None:
            raise RuntimeError("Expected the federation to be set up by a trainer but it was not.")
        return self._session

    def has_replaced(self, client: Client) -> bool:
        """Return whether the session is that of another algorithm."""
        return self._session is not None and self._session.client is not client

    # A round

    def run_round(
        self, round: int, optimizer: torch.optim.Optimizer, hooks: RoundHooks = RoundHooks()
    ) -> Report:
        """Run one communication round with ``pl_fed.rounds.round.RoundRunner.run``."""
        return self.session.rounds.run(round, optimizer, hooks)

    def budget_is_spent(self) -> bool:
        """Return whether another round would exceed the privacy budget."""
        privacy = self.session.rounds.privacy
        return privacy is not None and privacy.is_spent

    def privacy_statement(self) -> str | None:
        """Return the privacy guarantee of the rounds so far in words; ``None`` without privacy."""
        privacy = self.session.rounds.privacy
        return None if privacy is None or not privacy.rounds else privacy.statement()

    def noise_name(self) -> str | None:
        """Return a name that runs with equal noise and cohorts share; ``None`` without privacy."""
        privacy = self.session.rounds.privacy
        return None if privacy is None or not privacy.rounds else privacy.noise_name

    def draw_cohort(self, round: int) -> Tensor:
        """Return the ids of a round's cohort, int64 [cohort]."""
        return self.session.rounds.draw_cohort(round)

    # The session's parts that callbacks and users read most

    @property
    def client(self) -> Client:
        """The algorithm."""
        return self.session.client

    @property
    def data(self) -> ClientData:
        """The clients' data on the device of the models (``ClientStates.data``)."""
        return self.session.states.data

    @property
    def is_byzantine(self) -> Tensor:
        """The mask of the present round's Byzantine clients, bool [clients]."""
        return self.byzantine_clients.is_byzantine

    @property
    def participation(self) -> Tensor | None:
        """The number of rounds of each client, int32 [clients]; rounds as a broken client excluded.

        ``None`` after a checkpoint without these numbers.
        """
        return self.session.states.participation

    @property
    def server_states(self) -> dict[str, Tensor]:
        """The server's states besides the global model, by name."""
        return self.session.states.server_states

    @property
    def store(self) -> ClientStore:
        """The states that the clients keep between rounds."""
        return self.session.states.store

    def clients_without_training(self) -> Tensor:
        """Return the ids of the benign clients with an untrained model of their own.

        Such clients took part in no round, or were broken in all their rounds. There are none if
        each client's model is a center, or comes from the global model before an evaluation.
        """
        is_untrained = self.session.states.is_untrained
        return (is_untrained & ~self.byzantine_clients.is_byzantine).nonzero().flatten()

    # Evaluation

    def metrics(self, part: str) -> Mapping[str, ClientMetrics]:
        """Return the metrics of ``"val"`` or ``"test"``, by model.

        They hold the results of the last evaluation until the next one begins, also for each client
        (:meth:`~pl_fed.metrics.ClientMetrics.per_client`).
        """
        return self.session.evaluation.metrics(part)

    @property
    def monitored_metric(self) -> str:
        """The name of the metric that chooses models, from ``monitor`` or the task."""
        return self.session.evaluation.monitor.name

    def held_out_metrics(self, part: str) -> Mapping[str, ClientMetrics]:
        """Return the metrics of ``"val"`` or ``"test"`` over held-out clients, by model.

        Empty if all clients train.
        """
        held_out = self.session.held_out
        return {} if held_out is None else held_out.evaluation.metrics(part)

    def evaluate(self, part: str, clients: Tensor) -> None:
        """Add clients to the metrics of a part of the data, for each evaluated model.

        Args:
            part: ``"val"`` or ``"test"``.
            clients: Client ids, int64 [clients]; held-out clients have those after the last
                training client's.
        """
        clients, held_out = self._separate_held_out(clients)
        self.session.evaluation.evaluate(part, clients)
        if self.session.held_out is not None and len(held_out):
            self.session.held_out.evaluate(part, held_out)

    def evaluate_central(self, part: str) -> Mapping[str, Tensor]:
        """Return the metrics of the global model on the server's samples; empty without any."""
        central = self.session.central
        return {} if central is None else central.measure(part)

    def predict(self, clients: Tensor) -> list[dict[str, Any]]:
        """Return the predictions of each client's last evaluated model on its test data.

        Args:
            clients: Client ids, int64 [clients]; held-out clients have those after the last
                training client's.
        """
        ids = clients.tolist()
        clients, held_out = self._separate_held_out(clients)
        tables = self.session.evaluation.predict(clients)
        if self.session.held_out is None or not len(held_out):
            return tables
        for table in self.session.held_out.predict(held_out):
            client = table["client"] + self.session.states.loaded.num_clients
            tables.append({**table, "client": client})
        by_client = {table["client"]: table for table in tables}
        return [by_client[client] for client in ids]

    def measure(self, part: str, clients: Tensor, models: Sequence[str]) -> dict[str, Tables]:
        """Return the results of models on a part of the data, for each client.

        Args:
            part: ``"train"``, ``"val"`` or ``"test"``.
            clients: Client ids, int64 [clients]; held-out clients have those after the last
                training client's.
            models: The names of the models.

        Raises:
            ValueError: If another process keeps the model of a client.
        """
        if any(model != "global" for model in models):
            self._check_home(clients)
        training, held_out = self._separate_held_out(clients)
        evaluator = self.session.evaluation.evaluator
        tables = evaluator.tables(self.data, part, training, models)
        if self.session.held_out is None or not len(held_out):
            return tables
        added = self.session.held_out.measure(part, held_out, models)
        num_training = self.session.states.loaded.num_clients
        rows = {
            client: row
            for row, client in enumerate([*training.tolist(), *(held_out + num_training).tolist()])
        }
        order = torch.tensor([rows[client] for client in clients.tolist()])
        return {model: tables[model].join(added[model]).select(order) for model in models}

    def _separate_held_out(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of training clients, and numbers of held-out clients from 0."""
        if self.session.held_out is None:
            return clients, clients[:0]
        num_training = self.session.states.loaded.num_clients
        trains = clients < num_training
        return clients[trains], clients[~trains] - num_training

    def models_of(self, clients: Tensor, model: str | None = None) -> Iterator[nn.Module]:
        """Yield each client's model as in :meth:`predict`, for clients of this process.

        Args:
            clients: Ids, int64 [clients].
            model: The name of an evaluated model; ``None`` for the last one.

        Yields:
            A copy of the user's net, in evaluation mode, with the client's parameters and running
            statistics. It is independent of pl_fed.

        Raises:
            ValueError: If the algorithm evaluates no model of this name: its tensors may be those
                of the first round, as those of a global model that nobody trains. If clients
                predict by more than this net, as in kNN-Per. Or if another process keeps the model
                of a client, or all processes train that of a held-out one.
        """
        evaluated = self.client.evaluated
        if model is not None and model not in evaluated:
            raise ValueError(
                f"Expected argument `model` to be one of {', '.join(evaluated)} but got {model!r},"
                f" which {type(self.client).__name__} does not evaluate."
            )
        if (model or evaluated[-1]) != "global" and not self.client.predicts_by_net:
            raise ValueError(
                f"Expected argument `model` to be global for {type(self.client).__name__}, which"
                f" predicts by more than a net, but got {model or evaluated[-1]!r}: its clients'"
                " predictions are those of `trainer.predict`."
            )
        if model != "global":
            self._check_home(clients)
        evaluation, held_out = self.session.evaluation, self.session.held_out
        if held_out is None or not len(self._separate_held_out(clients)[1]):
            return evaluation.models_of(clients, model)
        num_training = self.session.states.loaded.num_clients
        return chain.from_iterable(
            evaluation.models_of(client, model)
            if client < num_training
            else held_out.models_of(client - num_training, model)
            for client in clients.split(1)
        )

    def _check_home(self, clients: Tensor) -> None:
        """Refuse clients whose models are in other processes: here they would be untrained.

        Models of held-out clients may need local training, which waits for all processes.

        Raises:
            ValueError: With the first of these clients.
        """
        states, held_out = self.session.states, self.session.held_out
        processes = states.processes
        training, new = self._separate_held_out(clients)
        remedy = "load the run in one process, by `pl_fed.load(<folder of the run>)`."
        if held_out is not None and held_out.trains and len(new) and processes.size > 1:
            raise ValueError(
                "Expected argument `client` to be a client that takes part in rounds but got"
                f" {int(new[0]) + states.loaded.num_clients}, a held-out client, whose model all"
                f" {processes.size} processes train together: {remedy}"
            )
        homes = processes.home_ranks(training)
        is_elsewhere = (homes != processes.rank) & states.keeps_models
        if is_elsewhere.any():
            first = int(is_elsewhere.nonzero()[0])
            raise ValueError(
                f"Expected argument `client` to be a client of process {processes.rank} of"
                f" {processes.size} but got {int(training[first])}, whose model is in process"
                f" {int(homes[first])}: ask that process, or {remedy}"
            )

    def model_of(self, client: int, model: str | None = None) -> nn.Module:
        """Return one client's model, as :meth:`models_of` yields it.

        Args:
            client: Id of the client.
            model: The name of an evaluated model; ``None`` for the last one.

        Raises:
            TypeError: If ``client`` is not an integer.
            ValueError: If ``client`` is not the id of a client, there is no such model, or another
                process keeps it.
        """
        check_integers(0, client=client)
        check_at_most(self.session.datamodule.num_evaluated - 1, client=client)
        return next(self.models_of(torch.tensor([client]), model))

    # Stop and resume

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resume, without the global model: the client's state holds it."""
        client, states = self.session.client, self.session.states
        privacy, systems = self.session.rounds.privacy, self.session.rounds.systems
        return {
            **({} if privacy is None else {"privacy": privacy.state_dict()}),
            **({} if systems is None else {"systems": {"seconds": systems.seconds}}),
            "format": CHECKPOINT_FORMAT,
            "identity": {
                **federation_identity(client, states.loaded, self.seed),
                **optimizer_identity(client),
            },
            "byzantine": self.byzantine_clients.is_byzantine,
            "engine": self.engine_choice.state_dict(),
            "participation": states.participation,
            "traffic": self.session.rounds.traffic.state_dict(),
            "clients": ClientRecords.collect(states.loaded).state_dict(),
            **({} if states.absent is None else {"absent": states.absent}),
            "store": gather_states(states.processes, states.store.state_dict()),
            "server": self.server.state_dict(client.row("global").data),
            "adversary": self.byzantine_clients.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        Raises:
            ValueError: If the state is of another net, algorithm or federation.
        """
        client, states = self.session.client, self.session.states
        state, new_clients = self._match(state)
        check_optimizer_identity(state["identity"], client)
        _check_memory(state["store"], client)
        load_privacy(self.session.rounds.privacy, state.get("privacy"))
        self.session.rounds.forget_cohorts()
        self._spent_privacy = None  # the checkpoint has the budget
        if systems := self.session.rounds.systems:
            systems.seconds = state.get("systems", {}).get("seconds", 0.0)
        if self.adversary.redraw and len(state["byzantine"]) == states.loaded.num_clients:
            self.byzantine_clients.is_byzantine = state["byzantine"]
        self.engine_choice.load_state_dict(state["engine"])
        self.server.load_state_dict(state["server"])
        self.byzantine_clients.load_state_dict(state["adversary"])
        self.session.rounds.traffic.load_state_dict(state.get("traffic"))
        rows = select_home_states(states.processes, state["store"])
        states.restore(rows, state.get("participation"), new_clients, state.get("absent"))

    def _match(self, state: Mapping[str, Any]) -> tuple[Mapping[str, Any], Tensor | None]:
        """Return a checkpoint's state for the clients of the data, and the ids of new clients.

        Raises:
            ValueError: If the state is of another algorithm or net; or of other clients or samples,
                and they may not be matched.
        """
        client, data = self.session.client, self.session.states.loaded
        identity = federation_identity(client, data, self.seed)
        if not self.match_clients or has_identity(state["identity"], identity):
            check_identity(state["identity"], identity)
            return state, None
        check_model_identity(state["identity"], identity)
        if self.privacy is not None:
            raise ValueError(
                "Expected a checkpoint of the same clients and samples with `federation.privacy`"
                " but got one of others: its budget is that of its clients; start a new run."
            )
        matching = find_matching(state, data)
        if self._trains:
            matching.check_aggregator(self.server.aggregator)
        state = matching.convert(state, client)
        rank_zero_info(matching.describe())
        if (warning := matching.warn_of_parts()) is not None:
            rank_zero_warn(warning)
        if (mode := self.session.datamodule.normalize) in ("channel", "feature"):
            rank_zero_warn(
                f"`data.normalize: {mode}` takes its statistics from the present clients, so the"
                " net gets other inputs than before: give a pair [mean, std] from the first run on."
            )
        if self.session.datamodule.skew is not None:
            rank_zero_warn(
                "`data.skew` depends on the numbers of the clients and of their samples, so that a"
                " client that is matched may get other inputs than before."
            )
        if self.byzantine_clients.is_byzantine.any():
            rank_zero_info("The Byzantine clients are drawn anew among the present clients.")
        return state, matching.new


def _check_sections(adversary: object, engine: object, storage: object) -> None:
    """Refuse a section of a wrong type; only Python code can set one, no config."""
    sections = {
        "adversary": (Adversary, adversary),
        "engine": (EngineOptions, engine),
        "storage": (StorageOptions, storage),
    }
    for name, (kind, section) in sections.items():
        if not isinstance(section, kind):
            raise TypeError(
                f"Expected argument `federation.{name}` to be of type {kind.__name__} but got"
                f" {section!r}: give pl_fed.{kind.__name__}(...), or leave it out."
            )


def _check_memory(saved: Mapping[str, Any], client: Client) -> None:
    """Refuse a checkpoint with other rows of clients for the codec of uploads.

    Args:
        saved: The clients' states of the checkpoint.
        client: The algorithm.
    """
    lengths = {name: len(row) for name, row in client.compression_defaults.items()}
    got = {
        name: len(states["default"])
        for name, states in saved.items()
        if name.startswith(COMPRESSION)
    }
    if got != lengths:
        raise ValueError(
            "Expected a checkpoint of a run whose clients keep"
            f" {', '.join(lengths) or 'no memory of compression'} but got one with"
            f" {', '.join(got) or 'none'}: set `federation.compression` as in its run."
        )


def _check_evaluated(evaluate_clients: object) -> None:
    """Refuse anything but a number of clients or a share of them."""
    is_number = isinstance(evaluate_clients, int | float) and not isinstance(evaluate_clients, bool)
    if not is_number:
        raise TypeError(
            "Expected argument `federation.evaluate_clients` to be a number or share of clients but"
            f" got {evaluate_clients!r}."
        )
    if isinstance(evaluate_clients, int):
        check_integers(1, **{"federation.evaluate_clients": evaluate_clients})
    elif isinstance(evaluate_clients, float) and not 0 < evaluate_clients <= 1:
        raise ValueError(
            "Expected argument `federation.evaluate_clients` to be an integer, or a share in (0,"
            f" 1], but got {evaluate_clients}: set a number of clients, for example `1000`."
        )
