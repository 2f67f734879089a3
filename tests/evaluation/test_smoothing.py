"""The votes of noisy copies of the global model, as one more model of a test."""

import lit_federations
import pytest
import torch
from lit_modules import LitImages
from small_federations import classes, reals, seeded, sgd, shared_out
from torch import nn

import pl_fed
from pl_fed import Adversary, Federation, Smoothing
from pl_fed.aggregators import CRFL
from pl_fed.attacks import Backdoor
from pl_fed.clients import Ditto, FedAvg, Local
from pl_fed.nets.noisy_copies import noisy_copies
from pl_fed.random import key
from pl_fed.samplers import All
from pl_fed.tasks import Regression

SIZES = [30, 20, 40]
pytestmark = pytest.mark.usefixtures("temporary_working_folder")


def images():
    return shared_out(classes(SIZES, shape=(1, 4, 4)), test_fraction=0.5)


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def run(client, data, **settings):
    """Fit for a round and test; return the trainer and the metrics."""
    trainer = pl_fed.Trainer(
        Federation(All(), seed=0, **settings),
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(client, data)
    return trainer, trainer.test(client, data, verbose=False)[0]


@pytest.mark.parametrize("kind", [FedAvg, Ditto])
def test_votes_without_noise_are_the_global_model_also_under_a_backdoor(kind):
    client, smoothing = kind(seeded(linear), optimizer=sgd(0.1)), Smoothing(std=0.0, num_models=3)
    adversary = Adversary(Backdoor(0, size=1), ids=[1])
    _, metrics = run(client, images(), smoothing=smoothing, adversary=adversary)
    names = {name for name in metrics if name.startswith("test/global/")}
    compared = {name for name in names if "loss" not in name}
    assert {"test/global/accuracy_worst10", "test/global/backdoor_success"} <= compared
    for name in compared:
        assert metrics[name.replace("global", "smoothed")] == metrics[name]
    assert not [name for name in metrics if name.startswith("val/smoothed")]


def test_accuracy_is_that_of_the_majority_of_copies_by_hand():
    client, data = FedAvg(seeded(linear), optimizer=sgd(0.1)), images()
    smoothing = Smoothing(std=2.0, num_models=15)
    trainer, metrics = run(client, data, smoothing=smoothing)
    accuracy = trainer.federation.metrics("test")["smoothed"].per_client()["accuracy"]
    votes = torch.zeros(sum(SIZES), 3)
    net, seed = client.global_model, key(0, "smoothing")
    weights = [parameter.detach().clone() for parameter in net.parameters()]
    copies = [
        [parameter.detach().clone() for parameter in copy.parameters()]
        for copy in noisy_copies(net, std=2.0, num_models=15, seed=seed)
    ]
    inputs = data.clients.inputs.flatten(1)
    for weight, bias in copies:
        chosen = (inputs @ weight.T.to(inputs) + bias.to(inputs)).argmax(1)
        votes[torch.arange(len(inputs)), chosen] += 1
    for client_id, own in enumerate(accuracy):
        index = data.clients.test.samples(client_id)
        expected = (votes[index].argmax(1) == data.clients.targets[index]).float().mean()
        assert float(own) == pytest.approx(float(expected))
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))
    assert metrics["test/smoothed/accuracy"] != metrics["test/global/accuracy"]


@pytest.mark.slow
def test_run_without_votes_is_unchanged_by_them():
    plain = run(FedAvg(seeded(linear), optimizer=sgd(0.1)), images(), aggregator=CRFL())[1]
    settings = {"aggregator": CRFL(), "smoothing": Smoothing(num_models=5)}
    smoothed = run(FedAvg(seeded(linear), optimizer=sgd(0.1)), images(), **settings)[1]
    assert plain.items() <= smoothed.items()


@pytest.mark.parametrize(
    ("client", "data", "match"),
    [
        (lambda: Local(seeded(linear), optimizer=sgd(0.1)), images, "null for Local, which eval"),
        (
            lambda: FedAvg(nn.Linear(1, 1), task=Regression(), optimizer=sgd(0.1)),
            lambda: shared_out(reals([[1.0], [2.0]], [[1.0], [2.0]], [0, 1])),
            "null for a net without one class for each sample",
        ),
        (
            lambda: FedAvg(seeded(LitImages)),
            lambda: shared_out(lit_federations.images()),
            "null for a net without one class for each sample",
        ),
    ],
)
def test_votes_need_a_global_model_and_classes(client, data, match):
    with pytest.raises(ValueError, match=f"`federation.smoothing` to be {match}"):
        run(client(), data(), smoothing=Smoothing())
