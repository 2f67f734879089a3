"""Data sets with client ids: files in their real formats, and the real files."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from made_data import leaf, png, write_celeba, write_parquet, write_vehicle
from PIL import ExifTags, Image
from test_images import idx_root  # noqa: F401

from pl_fed.data import FEMNIST, CelebA, FederatedData, ImageFolder, MNISTWriters, Vehicle
from pl_fed.partitioners import ByOwner

REAL = os.environ.get("PL_FED_DATA")
real = pytest.mark.skipif(not REAL, reason="PL_FED_DATA does not say where the real data are")


def owners(data):
    """Return the original ids of every client's samples."""
    arrays, clients = data.dataset.load(), data.clients
    parts = [
        torch.cat([p.samples(k) for p in (clients.train, clients.val, clients.test)])
        for k in range(clients.num_clients)
    ]
    return [arrays.client[part].unique().tolist() for part in parts]


# Vehicle


def test_vehicle(tmp_path):
    write_vehicle(tmp_path)
    arrays = Vehicle(root=str(tmp_path)).load()
    assert arrays.inputs.shape == (12, 100)
    assert arrays.targets.tolist() == [0, 1] * 6
    assert arrays.num_classes == 2
    data = FederatedData(Vehicle(root=str(tmp_path)), val_fraction=0.0, test_fraction=0.25)
    assert data.clients.train.sizes.tolist() == [3, 3, 3]
    assert owners(data) == [[0], [5], [22]]
    assert data.clients.owners == [["0"], ["5"], ["22"]]


@real
def test_the_real_vehicle():
    arrays = Vehicle().load()
    assert arrays.inputs.shape == (1860, 100)
    assert arrays.client.unique().numel() == 23
    assert arrays.inputs.mean().abs() < 0.1
    assert 0.9 < arrays.inputs.std() < 1.1


# MNIST by writer


def write_writers(root):
    (root / "MNIST_writers").mkdir()
    np.savez(
        root / "MNIST_writers" / "mnist_writer_ids.npz",
        train_writer=np.array([4, 4, 9, 9, 9, 2], dtype=np.int16),
        test_writer=np.array([7, 7, 8, 8], dtype=np.int16),
    )


def test_mnist_by_writer(idx_root):  # noqa: F811
    root, _ = idx_root
    write_writers(root)
    arrays = MNISTWriters(root=str(root)).load()
    assert arrays.client.tolist() == [4, 4, 9, 9, 9, 2, 7, 7, 8, 8]
    data = FederatedData(
        MNISTWriters(root=str(root)), split="own", val_fraction=0.0, test_fraction=0.0
    )
    assert owners(data) == [[2], [4], [7], [8], [9]]


def test_clients_of_several_writers(idx_root):  # noqa: F811
    root, _ = idx_root
    write_writers(root)
    settings = {"val_fraction": 0.0, "test_fraction": 0.0, "num_clients": 2}
    data = FederatedData(MNISTWriters(root=str(root)), ByOwner(), **settings)
    actual = owners(data)
    assert sorted(len(writers) for writers in actual) == [2, 3]
    assert sorted(writer for writers in actual for writer in writers) == [2, 4, 7, 8, 9]
    assert data.clients.owners == [[str(writer) for writer in writers] for writers in actual]


def test_fewer_clients_than_writers_need_a_partitioner(idx_root):  # noqa: F811
    root, _ = idx_root
    write_writers(root)
    data = FederatedData(MNISTWriters(root=str(root)), num_clients=2)
    with pytest.raises(ValueError, match=r"`num_clients` to be 5, .* but got 2: .* ByOwner"):
        _ = data.clients


def test_a_writer_of_test_images_only_has_no_training_data(idx_root):  # noqa: F811
    root, _ = idx_root
    write_writers(root)
    data = FederatedData(MNISTWriters(root=str(root)), split="official")
    with pytest.raises(
        ValueError, match=r"\(id 7 .*: set `data.split: own`, or use the partitioner By"
    ):
        _ = data.clients


