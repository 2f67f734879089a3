"""Types of numbers: 64 bits stay exact in a run of 64 bits, and integers are not rounded."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from small_federations import Given, run_rounds, sgd
from torch import nn
from torch.utils.data import DataLoader

import pl_fed
from pl_fed.clients import FedAvg
from pl_fed.data import (
    Arrays,
    FederatedData,
    HuggingFace,
    LightningData,
    NpyFolder,
    Npz,
    Table,
    TorchDataset,
)
from pl_fed.samplers import All

EXACT = torch.tensor([1 + 2**-40, 1e6 + 2**-30, 2**40 + 1, 1 / 3], dtype=torch.float64)
X = EXACT.repeat(3)[:, None]  # float32 would round each of them
Y = torch.arange(12) % 2
OWNER = torch.arange(12) // 4
pytestmark = pytest.mark.usefixtures("temporary_working_folder")


def npz(tmp_path):
    np.savez(tmp_path / "a.npz", x=X.numpy(), y=Y.numpy(), client=OWNER.numpy())
    return Npz(str(tmp_path / "a.npz"))


def npy(tmp_path):
    for name, tensor in {"x": X, "y": Y, "client": OWNER}.items():
        np.save(tmp_path / f"{name}.npy", tensor.numpy())
    return NpyFolder(str(tmp_path))


def torch_dataset(tmp_path, **settings):
    samples = [(x, int(y)) for x, y in zip(X, Y)]
    return TorchDataset(samples, client=OWNER.tolist(), **settings)


def python_numbers(tmp_path):
    samples = [{"x": [float(x)], "y": int(y)} for x, y in zip(X, Y)]
    return TorchDataset(samples, client=OWNER.tolist(), padding=0)


class Module(LightningDataModule):
    def train_dataloader(self):
        return DataLoader([(x, int(y)) for x, y in zip(X, Y)], 4)


def table(tmp_path, suffix):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    columns = pa.table({"x": X.flatten().numpy(), "y": Y.numpy(), "owner": OWNER.numpy()})
    path = tmp_path / f"a.{suffix}"
    (csv.write_csv if suffix == "csv" else parquet.write_table)(columns, path)
    return Table(str(path), "y", "owner")


def hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    columns = {"x": X.tolist(), "label": Y.tolist(), "owner": OWNER.tolist()}
    return HuggingFace(datasets.Dataset.from_dict(columns), client="owner")


SOURCES = {
    "arrays": lambda _: Given(Arrays(X, Y, OWNER, num_classes=2)),
    "npz": npz,
    "npy": npy,
    "torch": torch_dataset,
    "torch on disk": lambda path: torch_dataset(path, on_disk=True),
    "numbers of Python": python_numbers,
    "Lightning": lambda _: LightningData(Module(), client=OWNER.tolist()),
    "csv": lambda path: table(path, "csv"),
    "parquet": lambda path: table(path, "parquet"),
    "Hugging Face": hugging_face,
}


class Echo(nn.Module):
    """A net with two weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.weight * x.clamp(max=1)


