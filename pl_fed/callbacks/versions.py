"""Versions of the software behind a run, and the commit of its source code."""

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import torch

_CHECKOUT = Path(__file__).resolve().parents[2]
_SECONDS = 10.0  # limit for git
_DIRTY = "-dirty"


def read_versions() -> dict[str, str]:
    """Return the versions of pl_fed, torch, Lightning and Python, by name."""
    return {
        "pl_fed": sys.modules["pl_fed"].__version__,  # no import: the package is above this room
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
        "python": platform.python_version(),
    }


@cache
def read_commit(checkout: Path = _CHECKOUT) -> dict[str, Any] | None:
    """Return the git commit of the source code, as a process starts to use it.

    Args:
        checkout: The folder of the checkout; by default the parent of the package.

    Returns:
        ``commit``, 40 hexadecimal digits, and ``dirty``, whether a tracked file has changed since;
        ``None`` without a checkout, a commit or git.
    """
    if not (checkout / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        process = subprocess.run(
            command,
            cwd=checkout,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    commit = process.stdout.strip()
    return {"commit": commit.removesuffix(_DIRTY), "dirty": commit.endswith(_DIRTY)}
