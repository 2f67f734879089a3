"""Inputs in memory maps: the same numbers as in memory, and not in memory."""

from itertools import chain, product

import numpy as np
import pytest
import torch
from forked_processes import ForkedCommand
from further_cases import covering, mark_others
from small_federations import Given, mlp, run_rounds, seeded
from torch import nn

import pl_fed
from pl_fed.clients import Ditto, FedAvg
from pl_fed.data import Arrays, FederatedData, NpyFolder
from pl_fed.data.batches import Batches
from pl_fed.partitioners import IID, Dirichlet
from pl_fed.rounds import local_training
from pl_fed.skews import Quality

COUNT = 60
OWNERS = np.arange(COUNT) // 13  # unequal: the last clients have fewer
DTYPES = ["uint8", "float32", "float64", "float16", "int32", "bool"]


def make_inputs(dtype):
    draw = np.random.default_rng(0)
    if dtype in ("uint8", "int32", "bool"):
        return draw.integers(256, size=(COUNT, 4)).astype(dtype)
    return draw.normal(size=(COUNT, 4)).astype(dtype)


def write(folder, x, **arrays):
    folder.mkdir(exist_ok=True)
    all_arrays = {"x": x, "y": np.arange(len(x)) % 3, "client": OWNERS[: len(x)], **arrays}
    for name, array in all_arrays.items():
        if array is not None:
            np.save(folder / f"{name}.npy", array)
    return str(folder)


