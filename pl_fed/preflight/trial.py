"""The input of a trial before training: an algorithm, and samples as its local steps get them."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Objective
from pl_fed.clients.features import compute_batch_features
from pl_fed.clients.kept_parts import restore_values
from pl_fed.clients.round_rules import StepRows, call_hook
from pl_fed.data.client_data import ClientData, integers_to_floats
from pl_fed.engine.base import LocalSettings, as_outputs
from pl_fed.engine.own_samples import OwnSamples
from pl_fed.preflight.explanations import call_or_explain, list_shapes
from pl_fed.random import fork_all_generators, fork_torch_rng, read_generators
from pl_fed.trees import select, tree_map
from pl_fed.types import Batch

_MINIBATCH = 2  # samples of the local step of a trial
_SPREAD = 64  # samples of a trial of evaluation steps
_OWN_SAMPLES = 3  # of a client in a pass over its own samples
_SPREAD_OWN = 8  # of batches of the data set's own, which may be large


@dataclass(frozen=True)
class Trial:
    """Trial: an algorithm and the data on which it is tried before training.

    Attributes:
        client: The algorithm.
        data: The clients' data.
        augment: Changes the inputs of each minibatch.
        settings: Precision, gradient clipping and accumulation of the local steps.
        takes_integers: Whether integer inputs stay integers.
    """

    client: Client
    data: ClientData
    augment: Callable[[Any], Any] | None = None
    settings: LocalSettings = field(default_factory=LocalSettings)
    takes_integers: bool = True

    def copy(self) -> "Trial":
        """Return a trial of a copy of the algorithm, with the same trainer.

        Raises:
            Exception: If Python cannot copy it, for example an attribute with a lock.
        """
        client = copy.deepcopy(self.client)
        client.renew_rows()
        with suppress(RuntimeError):  # the client has no trainer
            client.trainer = self.client.trainer
        return replace(self, client=client)

    @contextmanager
    def lend_copy(self) -> Iterator[tuple["Trial", Callable[[int], None]]]:
        """Yield a trial of a copy in evaluation mode, and a function that seeds all generators.

        The global generators, and the algorithm's values that the copy reaches, are restored.
        """
        copied = self.copy()
        with (
            restore_values(self.client),
            fork_all_generators(self.client.device) as seed,
            self.settings.autocast(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            copied.client.eval()
            yield copied, seed

    def place(self, batch: Batch) -> Batch:
        """Return a batch on the net's device and in its input format."""
        client, inputs = self.client, batch.inputs
        if not self.takes_integers:
            inputs = integers_to_floats(inputs, client.row("global").data.dtype)
        return batch._replace(inputs=client.place(inputs), targets=client.place(batch.targets))

    def load(self, index: Tensor) -> Batch:
        """Return samples on the net's device and in its input format."""
        batch = self.place(self.data.batch(index))
        index = index.to(batch.device)
        return batch._replace(samples=index, visits=torch.zeros_like(index))

    def first_samples(self, count: int = 2) -> Batch:
        """Return a few training samples.

        Their number differs from the number of classes. Otherwise a criterion that broadcasts [2,
        2] outputs against [2] class ids would raise no error.
        """
        count += self.data.num_classes == count
        return self.load(self.data.train.index[:count])

    def spread_samples(self, part: str) -> Batch:
        """Return samples of a part, spread over all clients; training samples if it has none."""
        index = self.data.part(part).index
        index = index if len(index) else self.data.train.index
        number = _SPREAD if self.data.own_batches is None else _SPREAD_OWN
        return self.load(index[:: -(-len(index) // number)])

    def augment_batch(self, batch: Batch) -> Batch:
        """Return a batch with augmented inputs, if ``augment`` is set.

        Raises:
            ValueError: If ``augment`` fails.
        """
        augment, inputs = self.augment, batch.inputs
        if augment is None:
            return batch
        augmented = call_or_explain(
            f"Expected argument `augment` to take inputs of shape {list_shapes(inputs)} but that",
            lambda: augment(inputs),
        )
        return batch._replace(inputs=augmented)

    def load_minibatch(self, index: Tensor) -> Batch:
        """Return samples as in local steps: features replace inputs, augmentation changes them."""
        batch = self.load(index)._replace(visits=None)  # only attacks receive them
        return self.augment_batch(compute_batch_features(self.client, batch))

    def _load_own(self, index: Tensor) -> Batch:
        """Return samples as a pass over own samples gets them."""
        return compute_batch_features(self.client, self.load(index))

    def new_round(self, number: int) -> ClientRound:
        """Return the first round of one client, with one local step."""
        client, data = self.client, self.data
        round = client.new_round(samples=int(data.train.sizes[number]))
        round.ids = round.ids.new_tensor([number])
        round.validation_samples.fill_(int(data.val.sizes[number]))
        own = OwnSamples(client, data, self._load_own, most=_OWN_SAMPLES)
        round.visit_samples = own.visit
        if client.reads_class_counts:
            round.class_counts = data.class_counts(round.ids.cpu()).to(round.samples)
        if client.reads_validation:
            inputs, targets = (select(tree, 0) for tree in data.pad_part("val", round.ids.cpu()))
            batch = compute_batch_features(client, self.place(Batch(inputs, targets)))
            round.validation_inputs = tree_map(lambda leaf: leaf.flatten()[None], batch.inputs)
            round.validation_targets = tree_map(lambda leaf: leaf.flatten()[None], batch.targets)
        return round


class TrialRound:
    """Round of one client on a few of its samples, hook after hook, without an optimizer step.

    Engines seed local steps by a key of round and client; here, steps draw equal numbers.

    Args:
        trial: The algorithm and its samples.
        number: The id of a client with samples.

    Attributes:
        round: The client's values, as the hooks change them.
        draws: Whether a hook has drawn from a global generator.
    """

    def __init__(self, trial: Trial, number: int) -> None:
        self.round = trial.new_round(number)
        self.draws = False
        self._trial = trial
        self._outputs: dict[str, Tensor] = {}
        self._index = trial.data.train.samples(number)[:_MINIBATCH]

    def begin(self) -> None:
        """Run ``begin``, and check the steps and learning rates that it asks for."""
        planned = StepRows(self.round.steps)
        with self._note_draws():
            planned.read_changed(self._trial.client.run_begin(self.round))

    def prepare(self) -> None:
        """Run a step of the preparation, if the algorithm has one."""
        if self._trial.client.preparation is not None:
            self._step(self._trial.client.preparation)

    def end_preparation(self) -> None:
        """Run ``end_preparation``, if the algorithm has a preparation."""
        if self._trial.client.preparation is not None:
            with self._note_draws():
                call_hook("end_preparation", self._trial.client.end_preparation, self.round)

    def train(self) -> None:
        """Run ``training_step``."""
        self._outputs = self._step(self._trial.client.objective)

    def start(self) -> None:
        """Run all hooks before ``end_round``."""
        self.begin()
        self.prepare()
        self.end_preparation()
        self.train()

    def repeat(self, clients: int) -> "TrialRound":
        """Return the round of several such clients, before its end."""
        repeated = copy.copy(self)
        repeated.round = self.round.select(torch.zeros(clients, dtype=torch.int64))
        return repeated

    def end(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Run ``end_round`` on moved models, and return the upload and the states.

        Each trained model of each client moves by a constant of its own.
        """
        client, round, example = self._trial.client, self.round, self.round.broadcast.parameters
        moves = 0.01 * torch.arange(1, 1 + len(round), device=example.device)[:, None] ** 2
        for position, name in enumerate(client.trained):
            model = round.models[name] = round.models[name].clone()
            model.parameters = model.parameters + moves.to(model.parameters) * (1 + position)
        round.step_means = {
            name: output.detach().to(example).repeat(len(round))
            for name, output in self._outputs.items()
        }
        round.validation_losses = {name: example.new_ones(len(round)) for name in client.validated}
        with self._note_draws():
            return client.run_end_round(round)

    @contextmanager
    def _note_draws(self) -> Iterator[None]:
        """Note if a hook draws from a global generator."""
        before = read_generators()
        yield
        self.draws |= read_generators() != before

    def _step(self, objective: Objective) -> dict[str, Tensor]:
        """Return the outputs of an objective for the client's minibatch."""
        client = self._trial.client
        with fork_torch_rng(client.device) as seed, client.reading(self.round.client_rows(0)):
            seed(0)
            return as_outputs(objective.step(self._trial.load_minibatch(self._index), 0))


def lend_optimizer(
    modules: Iterable[nn.Module],
    client: Client,
    optimizer: torch.optim.Optimizer,
    on_read: Callable[[], None] = lambda: None,
) -> None:
    """Give modules an optimizer and its schedule for their steps: a trainer has none yet.

    Args:
        modules: The modules.
        client: The algorithm.
        optimizer: The optimizer.
        on_read: Called when a module asks for one of them.
    """
    schedule = client.build_schedule(optimizer)

    def lend(lent: Any) -> Any:
        """Return an optimizer or a schedule to a module."""
        on_read()
        return lent

    for module in modules:
        vars(module)["optimizers"] = lambda *_, **__: lend(optimizer)
        vars(module)["lr_schedulers"] = lambda: lend(schedule)
