"""The federation: who takes part, who lies, how uploads are merged; and a round, step by step."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from pl_fed.aggregators import Aggregator, Chain, Mean, PreAggregator
from pl_fed.attacks import Attack
from pl_fed.clients.base import Client
from pl_fed.data.batches import BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.data.module import FederatedData, global_seed
from pl_fed.engine import EngineChoice, EngineName
from pl_fed.engine.adaptation import Adaptation
from pl_fed.engine.base import ROUND_NUMBERS
from pl_fed.engine.evaluation import Evaluator
from pl_fed.engine.root import RootTraining
from pl_fed.functional.arguments import (
    check_at_most,
    check_instances,
    check_integers,
    check_nonnegative,
    check_shares,
    check_writable,
)
from pl_fed.functional.random import generator
from pl_fed.metrics import ClientMetrics
from pl_fed.processes import Processes
from pl_fed.rounds.adversary import Adversary, Knowledge
from pl_fed.rounds.checks import (
    check_aggregator,
    check_attacks,
    check_broken,
    check_features,
    check_mean,
    check_net,
    check_state_memory,
    try_attacks,
)
from pl_fed.rounds.holdings import Holdings
from pl_fed.rounds.identity import check_identity, identity_of
from pl_fed.rounds.local_training import LocalTraining, Outcome
from pl_fed.rounds.server import Server
from pl_fed.rounds.sharing import Sharing, at_home, collected
from pl_fed.rounds.uploads import Uploads
from pl_fed.samplers import Sampler, Uniform
from pl_fed.state import ClientStore
from pl_fed.types import Population, RoundContext

_T = TypeVar("_T")


class Federation:
    """Everything around the clients.

    Args:
        sampler: Draws the cohort of a round.
        aggregator: Merges the uploads.
        pre_aggregators: Change the uploads before that, one after the other.
        server_optimizer: Builds the optimizer that moves the global model along the merged update,
            taken for a negative gradient: SGD with learning rate 1 is FedAvg, others are FedOpt.
        attack: What byzantine clients do.
        byzantine: Which clients are byzantine: a fraction of them (rounded down), drawn by the
            seed, or a list of ids.
        redraw_byzantine: Whether each round draws other byzantine clients. Metrics are then over
            the clients that are benign in the round before the evaluation.
        byzantine_from: The first round in which they attack; before, they are honest, and still not
            in the metrics.
        attackers_know: Which honest uploads of a round the byzantine clients know: ``"all"``, or
            only their ``"own"``, what they would send if they were honest.
        num_byzantine: How many byzantine uploads aggregators count with in a round; ``None`` for
            the number to be expected, of all clients' share (rounded down), as in Ditto. Uploads
            that are left out as broken are counted off.
        corruption: What is wrong with the training data of every client, byzantine or not: an
            attack on data, such as outliers (FedTilt, section IV).
        max_rejected: The largest share of a round's benign clients, in [0, 1], that may be left out
            as broken (NaN or infinity in losses, models or uploads, or an upload of a wrong length)
            before the run stops. The states of such clients stay as before the round.
        engine: How the local steps are run: ``"one_by_one"``; ``"stacked"``, many clients at once
            under vmap; ``"one_by_one_compiled"`` and ``"stacked_compiled"``, the same by
            ``torch.compile``; ``"auto"`` measures, and keeps the fastest.
        chunk_size: Clients that are run at a time; ``None`` takes what suits the engine, and fits
            into memory.
        compile_mode: ``mode`` of ``torch.compile``: ``"reduce-overhead"`` for CUDA graphs, say.
        store: Folder for the clients' states, on disk; ``None`` keeps them in memory, and puts only
            what is beyond ``state_memory`` on disk, into the folder for temporary files.
        state_memory: Memory for the clients' states: a share of what is free, in (0, 1], which the
            processes of a node share, or a number of bytes (int) in each of them.
        gather_memory: With several processes, bytes of uploads (cohort × parameters × their size)
            up to which each of them brings all uploads together; beyond, each merges a slice of the
            coordinates where the aggregator can. A mean takes neither way: it adds up.
        model_selection: By what data each client takes the better one of its own model and the
            global one, by accuracy and then by loss, the ``hybrid`` model (FLAME, section IV): its
            ``"validation"`` data, or, as in the paper's experiments, its ``"test"`` data, which
            tells more than can be known and gives metrics of the name ``hybrid_by_test_data``;
            ``None`` for neither.
        seed: Seed of all draws; ``None`` takes Lightning's global seed, or 0.

    Attributes:
        processes: The processes that share the work; the trainer says which they are.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        sampler: Sampler | None = None,
        aggregator: Aggregator | None = None,
        pre_aggregators: list[PreAggregator] | None = None,
        server_optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=1.0),
        attack: Attack | None = None,
        byzantine: float | list[int] = 0.0,
        redraw_byzantine: bool = False,
        byzantine_from: int = 0,
        attackers_know: Knowledge = "all",
        num_byzantine: int | None = None,
        corruption: Attack | None = None,
        max_rejected: float = 0.5,
        engine: EngineName = "auto",
        chunk_size: int | None = None,
        compile_mode: str | None = None,
        store: str | None = None,
        state_memory: int | float = 0.5,
        gather_memory: int = 1 << 20,
        model_selection: Literal["validation", "test"] | None = "validation",
        seed: int | None = None,
    ) -> None:
        before = pre_aggregators or []
        check_instances(Sampler, sampler=sampler)
        check_instances(Aggregator, aggregator=aggregator)
        check_instances(list, pre_aggregators=before)
        for each in before:
            check_instances(PreAggregator, pre_aggregators=each)
        check_instances(Attack, attack=attack, corruption=corruption)
        check_shares(max_rejected=max_rejected)
        if num_byzantine is not None:
            check_integers(0, num_byzantine=num_byzantine)
        if chunk_size is not None:
            check_integers(1, chunk_size=chunk_size)
        if seed is not None:
            check_integers(-(2**63), seed=seed)
        if model_selection not in ("validation", "test", None):
            raise ValueError(
                'Expected argument `model_selection` to be "validation", "test" or None but got'
                f" {model_selection!r}."
            )
        check_state_memory(state_memory)
        if store is not None:
            check_writable(store=store)
        check_nonnegative(gather_memory=gather_memory)
        self.sampler = Uniform() if sampler is None else sampler
        defence = Mean() if aggregator is None else aggregator
        self.server = Server(_defence(before, defence), server_optimizer)
        self.adversary = Adversary(
            attack, byzantine, redraw_byzantine, byzantine_from, attackers_know, corruption
        )
        self.num_byzantine = num_byzantine
        self.max_rejected = max_rejected
        self.engine = EngineChoice(engine, chunk_size, compile_mode)
        self.store_folder = store
        self.state_memory = state_memory
        self.gather_memory = gather_memory
        self.model_selection = model_selection
        self.processes = Processes()
        self.seed = global_seed() if seed is None else seed
        self.limit_local_steps: int | float | None = None
        self.shuffle = True
        self.rounds = 0.0
        self.seconds: Callable[[], float] = lambda: math.inf
        self._room: Tensor | None = None
        self._cohorts: dict[int, Tensor] = {}  # the last one: both loop and round ask for it
        self._said_rejected = False
        self._holdings: Holdings | None = None
        self._evaluator: Evaluator | None = None
        self._adaptation: Adaptation | None = None
        self._root: RootTraining | None = None
        self._metrics: dict[str, dict[str, ClientMetrics]] = {}

    def setup(self, client: Client, datamodule: Any, stage: str, loads: bool = False) -> None:
        """Check that everything fits together, before anything is trained.

        What clients and server keep stays as long as the client is the same object, and the data
        are of as many samples a client, if made anew.

        Args:
            client: The algorithm.
            datamodule: The data.
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
            loads: Whether a checkpoint will be loaded then.

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
        data, known = datamodule.clients, self._holdings
        new = known is None or not known.are_of(client, data, self.seed)
        if new and known is not None and stage != "fit" and not loads:
            known.check_none_lost(client)
        if new:  # else who lied last stays known
            self.adversary.setup(data.num_clients, data.num_classes, self.seed)
        elif known is not None and data is not known.loaded:
            known.exchange(data)
        self._cohorts = {}
        sizes = data.train.sizes
        cohort = self.sampler.size_of_cohort(data.num_clients)
        client.population = Population(data.num_clients, cohort, int(sizes.sum()))
        check_net(client, data, datamodule.augment)
        check_mean(client, self.server.aggregator, self.server.adds)
        check_features(client, datamodule)
        attacks = [each for each in (self.adversary.attack, self.adversary.corruption) if each]
        check_attacks(client, data, attacks)
        if new:
            where = (self.store_folder, self.state_memory, self.processes.here)
            self._holdings = Holdings(client, data, self.server, self.engine, *where)
            self._adaptation = None
            self._root = None
            self._evaluator = Evaluator(client, self._begin_evaluation)
            self.server.reset()
        self.datamodule = datamodule
        if self.server.aggregator.needs_root and not len(data.root):
            raise ValueError(
                "Expected argument `root_samples` of the data to be above 0 for an aggregator that"
                " compares with what data of the server's own gives, as FLTrust does, but got 0."
            )
        if stage == "fit":
            context = self.context(torch.arange(cohort), torch.empty(0), 0)
            check_aggregator(self.server.new_aggregator(), context)
            try_attacks(client, data, attacks)
        client.check(self)
        if client.adaptation_work is not None:
            how = (self.seed, self.adversary.poison, datamodule.augment)
            self._adaptation = Adaptation(client, *how)
        self._metrics = {}

    # A round

    def run_round(
        self,
        round: int,
        optimizer: torch.optim.Optimizer,
        on_server_step: Callable[[torch.optim.Optimizer], None] = lambda _: None,
        on_clients_done: Callable[[int], None] = lambda _: None,
    ) -> dict[str, Tensor | float]:
        """Run one communication round.

        Args:
            round: Which, from 0.
            optimizer: The local optimizer, with this round's learning rates.
            on_server_step: Called before the server's optimizer steps, its gradients being set.
            on_clients_done: Called with the number of clients that are done.

        Returns:
            What is logged of the round under ``train/`` and ``time/``.

        Raises:
            NonFiniteLossError: If too many benign clients' losses or models are not finite.
            ValueError: If too few uploads are left to be merged.
        """
        started = time.perf_counter()
        self.client.renew_rows()
        cohort = self.draw_cohort(round)
        self.adversary.begin(round)
        training = self._local_training(round, optimizer)
        sharing = self._share(cohort, training)
        following = self.draw_cohort(round + 1) if self.store.on_disk else cohort[:0]
        measures_start = self.server.aggregator.needs_start_losses
        ahead = (self.rounds - round, self.seconds())
        how = (self._room, ahead, following, measures_start, on_clients_done)
        trained = training.run(sharing, *how)
        self._room = trained.room
        outcome = Outcome.of(sharing, trained, self.data.x.device, self.client.trains)
        whole = outcome.whole
        self._check_sent(cohort, outcome, round)
        report, notes = self._report(cohort, outcome), _Notes()
        if outcome.sends:
            context = self.context(cohort, outcome.losses, round)
            broadcast = self.client.row("global").data.clone()
            start_losses = outcome.start_losses
            context = replace(context, start_losses=start_losses, broadcast=broadcast, note=notes)
            if self.server.aggregator.needs_root:
                context = replace(context, root=self._root_update(round, optimizer))
            sizes = self.data.train.sizes
            uploads = Uploads(sharing, trained, whole, context, sizes, self._expecting)
            merged = self._merge(uploads, outcome.proposed, on_server_step)
            report |= notes.report | merged
        kept = trained.states
        if not whole.all():
            kept, sharing = trained.states_of(cohort[whole.cpu()]), sharing.of(whole.cpu())
        sharing.keep(self.store, kept)  # a round happens as a whole, or not at all
        return {**report, "time/round": time.perf_counter() - started}

    def _local_training(self, round: int, optimizer: torch.optim.Optimizer) -> LocalTraining:
        """Return how the clients of a round are trained."""
        parts = (self.holdings, self.engine, self.evaluator, self.adversary)
        how = (self._rule, self.datamodule.augment, self.seed)
        return LocalTraining(*parts, *how, round, optimizer)

    @property
    def _rule(self) -> BatchRule:
        module = self.datamodule
        return BatchRule(module.batch_size, module.drop_last, self.shuffle, self.limit_local_steps)

    def _share(self, cohort: Tensor, training: LocalTraining) -> Sharing:
        """Share a cohort out over the processes, by the steps that its clients take."""
        if self.processes.size == 1:
            return Sharing.alone(cohort)
        steps = torch.tensor(list(training.steps(cohort).values()), dtype=torch.float64)
        return Sharing.by_work(self.processes, cohort, steps.sum(0))

    def draw_cohort(self, round: int) -> Tensor:
        """Return the ids of the clients that take part in a round."""
        if round not in self._cohorts:
            sizes = self.holdings.loaded.train.sizes
            draw = generator(self.seed, "cohort", round)
            self._cohorts = {round: self.sampler.draw(len(sizes), sizes, draw)}
        return self._cohorts[round].clone()

    def _check_sent(self, cohort: Tensor, outcome: Outcome, round: int) -> None:
        """Stop if too many benign clients are broken, and say once that some are."""
        benign, most = ~self.is_byzantine[cohort], self.max_rejected
        if not check_broken(outcome.sent, benign, outcome.losses, cohort, round, most):
            return
        if not self._said_rejected:
            self._said_rejected = True
            broken = ~outcome.whole.cpu() & benign
            rank_zero_warn(
                f"In round {round} the uploads of clients {cohort[broken].tolist()} were left out,"
                " which hold NaN or infinity, or are of a wrong length: the round goes on without"
                " them. This is said once; `train/rejected` counts them in every round."
            )

    def _merge(
        self,
        uploads: Uploads,
        proposed: list[str],
        on_server_step: Callable[[torch.optim.Optimizer], None],
    ) -> dict[str, Tensor | float]:
        """Leave out broken uploads, and let the server merge the rest and step."""
        server, everyone = self.server, uploads.sharing.cohort
        round, note = uploads.context.round, uploads.context.note
        statistics = self.client.statistics("global").data
        kept = {"global_statistics": statistics, **self.server_states}
        if self.adversary.forges(everyone, round):
            note("forged", float(self.adversary.attacks(everyone, round).sum()))
            uploads.forge(self.adversary, server, kept)
        rejected = uploads.leave_out(self.client)
        note("rejected", float(rejected))
        sharing = uploads.sharing
        if not len(sharing.cohort):
            return {}
        how = partial(sharing.merged, gather_memory=self.gather_memory)
        what = (uploads.changes, uploads.weights, uploads.context)
        try:
            update = server.step(self.client.row("global").data, *what, on_server_step, how)
        except ValueError as error:
            if not rejected:
                raise
            left = f"{rejected} of {len(everyone)} were left out of round {round} as broken"
            raise ValueError(f"{str(error).rstrip('.')}; of the uploads, {left}.") from error
        benign = ~self.is_byzantine[sharing.cohort]
        note("benign_distance", uploads.distance(update, benign, server.aggregator))
        uploads.move(self.client, kept, proposed, server.aggregator)
        uploads.receive(self.client, kept)
        return {"train/update_norm": update.norm()}

    def _root_update(self, round: int, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return what the server's own data adds to the global model: in every process the same."""
        if self._root is None:
            self._root = RootTraining(self.client, self.seed, self.datamodule.augment)
        how = (self.engine.autocast, self.engine.clipping)
        return self._root.run(self.data, self._rule, round, optimizer, *how)

    def _report(self, cohort: Tensor, outcome: Outcome) -> dict[str, Tensor | float]:
        """Return the round's numbers: outputs are means over the benign clients of the cohort."""
        benign, whole, outputs = ~self.is_byzantine[cohort], outcome.whole, outcome.outputs
        counts = benign & whole.cpu()
        report: dict[str, Tensor | float] = {}
        if counts.all():
            report = {f"train/{name}": output.mean() for name, output in outputs.items()}
        elif counts.any():
            chosen = counts.nonzero().flatten().to(outcome.losses.device)
            report = {f"train/{name}": output[chosen].mean() for name, output in outputs.items()}
        numbers = dict.fromkeys(ROUND_NUMBERS, 0) | {
            "cohort": len(cohort),
            "byzantine": int((~benign).sum()),
            "rejected": len(cohort) - int(whole.sum()),
        }
        return report | {f"train/{name}": float(number) for name, number in numbers.items()}

    def context(self, cohort: Tensor, losses: Tensor, round: int) -> RoundContext:
        """Return what aggregators and attacks may know of a round."""
        return self._expecting(RoundContext(self.seed, round, clients=cohort, losses=losses))

    def _expecting(self, context: RoundContext, broken: int = 0) -> RoundContext:
        """Say how many byzantine uploads are to be expected among so many, without broken ones."""
        if self.num_byzantine is None:
            expected = math.floor(self.adversary.share * len(context.clients) + 1e-9)
        else:
            expected = max(0, self.num_byzantine - broken)
        return replace(context, num_byzantine=expected)

    # What the clients have

    @property
    def is_byzantine(self) -> Tensor:
        """Which clients are byzantine, in the round at hand, bool [clients]."""
        return self.adversary.is_byzantine

    @property
    def holdings(self) -> Holdings:
        """What the clients have."""
        return _set_up(self._holdings)

    @property
    def client(self) -> Client:
        """The algorithm that is run."""
        return self.holdings.client

    @property
    def data(self) -> ClientData:
        """The clients' data: see :attr:`Holdings.data`."""
        return self.holdings.data

    @property
    def server_states(self) -> dict[str, Tensor]:
        """What the server keeps beside the global model."""
        return self.holdings.server_states

    @property
    def store(self) -> ClientStore:
        """What the clients keep between rounds."""
        return self.holdings.store

    # Evaluation

    @property
    def evaluator(self) -> Evaluator:
        """Runs models on the clients' own data."""
        return _set_up(self._evaluator)

    def metrics(self, part: str) -> Mapping[str, ClientMetrics]:
        """Return the metrics of ``"val"`` or ``"test"``, by model."""
        if part not in self._metrics:  # tables of all clients
            data = self.holdings.loaded
            sizes = (data.num_clients, data.num_classes)
            with torch.inference_mode(False):
                models = self.client.evaluates()
                self._metrics[part] = {
                    model: ClientMetrics(*sizes, ~self.is_byzantine, self.adversary.triggers)
                    for model in (*models, *self._hybrid(part))
                }
        return self._metrics[part]

    def validated_names(self) -> list[str]:
        """Return under what names a validation logs; none without a sample to validate with."""
        if not int(self.holdings.loaded.val.sizes.sum()):
            return []
        found = self.metrics("val").items()
        return [f"val/{model}/{name}" for model, metrics in found for name in metrics.names]

    def _hybrid(self, part: str) -> dict[str, str]:
        """Return under what name the better model of each client has metrics, and by what data."""
        models, data = self.client.evaluates(), self.holdings.loaded
        if len(models) < 2 or "global" not in models:
            return {}
        if self.model_selection == "validation" and int(data.val.sizes.sum()):
            return {"hybrid": "val"}
        if self.model_selection == "test" and part == "test":
            return {"hybrid_by_test_data": "test"}
        return {}

    def evaluate(self, part: str, clients: Tensor) -> None:
        """Add clients to the metrics of a part of the data, for each model that has any.

        Of the clients, each process adds those that are at home there.
        """
        clients = clients[self.processes.at_home(clients)]
        self.store.prefetch(clients)
        metrics = self.metrics(part)
        for each in metrics.values():
            each.to(self.data.x.device)
            each.benign.copy_(~self.is_byzantine)
        shown = self.holdings.shown(part, self.adversary.attack)
        what = (metrics, self._hybrid(part), shown)
        with self.engine.autocast():
            self.evaluator.evaluate(self.data, part, clients, *what)

    def _begin_evaluation(self, clients: Tensor) -> dict[str, Tensor]:
        """Bring together the rows of clients that are to be evaluated."""
        if self._adaptation is None:
            return self.holdings.begin(clients)
        with torch.inference_mode(False):
            rows = self.holdings.begin(clients)
            self._adaptation.run(self.data, clients, rows, self._rule, self.engine)
        return rows

    def predict(self, clients: Tensor) -> list[dict[str, Any]]:
        """Give each client's predictions on its test data, by its personal model if it has one."""
        home = clients[self.processes.at_home(clients)]
        with self.engine.autocast():
            mine = self.evaluator.predict(self.data, home, self.client.evaluates()[-1])
        if self.processes.size == 1:
            return mine
        everyones = {one["client"]: one for each in self.processes.everyones(mine) for one in each}
        return [everyones[client] for client in clients.tolist()]

    def models_of(self, clients: Tensor, model: str | None = None) -> Iterator[nn.Module]:
        """Yield each client's model as :meth:`predict` takes it, of clients of this process.

        Args:
            clients: Ids, int64 [clients].
            model: Which of the models that are evaluated; by default the last.

        Yields:
            The user's net, in evaluation mode, with that client's parameters and running
            statistics: a copy, which pl_fed has no part in.
        """
        return self.evaluator.models(clients, model or self.client.evaluates()[-1])

    def model_of(self, client: int, model: str | None = None) -> nn.Module:
        """Return the same of one client.

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
            "identity": identity_of(self.client, self.holdings.loaded, self.seed),
            "byzantine": self.is_byzantine,
            "engine": self.engine.state_dict(),
            "store": collected(self.processes, self.store.state_dict()),
            "server": self.server.state_dict(self.client.row("global").data),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ValueError: If it comes from another net, algorithm or federation.
        """
        here = identity_of(self.client, self.holdings.loaded, self.seed)
        check_identity(state["identity"], here)
        if self.adversary.redraw:
            self.adversary.is_byzantine = state["byzantine"]
        self.engine.load_state_dict(state["engine"])
        self.server.load_state_dict(state["server"])
        self.holdings.restore(at_home(self.processes, state["store"]))


class _Notes:
    """What is counted in a round: numbers of one word add up."""

    def __init__(self) -> None:
        self.report: dict[str, Tensor | float] = {}

    def __call__(self, word: str, number: float | Tensor) -> None:
        name = f"train/{word}"
        self.report[name] = self.report.get(name, 0.0) + number


def _defence(first: Sequence[PreAggregator], then: Aggregator) -> Aggregator:
    return Chain(first, then) if first else then


def _set_up(thing: _T | None) -> _T:
    if thing is None:
        raise RuntimeError("Expected the federation to be set up by a trainer but it was not.")
    return thing
