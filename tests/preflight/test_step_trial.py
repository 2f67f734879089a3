"""What local steps change is per client as buffers are, or refused before training by name."""

import copy
import random

import pytest
import torch
from further_cases import mark_further
from small_federations import Only, classes, run_tried_rounds, seeded, shared_out
from stateful_modules import ACCEPTED, REFUSED, Stateful
from tables import table_test
from torch import nn

import pl_fed
from pl_fed import Federation
from pl_fed.clients import Ditto, FedAvg
from pl_fed.preflight.step_facts import StepFacts
from pl_fed.preflight.step_rules import describe_reset_buffers, refuse_changes
from pl_fed.preflight.step_trial import find_step_facts
from pl_fed.preflight.trial import Trial
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All

SIZES = [8, 8, 8]
COMPILED = ["one_by_one_compiled", "stacked_compiled"]
ENGINES = ["one_by_one", "stacked", *COMPILED]
LIKE_OTHERS = {  # in how they keep something
    *("CachedConstant", "EvaluatedNorm", "GradientPenalty", "MeanTeacher", "SetScale", "Unsaved"),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:Local steps run eagerly"),
    pytest.mark.filterwarnings("ignore:Clients are run one by one"),
]


def federated_by_hand(module, data, rounds, steps):
    """Return the mean of the clients' modules after rounds of steps on all samples of each."""
    start, state = module, module.state_dict()
    clients = data.clients
    for _ in range(rounds):
        ends = []
        for client in range(clients.num_clients):
            own = copy.deepcopy(start)
            own.load_state_dict(state)
            own.train()
            batch = clients.batch(clients.train.samples(client))
            optimizer = own.configure_optimizers()
            for step in range(steps):
                loss = own.training_step((batch.inputs.double(), batch.targets), step)
                optimizer.zero_grad()  # after the step, as in Lightning
                loss.backward()
                optimizer.step()
            ends.append(own.state_dict())
        state = {
            name: torch.stack([end[name].double() for end in ends]).mean(0)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in ends[0].items()
            if name in state
        }
    return state


def set_up(module, client=FedAvg, sizes=SIZES, **options):
    federation = Federation(All(), seed=0)
    algorithm = client(module, **options)
    federation.setup(
        algorithm, shared_out(classes(sizes), batch_size=8), "fit", settings=RunSettings(rounds=1)
    )
    return federation, algorithm


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_further(ACCEPTED, LIKE_OTHERS))
def test_accepted_modules_equal_federated_averaging_by_hand(uncompiled, name):
    """``test_compiled.py`` runs the compiler, which does not see the modules, on some traces."""
    module, data = seeded(ACCEPTED[name]).double(), shared_out(classes(SIZES), batch_size=8)
    expected = federated_by_hand(copy.deepcopy(module), data, rounds=2, steps=2)
    client = FedAvg(copy.deepcopy(module), local_epochs=2)
    names = client.statistics("global").layout.names
    trained = [n for n, parameter in module.named_parameters() if parameter.requires_grad]
    parameters = torch.cat([expected[n].flatten() for n in trained])
    statistics = [expected[n].flatten().double() for n in names]
    for engine in ENGINES:
        outcome = run_tried_rounds(client, data, rounds=2, engine=engine)
        torch.testing.assert_close(outcome.w, parameters, rtol=1e-9, atol=1e-7)
        if names:
            torch.testing.assert_close(
                outcome.w_statistics, torch.cat(statistics), rtol=0, atol=1e-6
            )


