"""Personal models that are trained before each evaluation."""

import dataclasses
import itertools

import pytest
import torch
from equal_trials import trials_skipped
from small_federations import (
    HalfSquares,
    Point,
    classes,
    mlp,
    points,
    sections,
    seeded,
    sgd,
    shared_out,
)
from torch import nn

import pl_fed
from pl_fed import EngineOptions, Federation
from pl_fed.attacks import RandomLabels
from pl_fed.clients import FedAvg, PerFedAvg
from pl_fed.clients.contract import Model, Objective
from pl_fed.data.batches import LocalWork
from pl_fed.engine import LocalSettings
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All, Uniform

OBSERVED = ([1.0, 3.0], [4.0, 8.0, 6.0])


class Adapted(FedAvg):
    """The global model, adapted by each client before an evaluation."""

    def __init__(self, net, lam=0.0, adaptation=None, **kwargs):
        super().__init__(net, **kwargs)
        self.set_models({"global": Model(), "personal": Model(trained=False, kept=False)})
        self.lam = lam
        personal = Model(work=adaptation or LocalWork(steps=1))
        self.adaptation = Objective(self.adaptation_step, {"personal": personal}, self.optimizer)

    def adaptation_step(self, batch, batch_idx):
        return self.loss("personal", batch) + self.lam / 2 * self.squared_distance("personal")


def make_federation(client, data, run=RunSettings(), **settings):
    federation = Federation(All(), **sections(**{"seed": 0, "engine": "one_by_one", **settings}))
    with trials_skipped():
        federation.setup(client, data, "fit", settings=run)
    return federation


def losses(federation, client, part="val"):
    """Return the loss of every client's personal model, computed in inference mode."""
    client.eval()
    for metrics in federation.metrics(part).values():
        metrics.reset()
    with torch.inference_mode():
        federation.evaluate(part, torch.arange(federation.data.num_clients))
    assert not client.training
    return federation.metrics(part)["personal"].per_client()["loss"]


def point_federation(steps=1, lam=0.0, start=10.0, **settings):
    """Clients estimate their own mean; all their data is validation data as well."""
    data = shared_out(points(*OBSERVED), batch_size=8)
    clients = data.clients
    object.__setattr__(clients, "val", clients.train)
    net = Point(start=start).double()
    kwargs = {"optimizer": sgd(0.25), "criterion": HalfSquares(), "local_steps": 1}
    client = Adapted(net, lam, LocalWork(steps=steps), **kwargs)
    return client, make_federation(client, data, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_adaptation_of_a_point_by_hand(steps, lam):
    """v ← v − η (v − mean_k + λ (v − w)): every adaptation starts from w."""
    client, federation = point_federation(steps, lam)
    expected = []
    for own in OBSERVED:
        v = w = 10.0
        for _ in range(steps):
            v -= 0.25 * (v - sum(own) / len(own) + lam * (v - w))
        expected.append(sum((v - y) ** 2 / 2 for y in own) / len(own))
    for _ in range(2):
        actual = losses(federation, client)
        torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))
    assert float(client.row("global").data) == float(client.row("personal").data) == 10.0


@pytest.mark.parametrize(("accumulates", "rate"), [(True, 0.125), (False, 0.25)])
def test_gradients_of_an_adaptation_accumulate_unless_its_objective_forbids_it(accumulates, rate):
    """A pass is one minibatch. If two make up a step, one moves the point half as far."""
    client, _ = point_federation()
    client.adaptation = dataclasses.replace(client.adaptation, accumulates=accumulates)
    data = shared_out(points(*OBSERVED), batch_size=8)
    object.__setattr__(data.clients, "val", data.clients.train)
    run = RunSettings(LocalSettings(batches_per_step=2))
    v = torch.tensor([10 - rate * (10 - sum(own) / len(own)) for own in OBSERVED])
    expected = [float((at - torch.tensor(own)).square().mean()) / 2 for at, own in zip(v, OBSERVED)]
    actual = losses(make_federation(client, data, run), client)
    torch.testing.assert_close(actual, torch.tensor(expected).double(), rtol=1e-6, atol=0)
    assert not PerFedAvg(mlp()).adaptation.accumulates


def net():
    return nn.Sequential(nn.Dropout(0.3), *mlp())


