"""All engines give the same numbers for every net and every client that pl_fed ships.

A walk over the package finds them: add the arguments of a new net to ``NET_ARGUMENTS``; a new
client needs no change.
"""

import importlib
import inspect
import pkgutil
import warnings

import pytest
import torch
from further_cases import mark_if
from small_federations import classes, mlp, run_rounds, said, seeded, sgd, shared_out
from torch import nn

import pl_fed.clients
import pl_fed.models
from pl_fed.clients import Client, Ditto

ENGINES = ("one_by_one_compiled", "stacked", "stacked_compiled")
SIZES = [5, 2, 3]
NET_ARGUMENTS = {  # the smallest arguments, and the shape of a sample
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
RECURRENT = {"CharacterGRU"}  # torch cannot stack recurrent layers
TRANSFORMERS = {"HuggingFaceModel", "LoRA"}  # tests/tasks/test_hugging_face_task.py, tests/models
LIKE_OTHERS = {  # in the parts of a net
    *("DittoFashionCNN", "DittoFemnistCNN", "FlameFemnistCNN", "FedTiltCNN"),
    *("LogisticRegression", "MLP"),  # most tests have such a net
    "FrozenBody",  # test_engines_agree.py has one of two layers
}
NOT_STACKABLE = {"DittoCelebaCNN"}  # BatchNorm mixes samples
# their eager engines agree in test_steps_of_begin.py, and a local step of theirs is that of another
WITH_STEPS_OF_OTHERS = {
    *("FedAvg", "FedBABU", "FedBN", "FedNova", "FedPer", "FedRep", "Finetuning", "HierFedAvg"),
    *("IFCA", "KNNPer", "L2SGD", "Local", "Mocha", "PFedMeEpochs", "SimpleTuning"),
}
CLIENT_ARGUMENTS = {
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


SHOWN_ELSEWHERE = [
    CLIENT_ARGUMENTS["Ditto"][0],  # test_engines_agree.py
    CLIENT_ARGUMENTS["PerFedAvg"][0],
    CLIENT_ARGUMENTS["FedADMM"][0],  # a step with a row of the client, as Scaffold's
    CLIENT_ARGUMENTS["LpProj"][0],
]


def shipped_classes(package, parent, excluded=(), further=()):
    """Yield a parameter for each public, concrete subclass of ``parent`` in a package.

    Those in ``further`` are marked exhaustive.
    """
    for entry in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for name, member in vars(importlib.import_module(entry.name)).items():
            is_defined_here = inspect.isclass(member) and member.__module__ == entry.name
            is_public = is_defined_here and not name.startswith("_") and name not in excluded
            if is_public and issubclass(member, parent) and not inspect.isabstract(member):
                yield mark_if(name in further, member, id=name)


def assert_engines_agree(client, data, stackable=True):
    """Compare the other engines with ``one_by_one``; return the outcome of ``one_by_one``."""
    expected = run_rounds(client, data)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Local steps run eagerly")
        warnings.filterwarnings("error" if stackable else "ignore", "Clients are run one by one")
        for engine in ENGINES:
            outcome = run_rounds(client, data, engine=engine, chunk_size=2)
            assert expected.distance(outcome) <= 1e-10
    return expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "net_class", shipped_classes(pl_fed.models, nn.Module, RECURRENT | TRANSFORMERS, LIKE_OTHERS)
)
def test_engines_agree_for_every_shipped_net(uncompiled, net_class):
    arguments, shape = NET_ARGUMENTS[net_class.__name__]
    has_classes = "num_classes" in inspect.signature(net_class).parameters
    if has_classes:
        arguments = {"num_classes": 3, **arguments}
    net = seeded(lambda: net_class(**arguments))
    client = Ditto(net, lam=0.3, optimizer=sgd(0.02, momentum=0.5), local_steps=2)
    data = shared_out(classes(SIZES, shape, num_classes=3 if has_classes else 2))
    outcome = assert_engines_agree(client, data, net_class.__name__ not in NOT_STACKABLE)
    assert not torch.equal(outcome.w, client.row("global").data.double())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client_class", "arguments"),
    [
        mark_if(
            param.id in WITH_STEPS_OF_OTHERS or arguments in SHOWN_ELSEWHERE,
            *param.values,
            arguments,
            id=said(param.id, arguments),
        )
        for param in shipped_classes(pl_fed.clients, Client, {"FedExLoRA"})
        for arguments in CLIENT_ARGUMENTS.get(param.id, [{}])
    ],
)
def test_engines_agree_for_every_shipped_client(uncompiled, client_class, arguments):
    options = {"optimizer": sgd(0.1, weight_decay=0.01), "local_epochs": 1}
    client = client_class(seeded(mlp), **{**options, **arguments})
    assert_engines_agree(client, shared_out(classes(SIZES)))
    assert len(uncompiled) == (2 if client.preparation is None else 4)
