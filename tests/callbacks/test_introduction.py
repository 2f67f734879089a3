"""The lines before a run say what is run."""

import math
from types import SimpleNamespace

import pytest
import torch

from pl_fed.callbacks.introduction import Introduction, describe_changes
from pl_fed.types import Population


def lines(rounds=5.0, official=(), drop_last=False, held_out=None, **federation):
    """The lines of a config with some parts of its federation."""
    config = {
        "model": {"class_path": "pl_fed.clients.Ditto", "init_args": {"lam": 0.3, "net": None}},
        "data": {"dataset": {"class_path": "pl_fed.data.Digits"}, "partitioner": None},
        "federation": federation,
    }
    train = SimpleNamespace(sizes=torch.tensor([1500, 34]))
    data = SimpleNamespace(num_clients=8, train=train, official=official)
    parts = SimpleNamespace(
        client=SimpleNamespace(
            population=Population(8, 4, 100),
            objective=SimpleNamespace(optimizer=None),
            row=lambda name: SimpleNamespace(data=torch.zeros(1234)),
        ),
        session=SimpleNamespace(
            states=SimpleNamespace(loaded=data),
            datamodule=SimpleNamespace(
                batch_size=16, drop_last=drop_last, held_out=held_out, central_data=None
            ),
        ),
        engine=SimpleNamespace(name="auto"),
        is_byzantine=torch.arange(8) < 2,
    )
    trainer = SimpleNamespace(
        estimated_stepping_batches=rounds,
        loggers=[None],
        world_size=2,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    return Introduction(parts, config).lines(trainer)


def test_parts_of_a_run_have_a_line_each():
    assert lines() == {
        "algorithm": "Ditto(lam=0.3), net (1,234 trained parameters)",
        "data": "Digits, 1,534 training samples of 8 clients, split by the owners of the samples,"
        " minibatches of 16",
        "rounds": "5 rounds, 4 of 8 clients per round (Uniform)",
        "attack": "none",
        "defence": "none (Mean, equal weights)",
        "engine": "auto, on cpu, 2 processes",
        "logs": "metrics.csv",
    }


def test_held_out_clients_are_counted():
    assert (
        "of 8 clients, 2 held-out clients, split by"
        in lines(held_out=SimpleNamespace(num_clients=2))["data"]
    )


def test_official_parts_and_left_out_minibatches_are_named():
    assert lines(official=("train", "val"), drop_last=True)["data"].endswith(
        "split by the owners of the samples, official train and val parts, minibatches of 16"
        " without the last, smaller one of a pass"
    )


@pytest.mark.parametrize(
    ("federation", "part", "text"),
    [
        (
            {"adversary": {"attack": {"class_path": "a.SignFlipping"}, "start_round": 3}},
            "attack",
            "SignFlipping by 2 Byzantine clients, from round 4 on",
        ),
        (
            {"adversary": {"attack": {"class_path": "a.SignFlipping"}, "stop_round": 30}},
            "attack",
            "SignFlipping by 2 Byzantine clients, in rounds 1 to 30",
        ),
        (
            {"adversary": {"corruption": {"class_path": "a.Outliers"}}},
            "attack",
            "Outliers on the data of all clients",
        ),
        (
            {
                "pre_aggregators": [{"class_path": "a.Clipping"}],
                "aggregator": {"class_path": "a.Krum"},
            },
            "defence",
            "Clipping, Krum",
        ),
        ({"privacy": {"epsilon": 8.0}}, "privacy", "DifferentialPrivacy(epsilon=8)"),
    ],
)
def test_attack_defence_and_privacy_are_described(federation, part, text):
    assert lines(**federation)[part] == text


def test_unlimited_run_says_so():
    assert lines(math.inf)["rounds"].startswith("no limit of rounds, 4 of 8")


def test_arguments_with_their_defaults_are_left_out():
    arguments = {"k": 2, "center": None, "unknown": 3}
    assert describe_changes({"class_path": "a.B", "init_args": arguments}) == "B(k=2, unknown=3)"
    arguments = {"classes_per_client": 2}
    section = {"class_path": "pl_fed.partitioners.Shards", "init_args": arguments}
    __import__("pl_fed.partitioners")
    assert describe_changes(section) == "Shards"
    assert describe_changes("x.yaml") == "x.yaml"