@pytest.mark.slow
@real
def test_the_real_writers():
    arrays = MNISTWriters().load()
    train, test = arrays.client[:60000].unique(), arrays.client[60000:].unique()
    assert (len(train), len(test)) == (539, 297)
    assert not torch.isin(train, test).any()
    data = FederatedData(MNISTWriters(), ByOwner(), num_clients=10)
    assert sorted(len(writers) for writers in owners(data)) == [
        83,
        83,
        83,
        83,
        84,
        84,
        84,
        84,
        84,
        84,
    ]


# FEMNIST


@pytest.mark.parametrize("below", ["", "data"])
def test_femnist_in_the_format_of_leaf(tmp_path, below):
    numbers = np.random.default_rng(0)
    made = {name: numbers.random((3, 784)) for name in ("f1", "f2", "f1 test", "f2 test")}
    files = {
        "train/all_data_0_train_9.json": {
            "f1": (made["f1"], [0, 61, 10]),
            "f3": (np.empty((0, 784)), []),
        },
        "train/all_data_1_train_9.json": {"f2": (made["f2"], [1, 2, 3])},
        "test/all_data_0_test_9.json": {
            "f2": (made["f2 test"][:1], [4]),
            "f1": (made["f1 test"][:2], [5, 6]),
        },
    }
    for name, users in files.items():
        path = tmp_path / "femnist" / below / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(leaf(users))
    arrays = FEMNIST(root=str(tmp_path)).load()
    assert arrays.inputs.shape == (9, 1, 28, 28)
    assert arrays.targets.tolist() == [0, 61, 10, 1, 2, 3, 4, 5, 6]
    assert arrays.client.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0]
    assert arrays.split.tolist() == [0] * 6 + [2] * 3
    assert arrays.num_classes == 62
    assert np.allclose(arrays.inputs[1].flatten(), made["f1"][1])
    data = FederatedData(FEMNIST(root=str(tmp_path)), split="official", val_fraction=0.0)
    assert data.clients.train.sizes.tolist() == [3, 3]
    assert data.clients.test.sizes.tolist() == [2, 1]
    assert data.clients.owners == [["f1"], ["f2"]]


def test_copies_of_femnist_are_read_once(tmp_path):
    """The folder contains both a clone of LEAF and copies of its train and test files."""
    user = leaf({"f1": (np.zeros((2, 784)), [0, 1])})
    for name in ("train/a.json", "test/b.json", "data/all_data/a.json", "train/._a.json"):
        path = tmp_path / "femnist" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("hidden" if "._" in name else user)
    assert len(FEMNIST(root=str(tmp_path)).load()) == 4
    for name in ("data/train/a.json", "data/test/b.json"):
        path = tmp_path / "femnist" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(user)
    with pytest.raises(
        ValueError, match=r"to hold FEMNIST once but got \S+/femnist/train/\*.json "
    ):
        FEMNIST(root=str(tmp_path)).load()
    (tmp_path / "femnist" / "data" / "train" / "a.json").unlink()
    (tmp_path / "femnist" / "a.parquet").touch()
    with pytest.raises(ValueError, match=r"got \S+/femnist/\*.parquet and \S+/train/\*.json: "):
        FEMNIST(root=str(tmp_path)).load()


def test_femnist_in_parquet_files(tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(3, 28, 28), dtype=np.uint8)
    cells = {"writer_id": ["f0000_14", "f0001_41", "f0000_14"], "character": [0, 61, 35]}
    write_parquet(tmp_path, "train-00000-of-00002", image=[png(image) for image in pixels], **cells)
    write_parquet(tmp_path, "train-00001-of-00002", image=[], writer_id=[], character=[])
    arrays = FEMNIST(root=str(tmp_path)).load()
    assert np.array_equal(arrays.inputs[:, 0], pixels)
    assert arrays.targets.tolist() == [0, 61, 35]
    assert arrays.client.tolist() == [0, 1, 0]
    assert arrays.split is None


