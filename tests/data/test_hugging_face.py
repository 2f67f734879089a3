"""Data sets of Hugging Face, from memory and from disk."""

import sys
from datetime import date

import numpy as np
import pytest
import torch
from PIL import Image
from tables import table_test

from pl_fed.data import FederatedData, HuggingFace
from pl_fed.partitioners import Dirichlet

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()

COUNT = 300
LABEL = datasets.Value("int64")
FEATURES = {
    "input_ids": datasets.Sequence(datasets.Value("int32")),
    "attention_mask": datasets.Sequence(datasets.Value("bool")),
    "pixels": datasets.Array3D((1, 2, 2), "uint8"),
    "length": datasets.Value("float32"),
    "text": datasets.Value("string"),
    "user": datasets.Value("string"),
    "label": datasets.ClassLabel(names=["no", "yes", "maybe"]),
}


def columns(count=COUNT, seed=0):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 9, size=count)
    return {
        "input_ids": [draw.integers(100, size=length).tolist() for length in lengths],
        "attention_mask": [[True] * length for length in lengths],
        "pixels": draw.integers(256, size=(count, 1, 2, 2), dtype=np.uint8),
        "length": lengths.astype("float32"),
        "text": ["words"] * count,
        "user": [f"user {k % 7}" for k in range(count)],
        "label": draw.integers(2, size=count),
    }


def make_dataset(count=COUNT, seed=0):
    return datasets.Dataset.from_dict(columns(count, seed), datasets.Features(FEATURES))


TOKENS = {"inputs": ["input_ids", "attention_mask"], "padding": {"input_ids": 7}}
TOKENS["padding"]["attention_mask"] = 0


@pytest.mark.slow
def test_columns_keep_their_dtypes_and_are_padded():
    arrays = HuggingFace(make_dataset(), "user", **TOKENS).load()
    rows = columns()
    longest = max(map(len, rows["input_ids"]))
    ids = [[*row, *[7] * (longest - len(row))] for row in rows["input_ids"]]
    assert arrays.inputs["input_ids"].dtype == torch.int32
    assert arrays.inputs["input_ids"].tolist() == ids
    mask = arrays.inputs["attention_mask"]
    assert mask.dtype == torch.bool
    assert mask.sum(1).tolist() == [len(row) for row in rows["input_ids"]]
    assert arrays.targets.tolist() == rows["label"].tolist()
    assert arrays.num_classes == 3, "of the ClassLabel"
    assert [arrays.owner_name(int(id)) for id in arrays.client] == rows["user"]


@pytest.mark.parametrize("kind", ["int8", "int16", "uint16"])
def test_small_integers_are_those_of_embeddings(kind):
    """Tokenized data sets have token types and masks of int8, which no embedding takes."""
    columns = {"token_type_ids": [[0, 1], [1, 1]], "label": [0, 1]}
    features = {"token_type_ids": datasets.Sequence(datasets.Value(kind)), "label": LABEL}
    dataset = datasets.Dataset.from_dict(columns, datasets.Features(features))
    types = HuggingFace(dataset).load().inputs
    assert types.tolist() == columns["token_type_ids"]
    assert torch.nn.functional.embedding(types, torch.eye(2)).argmax(-1).tolist() == types.tolist()


@pytest.mark.slow
def test_inputs_on_disk_are_those_in_memory():
    on_disk = HuggingFace(make_dataset(), "user", **TOKENS, on_disk=True).load()
    in_memory = HuggingFace(make_dataset(), "user", **TOKENS).load()
    assert (on_disk.mapped, in_memory.mapped) == (True, False)
    for name, rows in in_memory.inputs.items():
        assert on_disk.inputs[name].dtype == rows.dtype
        assert torch.equal(on_disk.inputs[name], rows)


@pytest.mark.slow
def test_single_input_column_is_a_tensor():
    arrays = HuggingFace(make_dataset(), inputs=["pixels"]).load()
    assert arrays.inputs.dtype == torch.uint8
    assert np.array_equal(arrays.inputs.numpy(), columns()["pixels"])
    assert HuggingFace(make_dataset(), inputs=["pixels"], num_classes=9).load().num_classes == 9


@pytest.mark.slow
def test_all_columns_without_text_are_inputs():
    source = HuggingFace(make_dataset(), "user", padding=0)
    arrays = source.load()
    assert [*arrays.inputs] == ["input_ids", "attention_mask", "pixels", "length"]
    assert source.preparation == "inputs: input_ids, attention_mask, pixels, length"


