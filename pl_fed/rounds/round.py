"""A communication round: clients train, the server merges their uploads and moves the model."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.data.module import FederatedData
from pl_fed.devices import to_device
from pl_fed.engine import EngineChoice
from pl_fed.engine.base import ROUND_NUMBERS
from pl_fed.evaluation.evaluator import Evaluator
from pl_fed.functional.aggregation import row_norm
from pl_fed.nets.fingerprints import is_by_user, read_values
from pl_fed.preflight.aggregator_trial import try_aggregator, try_buckets
from pl_fed.random import fork_all_generators, generator, key
from pl_fed.rounds.attack_measures import AttackMeasures
from pl_fed.rounds.broken_clients import check_broken_share, warn_of_broken
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.rounds.client_states import ClientStates
from pl_fed.rounds.forging import Forging
from pl_fed.rounds.local_training import LocalTraining
from pl_fed.rounds.privacy import RoundPrivacy
from pl_fed.rounds.root_training import RootTraining
from pl_fed.rounds.server import Server
from pl_fed.rounds.small_cohorts import SmallCohortRule, SmallCohorts
from pl_fed.rounds.systems import SystemsClock
from pl_fed.rounds.traffic import Traffic
from pl_fed.rounds.trained_cohort import GLOBAL_STATISTICS, TrainedCohort, UploadStatus
from pl_fed.rounds.upload_channel import UploadChannel
from pl_fed.rounds.uploads import Proposals, Uploads, mean_factor, scale
from pl_fed.samplers import Sampler
from pl_fed.systems import ClientProfiles, LinkBytes, Systems
from pl_fed.text import quote
from pl_fed.trees import Tree
from pl_fed.types import RoundContext

Report = dict[str, Tensor | float]
"""Numbers of a round by the names in the log, such as ``train/loss``."""


@dataclass(frozen=True)
class RoundHooks:
    """Round hooks: functions that a round calls.

    Attributes:
        on_server_step: Called before the server's step with the server's optimizer, after the
            gradient is set.
        on_clients_done: Called during local training with the number of clients that are done.
    """

    on_server_step: Callable[[torch.optim.Optimizer], None] = lambda _: None
    on_clients_done: Callable[[int], None] = lambda _: None


class RoundRunner:
    """Runs the communication rounds of a federation.

    Args:
        states: The clients' data and states.
        datamodule: The data of the federation.
        sampler: Draws the cohorts.
        server: Merges the uploads and moves the global model.
        byzantine_clients: The Byzantine clients and their attack.
        engine: Runs the local steps.
        evaluator: Measures the losses that an algorithm or an aggregator needs.
        max_rejected: The largest share of a round's benign clients that may be broken, in [0, 1].
        seed: The seed of the federation.
        small_cohort: Effect of a cohort that is too small for the aggregator.
        privacy: Clips the uploads and adds noise; ``None`` for a run without privacy.
        leaves_out: Whether a client that raises an exception is left out.
        systems: The clients' speed and availability; ``None`` for equal clients without a clock.
        channel: Compresses the uploads; ``None`` without compression.
        traffic: Counts the bytes that clients send and receive; ``None`` for a new count.
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
        max_rejected: float,
        seed: int,
        small_cohort: SmallCohortRule,
        privacy: RoundPrivacy | None,
        leaves_out: bool,
        systems: Systems | None,
        channel: UploadChannel | None,
        traffic: Traffic | None,
    ) -> None:
        client: Client = states.client
        self.states = states
        self.client = client
        self.datamodule = datamodule
        self.sampler = sampler
        self.server = server
        self.byzantine_clients = byzantine_clients
        self.evaluator = evaluator
        self.settings = states.settings
        # a stop because of broken uploads would tell an observer about clients' data
        self.max_rejected = max_rejected if privacy is None else 1.0
        self.seed = seed
        self.privacy = privacy
        self.traffic = traffic or Traffic(client, server.aggregator, channel)
        self.systems: SystemsClock | None = None
        if systems is not None:
            number, owners = datamodule.clients.num_clients, datamodule.evaluated_owners
            self.systems = SystemsClock(
                systems,
                ClientProfiles(systems, number, owners, seed, datamodule.num_evaluated - number),
                self._draw_clients,
                lambda clients: client.objective.count_steps(
                    states.rule, states.loaded.train.sizes[clients].tolist()
                ),
                lambda: LinkBytes(*self.traffic.client_bytes),
            )
        self.local_training = LocalTraining(
            states,
            self.draw_cohort,
            engine,
            evaluator,
            byzantine_clients,
            seed,
            measures_start_losses=server.aggregator.needs_start_losses,
            measures_group_counts=server.aggregator.needs_group_counts,
            leaves_out=leaves_out,
            channel=channel,
            limit_steps=None if self.systems is None else self.systems.limit_steps,
        )
        self.forging = Forging(states, byzantine_clients, evaluator, channel)
        self.root_training = RootTraining(states, seed)
        self.small_cohorts = SmallCohorts(
            small_cohort,
            server.new_aggregator,
            lambda size: self.build_context(torch.arange(size), torch.empty(0), 0),
        )
        self._cohorts: dict[int, Tensor] = {}  # the last cohort: the loop and the round draw it
        self._has_warned = self._has_drawn = False

    def run(
        self, round: int, optimizer: torch.optim.Optimizer, hooks: RoundHooks = RoundHooks()
    ) -> Report:
        """Run one communication round.

        Args:
            round: The round, from 0.
            optimizer: The local optimizer, with this round's learning rates.
            hooks: Functions that are called within the round.

        Returns:
            The numbers of the round for the log, under ``train/`` and ``time/``.

        Raises:
            NonFiniteLossError: If too many benign clients are broken.
            ValueError: If the aggregator needs more valid uploads than the round has; or if a
                round with privacy draws an earlier cohort again.
        """
        started = time.perf_counter()
        if self.privacy is not None:
            self.privacy.check_round(round)
        self.client.renew_rows()
        _check_trained_parameters(self.client, round)
        self.byzantine_clients.begin(round)
        notes = _Notes()
        # 1. The clients train.
        trained = self.local_training.run(round, optimizer, hooks.on_clients_done)
        report = self._report_training(trained)
        # 2. The run stops if too many benign clients are broken.
        self._check_broken_share(trained, round)
        is_skipped = not len(trained.clients) and self.privacy is None  # model and states stay
        if trained.has_uploads or self.privacy is not None:
            uploads = self._collect_uploads(trained, round, optimizer, notes)
            # 3. The attackers replace their uploads. 4. Broken uploads are left out. 5. The server
            # merges the valid uploads and moves the global model, or each center.
            if trained.group is None:
                moved = self._serve(self.server, uploads, trained, trained.valid, hooks, notes)
            else:
                moved = self._serve_centers(
                    uploads, trained.group, trained, optimizer, hooks, notes
                )
            if moved is not None and self.privacy is None:  # else noisy means alone move it
                self.client.update_body(self._server_states)
                self._adopt_lone_model(trained)
            is_skipped = moved is None
            report |= moved or {}
        # 6. The states of all valid clients are stored: those of the whole round, or none.
        if is_skipped:
            notes("small_cohort", 1.0)
            notes("benign_distance", math.nan)
        else:
            self.states.count_round(trained.store_states(self.states.store))
        receivers = len(trained.clients)
        if self.systems is not None:
            receivers = self.systems.count_receivers(round)
            report |= self.systems.end_round(round)
        report |= self.traffic.count_round(len(trained.clients), receivers)
        report |= {**notes.report, **notes.attack.report()}
        return {**report, "time/round": time.perf_counter() - started}

    def _serve(
        self,
        server: Server,
        uploads: Uploads,
        trained: TrainedCohort,
        valid: Tensor,
        hooks: RoundHooks,
        notes: "_Notes",
    ) -> Report | None:
        """Let attackers forge, leave out broken uploads, and move the global model.

        With privacy, uploads are clipped and noise is added.

        Args:
            server: Merges the uploads.
            uploads: The uploads of clients.
            trained: The results of the whole cohort.
            valid: A mask of the valid ones of ``uploads``, bool [clients].
            hooks: Functions that are called within the round.
            notes: The numbers of the round.

        Returns:
            The numbers of the step; ``None`` without a step, because the uploads are too few.
        """
        num_sent, context = len(uploads.share.cohort), uploads.context
        may_be_broken = trained.num_broken > 0
        forges = self.byzantine_clients.forges(context.clients, context.round)
        if forges and not self._must_skip(uploads):
            uploads, valid = self.forging.run(uploads, valid, server, self._server_states)
            may_be_broken = True
        if may_be_broken:  # to look into the mask is to wait for a GPU
            uploads = uploads.leave_out(~valid, self.byzantine_clients)
        num_rejected = num_sent - len(uploads.share.cohort)
        notes("rejected", float(num_rejected))
        if self._must_skip(uploads):
            return None
        self._measure_attack(uploads, notes.attack)
        row, unsent = self.client.row("global").data, self.client.unsent_positions
        never_received = row[unsent] if len(unsent) else None
        report = self._merge(server, uploads, num_rejected, hooks)
        if never_received is not None:  # not moved by noise, weight decay or forged uploads
            row[unsent] = never_received
        return report

    def _measure_attack(self, uploads: Uploads, measures: AttackMeasures) -> None:
        """Compare the uploads of the round's attackers with the benign ones, without privacy."""
        if self.privacy is not None or self.byzantine_clients.attack is None:
            return
        cohort = uploads.share.cohort
        attackers = self.byzantine_clients.mark_attackers(cohort, uploads.context.round)
        benign = ~self.byzantine_clients.is_byzantine[cohort]
        measures.add(uploads.share, uploads.rows, attackers, benign)

    def _serve_centers(
        self,
        uploads: Uploads,
        group: Tensor,
        trained: TrainedCohort,
        optimizer: torch.optim.Optimizer,
        hooks: RoundHooks,
        notes: "_Notes",
    ) -> Report | None:
        """Move each center by the uploads of its clients: see :meth:`_serve`.

        Args:
            uploads: The uploads of the cohort.
            group: The center of each client, int64 [cohort].
            trained: The results of the whole cohort.
            optimizer: The local optimizer, with this round's options.
            hooks: Functions that are called within the round.
            notes: The numbers of the round.
        """
        moves: list[Report] = []
        has_failed = (trained.status == UploadStatus.FAILED).cpu()  # and has chosen no center
        for number in range(self.client.num_centers):
            is_own = group == number
            notes(f"clients_of_center_{number}", float((is_own & ~has_failed).sum()))
            if not is_own.any():
                continue
            with self.local_training.centers.lend(number) as row:
                part = uploads.select(is_own)
                context = self.byzantine_clients.assume_byzantine(part.context)
                context = replace(context, broadcast=row.clone(), center=number)
                if self.server.aggregator.needs_root:
                    root = self.root_training.run(context.round, optimizer)
                    context = replace(context, root=root)
                part = replace(part, context=context)
                valid = trained.valid[is_own.to(trained.valid.device)]
                server = self.server.member(number)
                moved = self._serve(server, part, trained, valid, hooks, notes)
            if moved is not None:
                moves.append(moved)
        if not moves:
            return None
        names = ("train/update_norm", "train/benign_distance")
        return {name: _join_norms([moved[name] for moved in moves]) for name in names}

    def draw_cohort(self, round: int) -> Tensor:
        """Return the ids of the clients that take part in a round, int64 [cohort].

        With ``federation.systems``, clients that drop out or are late do not take part.
        """
        if round not in self._cohorts:
            if self.systems is None:
                cohort = self._draw_clients(round)
            else:
                cohort = self.systems.plan(round).participants
            self._cohorts = {round: cohort}
        return self._cohorts[round].clone()

    def forget_cohorts(self) -> None:
        """Draw the next cohorts again, after a checkpoint brought the seed of private ones."""
        self._cohorts = {}
        if self.systems is not None:
            self.systems.forget_plans()

    def _draw_clients(self, round: int) -> Tensor:
        """Return the ids of the clients that the sampler draws, int64 [drawn].

        Amplification by sampling needs cohorts that nobody can compute, and those of two private
        runs have to be independent: with privacy, the seed of the noise draws them.
        """
        sizes = self.datamodule.clients.train.sizes
        seed = self.seed if self.privacy is None else self.privacy.noise_seed
        draw, number = generator(seed, "cohort", round), len(sizes)
        if not is_by_user(self.sampler):
            return self.sampler.draw_round(round, number, sizes, draw)
        attributes = None if self._has_drawn else read_values(self.sampler)
        with fork_all_generators() as seed_all:
            seed_all(key(seed, "cohort", round))
            cohort = self.sampler.draw_round(round, number, sizes, draw)
        if not self._has_drawn and read_values(self.sampler) != attributes:
            rank_zero_warn(
                f"{type(self.sampler).__name__} keeps values from one draw to the next, which a"
                " resumed run lacks: let a cohort depend on the round of `draw_round` and on"
                " `generator` alone."
            )
        self._has_drawn = True
        if type(self.sampler).draw_round is not Sampler.draw_round:  # which checks its cohorts
            cohort = self.sampler.check_cohort(cohort, number)
        return cohort

    def _report_training(self, trained: TrainedCohort) -> Report:
        """Return the means of the benign clients' metrics, and the counts of the round."""
        byzantine, metrics = self.byzantine_clients.is_byzantine[trained.clients], trained.metrics
        numbers = dict.fromkeys(ROUND_NUMBERS, 0) | {
            "cohort": len(byzantine),
            "byzantine": int(byzantine.count_nonzero()),
            "rejected": trained.num_broken,
        }
        if numbers["byzantine"] or numbers["rejected"] or trained.idle is not None:
            counted = trained.valid & ~byzantine.to(trained.valid.device)
            if trained.idle is not None:
                counted &= ~trained.idle
            metrics = {name: values[counted] for name, values in metrics.items()}
        report: Report = {}
        if len(metrics["loss"]):
            report = {f"train/{name}": values.mean() for name, values in metrics.items()}
        return report | {f"train/{name}": float(number) for name, number in numbers.items()}

    def _check_broken_share(self, trained: TrainedCohort, round: int) -> None:
        """Stop the run if too many benign clients are broken; warn once if any is broken."""
        if not trained.num_broken:
            return
        benign = ~self.byzantine_clients.is_byzantine[trained.clients]
        broken = check_broken_share(trained, benign, round, self.max_rejected)
        if broken.any() and not self._has_warned:
            self._has_warned = True
            warn_of_broken(trained, broken, round)

    def _collect_uploads(
        self,
        trained: TrainedCohort,
        round: int,
        optimizer: torch.optim.Optimizer,
        notes: "_Notes",
    ) -> Uploads:
        """Return the cohort's uploads, with the context for aggregators and attacks."""
        root = trained.broadcast[:0]
        if self.server.aggregator.needs_root and trained.group is None:
            root = self.root_training.run(round, optimizer)
        context = replace(
            self.build_context(trained.clients, trained.losses, round),
            start_losses=trained.start_losses,
            group_counts=trained.group_counts,
            broadcast=trained.broadcast,
            root=root,
            unsent=self.client.unsent_positions,
            note=notes,
            reject=notes.attack.flag,
        )
        own, share = trained.own, trained.share
        rows = own.uploads
        if rows is None:  # this process's clients sent nothing
            rows = trained.broadcast.expand(len(share.clients), -1)
        return Uploads(
            share=share,
            rows=rows,
            # else the clients may keep that tensor, or all clients share the broadcast
            may_change=own.uploads is not None and own.buffer is not None,
            weights=to_device(self.datamodule.clients.train.sizes[trained.clients], rows),
            context=context,
            proposals=Proposals(share, own.proposals, trained.proposed),
        )

    def build_context(self, cohort: Tensor, losses: Tensor, round: int) -> RoundContext:
        """Return the context of a round for its aggregator and attack.

        Args:
            cohort: The ids of the cohort, int64 [cohort].
            losses: Mean training loss of each client, [cohort]; or empty.
            round: The round, from 0.
        """
        num_byzantine = self.byzantine_clients.count_expected_byzantine(len(cohort))
        num_samples = int(self.datamodule.clients.train.sizes.sum()) if self.privacy is None else 0
        counts = torch.empty(0, dtype=torch.int64)
        if self.server.aggregator.needs_group_counts:  # zeros, for trials of the aggregator
            counts = self.evaluator.zero_group_counts(self.states.data, len(cohort))
        return RoundContext(
            self.seed,
            round,
            num_byzantine,
            clients=cohort,
            losses=losses,
            group_counts=counts,
            num_clients=self.states.loaded.num_clients,
            num_samples=num_samples,
            num_rounds=self.settings.rounds,
            layout=self.client.row("global").layout,
            net=self.evaluator.copy_global_model if self.server.aggregator.needs_net else None,
            inputs=self._empty_inputs() if self.server.aggregator.needs_net else None,
        )

    def _empty_inputs(self) -> Tree:
        """Return a batch of the net's inputs without samples."""
        data = self.states.data
        return data.inputs_of(torch.empty(0, dtype=torch.int64, device=data.device))

    def try_merge(self) -> None:
        """Run a new aggregator on short random uploads: of a cohort, or of the buckets of privacy.

        Raises:
            ValueError: If the aggregator or its arguments do not fit the number of uploads.
        """
        aggregator, cohort = self.server.new_aggregator(), self.client.population.cohort
        context = self.build_context(torch.arange(cohort), torch.empty(0), 0)
        if self.privacy is None or self.privacy.buckets is None:
            try_aggregator(aggregator, context, self.server.new_aggregator)
        else:
            try_buckets(self.privacy.buckets, aggregator, context)

    @property
    def _server_states(self) -> dict[str, Tensor]:
        """The server's states, and the running statistics of the global model."""
        statistics = self.client.statistics("global").data
        return {GLOBAL_STATISTICS: statistics, **self.states.server_states}

    def _must_skip(self, uploads: Uploads) -> bool:
        """Return whether the uploads are too few for a step; with privacy, noise is a step."""
        return self.privacy is None and self.small_cohorts.must_skip(uploads.context)

    def describe_small_cohorts(self) -> str | None:
        """Return a sentence about the chance of too small a cohort; ``None`` if it is 0."""
        clients = self.states.loaded.num_clients
        probabilities = self.sampler.size_probabilities(clients)
        if probabilities is None or self.privacy is not None:
            return None
        return self.small_cohorts.describe(probabilities, self.settings.rounds)

    def _merge(
        self,
        server: Server,
        uploads: Uploads,
        num_rejected: int,
        hooks: RoundHooks,
    ) -> Report:
        """Merge the valid uploads, and move the global model and the server's states.

        Args:
            server: Merges the uploads.
            uploads: The valid uploads of clients.
            num_rejected: The number of broken uploads that were left out, for an error.
            hooks: Functions that are called within the round.
        """
        share = uploads.share
        if self.privacy is not None:
            return self._merge_privately(self.privacy, server, uploads, hooks)
        uploads = uploads.normalize(self.client, server.aggregator)
        factor = mean_factor(self.client, len(share.cohort))
        reported: list[tuple[Tensor, Tensor]] = []
        try:
            update = server.step(
                self.client.row("global").data,
                scale(uploads.rows, factor),
                uploads.weights,
                replace(uploads.context, weigh=lambda *pair: reported.append(pair)),
                before_step=hooks.on_server_step,
                merge=share.merge,
            )
        except ValueError as error:
            if not num_rejected:
                raise
            num_sent = len(share.cohort) + num_rejected
            raise ValueError(
                f"{str(error).rstrip('.')}; {num_rejected} of {num_sent} uploads of round"
                f" {uploads.context.round} were left out as broken."
            ) from error
        benign = ~self.byzantine_clients.is_byzantine[share.cohort]
        distance = uploads.distance_to_benign_mean(update, benign, server.aggregator, factor)
        weights = uploads.find_weights(server.aggregator, reported)
        uploads.update_server_states(self.client, self._server_states, weights)
        return {"train/update_norm": row_norm(update), "train/benign_distance": distance}

    def _adopt_lone_model(self, trained: TrainedCohort) -> None:
        """Make the model of the only client w^{t+1}, where it is that but for rounding.

        An upload is a difference from w^t, and w^t plus the difference may differ from the model in
        the last bit. With this step, a federation of one client has the bits of a plain Lightning
        fit.
        """
        model, row = trained.own.lone_model, self.client.row("global").data
        if model is None or trained.group is not None:
            return
        broadcast = trained.broadcast
        if torch.equal(row, broadcast + (model - broadcast)):
            row.copy_(model)

    def _merge_privately(
        self,
        privacy: RoundPrivacy,
        server: Server,
        uploads: Uploads,
        hooks: RoundHooks,
    ) -> Report:
        """Move the global model by noisy means of clipped uploads; nothing else is released."""
        clip_norm, share = privacy.clip_norm, uploads.share
        num_byzantine = self.byzantine_clients.count_expected_byzantine(privacy.denominator)
        update = server.step(
            self.client.row("global").data,
            uploads.rows,
            uploads.weights,
            uploads.context,
            before_step=hooks.on_server_step,
            merge=lambda aggregator, rows, _, context: privacy.merge(
                aggregator, rows, share, context, num_byzantine
            ),
        )
        benign = ~self.byzantine_clients.is_byzantine[share.cohort]
        distance: Tensor | float = math.nan
        if not benign.all():  # otherwise it is the effect of clipping and noise
            factor = mean_factor(self.client, len(share.cohort))
            distance = uploads.distance_to_benign_mean(update, benign, server.aggregator, factor)
        return {
            "train/update_norm": row_norm(update),
            "train/benign_distance": distance,
            **privacy.report(clip_norm),
        }


