"""Map-style data sets: read once, by the entries of their samples."""

import random
import re
import sys
import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
from lightning import LightningModule
from small_federations import run_tried_rounds, sgd
from tables import table_test
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

import pl_fed
from pl_fed.clients import FedAvg
from pl_fed.data import FederatedData, TorchDataset
from pl_fed.partitioners import IID, Dirichlet
from pl_fed.types import SampleEntries

COUNT = 300  # more than are read at once


class Pairs(Dataset):
    """Images, and their classes."""

    def __init__(self, count=COUNT, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randint(256, (count, 1, 2, 2), generator=draw, dtype=torch.uint8)
        self.y = torch.randint(3, (count,), generator=draw)
        self.sites = [f"site {k % 7}" for k in range(count)]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])


class Texts(Dataset):
    """Token ids of several lengths in dicts, as tokenizers return them."""

    def __init__(self, count=COUNT, mapping=dict):
        self.lengths = [1 + 7 * k % 11 for k in range(count)]
        self.mapping = mapping

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        length = self.lengths[index]
        return self.mapping(
            ids=torch.arange(length) + index,
            mask=[1] * length,
            label=index % 2,
            user=f"user {index % 5}",
        )


def test_pairs_keep_their_dtypes():
    pairs = Pairs()
    arrays = TorchDataset(pairs, client="sites").load()
    assert arrays.inputs.dtype == torch.uint8
    assert torch.equal(arrays.inputs, pairs.x)
    assert (arrays.targets.dtype, arrays.num_classes) == (torch.int64, 3)
    assert torch.equal(arrays.targets, pairs.y)
    assert [arrays.owner_name(int(id)) for id in arrays.client] == pairs.sites
    assert arrays.split is None


@pytest.mark.parametrize("mapping", [dict, lambda **entries: UserDict(entries)])
def test_dicts_of_several_lengths_are_padded(mapping):
    texts = Texts(mapping=mapping)
    settings = {"client": "user", "inputs": ["ids", "mask"]}
    padding = {"ids": -1, "mask": 0}
    arrays = TorchDataset(texts, padding=padding, **settings).load()
    ids = pad_sequence([texts[k]["ids"] for k in range(COUNT)], True, -1)
    assert torch.equal(arrays.inputs["ids"], ids)
    assert torch.equal(arrays.inputs["mask"], (ids >= 0).long())
    assert arrays.targets.tolist() == [k % 2 for k in range(COUNT)]
    assert arrays.names == [f"user {k}" for k in range(5)]
    assert arrays.client.tolist() == [k % 5 for k in range(COUNT)]


def test_owners_of_an_array_of_texts_are_not_padded():
    sites = np.array(["b", "a"])
    arrays = TorchDataset([([1, 2], sites[0], 0), ([3], sites[1], 1)], client=1, padding=0).load()
    assert (arrays.names, arrays.client.tolist()) == (["a", "b"], [1, 0])


def test_an_empty_list_has_the_type_of_others():
    samples = [([], 0), ([5, 6], 1), ([], 0)]
    arrays = TorchDataset(samples, padding=-1, redraw=True).load()
    assert arrays.inputs.tolist() == [[-1, -1], [5, 6], [-1, -1]]
    assert arrays.inputs.dtype == arrays.redraw([0], [1])[0].dtype == torch.int64


@pytest.mark.parametrize(
    ("padding", "is_reported"), [(0, True), (-100, False), ({"ids": 0, "labels": 0}, False)]
)
def test_targets_that_are_padded_like_inputs_are_reported(padding, is_reported):
    lengths = [1, 3, 2]
    samples = [{"ids": torch.ones(n).long(), "labels": torch.ones(n).long()} for n in lengths]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TorchDataset(samples, padding=padding).load()
        TorchDataset([{**sample, "labels": 1} for sample in samples], padding=0).load()
    texts = [str(warning.message) for warning in caught]
    assert [text for text in texts if "pads the targets of list by 0" in text] == texts
    assert len(texts) == is_reported


