"""No evaluation changes a model, a generator or an attribute, or leaks between clients."""

import copy
import random

import numpy as np
import pytest
import torch
from further_cases import mark_if
from small_federations import Only, classes, seeded, sgd, shared_out
from stateful_modules import Stateful
from torch import nn

import pl_fed
from pl_fed import Federation
from pl_fed.clients import Ditto, DittoChoice, FedAvg
from pl_fed.evaluation.monitor import Monitor
from pl_fed.preflight.step_rules import describe_missing_loss
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All

SIZES = [16, 16, 16]


class Validated(Stateful):
    """Its evaluation changes what :meth:`touch` changes; training reads it by :meth:`factor`."""

    def factor(self):
        return 1.0

    def touch(self, stage):
        """Change what the module keeps, and return the number to log."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.factor()

    def validation_step(self, batch, batch_idx):
        self.log("val_number", float(self.touch("val")))

    def test_step(self, batch, batch_idx):
        self.log("test_number", float(self.touch("test")))

    def predict_step(self, batch, batch_idx):
        return self(batch[0]) + self.touch("predict")


class CountInPlace(Validated):
    def keep(self):
        self.register_buffer("count", torch.zeros(()))

    def factor(self):
        return 1 / (1 + self.count)

    def touch(self, stage):
        return self.count.add_(1)


class CountReplaced(CountInPlace):
    def touch(self, stage):
        self.count = self.count + 1
        return self.count


class CountByData(CountInPlace):
    def touch(self, stage):
        self.count.data.add_(1)
        return self.count


class CountSet(CountInPlace):
    def touch(self, stage):
        self.count.data = self.count.data + 1
        return self.count


class CountAttribute(Validated):
    def keep(self):
        self.count = 0

    def factor(self):
        return 1 / (1 + self.count)

    def touch(self, stage):
        self.count += 1
        return self.count


class CountInLists(Validated):
    def keep(self):
        self.outputs = {"val": [], "test": [], "predict": []}

    def factor(self):
        return 1 / (1 + len(self.outputs["val"]))

    def touch(self, stage):
        self.outputs[stage].append(torch.ones(2))
        return len(self.outputs[stage])


class CountInSubmodule(Validated):
    def keep(self):
        self.net[1].counts = np.zeros(1)

    def factor(self):
        return 1 / (1 + float(self.net[1].counts[0]))

    def touch(self, stage):
        self.net[1].counts += 1
        return self.net[1].counts[0]


class NormInTrainingMode(Validated):
    """BatchNorm counts no version of its statistics."""

    def keep(self):
        self.net.insert(0, nn.BatchNorm1d(4))

    def touch(self, stage):
        self.net[0].train()
        self.net[0](torch.ones(2, 4, dtype=self.net[1].weight.dtype))
        return 1


class DrawnGlobally(Validated):
    def touch(self, stage):
        torch.rand(3)
        return 1 + 0 * (random.random() + np.random.rand())  # noqa: NPY002


class HookInEvaluation(Validated):
    def touch(self, stage):
        self.net[0].register_forward_hook(lambda layer, inputs, outputs: 2 * outputs)
        return len(self.net[0]._forward_hooks)


class GradientHookInEvaluation(Validated):
    def touch(self, stage):
        self.net[0].weight.register_hook(lambda gradient: 2 * gradient)
        return len(self.net[0].weight._backward_hooks)


class ShortenedVectors(Validated):
    """Has an embedding whose forward pass shortens its vectors."""

    def keep(self):
        self.table = nn.Embedding(4, 3, max_norm=0.1)

    def factor(self):
        return 1 + self.table.weight.square().sum()

    def touch(self, stage):
        return 1 + 0 * self.table(torch.arange(4)).sum()


CHANGES = [
    *(CountInPlace, CountReplaced, CountByData, CountSet, CountAttribute, CountInLists),
    *(CountInSubmodule, NormInTrainingMode, DrawnGlobally, HookInEvaluation),
    *(GradientHookInEvaluation, ShortenedVectors),
]


def fit(kind, folder, every, client=FedAvg, rounds=3):
    trainer = pl_fed.Trainer(
        Federation(All(), seed=0), run_dir=folder, max_epochs=rounds, accelerator="cpu",
        check_val_every_n_epoch=every, num_sanity_val_steps=0, precision="64-true", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    algorithm = client(seeded(kind))
    data = shared_out(classes(SIZES), val_fraction=0.25, test_fraction=0.25)
    random.seed(0), np.random.seed(0)  # noqa: NPY002
    trainer.fit(algorithm, data)
    return trainer, algorithm, data


LIKE_OTHERS = (CountByData, CountSet, CountReplaced, CountInSubmodule)


def kept_values(client):
    state = copy.deepcopy(client.state_dict())
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    return state, generators


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        *(mark_if(kind in LIKE_OTHERS, kind, Ditto) for kind in CHANGES),
        *(mark_if(True, kind, FedAvg) for kind in (CountInPlace, CountInLists, DrawnGlobally)),
    ],
)
def test_training_is_the_same_with_and_without_evaluations(tmp_path, kind, algorithm):
    trainer, client, data = fit(kind, tmp_path / "1", 1, algorithm, rounds=2)
    _, other, _ = fit(kind, tmp_path / "2", 100, algorithm, rounds=2)
    for name, tensor in client.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    state, generators = kept_values(client)
    trainer.validate(client, data, verbose=False)
    trainer.test(client, data, verbose=False)
    trainer.predict(client, data)
    after, later_generators = kept_values(client)
    assert all(torch.equal(tensor, after[name]) for name, tensor in state.items())
    assert torch.equal(generators[0], later_generators[0])
    assert generators[1:] == later_generators[1:]
    for part in ("val", "test"):
        numbers = trainer.federation.metrics(part)["global"].per_client()["number"]
        assert numbers.tolist() == [1, 1, 1], "each client begins anew"


class CountingNet(nn.Module):
    """A plain net whose forward in evaluation mode counts its calls, and returns the count."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.log = []

    def forward(self, x):
        if not self.training:
            self.calls += 1
            self.log.append(len(x))
        return self.linear(x) * (1 + self.calls + len(self.log))


