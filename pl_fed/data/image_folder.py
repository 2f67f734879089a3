"""Images in one folder for each class, such as Medical MNIST."""

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from pl_fed.arguments import check_integers
from pl_fed.data.columns import PARTS, find_two_forms
from pl_fed.data.folders import data_root, missing_files_error
from pl_fed.data.reading import report_read_errors
from pl_fed.data.source import Arrays, DataSource

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
_IMAGES |= {".ppm", ".pgm", ".pbm", ".pnm"}


class ImageFolder(DataSource):
    """Image folder: images in one folder for each class.

    If these folders lie in folders ``train`` and ``test`` and, optionally, ``val`` (also called
    ``valid`` or ``validation``), these are the official parts. A class has the same folder name in
    each of them, and may be absent from some.

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
        classes: The names of the classes, in the order of their ids. ``None`` sorts the names of
            all folders, which ``federation.privacy`` refuses.

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
        classes: list[str] | None = None,
    ) -> None:
        if size is not None:
            check_integers(1, size=size)
        self.root = data_root(root)
        self.folder = folder
        self.grey = grey
        self.size = size
        self.classes = classes
        self.preparation = f"turned by EXIF, 8-bit {'grey' if grey else 'RGB'}"
        if size is not None:
            self.preparation += f", resized to {size} by {size} (bilinear)"

    def load(self) -> Arrays:
        """Return the images [samples, channels, height, width].

        Raises:
            FileNotFoundError: If there are no images.
            ValueError: If a folder has no images, an image is broken or has 32 bits a pixel,
                images have several sizes and ``size`` is not set, or two folders have names that
                differ by their form in Unicode only.
        """
        folder = self.root / self.folder
        parts = _find_parts(folder)
        names = sorted({path.name for _, path in parts})
        classes = names if self.classes is None else self.classes
        if forms := find_two_forms([*names, *classes]):
            raise ValueError(
                f"Expected {folder} to hold folders with one name for each class but got"
                f" {forms[0]!a} and {forms[1]!a}, two forms of one name in Unicode: name the"
                " folders of all parts, and `data.dataset.classes`, alike."
            )
        if unknown := [name for name in names if name not in classes]:
            raise ValueError(
                f"Expected argument `classes` to name all folders of classes in {folder} but it"
                f" lacks {unknown[0]}: add it to `data.dataset.classes`, or remove the folder."
            )
        files = [_find_images(path) for _, path in parts]
        if not any(files):
            raise missing_files_error(
                self.root,
                files=f"{self.folder}/<class>/<image>",
                remedy="put the images there, in one folder for each class",
            )
        if empty := [path.name for (_, path), images in zip(parts, files) if not images]:
            raise ValueError(
                f"Expected every folder in {folder} to hold the images of a class but got none in"
                f" {', '.join(empty)}: put them there, or remove the folder."
            )
        if parts[0][0] is None:
            _check_nesting(folder, files)
        images = [self._read_image(path) for paths in files for path in paths]
        shapes = {image.shape for image in images}
        if len(shapes) > 1:
            raise ValueError(
                "Expected argument `size` to be set for images of several sizes"
                f" ({sorted(shapes)[:3]}) but got None: set `data.dataset.size`, for example `64`."
            )
        x = torch.from_numpy(np.stack(images))
        sizes = torch.tensor([len(paths) for paths in files])
        ids = torch.tensor([classes.index(path.name) for _, path in parts])
        split = [part for part, _ in parts if part is not None]
        return Arrays(
            x,
            ids.repeat_interleave(sizes),
            split=torch.tensor(split).repeat_interleave(sizes) if split else None,
            num_classes=len(classes),
            class_names=tuple(classes),
        )

    def list_shared_quantities(self) -> dict[str, str]:
        """Return that the names of all folders number the classes, unless they are given."""
        return {} if self.classes is not None else {"classes": "null, which sorts all folders"}

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


def _find_parts(folder: Path) -> list[tuple[int | None, Path]]:
    """Return the folders of classes, each with its official part, or ``None`` without parts.

    Raises:
        ValueError: If folders of parts and of classes lie side by side.
    """
    folders = [path for path in sorted(folder.glob("[!.]*")) if path.is_dir()]
    parts = [path for path in folders if path.name.lower() in PARTS]
    is_nested = any(path.is_dir() for part in parts for path in part.glob("[!.]*"))
    if not is_nested:
        return [(None, path) for path in folders]
    if len(parts) < len(folders):
        other = next(path.name for path in folders if path not in parts)
        raise ValueError(
            f"Expected {folder} to hold either parts ({', '.join(p.name for p in parts)}) or"
            f" classes but got the folder {other}, too: move it into a part, or elsewhere."
        )
    for part in parts:
        if images := [path for path in part.iterdir() if path.suffix.lower() in _IMAGES]:
            raise ValueError(
                f"Expected {part} to hold a folder for each class but got the image"
                f" {images[0].name}: move it into the folder of its class."
            )
    return [
        (PARTS[part.name.lower()], path)
        for part in parts
        for path in sorted(part.glob("[!.]*"))
        if path.is_dir()
    ]


def _check_nesting(folder: Path, files: list[list[Path]]) -> None:
    """Raise ``ValueError`` if folders of classes hold the same folders, such as the real classes.

    Folders inside a class may group its images, for example by patient; equal names in several
    classes rather are classes within groups.
    """
    inner = [{path.relative_to(folder).parts[1:-1] for path in paths} for paths in files]
    names = [{parts[0] for parts in group if parts} for group in inner]
    shared = set.intersection(*names)
    if shared:
        outer = dict.fromkeys(paths[0].relative_to(folder).parts[0] for paths in files)
        raise ValueError(
            f"Expected {folder} to hold <class>/<image>, or train/<class>/<image> and"
            f" test/<class>/<image>, but got the folder {min(shared)} in {' and '.join(outer)}:"
            " move the images of a class into one folder, or name the outer folders train, val and"
            " test."
        )


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
