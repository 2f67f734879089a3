"""The federation: who takes part, who lies, how uploads are merged; and a round, step by step."""

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from pl_fed.aggregators import Aggregator, Mean
from pl_fed.attacks import Attack
from pl_fed.checks import (
    NonFiniteLossError,
    check_features,
    check_finite,
    check_net,
    check_state_memory,
    draw_byzantine,
)
from pl_fed.clients.base import Client
from pl_fed.data.batches import Batches, BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.data.module import FederatedData, global_seed
from pl_fed.engine import Chunk, EngineChoice, EngineName, Task
from pl_fed.engine.adaptation import Adaptation
from pl_fed.engine.evaluation import Evaluator, WorkSpace
from pl_fed.engine.features import moved
from pl_fed.functional.random import generator
from pl_fed.functional.rows import finite_rows
from pl_fed.metrics import ClientMetrics
from pl_fed.processes import Processes
from pl_fed.samplers import Sampler, Uniform
from pl_fed.server import Server
from pl_fed.sharing import Guests, Sharing, at_home, collected
from pl_fed.state import ClientStore
from pl_fed.types import Batch, ClientContext, Population, RoundContext

_T = TypeVar("_T")

_FINITE = "finite uploads"  # beside what training_step gives
_START = "losses at the start"
_PROPOSES = "proposes "  # and the name of a state of the server