@pytest.mark.parametrize("batch", [1024, 5])  # the losses of a client may need several batches
def test_forward_of_a_plain_net_keeps_nothing_of_an_evaluation(monkeypatch, batch):
    monkeypatch.setattr("pl_fed.evaluation.model_runner._BATCH", batch)
    client, data = FedAvg(seeded(CountingNet), optimizer=sgd()), shared_out(classes(SIZES))
    federation = Federation(Only(0, 1, 2), seed=0)
    federation.setup(client, data, "fit", settings=RunSettings(rounds=1))
    client.train()
    optimizer = client.configure_optimizers()
    everyone = torch.arange(3)
    evaluator = federation.session.evaluation.evaluator
    losses = [evaluator.start_losses(data.clients, everyone, {}) for _ in range(2)]
    assert torch.equal(*losses)
    assert torch.equal(losses[0][1:2], evaluator.start_losses(data.clients, everyone[1:2], {}))
    federation.run_round(0, optimizer)
    assert float(client.global_model.calls) == 0
    assert client.global_model.log == []


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x) + (0 if self.training else torch.rand(1))


def test_draws_of_a_plain_net_in_evaluations_move_no_generator():
    client, data = FedAvg(seeded(Drawing), optimizer=sgd()), shared_out(classes(SIZES))
    federation = Federation(All(), seed=0)
    federation.setup(client, data, "fit", settings=RunSettings(rounds=1))
    before = torch.get_rng_state()
    federation.session.evaluation.evaluator.start_losses(data.clients, torch.arange(3), {})
    assert torch.equal(before, torch.get_rng_state())


class ParameterInValidation(Validated):
    def touch(self, stage):
        self.net[0].bias.data.add_(0.1)
        return 1


class ForgottenSwap(Validated):
    def on_validation_epoch_start(self):
        self.net[0].bias = nn.Parameter(torch.zeros(5))

    def touch(self, stage):
        return 1


@pytest.mark.parametrize("kind", [ParameterInValidation, ForgottenSwap])
def test_evaluation_that_changes_a_parameter_is_refused(tmp_path, kind):
    with pytest.raises(ValueError, match=r"`validation_step` .* unchanged but got .*`net.0.bias`"):
        fit(kind, tmp_path, 1)


class DecayByHand(Validated):
    """Lowers the learning rate by an evaluation, from the second one on."""

    begin = 1

    def touch(self, stage):
        return 1

    def on_validation_epoch_end(self):
        if self.current_epoch >= self.begin:
            for group in self.optimizers().param_groups:
                group["lr"] *= 0.5


class DecayAtOnce(DecayByHand):
    begin = 0


class StopByHand(DecayByHand):
    def on_validation_epoch_end(self):
        self.trainer.should_stop = self.current_epoch >= self.begin


class StopAtOnce(StopByHand):
    begin = 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "word"),
    [
        *((DecayByHand, "another `lr`"), (DecayAtOnce, "another `lr`")),
        *((StopByHand, "use the callback EarlyStopping"), (StopAtOnce, "EarlyStopping")),
    ],
)
def test_evaluation_that_reaches_the_optimizer_or_the_end_of_the_run_is_refused(
    tmp_path, kind, word
):
    with pytest.raises(ValueError, match="Expected `validation_step` and its hooks") as caught:
        fit(kind, tmp_path, 1)
    assert word in str(caught.value)


class CountInTrainer(Validated):
    def touch(self, stage):
        self.trainer.seen = getattr(self.trainer, "seen", 0) + 1
        return self.trainer.seen


@pytest.mark.slow
def test_values_that_an_evaluation_leaves_in_the_trainer_are_removed(tmp_path):
    trainer, _, _ = fit(CountInTrainer, tmp_path, 1)
    assert not hasattr(trainer, "seen")
    assert trainer.federation.metrics("val")["global"].per_client()["number"].tolist() == [1, 1, 1]


