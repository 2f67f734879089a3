"""The local training of a round: trains the clients of a cohort, chunk by chunk."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pl_fed.clients.client_rounds import read_rates
from pl_fed.clients.contract import ClientRound, ModelRows, Objective
from pl_fed.clients.local_rates import find_mean_rates, list_local_rates
from pl_fed.clients.model_guard import restore_models
from pl_fed.clients.round_rules import StepRows
from pl_fed.data.batches import Batches, BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.data.read_ahead import read_ahead
from pl_fed.devices import note_devices, numbers_on
from pl_fed.distributed.table_layout import TableLayout
from pl_fed.distributed.work_share import RemoteRows, WorkShare
from pl_fed.engine import Chunk, EngineChoice, Workload
from pl_fed.engine.base import name_clients
from pl_fed.engine.choice import TRIED_CLIENTS
from pl_fed.engine.failed_clients import find_failed, replace_failed
from pl_fed.engine.one_by_one import OneByOne
from pl_fed.evaluation.evaluator import Evaluator
from pl_fed.nets.rows import finite_rows, usable_rows
from pl_fed.preflight.rules import check_local_schedule
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.rounds.centers import Centers
from pl_fed.rounds.client_states import ClientStates
from pl_fed.rounds.preparation import Preparation
from pl_fed.rounds.trained_cohort import (
    GLOBAL_STATISTICS,
    ChunkResults,
    CohortResults,
    TrainedCohort,
    UploadStatus,
)
from pl_fed.rounds.upload_channel import UploadChannel
from pl_fed.rounds.value_watch import ValueWatch
from pl_fed.trees import count_sample_bytes
from pl_fed.types import Batch

LimitSteps = Callable[[Tensor, Mapping[str, list[int]], int], dict[str, list[int]]]

_READ_BYTES = 1 << 28  # samples in memory maps that are read at once, in bytes


@dataclass(frozen=True)
class CohortWork:
    """Cohort work: a process's part of a round's local training.

    Attributes:
        round: The round, from 0.
        optimizer: The local optimizer, with this round's learning rates.
        share: The distribution of the cohort over the processes.
        broadcast: The global model w^t at the start of the round.
        remote: Rows of this process's clients with another home process.
        own: The results of this process's clients so far.
        on_clients_done: Called with the number of the cohort's clients that are done.
    """

    round: int
    optimizer: torch.optim.Optimizer
    share: WorkShare
    broadcast: ModelRows
    remote: RemoteRows
    own: CohortResults
    on_clients_done: Callable[[int], None]


class LocalTraining:
    """Trains the clients of a cohort.

    Args:
        states: The clients' data and states.
        draw_cohort: Returns the ids of a round's cohort, int64 [cohort].
        engine: Runs the local steps.
        evaluator: Measures the losses that an algorithm or an aggregator needs.
        byzantine_clients: The Byzantine clients, which may poison their data.
        seed: The seed of the federation.
        measures_start_losses: Whether to measure the loss of w^t, or of the client's center, over
            each client's training data.
        measures_group_counts: Whether to count each client's training samples by group and class
            under w^t.
        leaves_out: Whether a client that raises an exception is left out of the round;
            otherwise the exception ends the run.
        channel: Compresses the uploads; ``None`` without compression.
        watch: The watch over the values of modules; a new one by default.
        limit_steps: Returns numbers of local steps, by trained model, with at most those that fit
            into a round; ``None`` for rounds without a deadline. Its arguments are the clients'
            ids, the planned numbers, and the round.
    """

    def __init__(
        self,
        states: ClientStates,
        draw_cohort: Callable[[int], Tensor],
        engine: EngineChoice,
        evaluator: Evaluator,
        byzantine_clients: ByzantineClients,
        seed: int,
        measures_start_losses: bool = False,
        measures_group_counts: bool = False,
        leaves_out: bool = False,
        channel: UploadChannel | None = None,
        watch: ValueWatch | None = None,
        limit_steps: LimitSteps | None = None,
    ) -> None:
        self.states = states
        self.client = states.client
        self.draw_cohort = draw_cohort
        self.engine = engine
        self.evaluator = evaluator
        self.byzantine_clients = byzantine_clients
        self.settings = states.settings
        self.seed = seed
        self.measures_start_losses = measures_start_losses
        self.measures_group_counts = measures_group_counts
        self.leaves_out = leaves_out
        self.limit_steps = limit_steps
        self.channel = channel
        self.centers = Centers(states, evaluator)
        self.preparation = Preparation(states, engine, seed, byzantine_clients.poison)
        self.watch = watch or ValueWatch(states.client)
        self._upload_buffer: Tensor | None = None
        self._table_layout = TableLayout()

    def run(
        self,
        round: int,
        optimizer: torch.optim.Optimizer,
        on_clients_done: Callable[[int], None] = lambda _: None,
    ) -> TrainedCohort:
        """Train the cohort of a round, each process a share of its clients.

        Args:
            round: The round, from 0.
            optimizer: The local optimizer, with this round's learning rates.
            on_clients_done: Called with the number of the cohort's clients that are done.

        Returns:
            The results of the cohort, the same in every process.
        """
        cohort, client = self.draw_cohort(round), self.client
        share = self._share_work(cohort, round)
        own = CohortResults(len(share.clients), self._upload_buffer)
        remote = share.fetch_states(self.states.store)
        with restore_models(client, {"global", *client.trained}) as before:
            broadcast = before["global"]
            work = CohortWork(round, optimizer, share, broadcast, remote, own, on_clients_done)
            if self.measures_start_losses and len(share.clients):
                unknown = broadcast.parameters.new_full((), math.nan)
                losses = self._measure(self.evaluator.start_losses, unknown, share.clients, work)
                own.tables["start_losses", ""] = losses
            if self.measures_group_counts and len(cohort):
                (none,) = self.evaluator.zero_group_counts(self.states.data, 1)
                counts = self._measure(self.evaluator.group_counts, none, share.clients, work)
                own.group_counts = counts
            with self.watch.watch(round) if len(cohort) else nullcontext():
                chunks: Sequence[Tensor] = self._plan_chunks(work)
                while chunks:
                    self._prefetch(round, share.clients[chunks[1]] if chunks[1:] else None)
                    try:
                        own.add(self._train(work, chunks[0]))
                        chunks = chunks[1:]
                    except Exception as error:
                        chunks = self._recover(error, work, chunks)
        statistics = {GLOBAL_STATISTICS: broadcast.statistics}
        own.complete_proposals({**statistics, **self.states.server_states})
        self._upload_buffer = own.buffer
        return TrainedCohort.join(
            share, own, broadcast.parameters, client.trained, self._table_layout
        )

    def check_schedule(self) -> None:
        """Refuse a schedule of local steps without a meaning, or that ends before the run.

        Raises:
            ValueError: With the reason.
        """
        check_local_schedule(self.client, self.settings.local.batches_per_step)
        if self.client.local_schedule is not None:
            sizes = self.states.loaded.train.sizes
            most = count_most_steps(self.client.objective, self.states.rule, sizes)
            self.client.local_schedule.check_length(self.settings.rounds, most)

    def _share_work(self, cohort: Tensor, round: int) -> WorkShare:
        """Divide a cohort among the processes by the clients' numbers of local steps."""
        processes = self.states.processes
        if processes.size == 1 or not len(cohort):
            return WorkShare.single_process(cohort)
        steps = self.count_steps(cohort, round)
        work = torch.tensor(list(steps.values()), dtype=torch.float64).sum(0)
        return WorkShare.balance(processes, cohort, work)

    def count_steps(self, clients: Tensor, round: int) -> dict[str, list[int]]:
        """Return the number of local steps of each client, for each trained model.

        Args:
            clients: Ids of the clients, int64 [clients].
            round: The round; its deadline may limit the steps.
        """
        sizes = self.states.loaded.train.sizes[clients].tolist()
        steps = self.client.objective.count_steps(self.states.rule, sizes)
        return steps if self.limit_steps is None else self.limit_steps(clients, steps, round)

    def _plan_chunks(self, work: CohortWork) -> list[Tensor]:
        """Choose the engine, and split this process's clients into chunks, by their positions.

        The results of clients that fail in a trial are added.
        """
        if not len(work.share.cohort):
            return []
        self._choose_engine(work, self._try_clients(work))
        return self._leave_out(work, self._split_cohort(work.share.clients, work.round))

    def _train(self, work: CohortWork, positions: Tensor) -> ChunkResults:
        """Train a chunk of this process's clients, from ``begin`` to ``end_round``."""
        cohort = work.share.clients
        scale = len(work.share.cohort) / len(cohort)
        chunk = self._load_chunk(work, cohort[positions])
        num_done = work.own.num_done
        # the cohort's progress, as if all processes were equally fast
        chunk.on_done = lambda number: work.on_clients_done(round((num_done + number) * scale))
        self.preparation.run(chunk)
        metrics: dict[str, Tensor] = {}
        if chunk.batches.max_steps:
            metrics = self.engine.run(self.client, work.optimizer, chunk)
        is_alone = len(work.share.cohort) == 1 and self.states.processes.size == 1
        if is_alone and "global" in chunk.round.models:
            work.own.lone_model = chunk.round.models["global"].parameters[0].clone()
        memory = {
            name: work.remote.read(self.states.store, name, chunk.clients)
            for name in self.client.compression_defaults
        }
        return self._end_chunk(chunk, positions, _complete_steps(chunk, metrics), memory)

    def _recover(
        self, error: Exception, work: CohortWork, chunks: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Continue after an exception of the first chunk, and return the chunks that are left.

        If memory was short, chunks become smaller. If clients may be left out, each client of the
        chunk is tried alone. Another client takes the place of one that fails, so that a stack
        keeps its shape: the numbers of the others are those without a failure.

        Raises:
            Exception: The exception if no client fails alone, or if clients that fail end the run.
        """
        positions, own = chunks[0], work.own
        if isinstance(error, torch.OutOfMemoryError):
            return self._halve(error, chunks)
        if not self.leaves_out:
            raise error
        train = partial(self._train, work)
        failed = find_failed(train, positions, error)
        own.errors |= {int(work.share.clients[place]): failed[place] for place in failed}
        filled, others = replace_failed(positions, failed)
        self._leave_out(work, [positions])
        if len(filled):
            try:
                results = train(filled)
            except torch.OutOfMemoryError as shortage:
                return self._halve(shortage, [positions[others], *chunks[1:]])
            own.add(results.select(others.nonzero().flatten()))
        return chunks[1:]

    def _halve(self, error: torch.OutOfMemoryError, chunks: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return smaller chunks after the first one did not fit into memory.

        Raises:
            OutOfMemoryError: The error if a chunk cannot become smaller.
        """
        if len(chunks[0]) == 1 or not self.engine.halve() or self.engine.size is None:
            raise error
        return [part for chunk in chunks for part in chunk.split(self.engine.size)]

    def _choose_engine(self, work: CohortWork, cohort: Tensor) -> None:
        """Let all processes choose one engine, also those without a client that runs.

        Clients without a local step, as those below ``data.min_batch``, can try no engine. A later
        round chooses if the cohort has no others.

        Args:
            work: The round.
            cohort: The ids of the clients on which this process tries an engine; may be empty.
        """
        if len(cohort) and not self.engine.is_settled:
            has_steps = torch.tensor(self._max_steps(self.count_steps(cohort, work.round))) > 0
            if has_steps.any():
                cohort = torch.cat([cohort[has_steps], cohort[~has_steps]])
            else:
                cohort = cohort[:0]
        self.engine.choose(
            Workload(
                client=self.client,
                optimizer=work.optimizer,
                cohort=cohort,
                load=partial(self._load_chunk, work, reads_steps=False),
                rounds=self.settings.rounds - work.round,
                seconds=self.settings.seconds_left(),
                steps=partial(self.count_steps, round=work.round),
                settings=self.settings.local,
                agree=self.states.processes.select_first,
            )
        )

    def _try_clients(self, work: CohortWork) -> Tensor:
        """Return the cohort for the trial of an engine: a client that fails has a substitute.

        Otherwise the data of a client that fails would choose the engine of all others. If all
        fail, it is empty, and their exceptions are added to the results.
        """
        cohort = work.share.clients
        if not self.leaves_out or self.engine.is_settled or not len(cohort):
            return cohort
        engine, errors = OneByOne(self.settings.local), {}
        for number, client in enumerate(cohort.split(1), 1):
            try:
                engine.run(self.client, work.optimizer, self._load_chunk(work, client))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                errors[int(client)] = error
            if number >= TRIED_CLIENTS and len(errors) < number:
                break
        is_running = torch.tensor([client not in errors for client in cohort.tolist()])
        if is_running.any():
            return torch.where(is_running, cohort, cohort[is_running][0])
        work.own.errors.update(errors)
        return cohort[:0]

    def _leave_out(self, work: CohortWork, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Count failed clients of some chunks as broken, and return the chunks without them."""
        cohort, own = work.share.clients, work.own
        if not own.errors:
            return list(chunks)
        like, healthy = self.client.row("global").data, []
        for positions in chunks:
            failed = torch.tensor([client in own.errors for client in cohort[positions].tolist()])
            for position in positions[failed].tolist():
                own.add(ChunkResults.build_failed(position, like))
            healthy.append(positions[~failed])
        return [positions for positions in healthy if len(positions)]

    def _prefetch(self, round: int, clients: Tensor | None) -> None:
        """Read rows and samples ahead: of the next chunk, or of the next round's first chunk.

        Args:
            round: The round.
            clients: The clients of the round's next chunk; ``None`` for its last chunk.
        """
        if clients is None:
            is_last = 0 < self.settings.rounds <= round + 1
            if is_last or not (self.states.store.on_disk or self.states.data.mapped):
                return
            cohort, round = self.draw_cohort(round + 1), round + 1
            next_chunks = self._split_cohort(cohort, round)
            clients = cohort[next_chunks[0]] if next_chunks else cohort[:0]
        self.states.store.prefetch(clients)
        self._read_ahead(clients, round)

    def _read_ahead(self, clients: Tensor, round: int) -> None:
        """Read the samples of clients in a later chunk from memory maps, in the background.

        The thread uses the CPU alone: work on a GPU would break the capture of a CUDA graph.
        """
        data = self.states.loaded
        if self.states.data.mapped and data.redraw is None and len(clients):
            steps = self._max_steps(self.count_steps(clients, round))
            batches = Batches(data, clients, steps, self.states.rule, self.seed, round)
            read_ahead(data.inputs, batches.sample_ids)

    def _split_cohort(self, cohort: Tensor, round: int) -> list[Tensor]:
        """Split a cohort into chunks, and return the clients' positions in the cohort.

        Stacked clients wait for the client with the most steps. Therefore a chunk of stacked
        clients has clients with similar numbers of steps.
        """
        if not len(cohort):
            return []
        positions = torch.arange(len(cohort))
        size = self.engine.size or len(cohort)
        if self.engine.stacks:
            max_steps = self._max_steps(self.count_steps(cohort, round))
            if len(set(max_steps)) > 1:
                positions = torch.tensor(max_steps).argsort(descending=True, stable=True)
        if self.states.data.mapped and not self.engine.stacks:
            size = min(size, self._clients_per_read(cohort))
        return list(positions.split(size))

    def _clients_per_read(self, cohort: Tensor) -> int:
        """Return the number of clients whose samples in memory maps are read at once."""
        data = self.states.data
        samples = int(data.train.sizes[cohort].sum())
        num_bytes = max(1, samples * count_sample_bytes(data.inputs))
        return max(1, len(cohort) * _READ_BYTES // num_bytes)

    def _load_chunk(self, work: CohortWork, clients: Tensor, reads_steps: bool = True) -> Chunk:
        """Return a chunk of clients at the start of their round.

        Args:
            work: The round.
            clients: Ids of the clients, int64 [clients].
            reads_steps: Whether clients take the numbers of steps that ``begin`` sets; a trial
                before training takes the planned ones.
        """
        row, steps = work.broadcast.parameters, self.count_steps(clients, work.round)
        step_rows = {model: numbers_on(row, counts)[:, None] for model, counts in steps.items()}
        rates, lr = self._find_rates(work, steps)
        with _note_errors(work.round, clients, "begin"):
            planned = StepRows(step_rows)
            start = self.states.begin(
                clients,
                work.broadcast,
                work.remote,
                step_rows,
                lr,
                self.centers.measure(clients),
                self.preparation.plan_steps(clients),
            )
            if reads_steps and (changed := planned.read_changed(start)):
                steps |= self._limit_steps(clients, changed, work.round)
                for model in changed:
                    start.steps[model] = numbers_on(row, steps[model])[:, None]
                rates, start.lr = self._find_rates(work, steps)
        batches = Batches(
            self.states.data,
            clients,
            self._max_steps(steps),
            self.states.rule,
            self.seed,
            work.round,
            self.byzantine_clients.poison(clients, work.round),
            self.states.augment,
        )
        return Chunk(clients, self.client.objective, batches, steps, start, rates=rates)

    def _find_rates(
        self, work: CohortWork, steps: dict[str, list[int]]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the learning rates of all local steps, and the mean rate of each trained model.

        The former are ``None`` if the optimizer's rates hold for all steps.
        """
        row = work.broadcast.parameters
        rates = list_local_rates(self.client.local_schedule, work.optimizer, steps, work.round)
        if rates is None:
            return None, read_rates(work.optimizer, row, self.settings.local.batches_per_step)
        return rates, find_mean_rates(rates, work.optimizer, steps, row)

    def _limit_steps(
        self, clients: Tensor, steps: dict[str, list[int]], round: int
    ) -> dict[str, list[int]]:
        """Return numbers of steps that fit into the round, with 0 for clients without a batch."""
        if self.limit_steps is not None:
            steps = self.limit_steps(clients, steps, round)
        sizes = self.states.loaded.train.sizes[clients].tolist()
        has_batch = [self.states.rule.batches_per_pass(size) > 0 for size in sizes]
        return {
            model: [count * has for count, has in zip(counts, has_batch)]
            for model, counts in steps.items()
        }

    @staticmethod
    def _max_steps(steps: dict[str, list[int]]) -> list[int]:
        """Return the largest number of steps of each client, over the trained models."""
        return [max(counts) for counts in zip(*steps.values())]

    def _end_chunk(
        self,
        chunk: Chunk,
        positions: Tensor,
        metrics: dict[str, Tensor],
        memory: dict[str, Tensor],
    ) -> ChunkResults:
        """End the round of a chunk of clients, and check their uploads, proposals and states.

        Args:
            chunk: The clients, after their local steps.
            positions: Their positions in this process's part of the cohort, int64 [clients].
            metrics: Means over the local steps of the values that ``training_step`` returned,
                [clients] each.
            memory: The rows that the clients keep for the codec of uploads, by name.
        """
        client, end, numel = self.client, chunk.round, self.client.row("global").layout.numel
        finite = metrics["loss"].abs() < math.inf
        self._validate(chunk)
        end.step_means = dict(metrics) if chunk.batches.max_steps else _ZeroMeans(metrics)
        with _note_errors(chunk.batches.round, chunk.clients, "end_round"):
            uploads, new_states = client.run_end_round(end)
        usable = _UsableRows(len(chunk.clients), end.broadcast.parameters)
        if uploads is not None:
            uploads = usable.check(uploads, numel)
            if self.channel is not None:
                uploads, memory = self.channel.send(
                    uploads, chunk.clients, chunk.batches.round, memory
                )
        new_states |= memory
        states = {
            name: usable.check(new_states.get(name), default.numel(), default)
            for name, default in self.states.store.defaults.items()
        }
        for model in client.trained:
            if model != "global":
                finite &= finite_rows(usable.check(end.models[model].parameters, numel))
        proposals = self._check_proposals(end, usable)
        if uploads is not None:
            for rows in (uploads, *proposals.values()):
                finite &= finite_rows(rows)
        status = torch.full_like(finite, UploadStatus.MALFORMED, dtype=torch.int8)
        if usable.all_usable:
            status.fill_(UploadStatus.NOT_FINITE).masked_fill_(finite, UploadStatus.VALID)
        numbers = {("metrics", name): values for name, values in metrics.items()}
        numbers["status", ""] = status
        if chunk.idle:
            numbers["idle", ""] = torch.tensor(chunk.idle)
        if end.group is not None:  # clients that fail are in group 0, and send nothing
            numbers["group", ""] = end.group
        return ChunkResults(positions, chunk.clients, numbers, uploads, proposals, states)

    def _validate(self, chunk: Chunk) -> None:
        """Add the losses and scores on validation data, for algorithms that read them."""
        data, end = self.states.data, chunk.round
        for model in self.client.validated:
            models = end.models[model]
            tables = self.evaluator.own_tables(data, "val", chunk.clients, model, models)
            end.validation_losses[model] = tables.mean_losses.to(models.parameters)
            if self.evaluator.is_monitoring:
                scores = -self.evaluator.monitor(data).score(tables)  # lower is better
                end.validation_scores[model] = scores.to(models.parameters)

    def _check_proposals(self, end: ClientRound, usable: "_UsableRows") -> dict[str, Tensor]:
        """Return the clients' proposals of new server states by name, [clients, length] each."""
        proposals = {
            name: usable.check(rows, len(self.states.server_states[name]))
            for name, rows in end.proposals.items()
        }
        length = self.client.statistics("global").layout.numel
        if end.global_statistics is not None and length:
            proposals[GLOBAL_STATISTICS] = usable.check(end.global_statistics, length)
        return proposals

    def _measure(
        self,
        measure: Callable[[ClientData, Tensor, Mapping[int, Callable[[Batch], Batch]]], Tensor],
        failed: Tensor,
        clients: Tensor,
        work: CohortWork,
    ) -> Tensor:
        """Return a measure of w^t on the training data of each client, [clients, ...].

        With centers, it is a measure of the client's center.

        Args:
            measure: The measure, by the data, the clients' ids and the functions that change the
                data of Byzantine clients.
            failed: The row of a client that raises an exception, if such clients are left out.
            clients: The ids of this process's clients.
            work: The round; exceptions of clients are added to its results.
        """
        try:
            with self.settings.autocast():
                poison = self.byzantine_clients.poison(clients, work.round)
                return self.centers.measure_own(
                    lambda own: measure(self.states.data, own, poison), clients, work.remote
                )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not self.leaves_out:
                raise
            if len(clients) == 1:
                work.own.errors[int(clients)] = error
                return failed[None]
        parts = clients.split(1)
        rows = [self._measure(measure, failed, part, work) for part in parts]
        return torch.cat(rows)


def count_most_steps(objective: Objective, rule: BatchRule, sizes: Tensor) -> int:
    """Return the largest number of local steps of a client on any model in a round.

    Args:
        objective: The objective of the local steps.
        rule: The split of samples into minibatches.
        sizes: The number of training samples of each client, int64 [clients].
    """
    steps = objective.count_steps(rule, sizes.unique().tolist())
    return max(max(counts) for counts in steps.values())


def _complete_steps(chunk: Chunk, means: dict[str, Tensor]) -> dict[str, Tensor]:
    """Complete the results of clients without a step, and return the means of all clients.

    Args:
        chunk: The clients, after their local steps.
        means: The means of the outputs of ``training_step``, [clients] each; empty if no client
            takes a step.

    Returns:
        The means; 0 for a client without a step.
    """
    models, idle = chunk.round.models, chunk.idle
    means = {"loss": chunk.round.broadcast.parameters.new_zeros(len(chunk.clients)), **means}
    if not chunk.batches.max_steps:
        for model in chunk.objective.trained:
            models[model] = models[model].clone()
        return means
    if chunk.skipped:
        for model, counts in chunk.count_taken_steps().items():
            rows = chunk.round.steps[model]
            chunk.round.steps[model] = numbers_on(rows, counts)[:, None]
    if not idle:
        return means
    is_idle = numbers_on(means["loss"], idle, torch.bool)
    return {name: values.masked_fill(is_idle, 0) for name, values in means.items()}


@contextmanager
def _note_errors(round: int, clients: Tensor, hook: str) -> Iterator[None]:
    """Add a note with the round, the clients and the hook to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"In round {round}, {name_clients(clients)}, `{hook}`.")
        note_devices(error)
        raise


class _ZeroMeans(dict[str, Tensor]):
    """Zero means: the step means of clients without a step, 0 under any name."""

    def __missing__(self, name: str) -> Tensor:
        return torch.zeros_like(self["loss"])


class _UsableRows:
    """Usable rows: checks the rows that an algorithm returns for a chunk of clients.

    Args:
        num_clients: Number of clients in the chunk.
        example: A tensor with the models' dtype and device.

    Attributes:
        all_usable: Whether all checked rows are usable. If not, the chunk's clients are broken.
    """

    def __init__(self, num_clients: int, example: Tensor) -> None:
        self.num_clients = num_clients
        self.example = example
        self.all_usable = True

    def check(self, rows: object, length: int, example: Tensor | None = None) -> Tensor:
        """Return usable rows unchanged, and a tensor of NaN (of 0 for integers) for unusable ones.

        Args:
            rows: The value that an algorithm returned; may have any type.
            length: The required length of each row.
            example: A tensor with the required dtype and device; the models' by default.
        """
        example = self.example if example is None else example
        shape = (self.num_clients, length)
        usable = usable_rows(rows, shape, example)
        if usable is None:
            self.all_usable = False
            usable = example.new_full(shape, math.nan if example.is_floating_point() else 0)
        return usable
