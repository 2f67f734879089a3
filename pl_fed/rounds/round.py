"""A communication round: clients train, uploads are merged, and the global model moves."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.data.batches import BatchRule
from pl_fed.data.module import FederatedData
from pl_fed.engine import EngineChoice
from pl_fed.engine.base import ROUND_NUMBERS
from pl_fed.evaluation.evaluator import Evaluator
from pl_fed.random import generator
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.rounds.checks import check_broken
from pl_fed.rounds.client_states import ClientStates
from pl_fed.rounds.local_training import LocalTraining, RoundPlan
from pl_fed.rounds.root_training import RootTraining
from pl_fed.rounds.server import Server
from pl_fed.rounds.settings import RunSettings
from pl_fed.rounds.trained_cohort import GLOBAL_STATISTICS, TrainedCohort
from pl_fed.rounds.uploads import Uploads
from pl_fed.samplers import Sampler
from pl_fed.types import RoundContext

Report = dict[str, Tensor | float]
"""Numbers of a round, by the names under which they are logged."""


@dataclass(frozen=True)
class RoundHooks:
    """Functions that are called within a round.

    Attributes:
        on_server_step: Called with the server's optimizer before it steps, its gradients being set.
        on_clients_done: Called with the number of clients that are done.
    """

    on_server_step: Callable[[torch.optim.Optimizer], None] = lambda _: None
    on_clients_done: Callable[[int], None] = lambda _: None


class RoundRunner:
    """Runs the communication rounds of a federation that is set up.

    Args:
        states: The clients' data and states.
        datamodule: The data of the federation.
        sampler: Draws the cohorts.
        server: Merges the uploads, and moves the global model.
        byzantine_clients: The Byzantine clients and their attack.
        engine: Runs the local steps.
        evaluator: Measures the losses that the algorithm asks for.
        settings: The trainer's settings.
        batch_rule: How samples become minibatches.
        max_rejected: The largest share of a round's benign clients that may be broken.
        seed: The seed of the federation.
    """

    def __init__(
        self,
        states: ClientStates,
        datamodule: FederatedData,
        sampler: Sampler,
        server: Server,
        byzantine_clients: ByzantineClients,
        engine: EngineChoice,
        evaluator: Evaluator,
        settings: RunSettings,
        batch_rule: BatchRule,
        max_rejected: float,
        seed: int,
    ) -> None:
        client: Client = states.client
        self.states = states
        self.client = client
        self.datamodule = datamodule
        self.sampler = sampler
        self.server = server
        self.byzantine_clients = byzantine_clients
        self.engine = engine
        self.evaluator = evaluator
        self.settings = settings
        self.batch_rule = batch_rule
        self.max_rejected = max_rejected
        self.seed = seed
        self.local_training = LocalTraining(
            states, engine, evaluator, byzantine_clients, datamodule.augment, settings.local, seed
        )
        self.root_training = RootTraining(client, seed, datamodule.augment)
        self._drawn: dict[int, Tensor] = {}  # the last cohort: loop and round ask for it
        self._warned_of_broken = False

    def run(
        self, round: int, optimizer: torch.optim.Optimizer, hooks: RoundHooks = RoundHooks()
    ) -> Report:
        """Run one communication round.

        Args:
            round: The round, from 0.
            optimizer: The local optimizer, with this round's learning rates.
            hooks: Functions that are called within the round.

        Returns:
            What is logged of the round under ``train/`` and ``time/``.

        Raises:
            NonFiniteLossError: If too many benign clients are broken.
            ValueError: If too few valid uploads are left to be merged.
        """
        started = time.perf_counter()
        self.client.renew_rows()
        self.byzantine_clients.begin(round)
        # 1. The clients train.
        trained = self.local_training.run(self._plan(round, optimizer, hooks))
        report, notes = self._report(trained), _Notes()
        # 2. The run stops if too many of them are broken.
        self._check_broken(trained, round)
        if trained.sends:
            context = self._describe(trained, round, optimizer, notes)
            uploads = Uploads(
                trained, context, self.datamodule.clients.train.sizes, self.byzantine_clients
            )
            # 3. Attackers replace their uploads.
            self._forge(uploads, round, notes)
            # 4. Broken uploads are left out.
            notes("rejected", float(uploads.leave_out_broken(self.client)))
            # 5. The server merges the others, and the global model moves.
            report |= self._merge(uploads, trained.proposed, hooks, notes)
        # 6. The clients' states are kept: all of a round, or nothing.
        share, states = trained.valid_states()
        share.keep(self.states.store, states)
        self.states.count_round(share.cohort)
        return {**report, **notes.report, "time/round": time.perf_counter() - started}

    def draw_cohort(self, round: int) -> Tensor:
        """Return the ids of the clients that take part in a round."""
        if round not in self._drawn:
            sizes = self.datamodule.clients.train.sizes
            draw = generator(self.seed, "cohort", round)
            self._drawn = {round: self.sampler.draw(len(sizes), sizes, draw)}
        return self._drawn[round].clone()

    def _plan(self, round: int, optimizer: torch.optim.Optimizer, hooks: RoundHooks) -> RoundPlan:
        """Draw the cohort, and return what its local work depends on."""
        cohort = self.draw_cohort(round)
        prefetches = self.states.store.on_disk
        return RoundPlan(
            round=round,
            cohort=cohort,
            next_cohort=self.draw_cohort(round + 1) if prefetches else cohort[:0],
            optimizer=optimizer,
            rule=self.batch_rule,
            rounds_left=self.settings.rounds - round,
            seconds_left=self.settings.seconds_left(),
            measures_start_losses=self.server.aggregator.needs_start_losses,
            on_clients_done=hooks.on_clients_done,
        )

    def _check_broken(self, trained: TrainedCohort, round: int) -> None:
        """Stop if too many benign clients are broken, and warn once if some are."""
        if not trained.num_broken:
            return
        benign = ~self.byzantine_clients.is_byzantine[trained.clients]
        number = check_broken(
            trained.status, benign, trained.losses, trained.clients, round, self.max_rejected
        )
        if number and not self._warned_of_broken:
            self._warned_of_broken = True
            broken = ~trained.valid.cpu() & benign
            rank_zero_warn(
                f"In round {round} the uploads of clients {trained.clients[broken].tolist()} were"
                " left out, which hold NaN or infinity, are of a wrong length, or are no real"
                " numbers: the round goes on without them. This is said once; `train/rejected`"
                " counts them in every round."
            )

    def context(self, cohort: Tensor, losses: Tensor, round: int) -> RoundContext:
        """Return what aggregators and attacks may know of a round."""
        context = RoundContext(self.seed, round, clients=cohort, losses=losses)
        return self.byzantine_clients.expect(context)

    def _describe(
        self,
        trained: TrainedCohort,
        round: int,
        optimizer: torch.optim.Optimizer,
        note: Callable[[str, float | Tensor], None],
    ) -> RoundContext:
        """Return what aggregators and attacks may know of a round whose clients have trained."""
        root = trained.broadcast[:0]
        if self.server.aggregator.needs_root:
            root = self.root_update(round, optimizer)
        return RoundContext(
            self.seed,
            round,
            num_byzantine=self.byzantine_clients.expected_byzantine(len(trained.clients)),
            clients=trained.clients,
            losses=trained.losses,
            start_losses=trained.start_losses,
            broadcast=trained.broadcast,
            root=root,
            note=note,
        )

    def root_update(self, round: int, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return what the server's own data adds to the global model, [numel].

        It is the same in every process.
        """
        return self.root_training.run(
            self.states.data, self.batch_rule, round, optimizer, self.settings.local
        )

    @property
    def _server_states(self) -> dict[str, Tensor]:
        """The server's states, and the running statistics of the global model."""
        statistics = self.client.statistics("global").data
        return {GLOBAL_STATISTICS: statistics, **self.states.server_states}

    def _forge(self, uploads: Uploads, round: int, note: Callable[[str, float], None]) -> None:
        """Let the attackers of the cohort replace their uploads."""
        cohort = uploads.share.cohort
        if self.byzantine_clients.forges(cohort, round):
            note("forged", float(self.byzantine_clients.attacks(cohort, round).sum()))
            uploads.forge(
                self.server,
                self._server_states,
                net=self.evaluator.copy_global_model,
                samples=self.states.data.training_samples,
            )

    def _merge(
        self,
        uploads: Uploads,
        proposed: list[str],
        hooks: RoundHooks,
        notes: "_Notes",
    ) -> Report:
        """Let the server merge the valid uploads, and move the global model and its own states."""
        server, share = self.server, uploads.share
        if not len(share.cohort):
            return {}
        try:
            update = server.step(
                self.client.row("global").data,
                uploads.contributions,
                uploads.weights,
                uploads.context,
                before_step=hooks.on_server_step,
                merge=share.merge,
            )
        except ValueError as error:
            rejected = int(notes.report["train/rejected"])
            if not rejected:
                raise
            raise ValueError(
                f"{str(error).rstrip('.')}; of the uploads, {rejected} of"
                f" {len(share.cohort) + rejected} were left out of round {uploads.context.round}"
                " as broken."
            ) from error
        benign = ~self.byzantine_clients.is_byzantine[share.cohort]
        distance = uploads.distance_to_benign_mean(update, benign, server.aggregator)
        notes("benign_distance", distance)
        uploads.update_server_states(self.client, self._server_states, proposed, server.aggregator)
        return {"train/update_norm": torch.linalg.vector_norm(update)}

    def _report(self, trained: TrainedCohort) -> Report:
        """Return means of the metrics over the cohort's benign clients, and the round's counts."""
        byzantine, metrics = self.byzantine_clients.is_byzantine[trained.clients], trained.metrics
        numbers = dict.fromkeys(ROUND_NUMBERS, 0) | {
            "cohort": len(byzantine),
            "byzantine": int(byzantine.count_nonzero()),
            "rejected": trained.num_broken,
        }
        if numbers["byzantine"] or numbers["rejected"]:
            counts = trained.valid & ~byzantine.to(trained.valid.device)
            metrics = {name: values[counts] for name, values in metrics.items()}
        report: Report = {}
        if len(metrics["loss"]):
            report = {f"train/{name}": values.mean() for name, values in metrics.items()}
        return report | {f"train/{name}": float(number) for name, number in numbers.items()}


class _Notes:
    """Numbers that are noted in a round: those of one name add up."""

    def __init__(self) -> None:
        self.report: Report = {}

    def __call__(self, name: str, number: float | Tensor) -> None:
        key = f"train/{name}"
        self.report[key] = self.report.get(key, 0.0) + number
