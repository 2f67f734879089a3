"""The federation: its arguments, checked, and what a trainer sets up by them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from pl_fed.aggregators import Aggregator, Chain, Mean, PreAggregator
from pl_fed.arguments import (
    check_at_most,
    check_instances,
    check_integers,
    check_shares,
)
from pl_fed.clients.base import Client
from pl_fed.configurable import Configurable
from pl_fed.data.batches import BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.data.module import FederatedData, global_seed
from pl_fed.distributed.processes import Processes
from pl_fed.distributed.work_share import gather_states, select_home_states
from pl_fed.engine import EngineChoice, EngineOptions
from pl_fed.evaluation.adaptation import Adaptation
from pl_fed.evaluation.evaluator import Evaluator
from pl_fed.evaluation.monitor import Monitor
from pl_fed.metrics import ClientMetrics
from pl_fed.rounds.adversary import Adversary
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.rounds.checks import (
    check_aggregator,
    check_attacks,
    check_engine,
    check_features,
    check_mean,
    check_net,
    try_attacks,
)
from pl_fed.rounds.client_states import ClientStates
from pl_fed.rounds.federated_evaluation import FederatedEvaluation, ModelSelection
from pl_fed.rounds.identity import CHECKPOINT_FORMAT, check_identity, federation_identity
from pl_fed.rounds.round import Report, RoundHooks, RoundRunner
from pl_fed.rounds.server import Server
from pl_fed.rounds.session import Session
from pl_fed.rounds.settings import RunSettings
from pl_fed.rounds.storage import StorageOptions
from pl_fed.rounds.trial import try_client
from pl_fed.samplers import Sampler, Uniform
from pl_fed.state import ClientStore
from pl_fed.types import Population


class Federation(Configurable):
    """Everything around the clients.

    Args:
        sampler: Draws the cohort of a round.
        aggregator: Merges the uploads.
        pre_aggregators: Change the uploads before that, one after the other.
        server_optimizer: Builds the optimizer that moves the global model along the merged update,
            taken for a negative gradient: SGD with learning rate 1 is FedAvg, others are FedOpt.
        adversary: The Byzantine clients and their attack.
        max_rejected: The largest share of a round's benign clients, in [0, 1], that may be left out
            as broken (NaN or infinity in losses, models or uploads; an upload or a state of a wrong
            length, or that is no tensor of real numbers) before the run stops. The states of such
            clients stay as before the round.
        engine: How the local steps are run.
        storage: Where the clients' states are kept between rounds.
        model_selection: By what data each client takes the better one of its own model and the
            global one, by ``monitor`` and then by loss, the ``hybrid`` model (FLAME, section IV):
            its ``"validation"`` data, or, as in the paper's experiments, its ``"test"`` data, which
            tells more than can be known and gives metrics of the name ``hybrid_by_test_data``;
            ``None`` for neither.
        monitor: The metric that chooses hybrid models, and that summaries show first:
            ``"accuracy"``, ``"loss"``, or a metric of the task. It chooses λ too (DittoChoice,
            MAPPER). ``None`` is the accuracy, or the task's first metric, and λ by the loss.
        seed: Seed of all draws; ``None`` takes Lightning's global seed, or 0.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        sampler: Sampler | None = None,
        aggregator: Aggregator | None = None,
        pre_aggregators: list[PreAggregator] | None = None,
        server_optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=1.0),
        adversary: Adversary = Adversary(),
        max_rejected: float = 0.5,
        engine: EngineOptions = EngineOptions(),
        storage: StorageOptions = StorageOptions(),
        model_selection: ModelSelection = "validation",
        monitor: str | None = None,
        seed: int | None = None,
    ) -> None:
        before = pre_aggregators or []
        check_instances(Sampler, sampler=sampler)
        check_instances(Aggregator, aggregator=aggregator)
        check_instances(list, pre_aggregators=before)
        for each in before:
            check_instances(PreAggregator, pre_aggregators=each)
        _check_sections(adversary, engine, storage)
        check_shares(max_rejected=max_rejected)
        if seed is not None:
            check_integers(-(2**63), 2**63 - 1, seed=seed)
        if model_selection not in ("validation", "test", None):
            raise ValueError(
                'Expected argument `model_selection` to be "validation", "test" or None but got'
                f" {model_selection!r}."
            )
        self.sampler = Uniform() if sampler is None else sampler
        defence = Mean() if aggregator is None else aggregator
        self.server = Server(_defence(before, defence), server_optimizer)
        self.adversary = adversary
        self.byzantine_clients = ByzantineClients(adversary)
        self.max_rejected = max_rejected
        self.engine = engine
        self.engine_choice = EngineChoice(engine)
        self.storage = storage
        self.model_selection = model_selection
        check_instances(str, monitor=monitor)
        self.monitor = monitor
        self.seed = global_seed() if seed is None else seed
        self._session: Session | None = None

    def setup(
        self,
        client: Client,
        datamodule: Any,
        stage: str,
        loads: bool = False,
        settings: RunSettings = RunSettings(),
    ) -> None:
        """Check that everything fits together, before anything is trained.

        The states of clients and server stay as long as the client is the same object, and the
        data have the same clients, if loaded once more.

        Args:
            client: The algorithm.
            datamodule: The data.
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
            loads: Whether a checkpoint will be loaded then.
            settings: The trainer's settings.

        Raises:
            TypeError: If the data is not a :class:`FederatedData`.
            ValueError: If cohort, byzantine clients or the net's output do not fit the data,
                features are to be kept that cannot be, or clients that have models of their own
                are to be evaluated on others' data.
        """
        if not isinstance(datamodule, FederatedData):
            raise TypeError(
                "Expected argument `datamodule` to be a pl_fed.data.FederatedData but got"
                f" {type(datamodule).__name__}."
            )
        data, before = datamodule.clients, self._session
        if before is not None and not before.states.belong_to(client, data, self.seed):
            if stage != "fit" and not loads:
                before.states.check_replaceable(client)
            before = None
        if before is None:
            self.byzantine_clients.setup(data.num_clients, data.num_classes, self.seed)
        cohort = self.sampler.size_of_cohort(data.num_clients)
        client.population = Population(data.num_clients, cohort, int(data.train.sizes.sum()))
        self._check(client, datamodule)
        session = self._build_session(client, datamodule, settings, before)
        if stage == "fit":
            self._try_parts(session)
        client.check(data, client.population)
        if stage == "fit":
            with settings.autocast():
                try_client(client, data, datamodule.augment)
        self._session = session

    def _check(self, client: Client, datamodule: FederatedData) -> None:
        """Refuse an algorithm, data, attacks and aggregators that do not fit together."""
        data = datamodule.clients
        check_net(client, data, datamodule.augment)
        classes = client.classes_of(data)
        Monitor.from_name(self.monitor, client.task, classes)  # refuses an unknown name
        check_mean(client, self.server.aggregator, self.server.only_adds)
        check_features(client, datamodule)
        check_attacks(client, data, self.byzantine_clients.attacks_on_data)
        if self.server.aggregator.needs_root and not len(data.root):
            raise ValueError(
                "Expected argument `root_samples` of the data to be above 0 for an aggregator that"
                " compares with what data of the server's own gives, as FLTrust does, but got 0."
            )

    def _try_parts(self, session: Session) -> None:
        """Try the aggregator, the attacks and the engine on a few numbers, before training."""
        client, data, rounds = session.client, session.datamodule.clients, session.rounds
        cohort = torch.arange(client.population.cohort)
        context = rounds.build_context(cohort, torch.empty(0), 0)
        check_aggregator(self.server.new_aggregator(), context)
        try_attacks(client, data, self.byzantine_clients.attacks_on_data)
        check_engine(client, rounds.batch_rule, data, self.engine.name)

    def _build_session(
        self,
        client: Client,
        datamodule: FederatedData,
        settings: RunSettings,
        before: Session | None,
    ) -> Session:
        """Return a session, which goes on with the states of the one before, if there is one.

        Results of an evaluation can be read until the next one, unless the data are loaded again.
        """
        data = datamodule.clients
        evaluated_before = None
        if before is not None and data is before.states.loaded:
            evaluated_before = before.evaluation
        if before is None:
            self.server.reset()
            states = ClientStates(client, data, self.server, settings, self.storage)
        else:
            states = before.states
            states.renew(data, settings)
        batch_rule = BatchRule(
            datamodule.batch_size,
            datamodule.drop_last,
            settings.shuffle,
            settings.limit_local_steps,
        )
        adaptation = None
        if client.adaptation is not None:
            adaptation = Adaptation(
                client,
                client.adaptation,
                self.seed,
                self.byzantine_clients.poison,
                datamodule.augment,
            )
        evaluation = FederatedEvaluation(
            states,
            self.engine_choice,
            self.byzantine_clients,
            settings,
            batch_rule,
            adaptation,
            self.model_selection,
            self.monitor,
            before=evaluated_before,
        )
        rounds = RoundRunner(
            states,
            datamodule,
            self.sampler,
            self.server,
            self.byzantine_clients,
            self.engine_choice,
            evaluation.evaluator,
            settings,
            batch_rule,
            max_rejected=self.max_rejected,
            seed=self.seed,
        )
        return Session(client, datamodule, states, evaluation, rounds)

    @property
    def session(self) -> Session:
        """The federation as it is set up.

        Raises:
            RuntimeError: If no trainer has set it up.
        """
        if self._session is None:
            raise RuntimeError("Expected the federation to be set up by a trainer but it was not.")
        return self._session

    # A round

    def run_round(
        self, round: int, optimizer: torch.optim.Optimizer, hooks: RoundHooks = RoundHooks()
    ) -> Report:
        """Run one communication round: see :meth:`pl_fed.rounds.round.RoundRunner.run`."""
        return self.session.rounds.run(round, optimizer, hooks)

    def draw_cohort(self, round: int) -> Tensor:
        """Return the ids of the clients that take part in a round."""
        return self.session.rounds.draw_cohort(round)

    # The session's parts, for callbacks and tests

    @property
    def is_byzantine(self) -> Tensor:
        """Which clients are Byzantine in the present round, bool [clients]."""
        return self.byzantine_clients.is_byzantine

    @property
    def client(self) -> Client:
        """The algorithm that is run."""
        return self.session.client

    @property
    def datamodule(self) -> FederatedData:
        """The data of the federation."""
        return self.session.datamodule

    @property
    def processes(self) -> Processes:
        """The processes that share the clients."""
        return self.session.states.processes

    @property
    def states(self) -> ClientStates:
        """The clients' data and states."""
        return self.session.states

    @property
    def data(self) -> ClientData:
        """The clients' data where the models are: see :attr:`ClientStates.data`."""
        return self.session.states.data

    @property
    def server_states(self) -> dict[str, Tensor]:
        """The states that the server keeps beside the global model, by name."""
        return self.session.states.server_states

    @property
    def store(self) -> ClientStore:
        """The states that the clients keep between rounds."""
        return self.session.states.store

    @property
    def evaluator(self) -> Evaluator:
        """Runs models on the clients' own data."""
        return self.session.evaluation.evaluator

    @property
    def participation(self) -> Tensor | None:
        """The number of rounds in which each client's work counted, int32 [clients].

        ``None`` after a checkpoint that does not tell it.
        """
        return self.session.states.participation

    def clients_without_training(self) -> Tensor:
        """Return the ids of the benign clients with a model of their own that was never trained.

        Such clients took part in no round, or their work never counted. There are none where each
        client's model comes from the global one before an evaluation.
        """
        rounds = self.participation
        if rounds is None or not self.states.keeps_models:
            return torch.empty(0, dtype=torch.int64)
        return ((rounds == 0) & ~self.is_byzantine).nonzero().flatten()

    # Evaluation

    def metrics(self, part: str) -> Mapping[str, ClientMetrics]:
        """Return the metrics of ``"val"`` or ``"test"``, by model.

        They hold the last evaluation's results, also for each client
        (:meth:`~pl_fed.metrics.ClientMetrics.per_client`), until the next one begins.
        """
        return self.session.evaluation.metrics(part)

    @property
    def monitored(self) -> str:
        """The metric by which models are chosen, as ``monitor`` or the task says."""
        return self.session.evaluation.monitor.name

    def validated_names(self) -> list[str]:
        """Return the names that a validation logs; none without validation data."""
        return self.session.evaluation.validated_names()

    def evaluate(self, part: str, clients: Tensor) -> None:
        """Add clients to the metrics of a part of the data, for each evaluated model."""
        self.session.evaluation.evaluate(part, clients)

    def predict(self, clients: Tensor) -> list[dict[str, Any]]:
        """Return each client's predictions on its test data, by the last evaluated model."""
        return self.session.evaluation.predict(clients)

    def models_of(self, clients: Tensor, model: str | None = None) -> Iterator[nn.Module]:
        """Yield each client's model as :meth:`predict` takes it, of clients of this process.

        Args:
            clients: Ids, int64 [clients].
            model: The name of an evaluated model; by default the last one.

        Yields:
            The user's net, in evaluation mode, with that client's parameters and running
            statistics: a copy, independent of pl_fed.
        """
        return self.session.evaluation.models_of(clients, model)

    def model_of(self, client: int, model: str | None = None) -> nn.Module:
        """Return one client's model: see :meth:`models_of`.

        Raises:
            ValueError: If there is no such client.
        """
        check_integers(0, client=client)
        check_at_most(self.data.num_clients - 1, client=client)
        return next(self.models_of(torch.tensor([client]), model))

    # Stop and resume

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs beside the global model, which the client's state has."""
        return {
            "format": CHECKPOINT_FORMAT,
            "identity": federation_identity(self.client, self.states.loaded, self.seed),
            "byzantine": self.is_byzantine,
            "engine": self.engine_choice.state_dict(),
            "participation": self.participation,
            "store": gather_states(self.processes, self.store.state_dict()),
            "server": self.server.state_dict(self.client.row("global").data),
            "adversary": self.byzantine_clients.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ValueError: If it comes from another net, algorithm or federation.
        """
        here = federation_identity(self.client, self.states.loaded, self.seed)
        check_identity(state["identity"], here)
        if self.adversary.redraw:
            self.byzantine_clients.is_byzantine = state["byzantine"]
        self.engine_choice.load_state_dict(state["engine"])
        self.server.load_state_dict(state["server"])
        self.byzantine_clients.load_state_dict(state["adversary"])
        rows = select_home_states(self.processes, state["store"])
        self.states.restore(rows, state.get("participation"))


def _defence(first: Sequence[PreAggregator], then: Aggregator) -> Aggregator:
    return Chain(first, then) if first else then


def _check_sections(adversary: object, engine: object, storage: object) -> None:
    """Refuse a section of a wrong type, which Python, but no config, can give."""
    sections = {
        "adversary": (Adversary, adversary),
        "engine": (EngineOptions, engine),
        "storage": (StorageOptions, storage),
    }
    for name, (kind, section) in sections.items():
        if not isinstance(section, kind):
            raise TypeError(
                f"Expected argument `federation.{name}` to be of type {kind.__name__} but got"
                f" {section!r}: give pl_fed.{kind.__name__}(...)."
            )
