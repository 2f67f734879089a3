"""Images in folders, one for each class, such as Medical MNIST."""

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from pl_fed.arguments import check_integers
from pl_fed.data.folders import data_root, missing_files_error
from pl_fed.data.reading import report_read_errors
from pl_fed.data.source import Arrays, DataSource

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
_IMAGES |= {".ppm", ".pgm", ".pbm", ".pnm"}


class ImageFolder(DataSource):
    """Images in one folder for each class; classes are numbered by the folders' names in order.

    Files and folders whose names begin with a dot are left out. Images are turned as their EXIF
    data say, and those of 16 bits are scaled to 8.

    Medical MNIST (58,954 images, 64×64, of six kinds of scans, A. P. Lozano 2017) comes in this
    form: FLAME (arXiv 2407.16397) trains on it.

    Args:
        folder: The folder of the classes' folders, below ``root``.
        root: ``None`` takes ``PL_FED_DATA``, or ``data``.
        grey: Whether images are taken as grey, with one channel, or in colour, with three.
        size: Height and width that images are brought to, in pixels; ``None`` leaves them as they
            are, which must be alike then.

    Example:
        >>> import tempfile, pathlib
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> for name in ("Hand", "Head"):
        ...     (root / "scans" / name).mkdir(parents=True)
        ...     Image.new("L", (2, 2)).save(root / "scans" / name / "1.png")
        >>> arrays = ImageFolder("scans", root=str(root)).load()
        >>> arrays.inputs.shape, arrays.targets
        (torch.Size([2, 1, 2, 2]), tensor([0, 1]))
    """

    def __init__(
        self,
        folder: str,
        root: str | None = None,
        grey: bool = True,
        size: int | None = None,
    ) -> None:
        if size is not None:
            check_integers(1, size=size)
        self.root = data_root(root)
        self.folder = folder
        self.grey = grey
        self.size = size
        self.preparation = f"turned by EXIF, 8-bit {'grey' if grey else 'RGB'}"
        if size is not None:
            self.preparation += f", resized to {size} by {size} (bilinear)"

    def load(self) -> Arrays:
        """Return the images [samples, channels, height, width].

        Raises:
            FileNotFoundError: If there are no images.
            ValueError: If a folder has no images, one is broken or of 32 bits, or they are of
                several sizes and ``size`` is not given.
        """
        folder = self.root / self.folder
        classes = [path for path in sorted(folder.glob("[!.]*")) if path.is_dir()]
        files = [_images_below(each) for each in classes]
        if not any(files):
            wanted = f"{self.folder}/<class>/<image>"
            raise missing_files_error(
                self.root, wanted, "put the images there, in one folder for each class"
            )
        if empty := [each.name for each, found in zip(classes, files) if not found]:
            raise ValueError(
                f"Expected every folder in {folder} to hold the images of a class but got none in"
                f" {', '.join(empty)}: put them there, or remove the folder."
            )
        images = [self._image(path) for found in files for path in found]
        shapes = {image.shape for image in images}
        if len(shapes) > 1:
            raise ValueError(
                "Expected argument `size` to be given for images of several sizes but got None:"
                f" there are {sorted(shapes)[:3]}."
            )
        x = torch.from_numpy(np.stack(images))
        sizes = torch.tensor([len(found) for found in files])
        y = torch.arange(len(classes)).repeat_interleave(sizes)
        return Arrays(x, y, num_classes=len(classes))

    def _image(self, path: Path) -> np.ndarray:
        with report_read_errors(path, "an image"), Image.open(path) as opened:
            if opened.mode in ("I", "F"):
                raise ValueError(
                    f"Expected {path} to be an image of 8 or 16 bits a pixel but got 32, whose"
                    f" range is not known (mode {opened.mode})."
                )
            image = _of_8_bits(ImageOps.exif_transpose(opened))
            image = image.convert("L" if self.grey else "RGB")
        if self.size is not None:
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        pixels = np.asarray(image)
        return pixels[None] if self.grey else pixels.transpose(2, 0, 1)


def _images_below(folder: Path) -> list[Path]:
    """Return the images anywhere below a folder, but for what is hidden; links are followed."""
    found, seen = [], set()
    for here, folders, files in os.walk(folder, followlinks=True):
        known = os.path.realpath(here) in seen  # a link may lead back
        folders[:] = [name for name in folders if not name.startswith(".") and not known]
        found += [Path(here, name) for name in files if not name.startswith(".") and not known]
        seen.add(os.path.realpath(here))
    return sorted(path for path in found if path.suffix.lower() in _IMAGES)


def _of_8_bits(image: Image.Image) -> Image.Image:
    """Return an image with its pixels in 0..255: ``convert`` would clip those above."""
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
