"""Objects describe the arguments of their constructors in plain values."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from pl_fed import aggregators, clients, data, partitioners, samplers
from pl_fed.configurable import (
    Configurable,
    add_defaults,
    class_path,
    class_record,
    default_arguments,
    plain_value,
)


class AnyArguments(Configurable):
    """Accepts any arguments."""

    def __init__(self, value=None, *more, **options):
        self.value = value


class Indescribable:
    """Refuses to be described."""

    def __getattribute__(self, name):
        raise RuntimeError


def test_defaults_and_further_arguments_are_described():
    assert AnyArguments().constructor_arguments == {"value": None}
    arguments = AnyArguments(1, 2, 3, lam=0.5).constructor_arguments
    assert arguments == {"value": 1, "more": [2, 3], "lam": 0.5}


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (np.float64(0.5), 0.5),
        (True, True),
        (Path("a"), "a"),
        (torch.zeros(2, 3), "Tensor [2, 3]"),
        (torch.float64, "torch.float64"),
        ({"a": (1, 2)}, {"a": [1, 2]}),
        (list(range(2000)), "list of 2000"),
        (nn.ReLU, "torch.nn.ReLU"),
        (samplers.All(), {"class_path": "pl_fed.samplers.All"}),
        (partial(int, base=2), {"class_path": "builtins.int", "init_args": {"base": 2}}),
    ],
)
def test_values_are_described_by_plain_values(value, described):
    plain = plain_value("value", value)
    assert plain == described
    assert yaml.safe_load(yaml.safe_dump(plain)) == plain


def test_functions_that_build_optimizers_are_described_by_their_options():
    rates = (0.1, 0.2)
    records = [plain_value("optimizer", lambda p, lr=lr: torch.optim.SGD(p, lr=lr)) for lr in rates]
    assert [record["init_args"]["lr"] for record in records] == [0.1, 0.2]
    assert records[0] == plain_value("optimizer", partial(torch.optim.SGD, lr=0.1))


def test_nets_of_different_layers_have_different_records():
    nets = [
        nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 3), nn.Tanh()),
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)), nn.ReLU()),
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)), nn.Tanh()),
    ]
    records = [class_record(net) for net in nets]
    assert len({str(record) for record in records}) == 4
    assert records[0]["init_args"]["parameters"] == 15
    assert class_record(nn.CrossEntropyLoss())["init_args"]["reduction"] == "mean"


def test_object_without_a_description_is_accepted():
    assert AnyArguments(Indescribable()).constructor_arguments["value"] == {
        "class_path": class_path(Indescribable)
    }


def test_arguments_of_a_class_without_arguments_are_refused():
    """The error equals Python's for a class without `__init__`."""
    with pytest.raises(TypeError, match="All\\(\\) takes no arguments"):
        samplers.All(3)


def test_objects_of_every_kind_are_described():
    objects = [
        clients.FedAvg(nn.Linear(2, 2), local_steps=3),
        aggregators.Krum(2),
        data.Npz("a.npz"),
        partitioners.Shards(2),
    ]
    records = [class_record(item) for item in objects]
    assert records[0]["class_path"] == "pl_fed.clients.FedAvg"
    assert records[0]["init_args"]["local_steps"] == 3
    assert records[1]["init_args"]["num_selected"] == 2
    assert records[2]["init_args"] == {"path": "a.npz", "num_classes": None}


def test_defaults_are_added_to_an_earlier_record():
    trimmed = class_record(aggregators.TrimmedMean())
    arguments = trimmed["init_args"]
    assert arguments.items() <= default_arguments(aggregators.TrimmedMean).items()
    bare = {"class_path": trimmed["class_path"]}
    assert add_defaults([bare], [trimmed], {}) == [trimmed]
    other = {"class_path": "pl_fed.aggregators.Krum", "init_args": {}}
    assert add_defaults(other, trimmed, {}) == other
    changed = {**trimmed, "init_args": dict.fromkeys(arguments, "changed")}
    assert add_defaults(bare, changed, {}) == {**bare, "init_args": {}}
    unknown = {"class_path": "no_module.Class", "init_args": {"a": 1}}
    assert add_defaults({"class_path": "no_module.Class"}, unknown, {})["init_args"] == {}


def test_sections_have_the_defaults_of_their_owner():
    current = {"storage": {"folder": None, "memory": 0.5}, "seed": 1}
    assert add_defaults({"seed": 1}, current, {"storage": current["storage"]}) == current
    saved = {"storage": {"memory": 0.2}, "seed": 1}
    expected = {"storage": {"folder": None, "memory": 0.2}, "seed": 1}
    assert add_defaults(saved, current, {"storage": current["storage"]}) == expected
