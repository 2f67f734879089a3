"""The federation: who takes part, who lies, how uploads are merged; and a round, step by step."""

import copy
import hashlib
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

from pl_fed.adversary import Adversary, Knowledge
from pl_fed.aggregators import Aggregator, Chain, Mean, PreAggregator
from pl_fed.attacks import Attack
from pl_fed.checks import (
    Sent,
    check_aggregator,
    check_attacks,
    check_broken,
    check_features,
    check_net,
    check_state_memory,
)
from pl_fed.clients.base import Client
from pl_fed.data.batches import Batches, BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.data.module import FederatedData, global_seed
from pl_fed.engine import Chunk, EngineChoice, EngineName, Task
from pl_fed.engine.adaptation import Adaptation
from pl_fed.engine.evaluation import Evaluator, WorkSpace
from pl_fed.engine.features import moved
from pl_fed.engine.root import RootTraining
from pl_fed.functional.aggregation import weighted_sum
from pl_fed.functional.arguments import check_integers, check_shares
from pl_fed.functional.random import generator
from pl_fed.functional.rows import finite_rows
from pl_fed.metrics import ClientMetrics
from pl_fed.processes import Processes
from pl_fed.samplers import Sampler, Uniform
from pl_fed.server import Server
from pl_fed.sharing import Guests, Sharing, at_home, collected
from pl_fed.state import ClientStore
from pl_fed.trained import Trained
from pl_fed.types import Population, RoundContext

_T = TypeVar("_T")

