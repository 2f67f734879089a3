"""The local work of a round: the clients of a cohort are trained, in chunks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.data.batches import Batches, BatchRule
from pl_fed.engine import Chunk, EngineChoice, Task
from pl_fed.engine.evaluation import Evaluator, WorkSpace
from pl_fed.functional.rows import finite_rows, usable_rows
from pl_fed.rounds.adversary import Adversary
from pl_fed.rounds.checks import Sent
from pl_fed.rounds.holdings import Holdings
from pl_fed.rounds.sharing import Guests, Sharing
from pl_fed.rounds.trained import Trained

_SENT = "what came"  # outputs beside what training_step gives
_SENDS = "whether it sends"
_START = "losses at the start"
_PROPOSES = "proposes "  # and the name of a state of the server


@dataclass(frozen=True)
class Outcome:
    """What came of the local work of a whole cohort, in every process the same.

    Attributes:
        outputs: What ``training_step`` gave, each [cohort].
        sent: What came of each client, int8 [cohort]: see :class:`Sent`.
        sends: Whether any client sends anything.
        start_losses: The loss of w^t over all training data of each client, [cohort]; or empty.
        proposed: The names of what the server keeps of which any client proposes a change.
    """

    outputs: dict[str, Tensor]
    sent: Tensor
    sends: bool
    start_losses: Tensor
    proposed: list[str]

    @classmethod
    def of(
        cls, sharing: Sharing, trained: Trained, device: torch.device, trains: Sequence[str]
    ) -> "Outcome":
        """Bring together what came of all processes' clients.

        Who sends nothing, where others do or the global model is trained, is broken.
        """
        outputs = sharing.joined(trained.outputs, device)
        sent, send = outputs.pop(_SENT), outputs.pop(_SENDS)
        start = outputs.pop(_START, outputs["loss"][:0])
        flags = {name: outputs.pop(name) for name in [*outputs] if name.startswith(_PROPOSES)}
        proposed = [name.removeprefix(_PROPOSES) for name, flag in flags.items() if flag.any()]
        sends = bool(send.any())
        if sends or "global" in trains:
            sent = torch.where(send, sent, Sent.MISSHAPEN)
        return cls(outputs, sent, sends, start, proposed)

    @property
    def losses(self) -> Tensor:
        """Mean training loss of each client over its local steps, [cohort]."""
        return self.outputs["loss"]

    @property
    def whole(self) -> Tensor:
        """Which clients are not broken, bool [cohort]."""
        return self.sent == Sent.FINE


@dataclass(frozen=True)
class LocalTraining:
    """How a round's clients are trained.

    Attributes:
        holdings: What the clients have.
        engine: Runs them.
        evaluator: Measures the losses that the algorithm asks for.
        adversary: Poisons data.
        rule: How samples become minibatches.
        augment: Applied to the inputs of each minibatch.
        seed: The seed of the federation.
        round: The round, from 0.
        optimizer: The local optimizer, with this round's learning rates.
    """

    holdings: Holdings
    engine: EngineChoice
    evaluator: Evaluator
    adversary: Adversary
    rule: BatchRule
    augment: Callable[[Tensor], Tensor] | None
    seed: int
    round: int
    optimizer: torch.optim.Optimizer

    @property
    def client(self) -> Client:
        """The algorithm that is run."""
        return self.holdings.client

    def steps(self, clients: Tensor) -> dict[str, list[int]]:
        """Return how many steps each client takes on each model that is trained."""
        sizes = self.holdings.loaded.train.sizes[clients].tolist()
        work = {model: self.client.work(model) for model in self.client.trains}
        return {model: [self.rule.count(each, n) for n in sizes] for model, each in work.items()}

    def run(
        self,
        sharing: Sharing,
        room: Tensor | None,
        ahead: tuple[float, float],
        following: Tensor,
        measures_start: bool,
        on_clients_done: Callable[[int], None],
    ) -> Trained:
        """Train this process's clients of a cohort.

        Args:
            sharing: The cohort.
            room: Where uploads were put in the round before: see :class:`Trained`.
            ahead: How many rounds are to be run, with this one, and in how many seconds at most.
            following: The next cohort, whose rows may be fetched ahead; or no clients.
            measures_start: Whether the loss of w^t over all training data is asked for.
            on_clients_done: Called with the number of clients that are done.

        Returns:
            What came of them; :class:`Outcome` brings it together with other processes'.
        """
        client, store = self.client, self.holdings.store
        cohort, guests = sharing.clients, sharing.fetch(store)
        trained, done = Trained(len(cohort), room), 0
        server_names = list(self._server_lengths)
        start = self._start_losses(cohort) if measures_start and len(cohort) else None
        with WorkSpace(client, {"global", *client.trains}) as kept:

            def load(clients: Tensor) -> Chunk:
                return self.load(clients, kept, guests)

            self.engine.settle(Task(client, self.optimizer, cohort, load, *ahead, self.steps))
            chunks = self._chunks(cohort)
            coming = [cohort[positions] for positions in chunks[1:]]
            coming += [following[positions] for positions in self._chunks(following)[:1]]
            coming += [following[:0]]
            for positions, next_ones in zip(chunks, coming):
                store.prefetch(next_ones)
                clients = cohort[positions]
                chunk = load(clients)
                chunk.on_done = _after(done, on_clients_done, len(sharing.cohort) / len(cohort))
                outputs = self.engine.run(client, self.optimizer, chunk)
                uploads, proposals, rows = self._close(chunk, outputs)
                if start is not None:
                    outputs[_START] = start[positions.to(start.device)]
                sends = uploads is not None
                flags = {_SENDS: sends}  # by the same names in every process
                flags |= {f"{_PROPOSES}{name}": name in proposals for name in server_names}
                for name, flag in flags.items():
                    outputs[name] = torch.full_like(outputs["loss"], flag, dtype=torch.bool)
                trained.add(positions, uploads, proposals, outputs)
                trained.states.append((clients, {n: rows[n] for n in store.defaults}))
                done += len(clients)
        current = {"global_statistics": kept.statistics["global"], **self.holdings.server_states}
        trained.complete_proposals(current)
        return trained

    def _chunks(self, cohort: Tensor) -> tuple[Tensor, ...]:
        """Return which clients of a cohort are run at a time, by their positions in it.

        Clients that are stacked wait for the one that has most to do, so they go together by that.
        """
        if not len(cohort):
            return ()
        positions = torch.arange(len(cohort))
        if self.engine.stacks:
            steps = torch.tensor([max(each) for each in zip(*self.steps(cohort).values())])
            positions = steps.argsort(descending=True, stable=True)
        chunks: tuple[Tensor, ...] = positions.split(self.engine.size or len(cohort))
        return chunks

    def load(self, clients: Tensor, kept: WorkSpace, guests: Guests) -> Chunk:
        """Bring together what a chunk of clients is run on.

        Args:
            clients: Their ids, int64 [clients].
            kept: What the client's models were before the round.
            guests: Rows of clients that are at home elsewhere.
        """
        client, data, steps = self.client, self.holdings.data, self.steps(clients)
        most = [max(counts) for counts in zip(*steps.values())]
        poison = self.adversary.poison(clients, self.round)
        how = (self.rule, self.seed, self.round, poison, self.augment)
        batches = Batches(data, clients, most, *how)
        sent = (kept.rows["global"], kept.statistics["global"])
        work = _work(steps, self.optimizer, sent[0])
        if client.reads_validation:
            x, y = data.padded("val", clients)
            work |= {"validation_x": x.flatten(1), "validation_y": y.flatten(1)}
        rows = self.holdings.begin(clients, *sent, guests, work)
        if "global" in client.trains:
            rows["global"] = rows["broadcast"].expand(len(clients), -1)
            rows["global_statistics"] = rows["broadcast_statistics"].expand(len(clients), -1)
        statistics = {model: rows.pop(f"{model}_statistics") for model in client.trains}
        return Chunk(clients, batches, steps, rows, statistics)

    def _close(
        self, chunk: Chunk, outputs: dict[str, Tensor]
    ) -> tuple[Tensor | None, dict[str, Tensor], dict[str, Tensor]]:
        """Close the round on the clients; return uploads, proposals, and their rows in the end.

        What came of each goes to the outputs of the local steps.
        """
        client, rows = self.client, dict(chunk.rows)
        rows |= {f"{model}_statistics": row for model, row in chunk.statistics.items()}
        for model in client.validates():
            args = (self.holdings.data, "val", chunk.clients, model, rows)
            rows[f"{model}_loss"] = self.evaluator.losses(*args).to(rows[model])
        rows |= {f"mean_{name}": values for name, values in outputs.items()}
        upload = client.end_round(rows)
        if "global" in client.evaluates() and "global" not in client.trains:
            trained = rows.get(f"{client.trains[-1]}_statistics")
            if trained is not None:
                rows.setdefault("global_statistics", trained)
        losses, numel = outputs["loss"], client.row("global").layout.numel
        rules = _RowRules(len(losses), chunk.rows["broadcast"])
        finite = losses.isfinite()
        for name, default in self.holdings.store.defaults.items():
            rows[name] = rules.keep_to(rows.get(name), default.numel(), default)
        for model in client.trains:
            if model != "global":
                rows[model] = rules.keep_to(rows.get(model), numel)
                finite = finite & finite_rows(rows[model])
        proposals = self._proposals(rows, chunk, rules)
        if upload is not None:
            upload = rules.keep_to(upload, numel)
            for sent in (upload, *proposals.values()):
                finite = finite & finite_rows(sent)
        broken = Sent.MISSHAPEN if rules.broken else Sent.NOT_FINITE
        valid = finite & (not rules.broken)
        outputs[_SENT] = torch.where(valid, Sent.FINE, broken).to(torch.int8)
        return upload, proposals, rows

    def _proposals(
        self, rows: Mapping[str, Tensor], chunk: Chunk, rules: "_RowRules"
    ) -> dict[str, Tensor]:
        """Return what clients propose for what the server keeps, each [clients, length].

        A server state that is still the one row which all clients were given is no proposal.
        """
        proposals = {}
        for name, length in self._server_lengths.items():
            row, received = rows.get(name), chunk.rows.get(name)
            if row is not None and not (row is received and row.dim() == 1):
                proposals[name] = rules.keep_to(row, length)
        return proposals

    @property
    def _server_lengths(self) -> dict[str, int]:
        """How long each row is that the server keeps beside the global model."""
        lengths = {"global_statistics": self.client.statistics("global").layout.numel}
        lengths |= {name: row.numel() for name, row in self.holdings.server_states.items()}
        return {name: length for name, length in lengths.items() if length}

    def _start_losses(self, clients: Tensor) -> Tensor:
        """Return the loss of w^t over all training data of each client."""
        with self.engine.autocast():
            poison = self.adversary.poison(clients, self.round)
            return self.evaluator.start_losses(self.holdings.data, clients, poison)


class _RowRules:
    """What rows must be that a chunk of clients gives, and whether all of them are.

    Args:
        number: How many clients there are.
        like: A tensor on the device and of the dtype of the models.

    Attributes:
        broken: Whether any rows could not be used: no part of what the chunk gave is, then.
    """

    def __init__(self, number: int, like: Tensor) -> None:
        self.number = number
        self.like = like
        self.broken = False

    def keep_to(self, rows: object, length: int, like: Tensor | None = None) -> Tensor:
        """Return rows as they may be used; NaN, and note it, if they cannot be."""
        like, shape = self.like if like is None else like, (self.number, length)
        usable = usable_rows(rows, shape, like)
        if usable is None:
            self.broken = True
            usable = like.new_full(shape, math.nan if like.is_floating_point() else 0)
        return usable


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
