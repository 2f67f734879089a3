"""Data of one's own: what an ``.npz`` may hold, and what is said of one that will not do."""

import importlib.util
import math
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pl_fed.data import FederatedData, NpyFolder, Npz
from pl_fed.partitioners import IID, Shards

SCRIPT = Path(__file__).parents[2] / "experiments" / "make_cifar10_npz.py"


@pytest.fixture
def write_npz(tmp_path):
    """Write an ``.npz`` of four samples, with replaced arrays; ``None`` omits an array."""

    def write(**arrays):
        path = tmp_path / "mine.npz"
        all_arrays = {"x": np.zeros((4, 3)), "y": np.array([0, 1, 1, 0]), **arrays}
        np.savez(path, **{name: array for name, array in all_arrays.items() if array is not None})
        return str(path)

    return write


def test_two_forms_of_an_owner_in_unicode_are_reported(write_npz):
    owners = [unicodedata.normalize(form, "Genève") for form in ("NFC", "NFD")] * 2
    words = r"takes 'Gene\\u0300ve' and 'Gen\\xe8ve' for two clients, because their letters"
    data = FederatedData(Npz(write_npz(client=np.array(owners))), test_fraction=0.0)
    with pytest.warns(UserWarning, match=words):
        assert data.clients.num_clients == 2


def test_all_arrays_are_read(write_npz):
    x = np.arange(12, dtype=np.float64).reshape(4, 3)
    path = write_npz(x=x, client=np.array([7, 7, -1, 9]), split=np.array([0, 1, 2, 0]))
    arrays = Npz(path).load()
    assert arrays.inputs.tolist() == x.tolist()
    assert arrays.targets.tolist() == [0, 1, 1, 0]
    assert arrays.client.tolist() == [7, 7, -1, 9]
    assert arrays.split.tolist() == [0, 1, 2, 0]
    assert arrays.num_classes == 2


def test_labels_serve_partitioners_of_other_targets(write_npz):
    masks, labels = np.zeros((4, 2, 2), "int64"), np.array([2, 0, 2, 0])
    path = write_npz(y=masks, labels=labels)
    arrays = Npz(path, num_classes=0).load()
    assert arrays.partition_labels.tolist() == labels.tolist()
    assert arrays.targets.shape == (4, 2, 2)
    folder = Path(path).parent
    for name, array in {"x": np.zeros((4, 3)), "y": masks, "labels": labels}.items():
        np.save(folder / f"{name}.npy", array)
    folder_arrays = NpyFolder(str(folder), num_classes=0).load()
    assert folder_arrays.partition_labels.tolist() == labels.tolist()
    clients = FederatedData(
        Npz(path, num_classes=0), Shards(1), 2, val_fraction=0.0, test_fraction=0.0, seed=0
    ).clients
    assert {tuple(labels[clients.train.samples(k)]) for k in range(2)} == {(0, 0), (2, 2)}


def test_clients_may_have_names(write_npz):
    arrays = Npz(write_npz(client=np.array(["zoe", "ann", "zoe", "bob"]))).load()
    assert [arrays.owner_name(int(id)) for id in arrays.client] == ["zoe", "ann", "zoe", "bob"]
    assert arrays.client.tolist() == [2, 0, 2, 1]


def test_client_name_that_is_no_utf8_is_refused(write_npz):
    path = write_npz(client=np.array(["ann", "a\udc80", "ann", "bob"]))
    words = r"names of clients to be text in UTF-8 but got 'a\\udc80' at position 1: rename .* in "
    with pytest.raises(ValueError, match=words):
        Npz(path).load()


def test_control_characters_of_client_names_are_escaped_in_errors(write_npz):
    path = write_npz(client=np.array(["a", "a", "\x1b[31mb", "a"]), split=np.array([0, 0, 2, 2]))
    with pytest.raises(ValueError, match=r"\(id \\x1b\[31mb in the data\)") as caught:
        _ = FederatedData(Npz(path)).clients
    assert str(caught.value).isprintable()


def test_control_characters_of_array_names_are_escaped_in_errors(write_npz):
    with pytest.raises(ValueError, match="array `y`") as caught:
        Npz(write_npz(y=None, **{"\x1b[31m": np.zeros(4)})).load()
    assert str(caught.value).isprintable()


def test_long_doubles_become_doubles(write_npz):
    x = np.arange(12).reshape(4, 3)
    arrays = Npz(write_npz(x=x.astype(np.longdouble), y=np.zeros(4, np.longdouble))).load()
    assert arrays.inputs.tolist() == x.tolist()
    assert arrays.targets.dtype == torch.float64
    if np.finfo(np.longdouble).max > np.finfo(np.float64).max:
        with pytest.raises(ValueError, match="finite numbers but got NaN or infinity in 4"):
            Npz(write_npz(x=np.full((4, 3), np.longdouble(10) ** 400))).load()


