"""``export``: models of clients as files that load without pl_fed and predict equally."""

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import nets
import numpy as np
import pytest
import torch
import yaml
from further_cases import mark_others
from lightning import LightningModule
from sklearn.datasets import load_digits
from torch import nn

import pl_fed
from pl_fed.command.fit import FederatedCLI
from pl_fed.command.main import main
from pl_fed.data import Digits, FederatedData
from pl_fed.engine import EngineOptions
from pl_fed.exports import formats
from pl_fed.exports.file_format import write_at_once
from pl_fed.federation import Federation
from pl_fed.lightning import checkpoints
from pl_fed.lightning.checkpoints import ClientSubsetIO
from pl_fed.models import MLP
from pl_fed.partitioners import Shards
from pl_fed.run_folder import create_atomically
from pl_fed.samplers import All

SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.2}}
SIZES = {"in_features": 64, "hidden": [8], "num_classes": 10}
SMALL = {"class_path": "pl_fed.models.MLP", "init_args": SIZES}
BUSY = {"class_path": "nets.Busy", "init_args": {"width": 4}}
FROZEN = {"class_path": "nets.OnFeatures", "init_args": {"width": 16}}
CLIENTS = [1, 4]
ONE_STEP = {"local_steps": 1, "trainer": {"max_epochs": 1}}


def config(folder, algorithm="Ditto", net=SMALL, federation=None, data=None, trainer=None, **model):
    """A federation of six clients on the digits, of two rounds."""
    return {
        "seed_everything": 0,
        "model": {
            "class_path": f"pl_fed.clients.{algorithm}",
            "init_args": {"net": net, "optimizer": SGD, **model},
        },
        "data": {
            "dataset": {"class_path": "pl_fed.data.Digits"},
            "partitioner": {
                "class_path": "pl_fed.partitioners.Shards",
                "init_args": {"classes_per_client": 3},
            },
            "num_clients": 6,
            "normalize": "feature",
            **(data or {}),
        },
        "federation": {
            "engine": {"name": "one_by_one"},
            "sampler": {"class_path": "pl_fed.samplers.All"},
            **(federation or {}),
        },
        "trainer": {
            "default_root_dir": str(folder / "runs"),
            "max_epochs": 2,
            "num_sanity_val_steps": 0,
            "accelerator": "cpu",
            "enable_model_summary": False,
            "enable_progress_bar": False,
            **(trainer or {}),
        },
    }


def fit(folder, *args, **kwargs):
    """Run it, and return the run's folder."""
    (folder / "c.yaml").write_text(yaml.safe_dump(config(folder, *args, **kwargs)))
    main(["fit", "--config", str(folder / "c.yaml")])
    (run,) = (folder / "runs").iterdir()
    return run


def fit_and_predict(folder, **options):
    """Run a round, and return the run's folder and its trainer's predictions, as ``predict``."""
    options["trainer"] = {"max_epochs": 1, **options.get("trainer", {})}
    (folder / "c.yaml").write_text(yaml.safe_dump(config(folder, **options)))
    cli = FederatedCLI(["fit", "--config", str(folder / "c.yaml")])
    columns = ("sample", "prediction", "probability")
    predictions = {
        table["client"]: tuple(table[name].tolist() for name in columns)
        for batch in cli.trainer.predict(cli.model, cli.datamodule)
        for table in batch
    }
    return cli.run_dir, predictions


def predict(run):
    """Return the output of ``predict`` by client: samples, predictions, probabilities."""
    before = set(run.parent.glob("*/predictions.csv"))
    main(["predict", "--config", str(run / "config.yaml"), "--ckpt_path", str(checkpoint(run))])
    (new,) = set(run.parent.glob("*/predictions.csv")) - before
    predictions = {}
    with new.open(newline="") as file:
        for row in csv.DictReader(file):
            client_predictions = predictions.setdefault(int(row["client"]), ([], [], []))
            for values, name, kind in zip(
                client_predictions, ("sample", "prediction", "probability"), (int, int, float)
            ):
                values.append(kind(row[name]))
    return predictions


def checkpoint(run):
    return run / "checkpoints" / "last.ckpt"


def export(run, *args, out="out"):
    main(["export", "--ckpt", str(run), "--out", str(run / out), *args])
    return run / out, json.loads((run / out / "manifest.json").read_text())


def prepare_inputs(about, samples):
    """Prepare Digits without pl_fed, by the manifest alone."""
    about = about["inputs"]
    assert about["dataset"] == {"class": "Digits", "preparation": "pixels divided by 16"}
    pixels = torch.from_numpy(load_digits().images[samples][:, None]) / 16
    x = pixels.to(getattr(torch, about["dtype"])) / about["scale"]
    if about["mean"] is not None:
        x = (x - torch.tensor(about["mean"])) / torch.tensor(about["std"])
    assert list(x.shape[1:]) == about["shape"]
    return x


