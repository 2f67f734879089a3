"""All engines give the same numbers, over every net and every client that a walk finds.

A new net is covered when its smallest arguments stand in the table; a new client at once.
"""

import importlib
import inspect
import pkgutil
import warnings

import pytest
from small_federations import classes, mlp, run_rounds, said, seeded, sgd, shared_out
from torch import nn

import pl_fed.clients
import pl_fed.models
from pl_fed.clients import Client, Ditto

ENGINES = ("one_by_one_compiled", "stacked", "stacked_compiled")
SIZES = [5, 2, 3]
SMALLEST = {  # arguments, and the shape of a sample; three classes where there may be so many
    "LinearSVM": ({"in_features": 6}, (6,)),
    "LogisticRegression": ({"in_features": 6}, (6,)),
    "MLP": ({"in_features": 6, "hidden": [5, 4]}, (6,)),
    "DittoFashionCNN": ({"image_size": 4}, (1, 4, 4)),
    "DittoFemnistCNN": ({"image_size": 4}, (1, 4, 4)),
    "DittoCelebaCNN": ({"image_size": 16}, (3, 16, 16)),
    "FlameCNN": ({"image_size": 4, "dropout": 0.3}, (3, 4, 4)),
    "FlameFemnistCNN": ({"image_size": 4}, (1, 4, 4)),
    "FedTiltCNN": ({"image_size": 4, "widths": [4, 6]}, (3, 4, 4)),
    "FrozenBody": ({"architecture": "shufflenet_v2_x0_5"}, (3, 32, 32)),
}
MIXING = {"DittoCelebaCNN"}  # BatchNorm: in no stack
ARGUMENTS = {
    "APFL": [{"alpha": 0.4, "alpha_lr": 0.1}],
    "Ditto": [
        {"lam": 0.3, "personal_steps": 3, "personal_lr": 0.05},
        {"regularizer": "fisher", "global_mu": 0.5},
        {"regularizer": "kl"},
    ],
    "FedBN": [{"own": ["0.bias"]}],
    "FedRep": [{"head_epochs": 3}],
    "PerFedAvg": [{}, {"hessian": "exact"}],
    "Scaffold": [{"control": "start"}],
    "FLAME": [{"weights": "samples", "tolerance": 0.01, "optimizer": sgd(0.1)}],
    "FedADMM": [{"weights": "samples"}],
    "LpProj": [{"dimensions": 5}],
    "FedTilt": [{"tau": 2.0, "lam": -3.0, "mu": 0.3, "personal_lr": 0.05}],
}


def walk(package, parent, but=()):
    """The classes that a package ships; torch cannot stack recurrent layers."""
    for entry in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for name, member in vars(importlib.import_module(entry.name)).items():
            own = inspect.isclass(member) and member.__module__ == entry.name
            public = own and not name.startswith("_")
            public = public and name not in but
            if public and issubclass(member, parent) and not inspect.isabstract(member):
                yield pytest.param(member, id=name)


def agree(client, data, mixing=False):
    first = run_rounds(client, data)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Local steps run eagerly")
        warnings.filterwarnings("ignore" if mixing else "error", "Clients are run one by one")
        for engine in ENGINES:
            assert first.distance(run_rounds(client, data, engine=engine, chunk_size=2)) <= 1e-10
    return first


@pytest.mark.slow
@pytest.mark.parametrize("kind", walk(pl_fed.models, nn.Module, but={"CharacterGRU"}))
def test_every_net(uncompiled, kind):
    arguments, shape = SMALLEST[kind.__name__]
    three = "num_classes" in inspect.signature(kind).parameters
    net = seeded(lambda: kind(**({"num_classes": 3} if three else {}), **arguments))
    client = Ditto(net, lam=0.3, optimizer=sgd(0.02, momentum=0.5), local_steps=2)
    data = shared_out(classes(SIZES, shape, num_classes=3 if three else 2))
    outcome = agree(client, data, kind.__name__ in MIXING)
    assert outcome.distance(run_rounds(client, data, rounds=1)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        pytest.param(*param.values, arguments, id=said(param.id, arguments))
        for param in walk(pl_fed.clients, Client)
        for arguments in ARGUMENTS.get(param.id, [{}])
    ],
)
def test_every_client(uncompiled, kind, arguments):
    options = {"optimizer": sgd(0.1, weight_decay=0.01), "local_epochs": 2}
    client = kind(seeded(mlp), **{**options, **arguments})
    agree(client, shared_out(classes(SIZES)))
    assert len(uncompiled) == 2