def inputs_of_minibatches(source, precision):
    data = FederatedData(source, batch_size=4, val_fraction=0, test_fraction=0, seed=0)
    trainer = pl_fed.Trainer(
        pl_fed.Federation(All(), engine=pl_fed.EngineOptions("one_by_one")),
        max_epochs=1,
        accelerator="cpu",
        precision=precision,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    client = FedAvg(Echo(), optimizer=sgd(0.0))
    trainer.fit(client, data)
    batch = trainer.federation.session.states.data.batch(torch.arange(12))
    return batch.inputs, data.clients.inputs


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_inputs_of_64_bits_stay_exact_in_a_run_of_64_bits(name, tmp_path):
    inputs, _ = inputs_of_minibatches(SOURCES[name](tmp_path), "64-true")
    assert inputs.dtype == torch.float64
    assert torch.equal(inputs.flatten(), X.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_run_in_float32_keeps_no_second_copy(name, tmp_path):
    inputs, stored = inputs_of_minibatches(SOURCES[name](tmp_path), "32-true")
    assert torch.equal(inputs.flatten(), X.flatten().float())
    if name not in ("npy", "torch on disk"):
        assert stored.dtype == torch.float32


@pytest.mark.parametrize("normalize", ["channel", [1.0, 3.0]])
def test_normalization_is_that_of_the_precision_of_the_run(normalize):
    source = Given(Arrays(X, Y, OWNER, num_classes=2))
    settings = {"val_fraction": 0, "test_fraction": 0, "seed": 0, "normalize": normalize}
    data = FederatedData(source, **settings)
    exact = data.clients.inputs
    assert exact.dtype == torch.float64
    data.trainer = pl_fed.Trainer(pl_fed.Federation(All()), accelerator="cpu", logger=False)
    before = FederatedData(Given(Arrays(X.float(), Y, OWNER, num_classes=2)), **settings)
    assert torch.equal(data.clients.inputs, before.clients.inputs)
    mean, std = (X.mean(), X.std(correction=0)) if normalize == "channel" else normalize
    torch.testing.assert_close(exact, (X - mean) / std, rtol=1e-14, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32, torch.uint64])
def test_large_integers_are_not_rounded(dtype):
    ids = (torch.arange(12) + 2**24 + 1)[:, None]
    source = Given(Arrays(ids.to(dtype), Y, OWNER, num_classes=2))
    clients = FederatedData(source, seed=0).clients
    assert clients.inputs.flatten().tolist() == ids.flatten().tolist()
    net = nn.Linear(1, 2)  # takes no integers
    data = FederatedData(source, val_fraction=0, test_fraction=0, seed=0)
    run_rounds(FedAvg(net, optimizer=sgd(0.0)), data, 1)
    with pytest.warns(UserWarning, match="rounds those above 16,777,216"):
        run_rounds(FedAvg(net, optimizer=sgd(0.0)), data, 1, torch.float32)


def test_complex_inputs_are_refused():
    """Only their real parts would reach the net."""
    with pytest.raises(TypeError, match=r"real numbers or integers but got torch.complex64, whose"):
        Arrays(torch.ones(2, 1, dtype=torch.complex64), torch.tensor([0, 1]), num_classes=2)


def test_integers_above_63_bits_are_refused():
    huge = torch.from_numpy(np.array([[2**63], [1]], np.uint64))
    with pytest.raises(ValueError, match=r"^Expected `inputs` to be integers below 2\^63"):
        Arrays(huge, torch.tensor([0, 1]), num_classes=2)


def test_integer_targets_of_a_table_are_exact(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,y\n1,16777217\n2,16777219\n")
    arrays = Table(str(path), "y", classes=False).load()
    assert arrays.targets.tolist() == [[16777217.0], [16777219.0]]


@pytest.mark.parametrize(
    ("start", "precision"), [(1.7e9, "32-true"), (1.7e9, "64-true"), (0, "32-true")]
)
def test_times_that_float32_makes_equal_are_told(tmp_path, recwarn, start, precision):
    """The seconds of an hour became 29 values, and a net could not tell them apart."""
    pytest.importorskip("pyarrow")
    lines = [f"{start + 9 * second:.0f},{second % 2},{second % 4}" for second in range(400)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["time,y,owner", *lines]))
    data = FederatedData(Table(str(path), "y", "owner", classes=True), batch_size=4)
    data.trainer = SimpleNamespace(precision=precision, lightning_module=None)
    assert data.clients.num_samples == 400
    told = [str(w.message) for w in recwarn if "different values but" in str(w.message)]
    is_rounded = start > 0 and precision == "32-true"
    number = len({float(np.float32(start + 9 * second)) for second in range(400)})
    words = f"Column 'time' of the inputs has 400 different values but {number} in float32, which"
    assert [text.startswith(words) for text in told] == [True] * is_rounded
    assert number == (29 if start else 400)
