"""A run of the command line in Python: the models of its clients, by the names of their owners."""

import csv
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from small_federations import classes

import pl_fed
from pl_fed.command.main import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*The number of training batches"),
]
CLINICS = {"clinic a": 20, "clinic b": 12, "clinic c": 17}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run of Ditto on the files of three clinics."""
    place = tmp_path_factory.mktemp("clinics")
    arrays = classes([*CLINICS.values()])
    for number, name in enumerate(CLINICS):
        is_own = arrays.client == number
        (place / "data").mkdir(exist_ok=True)
        file = place / "data" / f"{name}.npz"
        np.savez(file, x=arrays.inputs[is_own].numpy(), y=arrays.targets[is_own].numpy())
    config = {
        "seed_everything": 3,
        "model": {
            "class_path": "pl_fed.clients.Ditto",
            "init_args": {
                "net": {
                    "class_path": "pl_fed.models.MLP",
                    "init_args": {"in_features": 4, "hidden": [5], "num_classes": 3},
                },
                "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.2}},
            },
        },
        "data": {
            "dataset": {
                "class_path": "pl_fed.data.ClientFolder",
                "init_args": {"folder": str(place / "data")},
            },
        },
        "trainer": {
            "default_root_dir": str(place / "runs"),
            "max_epochs": 3,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
        },
    }
    (place / "clinics.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", str(place / "clinics.yaml")])
    (run,) = (place / "runs").iterdir()
    return run


def read_accuracies(folder):
    with (folder / "per_client.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["owner"], m): float(row[f"{m}_accuracy"]) for row in rows for m in MODELS}


MODELS = ("global", "personal")


def measure(net, data, client):
    samples = data.test.samples(client)
    with torch.no_grad():
        is_correct = net(data.inputs[samples]).argmax(1) == data.targets[samples]
    return float(is_correct.double().mean())


def test_models_of_owners_are_those_of_the_test(folder):
    run = pl_fed.load(folder)
    assert run.clients == [*CLINICS]
    assert run.models == MODELS
    data, expected = run.federation.data, read_accuracies(folder)
    for client, name in enumerate(CLINICS):
        assert measure(run.model_of(name), data, client) == pytest.approx(
            expected[name, "personal"]
        )
        assert torch.equal(*(flatten(run.model_of(c)) for c in (name, client)))
        for model in MODELS:
            got = measure(run.model_of(name, model), data, client)
            assert got == pytest.approx(expected[name, model])
    assert torch.equal(flatten(run.global_model), flatten(run.model_of(0, "global")))
    assert not torch.equal(flatten(run.model_of(0)), flatten(run.model_of(1)))


def flatten(net):
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def test_some_clients_alone_have_the_same_models(folder):
    few, run = pl_fed.load(folder / "checkpoints" / "last.ckpt", ["clinic b"]), pl_fed.load(folder)
    assert torch.equal(*(flatten(loaded.model_of("clinic b")) for loaded in (few, run)))
    with pytest.raises(ValueError, match="one of the 1 loaded clients but got 'clinic a': add it"):
        few.model_of("clinic a")


def test_loading_changes_no_setting_of_the_process(folder):
    torch.manual_seed(1)
    random.seed(1)
    draws = torch.get_rng_state(), random.getstate()
    settings = dict(os.environ), Path.cwd(), torch.is_grad_enabled()
    pl_fed.load(folder)
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert random.getstate() == draws[1]
    assert (dict(os.environ), Path.cwd(), torch.is_grad_enabled()) == settings


def test_mistakes_are_told_in_one_sentence(folder, tmp_path):
    run = pl_fed.load(folder)
    with pytest.raises(
        ValueError, match="or names of owners such as 'clinic a', but got 'clinic d"
    ):
        run.model_of("clinic d")
    with pytest.raises(ValueError, match="`model` to be one of global, personal but got 'hybrid'"):
        run.model_of("clinic a", "hybrid")
    with pytest.raises(
        FileNotFoundError, match="Expected argument `run` to be a checkpoint, or th"
    ):
        pl_fed.load(tmp_path)
    with pytest.raises(ValueError, match=r"only options of pl_fed\.clients\.Ditto but got `lamb`"):
        pl_fed.load(folder, overrides=["--model.lamb=3"])
    with pytest.raises(ValueError, match="Expected a checkpoint with the net layers"):
        pl_fed.load(folder, overrides=["--model.net.hidden=[7]"])


def test_classes_have_the_names_of_owners(folder):
    with (folder / "per_class.csv").open(newline="") as file:
        owners = {row["client"]: row["owner"] for row in csv.DictReader(file)}
    assert owners == {str(client): name for client, name in enumerate(CLINICS)}
    assert set(pl_fed.read_run(folder).classes["owner"]) == {*CLINICS}
