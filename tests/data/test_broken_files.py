"""Files of the shipped data sets that are broken: one sentence, which names the file."""

import hashlib
import json

import numpy as np
import pytest
from made_data import (
    leaf,
    png,
    write_celeba,
    write_femnist,
    write_parquet,
    write_scans,
    write_vehicle,
)
from test_clients_own_data import write_writers
from test_images import idx_root  # noqa: F401
from torchvision import datasets

from pl_fed.data import FEMNIST, CelebA, ImageFolder, MNISTWriters, Vehicle


def assert_refused(source, path, words):
    with pytest.raises(ValueError, match=words) as failed:
        source.load()
    sentence = str(failed.value)
    assert sentence.startswith("Expected ")
    assert sentence.endswith(".")
    assert str(path) in sentence
    assert "\n" not in sentence


WRITER = {"f1": (np.zeros((1, 784)), [3])}
WITHOUT_USERS = json.dumps({"user_data": {"f1": {"x": [], "y": []}}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (leaf(WRITER)[:200], "to be a json file of LEAF's FEMNIST but got JSONDecodeError"),
        (WITHOUT_USERS, "FEMNIST but got KeyError: 'users'"),
        (leaf({"f1": (np.zeros((2, 100)), [3, 4])}), r"'\[2, 1, 28, 28\]' is invalid .* size 200"),
        (
            leaf({"f1": (np.zeros((1, 784)), [3.7])}),
            "FEMNIST but got .*: its classes are no",
        ),
        (leaf({"f1": (np.zeros((2, 784)), [3])}), r"'\[1, 1, 28, 28\]' is invalid .* size 1568"),
    ],
)
def test_broken_file_of_leaf_is_refused(tmp_path, content, words):
    write_femnist(tmp_path)
    path = tmp_path / "femnist" / "test" / "all_data_0_test.json"
    path.write_text(content)
    assert_refused(FEMNIST(root=str(tmp_path)), path, words)


@pytest.mark.slow
@pytest.mark.parametrize("again", ["the same file", "another file"])
def test_duplicate_writer_of_leaf_is_refused(tmp_path, again):
    """A second copy would count as further samples, for example in the test part."""
    write_femnist(tmp_path)
    folder = tmp_path / "femnist" / "test"
    twice = json.loads(leaf(WRITER))
    if again == "the same file":
        twice["users"] *= 2
    else:
        (folder / "a.json").write_text(leaf(WRITER))
    (folder / "b.json").write_text(json.dumps(twice))
    (folder / "all_data_0_test.json").unlink()
    assert_refused(
        FEMNIST(root=str(tmp_path)), folder / "b.json", "that no other file of this part lists"
    )


def test_unknown_classes_of_femnist_are_refused(tmp_path):
    write_femnist(tmp_path)
    path = tmp_path / "femnist" / "test" / "all_data_0_test.json"
    path.write_text(leaf({"f1": (np.zeros((1, 784)), [62])}))
    assert_refused(
        FEMNIST(root=str(tmp_path)), tmp_path / "femnist", r"class ids .* \(62\) but got 62 in"
    )


BLANK = png(np.zeros((28, 28), np.uint8))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (None, "to be a parquet file of FEMNIST but got ArrowInvalid: "),
        ({"writer_id": ["f1"], "character": [3]}, "FEMNIST but got .*image"),
        (
            {"image": [BLANK], "writer_id": [None], "character": [3]},
            ": a row has no `writer_id`",
        ),
        ({"image": [BLANK], "writer_id": ["f1"], "character": [3.7]}, ": its classes are no in"),
        ({"image": [BLANK], "writer_id": ["f1"], "character": [None]}, "FEMNIST but got "),
        (
            {"image": [{"bytes": b"PNG"}], "writer_id": ["f"], "character": [3]},
            "cannot identify",
        ),
    ],
)
def test_broken_parquet_file_is_refused(tmp_path, columns, words):
    path = write_parquet(tmp_path, "a", **(columns or {"image": [BLANK]}))
    if columns is None:
        path.write_bytes(path.read_bytes()[:100])
    assert_refused(FEMNIST(root=str(tmp_path)), path, words)


@pytest.mark.parametrize("size", [0, 300])
def test_truncated_image_is_refused(tmp_path, size):
    write_scans(tmp_path, images_per_kind=2)
    path = tmp_path / "MedicalMNIST" / "Hand" / "000001.jpeg"
    path.write_bytes(path.read_bytes()[:size])
    source = ImageFolder("MedicalMNIST", root=str(tmp_path))
    assert_refused(source, path, "to be an image but got")