def test_parquet_files_need_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist" / "a.parquet").touch()
    with pytest.raises(ModuleNotFoundError, match="pip install pyarrow`, or use LEAF's json files"):
        FEMNIST(root=str(tmp_path)).load()


# CelebA


@pytest.fixture
def celeba_root(tmp_path, monkeypatch):
    """A folder of 12 images of 3 celebrities."""
    write_celeba(tmp_path, [5, 5, 5, 5, 5, 9, 9, 9, 9, 9, 9, 2], monkeypatch)
    return tmp_path


def test_celeba(celeba_root):
    arrays = CelebA(root=str(celeba_root), size=20).load()
    assert arrays.inputs.shape == (11, 3, 20, 20), "of celebrities with at least 5 images"
    assert arrays.inputs.dtype == torch.uint8
    assert arrays.targets.tolist() == [1, 0] * 5 + [1]
    assert arrays.client.tolist() == [5] * 5 + [9] * 6
    assert arrays.split.tolist() == [0] * 5 + [1] * 5 + [2]
    assert CelebA(root=str(celeba_root)).load().inputs.shape[2:] == (84, 84)


def test_subset_of_celebrities_and_another_attribute(celeba_root):
    arrays = CelebA(root=str(celeba_root), attribute="Young", min_samples=1, max_clients=2).load()
    assert arrays.client.unique().tolist() == [2, 5]
    assert arrays.targets.tolist() == [1] * 6
    with pytest.raises(ValueError, match="one of Young, Smiling but got 'Grim'"):
        CelebA(root=str(celeba_root), attribute="Grim").load()


# Images in folders


def write_images(root, sizes=((4, 6), (4, 6), (4, 6))):
    for number, size in enumerate(sizes):
        folder = root / "scans" / ("Hand" if number < 2 else "BreastMRI")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (255, 0, 0)).save(folder / f"{number}.jpeg", quality=100)
    (root / "scans" / "BreastMRI" / "notes.txt").write_text("no image")


def test_images_in_folders(tmp_path):
    write_images(tmp_path)
    arrays = ImageFolder("scans", root=str(tmp_path)).load()
    assert arrays.inputs.shape == (3, 1, 6, 4)
    assert arrays.targets.tolist() == [0, 1, 1], "BreastMRI comes before Hand"
    assert arrays.num_classes == 2
    colour = ImageFolder("scans", root=str(tmp_path), grey=False, size=2).load()
    assert colour.inputs.shape == (3, 3, 2, 2)
    assert (colour.inputs[:, 0] > 250).all()
    assert (colour.inputs[:, 1:] < 5).all()


def test_images_of_several_sizes_need_a_size(tmp_path):
    write_images(tmp_path, sizes=((4, 6), (5, 6), (4, 6)))
    with pytest.raises(ValueError, match="`size` to be set for images of several sizes"):
        ImageFolder("scans", root=str(tmp_path)).load()
    assert ImageFolder("scans", root=str(tmp_path), size=8).load().inputs.shape == (3, 1, 8, 8)


def test_hidden_files_are_ignored(tmp_path):
    """Hidden files come from notebooks and from archives packed on a Mac."""
    write_images(tmp_path)
    scans = tmp_path / "scans"
    for name in (".ipynb_checkpoints", "Hand/.ipynb_checkpoints"):
        (scans / name).mkdir()
        (scans / name / "0.jpeg").write_bytes((scans / "Hand" / "0.jpeg").read_bytes())
    (scans / "Hand" / "._0.jpeg").write_bytes(b"Mac OS X")
    arrays = ImageFolder("scans", root=str(tmp_path)).load()
    assert arrays.targets.tolist() == [0, 1, 1]
    assert arrays.num_classes == 2