def rebuild_net(net):
    """Build the net of a config."""
    net_class = {"nets.Busy": nets.Busy, "nets.OnFeatures": nets.OnFeatures}.get(
        net["class_path"], MLP
    )
    return net_class(**net["init_args"])


def assert_predicts(outputs, expected):
    _, predictions, probabilities = expected
    assert outputs.argmax(1).tolist() == predictions
    highest = outputs.softmax(1).amax(1).double()
    torch.testing.assert_close(highest, torch.tensor(probabilities).double(), rtol=0, atol=1e-6)


CASES = {  # a few local steps, as FedRep has them, give each client a model of its own
    "Ditto": {"lam": 0.1},
    "FLAME": {"lam": 1.0, "rho": 0.1},
    "Finetuning": {"finetune_steps": 4},
    "PerFedAvg": {},
    "APFL": {},
    "Local": {},
    "DittoChoice": {"data": {"val_fraction": 0.3}},
    "FedBN": {"net": BUSY},
    "FedDBE": {"net": BUSY, "trainer": {"max_epochs": 2}},  # v_k is 0 in the first
    "FedPer": {"net": BUSY},
    "FedRep": {"net": BUSY},
    "FedROD": {"net": BUSY},
    "Ditto, frozen": {"algorithm": "Ditto", "net": FROZEN},
    "Ditto, busy": {"algorithm": "Ditto", "net": BUSY},
    "Ditto, on disk": {"algorithm": "Ditto", "federation": {"storage": {"folder": "store"}}},
    "Ditto, float64": {"algorithm": "Ditto", "trainer": {"precision": "64-true"}},
    "Finetuning, clipped and accumulated": {
        "algorithm": "Finetuning",
        "finetune_steps": 4,
        "trainer": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    },
}


# The algorithms that compute a client's model, and one of each kind of net and setting.
VARIED = (
    *("PerFedAvg", "DittoChoice", "FedBN", "FedROD"),
    "Finetuning, clipped and accumulated",
)

# A program is traced from a net and the tensors of its state dict: one case for each kind of net
# and precision has programs, and one algorithm whose clients have their own statistics.
WITH_PROGRAMS = ("Ditto", "Ditto, frozen", "Ditto, busy", "Ditto, float64", "FedBN")


@pytest.mark.slow
@pytest.mark.parametrize("case", mark_others(CASES, *VARIED))
def test_exported_models_give_the_predictions_of_predict(case, tmp_path, monkeypatch):
    """The state dict and the program predict on inputs prepared by the manifest alone."""
    monkeypatch.chdir(tmp_path)
    options = {"algorithm": case, **({} if case == "FedRep" else {"local_steps": 3}), **CASES[case]}
    run, expected = fit_and_predict(tmp_path, **options)
    formats = [] if case in WITH_PROGRAMS else ["--format", "state_dict"]
    out, about = export(run, "--client", *map(str, CLIENTS), *formats)
    assert [entry["client"] for entry in about["models"]] == CLIENTS
    weights = []
    for entry, client in zip(about["models"], CLIENTS):
        assert entry["model"] == "personal"
        x = prepare_inputs(about, expected[client][0])
        net = rebuild_net(options.get("net", SMALL)).eval().to(x.dtype)
        tensors = torch.load(out / f"client_{client}.pt", weights_only=True)
        net.load_state_dict(tensors, strict=True)
        with torch.no_grad():
            assert_predicts(net(x), expected[client])
        if case in WITH_PROGRAMS:
            program = torch.export.load(out / f"client_{client}.pt2").module()
            for size in (1, 2, len(x)):
                torch.testing.assert_close(program(x[:size]), net(x[:size]), rtol=1e-6, atol=1e-6)
        weights.append(torch.cat([tensor.flatten().double() for tensor in tensors.values()]))
        sizes = sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())
        assert sizes == sum(tensor.nbytes for tensor in tensors.values()), "no more than its own"
    assert not torch.equal(*weights), "each client has its own"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of Ditto with validation data. The global model is better for some clients."""
    options = {"lam": 0.01, "personal_lr": 0.02, "local_epochs": 1}
    longer = {"data": {"val_fraction": 0.2, "batch_size": 50}, "trainer": {"max_epochs": 12}}
    return fit(tmp_path_factory.mktemp("ditto"), **options, **longer)


@pytest.fixture
def folder(run):
    """The run's folder. Files added by a test are removed after it."""
    before = set(run.iterdir())
    yield run
    for path in set(run.iterdir()) - before:
        for file in sorted(path.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        path.rmdir() if path.is_dir() else path.unlink()


WITHOUT_PL_FED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pl_fed", "lightning", "pytorch_lightning"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import pathlib, torch
folder = pathlib.Path(sys.argv[1])
x = torch.load(folder / "x.pt", weights_only=True)
found = {}
for path in sorted(folder.glob("*.pt2")):
    found[path.stem] = torch.export.load(path).module()(x).detach()
    tensors = torch.load(path.with_suffix(".pt"), weights_only=True)
    net = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10))
    net.load_state_dict(dict(zip(net.state_dict(), tensors.values())))
    assert (net(x.flatten(1)) - found[path.stem]).abs().max() < 1e-5