def test_other_arrays_do_not_matter(write_npz):
    path = write_npz(names=np.array(["a", "b"]), objects=np.array([{}], dtype=object))
    assert len(Npz(path).load()) == 4


def test_array_with_almost_the_name_of_another_is_named(write_npz):
    path = write_npz(x=np.zeros((2, 1), "float32"), y=[0, 1], splits=[0, 2])
    with pytest.warns(UserWarning, match="does not read the array `splits` of .*: name it `split`"):
        assert Npz(path).load().split is None


def test_arrays_client_and_split_define_the_federation(write_npz):
    path = write_npz(client=np.array([7, 7, -1, -1]), split=np.array([0, 2, 0, 2]))
    clients = FederatedData(Npz(path), split="official", seed=0).clients
    assert [clients.train.samples(k).tolist() for k in (0, 1)] == [[2], [0]]
    assert [clients.test.samples(k).tolist() for k in (0, 1)] == [[3], [1]]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", ">i4", "int64", "uint64", "bool"])
def test_class_ids_may_have_any_integer_type(write_npz, dtype):
    path = write_npz(y=np.array([0, 1, 1, 0]).astype(dtype), client=np.array([1, 1, 2, 2], "int16"))
    clients = FederatedData(Npz(path), val_fraction=0, test_fraction=0, seed=0).clients
    assert clients.targets.tolist() == [0, 1, 1, 0]
    assert (clients.targets.dtype, clients.num_classes, clients.num_clients) == (torch.int64, 2, 2)


@pytest.mark.parametrize("dtype", ["float16", ">f4", "float64", "int16", "uint16", "bool"])
def test_inputs_keep_any_numeric_type(write_npz, dtype):
    x = np.array([[0], [1], [1], [0]]).astype(dtype)
    clients = FederatedData(Npz(write_npz(x=x)), IID(), 2, seed=0).clients
    kept = {"int16": torch.int16, "bool": torch.bool, "float64": torch.float64}
    assert clients.inputs.dtype == kept.get(dtype, torch.float32)
    assert clients.inputs.flatten().tolist() == [0, 1, 1, 0]


def test_uint8_inputs_are_scaled(write_npz):
    x = np.array([[0], [51], [255], [0]], dtype=np.uint8)
    clients = FederatedData(Npz(write_npz(x=x)), IID(), 2, seed=0).clients
    assert clients.inputs.flatten().tolist() == pytest.approx([0, 0.2, 1, 0])


def test_num_classes_may_exceed_the_classes_in_the_data(write_npz):
    assert Npz(write_npz(), num_classes=5).load().num_classes == 5


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 2)])
def test_real_targets(write_npz, shape):
    arrays = Npz(write_npz(y=np.ones(shape))).load()
    assert arrays.targets.shape == shape
    assert arrays.num_classes == 0


def test_compressed_files_are_read(tmp_path):
    path = tmp_path / "small.npz"
    np.savez_compressed(path, x=np.ones((4, 1)), y=np.zeros(4, int))
    assert len(Npz(str(path)).load()) == 4


def test_path_in_the_home_folder(write_npz, monkeypatch):
    folder = Path(write_npz()).parent
    monkeypatch.setenv("HOME", str(folder))
    assert len(Npz("~/mine.npz").load()) == 4


