"""The folder of the data sets, and errors about missing files."""

import os
from pathlib import Path


def data_root(root: str | None) -> Path:
    """Return the folder of all data sets: ``root``, else ``PL_FED_DATA``, else ``data``."""
    return Path(root if root is not None else os.environ.get("PL_FED_DATA", "data")).expanduser()


def missing_files_error(root: Path, files: str, remedy: str) -> FileNotFoundError:
    """Return the error for a folder without the files of a data set.

    Args:
        root: The folder.
        files: The missing files, as the object of a sentence.
        remedy: How to get the files, as an imperative.
    """
    return FileNotFoundError(
        f"Expected argument `root` to be a folder with {files} but found none in"
        f" {root.absolute()}: {remedy}, or set PL_FED_DATA to the folder that has it."
    )


def loading_error(
    root: Path, name: str, files: str, download: bool, error: Exception, details: str = ""
) -> FileNotFoundError:
    """Return the error for a data set that torchvision cannot load.

    Args:
        root: The folder.
        name: The name of the data set.
        files: The files that torchvision needs, as the object of a sentence.
        download: Whether torchvision was to download the files.
        error: The error of torchvision.
        details: Names and faults of the broken files, if known.
    """
    lines = str(error).replace("You can use download=True to download it", "").splitlines()
    reason = (lines or [type(error).__name__])[0].strip(" .:")
    if details:
        reason += f": {details}"
    hints = [f"put {files} there", "set PL_FED_DATA to the folder that has it"]
    if not download:
        hints.insert(0, "set `data.dataset.download: true` to fetch it")
    return FileNotFoundError(
        f"Expected argument `root` to be a folder with {name} but got {root.absolute()}"
        f" ({reason}): {', or '.join(hints)}."
    )