torch.save(found, folder / "found.pt")
"""


@pytest.mark.slow
def test_exported_models_load_without_pl_fed(folder):
    out, about = export(folder, "--client", "4", "--global")
    names = [entry["name"] for entry in about["models"]]
    assert names == ["global", "client_4"]
    expected = {4: predict(folder)[4]}
    samples = [
        sample for client_predictions in expected.values() for sample in client_predictions[0]
    ]
    torch.save(prepare_inputs(about, samples), out / "x.pt")
    command = [sys.executable, "-c", WITHOUT_PL_FED, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    outputs = torch.load(out / "found.pt", weights_only=True)
    start = 0
    for client, client_predictions in expected.items():
        assert_predicts(
            outputs[f"client_{client}"][start : start + len(client_predictions[0])],
            client_predictions,
        )
        start += len(client_predictions[0])
    saved = torch.load(checkpoint(folder), weights_only=True)["state_dict"]
    exported = torch.load(out / "global.pt", weights_only=True)
    for name, tensor in exported.items():
        assert torch.equal(tensor, saved[f"global_model.{name}"])


@pytest.mark.slow
def test_manifest_has_models_and_input_preparation(folder):
    _, about = export(folder, "--client", "4", "3")
    assert [entry["client"] for entry in about["models"]] == [4, 3], "in the requested order"
    assert about["classes"] == 10
    assert about["algorithm"] == "Ditto"
    assert about["net"] == "pl_fed.models.mlp.MLP"
    assert about["checkpoint"] == str(checkpoint(folder))
    module = FederatedData(Digits(), Shards(3), 6, val_fraction=0.2, normalize="feature", seed=0)
    x, train = Digits().load().inputs, module.clients.train.index
    preparation = about["inputs"]
    assert preparation["shape"] == [1, 8, 8]
    assert preparation["dtype"] == "float32"
    assert (preparation["scale"], preparation["transforms"], preparation["skew"]) == (1, [], None)
    torch.testing.assert_close(torch.tensor(preparation["mean"]), x[train].mean(0))
    expected = x[train].std(0, correction=0) + 0.001
    torch.testing.assert_close(torch.tensor(preparation["std"]), expected)
    for entry in about["models"]:
        assert entry["val_samples"] == int(module.clients.val.sizes[entry["client"]])
        assert entry["files"] == [f"client_{entry['client']}.pt", f"client_{entry['client']}.pt2"]


@pytest.mark.slow
def test_selection_by_validation_takes_the_model_with_the_better_accuracy(folder):
    """The exported files give each model's validation accuracy. The loss decides ties."""
    own, about = export(folder, "--client", "all", "--global", out="own")
    names = [entry["name"] for entry in about["models"]]
    assert names == ["global", *(f"client_{k}" for k in range(6))]
    best, about = export(folder, "--client", "all", "--select", "validation", out="best")
    module = FederatedData(Digits(), Shards(3), 6, val_fraction=0.2, normalize="feature", seed=0)
    x, y, val = module.clients.inputs, module.clients.targets, module.clients.val

    def accuracy_and_loss(path, client):
        net = rebuild_net(SMALL)
        net.load_state_dict(torch.load(path, weights_only=True))
        samples = val.samples(client)
        with torch.no_grad():
            outputs = net(x[samples])
        accuracy = (outputs.argmax(1) == y[samples]).double().mean()
        return float(accuracy), -float(torch.nn.functional.cross_entropy(outputs, y[samples]))

    chosen = []
    for entry in about["models"]:
        client = entry["client"]
        pair = {
            "global": accuracy_and_loss(own / "global.pt", client),
            "personal": accuracy_and_loss(own / f"client_{client}.pt", client),
        }
        chosen.append(max(pair, key=pair.get))
        assert entry["model"] == chosen[-1]
        assert entry["val_accuracy"] == pytest.approx(pair[entry["model"]][0])
        assert entry["val_loss"] == pytest.approx(-pair[entry["model"]][1], abs=1e-5)
        source = own / ("global.pt" if entry["model"] == "global" else f"client_{client}.pt")
        first = torch.load(source, weights_only=True)
        second = torch.load(best / f"client_{client}.pt", weights_only=True)
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert set(chosen) == {"global", "personal"}, "otherwise the test compares no choice"


