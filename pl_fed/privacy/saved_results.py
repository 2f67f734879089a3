"""Results of slow computations, saved on disk for later runs."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from pl_fed.files import replace_file

FOLDER_VARIABLE = "PL_FED_CACHE"
"""Environment variable with the folder; ``~/.cache/pl_fed`` without it."""


class SavedResults:
    """Saved results: numbers by name, in one small file for each title.

    The title, the versions of pl_fed and dp-accounting, and pl_fed's source code of the accounting
    determine the file: a corrected accounting never reads old results. Without a writable folder
    the results stay in memory.

    Args:
        title: The description of the settings of all results.
    """

    def __init__(self, title: str) -> None:
        # no import: the package is above this room
        versions = f"pl_fed {sys.modules['pl_fed'].__version__} ({_hash_source()})"
        self.title = f"{versions}, dp-accounting {version('dp-accounting')}: {title}"
        root = os.environ.get(FOLDER_VARIABLE) or _find_home() / ".cache" / "pl_fed"
        digest = hashlib.sha256(self.title.encode()).hexdigest()[:24]
        self._path = Path(root) / "privacy" / f"{digest}.json"
        self._numbers = self._read()
        self._checked: set[str] = set()  # the names of numbers that are known to be right

    def get(
        self,
        name: str,
        compute: Callable[[], float],
        is_valid: Callable[[float], bool] = lambda _: True,
    ) -> float:
        """Return a saved number, or compute and save it.

        Args:
            name: The name of the number.
            compute: Returns the number.
            is_valid: Returns whether a number from the file can be right; otherwise it is replaced.
        """
        saved = self._numbers.get(name)
        if saved is None or (name not in self._checked and not is_valid(saved)):
            number = compute()
            self._numbers = {**self._read(), **self._numbers, name: number}
            self._write()
        self._checked.add(name)
        return self._numbers[name]

    def _read(self) -> dict[str, float]:
        """Return the numbers of the file; none if it is missing, broken, or has another title."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(self._path.read_text(encoding="utf-8"))
            if content["title"] == self.title:
                return {name: float(number) for name, number in content["numbers"].items()}
        return {}

    def _write(self) -> None:
        """Replace the file as a whole; do nothing if the folder cannot be written."""
        content = {"title": self.title, "numbers": self._numbers}
        with suppress(OSError), replace_file(self._path, is_shared=True) as temporary:
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _find_home() -> Path:
    """Return the user's folder; a place without folders if the system lacks the user."""
    try:
        return Path.home()
    except RuntimeError:  # in a container or a service with a number for a user
        return Path(os.devnull)


@cache
def _hash_source() -> str:
    """Return a hash of pl_fed's source code of the accounting."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in ("privacy/accountant.py", "privacy/participation.py", "functional/privacy.py"):
        digest.update((package / file).read_bytes())
    return digest.hexdigest()[:12]
