"""FEMNIST: handwritten digits and letters, by writer.

S. Caldas et al. "LEAF: A benchmark for federated settings". arXiv 1812.01097: 62 classes (digits,
capital letters, small letters), more than 3,500 writers, 28×28 grey.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_fed.data.folders import data_root, missing_files_error
from pl_fed.data.reading import report_read_errors
from pl_fed.data.source import TEST, TRAIN, Arrays, DataSource

_REMEDY = (
    "run `./preprocess.sh -s niid --sf 1.0 -k 0 -t sample` in LEAF's data/femnist and put its"
    " folders train and test there, or the parquet files of the data set flwrlabs/femnist"
)
_PARTS = ("train", "test")


class FEMNIST(DataSource):
    """FEMNIST: handwritten characters; without a partitioner, each writer is a client.

    The files lie in ``femnist`` or ``femnist/data``, not in deeper folders, in one of two formats:

    - LEAF: ``train/*.json`` and ``test/*.json``, the official parts.
    - Parquet: ``*.parquet`` with the columns ``image``, ``writer_id`` and ``character``. There are
      no official parts, and reading needs the package pyarrow.

    Args:
        root: The folder that holds ``femnist``. ``None`` uses the environment variable
            ``PL_FED_DATA``, or ``data``.
    """

    num_classes = 62

    def __init__(self, root: str | None = None) -> None:
        self.root = data_root(root)

    def load(self) -> Arrays:
        """Return the images [samples, 1, 28, 28] with their writers.

        Raises:
            FileNotFoundError: If there are no files.
            ModuleNotFoundError: If parquet files need pyarrow and it is not installed.
            ValueError: If a file is broken, or the samples exist in more than one format or folder.
        """
        folders = (self.root / "femnist", self.root / "femnist" / "data")
        parquet = {folder: files for folder in folders if (files := _files(folder, "*.parquet"))}
        leaf = {folder: [_files(folder / part, "*.json") for part in _PARTS] for folder in folders}
        leaf = {folder: parts for folder, parts in leaf.items() if all(parts)}
        if not parquet and not leaf:
            layout = "femnist/train/*.json and femnist/test/*.json, or femnist/*.parquet"
            raise missing_files_error(self.root, layout, _REMEDY)
        if len(parquet) + len(leaf) > 1:
            copies = [f"{folder}/*.parquet" for folder in parquet]
            copies += [f"{folder}/train/*.json" for folder in leaf]
            raise ValueError(
                f"Expected {folders[0]} to hold FEMNIST once but got {' and '.join(copies)}: remove"
                " all but one."
            )
        if parquet:
            return self._build_arrays(list(_read_parquet(*parquet.values())), None)
        train, test = (list(_read_leaf(files)) for files in next(iter(leaf.values())))
        split = [TRAIN] * _count_samples(train) + [TEST] * _count_samples(test)
        return self._build_arrays([*train, *test], torch.tensor(split))

    def _build_arrays(
        self, pieces: list[tuple[Tensor, Tensor, list[str]]], split: Tensor | None
    ) -> Arrays:
        with report_read_errors(self.root / "femnist", "a folder of characters"):
            images, labels, writers = zip(*pieces)
            sample_writers = np.asarray([name for names in writers for name in names])
            names, ids = np.unique(sample_writers, return_inverse=True)
            x, y = torch.cat(images), torch.cat(labels)
            writer = torch.from_numpy(ids).long()
            return Arrays(x, y, writer, split, self.num_classes, names.tolist())


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder that match a pattern and are not hidden."""
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def _count_samples(pieces: list[tuple[Tensor, Tensor, list[str]]]) -> int:
    return sum(len(labels) for _, labels, _ in pieces)


def _read_leaf(files: list[Path]) -> Iterator[tuple[Tensor, Tensor, list[str]]]:
    """Yield each writer's images, classes and writer names from LEAF's files of one part."""
    files_by_writer: dict[str, Path] = {}
    for path in files:
        with report_read_errors(path, "a json file of LEAF's FEMNIST"):
            content = json.loads(path.read_text(encoding="utf-8"))
            for user in content["users"]:
                if user in files_by_writer:
                    raise ValueError(
                        f"Expected {path} to list writers that no other file of this part lists but"
                        f" got {user}, also in {files_by_writer[user].name}"
                    )
                files_by_writer[user] = path
                user_data = content["user_data"][user]
                if samples := len(user_data["y"]):
                    x = torch.tensor(user_data["x"], dtype=torch.float32).view(samples, 1, 28, 28)
                    yield x, _class_ids(user_data["y"]), [str(user)] * samples


def _read_parquet(files: list[Path]) -> Iterator[tuple[Tensor, Tensor, list[str]]]:
    """Yield the images, classes and writer names of each parquet file."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ModuleNotFoundError(
            "Expected the package pyarrow to be installed for femnist/*.parquet but it is not: run"
            " `pip install pyarrow`, or use LEAF's json files."
        ) from error
    for path in files:
        with report_read_errors(path, "a parquet file of FEMNIST"):
            table = parquet.read_table(path, columns=["image", "writer_id", "character"])
            images = [_decode_image(cell) for cell in table["image"].to_pylist()]
            if not images:
                continue
            labels = _class_ids(table["character"].to_pylist())
            writers = table["writer_id"].to_pylist()
            if None in writers:
                raise ValueError("a row has no `writer_id`")
            x = torch.from_numpy(np.stack(images)).view(len(labels), 1, 28, 28)
            yield x, labels, writers


def _class_ids(labels: list[Any]) -> Tensor:
    """Return the labels of one file as int64 class ids."""
    ids = torch.tensor(labels)
    if bool((ids != ids.long()).any()):
        raise ValueError("its classes are no integers")
    return ids.long()


def _decode_image(cell: Any) -> np.ndarray:
    from PIL import Image

    content = cell["bytes"] if isinstance(cell, dict) else cell
    return np.asarray(Image.open(io.BytesIO(content)).convert("L"))