def test_real_valued_target():
    arrays = HuggingFace(make_dataset(), inputs=["pixels"], target="length").load()
    assert (arrays.targets.dtype, arrays.num_classes) == (torch.float32, 0)


@pytest.mark.slow
def test_labels_for_partitioners():
    arrays = HuggingFace(make_dataset(), inputs=["pixels"], target="length", labels="label").load()
    assert arrays.labels.tolist() == columns()["label"].tolist()
    assert arrays.num_classes == 0
    arrays = HuggingFace(make_dataset(), "user", target="length", labels="label", padding=0).load()
    assert [*arrays.inputs] == ["input_ids", "attention_mask", "pixels"]
    with pytest.raises(ValueError, match="`labels` to name a column but got 'kind'"):
        HuggingFace(make_dataset(), labels="kind").load()


def test_images_become_tensors():
    images = [Image.fromarray(np.full((4, 6, 3), k, np.uint8)) for k in range(5)]
    features = {"image": datasets.Image(), "label": datasets.Value("int64")}
    data = datasets.Dataset.from_dict(
        {"image": images, "label": [*range(5)]}, datasets.Features(features)
    )
    arrays = HuggingFace(data).load()
    assert (arrays.inputs.dtype, arrays.inputs.shape) == (torch.uint8, (5, 3, 4, 6))
    assert arrays.inputs[:, 0, 0, 0].tolist() == [*range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("on_disk", [False, True])
def test_official_parts(tmp_path, on_disk):
    parts = {
        "test": make_dataset(20, 2),
        "train": make_dataset(50, 1),
        "unsupervised": make_dataset(9, 3),
    }
    parts["validation"] = make_dataset(10, 4)
    data = datasets.DatasetDict(parts)
    data.save_to_disk(tmp_path / "mine")
    source = HuggingFace(str(tmp_path / "mine") if on_disk else data, "user", ["pixels"])
    arrays = source.load()
    assert arrays.split.bincount().tolist() == [50, 10, 20]
    for part, name in enumerate(("train", "validation", "test")):
        expected = parts[name].with_format("torch")["pixels"][:]
        assert torch.equal(arrays.inputs[arrays.split == part], expected.to(torch.uint8))
    clients = FederatedData(source, seed=0).clients
    assert (clients.num_clients, int(clients.test.sizes.sum())) == (7, 20)


def test_partitioner_splits_a_data_set_on_disk(tmp_path):
    make_dataset().save_to_disk(tmp_path / "mine")
    source = HuggingFace(tmp_path / "mine", inputs=["pixels"])
    clients = FederatedData(source, Dirichlet(0.5), 3, seed=0).clients
    assert (clients.num_clients, clients.num_classes) == (3, 3)


def test_data_set_with_indices_and_another_format():
    data = make_dataset().with_format("numpy").select(range(9, 4, -1))
    arrays = HuggingFace(data, "user", ["pixels"]).load()
    assert np.array_equal(arrays.inputs.numpy(), columns()["pixels"][9:4:-1])
    assert [arrays.names[k] for k in arrays.client] == columns()["user"][9:4:-1]


@pytest.mark.slow
@table_test(
    ("build", "settings", "error", "words"),
    [
        (
            make_dataset,
            {"inputs": ["input_ids"]},
            ValueError,
            "samples of the data set to have the same shape but got several: set `padd",
        ),
        (
            make_dataset,
            {"inputs": ["ids"]},
            ValueError,
            r"`inputs` to name a column but got 'ids' \(colu",
        ),
        (
            make_dataset,
            {"client": "owner"},
            ValueError,
            "`client` to name a column but got 'owner'",
        ),
        (make_dataset, {"target": "y"}, ValueError, "`target` to name a column but got 'y'"),
        (
            make_dataset,
            {"target": "text"},
            ValueError,
            "column 'text' to hold numbers but got text: enco",
        ),
        (
            make_dataset,
            {"inputs": ["text"]},
            ValueError,
            "column 'text' to hold numbers but got text",
        ),
        (
            lambda: make_dataset().remove_columns("label"),
            {},
            ValueError,
            "`target` .* but got None",
        ),
        (
            lambda: make_dataset().select_columns(["text", "label"]),
            {},
            ValueError,
            "inputs but got none",
        ),
        (
            lambda: make_dataset().to_iterable_dataset(),
            {},
            TypeError,
            "IterableDataset: load it without",
        ),
        (
            lambda: make_dataset().with_transform(dict),
            {},
            TypeError,
            "without a transform .*TorchDataset",
        ),
        (
            lambda: datasets.DatasetDict(a=make_dataset()),
            {},
            ValueError,
            "train, validation or test but",
        ),
        (lambda: "nowhere", {}, FileNotFoundError, r"`dataset.save_to_disk` but got /.*nowhere \("),
    ],
)
def test_unsuitable_data_sets_are_refused(build, settings, error, words):
    with pytest.raises(error, match=f"^Expected .*{words}") as failed:
        HuggingFace(build(), **settings).load()
    assert str(failed.value).endswith(".")
    assert "\n" not in str(failed.value)


def test_invalid_settings_are_refused():
    with pytest.raises(TypeError, match=r"a datasets.Dataset, a DatasetDict or .* but got 3"):
        HuggingFace(3)
    with pytest.raises(TypeError, match=r"`inputs` to be a list of entries .* write \[pixels\]"):
        HuggingFace(make_dataset(), inputs="pixels")
    with pytest.raises(TypeError, match=r"got Dataset: pass pl_fed.data.HuggingFace\(dataset\)"):
        FederatedData(make_dataset())


@pytest.mark.slow
def test_data_set_from_a_config(tmp_path, monkeypatch):
    from pl_fed.command.main import main

    monkeypatch.chdir(tmp_path)
    make_dataset().save_to_disk("mine")
    arguments = "fit --model pl_fed.clients.FedAvg --model.net pl_fed.models.MLP"
    arguments += " --model.net.in_features 4 --model.net.hidden [3] --model.net.num_classes 3"
    arguments += " --data.dataset pl_fed.data.HuggingFace --data.dataset.dataset mine"
    arguments += " --data.dataset.client user --data.dataset.inputs [pixels]"
    arguments += " --federation.sampler pl_fed.samplers.All"
    main([*arguments.split(), "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu"])
    (table,) = tmp_path.glob("runs/*/per_client.csv")
    owners = [line.split(",")[1] for line in table.read_text().splitlines()[1:]]
    assert owners == [f"user {k}" for k in range(7)]


def test_missing_package_is_reported(monkeypatch):
    source = HuggingFace(make_dataset())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"run `pip install pl_fed\[hf\]`"):
        source.load()