@pytest.mark.slow
@table_test("name", REFUSED)
def test_refused_modules_are_named_before_training(name):
    kind, words = REFUSED[name]
    module = seeded(kind)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"^Expected") as caught:
        set_up(module)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert all(torch.equal(tensor, before[n]) for n, tensor in module.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("client", [FedAvg, Ditto])
def test_trial_changes_nothing_of_an_accepted_module(client):
    module = seeded(ACCEPTED["ReplacedScale"])
    scale = module.scale
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    _, algorithm = set_up(module, client)
    assert torch.equal(torch.rand(1), expected)
    assert algorithm.global_model.scale is scale
    assert float(scale) == 1


class LateCounter(Stateful):
    """Begins to count in the second round."""

    def keep(self):
        self.n, self.rounds = 0, []

    def training_step(self, batch, batch_idx):
        if self.current_epoch:
            self.n += 1
        return self.loss(batch) / (1 + self.n)


class LateList(LateCounter):
    def training_step(self, batch, batch_idx):
        if self.current_epoch:
            self.rounds.append(1)
        return self.loss(batch) / (1 + len(self.rounds))


class LateTarget(LateCounter):
    def keep(self):
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if self.current_epoch:
            self.target[0].bias.data.add_(1)
        return self.loss(batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [(LateCounter, "n"), (LateList, "rounds"), (LateTarget, "target.0.bias")]
)
def test_later_change_stops_the_run(tmp_path, kind, name):
    trainer = pl_fed.Trainer(
        Federation(All(), seed=0), run_dir=tmp_path, max_epochs=3, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, logger=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"`{name}`") as caught:
        trainer.fit(FedAvg(seeded(kind)), shared_out(classes(SIZES)))
    assert caught.value.__notes__ == ["In round 1; the trial before training did not show it."]


class BuildsAnew(LateCounter):
    """Builds an equal list of tensors in each step, as torchvision's detectors do with anchors."""

    def training_step(self, batch, batch_idx):
        self.anchors = [torch.arange(3.0), torch.ones(2)]
        return self.loss(batch) + 0 * self.anchors[0].sum()

    def keep(self):
        self.anchors = [torch.arange(3.0), torch.ones(2)]


@pytest.mark.slow
def test_equal_values_that_a_step_builds_anew_are_no_change(tmp_path):
    trainer = pl_fed.Trainer(
        Federation(All(), seed=0), run_dir=tmp_path, max_epochs=3, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, logger=False,
    )  # fmt: skip
    client = FedAvg(seeded(BuildsAnew))
    anchors = client.global_model.anchors
    trainer.fit(client, shared_out(classes(SIZES)))
    assert client.global_model.anchors is anchors


class Decays(Stateful):
    """Decays the learning rate of the trainer's optimizer in a step, or in a hook of it."""

    def training_step(self, batch, batch_idx):
        self.decay(self.optimizers())
        return self.loss(batch)

    def decay(self, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


class Stops(Decays):
    def decay(self, optimizer):
        self.trainer.should_stop = True


class DecaysLate(Decays):
    def decay(self, optimizer):
        if self.current_epoch:
            super().decay(optimizer)


class StopsLate(DecaysLate):
    def decay(self, optimizer):
        self.trainer.should_stop = self.current_epoch == 1


class CountsInTrainer(Decays):
    def decay(self, optimizer):
        self.trainer.steps = getattr(self.trainer, "steps", 0) + 1


def new_trainer(folder, rounds=3, **options):
    return pl_fed.Trainer(
        Federation(All(), seed=0), run_dir=folder, max_epochs=rounds, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, logger=False, **options,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (Decays, "another `lr`: change them in `on_before_optimizer_step`"),
        (DecaysLate, "another `lr`: change them in `on_before_optimizer_step`"),
        (Stops, "use the callback EarlyStopping"),
        (StopsLate, "use the callback EarlyStopping"),
        (CountsInTrainer, "`trainer.steps`"),
    ],
)
def test_steps_change_neither_the_optimizer_nor_the_trainer(tmp_path, kind, word):
    trainer = new_trainer(tmp_path)
    with pytest.raises(ValueError, match="Expected `training_step`") as caught:
        trainer.fit(FedAvg(seeded(kind)), shared_out(classes(SIZES)))
    assert word in str(caught.value)
    assert not trainer.should_stop
    assert trainer.current_epoch == (1 if kind.__name__.endswith("Late") else 0)


class HalvesEachStep(Stateful):
    """Sets the learning rate of each step by the hook of the step."""

    def on_before_optimizer_step(self, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


def test_hook_of_a_step_sets_the_learning_rate_of_its_client(tmp_path):
    data, module = shared_out(classes(SIZES), batch_size=8), seeded(HalvesEachStep).double()
    client = FedAvg(copy.deepcopy(module), local_epochs=2)
    outcome = run_tried_rounds(client, data, rounds=1)
    ends = []
    for number in range(len(SIZES)):
        own, batch = copy.deepcopy(module), data.clients.batch(data.clients.train.samples(number))
        optimizer = own.configure_optimizers()
        for step in range(2):
            loss = own.training_step((batch.inputs.double(), batch.targets), step)
            optimizer.zero_grad()
            loss.backward()
            own.on_before_optimizer_step(optimizer)
            optimizer.step()
        ends.append(nn.utils.parameters_to_vector(own.parameters()).detach())
    torch.testing.assert_close(outcome.w, torch.stack(ends).mean(0), rtol=1e-9, atol=1e-9)


CALLS = []


def note_call():
    CALLS.append(1)
    return len(CALLS)


class Calls(Stateful):
    """A function of the file counts; the count matters late."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 if note_call() < 1000 else 2)


class LateCalls(Stateful):
    def training_step(self, batch, batch_idx):
        if self.current_epoch:
            note_call()
        return self.loss(batch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Calls, LateCalls])
def test_values_outside_of_the_module_are_said(tmp_path, kind):
    trainer = new_trainer(tmp_path, rounds=2)
    with pytest.warns(UserWarning, match=f"{kind.__name__} change `{__name__}.CALLS` outside"):
        trainer.fit(FedAvg(seeded(kind)), shared_out(classes(SIZES)))


class CountingLoss(nn.Module):
    """Cross entropy with class weights from a running count of labels, which is a buffer."""

    def __init__(self, buffer=True):
        super().__init__()
        self.reduction = "mean"
        self.seen = 0
        self.buffer = buffer
        self.register_buffer("counts", torch.ones(3))

    def forward(self, outputs, targets):
        if self.buffer:
            self.counts += torch.bincount(targets, minlength=3)
        else:
            self.seen += len(targets)
        weights = (self.counts.sum() / self.counts).to(outputs)
        return nn.functional.cross_entropy(outputs, targets, weights) / (1 + self.seen)


def linear():
    return nn.Linear(4, 3)


@pytest.mark.slow
def test_buffers_of_a_criterion_begin_anew_with_every_client():
    arrays = classes([6, 6, 6])
    arrays.targets[:6] = 0
    client = FedAvg(seeded(linear), criterion=CountingLoss(), local_epochs=2)
    data = shared_out(arrays, batch_size=6)
    others = run_tried_rounds(client, data, rounds=1, sampler=Only(0, 1))
    start = nn.utils.parameters_to_vector(seeded(linear).double().parameters()).detach()
    for engine in ENGINES:
        alone, together = (
            run_tried_rounds(client, data, rounds=1, engine=engine, sampler=sampler)
            for sampler in (Only(2), None)
        )
        moves = (alone.w - start) + 2 * (others.w - start)
        torch.testing.assert_close(together.w - start, moves / 3)


def test_attribute_of_a_criterion_is_refused_and_a_buffer_is_reported():
    with pytest.raises(ValueError, match=r"`criterion.seen`"):
        set_up(seeded(linear), criterion=CountingLoss(buffer=False))
    facts = StepFacts(net="Linear", reset_buffers=("criterion.counts",))
    refuse_changes(facts)
    assert "`criterion.counts`" in describe_reset_buffers(facts)
    assert describe_reset_buffers(StepFacts()) is None


class GlobalDraws(Stateful):
    def training_step(self, batch, batch_idx):
        import numpy as np

        return self.loss(batch) * (0.5 + random.random() + float(np.random.rand()))  # noqa: NPY002


class FailingOnLarge(nn.Linear):
    """Keeps its last inputs, draws from Python's generator, and fails on large inputs."""

    def forward(self, x):
        if (x > 90).any():
            raise ValueError("too large")
        self.last = x.detach()
        return super().forward(x) * (0.5 + random.random())


@pytest.mark.parametrize("order", [(6, 9, 5), (9, 6, 5)], ids=str)
def test_a_client_that_fails_leaves_its_place_in_the_trial_to_another_one(order):
    """The facts were unknown, so that the attribute ended the run, and draws had no key."""
    arrays = classes(order)
    failing = order.index(9)
    arrays.inputs[arrays.client == failing] = 100.0
    data = shared_out(arrays, batch_size=8)
    algorithm = FedAvg(seeded(lambda: FailingOnLarge(4, 3)))
    facts = find_step_facts(Trial(algorithm, data.clients), 8)
    assert facts.draws_globally
    assert [name.rpartition(".")[2] for name in facts.scratch] == ["last"]
    arrays.inputs[:] = 100.0
    assert find_step_facts(Trial(algorithm, shared_out(arrays).clients), 8) == StepFacts()


@pytest.mark.slow
def test_draws_of_python_and_numpy_have_the_key_of_the_client():
    data = shared_out(classes(SIZES), batch_size=8)
    client = FedAvg(seeded(GlobalDraws), local_epochs=2)
    expected = run_tried_rounds(client, data)
    for engine in ENGINES:
        outcome = run_tried_rounds(client, data, engine=engine, chunk_size=2)
        assert expected.distance(outcome) == 0, engine