@pytest.mark.parametrize(
    ("dtype", "padding"), [(torch.uint8, -100), (torch.int64, 0.5), (torch.bool, 2)]
)
def test_padding_that_is_no_number_of_the_type_is_refused(dtype, padding):
    samples = [(torch.ones(length, dtype=dtype), 0) for length in (2, 1)]
    with pytest.raises(ValueError, match=f"be a number of type {dtype}, .* but got {padding}: ch"):
        TorchDataset(samples, padding=padding).load()
    assert TorchDataset(samples[:1], padding=padding).load().inputs.dtype == dtype  # not needed


def collate(samples):
    """Pad texts to the longest text of a batch, as for a DataLoader."""
    ids = pad_sequence([sample["ids"] for sample in samples], batch_first=True)
    return (ids, ids > 0), torch.tensor([sample["label"] for sample in samples])


def user_id(sample):
    return int(sample["user"][-1]) + 3


def test_collate_fn_and_client_fn():
    texts = Texts()
    arrays = TorchDataset(texts, client_fn=user_id, collate_fn=collate).load()
    (ids, mask), targets = collate([texts[k] for k in range(COUNT)])
    assert torch.equal(arrays.inputs[0], ids)
    assert torch.equal(arrays.inputs[1], mask)
    assert torch.equal(arrays.targets, targets)
    assert arrays.client.tolist() == [k % 5 + 3 for k in range(COUNT)]


def test_entries_by_position():
    x, z, y = torch.randn(9, 2), torch.arange(9), torch.rand(9, 1)
    dataset = TensorDataset(x, torch.arange(9) // 3 + 5, z, y)
    arrays = TorchDataset(dataset, client=1).load()
    assert torch.equal(arrays.inputs[0], x)
    assert torch.equal(arrays.inputs[1], z)
    assert torch.equal(arrays.targets, y)
    assert arrays.client.tolist() == [5, 5, 5, 6, 6, 6, 7, 7, 7]
    arrays = TorchDataset(dataset, client=1, inputs=[3], target=2).load()
    assert torch.equal(arrays.inputs, y)
    assert (arrays.targets.tolist(), arrays.num_classes) == ([*range(9)], 9)
    arrays = TorchDataset(dataset, client=-3, inputs=[0]).load()
    assert torch.equal(arrays.inputs, x)
    assert arrays.client.tolist() == [5, 5, 5, 6, 6, 6, 7, 7, 7]


def test_an_entry_is_an_input_and_the_target():
    x, n = torch.arange(6.0).view(3, 2), torch.arange(3)
    dataset = [{"x": x[k], "n": n[k]} for k in range(3)]
    arrays = TorchDataset(dataset, inputs=["x"], target="x").load()
    assert torch.equal(arrays.inputs, x)
    assert torch.equal(arrays.targets, x)
    arrays = TorchDataset(dataset, inputs=["x", "n"], target="n", labels="n").load()
    assert torch.equal(arrays.inputs["x"], x)
    assert all(torch.equal(ids, n) for ids in (arrays.inputs["n"], arrays.targets, arrays.labels))


def test_a_step_gets_the_changed_values_of_an_entry_with_both_roles():
    entries = SampleEntries(("x",), "x")
    assert entries.join(torch.ones(3, 2), torch.zeros(3, 2))["x"].sum() == 6  # normalized inputs
    assert entries.join(torch.ones(3), torch.zeros(3))["x"].sum() == 0  # poisoned labels
    tokens = torch.ones(3, 2, dtype=torch.int32)  # as of a Hugging Face data set
    assert entries.join(tokens, tokens.long())["x"].dtype == torch.int64


@pytest.mark.parametrize(
    "owners", [[k % 4 for k in range(COUNT)], torch.arange(COUNT) % 4, np.arange(COUNT) % 4]
)
def test_clients_as_a_list(owners):
    arrays = TorchDataset(Pairs(), client=owners).load()
    assert arrays.client.tolist() == [k % 4 for k in range(COUNT)]
    assert arrays.names is None
    texts = TorchDataset(Texts(), client=owners, inputs=["ids"], padding=0).load()
    assert texts.client.tolist() == arrays.client.tolist()


def test_clients_and_labels_as_a_column_of_pandas():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"user": ["b", "a", "b"], "kind": [4, 5, 4]}, index=[7, 8, 9])
    samples = [(0.5, 1.5), (2.0, 3.0), (4.0, 5.0)]
    arrays = TorchDataset(samples, client=table["user"], labels=table["kind"]).load()
    assert (arrays.names, arrays.client.tolist()) == (["a", "b"], [1, 0, 1])
    assert arrays.labels.tolist() == [4, 5, 4]