def labelled(names, labels, **columns):
    """Return a data set of classes by name."""
    values = {"x": [[float(names.index(label))] for label in labels], "label": labels, **columns}
    kind = datasets.ClassLabel(names=names)
    return datasets.Dataset.from_dict(values).cast_column("label", kind)


def test_class_names_in_another_order_are_matched_by_name():
    parts = datasets.DatasetDict(
        train=labelled(["cat", "dog", "eel"], ["cat", "dog", "eel", "cat"]),
        validation=labelled(["eel", "dog"], ["dog", "eel"]),
        test=labelled(["dog", "Dog", "cat"], ["cat", "dog", "Dog"]),
    )
    arrays = HuggingFace(parts).load()
    assert arrays.targets.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 3]
    assert (arrays.num_classes, arrays.split.tolist()) == (4, [0] * 4 + [1] * 2 + [2] * 3)


def test_owners_of_a_class_label_have_its_names():
    orders = {"train": ["Zoe", "nobody", "Ada"], "test": ["Ada", "Zoe"]}
    parts = {
        part: labelled(["a", "b"], ["a", "b"], user=["Ada", "Zoe"]).cast_column(
            "user", datasets.ClassLabel(names=names)
        )
        for part, names in orders.items()
    }
    arrays = HuggingFace(datasets.DatasetDict(parts), client="user").load()
    assert [arrays.owner_name(id) for id in arrays.client.tolist()] == ["Ada", "Zoe"] * 2
    data = FederatedData(HuggingFace(parts["train"], client="user"), test_fraction=0)
    assert data.clients.owners == [["Zoe"], ["Ada"]]


def test_other_parts_are_named_or_used():
    parts = datasets.DatasetDict(
        train=labelled(["a", "b"], ["a", "b"] * 4),
        validation_matched=labelled(["a", "b"], ["b"]),
        test_hidden=labelled(["a", "b"], ["a"]),
    )
    words = "leaves out the parts validation_matched, test_hidden of the data set"
    with pytest.warns(UserWarning, match=words):
        assert len(HuggingFace(parts).load()) == 8
    splits = {"train": "train", "validation_matched": "val", "test_hidden": "test"}
    assert HuggingFace(parts, splits=splits).load().split.bincount().tolist() == [8, 1, 1]
    for wrong in ({"train": "trains"}, {"dev": "val"}):
        with pytest.raises(ValueError, match=r"^Expected argument `splits` to map names"):
            HuggingFace(parts, splits=wrong).load()
    with pytest.raises(ValueError, match=r"^Expected argument `splits` to be left out"):
        HuggingFace(parts["train"], splits=splits).load()