@pytest.mark.slow
def test_selected_global_model_is_exported_for_a_client(folder):
    out, about = export(folder, "--client", "2", "--global", "--select", "global")
    assert [entry["model"] for entry in about["models"]] == ["global", "global"]
    first, second = (torch.load(out / f"{n}.pt", weights_only=True) for n in ("global", "client_2"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_manifest_describes_scale_normalization_and_transforms(tmp_path):
    """The manifest describes the actual preparation of the inputs."""
    draws = np.random.default_rng(0)
    x = draws.integers(0, 256, (60, 3, 4, 4), dtype=np.uint8)
    y = np.arange(60) % 3
    np.savez(tmp_path / "mine.npz", x=x, y=y, client=np.arange(60) // 20)
    data = {
        "dataset": {
            "class_path": "pl_fed.data.Npz",
            "init_args": {"path": str(tmp_path / "mine.npz")},
        },
        "partitioner": None,
        "num_clients": None,
        "val_fraction": 0.0,
        "normalize": [[0.1, 0.2, 0.3], [0.5, 0.6, 0.7]],
        "transforms": [
            {"class_path": "torchvision.transforms.v2.CenterCrop", "init_args": {"size": [2, 2]}}
        ],
    }
    small = {"in_features": 12, "hidden": [4], "num_classes": 3}
    run = fit(tmp_path, net={**SMALL, "init_args": small}, data=data)
    expected = predict(run)
    out, about = export(run, "--client", "1", "--format", "torch_export")
    preparation = about["inputs"]
    assert preparation["dataset"] == {"class": "Npz", "preparation": ""}
    assert preparation["scale"] == 255
    assert preparation["transforms"][0].startswith("CenterCrop(size=[2, 2]")
    raw = torch.from_numpy(x[expected[1][0]]).float()[:, :, 1:3, 1:3] / 255
    mean, std = (torch.tensor(preparation[name]) for name in ("mean", "std"))
    program = torch.export.load(out / "client_1.pt2").module()
    assert_predicts(program((raw - mean) / std), expected[1])
    assert (about["models"][0]["val_samples"], about["models"][0]["val_accuracy"]) == (0, None)
    assert {path.name for path in out.iterdir()} == {"client_1.pt2", "manifest.json"}


@pytest.mark.slow
def test_program_has_no_samples_of_clients(tmp_path):
    """``torch.export`` writes the inputs of its trace into the file, unless they are removed."""
    example, net = torch.rand(2, 3), torch.nn.Linear(3, 1)
    formats.TorchExport(example).write(net, tmp_path / "net.pt2")
    assert example.numpy().tobytes() not in (tmp_path / "net.pt2").read_bytes()
    loaded = torch.export.load(tmp_path / "net.pt2")
    assert loaded.example_inputs is None
    assert torch.equal(loaded.module()(torch.ones(5, 3)), net(torch.ones(5, 3)))


@pytest.mark.slow
def test_manifest_of_a_regression_has_a_loss_and_no_accuracy(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
    np.savez(tmp_path / "mine.npz", x=x, y=x[:, :2] * 2, client=np.arange(60) // 20 + 7)
    data = {
        "dataset": {
            "class_path": "pl_fed.data.Npz",
            "init_args": {"path": str(tmp_path / "mine.npz")},
        },
        "partitioner": None,
        "num_clients": None,
        "normalize": "none",
    }
    net = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 4, "out_features": 2}}
    run = fit(tmp_path, net=net, data=data, criterion={"class_path": "torch.nn.MSELoss"})
    _, about = export(run, "--client", "0", "--select", "validation")
    (entry,) = about["models"]
    assert (entry["client"], entry["owners"]) == (0, ["7"])
    assert entry["val_accuracy"] is None
    assert entry["val_loss"] > 0
    assert about["classes"] == 0
    assert about["inputs"]["mean"] is None


NO_ONNX = importlib.util.find_spec("onnxscript") is None


@pytest.mark.skipif(NO_ONNX, reason="the package onnxscript is not there")
def test_onnx_file_gives_the_predictions_of_predict(tmp_path):
    from onnx.reference import ReferenceEvaluator

    run = fit(tmp_path, net=BUSY)
    expected = predict(run)
    out, about = export(run, "--client", "1", "4", "--format", "onnx", "state_dict")
    assert about["models"][0]["files"] == ["client_1.onnx", "client_1.pt"]
    for client in (1, 4):
        x = prepare_inputs(about, expected[client][0])
        (outputs,) = ReferenceEvaluator(str(out / f"client_{client}.onnx")).run(
            None, {"inputs": x.numpy()}
        )
        assert_predicts(torch.from_numpy(np.array(outputs)), expected[client])
    assert len(list(out.iterdir())) == 5, "no weights beside them"


@pytest.mark.slow
def test_export_loads_only_requested_rows_and_defaults_of_unsampled_clients(tmp_path, monkeypatch):
    """The store gets only the requested rows of the checkpoint."""
    sampler = {"class_path": "pl_fed.samplers.Uniform", "init_args": {"cohort_size": 2}}
    run = fit(tmp_path, federation={"sampler": sampler}, trainer={"max_epochs": 1})
    saved = torch.load(checkpoint(run), weights_only=True)["federation"]["store"]["personal"]
    sampled, *_ = saved["clients"].tolist()
    unsampled = min(set(range(6)) - set(saved["clients"].tolist()))
    loaded = []
    load = Federation.load_state_dict

    def spy(self, state):
        loaded.append(state["store"]["personal"]["clients"].tolist())
        load(self, state)

    monkeypatch.setattr(Federation, "load_state_dict", spy)
    out, _ = export(run, "--client", str(sampled), str(unsampled))
    assert loaded == [[sampled]]
    for client, row in ((sampled, saved["rows"][0][0]), (unsampled, saved["default"])):
        own = torch.load(out / f"client_{client}.pt", weights_only=True)
        assert torch.equal(torch.cat([tensor.flatten() for tensor in own.values()]), row)


@pytest.mark.slow
def test_client_subset_io_loads_only_rows_of_its_clients(run):
    subset, complete = (
        ClientSubsetIO(torch.tensor(ids)).load_checkpoint(checkpoint(run))["federation"]["store"][
            "personal"
        ]
        for ids in ([4, 1], list(range(9)))
    )
    assert sorted(complete["clients"].tolist()) == list(range(6))
    assert set(subset["clients"].tolist()) == {1, 4}
    all_rows = dict(zip(complete["clients"].tolist(), torch.cat(complete["rows"])))
    for client, row in zip(subset["clients"].tolist(), torch.cat(subset["rows"])):
        assert torch.equal(row, all_rows[client])


@pytest.mark.slow
def test_export_maps_a_large_checkpoint(folder, monkeypatch):
    """Lightning's command line does not load it either, in its search for hyperparameters."""
    loads = []
    load = torch.load

    def spy(path, *args, **kwargs):
        loads.append((str(path).endswith("last.ckpt"), kwargs.get("mmap")))
        return load(path, *args, **kwargs)

    monkeypatch.setattr(checkpoints, "_LARGE", 0)
    monkeypatch.setattr(torch, "load", spy)
    export(folder, "--client", "1", "--format", "state_dict")
    assert loads == [(True, True)]


# From Python


@pytest.mark.slow
def test_model_of_a_federation_is_an_independent_copy(tmp_path):
    """Changes of the copies do not affect the federation."""
    net = nets.Busy()
    client = pl_fed.clients.Ditto(net, lam=0.1)
    module = FederatedData(Digits(), Shards(3), 6, seed=0)
    federation = Federation(All(), engine=EngineOptions("one_by_one"), seed=0)
    trainer = pl_fed.Trainer(
        federation,
        run_dir=tmp_path,
        max_epochs=1,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(client, module)
    before = trainer.predict(client, module)[0]
    kinds = [type(layer) for layer in nets.Busy().modules()]
    for client_id in (3, 0):
        model = federation.model_of(client_id)
        assert [type(layer) for layer in model.modules()] == kinds, "torch's own layers"
        assert not any(layer.training for layer in model.modules())
        with torch.no_grad():
            outputs = model(module.clients.inputs[module.clients.test.samples(client_id)])
            assert outputs.argmax(1).tolist() == before[client_id]["prediction"].tolist()
            for tensor in (*model.parameters(), *model.buffers()):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes, "a memory of its own"
                tensor.zero_()
        (
            model(module.clients.inputs[:4]).sum() + model.head[0].weight.sum()
        ).backward()  # it trains
    after = trainer.predict(client, module)[0]
    for client_id, other in zip(before, after):
        assert torch.equal(client_id["probability"], other["probability"])
    globals_ = [federation.model_of(k, "global").state_dict() for k in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in globals_)))


@pytest.mark.slow
def test_held_out_clients_are_exported_with_the_models_of_predict(tmp_path):
    """Clients 4 and 5 never train. Their ids follow those of the training clients, in any order."""
    run = fit(tmp_path, local_steps=3, data={"held_out_clients": 2, "val_fraction": 0.2})
    expected, validation = predict(run), read_table(run / "per_client_validation.csv")
    out, about = export(run, "--client", "5", "1", "4", "--format", "state_dict")
    assert [entry["client"] for entry in about["models"]] == [5, 1, 4]
    loaded = pl_fed.load(run, [1, 5])
    for entry in about["models"]:
        client = entry["client"]
        x = prepare_inputs(about, expected[client][0])
        net = rebuild_net(SMALL).eval()
        net.load_state_dict(torch.load(out / f"client_{client}.pt", weights_only=True))
        with torch.no_grad():
            assert_predicts(net(x), expected[client])
            assert_predicts(loaded.model_of(client)(x), expected[client])
        own = validation[client]
        assert entry["val_samples"] == int(own["val_samples"])
        assert entry["val_accuracy"] == pytest.approx(float(own["personal_accuracy"]))
    assert export(run, "--client", "all", out="all")[1]["models"][-1]["client"] == 3
    with pytest.raises(ValueError, match="`client` to be ids from 0 to 5 but got '6'"):
        loaded.model_of(6)


def read_table(path):
    with path.open(newline="") as file:
        return {int(row["client"]): row for row in csv.DictReader(file)}


# Refusals


def get_refusal(capsys, *args):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["export", *map(str, args)])
    assert stopped.value.code in (1, 2)
    text = capsys.readouterr().err
    last = [line for line in text.splitlines() if line.startswith("error")]
    assert len(last) == 1, text
    after = text.rstrip().split(last[0])[1].strip()
    assert not after or (after.startswith("hint: ") and "\n" not in after), "no trace"
    return last[0].removeprefix("error: ")


WRONG = {
    "no checkpoint": (
        ["--client", "1"],
        "`ckpt` to be a checkpoint, the folder of a run, or last, but got none",
    ),
    "no such file": (["--ckpt", "no.ckpt", "--client", "1"], "but got no.ckpt: no such file"),
    "nothing": (["--ckpt", "RUN"], "`client` to be ids or owners of clients, or all, but got none"),
    "no id": (["--ckpt", "RUN", "--client", "1", "x"], "to be ids from 0 to 5 but got 'x'"),
    "a negative id": (["--ckpt", "RUN", "--client", "-1"], "to be ids from 0 to 5 but got '-1'"),
    "all and one": (["--ckpt", "RUN", "--client", "all", "1"], "or all alone, but got all 1."),
    "out of range": (
        ["--ckpt", "RUN", "--client", "2", "6"],
        "`client` to be ids from 0 to 5 but got '6'",
    ),
    "no value": (
        ["--ckpt", "RUN", "--client"],
        "argument --client: expected at least one argument",
    ),
    "select": (
        ["--ckpt", "RUN", "--client", "1", "--select", "best"],
        "`select` to be 'personal', 'global' or 'validation' but got 'best'",
    ),
    "format": (
        ["--ckpt", "RUN", "--client", "1", "--format", "onx"],
        "`format` to be 'state_dict', 'safetensors', 'lightning', 'torch_export', 'onnx' or 'peft'",
    ),
    "another option": (["--ckpt", "RUN", "--client", "1", "--data.sise=3"], "Expected"),
    "no place": (
        ["--ckpt", "RUN", "--client", "1", "--out", "/proc/x/y"],
        "`out` to be a folder that can be written but got /proc/x/y: ",
    ),
    "another net": (
        ["--ckpt", "RUN", "--client", "1", "--model.net.hidden=[5]"],
        "Expected a checkpoint with the net ",
    ),
    "no config": (["--ckpt", "RUN", "--client", "1", "--config", "no.yaml"], "no.yaml"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_invalid_arguments_are_refused_in_one_sentence(case, folder, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, words = WRONG[case]
    message = get_refusal(
        capsys, *(str(folder) if argument == "RUN" else argument for argument in args)
    )
    assert message.startswith("Expected ")
    assert words in message
    assert not list(tmp_path.iterdir())
    assert not (folder / "exports").exists()


@pytest.mark.slow
def test_files_that_are_not_checkpoints_are_refused(folder, capsys, tmp_path):
    (tmp_path / "text.ckpt").write_text("hello")
    np.savez(tmp_path / "arrays.npz", x=np.zeros(3))
    (tmp_path / "half.ckpt").write_bytes(checkpoint(folder).read_bytes()[:5000])
    for name in ("text.ckpt", "arrays.npz", "half.ckpt"):
        message = get_refusal(capsys, "--ckpt", tmp_path / name, "--client", "1")
        assert "`ckpt` to be a checkpoint of pl_fed" in message
        assert message.endswith("it is broken, or of another kind.")
    (tmp_path / "empty").mkdir()
    message = get_refusal(capsys, "--ckpt", tmp_path / "empty", "--client", "1")
    assert message.endswith("empty: no checkpoints/last.ckpt in it.")
    state = torch.load(checkpoint(folder), weights_only=True)
    torch.save(state["state_dict"], tmp_path / "other.ckpt")
    config = folder / "config.yaml"
    args = ("--ckpt", tmp_path / "other.ckpt", "--client", "1")
    assert "contains no federation" in get_refusal(capsys, *args, "--config", config)
    assert message.startswith("Expected ")
    message = get_refusal(capsys, *args)
    assert "without one: add `--config` with its path" in message


@pytest.mark.slow
def test_checkpoint_moved_with_its_config_is_exported(folder, tmp_path):
    """The config lies beside the checkpoint."""
    for path in (checkpoint(folder), folder / "config.yaml"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    main(["export", "--ckpt", str(tmp_path / "last.ckpt"), "--client", "1"])
    (out,) = (tmp_path / "exports").iterdir()
    expected, _ = export(folder, "--client", "1")
    states = [torch.load(path / "client_1.pt", weights_only=True) for path in (out, expected)]
    assert all(torch.equal(*pair) for pair in zip(*(path.values() for path in states)))


@pytest.mark.slow
def test_run_of_a_machine_with_gpus_is_exported(folder, tmp_path):
    """The config asks for GPUs."""
    (tmp_path / "last.ckpt").write_bytes(checkpoint(folder).read_bytes())
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["trainer"] |= {"accelerator": "cuda", "devices": 4, "strategy": "ddp"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    main(["export", "--ckpt", str(tmp_path / "last.ckpt"), "--client", "1"])
    (out,) = (tmp_path / "exports").iterdir()
    assert (out / "client_1.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--ckpt", "--ckpt_path"])
def test_last_is_the_newest_run_with_the_config_of_the_command(run, tmp_path, option):
    """A user who has the config alone need not name the run, as for ``test`` and ``predict``."""
    saved = yaml.safe_load((run / "config.yaml").read_text())
    saved["trainer"]["default_root_dir"] = str(tmp_path / "runs")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(saved))
    for age, lam in enumerate((0.01, 0.5)):
        saved["model"]["init_args"]["lam"] = lam
        copy = tmp_path / "runs" / str(lam)
        checkpoint(copy).parent.mkdir(parents=True)
        checkpoint(copy).write_bytes(checkpoint(run).read_bytes())
        os.utime(checkpoint(copy), (age, age))
        (copy / "config.yaml").write_text(yaml.safe_dump(saved))
    arguments = [option, "last", "--client", "1", "--format", "state_dict"]
    main(["export", "--config", str(tmp_path / "c.yaml"), *arguments])
    (out,) = tmp_path.glob("runs/*/exports/*")
    assert out.parents[1].name == "0.01"
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["checkpoint"] == str(checkpoint(tmp_path / "runs" / "0.01"))


@pytest.mark.slow
def test_checkpoint_with_which_a_run_began_is_not_read(folder, tmp_path):
    """Lightning reads all of it, for hyperparameters."""
    (tmp_path / "start.ckpt").write_text("damaged since")
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    saved["ckpt_path"] = str(tmp_path / "start.ckpt")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(saved))
    arguments = ["--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "out")]
    main(["export", "--ckpt", str(folder), "--client", "1", "--format", "state_dict", *arguments])
    assert (tmp_path / "out" / "client_1.pt").is_file()


@pytest.mark.slow
def test_last_without_a_run_or_a_config_is_refused(run, tmp_path, capsys):
    config = ["--config", run / "config.yaml", "--trainer.default_root_dir", tmp_path / "no"]
    message = get_refusal(capsys, "--ckpt", "last", "--client", "1", *config)
    assert f"a run with checkpoints/last.ckpt under {tmp_path / 'no'} but found none" in message
    message = get_refusal(capsys, "--ckpt", "last", "--client", "1")
    assert message == "Expected argument `data.dataset` and `model` to be set but got none."


@pytest.mark.slow
def test_checkpoint_with_slashes_in_its_name_is_exported(folder, tmp_path):
    below = tmp_path / "checkpoints" / "epoch=2-val" / "personal" / "accuracy=0.708.ckpt"
    below.parent.mkdir(parents=True)
    below.write_bytes(checkpoint(folder).read_bytes())
    (tmp_path / "config.yaml").write_bytes((folder / "config.yaml").read_bytes())
    main(["export", "--ckpt", str(below), "--client", "1"])
    (out,) = (tmp_path / "exports").iterdir()
    assert (out / "client_1.pt").exists()


@pytest.mark.slow
def test_selection_of_a_missing_model_is_refused(tmp_path, capsys):
    run = fit(tmp_path, "FedAvg", **ONE_STEP)
    for select in ("personal", "validation"):
        message = get_refusal(capsys, "--ckpt", run, "--client", "1", "--select", select)
        assert "`select` to be global for an algorithm without personal models" in message
        assert message.endswith(f"but got {select}: add `--select global`.")
    _, about = export(run, "--global", "--format", "state_dict")
    assert [entry["name"] for entry in about["models"]] == ["global"]
    (tmp_path / "knn").mkdir()
    message = get_refusal(
        capsys, "--ckpt", fit(tmp_path / "knn", "KNNPer", **ONE_STEP), "--client", "1"
    )
    assert "`select` to be global for KNNPer, which predicts by more than a net" in message
    (tmp_path / "local").mkdir()
    run = fit(tmp_path / "local", "Local", **ONE_STEP)
    message = get_refusal(capsys, "--ckpt", run, "--client", "1", "--select", "validation")
    assert "`select` to be personal for an algorithm without global models" in message
    message = get_refusal(capsys, "--ckpt", run, "--global")
    assert "`global` to be absent" in message


def test_module_without_forward_is_exported_as_state_dict_only(tmp_path):
    """The message quoted a class of torch, and the command line printed another one."""
    for kind in (nn.Module, LightningModule):
        net = type("Steps", (kind,), {})()
        with pytest.raises(ValueError, match="Steps to have a `forward` for `format` torch_exp"):
            formats.TorchExport(torch.zeros(2, 3)).write(net, tmp_path / "net.pt2")


@pytest.mark.slow
def test_onnx_without_its_package_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    message = get_refusal(capsys, "--ckpt", folder, "--client", "1", "--format", "onnx")
    assert 'pip install "pl_fed[onnx]"' in message
    assert not (folder / "exports").exists()


@pytest.mark.slow
@pytest.mark.parametrize("net", mark_others(["Undecided", "TwoByTwo"], "TwoByTwo"))
def test_net_that_cannot_be_traced_is_exported_as_state_dict_only(net, tmp_path, capsys):
    """The state dict can be exported."""
    data = {"batch_size": 2, "drop_last": True, "test_fraction": 0.0, "val_fraction": 0.0}
    run = fit(tmp_path, net={"class_path": f"nets.{net}"}, data=data, **ONE_STEP)
    message = get_refusal(capsys, "--ckpt", run, "--client", "1")
    assert f"`format` to be one that supports {net} but got 'torch_export' (" in message
    assert not list((run / "exports").iterdir())
    out, _ = export(run, "--client", "1", "--format", "state_dict")
    getattr(nets, net)().load_state_dict(torch.load(out / "client_1.pt", weights_only=True))


@pytest.mark.slow
def test_interrupted_export_leaves_no_files(folder, monkeypatch):
    """Nothing of its own: a hidden folder beside its place may be the user's."""
    beside = folder / ".out.tmp"
    beside.mkdir()
    (beside / "mine").touch()
    before = {path.name for path in folder.iterdir()}
    written = []

    def write(self, net, path):
        written.append(path)
        path.write_text("half")
        if len(written) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(formats.StateDict, "write", write)
        with pytest.raises(SystemExit, match=str(128 + signal.SIGINT)):
            export(folder, "--client", "1", "2", "--format", "state_dict")
    assert len(written) == 2
    assert {path.name for path in folder.iterdir()} == before
    out, _ = export(folder, "--client", "1", "--format", "state_dict")
    assert {path.name for path in out.iterdir()} == {"client_1.pt", "manifest.json"}
    assert {path.name for path in folder.iterdir()} == {*before, "out"}
    assert (beside / "mine").exists()


@pytest.mark.slow
@pytest.mark.parametrize("hides_error", [False, True])
def test_export_on_a_full_disk_ends_in_one_sentence(folder, capsys, monkeypatch, hides_error):
    """torch's own error names no disk, and safetensors' is no ``OSError``."""
    before = {path.name for path in folder.iterdir()}

    def write(self, net, path):
        path.write_text("half")
        if hides_error:
            raise RuntimeError("Error while serializing: No space left (os error 28)")
        write_at_once(partial(torch.save, net.state_dict()), Path("/dev/full"))

    monkeypatch.setattr(formats.StateDict, "write", write)
    message = get_refusal(capsys, "--ckpt", folder, "--client", "1", "--format", "state_dict")
    assert f"disk space for the exported models in {folder} but got: No space left on" in message
    assert {path.name for path in folder.iterdir()} == before | {"exports"}
    assert not list((folder / "exports").iterdir())


@pytest.mark.slow
def test_export_into_a_nonempty_folder_is_refused(folder, capsys):
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("mine")
    cases = {
        "full": "a new or an empty folder",
        "full/mine.txt": "a folder that can be written",
        "full/mine.txt/x": "a folder that can be written",
    }
    for name, words in cases.items():
        message = get_refusal(capsys, "--ckpt", folder, "--client", "1", "--out", folder / name)
        assert f"`out` to be {words} but got {folder / name}" in message
    assert [path.name for path in (folder / "full").iterdir()] == ["mine.txt"]
    (folder / "empty").mkdir()
    out, _ = export(folder, "--client", "1", out="empty")
    assert len(list(out.iterdir())) == 3


def test_create_atomically_leaves_no_partial_folder(tmp_path):
    with pytest.raises(FileNotFoundError), create_atomically(tmp_path / "a" / "b") as beside:
        (beside / "file").rename(beside / "none" / "file")
    assert not list((tmp_path / "a").iterdir())
    with create_atomically(tmp_path / "a" / "b") as beside:
        (beside / "file").touch()
        assert not (tmp_path / "a" / "b").exists()
    assert [path.name for path in (tmp_path / "a").rglob("*")] == ["b", "file"]
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "a" / "b").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.slow
def test_export_writes_only_into_its_folder(folder, tmp_path, monkeypatch):
    """By default a new folder in the run's; the config's loggers and callbacks have no part."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path)
    logger = "--trainer.logger=lightning.pytorch.loggers.CSVLogger"
    main(["export", "--ckpt", str(folder), "--client", "1", logger, "--trainer.logger.save_dir=x"])
    (out,) = (folder / "exports").iterdir()
    assert {path.name for path in out.iterdir()} == {"client_1.pt", "client_1.pt2", "manifest.json"}
    after = {path: path.stat().st_mtime_ns for path in before}
    assert after == before
    assert not list(tmp_path.iterdir())
    assert len(list(folder.parent.iterdir())) >= 1


def test_help_lists_the_options(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["some_program", *sys.argv[1:]])
    with pytest.raises(SystemExit) as stopped:
        main(["export", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for option in ("--ckpt", "--client", "--global", "--select", "--format", "--out", "--config"):
        assert option in text
    assert "some_program" not in text
