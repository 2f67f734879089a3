"""MNIST, Fashion-MNIST and CIFAR-10: made files of the real formats, and the real files."""

import hashlib
import pickle
import struct
import unicodedata

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets

from pl_fed.data import CIFAR10, MNIST, FashionMNIST, FederatedData, ImageFolder
from pl_fed.partitioners import Shards


def write_idx(path, array):
    """Write uint8 numbers as Yann LeCun's idx format has them: magic number, sizes, bytes."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())


@pytest.fixture
def idx_root(tmp_path):
    """A folder with 6 training and 4 test images of each of the two idx sets."""
    numbers = np.random.default_rng(0)
    arrays_by_name = {}
    for name in ("MNIST", "FashionMNIST"):
        raw = tmp_path / name / "raw"
        raw.mkdir(parents=True)
        for part, samples in (("train", 6), ("t10k", 4)):
            images = numbers.integers(256, size=(samples, 28, 28), dtype=np.uint8)
            labels = numbers.integers(10, size=samples, dtype=np.uint8)
            write_idx(raw / f"{part}-images-idx3-ubyte", images)
            write_idx(raw / f"{part}-labels-idx1-ubyte", labels)
            arrays_by_name[name, part] = images, labels
    return tmp_path, arrays_by_name


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST])
def test_idx_files(idx_root, kind):
    root, arrays_by_name = idx_root
    arrays = kind(root=str(root)).load()
    assert arrays.inputs.shape == (10, 1, 28, 28)
    assert arrays.inputs.dtype == torch.uint8
    (images, labels), (test_images, test_labels) = (
        arrays_by_name[kind.__name__, part] for part in ("train", "t10k")
    )
    assert np.array_equal(arrays.inputs[:6, 0].numpy(), images)
    assert np.array_equal(arrays.inputs[6:, 0].numpy(), test_images)
    assert arrays.targets.tolist() == [*labels.tolist(), *test_labels.tolist()]
    assert arrays.split.tolist() == [0] * 6 + [2] * 4
    assert arrays.num_classes == 10


def test_default_folder_is_an_environment_variable(idx_root, monkeypatch):
    monkeypatch.setenv("PL_FED_DATA", str(idx_root[0]))
    assert len(MNIST().load()) == 10
    assert MNIST(root="elsewhere").root == "elsewhere"
    monkeypatch.delenv("PL_FED_DATA")
    assert MNIST().root == "data"


@pytest.fixture
def cifar_root(tmp_path, monkeypatch):
    """A cifar-10-batches-py of 2 images a file, whose md5 sums torchvision is told."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    numbers = np.random.default_rng(0)
    images = numbers.integers(256, size=(6, 2, 3, 32, 32), dtype=np.uint8)
    labels = numbers.integers(10, size=(6, 2))

    def write(name, content):
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    sums = [
        write(name, {"data": images[i].reshape(2, -1), "labels": labels[i].tolist()})
        for i, name in enumerate(names)
    ]
    meta = write("batches.meta", {"label_names": [str(i) for i in range(10)]})
    monkeypatch.setattr(datasets.CIFAR10, "train_list", sums[:5])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", sums[5:])
    monkeypatch.setattr(
        datasets.CIFAR10, "meta", {**datasets.CIFAR10.meta, "filename": meta[0], "md5": meta[1]}
    )
    return tmp_path, images, labels


def test_cifar10_files(cifar_root):
    root, images, labels = cifar_root
    arrays = CIFAR10(root=str(root)).load()
    assert arrays.inputs.is_contiguous()
    assert np.array_equal(arrays.inputs.numpy(), images.reshape(12, 3, 32, 32))
    assert arrays.targets.tolist() == labels.flatten().tolist()
    assert arrays.split.tolist() == [0] * 10 + [2] * 2
    assert arrays.num_classes == 10


def test_broken_cifar10_file_is_refused(cifar_root):
    root = cifar_root[0]
    (root / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"not what it was")
    with pytest.raises(FileNotFoundError, match=r"with CIFAR10 but got .*corrupted"):
        CIFAR10(root=str(root)).load()


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        (MNIST, "the four idx files under MNIST/raw"),
        (FashionMNIST, "the four idx files under FashionMNIST/raw"),
        (CIFAR10, "the folder cifar-10-batches-py"),
    ],
)
def test_error_of_missing_data_names_the_download(tmp_path, kind, files):
    with pytest.raises(FileNotFoundError) as failed:
        kind(root=str(tmp_path)).load()
    sentence = str(failed.value)
    assert sentence.startswith(
        f"Expected argument `root` to be a folder with {kind.__name__} but got {tmp_path} ("
    )
    for way in ("`data.dataset.download: true`", f"put {files} there", "set PL_FED_DATA"):
        assert way in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("part", ["train", "t10k"])
@pytest.mark.parametrize("size", [0, 10, 500, None])
def test_invalid_idx_file_is_refused(idx_root, size, part):
    root = idx_root[0]
    path = root / "MNIST" / "raw" / f"{part}-images-idx3-ubyte"
    path.write_bytes(b"Not Found" if size is None else path.read_bytes()[:size])
    with pytest.raises(FileNotFoundError, match="to be a folder with MNIST but got"):
        MNIST(root=str(root)).load()


