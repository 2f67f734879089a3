"""The local work of a round: the clients of a cohort are trained, in chunks."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pl_fed.clients.contract import ClientRound, ModelRows
from pl_fed.clients.model_guard import ModelGuard
from pl_fed.data.batches import Batches, BatchRule
from pl_fed.distributed.work_share import RemoteRows, WorkShare
from pl_fed.engine import Chunk, EngineChoice, LocalSettings, Workload
from pl_fed.engine.base import name_clients
from pl_fed.evaluation.evaluator import Evaluator
from pl_fed.nets.rows import finite_rows, usable_rows
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.rounds.client_states import ClientStates
from pl_fed.rounds.trained_cohort import (
    GLOBAL_STATISTICS,
    ChunkResults,
    CohortResults,
    TrainedCohort,
    UploadStatus,
)


@dataclass(frozen=True)
class RoundPlan:
    """What a round's local work depends on.

    Attributes:
        round: The round, from 0.
        cohort: The clients that take part, int64 [cohort].
        next_cohort: Those of the next round, whose rows are fetched ahead; may be empty.
        optimizer: The local optimizer, with this round's learning rates.
        rule: How samples become minibatches.
        rounds_left: How many rounds are to be run, with this one.
        seconds_left: How long they may take.
        measures_start_losses: Whether the loss of w^t over all training data is needed.
        on_clients_done: Called with the number of clients that are done.
    """

    round: int
    cohort: Tensor
    next_cohort: Tensor
    optimizer: torch.optim.Optimizer
    rule: BatchRule
    rounds_left: float
    seconds_left: float
    measures_start_losses: bool
    on_clients_done: Callable[[int], None]


class LocalTraining:
    """Trains the clients of a cohort.

    Args:
        states: The clients' data and states.
        engine: Runs the local steps.
        evaluator: Measures the losses that the algorithm asks for.
        byzantine_clients: The Byzantine clients, who poison data.
        augment: Applied to the inputs of each minibatch.
        settings: How every local step is computed.
        seed: The seed of the federation.
    """

    def __init__(
        self,
        states: ClientStates,
        engine: EngineChoice,
        evaluator: Evaluator,
        byzantine_clients: ByzantineClients,
        augment: Callable[[Tensor], Tensor] | None,
        settings: LocalSettings,
        seed: int,
    ) -> None:
        self.states = states
        self.client = states.client
        self.engine = engine
        self.evaluator = evaluator
        self.byzantine_clients = byzantine_clients
        self.augment = augment
        self.settings = settings
        self.seed = seed
        self._upload_buffer: Tensor | None = None

    def run(self, plan: RoundPlan) -> TrainedCohort:
        """Train a cohort, shared out over the processes.

        Returns:
            The results of the whole cohort, in every process.
        """
        share, client = self._share(plan), self.client
        own = CohortResults(len(share.clients), self._upload_buffer)
        if plan.measures_start_losses and len(share.clients):
            own.start_losses = self._start_losses(share.clients, plan.round)
        remote = share.fetch(self.states.store)
        with ModelGuard(client, {"global", *client.trained}) as before:
            broadcast = ModelRows(before.rows["global"], before.statistics["global"])
            self._run_chunks(plan, share, broadcast, remote, own)
        statistics = {GLOBAL_STATISTICS: broadcast.statistics}
        own.complete_proposals({**statistics, **self.states.server_states})
        self._upload_buffer = own.buffer
        return TrainedCohort.join(share, own, broadcast.parameters, client.trained)

    def _share(self, plan: RoundPlan) -> WorkShare:
        """Share the cohort out over the processes, by the steps that its clients take."""
        processes = self.states.processes
        if processes.size == 1:
            return WorkShare.alone(plan.cohort)
        steps = self.count_steps(plan.cohort, plan.rule)
        work = torch.tensor(list(steps.values()), dtype=torch.float64).sum(0)
        return WorkShare.by_work(processes, plan.cohort, work)

    def count_steps(self, clients: Tensor, rule: BatchRule) -> dict[str, list[int]]:
        """Return how many steps each client takes on each trained model."""
        sizes = self.states.loaded.train.sizes[clients].tolist()
        objective = self.client.objective
        return {
            model: [rule.count(objective.work(model), size) for size in sizes]
            for model in objective.trained
        }

    def _run_chunks(
        self,
        plan: RoundPlan,
        share: WorkShare,
        broadcast: ModelRows,
        remote: RemoteRows,
        own: CohortResults,
    ) -> None:
        """Train this process's clients chunk by chunk, and collect their results."""
        cohort, store = share.clients, self.states.store

        def load(clients: Tensor) -> Chunk:
            return self._load(plan, clients, broadcast, remote)

        def steps(clients: Tensor) -> dict[str, list[int]]:
            return self.count_steps(clients, plan.rule)

        self.engine.settle(
            Workload(
                client=self.client,
                optimizer=plan.optimizer,
                cohort=cohort,
                load=load,
                rounds=plan.rounds_left,
                seconds=plan.seconds_left,
                steps=steps,
                settings=self.settings,
                agree=self.states.processes.first,
            )
        )
        chunks = self._split(cohort, plan.rule)
        prefetched = [cohort[positions] for positions in chunks[1:]]
        next_chunks = self._split(plan.next_cohort, plan.rule)[:1]
        prefetched += [plan.next_cohort[positions] for positions in next_chunks]
        prefetched += [plan.next_cohort[:0]]
        done = 0
        for positions, clients_ahead in zip(chunks, prefetched):
            store.prefetch(clients_ahead)
            chunk = load(cohort[positions])
            others = len(share.cohort) / len(cohort)
            chunk.on_done = _count_cohort(done, plan.on_clients_done, others)
            metrics = self.engine.run(self.client, plan.optimizer, chunk)
            own.add(self._close(chunk, positions, metrics))
            done += len(positions)

    def _split(self, cohort: Tensor, rule: BatchRule) -> tuple[Tensor, ...]:
        """Split a cohort into chunks, by positions.

        Stacked clients wait for the one with most steps, so clients with similar work go together.
        """
        if not len(cohort):
            return ()
        positions = torch.arange(len(cohort))
        if self.engine.stacks:
            steps = self.count_steps(cohort, rule).values()
            most = [max(counts) for counts in zip(*steps)]
            if len(set(most)) > 1:
                positions = torch.tensor(most).argsort(descending=True, stable=True)
        chunks: tuple[Tensor, ...] = positions.split(self.engine.size or len(cohort))
        return chunks

    def _load(
        self, plan: RoundPlan, clients: Tensor, broadcast: ModelRows, remote: RemoteRows
    ) -> Chunk:
        """Return a chunk of clients, ready to be trained.

        Args:
            plan: The round.
            clients: Their ids, int64 [clients].
            broadcast: The global model that the round began with.
            remote: Rows of clients whose home is another process.
        """
        client, steps = self.client, self.count_steps(clients, plan.rule)
        batches = Batches(
            self.states.data,
            clients,
            [max(counts) for counts in zip(*steps.values())],
            plan.rule,
            self.seed,
            plan.round,
            self.byzantine_clients.poison(clients, plan.round),
            self.augment,
        )
        device = broadcast.parameters.device
        step_rows = {
            model: torch.tensor(counts, dtype=torch.int64, device=device)[:, None]
            for model, counts in steps.items()
        }
        lr = {
            group["name"]: broadcast.parameters.new_tensor([float(group.get("lr", math.nan))])
            for group in plan.optimizer.param_groups
        }
        with _noting(plan.round, clients, "begin"):
            start = self.states.begin(clients, broadcast, remote, step_rows, lr)
        return Chunk(clients, client.objective, batches, steps, start)

    def _close(self, chunk: Chunk, positions: Tensor, metrics: dict[str, Tensor]) -> ChunkResults:
        """Close the round of a chunk of clients, and check what it gives.

        Args:
            chunk: The clients, after their local steps.
            positions: Their positions in this process's part of the cohort.
            metrics: Means over the local steps of what ``training_step`` returned.
        """
        client, end, numel = self.client, chunk.round, self.client.row("global").layout.numel
        finite = metrics["loss"].abs() < math.inf
        for model in client.validated:
            rows = end.models[model]
            losses = self.evaluator.losses(self.states.data, "val", chunk.clients, model, rows)
            end.validation_losses[model] = losses.to(rows.parameters)
            if self.evaluator.is_monitoring:
                scores = self.evaluator.scores(self.states.data, "val", chunk.clients, model, rows)
                end.validation_scores[model] = scores.to(rows.parameters)
        end.step_means = dict(metrics)
        with _noting(chunk.batches.round, chunk.clients, "end_round"):
            uploads, kept = client.run_end_round(end)
        usable = _UsableRows(len(chunk.clients), end.broadcast.parameters)
        states = {
            name: usable.check(kept.get(name), default.numel(), default)
            for name, default in self.states.store.defaults.items()
        }
        for model in client.trained:
            if model != "global":
                finite &= finite_rows(usable.check(end.models[model].parameters, numel))
        proposals = self._proposals(end, usable)
        if uploads is not None:
            uploads = usable.check(uploads, numel)
            for sent in (uploads, *proposals.values()):
                finite &= finite_rows(sent)
        status = torch.full_like(finite, UploadStatus.MALFORMED, dtype=torch.int8)
        if usable.all_usable:
            status.fill_(UploadStatus.NOT_FINITE).masked_fill_(finite, UploadStatus.VALID)
        return ChunkResults(positions, chunk.clients, metrics, status, uploads, proposals, states)

    def _proposals(self, end: ClientRound, usable: "_UsableRows") -> dict[str, Tensor]:
        """Return what clients propose that the server's states become, each [clients, length]."""
        proposals = {
            name: usable.check(rows, len(self.states.server_states[name]))
            for name, rows in end.proposals.items()
        }
        length = self.client.statistics("global").layout.numel
        if end.global_statistics is not None and length:
            proposals[GLOBAL_STATISTICS] = usable.check(end.global_statistics, length)
        return proposals

    def _start_losses(self, clients: Tensor, round: int) -> Tensor:
        """Return the loss of w^t over all training data of each client."""
        with self.settings.autocast():
            poison = self.byzantine_clients.poison(clients, round)
            return self.evaluator.start_losses(self.states.data, clients, poison)