@pytest.mark.slow
def test_engines_and_chunks_agree_on_adaptation(uncompiled):
    data = shared_out(classes([12, 7, 20, 9]), val_fraction=0.4)
    client = Adapted(seeded(net), adaptation=LocalWork(epochs=2), optimizer=sgd(0.1)).double()
    first = losses(make_federation(client, data), client)
    engines = ("stacked", "stacked_compiled", "one_by_one_compiled")
    for engine, chunk_size in itertools.product(engines, (None, 1, 3)):
        federation = make_federation(client, data, engine=engine, chunk_size=chunk_size)
        torch.testing.assert_close(losses(federation, client), first, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_byzantine_client_adapts_to_poisoned_data():
    data = shared_out(classes([30, 30]), val_fraction=0.3)
    client = Adapted(seeded(mlp), adaptation=LocalWork(epochs=3), optimizer=sgd(0.5)).double()
    honest = losses(make_federation(client, data), client)
    federation = make_federation(client, data, attack=RandomLabels(), ids=[1])
    poisoned = losses(federation, client)
    assert poisoned[0] == honest[0]
    assert poisoned[1] != honest[1]


def run_fits(folder, module, *epochs):
    """Return the test metrics and predictions of a resumed run."""
    for rounds in epochs:
        client = Adapted(seeded(mlp), adaptation=LocalWork(epochs=2), optimizer=sgd(0.1))
        trainer = pl_fed.Trainer(
            Federation(Uniform(3), seed=0),
            run_dir=folder,
            max_epochs=rounds,
            precision="64-true",
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(client, module, ckpt_path=None if rounds == epochs[0] else "last")
    (metrics,) = trainer.test(client, module, verbose=False)
    return metrics, [table for tables in trainer.predict(client, module) for table in tables]


@pytest.mark.slow
def test_resumed_run_with_adaptation_equals_uninterrupted_run(tmp_path):
    module = shared_out(classes([12, 9, 15, 11]), val_fraction=0.3, test_fraction=0.3)
    metrics, tables = run_fits(tmp_path / "whole", module, 3)
    correct = torch.cat([table["prediction"] == table["target"] for table in tables])
    accuracy = float(correct.double().mean())
    assert metrics["test/personal/accuracy_weighted"] == pytest.approx(accuracy, abs=1e-6)
    assert metrics["test/personal/loss"] != metrics["test/global/loss"]
    assert metrics == run_fits(tmp_path / "resumed", module, 1, 3)[0]


@pytest.mark.slow
def test_evaluation_of_a_checkpoint_adapts_as_the_run_does(tmp_path):
    """Clipping and limits of the trainer apply without a fit."""
    module = shared_out(classes([12, 9]), test_fraction=0.5)  # and nothing to validate with

    def trainer():
        return pl_fed.Trainer(
            Federation(All(), seed=0, engine=EngineOptions("one_by_one")),
            run_dir=tmp_path,
            max_epochs=1,
            gradient_clip_val=0.01,
            limit_train_batches=2,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def client():
        return Adapted(seeded(mlp), adaptation=LocalWork(steps=5), optimizer=sgd(0.5))

    first, fitted_client = trainer(), client()
    first.fit(fitted_client, module)
    (expected,) = first.test(fitted_client, module, verbose=False)
    last = tmp_path / "checkpoints" / "last.ckpt"
    (actual,) = trainer().test(client(), module, ckpt_path=last, verbose=False)
    assert actual == expected


def test_adaptation_of_another_model_is_refused():
    client = Adapted(seeded(mlp)).double()
    client.adaptation = Objective(client.adaptation_step, {"global": Model()}, client.optimizer)
    match = "`adaptation` of Adapted to train the model personal alone but got global"
    with pytest.raises(ValueError, match=match):
        make_federation(client, shared_out(classes([9, 9]), val_fraction=0.3))


def test_engine_of_the_adaptation_follows_the_device_of_the_client():
    """Setup precedes Lightning's move of the client; evaluations precede and follow it."""
    client, federation = point_federation()
    losses(federation, client)
    adaptation = federation.session.evaluation.adaptation
    engine = adaptation._engine
    losses(federation, client)
    assert adaptation._engine is engine
    engine.device = torch.device("meta")  # as if the client had been moved since
    losses(federation, client)
    assert adaptation._engine is not engine
    assert adaptation._engine.device == client.device


def test_adaptation_without_steps_evaluates_the_global_model():
    """For example under `Trainer(limit_train_batches=0)`."""
    client, federation = point_federation(run=RunSettings(limit_local_steps=0))
    actual = losses(federation, client)
    assert torch.equal(actual, federation.metrics("val")["global"].per_client()["loss"])