def test_client_attribute_of_the_data_set_below_subsets():
    pairs = Pairs(40)
    part = Subset(Subset(pairs, range(3, 30)), [5, 0, 2])
    both = ConcatDataset([part, Pairs(10)])
    arrays = TorchDataset(both, client="sites").load()
    expected = [pairs.sites[k] for k in (8, 3, 5)] + pairs.sites[:10]
    assert [arrays.owner_name(int(id)) for id in arrays.client] == expected


def test_official_parts():
    parts = [Pairs(30, seed) for seed in range(3)]
    source = TorchDataset(parts[0], "sites", val=parts[1], test=parts[2])
    arrays = source.load()
    assert arrays.split.tolist() == [0] * 30 + [1] * 30 + [2] * 30
    assert torch.equal(arrays.inputs, torch.cat([part.x for part in parts]))
    clients = FederatedData(source, split="official", seed=0).clients
    assert clients.num_clients == 7
    assert {int(k) // 30 for k in clients.test.index} == {2}


@pytest.mark.parametrize("batches", [None, "own"])
def test_part_without_samples_is_like_none(batches):
    parts = {"val": Subset(Pairs(3), []), "test": Pairs(5)}
    arrays = TorchDataset(Pairs(4), **parts, batches=batches).load()
    assert arrays.split.tolist() == [0] * 4 + [2] * 5
    for redraw in (None, True):
        source = TorchDataset(Subset(Pairs(3), []), **parts, batches=batches, redraw=redraw)
        with pytest.raises(ValueError, match="Expected a data set with a training part but got"):
            _ = FederatedData(source, IID(), 2).clients


def test_all_parts_are_padded_to_one_length():
    short, long = Texts(3), Texts(12)
    settings = {"inputs": ["ids"], "padding": 0}
    arrays = TorchDataset(short, test=long, **settings).load()
    assert arrays.inputs.shape == (15, max(long.lengths))


def test_samples_of_dicts_and_targets_of_several_dimensions():
    """Segmentation: one class per pixel, and a dict of inputs of several dtypes."""
    samples = [
        ({"image": np.ones((3, 2, 2), "uint8"), "age": np.float32(k)}, np.full((2, 2), k % 3))
        for k in range(5)
    ]
    arrays = TorchDataset(samples).load()
    assert {name: leaf.dtype for name, leaf in arrays.inputs.items()} == {
        "image": torch.uint8,
        "age": torch.float32,
    }
    assert (arrays.targets.shape, arrays.num_classes) == ((5, 2, 2), 0)


def test_partitioners_use_the_targets():
    clients = FederatedData(TorchDataset(Pairs()), Dirichlet(0.1), 4, seed=0).clients
    assert (clients.num_clients, clients.num_classes) == (4, 3)
    real = TorchDataset(TensorDataset(torch.ones(9, 1), torch.rand(9, 1)))
    with pytest.raises(TypeError, match="class ids for Dirichlet, which splits classes, but got"):
        _ = FederatedData(real, Dirichlet(0.1), 2, seed=0).clients


IMAGES = torch.arange(60.0).view(60, 1, 1, 1).expand(60, 1, 2, 2)
MASKS = torch.randint(2, (60, 2, 2), generator=torch.Generator().manual_seed(0))
TUPLES = [(IMAGES[k], MASKS[k], k % 3) for k in range(60)]
DICTS = [dict(zip(("image", "target", "label"), sample)) for sample in TUPLES]


@pytest.mark.parametrize(("samples", "labels"), [(TUPLES, 2), (TUPLES, -1), (DICTS, "label")])
def test_partitioners_use_labels_if_targets_are_no_classes(samples, labels):
    """Segmentation: a mask is the target, and the class of the image splits the samples."""
    arrays = TorchDataset(samples, labels=labels).load()
    assert torch.equal(arrays.inputs, IMAGES)
    assert torch.equal(arrays.targets, MASKS)
    assert (arrays.labels.tolist(), arrays.num_classes) == ([k % 3 for k in range(60)], 0)
    classes = [(image, label) for image, _, label in TUPLES]
    split, expected = (
        FederatedData(source, Dirichlet(0.1), 4, val_fraction=0, test_fraction=0, seed=3).clients
        for source in (TorchDataset(samples, labels=labels), TorchDataset(classes))
    )
    assert torch.equal(split.train.index, expected.train.index)
    assert torch.equal(split.train.offsets, expected.train.offsets)


def test_partitioner_by_classes_needs_labels():
    pairs = [sample[:2] for sample in TUPLES]
    with pytest.raises(TypeError, match=r"class ids for Dirichlet, .* and no `labels`: give the"):
        _ = FederatedData(TorchDataset(pairs), Dirichlet(0.1), 4).clients
    with pytest.raises(ValueError, match="`labels` to be class ids from 0 but got -1"):
        TorchDataset([(0.5, 0.5, -1)], labels=2).load()
    with pytest.raises(ValueError, match=r"`labels` to be integers but got torch\.float64"):
        TorchDataset([(0.5, 0.5, 0.5)], labels=2).load()


@pytest.mark.slow
def test_reading_in_processes_gives_the_same_samples():
    one, other = (TorchDataset(Pairs(), "sites", num_workers=n).load() for n in (0, 2))
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.client, other.client)