class Federation:
    """Everything around the clients.

    Args:
        sampler: Draws the cohort of a round.
        aggregator: Merges the uploads.
        server_optimizer: Builds the optimizer that moves the global model along the merged update,
            taken for a negative gradient: SGD with learning rate 1 is FedAvg, others are FedOpt.
        attack: What byzantine clients do.
        byzantine: Which clients are byzantine: a fraction of them (rounded down), drawn by the
            seed, or a list of ids.
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
        server_optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=1.0),
        attack: Attack | None = None,
        byzantine: float | list[int] = 0.0,
        engine: EngineName = "auto",
        chunk_size: int | None = None,
        compile_mode: str | None = None,
        store: str | None = None,
        state_memory: int | float = 0.5,
        gather_memory: int = 1 << 20,
        model_selection: Literal["validation", "test"] | None = "validation",
        seed: int | None = None,
    ) -> None:
        if isinstance(byzantine, int | float) and not 0 <= byzantine <= 1:
            raise ValueError(
                "Expected argument `byzantine` to be a fraction in [0, 1] or a list of client ids"
                f" but got {byzantine}."
            )
        if byzantine and attack is None:
            raise ValueError(
                f"Expected argument `attack` to be given with `byzantine` = {byzantine} but got"
                " None."
            )
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
        self.server = Server(Mean() if aggregator is None else aggregator, server_optimizer)
        self.attack = attack
        self.byzantine = byzantine
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
        self.is_byzantine = torch.empty(0, dtype=torch.bool)
        self._room: Tensor | None = None
        self._cohorts: dict[int, Tensor] = {}  # the last one: both loop and round ask for it
        self._byzantine_share = 0.0
        self._client: Client | None = None
        self._evaluator: Evaluator | None = None
        self._adaptation: Adaptation | None = None
        self._data: ClientData | None = None
        self._moved: ClientData | None = None
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
        self.is_byzantine = draw_byzantine(self.byzantine, data.num_clients, self.seed)
        self._cohorts = {}
        self._byzantine_share = float(self.is_byzantine.double().mean())
        sizes = data.train.sizes
        cohort = self.sampler.size_of_cohort(data.num_clients)
        client.population = Population(data.num_clients, cohort, int(sizes.sum()))
        check_net(client, data)
        check_features(client, datamodule)
        if client is not self._client or data is not self._data:
            self._client, self._data, self._moved = client, data, None
            self._store, self._saved = None, None
            self._adaptation = None
            self._evaluator = Evaluator(client, self._begin_evaluation)
            self.server.reset()
        self.datamodule = datamodule
        client.check(self)
        if client.adaptation_work is not None:
            how = (self.seed, self._poison, datamodule.augment)
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
            NonFiniteLossError: If a benign client's loss or model is not finite.
        """
        started = time.perf_counter()
        cohort = self.draw_cohort(round)
        sharing = self._share(cohort)
        with self.processes.together(NonFiniteLossError):
            trained = self._train(sharing, round, optimizer, on_clients_done)
        outputs = sharing.joined(trained.outputs, self.data.x.device)
        finite, losses = outputs.pop(_FINITE, None), outputs["loss"]
        start = outputs.pop(_START, losses[:0])
        proposed = [name for name in outputs if name.startswith(_PROPOSES)]
        for name in proposed:
            del outputs[name]
        report = self._report(cohort, outputs)
        if finite is not None:
            context = replace(self.context(cohort, losses, round), start_losses=start)
            names = [name.removeprefix(_PROPOSES) for name in proposed]
            report |= self._merge(sharing, trained, finite, context, names, on_server_step)
        sharing.keep(self.store, trained.states)  # a round happens as a whole, or not at all
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
    ) -> "_Trained":
        """Run this process's clients in chunks."""
        cohort, guests = sharing.clients, sharing.fetch(self.store)
        trained, done = _Trained(len(cohort), self._room), 0
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
                uploads, rows = self._close(chunk, outputs, round)
                if start is not None:
                    outputs[_START] = start[positions.to(start.device)]
                states = {name: rows[name] for name in self.store.defaults}
                proposals = self._proposals(rows)
                outputs |= {f"{_PROPOSES}{name}": outputs["loss"] for name in proposals}
                trained.add(positions, clients, uploads, proposals, outputs, states)
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
        how = (self._rule, self.seed, round, self._poison(clients, round), self.datamodule.augment)
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
        self, chunk: Chunk, outputs: dict[str, Tensor], round: int
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Close the round on the clients; return their uploads, and their rows in the end.

        Which uploads are finite goes to the outputs of the local steps.
        """
        client, rows = self.client, dict(chunk.rows)
        rows |= {f"{model}_statistics": row for model, row in chunk.statistics.items()}
        for model in client.validates():
            args = (self.data, "val", chunk.clients, model, rows)
            rows[f"{model}_loss"] = self.evaluator.losses(*args).to(rows[model])
        rows |= {f"mean_{name}": values for name, values in outputs.items()}
        upload = client.end_round(rows)
        losses = outputs["loss"]
        finite = losses.isfinite()
        for model in client.trains:
            if model != "global":
                finite = finite & finite_rows(rows[model])
        if upload is not None:
            outputs[_FINITE] = finite_rows(upload)
            for proposal in self._proposals(rows).values():
                outputs[_FINITE] = outputs[_FINITE] & finite_rows(proposal)
            finite = finite & outputs[_FINITE]
        check_finite(chunk.clients, finite, losses, self.is_byzantine, round)
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
            return self.evaluator.start_losses(self.data, clients, self._poison(clients, round))

    def _merge(
        self,
        sharing: Sharing,
        trained: "_Trained",
        finite: Tensor,
        context: RoundContext,
        proposed: list[str],
        on_server_step: Callable[[torch.optim.Optimizer], None],
    ) -> dict[str, Tensor | float]:
        """Leave out broken uploads, and let the server merge the rest and step."""
        row, mine = self.client.row("global").data, sharing.mine
        uploads = row.expand(0, -1) if trained.uploads is None else trained.uploads
        proposals = trained.proposals
        if self._forges(sharing.cohort):  # attackers may look at all uploads
            uploads = self._forge(sharing.gathered(uploads), context)
            sharing, finite = Sharing.alone(sharing.cohort), finite_rows(uploads)
        rejected = float((~finite).sum())
        if rejected:
            uploads = uploads[finite[sharing.mine.to(finite.device)]]
            proposals = {n: each[finite[mine.to(finite.device)]] for n, each in proposals.items()}
            sharing, context = sharing.of(finite.cpu()), self._expecting(context.of(finite))
        if not len(sharing.cohort):
            return {"train/rejected": rejected}
        weights = self.data.train.sizes[sharing.cohort].to(uploads.device)
        merge = partial(sharing.merged, gather_memory=self.gather_memory)
        update = self.server.step(row, uploads, weights, context, on_server_step, merge)
        statistics = self.client.statistics("global").data
        for name, known in {"global_statistics": statistics, **self.server_states}.items():
            if name in proposed:  # constants stay as they are, bit for bit
                change = proposals.get(name, known.expand(0, -1)) - known
                known += self.processes.sum(change.sum(0)) / len(sharing.cohort)
        return {"train/update_norm": update.norm(), "train/rejected": rejected}

    def _forges(self, cohort: Tensor) -> bool:
        """Whether byzantine clients of a cohort replace their uploads."""
        forges = self.attack is not None and type(self.attack).forge is not Attack.forge
        return forges and bool(self.is_byzantine[cohort].any())

    def _forge(self, sent: Tensor, context: RoundContext) -> Tensor:
        """Let the byzantine clients of the cohort replace their uploads."""
        attack, byzantine = self.attack, self.is_byzantine[context.clients].to(sent.device)
        if attack is None:
            return sent
        sent[byzantine] = attack.forge(sent[~byzantine], sent[byzantine], context).to(sent)
        return sent

    def _poison(self, clients: Tensor, round: int) -> dict[int, Callable[[Batch], Batch]]:
        """Return, by id, what the byzantine clients among these do to their batches."""
        if self.attack is None:
            return {}
        classes = self.data.num_classes
        return {
            one: partial(self.attack.poison, context=ClientContext(self.seed, round, one, classes))
            for one in clients[self.is_byzantine[clients]].tolist()
        }

    def _report(self, cohort: Tensor, outputs: Mapping[str, Tensor]) -> dict[str, Tensor | float]:
        """Return the round's numbers: outputs are means over the benign clients of the cohort."""
        benign = ~self.is_byzantine[cohort]
        report: dict[str, Tensor | float] = {}
        if benign.any():
            chosen = benign.nonzero().flatten().to(outputs["loss"].device)
            report = {f"train/{name}": each[chosen].mean() for name, each in outputs.items()}
        numbers = {"cohort": len(cohort), "byzantine": int((~benign).sum())}
        report |= {f"train/{name}": float(number) for name, number in numbers.items()}
        return {**report, "train/rejected": 0.0, "train/update_norm": 0.0}

    def context(self, cohort: Tensor, losses: Tensor, round: int) -> RoundContext:
        """Return what aggregators and attacks may know of a round."""
        return self._expecting(RoundContext(self.seed, round, 0, cohort, losses))

    def _expecting(self, context: RoundContext) -> RoundContext:
        """Say how many byzantine uploads are to be expected among so many."""
        expected = self._byzantine_share * len(context.clients)
        return replace(context, num_byzantine=math.floor(expected + 1e-9))

    # What the clients have

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
            with torch.inference_mode(False):
                models = self.client.evaluates()
                self._metrics[part] = {
                    model: ClientMetrics(data.num_clients, data.num_classes, ~self.is_byzantine)
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
        with self.engine.autocast():
            self.evaluator.evaluate(self.data, part, clients, metrics, self._hybrid(part))

    def predict(self, clients: Tensor) -> list[dict[str, Any]]:
        """Give each client's predictions on its test data, by its personal model if it has one."""
        home = clients[self.processes.at_home(clients)]
        with self.engine.autocast():
            mine = self.evaluator.predict(self.data, home, self.client.evaluates()[-1])
        if self.processes.size == 1:
            return mine
        everyones = {one["client"]: one for each in self.processes.everyones(mine) for one in each}
        return [everyones[client] for client in clients.tolist()]

    # Stop and resume

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs beside the global model, which the client's state has."""
        return {
            "identity": self._identity(),
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


class _Trained:
    """What the local work of this process's clients gives, put together from chunks.

    Args:
        number: Of how many clients.
        room: Where uploads were put in the round before: memory that is used once more, as new
            memory of that size would be given by the system page by page.

    Attributes:
        room: Where they are put in this round; ``None`` if one chunk gave them all.
        uploads: Shape [clients, numel]; ``None`` if nothing is sent.
        proposals: What is proposed for what the server keeps, by name [clients, length].
        outputs: What ``training_step`` gave, each [clients]; and which uploads are finite.
        states: What clients keep: ids and rows by name, for each chunk.
    """

    def __init__(self, number: int, room: Tensor | None) -> None:
        self.number = number
        self.room = room
        self.uploads: Tensor | None = None
        self.proposals: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.states: list[tuple[Tensor, dict[str, Tensor]]] = []

    def add(
        self,
        positions: Tensor,
        clients: Tensor,
        uploads: Tensor | None,
        proposals: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        states: dict[str, Tensor],
    ) -> None:
        """Put in what a chunk gave, whose clients are those at some positions of the cohort."""
        for name, values in outputs.items():
            self.outputs[name] = self._with(self.outputs.get(name), positions, values)
        self.states.append((clients, states))
        if uploads is not None:
            known = self._room_for(uploads) if self.uploads is None else self.uploads
            self.uploads = self._with(known, positions, uploads)
            self.room = None if self.uploads is uploads else self.uploads
            for name, some in proposals.items():
                self.proposals[name] = self._with(self.proposals.get(name), positions, some)

    def _with(self, rows: Tensor | None, positions: Tensor, some: Tensor) -> Tensor:
        if rows is None:
            if len(some) == self.number and positions.equal(torch.arange(self.number)):
                return some
            rows = some.new_empty(self.number, *some.shape[1:])
        first, last = int(positions[0]), int(positions[0]) + len(positions)
        if positions.equal(torch.arange(first, last)):
            rows[first:last] = some
        else:
            rows[positions.to(rows.device)] = some
        return rows

    def _room_for(self, uploads: Tensor) -> Tensor | None:
        """Return the room of the round before, if it is needed and fits."""
        room, shape = self.room, (self.number, *uploads.shape[1:])
        if room is None or len(uploads) == self.number or room.shape != shape:
            return None
        return room if room.dtype == uploads.dtype and room.device == uploads.device else None


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
