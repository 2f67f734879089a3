"""Small artificial files in the formats of real data sets."""

import io
import json
import struct

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet
from torchvision import datasets


def write_idx(path, array):
    """Write uint8 numbers in the idx format: magic number, sizes, bytes."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())


def write_mnist(root, name, train=1400, test=600):
    """Write random images and balanced labels in the four idx files of MNIST or FashionMNIST."""
    numbers = np.random.default_rng(0)
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", train), ("t10k", test)):
        images = numbers.integers(256, size=(count, 28, 28), dtype=np.uint8)
        write_idx(raw / f"{part}-images-idx3-ubyte", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte", (np.arange(count) % 10).astype(np.uint8))


def write_mnist_writers(root, train=1400, test=600, samples_per_writer=20):
    """Write MNIST and the ids of its writers, each with some images of one official part."""
    write_mnist(root, "MNIST", train, test)
    (root / "MNIST_writers").mkdir()
    writers = np.arange(train + test) // samples_per_writer
    np.savez(
        root / "MNIST_writers" / "mnist_writer_ids.npz",
        train_writer=writers[:train],
        test_writer=writers[train:],
    )


def write_vehicle(root, devices=(0, 5, 22), samples_per_device=4):
    """Write random samples in the format of Ditto's Vehicle file."""
    numbers = np.random.default_rng(0)
    samples = len(devices) * samples_per_device
    (root / "Vehicle").mkdir()
    np.savez(
        root / "Vehicle" / "vehicle_ditto_train.npz",
        x=numbers.normal(size=(samples, 100)).astype("float32"),
        y=np.resize(np.array([-1, 1], dtype=np.int8), samples),
        device=np.repeat(devices, samples_per_device).astype(np.int16),
        device_names=np.array([f"f_{device:05}" for device in devices]),
    )


def write_plays(root, speeches):
    """Write speeches, pairs of a role and its text, in the form of Shakespeare's plays."""
    text = "\n\n".join(f"{role}:\n{speech}" for role, speech in speeches) + "\n"
    (root / "Shakespeare").mkdir()
    (root / "Shakespeare" / "input.txt").write_text(text)
    return text


def leaf(users):
    """Return the content of a LEAF file: inputs and classes of each user."""
    return json.dumps(
        {
            "users": list(users),
            "num_samples": [len(y) for _, y in users.values()],
            "user_data": {user: {"x": x.tolist(), "y": list(y)} for user, (x, y) in users.items()},
        }
    )


def write_femnist(root, writers=12, samples_per_writer=10):
    """Write random characters in the format of LEAF's preprocess.sh."""
    numbers = np.random.default_rng(0)
    for part, share in (("train", 0.8), ("test", 0.2)):
        count = int(samples_per_writer * share)
        user_data = {
            f"f{w:04}_00": (numbers.random((count, 784)), numbers.integers(62, size=count).tolist())
            for w in range(writers)
        }
        (root / "femnist" / part).mkdir(parents=True)
        (root / "femnist" / part / f"all_data_0_{part}.json").write_text(leaf(user_data))


def png(pixels):
    """Return an image as a cell of the data set flwrlabs/femnist."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": None}


def write_parquet(root, name, **columns):
    """Write a table in the format of the data set flwrlabs/femnist."""
    path = root / "femnist" / f"{name}.parquet"
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pa.table(columns), path)
    return path


def write_celeba(root, identity, monkeypatch):
    """Write an image per identity in torchvision's format, and disable its check of md5 sums."""
    folder = root / "celeba"
    (folder / "img_align_celeba").mkdir(parents=True)
    count = len(identity)
    names = [f"{i:06}.jpg" for i in range(1, count + 1)]
    numbers = np.random.default_rng(0)
    for name in names:
        pixels = numbers.integers(256, size=(218, 178, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "img_align_celeba" / name)
    lines = {
        "list_eval_partition.txt": [f"{n} {min(2, i // 5)}" for i, n in enumerate(names)],
        "identity_CelebA.txt": [f"{n} {k}" for n, k in zip(names, identity)],
        "list_attr_celeba.txt": [
            *(str(count), "Young Smiling"),
            *(f"{n} 1 {(-1) ** i}" for i, n in enumerate(names)),
        ],
        "list_bbox_celeba.txt": [
            *(str(count), "x_1 y_1 width height"),
            *(f"{n} 1 1 1 1" for n in names),
        ],
        "list_landmarks_align_celeba.txt": [str(count), "a b", *(f"{n} 1 1" for n in names)],
    }
    for name, content in lines.items():
        (folder / name).write_text("\n".join(content) + "\n")
    monkeypatch.setattr(datasets.CelebA, "file_list", [])


def write_scans(root, images_per_kind=20):
    """Write Medical MNIST: grey images of 64×64, in a folder for each of six kinds."""
    numbers = np.random.default_rng(0)
    for kind in ("AbdomenCT", "BreastMRI", "CXR", "ChestCT", "Hand", "HeadCT"):
        folder = root / "MedicalMNIST" / kind
        folder.mkdir(parents=True)
        for number in range(images_per_kind):
            pixels = numbers.integers(256, size=(64, 64), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number:06}.jpeg")


def write_tags(root, users=12, questions_per_user=6, words=10_000, tags=500):
    """Write questions in the format of StackOverflow's tag prediction: word shares and tags."""
    numbers = np.random.default_rng(0)
    count = users * questions_per_user
    x = np.zeros((count, words), dtype="float32")
    y = np.zeros((count, tags), dtype="float32")
    for question in range(count):
        x[question, numbers.integers(words, size=20)] += 1 / 20
        y[question, numbers.integers(tags, size=numbers.integers(1, 6))] = 1
    path = root / "stackoverflow_tags.npz"
    np.savez(path, x=x, y=y, client=np.repeat(np.arange(users) * 7 + 3, questions_per_user))
    return path


def write_patients(root, hospitals=6, patients_per_hospital=20):
    """Write a table of patients: numbers, categories, a class and the hospital."""
    numbers = np.random.default_rng(0)
    count = hospitals * patients_per_hospital
    age, pressure = numbers.normal(size=(2, count)).round(4)
    lines = ["age,pressure,sex,ward,hospital,readmitted"]
    for patient in range(count):
        sex, ward = "fm"[patient % 2], ("surgery", "heart", "eyes")[patient % 3]
        readmitted = "yes" if age[patient] + pressure[patient] > 0.5 else "no"
        hospital = f"hospital {patient // patients_per_hospital}"
        lines.append(f"{age[patient]},{pressure[patient]},{sex},{ward},{hospital},{readmitted}")
    path = root / "patients.csv"
    path.write_text("\n".join(lines) + "\n")
    return path