TOUCHED = []


class CountInFile(Validated):
    def touch(self, stage):
        TOUCHED.append(stage)
        return 1


@pytest.mark.slow
def test_values_that_an_evaluation_changes_outside_of_the_module_are_said(tmp_path):
    sentence = rf"`validation_step` and its hooks of CountInFile change `{__name__}.TOUCHED` outs"
    with pytest.warns(UserWarning, match=sentence):
        fit(CountInFile, tmp_path, 1)


class Swap(Validated):
    """Evaluates averaged weights, and puts the own ones back."""

    def keep(self):
        self.register_buffer("average", torch.zeros(5))

    def on_validation_epoch_start(self):
        self.own = self.net[0].bias.data.clone()
        self.net[0].bias.data.copy_(self.average)

    def touch(self, stage):
        return self.net[0].bias.abs().sum()

    def on_validation_epoch_end(self):
        self.net[0].bias.data.copy_(self.own)


@pytest.mark.slow
def test_evaluation_of_other_weights_that_puts_the_own_ones_back_is_accepted(tmp_path):
    trainer, client, _ = fit(Swap, tmp_path, 1)
    assert trainer.federation.metrics("val")["global"].per_client()["number"].tolist() == [0, 0, 0]
    assert not hasattr(client.global_model, "own")
    assert client.global_model.net[0].bias.abs().sum() > 0


# A loss


class WithoutLoss(Stateful):
    """Neither returns nor logs a loss in an evaluation; counts samples of ``training_step``."""

    seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].clone())
        return self.loss(batch)


@pytest.mark.slow
def test_training_step_never_runs_on_samples_of_an_evaluation(tmp_path):
    WithoutLoss.seen.clear()
    trainer, client, data = fit(WithoutLoss, tmp_path, 1, Ditto)
    trainer.test(client, data, verbose=False)
    clients = data.clients
    training = clients.inputs[clients.train.index]
    for inputs in WithoutLoss.seen:
        for row in inputs:
            assert bool((training.double() == row.double()).all(1).any())


@pytest.mark.slow
def test_without_a_loss_of_the_evaluation_there_is_no_metric_of_it(tmp_path):
    trainer, client, data = fit(WithoutLoss, tmp_path, 1, Ditto)
    trainer.test(client, data, verbose=False)
    names = [*trainer.callback_metrics, *trainer.federation.session.evaluation.validated_names()]
    assert not [name for name in names if "loss" in name and not name.startswith("train/")]
    assert "test/hybrid/acc" in trainer.callback_metrics
    sentence = describe_missing_loss("Net", has_loss=False, has_metrics=False)
    assert sentence.endswith("loss, so there is no metric, and no hybrid model is chosen.")
    assert describe_missing_loss("Net", has_loss=True, has_metrics=False) is None
    with pytest.raises(ValueError, match="evaluation steps neither return nor log a loss"):
        Monitor.from_name("loss", client.task, 0)


def test_algorithm_that_chooses_by_losses_needs_one(tmp_path):
    with pytest.raises(ValueError, match="`validation_step` of WithoutLoss to return or log a los"):
        fit(WithoutLoss, tmp_path, 1, DittoChoice)


class CountsLater(Stateful):
    """Counts samples, as soon as its weights say so."""

    def keep(self):
        self.sizes = []

    def validation_step(self, batch, batch_idx):
        if float(self.net[0].bias.detach()[0]) > 10:
            self.sizes.append(len(batch[1]))
        self.log("val_seen", float(sum(self.sizes)))


def test_values_that_a_later_evaluation_changes_first_stay_with_their_client():
    client, data = FedAvg(seeded(CountsLater)), shared_out(classes([6, 4, 8]), val_fraction=0.5)
    federation = Federation(All(), seed=0)
    federation.setup(client, data, "validate")

    def count():
        """Return the logged number of each client."""
        return federation.measure("val", torch.arange(3), ["global"])["global"].measures[:, 0]

    assert count().tolist() == [0, 0, 0]
    with torch.no_grad():
        client.global_model.net[0].bias.add_(100)
    assert count().tolist() == [3, 2, 4]


class Noisy(nn.Linear):
    """Adds noise from torch's generator to its inputs, in evaluation mode, too."""

    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


class AlwaysDrops(nn.Sequential):
    """Its dropout draws in evaluation mode, too, as in Monte Carlo dropout."""

    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def train(self, mode=True):
        super().train(mode)
        self[1].train()
        return self


@pytest.mark.parametrize("make", [lambda: Noisy(4, 3), AlwaysDrops])
def test_draws_of_a_net_are_the_same_in_each_evaluation(make):
    client, data = FedAvg(seeded(make)), shared_out(classes([6, 4]))
    federation = Federation(All(), seed=0)
    federation.setup(client, data, "validate")
    losses = []
    for seed in range(2):
        torch.manual_seed(seed)
        losses.append(federation.measure("train", torch.arange(2), ["global"])["global"].loss)
    assert torch.equal(*losses)