class Augmented(Pairs):
    """Draws from all three global generators."""

    def __init__(self, draws, count=COUNT):
        super().__init__(count)
        self.draws = draws

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + self.draws(), y


DRAWS = {
    "torch": lambda: torch.rand(()),
    "numpy": lambda: np.random.rand(),  # noqa: NPY002
    "random": random.random,
}


@pytest.mark.parametrize("redraw", [None, False])
@pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS)
def test_first_reading_is_reproducible_and_leaves_the_generators_alone(draws, redraw):
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    sources = [TorchDataset(Augmented(draws), redraw=redraw) for _ in range(2)]
    one = sources[0].load()
    draws()
    other = sources[1].load()
    assert torch.equal(one.inputs, other.inputs)
    assert (one.redraw is None) == (redraw is False)
    draws()
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    changed = [not torch.equal(state[0], after[0]), state[1] != after[1], state[2] != after[2]]
    assert sum(changed) <= 1, "only the draws between the readings moved a generator"


def test_deterministic_data_set_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TorchDataset(Pairs()).load()


class Counting(Pairs):
    """Counts how often a sample is read."""

    reads = 0

    def __getitem__(self, index):
        Counting.reads += 1
        return super().__getitem__(index)


def test_every_sample_is_read_once_and_some_twice():
    TorchDataset(Counting()).load()
    assert Counting.reads == COUNT + 2 * 16


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.ones(1), 0


class Failing(Pairs):
    def __getitem__(self, index):
        raise KeyError("image 7.png")


ROWS = [(torch.ones(2), 0), (torch.ones(2), 1)]
RAGGED = [(torch.ones(2), 0), (torch.ones(3), 1)]