WITH_A_NAN = np.zeros((4, 3))
WITH_A_NAN[2, 1] = math.nan


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": None}, "to hold an array `y` but got x"),
        ({"x": None, "y": None}, "to hold an array `x` but got none"),
        ({"x": np.zeros((0, 3)), "y": np.zeros(0, int)}, r"at least one sample .* \[0, 3\]"),
        ({"x": np.array([[{}]] * 4, dtype=object)}, "arrays of numbers but got ValueError: Object"),
        ({"y": np.array(["a", "b", "a", "b"])}, "but got TypeError: `y` is of type <U1"),
        ({"x": np.zeros((4, 3), complex)}, "but got TypeError: `x` is of type complex128"),
        ({"y": np.array([0, 1, 1])}, r"`y` to have 4 rows, as many as `x`, but got shape \[3\]"),
        ({"client": np.zeros(5, int)}, r"`client` to have 4 rows, .* got shape \[5\]"),
        ({"y": np.array([0, -1, 1, 1])}, r"class ids from 0 to below `num_classes` .* got -1"),
        (
            {"y": np.zeros((4, 1), int)},
            r"of `y` to be of shape \[samples\] but got \[4, 1\]: .* floating point",
        ),
        ({"client": np.zeros(4)}, "`client` to be integers but got torch.float64"),
        ({"client": np.array(["a", "b"])}, r"`client` to have 4 rows, .* got shape \[2\]"),
        (
            {"client": np.full(4, 2**63 + 5, "uint64")},
            r"below 2\^63 but got 9223372036854775813 in",
        ),
        ({"split": np.zeros(4)}, "`split` to be integers but got torch.float64"),
        ({"split": np.array([0, 1, 2, 3])}, r"`split` to be 0 \(train\), .* but got 3"),
        ({"split": np.zeros(4, bool)}, r"or 2 \(test\) but got booleans: .* `2 \* is_test`"),
        ({"split": np.array([0, -1, 2, 2])}, r"`split` to be 0 \(train\), .* but got -1"),
        ({"x": WITH_A_NAN}, "`x` to hold finite numbers but got NaN .* first in sample 2"),
        ({"x": np.full((4, 1), np.inf)}, "`x` to hold finite .* in 4 samples, first in sample 0"),
        ({"x": np.full((4, 1), 1e39)}, "`x` to hold finite .* in 4 samples, first in sample 0"),
        ({"y": np.array([0, 1, np.nan, 2])}, "`y` to hold finite .* first in sample 2"),
    ],
)
def test_invalid_files_are_refused(write_npz, arrays, words):
    path = write_npz(**arrays)
    with pytest.raises(ValueError, match=words) as failed:
        Npz(path).load()
    assert str(failed.value).startswith("Expected ")
    assert path in str(failed.value), "it says which file"
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (np.array([0, 1, 2, 3]), r"below `num_classes` \(3\) but got 3"),
        (np.array([0.0, 1.0, 2.0, 3.0]), r"left out for .* real values .* but got 3"),
    ],
)
def test_targets_beyond_num_classes_are_refused(write_npz, y, words):
    with pytest.raises(ValueError, match=words):
        Npz(write_npz(y=y), num_classes=3).load()


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none at .*no.npz: write it with numpy.savez"):
        Npz(str(tmp_path / "no.npz")).load()
    with pytest.raises(FileNotFoundError, match="found none at"):
        Npz(str(tmp_path)).load()


def test_files_of_another_format_are_refused(tmp_path, write_npz):
    text = tmp_path / "text.npz"
    text.write_text("x,y\n1,2\n")
    single = tmp_path / "single.npy"
    np.save(single, np.zeros(3))
    half = tmp_path / "half.npz"
    half.write_bytes(Path(write_npz(x=np.ones((4, 1000)))).read_bytes()[:20000])
    for path in (text, single, half):
        with pytest.raises(ValueError, match=r"arrays of numbers but got a broken one") as failed:
            Npz(str(path)).load()
        assert "pickle" not in str(failed.value)


# The script that makes one of CIFAR-10


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("make_cifar10_npz", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cifar10_from_mosaics(tmp_path, script, monkeypatch, capsys):
    random = np.random.default_rng(0)
    tiles = random.integers(256, size=(6, 6, 32, 32, 3), dtype=np.uint8)  # 6 mosaics of 2 by 3
    labels = random.integers(10, size=(6, 6), dtype=np.uint8)
    for mosaic, name in zip(tiles, script.PARTS):
        rows = [np.concatenate(list(row), axis=1) for row in mosaic.reshape(2, 3, 32, 32, 3)]
        Image.fromarray(np.concatenate(rows)).save(tmp_path / f"{name}.webp", lossless=True)
    named = {f"{name}_labels": part for name, part in zip(script.PARTS, labels)}
    np.savez(tmp_path / "labels.npz", **named)
    out = tmp_path / "cifar10.npz"
    arguments = ["make_cifar10_npz.py", "--source", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    script.main()
    assert "36 images" in capsys.readouterr().out
    arrays = Npz(str(out), num_classes=10).load()
    assert arrays.inputs.dtype == torch.uint8
    assert np.array_equal(arrays.inputs.numpy(), tiles.reshape(36, 32, 32, 3).transpose(0, 3, 1, 2))
    assert arrays.targets.tolist() == labels.flatten().tolist()
    assert arrays.split.tolist() == [0] * 30 + [2] * 6


def test_cifar10_with_missing_labels_is_refused(tmp_path, script):
    for name in script.PARTS:
        Image.new("RGB", (64, 32)).save(tmp_path / f"{name}.webp", lossless=True)
    labels = {f"{name}_labels": np.zeros(2, np.uint8) for name in script.PARTS}
    np.savez(tmp_path / "labels.npz", **{**labels, "test_labels": np.zeros(3, np.uint8)})
    with pytest.raises(ValueError, match=r"images for test \(2\) but got 3"):
        script.read(tmp_path)
