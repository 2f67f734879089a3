"""Corruption of the training data of every client: outliers, as in FedTilt."""

import functools

import numpy as np
import pytest
import torch
from small_federations import classes, mlp, run_rounds, sections, seeded, sgd, shared_out

import pl_fed
from pl_fed.attacks import Combined, FlippedLabels, GaussianNoise, Outliers, RandomLabels
from pl_fed.attacks import SignFlipping as FlippedUploads
from pl_fed.clients import Ditto, FedAvg
from pl_fed.data import Digits, FederatedData
from pl_fed.models import MLP
from pl_fed.partitioners import Shards
from pl_fed.samplers import Uniform
from pl_fed.types import ClientContext

SIZES = [7, 3, 10, 5]


class Recording(Outliers):
    """Records the arguments of its calls."""

    def __init__(self):
        super().__init__(samples=1.0, pixels=1.0, low=50.0, high=60.0)
        self.calls = []

    def poison(self, batch, context):
        self.calls.append((context, batch.samples))
        return super().poison(batch, context)


def make_client(**options):
    return Ditto(seeded(mlp), optimizer=sgd(0.1), **options)


def test_corruption_applies_to_every_client_in_every_round():
    attack, data = Recording(), shared_out(classes(SIZES))
    run_rounds(make_client(), data, corruption=attack)
    moments = {(context.client, context.round) for context, _ in attack.calls}
    assert moments == {(client, round) for client in range(4) for round in range(2)}
    for context, samples in attack.calls:
        assert set(samples.tolist()) <= set(data.clients.train.samples(context.client).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("corruption", [Outliers(), GaussianNoise()])
def test_corruption_equals_an_attack_by_all_clients(corruption):
    """The corruption makes no client Byzantine."""
    data, client = shared_out(classes(SIZES)), make_client(local_epochs=2)
    corrupted = run_rounds(client, data, corruption=corruption)
    attacked = run_rounds(client, data, attack=corruption, fraction=1.0)
    assert corrupted.distance(run_rounds(client, data)) > 1e-3
    assert torch.equal(corrupted.w, attacked.w)
    assert torch.equal(corrupted.v, attacked.v)
    assert corrupted.reports[0]["train/byzantine"] == 0


def test_byzantine_clients_poison_corrupted_data():
    """The corruption precedes the attack."""
    attack, data = Recording(), shared_out(classes(SIZES))
    labels = run_rounds(make_client(), data, attack=FlippedLabels(), ids=[1])
    with_attack = run_rounds(
        make_client(), data, attack=FlippedLabels(), ids=[1], corruption=attack
    )
    corrupted = run_rounds(make_client(), data, corruption=attack)
    assert (with_attack.w != labels.w).any()
    assert (with_attack.w != corrupted.w).any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GaussianNoise, Outliers, RandomLabels])
def test_corruption_and_attack_of_one_class_draw_independently(kind):
    data, attack = shared_out(classes(SIZES)), kind()
    options = {"corruption": attack, "ids": [1]}
    once, twice = ({**options, "attack": poison} for poison in (None, attack))
    del once["attack"], once["ids"]
    assert (
        run_rounds(make_client(), data, **once).w != run_rounds(make_client(), data, **twice).w
    ).any()


def test_variances_of_two_noises_add_up():
    batch = pl_fed.types.Batch(torch.zeros(1000, 50), torch.zeros(1000), samples=torch.arange(1000))
    noise, context = GaussianNoise(samples=1.0), ClientContext(0, 0, 1, 10)
    first = noise.poison(batch, context).inputs
    second = Combined([FlippedUploads(), noise, noise]).poison(batch, context).inputs
    assert second.std() == pytest.approx(2**0.5, rel=0.02)
    assert torch.equal(Combined([FlippedUploads(), noise]).poison(batch, context).inputs, first)
    assert abs(np.corrcoef(first.flatten(), (second - first).flatten())[0, 1]) < 0.02


def test_fixed_corruption_equals_training_on_corrupted_data():
    """Without a redraw, a corruption equals a fixed change of the data."""

    class Fixed(RandomLabels):
        pass

    arrays = classes(SIZES)
    expected = run_rounds(make_client(), shared_out(arrays), corruption=Fixed())
    data = shared_out(classes(SIZES))
    clients = data.clients
    for client in range(4):
        index = clients.train.samples(client)
        batch = pl_fed.types.Batch(clients.inputs[index], clients.targets[index], samples=index)
        clients.targets[index] = Fixed().poison(batch, ClientContext(0, 0, client, 3)).targets
    assert run_rounds(make_client(), data).distance(expected) == 0


def fit_client(folder, **federation):
    trainer = pl_fed.Trainer(
        pl_fed.Federation(Uniform(4), seed=0, **sections(engine="one_by_one", **federation)),
        run_dir=folder,
        accelerator="cpu",
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        check_val_every_n_epoch=2,
    )
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    client = seeded(lambda: FedAvg(MLP(64, [8], 10), optimizer=optimizer, local_steps=2))
    data = FederatedData(Digits(), Shards(3), num_clients=6, seed=0)
    trainer.fit(client, data)
    return trainer, client, data


@pytest.mark.slow
def test_evaluation_data_stays_clean_and_all_clients_are_in_the_metrics(tmp_path):
    attack = Recording()
    trainer, client, data = fit_client(tmp_path, corruption=attack)
    before = len(attack.calls)
    trainer.validate(client, data, verbose=False)
    trainer.test(client, data, verbose=False)
    assert len(attack.calls) == before
    clients = data.clients
    trained = set(clients.train.index.tolist())
    assert {int(sample) for _, samples in attack.calls for sample in samples} <= trained
    metrics = trainer.federation.metrics("test")["global"]
    assert metrics.benign.all()
    for client_id in range(6):
        index = clients.test.samples(client_id)
        with torch.no_grad():
            correct = client.global_model(clients.inputs[index]).argmax(1) == clients.targets[index]
        accuracy = metrics.per_client()["accuracy"][client_id].item()
        assert accuracy == pytest.approx(correct.double().mean().item())
