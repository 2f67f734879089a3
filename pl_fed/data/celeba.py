"""CelebA: is the celebrity smiling?

Z. Liu, P. Luo, X. Wang and X. Tang. "Deep learning face attributes in the wild". ICCV 2015. In
LEAF's format (arXiv 1812.01097), as in Ditto: each celebrity is a client, and images are 84×84.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from pl_fed.arguments import check_integers
from pl_fed.data.folders import data_root, loading_error
from pl_fed.data.reading import report_read_errors
from pl_fed.data.source import TEST, TRAIN, VAL, Arrays, DataSource


class CelebA(DataSource):
    """Faces of celebrities, 3×84×84, with one attribute as the class; identities are the clients.

    Args:
        root: The folder that holds ``celeba`` in torchvision's layout. ``None`` uses the
            environment variable ``PL_FED_DATA``, or ``data``.
        attribute: The attribute to predict, one of CelebA's 40.
        size: Height and width of the resized images, in pixels.
        min_samples: Smallest number of images of a celebrity; LEAF uses 5. Celebrities with fewer
            images are left out.
        max_clients: Maximum number of celebrities, taken in the order of their ids. ``None`` uses
            all. Memory holds all images: 200,000 take 4.3 GB at 84×84.
        download: Whether to download missing files.
        group: The attribute that divides the images into two groups, such as ``Male``: evaluations
            then measure gaps between them. ``None`` for no groups.
    """

    def __init__(
        self,
        root: str | None = None,
        attribute: str = "Smiling",
        size: int = 84,
        min_samples: int = 5,
        max_clients: int | None = None,
        download: bool = False,
        group: str | None = None,
    ) -> None:
        check_integers(1, size=size, min_samples=min_samples)
        if max_clients is not None:
            check_integers(1, max_clients=max_clients)
        self.root = data_root(root)
        self.attribute = attribute
        self.group = group
        self.size = size
        self.min_samples = min_samples
        self.max_clients = max_clients
        self.download = download
        self.preparation = f"RGB, resized to {size} by {size} (bilinear)"

    def load(self) -> Arrays:
        """Return the images with their celebrities and official parts.

        Raises:
            FileNotFoundError: If torchvision's files are missing or differ from the originals.
            ValueError: If an argument does not fit the files, or an image is broken.
        """
        parts = self._parts()
        names = [name for name in parts[0].attr_names if name]
        for argument, value in (("attribute", self.attribute), ("group", self.group)):
            if value not in names and (argument == "attribute" or value is not None):
                raise ValueError(
                    f"Expected argument `{argument}` to be one of {', '.join(names)} but got"
                    f" {value!r}."
                )
        column = names.index(self.attribute)
        files = [name for part in parts for name in part.filename]
        y = torch.cat([part.attr[:, column] for part in parts]).long()
        identity = torch.cat([part.identity[:, 0] for part in parts]).long()
        sizes = torch.tensor([len(part.filename) for part in parts])
        split = torch.tensor([TRAIN, VAL, TEST]).repeat_interleave(sizes)
        selected = self._select_samples(identity)
        images = self.root / "celeba" / "img_align_celeba"
        x = np.stack([self._read_image(images / files[sample]) for sample in selected.tolist()])
        groups = None
        if self.group is not None:
            place = names.index(self.group)
            groups = torch.cat([part.attr[:, place] for part in parts]).long()[selected]
        return Arrays(
            torch.from_numpy(x),
            y[selected],
            identity[selected],
            split[selected],
            2,
            groups=groups,
            group_names=() if self.group is None else (f"not {self.group}", self.group),
        )

    def _parts(self) -> list[Any]:
        """Return torchvision's data set of each official part."""
        from torchvision import datasets  # slow to import

        try:
            return [
                datasets.CelebA(str(self.root), split, ["attr", "identity"], download=self.download)
                for split in ("train", "valid", "test")
            ]
        except Exception as error:  # broken files make torchvision raise errors of any type
            files = "torchvision's files under celeba"
            details = ", ".join(self._describe_broken_files())
            raise loading_error(
                self.root, "CelebA", files, self.download, error, details
            ) from error

    def _describe_broken_files(self) -> Iterator[str]:
        """Yield the name and the fault of each broken file: torchvision names no file."""
        from torchvision import datasets
        from torchvision.datasets.utils import check_integrity

        folder = self.root / "celeba"
        for _, md5, name in datasets.CelebA.file_list:
            path = folder / name
            if path.suffix != ".zip" and not check_integrity(path, md5):
                yield f"{name} {'differs from the original' if path.exists() else 'is missing'}"
        if not (folder / "img_align_celeba").is_dir():
            yield "the folder img_align_celeba is missing"

    def _select_samples(self, identity: torch.Tensor) -> torch.Tensor:
        """Return the indices of the images of the selected celebrities."""
        ids, counts = identity.unique(return_counts=True)
        if self.min_samples > (most := int(counts.max())):
            raise ValueError(
                f"Expected argument `min_samples` to be at most {most}, the largest number of"
                f" images of a celebrity, but got {self.min_samples}."
            )
        selected = ids[counts >= self.min_samples][: self.max_clients]
        return torch.isin(identity, selected).nonzero().flatten()

    def _read_image(self, path: Path) -> np.ndarray:
        with report_read_errors(path, "an image"), Image.open(path) as image:
            resized = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR)
        return np.asarray(resized).transpose(2, 0, 1)
