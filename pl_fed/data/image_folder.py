"""Images in one folder for each class, such as Medical MNIST."""

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
    """Image folder: images in one folder for each class.

    Class ids follow the sorted names of the folders. Files and folders with a leading dot are left
    out. Images are rotated by their EXIF orientation, and 16-bit images are scaled to 8 bits.

    Medical MNIST, the data of FLAME (arXiv 2407.16397), has this layout: 58,954 images, 64×64, of
    six kinds of scans (A. P. Lozano 2017).

    Args:
        folder: The folder below ``root`` that holds the folders of the classes.
        root: The folder of all data sets. ``None`` uses the environment variable ``PL_FED_DATA``,
            or ``data``.
        grey: Whether to convert images to grey (one channel) or to RGB (three channels).
        size: Height and width of the resized images, in pixels. ``None`` keeps the images' own
            size, and all must have the same.

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
            ValueError: If a folder has no images, an image is broken or has 32 bits a pixel, or
                images have several sizes and ``size`` is not set.
        """
        folder = self.root / self.folder
        classes = [path for path in sorted(folder.glob("[!.]*")) if path.is_dir()]
        files = [_find_images(path) for path in classes]
        if not any(files):
            raise missing_files_error(
                self.root,
                files=f"{self.folder}/<class>/<image>",
                remedy="put the images there, in one folder for each class",
            )
        if empty := [path.name for path, images in zip(classes, files) if not images]:
            raise ValueError(
                f"Expected every folder in {folder} to hold the images of a class but got none in"
                f" {', '.join(empty)}: put them there, or remove the folder."
            )
        images = [self._read_image(path) for paths in files for path in paths]
        shapes = {image.shape for image in images}
        if len(shapes) > 1:
            raise ValueError(
                "Expected argument `size` to be set for images of several sizes"
                f" ({sorted(shapes)[:3]}) but got None: set `data.dataset.size`, for example `64`."
            )
        x = torch.from_numpy(np.stack(images))
        sizes = torch.tensor([len(paths) for paths in files])
        y = torch.arange(len(classes)).repeat_interleave(sizes)
        return Arrays(x, y, num_classes=len(classes))

    def _read_image(self, path: Path) -> np.ndarray:
        with report_read_errors(path, "an image"), Image.open(path) as opened:
            if opened.mode in ("I", "F"):  # the range of the values is unknown
                raise ValueError(
                    f"Expected {path} to be an image of 8 or 16 bits a pixel but got 32 bits (mode"
                    f" {opened.mode}): convert it to 8 bits."
                )
            image = _scale_to_8_bits(ImageOps.exif_transpose(opened))
            image = image.convert("L" if self.grey else "RGB")
        if self.size is not None:
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        pixels = np.asarray(image)
        return pixels[None] if self.grey else pixels.transpose(2, 0, 1)


def _find_images(folder: Path) -> list[Path]:
    """Return the images at any depth below a folder; follows links and skips hidden names."""
    paths, visited = [], set()
    for directory, folders, files in os.walk(folder, followlinks=True):
        is_loop = os.path.realpath(directory) in visited  # a link may lead back
        folders[:] = [name for name in folders if not name.startswith(".") and not is_loop]
        paths += [Path(directory, name) for name in files if name[0] != "." and not is_loop]
        visited.add(os.path.realpath(directory))
    return sorted(path for path in paths if path.suffix.lower() in _IMAGES)


def _scale_to_8_bits(image: Image.Image) -> Image.Image:
    """Scale a 16-bit image to 0..255; ``convert`` would clip larger values."""
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