def _check_trained_parameters(client: Client, round: int) -> None:
    """Refuse another set of trainable parameters than that of the clients' rows.

    A callback may freeze a part of the global model, for example. A stack of clients trains it
    nevertheless, and so does each copy of the model, such as a personal one.

    Raises:
        ValueError: With the names of the parameters.
    """
    for model in dict.fromkeys(("global", *client.trained)):
        trained = client.row(model).tensors
        changed = [
            name
            for name, parameter in client.model(model).named_parameters()
            if parameter.requires_grad != (name in trained)
        ]
        if changed:
            net = type(client.model(model)).__name__
            raise ValueError(
                f"Expected `requires_grad` of the parameters of {net} to stay as at the start,"
                " since it decides which parameters clients train and send, but got another value"
                f" for {quote(changed)} before round {round}: set it in `__init__` of the net; to"
                " train a part in some rounds only, give its group of the optimizer a schedule with"
                " a learning rate of 0 in the others."
            )


def _join_norms(norms: Sequence[Tensor | float]) -> Tensor:
    """Return the norm of all parts of a row from the norms of the parts; NaN ones are left out."""
    numbers = torch.tensor([float(norm) for norm in norms], dtype=torch.float64)
    numbers = numbers[~numbers.isnan()]
    return numbers.norm() if len(numbers) else numbers.new_tensor(math.nan)


class _Notes:
    """Notes of a round: named numbers for the log. Numbers with the same name are added up.

    Attributes:
        report: The numbers.
        attack: The measures of the attack.
    """

    def __init__(self) -> None:
        self.report: Report = {}
        self.attack = AttackMeasures()

    def __call__(self, name: str, number: float | Tensor) -> None:
        key = f"train/{name}"
        self.report[key] = self.report.get(key, 0.0) + number
