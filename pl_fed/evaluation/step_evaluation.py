"""The evaluation of clients by the steps of a LightningModule, one client after the other."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from pl_fed.devices import note_devices
from pl_fed.evaluation.client_measures import measure
from pl_fed.evaluation.model_runner import SampleBatches
from pl_fed.evaluation.monitor import Tables
from pl_fed.random import fork_all_generators, key
from pl_fed.tasks import LightningTask
from pl_fed.tasks.metric_values import local_metrics
from pl_fed.tasks.step_predictions import join_predictions
from pl_fed.tasks.trainer_stages import is_sanity_check
from pl_fed.trees import Tree, join, select
from pl_fed.types import Batch


class StepEvaluation:
    """Step evaluation: collects the results of a module's steps for each client.

    Args:
        task: The task.
        module: The module; it holds the model of one client at a time.
        samples: The clients' samples.
        clients: Client ids, int64 [clients]. They key random draws of steps, which are the same in
            each evaluation.
    """

    def __init__(
        self, task: LightningTask, module: nn.Module, samples: SampleBatches, clients: Tensor
    ) -> None:
        self.task = task
        self.clients = clients.tolist()
        self.module = module
        self.samples = samples
        sizes, device = samples.sizes, samples.data.device
        self._loss = torch.zeros(len(sizes), dtype=torch.float64, device=device)
        self._values = self._loss.new_full((len(sizes), len(task.facts.measures)), torch.nan)
        self._further_metrics = local_metrics(task, device)

    def read_ahead(self, positions: Iterable[int]) -> None:
        """Let the workers of a data set with own batches read those of clients, in this order."""
        own, samples = self.samples.data.own_batches, self.samples
        if own is not None:
            own.read_ahead(
                lambda: (
                    cast(Tensor, samples.data.inputs_of(index))
                    for position in positions
                    for _, index in samples.client_batches(position)
                )
            )

    def evaluate(self, position: int, part: str) -> None:
        """Evaluate the client at a position on its samples of a part of the data."""
        try:
            with self._fix_draws(position):
                loss, values = self.task.evaluate(self.module, self.batches(position), part)
        except Exception as error:
            error.add_note(f"In the evaluation of client {self.clients[position]}.")
            note_devices(error)
            raise
        self._loss[position] = loss
        if not is_sanity_check(self.module):  # its logs are dropped
            self.task.warn_of_omitted(values, self.task.facts.measures)
        values |= self._measure_further(position)
        for column, name in enumerate(self.task.facts.measures):
            self._values[position, column] = values.get(name, torch.nan)

    def _measure_further(self, position: int) -> dict[str, float]:
        """Return the further metrics of the client at a position, from its predictions."""
        metrics = self._further_metrics
        if not metrics:
            return {}
        for metric in metrics.values():
            metric.reset()
        targets = join([batch.targets for batch in self.batches(position)])
        outputs = join(self._predict_batches(position)[0])
        return dict(zip(metrics, measure(metrics, *self.task.metric_inputs(outputs, targets))))

    def measure_training_loss(
        self, position: int, poison: Callable[[Batch], Batch] | None = None
    ) -> None:
        """Evaluate ``training_step`` for the client at a position, on poisoned samples if given."""
        batches = self.batches(position, poison)
        with self._fix_draws(position):
            self._loss[position] = self.task.training_mean(self.module, batches)

    def predict(self, position: int) -> Tree:
        """Return the predictions for the samples of the client at a position."""
        outputs, sizes = self._predict_batches(position)
        return join_predictions(outputs, sizes, self.samples.data.own_batches is not None)

    def _predict_batches(self, position: int) -> tuple[list[Tree], list[int]]:
        """Return the predictions for each batch of the client at a position, and its size."""
        outputs, sizes = [], []
        with self._fix_draws(position):
            for index, batch in enumerate(self.batches(position)):
                outputs.append(self.task.predict_batch(self.module, batch, index))
                sizes.append(batch.size)
        return outputs, sizes

    @contextmanager
    def _fix_draws(self, position: int) -> Iterator[None]:
        """Make the random draws of steps the same in each evaluation of a client."""
        draw = key(0, "evaluation", self.clients[position])
        with fork_all_generators(self._loss.device) as seed:
            seed(draw)
            yield

    def batches(
        self, position: int, poison: Callable[[Batch], Batch] | None = None
    ) -> "_ClientBatches":
        """Return the samples of the client at a position in batches."""
        return _ClientBatches(self.samples, position, poison)

    @property
    def losses(self) -> Tensor:
        """The mean loss of each client, float64 [clients]; 0 without samples."""
        return self._loss

    @property
    def tables(self) -> Tables:
        """The results of all clients."""
        count = self.samples.sizes.to(self._loss.device)[:, None]
        loss = self._loss * count[:, 0]
        has_loss = torch.ones_like(loss, dtype=torch.bool)  # steps say NaN themselves, as in a fit
        return Tables(torch.zeros_like(count), count, loss, has_loss, self._values)


class _ClientBatches:
    """Client batches: the samples of one client in batches; may be iterated several times."""

    def __init__(
        self, samples: SampleBatches, position: int, poison: Callable[[Batch], Batch] | None
    ) -> None:
        self.samples = samples
        self.position = position
        self.poison = poison

    def __iter__(self) -> Iterator[Batch]:
        data = self.samples.data
        for _, index in self.samples.client_batches(self.position):
            batch = Batch(data.inputs_of(index), select(data.targets, index), None, index)
            yield batch if self.poison is None else self.poison(batch)