@table_test(
    ("dataset", "settings", "error", "words"),
    [
        (Stream(), {}, TypeError, "`dataset` to be a map-style .* but got Stream: read its"),
        (3, {}, TypeError, "`dataset` to be a map-style .* but got int"),
        (Failing(), {}, ValueError, "Failing to give samples .* but got KeyError: 'image 7.png'"),
        (RAGGED, {}, ValueError, "samples of list to have the same shape .*: set `padding` to"),
        ([], {}, ValueError, "at least one sample but got none"),
        ([torch.ones(2)] * 3, {}, ValueError, "inputs and a target, as .* but got Tensor: name th"),
        ([(torch.ones(2),)] * 3, {}, ValueError, "but got 1 entries: name them by `inputs` and"),
        ([{"a": 1, "b": 2}] * 3, {}, ValueError, "but got a dict of a, b: name them by `inputs`"),
        ([{"a": 1, "y": 2, "label": 1}] * 3, {}, ValueError, "a dict of a, y, label: name them"),
        ([{"a": 1, "y": 2}] * 3, {"inputs": ["b"]}, ValueError, "a dict of a, y"),
        ([("text", 1)] * 3, {}, ValueError, "entry 0 of each sample to hold tensors, .* got str"),
        ([("text", 1)] * 3, {}, ValueError, "got str: .* or set `data.dataset.batches: own`"),
        (ROWS, {"client": 5}, ValueError, "`client` to be a position in each sample but got 5"),
        (ROWS, {"client": "site"}, ValueError, "`client` to be the key .* of list .* got 'site'"),
        (ROWS, {"client": [1]}, ValueError, "owner for each of 2 samples but got 1 owners"),
        (ROWS, {"client_fn": lambda sample: 0.5}, ValueError, "integer or a text .* but got 0.5"),
        (ROWS, {"client_fn": lambda sample: sample[1] or None}, ValueError, "a text .* got None"),
        ([(1.0, 0, "a"), (2.0, 1, None)], {"client": 2}, ValueError, "each sample but got None"),
        (ROWS, {"client": [1, 2**70]}, ValueError, "less than 64 bits, or texts, but got 11805"),
        (
            [(torch.ones(1), 0)] * 256 + [(torch.ones(1).double(), 0)],
            {},
            ValueError,
            "one type but got torch.float32 and torch.float64",
        ),
    ],
)
def test_unsuitable_data_sets_are_refused(dataset, settings, error, words):
    with pytest.raises(error, match=f"^Expected .*{words}") as failed:
        TorchDataset(dataset, **settings).load()
    assert str(failed.value).endswith(".")
    assert "\n" not in str(failed.value)


def test_batches_without_a_row_for_each_sample_are_left_to_the_steps_of_a_module():
    def join(samples):
        return torch.ones(1, 2), torch.ones(1)

    arrays = TorchDataset(ROWS, collate_fn=join).load()
    assert re.match(
        r"Expected argument `collate_fn` to return tensors with a row for each of 2 samples .*"
        r"shape \[1, 2\]",
        arrays.entries.reason,
    )


def test_batches_that_leave_samples_out_get_the_remedy():
    """Sizes of clients, and so the weights of their uploads, counted such samples in silence."""
    samples = [(torch.ones(2), k % 4 - 1) for k in range(12)]

    def join(samples):
        return default_collate([sample for sample in samples if sample[1] >= 0])

    source = TorchDataset(samples, collate_fn=join)
    with pytest.warns(UserWarning, match="Batches of list have fewer rows than samples. If `col"):
        arrays = source.load()
    assert arrays.entries.reason == (
        "Expected argument `collate_fn` to return tensors with a row for each of 12 samples but got"
        " shape [9, 2]: if it leaves samples out, give a torch.utils.data.Subset of the others (in"
        " list)."
    )