def test_images_of_other_formats_and_in_linked_folders(tmp_path):
    write_images(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for kind in ("pgm", "ppm", "pbm", "pnm"):
        Image.new("L", (4, 6)).save(tmp_path / "elsewhere" / f"0.{kind}", format="PPM")
    (tmp_path / "scans" / "Hand" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "scans" / "Hand" / "back").symlink_to(tmp_path / "scans" / "Hand")
    arrays = ImageFolder("scans", root=str(tmp_path)).load()
    assert arrays.targets.tolist() == [0] + [1] * 6


def test_a_folder_without_images_is_no_class(tmp_path):
    write_images(tmp_path)
    (tmp_path / "scans" / "CXR").mkdir()
    with pytest.raises(ValueError, match=r"of a class but got none in CXR: put them there, or"):
        ImageFolder("scans", root=str(tmp_path)).load()


def test_preparation_describes_the_image_processing():
    assert CelebA(size=64).preparation == "RGB, resized to 64 by 64 (bilinear)"
    assert ImageFolder("scans").preparation == "turned by EXIF, 8-bit grey"
    small = ImageFolder("scans", grey=False, size=32)
    assert small.preparation == "turned by EXIF, 8-bit RGB, resized to 32 by 32 (bilinear)"


@pytest.mark.parametrize(("kind", "type"), [("png", "u2"), ("tif", "u2"), ("tif", ">u2")])
def test_images_of_16_bits_are_scaled_to_8(tmp_path, kind, type):
    pixels = np.array([[0, 128, 129], [257 * 100, 257 * 100 + 129, 65535]], dtype=type)
    (tmp_path / "scans" / "Hand").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "scans" / "Hand" / f"0.{kind}")
    grey = ImageFolder("scans", root=str(tmp_path)).load()
    assert grey.inputs[0, 0].tolist() == [[0, 0, 1], [100, 101, 255]]
    colour = ImageFolder("scans", root=str(tmp_path), grey=False).load()
    assert torch.equal(colour.inputs, grey.inputs.expand(1, 3, 2, 3))


@pytest.mark.parametrize("type", ["int32", "float32"])
def test_images_of_32_bits_are_refused(tmp_path, type):
    path = tmp_path / "scans" / "Hand" / "0.tif"
    path.parent.mkdir(parents=True)
    Image.fromarray(np.full((2, 2), 1000, dtype=type)).save(path)
    with pytest.raises(ValueError, match=rf"Expected {path} to be an image of 8 or 16 bits a "):
        ImageFolder("scans", root=str(tmp_path)).load()


def test_images_are_rotated_by_their_exif_orientation(tmp_path):
    (tmp_path / "scans" / "Hand").mkdir(parents=True)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # to be turned clockwise by 90 degrees
    pixels = np.array([[0, 50, 100], [150, 200, 250]], dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "scans" / "Hand" / "0.png", exif=exif)
    arrays = ImageFolder("scans", root=str(tmp_path)).load()
    assert arrays.inputs[0, 0].tolist() == [[150, 0], [200, 50], [250, 100]]


# What is not there


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (Vehicle, "Vehicle/vehicle_ditto_train.npz"),
        (MNISTWriters, "MNIST_writers/mnist_writer_ids.npz"),
        (FEMNIST, "femnist/train/"),
        (CelebA, "CelebA"),
        (lambda root: ImageFolder("scans", root=root), "scans/<class>/<image>"),
    ],
)
def test_error_of_missing_data_names_the_download(tmp_path, kind, wanted):
    source = kind(root=str(tmp_path))
    with pytest.raises(FileNotFoundError) as raised:
        source.load()
    text = str(raised.value)
    assert text.startswith(f"Expected argument `root` to be a folder with {wanted}")
    assert str(tmp_path) in text
    assert "set PL_FED_DATA" in text


@pytest.mark.parametrize("kind", [Vehicle, FEMNIST, CelebA])
def test_default_folder_is_an_environment_variable(monkeypatch, kind):
    monkeypatch.setenv("PL_FED_DATA", "elsewhere")
    assert kind().root == Path("elsewhere")
    monkeypatch.delenv("PL_FED_DATA")
    assert kind().root == Path("data")
