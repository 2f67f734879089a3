"""Local training by an objective beside that of the local steps: adaptation and preparation."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Objective
from pl_fed.clients.model_guard import restore_models
from pl_fed.data.batches import Batches, BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.engine.base import Chunk, LocalSettings
from pl_fed.engine.choice import EngineChoice, Workload
from pl_fed.engine.failed_clients import find_failed, replace_failed
from pl_fed.tasks.trainer_stages import trainer_stage
from pl_fed.text import describe_error
from pl_fed.types import Batch

Poison = Callable[[Tensor, int], Mapping[int, Callable[[Batch], Batch]]]


class ObjectiveTraining:
    """Objective training: trains models of clients by an objective, on their training data.

    Args:
        client: The algorithm.
        objective: The objective; its models are models of the algorithm.
        rule: The split of samples into minibatches.
        settings: Precision, gradient clipping and accumulation of the local steps.
        round_engine: The engine of the rounds.
        seed: The seed of the minibatches.
        poison: Returns the functions that change the data of clients, for client ids and a round.
        augment: Applied to the inputs of each minibatch.
        place: The stage of the run, for the note of an error, with the fields ``{round}`` and
            ``{clients}``.
        leaves_out: Whether a client that raises an exception keeps the models that it starts from;
            otherwise the exception ends the run.
    """

    def __init__(
        self,
        client: Client,
        objective: Objective,
        rule: BatchRule,
        settings: LocalSettings,
        round_engine: EngineChoice,
        seed: int,
        poison: Poison,
        augment: Callable[[Tensor], Tensor] | None,
        place: str,
        leaves_out: bool = False,
    ) -> None:
        self.client = client
        self.objective = objective
        self.rule = rule
        self.settings = settings
        if not objective.accumulates:
            self.settings = replace(settings, batches_per_step=1)
        self.round_engine = round_engine
        self.seed = seed
        self.poison = poison
        self.augment = augment
        self.place = place
        self.leaves_out = leaves_out
        self._has_warned = False
        self._engine: EngineChoice | None = None

    def run(
        self,
        data: ClientData,
        clients: Tensor,
        start: ClientRound,
        round: int = 0,
        steps: Mapping[str, list[int]] | None = None,
    ) -> None:
        """Replace the objective's models of clients by trained models.

        Args:
            data: The data of the federation.
            clients: Client ids, int64 [clients].
            start: The rows of the clients; their models of the objective are replaced.
            round: The round; it determines the order of the samples.
            steps: The number of steps of each client, by the objective's model; ``None`` for the
                objective's work.
        """
        if self.rule.limit == 0:
            return
        sizes = data.train.sizes[clients].tolist()
        counts = self.objective.count_steps(self.rule, sizes) if steps is None else steps
        has_steps = torch.tensor([any(numbers) for numbers in zip(*counts.values())])
        active_positions = has_steps.nonzero().flatten()
        if not len(active_positions):
            return

        def load_chunk(positions: Tensor) -> Chunk:
            """Return a chunk of clients before the training, by their positions."""
            places, ids, own = positions.tolist(), clients[positions], start.select(positions)
            own_steps = {name: [numbers[p] for p in places] for name, numbers in counts.items()}
            most = [max(numbers) for numbers in zip(*own_steps.values())]
            poison = dict(self.poison(ids, round))
            batches = Batches(data, ids, most, self.rule, self.seed, round, poison, self.augment)
            own.optimizer_states = {}  # those of the local steps
            return Chunk(ids, self.objective, batches, own_steps, own, place=self.place)

        training, models = self.client.training, self.objective.trained
        parameters = {name: list(self.client.row(name).tensors.values()) for name in models}
        optimizer = self.objective.build_optimizer(parameters)
        self.client.train()
        try:
            guard, stage = restore_models(self.client, models), trainer_stage(self.client, "train")
            with torch.enable_grad(), guard, stage:
                workload = Workload(
                    client=self.client,
                    optimizer=optimizer,
                    cohort=active_positions,
                    load=load_chunk,
                    settings=self.settings,
                )
                device = self.client.device
                engine = self.round_engine.choose_for_evaluation(device, self._engine)
                self._engine = engine
                engine.choose(workload)

                def train(positions: Tensor) -> ClientRound:
                    chunk = load_chunk(positions)
                    engine.run(self.client, optimizer, chunk)
                    return chunk.round

                for positions in active_positions.split(engine.size or 1):
                    try:
                        trained = train(positions)
                    except Exception as error:
                        positions = self._leave_out(train, positions, clients, error)
                        if not len(positions):
                            continue
                        trained = train(positions)
                    for name in models:
                        start.models[name][positions] = trained.models[name]
        finally:
            self.client.train(training)

    def _leave_out(
        self,
        train: Callable[[Tensor], ClientRound],
        positions: Tensor,
        clients: Tensor,
        error: Exception,
    ) -> Tensor:
        """Return the positions of a chunk after an exception: see :func:`replace_failed`.

        Args:
            train: Trains clients, by their positions.
            positions: The positions of the chunk's clients, int64.
            clients: The ids of all clients, int64 [clients].
            error: The exception of the chunk.

        Raises:
            Exception: The exception if memory was short, or if it ends the run.
        """
        if not self.leaves_out or isinstance(error, torch.OutOfMemoryError):
            raise error
        failed = find_failed(train, positions, error)
        if not self._has_warned:
            self._has_warned = True
            ids, first = clients[[*failed]].tolist(), next(iter(failed.values()))
            warnings.warn(
                f"In {self.place.format(round=0, clients=f'clients {ids}')} keep the models that"
                f" they start from, because of an exception ({describe_error(first)}). This"
                " warning appears once.",
                stacklevel=2,
            )
        filled, _ = replace_failed(positions, failed)
        return filled