def test_a_part_with_hidden_labels_is_named():
    hidden = labelled(["a", "b"], ["a", "b"]).to_dict()
    features = datasets.Features(
        x=datasets.Sequence(datasets.Value("float64")), label=datasets.ClassLabel(names=["a", "b"])
    )
    test = datasets.Dataset.from_dict(
        {**hidden, "label": [-1, -1]}, features=features, split="test"
    )
    parts = datasets.DatasetDict(train=labelled(["a", "b"], ["a", "b"]), test=test)
    with pytest.raises(ValueError, match=r"^Expected .* got 2 of 2 with the label -1 in test of"):
        HuggingFace(parts).load()


def test_parts_with_other_columns_are_refused_by_name():
    train = labelled(["a", "b"], ["a", "b"])
    parts = datasets.DatasetDict(train=train, test=train.rename_column("x", "z"))
    with pytest.raises(ValueError, match=r"^Expected all parts .* the column 'x' but got one with"):
        HuggingFace(parts).load()
    parts["test"] = train.cast_column("label", datasets.Value("int64"))
    with pytest.raises(
        ValueError, match=r"^Expected column 'label' to have one type .* ClassLabel"
    ):
        HuggingFace(parts).load()


def test_dates_and_missing_values_are_refused_by_column():
    values = {"x": [0.5, 1.5], "z": [True, False], "owner": ["a", "b"], "label": [0, 1]}
    for column, value, words in (
        ("z", date(2026, 1, 2), "numbers, or text for `client`, but got date32: convert"),
        ("owner", date(2026, 1, 2), "numbers, or text for `client`, but got date32: convert"),
        ("z", None, "a value in each row but got a missing one: fill it in"),
        ("owner", None, "a value in each row but got a missing one: fill it in"),
    ):
        column_values = [value or values[column][0], value]
        dataset = datasets.Dataset.from_dict({**values, column: column_values})
        with pytest.raises(ValueError, match=f"^Expected column '{column}' to hold {words}"):
            HuggingFace(dataset, "owner").load()


@pytest.mark.parametrize("rows", [[[0.5, 1.0], None], [None, [3, 4]]])
def test_missing_lists_are_refused_by_column(rows):
    dataset = datasets.Dataset.from_dict({"z": [1, 2], "x": rows, "label": [0, 1]})
    with pytest.raises(ValueError, match=r"^Expected column 'x' to hold a value in each row but"):
        HuggingFace(dataset, padding=0).load()


def test_inputs_are_the_columns_of_the_format():
    columns = {"x": [1.0, 2.0], "z": [3.0, 4.0], "owner": ["a", "b"], "label": [0, 1]}
    dataset = datasets.Dataset.from_dict(columns).with_format("torch", columns=["x", "label"])
    arrays = HuggingFace(dataset, "owner").load()
    assert (arrays.inputs.tolist(), arrays.targets.tolist()) == ([1, 2], [0, 1])
    assert arrays.names == ["a", "b"]
    every = dataset.with_format("torch", columns=["x", "label"], output_all_columns=True)
    for source in (HuggingFace(every, "owner"), HuggingFace(dataset, "owner", ["x", "z"])):
        assert [*source.load().inputs] == ["x", "z"]


@pytest.mark.parametrize("kind", ["int64", "int32", "uint8"])
@pytest.mark.parametrize("column", ["x", "label"])
def test_missing_integers_are_refused(kind, column):
    values = {"x": [4, 5, 6], "label": [0, 1, 1]}
    values[column][1] = None
    features = {name: datasets.Value(kind) for name in values}
    dataset = datasets.Dataset.from_dict(values, datasets.Features(features))
    with pytest.raises(ValueError, match=f"column '{column}' to hold a value in each row but got"):
        HuggingFace(dataset).load()
    arrays = HuggingFace(dataset.select([0, 2])).load()
    assert (arrays.inputs.tolist(), arrays.targets.tolist()) == ([4, 6], [0, 1])