_SENT = "what came"  # beside what training_step gives
_SENDS = "sends"
_START = "losses at the start"
_PROPOSES = "proposes "  # and the name of a state of the server


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
            the number to be expected, of all clients' share (rounded down), as in Ditto.
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
        state_memory: Memory for the clients' states: a share of what is free, in (0, 1], or a
            number of bytes (int).
        gather_memory: With several processes, bytes of uploads (cohort × parameters × their size)
            up to which each of them brings all uploads together; beyond, each merges a slice of the
            coordinates where the aggregator can. A mean takes neither way: it adds up.
        model_selection: By what data each client takes the better one of its own model and the
            global one, the ``hybrid`` model (FLAME, section IV): its ``"validation"`` data, or, as
            in the paper's experiments, its ``"test"`` data, which tells more than can be known and
            gives metrics of the name ``hybrid_by_test_data``; ``None`` for neither.
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
        check_shares(max_rejected=max_rejected)
        if num_byzantine is not None:
            check_integers(0, num_byzantine=num_byzantine)
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(
                f"Expected argument `chunk_size` to be at least 1 but got {chunk_size}."
            )
        if model_selection not in ("validation", "test", None):
            raise ValueError(
                'Expected argument `model_selection` to be "validation", "test" or None but got'
                f" {model_selection!r}."
            )
        check_state_memory(state_memory)
        if gather_memory < 0:
            raise ValueError(
                f"Expected argument `gather_memory` to be at least 0 but got {gather_memory}."
            )
        self.sampler = Uniform() if sampler is None else sampler
        defence = Mean() if aggregator is None else aggregator
        self.server = Server(_defence(pre_aggregators or (), defence), server_optimizer)
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
        self._room: Tensor | None = None
        self._cohorts: dict[int, Tensor] = {}  # the last one: both loop and round ask for it
        self._said_rejected = False
        self._client: Client | None = None
        self._evaluator: Evaluator | None = None
        self._adaptation: Adaptation | None = None
        self._root: RootTraining | None = None
        self._data: ClientData | None = None
        self._moved: ClientData | None = None
        self._triggered: dict[str, ClientData] = {}  # by part, of what is moved
        self._store: ClientStore | None = None
        self._saved: Mapping[str, Any] | None = None
        self._metrics: dict[str, dict[str, ClientMetrics]] = {}

    def setup(self, client: Client, datamodule: Any, stage: str) -> None:
        """Check that everything fits together, before anything is trained.

        Raises:
            TypeError: If the data is not a :class:`FederatedData`.
            ValueError: If cohort, byzantine clients or the net's output do not fit the data, or
                features are to be kept that cannot be.
        """
        if not isinstance(datamodule, FederatedData):
            raise TypeError(
                "Expected argument `datamodule` to be a pl_fed.data.FederatedData but got"
                f" {type(datamodule).__name__}."
            )
        data = datamodule.clients
        if client is not self._client or data is not self._data:  # else who lied last stays known
            self.adversary.setup(data.num_clients, data.num_classes, self.seed)
        self._cohorts = {}
        sizes = data.train.sizes
        cohort = self.sampler.size_of_cohort(data.num_clients)
        client.population = Population(data.num_clients, cohort, int(sizes.sum()))
        check_net(client, data)
        check_features(client, datamodule)
        check_attacks(client, data, (self.adversary.attack, self.adversary.corruption))
        if client is not self._client or data is not self._data:
            self._client, self._data, self._moved = client, data, None
            self._store, self._saved = None, None
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
        cohort = self.draw_cohort(round)
        self.adversary.begin(round)
        sharing = self._share(cohort)
        trained = self._train(sharing, round, optimizer, on_clients_done)
        outputs = sharing.joined(trained.outputs, self.data.x.device)
        sent, losses = outputs.pop(_SENT), outputs["loss"]
        start = outputs.pop(_START, losses[:0])
        sends = outputs.pop(_SENDS)
        proposed = [name for name in outputs if name.startswith(_PROPOSES)]
        for name in proposed:
            del outputs[name]
        if sends.any():
            sent = torch.where(sends, sent, Sent.MISSHAPEN)  # others of the cohort send something
        self._check_sent(cohort, sent, losses, round)
        whole = sent == Sent.FINE
        report = self._report(cohort, outputs, whole)
        if sends.any():
            context = replace(self.context(cohort, losses, round), start_losses=start)
            names = [name.removeprefix(_PROPOSES) for name in proposed]
            report |= self._merge(
                sharing, trained, whole, context, names, optimizer, on_server_step
            )
        kept = trained.states
        if not whole.all():
            kept, sharing = trained.states_of(cohort[whole.cpu()]), sharing.of(whole.cpu())
        sharing.keep(self.store, kept)  # a round happens as a whole, or not at all
        return {**report, "time/round": time.perf_counter() - started}

    def _share(self, cohort: Tensor) -> Sharing:
        """Share a cohort out over the processes, by the steps that its clients take."""
        if self.processes.size == 1:
            return Sharing.alone(cohort)
        steps = torch.tensor(list(self._steps(cohort).values()), dtype=torch.float64)
        return Sharing.by_work(self.processes, cohort, steps.sum(0))

    def draw_cohort(self, round: int) -> Tensor:
        """Return the ids of the clients that take part in a round."""
        if round not in self._cohorts:
            sizes = _set_up(self._data).train.sizes
            draw = generator(self.seed, "cohort", round)
            self._cohorts = {round: self.sampler.sample(len(sizes), sizes, draw)}
        return self._cohorts[round].clone()

    def _train(
        self,
        sharing: Sharing,
        round: int,
        optimizer: torch.optim.Optimizer,
        on_clients_done: Callable[[int], None],
    ) -> Trained:
        """Run this process's clients in chunks."""
        cohort, guests = sharing.clients, sharing.fetch(self.store)
        trained, done = Trained(len(cohort), self._room), 0
        start = self._start_losses(cohort, round)
        with WorkSpace(self.client, {"global", *self.client.trains}) as kept:
            load = partial(self._load, round=round, kept=kept, guests=guests, optimizer=optimizer)
            rounds = self.rounds - round
            task = Task(self.client, optimizer, cohort, load, rounds, self._steps)
            self.engine.settle(task)
            chunks = self._chunks(cohort) if len(cohort) else ()
            coming = [*(cohort[positions] for positions in chunks[1:]), self._coming(round)]
            for positions, following in zip(chunks, coming):
                self.store.prefetch(following)
                clients = cohort[positions]
                chunk = load(clients)
                chunk.on_done = _after(done, on_clients_done, len(sharing.cohort) / len(cohort))
                outputs = self.engine.run(self.client, optimizer, chunk)
                uploads, rows = self._close(chunk, outputs)
                if start is not None:
                    outputs[_START] = start[positions.to(start.device)]
                sends = uploads is not None
                outputs[_SENDS] = torch.full_like(outputs["loss"], sends, dtype=torch.bool)
                proposals = self._proposals(rows)
                outputs |= {f"{_PROPOSES}{name}": outputs["loss"] for name in proposals}
                trained.add(positions, uploads, proposals, outputs)
                trained.states.append((clients, {n: rows[n] for n in self.store.defaults}))
                done += len(clients)
        self._room = trained.room
        return trained

    def _chunks(self, cohort: Tensor) -> tuple[Tensor, ...]:
        """Return which clients of a cohort are run at a time, by their positions in it.

        Clients that are stacked wait for the one that has most to do, so they go together by that.
        """
        positions = torch.arange(len(cohort))
        if self.engine.stacks:
            steps = torch.tensor([max(each) for each in zip(*self._steps(cohort).values())])
            positions = steps.argsort(descending=True, stable=True)
        chunks: tuple[Tensor, ...] = positions.split(self.engine.size or max(1, len(cohort)))
        return chunks

    def _steps(self, clients: Tensor) -> dict[str, list[int]]:
        """Return how many steps each client takes on each model that is trained."""
        sizes, rule = self.data.train.sizes[clients].tolist(), self._rule
        work = {model: self.client.work(model) for model in self.client.trains}
        return {model: [rule.count(each, size) for size in sizes] for model, each in work.items()}

    @property
    def _rule(self) -> BatchRule:
        module = self.datamodule
        return BatchRule(module.batch_size, module.drop_last, self.shuffle, self.limit_local_steps)

    def _coming(self, round: int) -> Tensor:
        """Return the clients that the next round begins with, if it pays to know them."""
        if not self.store.on_disk:
            return torch.empty(0, dtype=torch.int64)
        cohort = self.draw_cohort(round + 1)
        return cohort[self._chunks(cohort)[0]]

    def _load(
        self,
        clients: Tensor,
        round: int,
        kept: WorkSpace,
        guests: Guests,
        optimizer: torch.optim.Optimizer,
    ) -> Chunk:
        """Bring together what a chunk of clients is run on."""
        client, steps = self.client, self._steps(clients)
        most = [max(counts) for counts in zip(*steps.values())]
        poison = self.adversary.poison(clients, round)
        how = (self._rule, self.seed, round, poison, self.datamodule.augment)
        batches = Batches(self.data, clients, most, *how)
        sent = (kept.rows["global"], kept.statistics["global"])
        work = _work(steps, optimizer, sent[0])
        if client.reads_validation:
            x, y = self.data.padded("val", clients)
            work |= {"validation_x": x.flatten(1), "validation_y": y.flatten(1)}
        rows = self._begin(clients, *sent, guests, work)
        if "global" in client.trains:
            rows["global"] = rows["broadcast"].expand(len(clients), -1)
            rows["global_statistics"] = rows["broadcast_statistics"].expand(len(clients), -1)
        statistics = {model: rows.pop(f"{model}_statistics") for model in client.trains}
        return Chunk(clients, batches, steps, rows, statistics)

    def _begin(
        self,
        clients: Tensor,
        broadcast: Tensor | None = None,
        statistics: Tensor | None = None,
        guests: Guests | None = None,
        work: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Bring together the rows of clients: what they got, what they keep, and their own models.

        Args:
            clients: Their ids.
            broadcast: The global model's row; as it is now by default.
            statistics: Its running statistics, likewise.
            guests: Rows of clients that are at home elsewhere.
            work: Rows about the local work, if a round begins.
        """
        client, store, guests = self.client, self.store, guests or Guests()
        if broadcast is None or statistics is None:
            broadcast, statistics = client.row("global").data, client.statistics("global").data
        rows = {name: guests.read(store, name, clients) for name in store.defaults}
        rows |= {"broadcast": broadcast, "broadcast_statistics": statistics, **self.server_states}
        rows["samples"] = self.data.train.sizes[clients, None].to(broadcast)
        rows["validation_samples"] = self.data.val.sizes[clients, None].to(broadcast)
        rows["client"] = clients[:, None].to(broadcast.device)
        rows |= work or {}
        for model in dict.fromkeys((*client.trains, *client.evaluates())):
            for name, row in ((model, broadcast), (f"{model}_statistics", statistics)):
                if model != "global" and name not in rows:
                    rows[name] = row.expand(len(clients), -1).clone()
        client.begin(rows)
        return rows

    def _begin_evaluation(self, clients: Tensor) -> dict[str, Tensor]:
        """Bring together the rows of clients that are to be evaluated."""
        if self._adaptation is None:
            return self._begin(clients)
        with torch.inference_mode(False):
            rows = self._begin(clients)
            self._adaptation.run(self.data, clients, rows, self._rule, self.engine)
        return rows

    def _close(
        self, chunk: Chunk, outputs: dict[str, Tensor]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Close the round on the clients; return their uploads, and their rows in the end.

        What came of each goes to the outputs of the local steps.
        """
        client, rows = self.client, dict(chunk.rows)
        rows |= {f"{model}_statistics": row for model, row in chunk.statistics.items()}
        for model in client.validates():
            args = (self.data, "val", chunk.clients, model, rows)
            rows[f"{model}_loss"] = self.evaluator.losses(*args).to(rows[model])
        rows |= {f"mean_{name}": values for name, values in outputs.items()}
        upload = client.end_round(rows)
        losses = outputs["loss"]
        finite, shape = losses.isfinite(), (len(losses), client.row("global").layout.numel)
        for model in client.trains:
            if model != "global":
                finite = finite & finite_rows(rows[model])
        misshapen = upload is not None and upload.shape != shape
        if misshapen:  # no part of it is of any use
            upload = rows["broadcast"].new_full(shape, math.nan)
        elif upload is not None:
            for sent in (upload, *self._proposals(rows).values()):
                finite = finite & finite_rows(sent)
        broken = Sent.MISSHAPEN if misshapen else Sent.NOT_FINITE
        whole = finite & (not misshapen)
        outputs[_SENT] = torch.where(whole, Sent.FINE, broken).to(torch.int8)
        return upload, rows

    def _proposals(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what clients propose for what the server keeps, each [clients, length]."""
        found = {name: rows.get(name) for name in ("global_statistics", *self.server.states)}
        return {
            n: row for n, row in found.items() if row is not None and row.dim() == 2 and row.numel()
        }

    def _start_losses(self, clients: Tensor, round: int) -> Tensor | None:
        """Return the loss of w^t over all training data of each client, if one asks for it."""
        if not self.server.aggregator.needs_start_losses or not len(clients):
            return None
        with self.engine.autocast():
            poison = self.adversary.poison(clients, round)
            return self.evaluator.start_losses(self.data, clients, poison)

    def _check_sent(self, cohort: Tensor, sent: Tensor, losses: Tensor, round: int) -> None:
        """Stop if too many benign clients are broken, and say once that some are."""
        benign = ~self.is_byzantine[cohort]
        if not check_broken(sent, benign, losses, cohort, round, self.max_rejected):
            return
        if not self._said_rejected:
            self._said_rejected = True
            broken = (sent.cpu() != Sent.FINE) & benign
            rank_zero_warn(
                f"In round {round} the uploads of clients {cohort[broken].tolist()} were left out,"
                " which hold NaN or infinity, or are of a wrong length: the round goes on without"
                " them. This is said once; `train/rejected` counts them in every round."
            )

    def _merge(
        self,
        sharing: Sharing,
        trained: Trained,
        finite: Tensor,
        context: RoundContext,
        proposed: list[str],
        optimizer: torch.optim.Optimizer,
        on_server_step: Callable[[torch.optim.Optimizer], None],
    ) -> dict[str, Tensor | float]:
        """Leave out broken uploads, and let the server merge the rest and step."""
        row, mine, notes = self.client.row("global").data, sharing.mine, _Notes()
        none = row.expand(int(mine.sum()), -1)  # where clients should have sent something
        uploads = none if trained.uploads is None else trained.uploads
        aggregator, proposals = self.server.aggregator, trained.proposals
        statistics = self.client.statistics("global").data
        kept = {"global_statistics": statistics, **self.server_states}
        cohort, everyone = sharing.cohort, len(sharing.cohort)
        if aggregator.needs_root:
            context = replace(context, root=self._root_update(context.round, optimizer))
        context = replace(context, note=notes, broadcast=row.clone())
        if self.adversary.forges(cohort, context.round):  # attackers may look at all uploads
            notes("forged", float(self.adversary.attacks(cohort, context.round).sum()))
            merge = partial(self._tried, context=context)
            sent = sharing.gathered(trained.changeable_uploads(uploads))
            uploads = self.adversary.forge(sent, finite, context, merge)
            proposals = _proposed_by(finite[mine.to(finite.device)], proposals, kept)
            sharing, finite = Sharing.alone(cohort), self._after_forging(uploads, finite, context)
        rejected = float((~finite).sum())
        if rejected:
            uploads = uploads[finite[sharing.mine.to(finite.device)]]
            proposals = {n: each[finite[mine.to(finite.device)]] for n, each in proposals.items()}
            sharing, context = sharing.of(finite.cpu()), self._expecting(context.of(finite))
        notes("rejected", rejected)
        if not len(sharing.cohort):
            return notes.report
        weights = self.data.train.sizes[sharing.cohort].to(uploads.device)
        how = partial(sharing.merged, gather_memory=self.gather_memory)
        try:
            update = self.server.step(row, uploads, weights, context, on_server_step, how)
        except ValueError as error:
            if not rejected:
                raise
            left = f"{int(rejected)} of {everyone} were left out of round {context.round} as broken"
            raise ValueError(f"{str(error).rstrip('.')}; of the uploads, {left}.") from error
        notes("benign_distance", self._benign_distance(sharing, uploads, weights, update))
        for name, known in kept.items():
            if name in proposed:  # constants stay as they are, bit for bit
                change = proposals.get(name, known.expand(0, -1)) - known
                known += self.processes.sum(change.sum(0)) / len(sharing.cohort)
        return {**notes.report, "train/update_norm": update.norm()}

    def _tried(self, sent: Tensor, whole: Tensor, context: RoundContext) -> Tensor:
        """Return what the server would make of a round, of which it remembers nothing."""
        context = replace(self._expecting(context.of(whole)), note=lambda *_: None)
        weights = self.data.train.sizes[context.clients].to(sent.device)
        aggregator = copy.deepcopy(self.server.aggregator).to(sent.device)
        merged: Tensor = aggregator(sent if whole.all() else sent[whole], weights, context)
        return merged

    def _after_forging(self, uploads: Tensor, finite: Tensor, context: RoundContext) -> Tensor:
        """Return which uploads are whole: what is forged counts by itself."""
        forged = self.adversary.attacks(context.clients, context.round).to(finite.device)
        return finite_rows(uploads) & (finite | forged)

    def _root_update(self, round: int, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return what the server's own data adds to the global model: in every process the same."""
        if self._root is None:
            self._root = RootTraining(self.client, self.seed, self.datamodule.augment)
        how = (self.engine.autocast, self.engine.clipping)
        return self._root.run(self.data, self._rule, round, optimizer, *how)

    def _benign_distance(
        self, sharing: Sharing, uploads: Tensor, weights: Tensor, update: Tensor
    ) -> Tensor | float:
        """Return how far the merged update is from the mean of the benign uploads."""
        benign = ~self.is_byzantine[sharing.cohort]
        number = int(benign.sum())
        if not number:
            return math.nan
        if number == len(benign) and self.server.aggregator.mass(weights) == number:
            return 0.0  # it is that mean
        shares = benign[sharing.mine].to(uploads.device) / number
        mean = sharing.processes.sum(weighted_sum(uploads, shares))
        distance: Tensor = (update - mean).norm()
        return distance

    def _report(
        self, cohort: Tensor, outputs: Mapping[str, Tensor], finite: Tensor
    ) -> dict[str, Tensor | float]:
        """Return the round's numbers: outputs are means over the benign clients of the cohort."""
        benign = ~self.is_byzantine[cohort]
        counts = benign & finite.cpu()
        report: dict[str, Tensor | float] = {}
        if counts.any():
            chosen = counts.nonzero().flatten().to(outputs["loss"].device)
            report = {f"train/{name}": each[chosen].mean() for name, each in outputs.items()}
        numbers = {"cohort": len(cohort), "byzantine": int((~benign).sum())}
        report |= {f"train/{name}": float(number) for name, number in numbers.items()}
        rejected = float(len(cohort) - int(finite.sum()))
        return report | _Notes().report | {"train/rejected": rejected, "train/update_norm": 0.0}

    def context(self, cohort: Tensor, losses: Tensor, round: int) -> RoundContext:
        """Return what aggregators and attacks may know of a round."""
        return self._expecting(RoundContext(self.seed, round, clients=cohort, losses=losses))

    def _expecting(self, context: RoundContext) -> RoundContext:
        """Say how many byzantine uploads are to be expected among so many."""
        expected = self.num_byzantine
        if expected is None:
            expected = math.floor(self.adversary.share * len(context.clients) + 1e-9)
        return replace(context, num_byzantine=expected)

    # What the clients have

    @property
    def is_byzantine(self) -> Tensor:
        """Which clients are byzantine, in the round at hand, bool [clients]."""
        return self.adversary.is_byzantine

    @property
    def client(self) -> Client:
        """The algorithm that is run."""
        return _set_up(self._client)

    @property
    def data(self) -> ClientData:
        """The clients' data, where the client's models are, in their precision.

        If the net keeps features, they stand for the inputs: computed when first asked for, by the
        body of the checkpoint if there is one.
        """
        row = self.client.row("global").data
        data = self._moved
        if data is None or data.x.device != row.device or data.x.dtype != row.dtype:
            with torch.inference_mode(False), self.engine.autocast():
                data = self._moved = moved(self.client, _set_up(self._data))
                self._triggered = {}
        return data

    @property
    def server_states(self) -> dict[str, Tensor]:
        """What the server keeps beside the global model, where that is."""
        server, row = self.server, self.client.row("global").data
        with torch.inference_mode(False):
            if not server.states:
                first = self.client.server_states()
                server.states = {name: each.detach().clone() for name, each in first.items()}
            server.states = {name: each.to(row) for name, each in server.states.items()}
        return server.states

    @property
    def store(self) -> ClientStore:
        """What the clients keep between rounds."""
        if self._store is None:
            states = dict(self.client.states())
            for model in self.client.trains:
                if model != "global":
                    states[f"{model}_statistics"] = self.client.statistics(model).data
            with torch.inference_mode(False):
                self._store = ClientStore(
                    len(self.is_byzantine), states, self.store_folder, self.state_memory
                )
            if self._saved is not None:
                self._store.load_state_dict(at_home(self.processes, self._saved))
                self._saved = None
        return self._store

    # Evaluation

    @property
    def evaluator(self) -> Evaluator:
        """Runs models on the clients' own data."""
        return _set_up(self._evaluator)

    def metrics(self, part: str) -> Mapping[str, ClientMetrics]:
        """Return the metrics of ``"val"`` or ``"test"``, by model."""
        if part not in self._metrics:  # tables of all clients
            data = _set_up(self._data)
            sizes = (data.num_clients, data.num_classes)
            with torch.inference_mode(False):
                models = self.client.evaluates()
                self._metrics[part] = {
                    model: ClientMetrics(*sizes, ~self.is_byzantine, self.adversary.triggers)
                    for model in (*models, *self._hybrid(part))
                }
        return self._metrics[part]

    def _hybrid(self, part: str) -> dict[str, str]:
        """Return under what name the better model of each client has metrics, and by what data."""
        models, data = self.client.evaluates(), _set_up(self._data)
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
        what = (metrics, self._hybrid(part), self._shown(part))
        with self.engine.autocast():
            self.evaluator.evaluate(self.data, part, clients, *what)

    def _shown(self, part: str) -> ClientData | None:
        """Return a part's samples as the attacker shows them to models, if it does."""
        data, attack = self.data, self.adversary.attack
        if attack is None or not attack.triggers:
            return None
        if part not in self._triggered:
            with torch.inference_mode(False):
                self._triggered[part] = data.shown(part, attack.trigger)
        return self._triggered[part]

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
        """Return the same of one client."""
        return next(self.models_of(torch.tensor([client]), model))

    # Stop and resume

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs beside the global model, which the client's state has."""
        return {
            "identity": self._identity(),
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
        for what, here in self._identity().items():
            there = state["identity"].get(what)
            if there != here:
                raise ValueError(
                    f"Expected a checkpoint whose {what} is {_short(here)} but got one with"
                    f" {_short(there)}."
                )
        if self.adversary.redraw:
            self.adversary.is_byzantine = state["byzantine"]
        self.engine.load_state_dict(state["engine"])
        self.server.load_state_dict(state["server"])
        self._store, self._saved = None, state["store"]  # loaded where the models will be
        self._moved = None  # and features by the body that will be loaded

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to fit."""
        layout = self.client.row("global").layout
        shapes = zip(layout.names, layout.shapes)
        sizes = _set_up(self._data).train.sizes
        digest = hashlib.blake2b(sizes.numpy().tobytes(), digest_size=8).hexdigest()
        return {
            "seed": self.seed,
            "algorithm": type(self.client).__name__,
            "net": "; ".join(f"{name} {list(shape)}" for name, shape in shapes),
            "number of clients": len(sizes),
            "clients' numbers of training samples": f"{int(sizes.sum())} with digest {digest}",
        }


class _Notes:
    """What is counted in a round: numbers of one word add up."""

    def __init__(self) -> None:
        words = ("forged", "clipped", "dropped", "rejected", "benign_distance")
        self.report: dict[str, Tensor | float] = {f"train/{word}": 0.0 for word in words}

    def __call__(self, word: str, number: float | Tensor) -> None:
        name = f"train/{word}"
        self.report[name] = self.report.get(name, 0.0) + number


def _proposed_by(
    whole: Tensor, proposals: dict[str, Tensor], kept: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Let broken clients, who may forge an upload that is whole, propose no change."""
    if whole.all():
        return proposals
    return {n: each.where(whole[:, None], kept[n]) for n, each in proposals.items()}


def _defence(first: Sequence[PreAggregator], then: Aggregator) -> Aggregator:
    return Chain(first, then) if first else then


def _set_up(thing: _T | None) -> _T:
    if thing is None:
        raise RuntimeError("Expected the federation to be set up by a trainer but it was not.")
    return thing


def _work(
    steps: Mapping[str, list[int]], optimizer: torch.optim.Optimizer, like: Tensor
) -> dict[str, Tensor]:
    """Return for each trained model how many steps clients take, and their learning rate."""
    rows = {
        f"{model}_steps": torch.tensor(counts, dtype=torch.int64, device=like.device)[:, None]
        for model, counts in steps.items()
    }
    for group in optimizer.param_groups:
        rows[f"{group['name']}_lr"] = like.new_tensor([float(group.get("lr", math.nan))])
    return rows


def _after(done: int, report: Callable[[int], None], others: float) -> Callable[[int], None]:
    """Report how many clients of the cohort are done by how many of a chunk are.

    Args:
        done: Clients of this process that were done before the chunk.
        report: Called with the number.
        others: Clients of all processes for each of this one's, which are taken to be as fast.
    """
    return lambda more: report(round((done + more) * others))


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