def test_failed_download_is_not_suggested_again(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(datasets.CIFAR10, "download", unreachable)
    with pytest.raises(FileNotFoundError, match="no route to host") as failed:
        CIFAR10(root=str(tmp_path), download=True).load()
    assert "download: true" not in str(failed.value)


# The real files

KNOWN = {  # mean and standard deviation of the training pixels / 255, as everyone uses them
    MNIST: (0.1307, 0.3081),
    FashionMNIST: (0.2860, 0.3530),
}
MNIST_LABELS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST_LABELS = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.fixture
def real(real_data):
    def load(kind):
        if real_data is None:
            pytest.skip("PL_FED_DATA does not name a folder with the real data")
        return kind(root=real_data)

    return load


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MNIST, FashionMNIST])
def test_real_images(real, kind):
    arrays = real(kind).load()
    assert arrays.inputs.shape == (70000, 1, 28, 28)
    assert arrays.split.bincount().tolist() == [60000, 0, 10000]
    pixels = arrays.inputs[:60000].double() / 255
    mean, std = KNOWN[kind]
    assert float(pixels.mean()) == pytest.approx(mean, abs=5e-5)
    assert float(pixels.std()) == pytest.approx(std, abs=5e-5)
    counts = [arrays.targets[arrays.split == part].bincount().tolist() for part in (0, 2)]
    if kind is MNIST:
        assert counts == [MNIST_LABELS, MNIST_TEST_LABELS]
        assert arrays.targets[:6].tolist() == [5, 0, 4, 1, 9, 2]
    else:
        assert counts == [[6000] * 10, [1000] * 10]
        assert arrays.targets[:6].tolist() == [9, 0, 0, 3, 0, 2]


@pytest.mark.slow
def test_real_fashion_mnist_is_partitioned(real):
    module = FederatedData(
        real(FashionMNIST), Shards(2), 100, split="official", normalize="channel", seed=0
    )
    clients = module.clients
    assert int(clients.train.sizes.sum() + clients.val.sizes.sum()) == 60000
    assert int(clients.test.sizes.sum()) == 10000
    train = clients.inputs[clients.train.index].double()
    assert float(train.mean()) == pytest.approx(0, abs=1e-5)
    assert float(train.std()) == pytest.approx(1, abs=1e-5)
    for k in range(0, 100, 7):
        classes = [
            clients.targets[part.samples(k)].unique().tolist()
            for part in (clients.train, clients.test)
        ]
        assert len(classes[0]) == 2
        assert classes[0] == classes[1]


def write_images(folder, *names):
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2), color=number).save(path)


@pytest.mark.parametrize("val", ["val", "valid", "validation", "Val"])
def test_folders_of_parts_are_official_parts(tmp_path, val):
    names = ("train/cat/a.png", "train/dog/b.png", "train/eel/c.png", "test/dog/d.png")
    write_images(tmp_path / "pets", *names, "test/eel/e.png", f"{val}/cat/f.png")
    arrays = ImageFolder("pets", root=str(tmp_path)).load()
    rows = zip(arrays.inputs[:, 0, 0, 0].tolist(), arrays.targets.tolist(), arrays.split.tolist())
    assert sorted(rows) == [(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 1, 2), (4, 2, 2), (5, 0, 1)]
    assert arrays.num_classes == 3


@pytest.mark.parametrize("classes", [None, ["cat", "Löwe"]], ids=str)
def test_folders_of_one_class_in_two_forms_of_unicode_are_refused(tmp_path, classes):
    """Its test images, as unpacked on another system, were those of a class without training."""
    parts = ("train", "test") if classes is None else ("test",)
    for part in parts:
        name = unicodedata.normalize("NFC" if part == "train" else "NFD", "Löwe")
        write_images(tmp_path / "zoo", f"{part}/{name}/a.png", f"{part}/cat/b.png")
    words = r"got '(L\\xf6we|Lo\\u0308we)' and '(L\\xf6we|Lo\\u0308we)', two forms of one name"
    with pytest.raises(ValueError, match=f"^Expected .*{words}"):
        ImageFolder("zoo", root=str(tmp_path), classes=classes).load()


def test_classes_called_like_parts_stay_classes(tmp_path):
    write_images(tmp_path / "rails", "train/a.png", "test/b.png")
    arrays = ImageFolder("rails", root=str(tmp_path)).load()
    assert (arrays.targets.tolist(), arrays.split) == ([0, 1], None)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("train/cat/a.png", "other/cat/b.png"), "either parts .train. or classes but got the"),
        (("train/cat/a.png", "train/b.png"), "a folder for each class but got the image b.png"),
        (("clinic1/cat/a.png", "clinic2/cat/b.png"), "folder cat in clinic1 and clinic2: move"),
        (("images/cat/a.png", "images/dog/b.png"), "the folder cat in images: move"),
        (("cat/train/a.png", "dog/train/b.png"), "the folder train in cat and dog: move"),
    ],
)
def test_other_nested_folders_are_refused(tmp_path, names, words):
    write_images(tmp_path / "pets", *names)
    with pytest.raises(ValueError, match=f"^Expected .*{words}"):
        ImageFolder("pets", root=str(tmp_path)).load()