@table_test(
    ("settings", "error", "words"),
    [
        ({"inputs": "x"}, TypeError, r"`inputs` to be a list of entries but got 'x': write \[x\]"),
        ({"collate_fn": 3}, TypeError, "`collate_fn` to be a function but got 3"),
        ({"client_fn": 3}, TypeError, "`client_fn` to be a function but got 3"),
        ({"client_fn": len, "client": 0}, ValueError, "`client` to be left out with `client_fn`"),
        ({"collate_fn": default_collate, "padding": 0}, ValueError, "`padding` to be left out"),
        ({"padding": {"x": float("nan")}}, ValueError, "`padding` to be a finite number"),
        ({"num_classes": -1}, ValueError, "`num_classes` to be at least 0"),
        ({"num_workers": 0.5}, TypeError, "`num_workers` to be an integer"),
    ],
)
def test_invalid_settings_are_refused(settings, error, words):
    with pytest.raises(error, match=f"^Expected argument {words}"):
        TorchDataset(ROWS, **settings)


def test_error_of_a_plain_data_set_names_the_wrapper():
    with pytest.raises(TypeError, match=r"but got Pairs: pass pl_fed.data.TorchDataset\(dataset\)"):
        FederatedData(Pairs())


@pytest.mark.usefixtures("temporary_working_folder")
def test_training_of_one_client_equals_training_with_a_dataloader():
    """FedAvg of a client that holds all samples takes the steps of a plain loop over them."""
    pairs = Pairs(40)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    before = [p.detach().clone() for p in net.parameters()]
    source = TorchDataset(pairs, client_fn=lambda sample: 0)
    data = FederatedData(source, batch_size=40, val_fraction=0.0, test_fraction=0.0)
    federation = pl_fed.Federation(pl_fed.samplers.All(), seed=0)
    trainer = pl_fed.Trainer(federation, max_epochs=3, accelerator="cpu", logger=False,
                             enable_progress_bar=False, enable_checkpointing=False)  # fmt: skip
    trainer.fit(FedAvg(net, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), data)
    trained = federation.model_of(0, "global")
    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    for parameter, value in zip(plain.parameters(), before):
        parameter.data.copy_(value)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        for x, y in DataLoader(pairs, 40):
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(x / 255), y).backward()
            optimizer.step()
    for one, other in zip(trained.parameters(), plain.parameters()):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.slow
def test_data_set_from_a_config(tmp_path, monkeypatch):
    from pl_fed.command.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_code.py").write_text(
        "import torch\n"
        "class Blobs(torch.utils.data.Dataset):\n"
        "    def __init__(self, count: int):\n"
        "        self.count = count\n"
        "    def __len__(self):\n"
        "        return self.count\n"
        "    def __getitem__(self, k):\n"
        "        return {'x': torch.ones(4) * k, 'y': k % 2, 'site': f's{k % 3}', 'note': 'a'}\n"
        "def collate(samples):\n"
        "    samples = [{k: v for k, v in s.items() if k != 'note'} for s in samples]\n"
        "    return torch.utils.data.default_collate(samples)\n"
        "def site(sample):\n"
        "    return sample['site'] + '!'\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "model:\n"
        "  class_path: pl_fed.clients.FedAvg\n"
        "  init_args:\n"
        "    net: {class_path: pl_fed.models.MLP, init_args: {in_features: 4, hidden: [3],"
        " num_classes: 2}}\n"
        "data:\n"
        "  dataset:\n"
        "    class_path: pl_fed.data.TorchDataset\n"
        "    init_args:\n"
        "      dataset: {class_path: my_code.Blobs, init_args: {count: 60}}\n"
        "      inputs: [x]\n"
        "federation:\n"
        "  sampler: {class_path: pl_fed.samplers.All}\n"
        "trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false}\n"
    )

    def owners(*arguments):
        for path in tmp_path.glob("runs/*"):
            for file in sorted(path.rglob("*"), reverse=True):
                file.unlink() if file.is_file() else file.rmdir()
            path.rmdir()
        main(["fit", "--config", "mine.yaml", "--trainer.default_root_dir", "runs", *arguments])
        (table,) = tmp_path.glob("runs/*/per_client.csv")
        return [line.split(",")[1] for line in table.read_text().splitlines()[1:]]

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*Unable to serialize.*")  # for `resume`
        assert owners("--data.dataset.client", "site") == ["s0", "s1", "s2"]
    functions = ("--data.dataset.client_fn", "my_code.site", "--data.dataset.collate_fn",
                 "my_code.collate")  # fmt: skip
    assert owners(*functions) == ["s0!", "s1!", "s2!"]
    sys.modules.pop("my_code")