class Convert(nn.Module):
    """Takes integers as numbers."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x.to(self.net[0].weight.dtype))


def federations(tmp_path, dtype):
    """The same samples in memory and in a memory map."""
    x = make_inputs(dtype)
    folder = write(tmp_path, x)
    tensors = torch.from_numpy(x), torch.arange(COUNT) % 3, torch.from_numpy(OWNERS)
    in_memory = Given(Arrays(*tensors, num_classes=3))
    settings = {"batch_size": 4, "val_fraction": 0.2, "test_fraction": 0.2, "seed": 0}
    return [FederatedData(source, **settings) for source in (in_memory, NpyFolder(folder))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "dtype"), covering([*product(["one_by_one", "stacked"], [mlp, Convert])], DTYPES)
)
def test_rounds_on_memory_maps_equal_rounds_in_memory(tmp_path, dtype, pair):
    engine, net = pair
    a, b = (
        run_rounds(Ditto(seeded(net), local_epochs=2), data, 2, engine=engine)
        for data in federations(tmp_path, dtype)
    )
    assert a.distance(b) == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", mark_others(DTYPES, "uint8", "float64"))
def test_fit_on_memory_maps_equals_fit_in_memory(tmp_path, dtype):
    results = []
    for run, data in enumerate(federations(tmp_path / "data", dtype)):
        federation = pl_fed.Federation(pl_fed.samplers.All(), seed=0)
        trainer = pl_fed.Trainer(federation, max_epochs=2, accelerator="cpu",
                                 run_dir=tmp_path / f"{run}", enable_progress_bar=False,
                                 precision="64-true" if dtype == "float64" else 32)  # fmt: skip
        client = Ditto(seeded(mlp))
        trainer.fit(client, data)
        results.append(trainer.test(client, data, verbose=False)[0])
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize("read_bytes", [1 << 28, 12 * 4], ids=["all clients", "each client"])
def test_samples_of_the_next_chunk_are_read_ahead(tmp_path, monkeypatch, read_bytes):
    ahead, trained, gather = [], [], Batches._gather_batch

    def gather_and_record(batches, index, position, done):
        trained.append(index.tolist())
        return gather(batches, index, position, done)

    data = federations(tmp_path, "uint8")[1]
    monkeypatch.setattr(local_training, "_READ_BYTES", read_bytes)
    plain = run_rounds(FedAvg(seeded(mlp)), data, 3, engine="one_by_one")
    monkeypatch.setattr(
        local_training, "read_ahead", lambda tree, find_rows: ahead.append(find_rows().tolist())
    )
    monkeypatch.setattr(Batches, "_gather_batch", gather_and_record)
    recorded = run_rounds(FedAvg(seeded(mlp)), data, 3, engine="one_by_one")
    assert plain.distance(recorded) == 0
    clients = data.clients.num_clients
    chunks_per_round, clients_per_chunk = (1, clients) if read_bytes > 48 else (clients, 1)
    assert len(ahead) == 3 * chunks_per_round
    assert [*chain(*ahead[:-1])] == [*chain(*trained[clients_per_chunk:])]


def test_inputs_stay_in_the_file(tmp_path):
    x = make_inputs("uint8")
    clients = FederatedData(NpyFolder(write(tmp_path, x)), seed=0).clients
    assert (clients.mapped, clients.inputs.dtype) == (True, torch.uint8)
    moved = clients.to(torch.device("cpu"), torch.float64)
    assert moved.inputs.data_ptr() == clients.inputs.data_ptr()
    map = np.lib.format.open_memmap(tmp_path / "x.npy", mode="r+")
    map[7] = 255  # the tensor shares the file
    map.flush()
    assert clients.inputs[7].tolist() == [255] * 4
    assert moved.inputs_of(torch.tensor([7])).tolist() == [[1.0] * 4]
    assert moved.inputs_of(torch.tensor([7])).dtype == torch.float64


def test_a_tree_of_memory_maps(tmp_path):
    write(tmp_path, make_inputs("uint8"), z=make_inputs("float64"))
    maps = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xz"}
    arrays = Arrays(maps, torch.arange(COUNT) % 3, torch.from_numpy(OWNERS), num_classes=3)
    assert arrays.mapped
    clients = FederatedData(Given(arrays), seed=0).clients
    batch = clients.batch(torch.tensor([5, 2])).inputs
    assert batch["x"].tolist() == (torch.from_numpy(maps["x"][[5, 2]]) / 255).tolist()
    assert batch["z"].tolist() == torch.from_numpy(maps["z"][[5, 2]]).float().tolist()
    padded, _ = clients.pad_part("train", torch.tensor([0, 4]))
    assert padded["x"].shape == (2, clients.train.largest, 4)


def test_all_files_are_read(tmp_path):
    names = np.array(["b", "a", "c"])[np.arange(COUNT) % 3]
    split = np.arange(COUNT) % 2 * 2
    folder = write(tmp_path, make_inputs("float32"), client=names, split=split)
    arrays = NpyFolder(folder).load()
    assert [arrays.owner_name(int(id)) for id in arrays.client] == names.tolist()
    assert arrays.split.tolist() == split.tolist()
    assert arrays.num_classes == 3
    assert NpyFolder(folder, num_classes=5).load().num_classes == 5
    (tmp_path / "client.npy").unlink()
    assert NpyFolder(folder).load().client is None
    clients = FederatedData(NpyFolder(folder), Dirichlet(0.5), 3, split="own", seed=0).clients
    assert clients.num_clients == 3


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"normalize": "channel"}, "normalize"),
        ({"skew": Quality()}, "skew"),
        ({"transforms": [nn.Identity()]}, "transforms"),
    ],
)
def test_changes_of_all_inputs_are_refused(tmp_path, settings, name):
    data = FederatedData(NpyFolder(write(tmp_path, make_inputs("uint8"))), **settings)
    with pytest.raises(ValueError, match=f"`{name}` to be left out for inputs in a memory map"):
        _ = data.clients


def test_augmentation_changes_each_minibatch(tmp_path):
    folder = write(tmp_path, make_inputs("uint8"))
    outcomes = [
        run_rounds(
            FedAvg(seeded(mlp)),
            FederatedData(NpyFolder(folder), batch_size=4, test_fraction=0.0, **settings),
            1,
        )
        for settings in ({}, {"augment": [nn.Dropout(0.5)]})
    ]
    assert outcomes[0].distance(outcomes[1]) > 1e-6


BROKEN = make_inputs("float32")
BROKEN[[7, 50], 2] = np.nan


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (
            {"x": BROKEN},
            "`x` to hold finite numbers .* in 2 samples, first in sample 7",
        ),
        (
            {"x": make_inputs("uint8").astype("uint16")},
            "a signed integer or .* but got uint16: write another type",
        ),
        (
            {"x": make_inputs("float32").astype(">f4")},
            "order of this machine, but got >f4",
        ),
        ({"x": np.array([["a"]] * COUNT)}, "memory map to hold bool, .* but got <U1"),
        ({"x": np.array([{}] * COUNT)}, "x.npy to be an .npy file of numbers but got ValueError"),
        ({"y": np.zeros(5, int)}, r"`y` to have 60 rows, as many as `x`, but got shape \[5"),
        ({"y": np.array(["a"] * COUNT)}, "y.npy to be an .npy file of numbers but got TypeError"),
        ({"y": np.arange(COUNT) - 1}, "`y` to be class ids from 0"),
        ({"client": np.zeros(COUNT)}, "`client` to be integers but got"),
        ({"split": np.full(COUNT, 3)}, r"`split` to be 0 \(train\), 1"),
    ],
)
def test_mismatched_files_are_refused(tmp_path, arrays, words):
    folder = write(tmp_path, **{"x": make_inputs("uint8"), **arrays})
    with pytest.raises(ValueError, match=f"^Expected .*{words}") as failed:
        NpyFolder(folder).load()
    assert str(tmp_path) in str(failed.value)
    assert "\n" not in str(failed.value)


def test_file_with_almost_the_name_of_another_is_named(tmp_path):
    for name, array in {"x": np.zeros((2, 3)), "y": [0, 1], "splits": [0, 2]}.items():
        np.save(tmp_path / f"{name}.npy", array)
    with pytest.warns(UserWarning, match=r"read the array `splits` of .*: name it `split` if"):
        NpyFolder(str(tmp_path)).load()


def test_missing_files_are_refused(tmp_path):
    folder = write(tmp_path, make_inputs("uint8"))
    (tmp_path / "y.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"x.npy and y.npy but got no y.npy in /.*: write"):
        NpyFolder(folder).load()
    np.savez(tmp_path / "y.npz", a=np.zeros(3))
    (tmp_path / "y.npz").rename(tmp_path / "y.npy")
    with pytest.raises(ValueError, match=r"an .npy file of numbers but got TypeError: it is an"):
        NpyFolder(folder).load()


def test_large_inputs_are_checked_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("pl_fed.data.source._BLOCK", 9)  # two rows, of four numbers
    folder = write(tmp_path, BROKEN)
    with pytest.raises(ValueError, match="in 2 samples, first in sample 7"):
        NpyFolder(folder).load()
    write(tmp_path, make_inputs("float32"))
    assert len(NpyFolder(folder).load()) == COUNT


@pytest.mark.slow
def test_a_fit_needs_less_memory_than_its_inputs(tmp_path):
    """Anonymous memory only: the system frees the pages of the file on demand."""
    rows = 4_000
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", "uint8", (rows, 3, 64, 64))
    x[:, 0, 0, 0] = 1  # 49 MB, or 197 MB as float32
    x.flush()
    np.save(tmp_path / "y.npy", np.arange(rows) % 2)
    np.save(tmp_path / "client.npy", np.arange(rows) // 20)
    code = f"""
import torch, pl_fed
from pl_fed import clients, data, samplers
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024
net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(12, 2))
client = clients.FedAvg(net)
mapped = data.FederatedData(data.NpyFolder({str(tmp_path)!r}))
federation = pl_fed.Federation(samplers.Uniform(10), engine=pl_fed.EngineOptions("one_by_one"))
trainer = pl_fed.Trainer(federation, max_epochs=1, accelerator="cpu", logger=False,
    run_dir={str(tmp_path / "run")!r}, enable_progress_bar=False)
before = anonymous()
trainer.fit(client, mapped)
print(anonymous() - before)
"""
    output = ForkedCommand(["-c", code], tmp_path).communicate(timeout=100)[0]
    assert float(output.splitlines()[-1]) < 40  # MB


def test_partitioners_need_only_the_labels(tmp_path):
    folder = write(tmp_path, make_inputs("uint8"), client=None)
    clients = FederatedData(NpyFolder(folder), IID(), 4, seed=0).clients
    assert clients.train.sizes.tolist() == [10] * 4