@contextmanager
def _noting(round: int, clients: Tensor, hook: str) -> Iterator[None]:
    """Note on an error the round, the clients and the hook that it comes from."""
    try:
        yield
    except Exception as error:
        error.add_note(f"In round {round}, {name_clients(clients)}, `{hook}`.")
        raise


class _UsableRows:
    """Checks the rows that a chunk of clients gives.

    Args:
        num_clients: How many clients there are.
        like: A tensor of the models' dtype and device.

    Attributes:
        all_usable: Whether all rows so far could be used. If not, the chunk's clients are broken.
    """

    def __init__(self, num_clients: int, like: Tensor) -> None:
        self.num_clients = num_clients
        self.like = like
        self.all_usable = True

    def check(self, rows: object, length: int, like: Tensor | None = None) -> Tensor:
        """Return usable rows as they are, and rows of NaN in place of unusable ones.

        Args:
            rows: What an algorithm gave: anything.
            length: The length that each row must have.
            like: A tensor of the dtype that they must have; that of the models by default.
        """
        like, shape = self.like if like is None else like, (self.num_clients, length)
        usable = usable_rows(rows, shape, like)
        if usable is None:
            self.all_usable = False
            usable = like.new_full(shape, math.nan if like.is_floating_point() else 0)
        return usable


def _count_cohort(
    done: int, on_clients_done: Callable[[int], None], clients_per_own: float
) -> Callable[[int], None]:
    """Return a function that reports the cohort's clients done, from those of a chunk.

    Args:
        done: Clients of this process that were done before the chunk.
        on_clients_done: Called with the number of clients of the cohort.
        clients_per_own: Clients of all processes for each of this one, which are assumed to be as
            fast.
    """
    return lambda of_chunk: on_clients_done(round((done + of_chunk) * clients_per_own))