class Named(list):
    """Samples with the names of their classes, as an image folder of torchvision."""

    def __init__(self, names, labels):
        super().__init__((torch.tensor([1.0]), names.index(label)) for label in labels)
        self.class_to_idx = {name: number for number, name in enumerate(names)}


def test_class_ids_of_parts_are_matched_by_name():
    train = Named(["cat", "dog", "eel"], ["eel", "cat", "dog"])
    test = Named(["dog", "eel"], ["dog", "eel"])  # a folder of torchvision has other ids
    arrays = TorchDataset(train, test=torch.utils.data.Subset(test, [1, 0])).load()
    assert (arrays.targets.tolist(), arrays.num_classes) == ([2, 0, 1, 2, 1], 3)
    arrays = TorchDataset(train, val=Named(["Cat", "cat"], ["Cat", "cat"]), test=test).load()
    assert (arrays.targets.tolist(), arrays.num_classes) == ([2, 0, 1, 3, 0, 1, 2], 4)
    same = Named(["cat", "dog", "eel"], ["dog"])
    assert TorchDataset(train, test=same).load().targets.tolist() == [2, 0, 1, 1]


def test_class_ids_of_samples_drawn_anew_are_matched_by_name():
    train, test = Named(["cat", "dog", "eel"], ["eel", "cat"]), Named(["dog", "eel"], ["eel"])
    arrays = TorchDataset(train, test=test, redraw=True).load()  # a client may train on `test`
    assert arrays.redraw([2, 0], [7, 8])[1].tolist() == arrays.targets[[2, 0]].tolist() == [2, 2]
    assert TorchDataset(train, test=test, redraw=False).load().redraw is None


@pytest.mark.parametrize(("transform", "classes"), [(lambda label: int(label > 0), 2), (float, 0)])
def test_class_names_are_not_those_of_transformed_targets(transform, classes):
    names = ["cat", "dog", "eel"]
    named = Named(names, names)
    named[:] = [(inputs, transform(label)) for inputs, label in named]
    named.target_transform = transform
    arrays = TorchDataset(named).load()
    assert (arrays.targets.tolist(), arrays.num_classes) == ([*map(transform, range(3))], classes)
    assert arrays.class_names == ()


class DividesBy255(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 3)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs.float() / 255), labels)


@pytest.mark.slow
def test_scaled_images_are_reported_to_steps_that_may_scale_them():
    inputs = torch.randint(256, (12, 2), dtype=torch.uint8, generator=torch.Generator())
    samples = [(row, k % 3) for k, row in enumerate(inputs)]
    for tensors, is_reported in ((samples, True), ([(x / 255, y) for x, y in samples], False)):
        data = FederatedData(TorchDataset(tensors), IID(), 2)
        client = FedAvg(DividesBy255(), optimizer=sgd())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_tried_rounds(client, data, rounds=1, dtype=torch.float32)
        texts = [str(warning.message) for warning in caught]
        assert is_reported == any("scales the uint8 inputs of the data set" in t for t in texts)


class Autoencoder(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        inputs, images = batch
        return nn.functional.mse_loss(self.net(inputs.float()), images.float())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_as_targets_are_reported_as_not_scaled(dtype):
    images = torch.randint(256, (12, 2), dtype=torch.uint8, generator=torch.Generator())
    data = FederatedData(TorchDataset([(row, row.to(dtype)) for row in images]), IID(), 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client = FedAvg(Autoencoder(), optimizer=sgd())
        run_tried_rounds(client, data, rounds=1, dtype=torch.float32)
    texts = [str(warning.message) for warning in caught]
    assert any("divide the targets alone by 255" in t for t in texts) == (dtype == torch.uint8)
