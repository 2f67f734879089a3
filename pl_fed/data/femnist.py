"""FEMNIST: handwritten digits and letters, by writer.

S. Caldas et al. "LEAF: A benchmark for federated settings". arXiv 1812.01097: 62 classes (digits,
then capital, then small letters), 3,500 writers and more, 28×28 grey.
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

_HOW = (
    "run `./preprocess.sh -s niid --sf 1.0 -k 0 -t sample` in LEAF's data/femnist and put its"
    " folders train and test there, or the parquet files of the data set flwrlabs/femnist"
)
_PARTS = ("train", "test")


class FEMNIST(DataSource):
    """Characters of many writers; each writer is a client, if there is no partitioner.

    Args:
        root: The folder that holds ``femnist``: in it, or in its folder ``data``, LEAF's folders
            ``train`` and ``test`` with their ``*.json``, which are the official parts; or
            ``*.parquet`` files with the columns ``image``, ``writer_id`` and ``character``, that
            have no official parts and need the package pyarrow. Folders below are not looked into.
            ``None`` takes ``PL_FED_DATA``, or ``data``.
    """

    num_classes = 62

    def __init__(self, root: str | None = None) -> None:
        self.root = data_root(root)

    def load(self) -> Arrays:
        """Return the images [samples, 1, 28, 28], each with its writer.

        Raises:
            FileNotFoundError: If there are no files.
            ModuleNotFoundError: If pyarrow is needed and not there.
            ValueError: If a file is broken, or the samples are there more than once.
        """
        places = (self.root / "femnist", self.root / "femnist" / "data")
        parquet = {place: files for place in places if (files := _files(place, "*.parquet"))}
        leaf = {place: [_files(place / part, "*.json") for part in _PARTS] for place in places}
        leaf = {place: parts for place, parts in leaf.items() if all(parts)}
        if not parquet and not leaf:
            wanted = "femnist/train/*.json and femnist/test/*.json, or femnist/*.parquet"
            raise missing_files_error(self.root, wanted, _HOW)
        if len(parquet) + len(leaf) > 1:
            found = [f"{place}/*.parquet" for place in parquet]
            found += [f"{place}/train/*.json" for place in leaf]
            raise ValueError(
                f"Expected {places[0]} to hold FEMNIST once but got {' and '.join(found)}: remove"
                " all but one."
            )
        if parquet:
            return self._arrays(list(_of_parquet(*parquet.values())), None)
        pieces = [list(_of_leaf(files)) for files in next(iter(leaf.values()))]
        split = [part for part, each in zip((TRAIN, TEST), pieces) for _, y, _ in each for _ in y]
        return self._arrays([*pieces[0], *pieces[1]], torch.tensor(split))

    def _arrays(
        self, pieces: list[tuple[Tensor, Tensor, list[str]]], split: Tensor | None
    ) -> Arrays:
        with report_read_errors(self.root / "femnist", "a folder of characters"):
            images, labels, writers = zip(*pieces)
            of_samples = np.asarray([name for each in writers for name in each])
            names, ids = np.unique(of_samples, return_inverse=True)
            x, y = torch.cat(images), torch.cat(labels)
            writer = torch.from_numpy(ids).long()
            return Arrays(x, y, writer, split, self.num_classes, names.tolist())


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder by a pattern, but for hidden ones."""
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def _of_leaf(files: list[Path]) -> Iterator[tuple[Tensor, Tensor, list[str]]]:
    """Yield images, classes and writers of each writer in LEAF's files of one part."""
    found: dict[str, Path] = {}
    for path in files:
        with report_read_errors(path, "a json file of LEAF's FEMNIST"):
            content = json.loads(path.read_text(encoding="utf-8"))
            for user in content["users"]:
                if user in found:
                    raise ValueError(
                        f"Expected {path} to list writers that no file of this part had before but"
                        f" got {user}, of {found[user].name}"
                    )
                found[user] = path
                own = content["user_data"][user]
                if samples := len(own["y"]):
                    x = torch.tensor(own["x"], dtype=torch.float32).view(samples, 1, 28, 28)
                    yield x, _classes(own["y"]), [str(user)] * samples


def _of_parquet(files: list[Path]) -> Iterator[tuple[Tensor, Tensor, list[str]]]:
    """Yield images, classes and writers of each parquet file."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ModuleNotFoundError(
            "Expected the package pyarrow to be installed, which reads femnist/*.parquet, but it is"
            " not: pip install pyarrow, or use LEAF's json files."
        ) from error
    for path in files:
        with report_read_errors(path, "a parquet file of FEMNIST"):
            table = parquet.read_table(path, columns=["image", "writer_id", "character"])
            images = [_image(each) for each in table["image"].to_pylist()]
            if not images:
                continue
            labels = _classes(table["character"].to_pylist())
            writers = table["writer_id"].to_pylist()
            if None in writers:
                raise ValueError("a row has no `writer_id`")
            x = torch.from_numpy(np.stack(images)).view(len(labels), 1, 28, 28)
            yield x, labels, writers


def _classes(labels: list[Any]) -> Tensor:
    """Return class ids of one file."""
    found = torch.tensor(labels)
    if bool((found != found.long()).any()):
        raise ValueError("its classes are no integers")
    return found.long()


def _image(cell: Any) -> np.ndarray:
    from PIL import Image

    content = cell["bytes"] if isinstance(cell, dict) else cell
    return np.asarray(Image.open(io.BytesIO(content)).convert("L"))
