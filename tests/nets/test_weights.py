"""Initial weights from files: what is read, which names fit, and what is refused."""

import argparse
import functools

import pytest
import torch
from lightning.pytorch import LightningModule
from small_federations import Given, classes, mlp, seeded
from tables import table_test
from torch import nn

import pl_fed
from pl_fed.clients import IFCA, Ditto, FedAvg, FedPer, Local
from pl_fed.data import FederatedData
from pl_fed.nets.weights import fit_names, read_weights

SGD = functools.partial(torch.optim.SGD, lr=0.1)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*The number of training batches"),
]


class Module(LightningModule):
    """A module around a net."""

    def __init__(self):
        super().__init__()
        self.net = net_of(1)


def net_of(seed):
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), seed)


def write(folder, content, name="weights.pt"):
    torch.save(content, folder / name)
    return folder / name


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0, check_dtype=False)


FILES = {
    "state dict": lambda: net_of(1).state_dict(),
    "checkpoint": lambda: {"state_dict": net_of(1).state_dict(), "epoch": 3},
    "checkpoint of a module around the net": lambda: {"state_dict": Module().state_dict()},
    "state dict of DistributedDataParallel": lambda: {
        f"module.{name}": tensor for name, tensor in net_of(1).state_dict().items()
    },
    "state dict of a compiled part": lambda: {
        name.replace("0.", "0._orig_mod."): tensor
        for name, tensor in net_of(1).state_dict().items()
    },
}


@table_test("name", FILES)
def test_names_of_a_net_are_found(name, tmp_path):
    path = write(tmp_path, FILES[name]())
    assert_equal(fit_names(read_weights(path), net_of(2), path), net_of(1).state_dict())


def test_weights_of_a_net_fit_a_module_around_it(tmp_path):
    path = write(tmp_path, net_of(1).state_dict())
    assert_equal(fit_names(read_weights(path), Module(), path), Module().state_dict())


def test_safetensors_are_read(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "weights.safetensors"
    safetensors.save_model(net_of(1), str(path))
    assert_equal(fit_names(read_weights(path), net_of(2), path), net_of(1).state_dict())


WIDER = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
SHORTER = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
REFUSALS = {
    "other shapes": (WIDER.state_dict(), r"with shape \[5, 4\] for 0.weight, but got .* \[6, 4\]"),
    "fewer tensors": (SHORTER.state_dict(), "which lacks 2.weight, 2.bias: use the weights of"),
    "other names": (
        {"a": torch.zeros(1)},
        "which lacks 0.weight, 0.bias, 1.weight and 6 more and has a: use",
    ),
    "no tensors": ({"lr": 0.1}, "which holds no tensors by name"),
    "a list": ([torch.zeros(1)], "which holds no tensors by name"),
    "other objects": (
        {"state_dict": {}, "hyper_parameters": argparse.Namespace(f=print)},
        r"which holds other objects: if you trust it, write its tensors alone by torch\.save",
    ),
}


@table_test("name", REFUSALS)
def test_other_files_are_refused_in_one_sentence(name, tmp_path):
    content, message = REFUSALS[name]
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=f"argument `federation.initial_model` to be .*{message}"):
        fit_names(read_weights(path), net_of(2), path)


def test_broken_and_missing_files_are_refused(tmp_path):
    (tmp_path / "broken.pt").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="is broken, or of another kind"):
        read_weights(tmp_path / "broken.pt")
    with pytest.raises(FileNotFoundError, match=r"a file with weights but got .*none\.pt: no such"):
        read_weights(tmp_path / "none.pt")


# Federations


def fit(folder, client, rounds=0, ckpt_path=None, **federation):
    trainer = pl_fed.Trainer(
        pl_fed.Federation(seed=0, **federation),
        run_dir=folder / "run",
        accelerator="cpu",
        max_epochs=rounds,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = FederatedData(Given(classes([12, 20])), batch_size=4, min_batch=2, seed=0)
    trainer.fit(client, data, ckpt_path=ckpt_path)
    return trainer


@table_test("kind", [FedAvg, Ditto, FedPer])
@pytest.mark.slow
def test_federation_from_a_file_equals_one_whose_net_has_the_weights(kind, tmp_path):
    path = write(tmp_path, net_of(1).state_dict())
    options = {"optimizer": SGD, "local_steps": 2}
    began = fit(
        tmp_path / f"{kind.__name__} of a file", kind(net_of(2), **options), 2, initial_model=path
    )
    expected = fit(tmp_path / kind.__name__, kind(net_of(1), **options), 2)
    for name in began.federation.client.models:
        assert_equal(*(t.federation.client.model(name).state_dict() for t in (began, expected)))
    stores = [trainer.federation.store.state_dict() for trainer in (began, expected)]
    for name in stores[0]:
        assert_equal(*({"rows": torch.cat(list(store[name]["rows"]))} for store in stores))


@pytest.mark.slow
def test_global_model_of_a_checkpoint_of_pl_fed_begins_a_new_run(tmp_path):
    first = fit(tmp_path / "first", Ditto(seeded(mlp), optimizer=SGD, local_steps=2), 2)
    first.save_checkpoint(tmp_path / "first.ckpt")
    began = fit(tmp_path, FedAvg(mlp()), 0, initial_model=tmp_path / "first.ckpt")
    began.validate(began.lightning_module, FederatedData(Given(classes([12, 20])), seed=0))
    models = [trainer.federation.client.model("global").state_dict() for trainer in (first, began)]
    assert_equal(*models)


@table_test("kind", [Local, functools.partial(IFCA, clusters=2)])
@pytest.mark.slow
def test_global_model_that_nobody_trains_is_refused(kind, tmp_path):
    client = kind(seeded(mlp), optimizer=SGD, local_steps=1)
    trainer = fit(tmp_path / type(client).__name__, client, 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match=r"one\.ckpt of (Local|IFCA), whose global model nobody"):
        read_weights(tmp_path / "one.ckpt")


@pytest.mark.slow
def test_resumed_run_reads_the_checkpoint_alone(tmp_path):
    path = write(tmp_path, seeded(mlp, 3).state_dict())
    first = fit(tmp_path / "a", FedAvg(mlp(), optimizer=SGD), 1, initial_model=path)
    first.save_checkpoint(tmp_path / "first.ckpt")
    straight = fit(tmp_path / "b", FedAvg(mlp(), optimizer=SGD), 2, initial_model=path)
    path.unlink()
    resumed = fit(
        tmp_path / "c",
        FedAvg(mlp(), optimizer=SGD),
        2,
        ckpt_path=tmp_path / "first.ckpt",
        initial_model=path,
    )
    states = [t.federation.client.model("global").state_dict() for t in (straight, resumed)]
    assert_equal(*states)
