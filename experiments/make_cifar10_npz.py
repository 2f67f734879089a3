"""``python experiments/make_cifar10_npz.py --source FOLDER``: write cifar10.npz for ``Npz``.

The folder holds CIFAR-10 as mosaics: train_1.webp to train_5.webp and test.webp. Each mosaic is a
grid of 100 by 100 images of 32 by 32, row by row. labels.npz holds the arrays train_1_labels and so
on. The output has x (uint8 [60000, 3, 32, 32]), y (int64 [60000]) and split: 0 for the 50,000
training images, 2 for the 10,000 test images. Set ``data.split: own`` to ignore the split.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

PARTS = {**{f"train_{i}": 0 for i in range(1, 6)}, "test": 2}
SIZE = 32
OUTPUT = Path(__file__).parent.parent / "runs" / "cifar10.npz"  # for the papers' tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="the folder with the mosaics")
    parser.add_argument("--out", type=Path, default=Path("cifar10.npz"), help="file to write")
    arguments = parser.parse_args()
    x, y, split = read(arguments.source)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(arguments.out, x=x, y=y, split=split)
    print(f"{arguments.out}: {len(x)} images, {np.bincount(y).tolist()} of each class")


def write_if_missing(root: Path, out: Path = OUTPUT) -> bool:
    """Write the file from the mosaics in ``root``/CIFAR10 if needed; return whether it exists."""
    source = root / "CIFAR10"
    if not out.exists() and (source / "labels.npz").exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        x, y, split = read(source)
        temporary = out.with_suffix(".tmp.npz")
        np.savez(temporary, x=x, y=y, split=split)
        temporary.replace(out)
    return out.exists()


def read(source: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return images, labels and official parts of all mosaics in a folder."""
    labels = np.load(source / "labels.npz")
    images = {name: tiles(source / f"{name}.webp") for name in PARTS}
    for name, part in images.items():
        if len(part) != len(labels[f"{name}_labels"]):
            raise ValueError(
                f"Expected as many labels as images for {name} ({len(part)}) but got"
                f" {len(labels[f'{name}_labels'])}."
            )
    y = np.concatenate([labels[f"{name}_labels"] for name in PARTS]).astype(np.int64)
    split = np.concatenate([np.full(len(images[name]), PARTS[name]) for name in PARTS])
    return np.concatenate(list(images.values())), y, split.astype(np.int64)


def tiles(path: Path) -> np.ndarray:
    """Return the images of a mosaic, row by row, uint8 [images, 3, 32, 32]."""
    with Image.open(path) as mosaic:
        pixels = np.asarray(mosaic.convert("RGB"))
    rows, columns = pixels.shape[0] // SIZE, pixels.shape[1] // SIZE
    grid = pixels.reshape(rows, SIZE, columns, SIZE, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(grid.reshape(rows * columns, 3, SIZE, SIZE))


if __name__ == "__main__":
    main()