def test_missing_image_of_celeba_is_refused(tmp_path, monkeypatch):
    write_celeba(tmp_path, [5] * 12, monkeypatch)
    path = tmp_path / "celeba" / "img_align_celeba" / "000007.jpg"
    path.unlink()
    assert_refused(CelebA(root=str(tmp_path)), path, "to be an image but got FileNotFoundError")


@pytest.fixture
def celeba(tmp_path, monkeypatch):
    """A folder of CelebA's files with matching md5 sums in torchvision."""
    write_celeba(tmp_path, [5] * 12, monkeypatch)
    files = sorted((tmp_path / "celeba").glob("*.txt"))
    sums = [("id", hashlib.md5(path.read_bytes()).hexdigest(), path.name) for path in files]
    monkeypatch.setattr(datasets.CelebA, "file_list", [("id", "", "img_align_celeba.zip"), *sums])
    return tmp_path


def test_error_names_the_broken_files_of_celeba(celeba):
    assert len(CelebA(root=str(celeba), size=4).load()) == 12
    (celeba / "celeba" / "identity_CelebA.txt").write_text("000001.jpg garbage")
    (celeba / "celeba" / "list_bbox_celeba.txt").unlink()
    with pytest.raises(FileNotFoundError) as failed:
        CelebA(root=str(celeba)).load()
    assert str(failed.value).startswith(
        f"Expected argument `root` to be a folder with CelebA but got {celeba} (Dataset not found"
        " or corrupted: identity_CelebA.txt differs from the original, list_bbox_celeba.txt is"
        " missing): set `data.dataset.download: true` to fetch it, or put torchvision's files under"
        " celeba there"
    )


def test_missing_image_folder_of_celeba_is_refused(celeba):
    (celeba / "celeba" / "img_align_celeba").rename(celeba / "elsewhere")
    with pytest.raises(FileNotFoundError, match="the folder img_align_celeba is missing"):
        CelebA(root=str(celeba)).load()


def test_failed_download_of_celeba_is_reported(celeba, monkeypatch):
    def unreachable(*_, **__):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(datasets.CelebA, "download", unreachable)
    with pytest.raises(FileNotFoundError, match=r"\(no route to host\)") as failed:
        CelebA(root=str(celeba), download=True).load()
    assert "download: true" not in str(failed.value)


def test_min_samples_beyond_every_celebrity_is_refused(tmp_path, monkeypatch):
    write_celeba(tmp_path, [5] * 8 + [9] * 4, monkeypatch)
    with pytest.raises(ValueError, match=r"`min_samples` to be at most 8, .* but got 9"):
        CelebA(root=str(tmp_path), min_samples=9).load()
    assert len(CelebA(root=str(tmp_path), min_samples=8, size=4).load()) == 8


def test_broken_file_of_vehicle_is_refused(tmp_path):
    write_vehicle(tmp_path)
    path = tmp_path / Vehicle.file
    content = path.read_bytes()
    arrays = dict(np.load(path))
    source = Vehicle(root=str(tmp_path))
    path.write_bytes(content[: len(content) // 2])
    assert_refused(source, path, "to be an .npz file of arrays of numbers but got a broken one")
    np.savez(path, x=arrays["x"], y=arrays["y"])
    assert_refused(source, path, "to hold an array `device` but got x, y")
    np.savez(path, **{**arrays, "device": arrays["device"][1:]})
    assert_refused(source, path, r"`client` to have 12 rows, .* got shape \[11\] in ")
    np.savez(path, **{**arrays, "y": np.where(arrays["y"] > 0, 2, 1)})
    assert_refused(source, path, "Expected `y` to be -1 and 1 but got 2")


def test_broken_file_of_writers_is_refused(idx_root):  # noqa: F811
    root = idx_root[0]
    write_writers(root)
    path = root / MNISTWriters.file
    np.savez(path)
    assert_refused(
        MNISTWriters(root=str(root)), path, "to hold an array `train_writer` but got none"
    )
    np.savez(path, train_writer=np.zeros(6, int), test_writer=np.zeros(3, int))
    assert_refused(
        MNISTWriters(root=str(root)), path, r"`client` to have 10 rows, .* got shape \[9\] in "
    )
