"""The list of quantities over all clients is complete: neighbours change nobody else's samples."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from small_federations import Given, classes
from torch import nn

import pl_fed.data
from pl_fed.data import (
    Arrays,
    ClientFolder,
    DataSource,
    FederatedData,
    ImageFolder,
    NpyFolder,
    Npz,
    Shakespeare,
    Table,
    TorchDataset,
)
from pl_fed.data.shared_quantities import SHARED_QUANTITIES, describe_shared_quantity
from pl_fed.trees import leaves, select

pytest.importorskip("pyarrow")
ROWS = [(client, word) for client in (1, 2) for word in ("cat", "dog", "emu")]


def tables(tmp_path, word):
    lines = ["owner,animal,x,label", f"0,{word},1.5,{word}", f"0,{word},0.5,cat"]
    lines += [f"{client},{animal},{len(animal)}.5,{animal}" for client, animal in ROWS]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    return str(tmp_path / "t.csv")


def folder_of_clients(tmp_path, word):
    for client in range(3):
        own = [word, "cat"] if client == 0 else [a for k, a in ROWS if k == client]
        lines = ["animal,x,label", *(f"{animal},{k}.5,{k % 2}.5" for k, animal in enumerate(own))]
        (tmp_path / f"{client}.csv").write_text("\n".join(lines))
    return str(tmp_path)


def images(tmp_path, word):
    for number, name in enumerate((word, "cat", "dog", "emu")):
        (tmp_path / "pets" / name).mkdir(parents=True)
        Image.new("L", (2, 2), number).save(tmp_path / "pets" / name / "1.png")
    return str(tmp_path)


def plays(tmp_path, letter):
    roles = {"Ann": f"x{letter}y" * 9, "Bob": "xyz" * 9, "Cy": "zyx" * 9}
    (tmp_path / "Shakespeare").mkdir()
    text = "\n\n".join(f"{role}:\n{speech}" for role, speech in roles.items())
    (tmp_path / "Shakespeare" / "input.txt").write_text(text)
    return str(tmp_path)


def numbers(word):
    """Return the samples of three clients; those of client 0 depend on the word."""
    arrays = classes([4, 4, 4])
    arrays.inputs[:4] *= 100 if word == "zebra" else 1
    return arrays


def npz(tmp_path, word):
    arrays = numbers(word)
    np.savez(tmp_path / "a.npz", x=arrays.inputs, y=arrays.targets, client=arrays.client)
    return Npz(str(tmp_path / "a.npz"))


def npy(tmp_path, word):
    arrays = numbers(word)
    for name, tensor in {"x": arrays.inputs, "y": arrays.targets, "client": arrays.client}.items():
        np.save(tmp_path / f"{name}.npy", tensor)
    return NpyFolder(str(tmp_path))


def torch_dataset(tmp_path, word):
    arrays = numbers(word)
    samples = list(zip(arrays.inputs, arrays.targets.tolist()))
    return TorchDataset(samples, client=arrays.client.tolist())


PUBLIC = {"animal": ["cat", "dog", "emu"], "label": ["cat", "dog", "emu", "zebra", "aardvark"]}
TABLE = {"target": "label", "client": "owner"}
WORDS = PUBLIC["label"]
SOURCES = {  # name → the data of client 0 and the path of the files → the source
    "one_hot": lambda p, w: Table(tables(p, w), **TABLE, one_hot=["animal"]),
    "ids": lambda p, w: Table(tables(p, w), **TABLE, ids=["animal"]),
    "classes": lambda p, w: Table(tables(p, w), **TABLE, exclude=["animal"]),
    "given": lambda p, w: Table(tables(p, w), **TABLE, one_hot=["animal"], categories=PUBLIC),
    "given ids": lambda p, w: Table(tables(p, w), **TABLE, ids=["animal"], categories=PUBLIC),
    "real": lambda p, w: Table(tables(p, w), "x", "owner", exclude=["animal", "label"],
                               inputs=["owner"]),
    "folder": lambda p, w: ClientFolder(folder_of_clients(p, w), "label", one_hot=["animal"]),
    "folder, given": lambda p, w: ClientFolder(
        folder_of_clients(p, w), "label", ids=["animal"], categories={"animal": ["cat", "dog"]}
    ),
    "images": lambda p, w: ImageFolder("pets", images(p, w)),
    "images, given": lambda p, w: ImageFolder("pets", images(p, w), classes=WORDS),
    "plays": lambda p, w: Shakespeare(plays(p, w[0]), 5, 20),
    "plays, given": lambda p, w: Shakespeare(plays(p, w[0]), 5, 20, characters="xyz"),
    "npz": npz, "npy": npy, "torch": torch_dataset,
}  # fmt: skip
REFUSED = {"one_hot", "ids", "classes", "folder", "images", "plays"}


def samples_of_others(data, owners):
    """Return inputs, targets of all clients but the first, or of all images but the first."""
    clients = data.clients
    if owners is None:
        index = (clients.inputs[:, 0, 0, 0] > 0).nonzero().flatten()
        order = clients.inputs[index, 0, 0, 0].argsort()
        index = index[order]
    else:
        index = torch.cat([clients.train.samples(client) for client in (1, 2)])
    return select(clients.inputs, index), select(clients.targets, index)


def load(source, **settings):
    settings = {"val_fraction": 0, "test_fraction": 0, "seed": 0, **settings}
    return FederatedData(source, **settings)


def differs(first, second):
    pairs = list(zip(leaves(first), leaves(second), strict=True))
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", SOURCES)
def test_sources_change_no_other_clients_samples_or_are_refused(tmp_path, name):
    samples = []
    for word in ("zebra", "aardvark"):
        (tmp_path / word).mkdir()
        source = SOURCES[name](tmp_path / word, word)
        settings, owners = {}, True
        if isinstance(source, ImageFolder):
            settings = {"partitioner": pl_fed.partitioners.IID(), "num_clients": 1}
            owners = None
        data = load(source, **settings)
        samples.append(samples_of_others(data, owners))
    refusal = describe_shared_quantity(data, "for `federation.privacy`")
    assert differs(*samples) == (name in REFUSED)
    assert (refusal is not None) == (name in REFUSED), refusal
    if refusal:
        assert refusal.startswith("Expected argument `data.")
        assert refusal.endswith(".")


class Centred(nn.Module):
    """A transform with statistics of all samples."""

    def forward(self, x):
        return x - x.mean(0)


OPTIONS = {  # name → settings, and whether they are refused
    "nothing": ({}, False),
    "channel": ({"normalize": "channel"}, True),
    "feature": ({"normalize": "feature"}, True),
    "pair": ({"normalize": [0.5, 2.0]}, False),
    "transforms": ({"transforms": [Centred()]}, True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_no_other_clients_samples_or_are_refused(name):
    settings, is_refused = OPTIONS[name]
    data = [load(Given(numbers(word)), **settings) for word in ("zebra", "cat")]
    assert differs(*(samples_of_others(each, True) for each in data)) == is_refused
    assert (describe_shared_quantity(data[0], "for x") is not None) == is_refused


DRAWS = {  # name → settings, and whether they are refused
    "cut": ({"test_fraction": 0.3, "val_fraction": 0.2}, False),
    "stable cut": ({"test_fraction": 0.3, "val_fraction": 0.2, "stable_cut": True}, False),
    "root": ({"root_samples": 3}, True),
    "central": ({"central": "official", "split": "own", "val_fraction": 0.3}, True),
    "central without val": ({"central": "official", "split": "own"}, False),
}


@pytest.mark.parametrize("many", [False, True], ids=["few clients", "many clients"])
@pytest.mark.parametrize("name", DRAWS)
def test_one_sample_more_changes_no_draw_of_another_client(monkeypatch, name, many):
    if many:
        monkeypatch.setattr("pl_fed.data.client_split._MANY_CLIENTS", 1)
    settings, is_refused = DRAWS[name]
    parts = []
    for size in (8, 9):
        arrays = classes([size, 8, 8, 8])
        if "central" in settings:
            part = torch.zeros(len(arrays.targets), dtype=torch.int64)
            part[-4:] = 2
            arrays = replace(arrays, split=part)
        data = load(Given(arrays), **settings)
        clients = data.clients
        parts.append(
            [
                (part.samples(client) - size).tolist()
                for part in (clients.train, clients.val, clients.test)
                for client in (1, 2, 3)
            ]
        )
    assert (parts[0] != parts[1]) == is_refused
    refusal = describe_shared_quantity(data, "for x")
    assert (refusal is not None) == is_refused, refusal
    if is_refused:
        assert f"`data.{'root_samples' if name == 'root' else 'central'}` to be" in refusal


@pytest.mark.parametrize("redraw", [None, True, False], ids=str)
def test_samples_drawn_once_in_their_order_are_refused(redraw):
    arrays = numbers("cat")
    samples = list(zip(arrays.inputs, arrays.targets.tolist()))
    source = TorchDataset(samples, client=arrays.client.tolist(), redraw=redraw)
    refusal = describe_shared_quantity(load(source), "for `federation.privacy`")
    assert (refusal is None) == (redraw is not False)
    assert refusal is None or "`data.dataset.redraw` to be true or null for" in refusal


class Drawing(torch.utils.data.Dataset):
    """Eight samples of two clients, with random numbers of some kind."""

    owners = (0, 0, 0, 1, 1, 1, 1, 1)

    def __init__(self, kind):
        self.kind, self.generator = kind, torch.Generator().manual_seed(0)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.kind == "none":
            return torch.zeros(1), 0
        drawn = torch.rand(1, generator=self.generator if self.kind == "own generator" else None)
        return (drawn < 1e-9).float() if self.kind == "rare" else drawn, 0


@pytest.mark.parametrize("batches", [None, "own"], ids=str)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("none", None),
        ("global generator", None),
        ("rare", "but got Drawing with rare draws: draw from"),
        ("own generator", "but got Drawing with a generator or a memory of its own: draw from"),
    ],
)
@pytest.mark.filterwarnings("ignore:Drawing gives other samples")
def test_draws_without_a_key_are_refused(kind, words, batches):
    """They depend on the number of the samples before, which are other clients'.

    Batches of the data set's own are read within a client's steps, whose key global draws have.
    """
    source = TorchDataset(Drawing(kind), client=[*Drawing.owners], batches=batches)
    refusal = describe_shared_quantity(load(source), "for `federation.privacy`")
    if words is None or (kind, batches) == ("rare", "own"):
        assert refusal is None
    else:
        assert words in refusal


def test_rare_draws_that_are_drawn_anew_are_allowed():
    source = TorchDataset(Drawing("rare"), client=[*Drawing.owners], redraw=True)
    assert describe_shared_quantity(load(source), "for `federation.privacy`") is None


def test_every_option_of_the_data_is_known_here():
    """A new argument of FederatedData belongs into OPTIONS, or here with its reason."""
    harmless = {
        *("dataset", "partitioner", "num_clients", "seed"),  # the data and the simulation
        "split",  # by the data
        *(
            "batch_size",
            "drop_last",
            "min_batch",
            "augment",
            "skew",
        ),  # of one client's minibatches or samples
        *("clients_per_eval_batch", "predict_clients"),  # of the evaluation
        "held_out_clients",  # a draw among the numbers of the clients, or public names
    }
    tried = {key for s, _ in (*OPTIONS.values(), *DRAWS.values()) for key in s}
    arguments = {*inspect.signature(FederatedData.__init__).parameters} - {"self"}
    assert arguments - tried - harmless == set()


def test_every_source_is_tried_or_published():
    """A new data source belongs into SOURCES, or is a published data set with fixed numbers."""
    published = {
        *("Digits", "Diabetes", "Vehicle", "MNIST", "MNISTWriters", "FashionMNIST", "CIFAR10"),
        *("FEMNIST", "CelebA"),
        *("HuggingFace", "LightningData"),  # ClassLabel names are a schema; as TorchDataset
    }
    tried = {"Table", "ClientFolder", "ImageFolder", "Shakespeare", "Npz", "NpyFolder"}
    names = {name for name, kind in vars(pl_fed.data).items() if is_source(kind)}
    assert names - tried - {"TorchDataset"} == published


def is_source(kind):
    return isinstance(kind, type) and issubclass(kind, DataSource) and kind is not DataSource


def test_a_source_of_ones_own_lists_its_quantities():
    class Filled(Given):
        def list_shared_quantities(self):
            return {"fill": "the median of all samples"}

    data = load(Filled(Arrays(torch.zeros(2, 1), torch.zeros(2, 1), torch.arange(2))))
    refusal = describe_shared_quantity(data, "for `federation.privacy`")
    assert "`data.dataset.fill` to give a public constant for `federation.privacy`" in refusal
    assert "the median of all samples" in refusal


PUBLISHING = (Table, ImageFolder, Shakespeare, TorchDataset)


def test_options_of_the_list_exist():
    options = {quantity.option for quantity in SHARED_QUANTITIES}
    sources = {name for kind in PUBLISHING for name in parameters(kind)}
    expected = {f"data.{name}" for name in parameters(FederatedData)}
    assert options <= expected | {f"data.dataset.{name}" for name in sources}


def parameters(kind):
    return [*inspect.signature(kind.__init__).parameters][1:]
