"""Where data lie on disk, and what to say if they do not."""

import os
from pathlib import Path


def data_root(root: str | None) -> Path:
    """Return the folder of all data: ``root``, or ``PL_FED_DATA``, or ``data``."""
    return Path(root if root is not None else os.environ.get("PL_FED_DATA", "data")).expanduser()


def missing_files_error(root: Path, wanted: str, how: str) -> FileNotFoundError:
    """Return what to raise where files are not there.

    Args:
        root: The folder that was looked into.
        wanted: What it should hold.
        how: Where to get it, as an imperative.
    """
    return FileNotFoundError(
        f"Expected argument `root` to be a folder with {wanted} but found none in"
        f" {root.absolute()}: {how}, or set PL_FED_DATA to the folder that has it."
    )


def loading_error(
    root: Path, name: str, files: str, download: bool, error: Exception, details: str = ""
) -> FileNotFoundError:
    """Return what to raise where torchvision does not load a data set.

    Args:
        root: The folder that was looked into.
        name: The data set.
        files: Which files torchvision looks for, as a sentence's object.
        download: Whether it was to fetch them.
        error: What it raised.
        details: Which files are the matter, if that is known.
    """
    lines = str(error).replace("You can use download=True to download it", "").splitlines()
    reason = (lines or [type(error).__name__])[0].strip(" .:")
    if details:
        reason += f": {details}"
    hints = [f"put {files} there", "set PL_FED_DATA to the folder that has it"]
    if not download:
        hints.insert(0, "set `download: true` to fetch it")
    return FileNotFoundError(
        f"Expected argument `root` to be a folder with {name} but got {root.absolute()}"
        f" ({reason}): {', or '.join(hints)}."
    )
