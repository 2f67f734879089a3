"""Checkpoints: a killed process leaves a valid file, and loading a file runs none of its code."""

import contextlib
import errno
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from io import BufferedWriter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsspec.core import split_protocol, url_to_fs
from fsspec.registry import get_filesystem_class
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from pl_fed.rounds.identity import CHECKPOINT_FORMAT
from pl_fed.run_folder import TEMPORARY_NAME
from pl_fed.safe_load import can_be_loaded, safe_load
from pl_fed.state import DiskRows, check_saved, select_clients

_LARGE = 1 << 28  # bytes; a larger checkpoint is memory-mapped
_PIECE = 1 << 20
_FETCHED = "fetched.ckpt"
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_OWN_PARTS = ("state_dict", "federation", "loops", "optimizer_states")

_PARTS: dict[str, type | tuple[type, ...]] = {
    "state_dict": Mapping,
    "federation": Mapping,
    "federation.identity": Mapping,
    "federation.byzantine": Tensor,
    "federation.engine": Mapping,
    "federation.engine.asked": str,
    "federation.engine.engine": (str, type(None)),
    "federation.engine.size": (int, type(None)),
    "federation.engine.speeds": Mapping,
    "federation.store": Mapping,
    "federation.server": Mapping,
    "federation.server.optimizer": Mapping,
    "federation.server.optimizer class": str,
    "federation.server.aggregator": Mapping,
    "federation.server.aggregator class": str,
    "federation.server.states": Mapping,
    "federation.adversary": Mapping,
    "epoch": int,
    "global_step": int,
    "loops": Mapping,
    "loops.fit_loop": Mapping,
    "loops.validate_loop": Mapping,
    "loops.test_loop": Mapping,
    "loops.predict_loop": Mapping,
    "pytorch-lightning_version": str,
}
"""The required parts of a checkpoint of pl_fed, in the order of the checks."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Atomic checkpoint I/O: writes a temporary file in the target's folder and renames it.

    A killed process therefore leaves the previous checkpoint. Lightning's own implementation uses
    the system's temporary folder, and a second copy in memory; if the folder is on another disk, a
    move is a copy. Here clients' states are written to the file piece by piece, and a large
    checkpoint is memory-mapped when it is loaded.

    Every checkpoint is loaded with ``weights_only=True``, for every value that Lightning passes,
    and only if its checksums are correct. A checkpoint at a URL is fetched into a temporary file.
    A state of a callback, an object in a schedule's state, or another part of the user's that could
    not be loaded this way is left out, with a warning.
    """

    def __init__(self) -> None:
        self._left_out: set[str] = set()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint.

        Raises:
            OSError: If it cannot be written; the previous checkpoint is kept.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(TEMPORARY_NAME)
        try:
            _write(self._leave_out_objects(checkpoint), temporary)
            os.replace(temporary, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)  # free the space for other files
            note = " The previous checkpoint is kept." if target.is_file() else ""
            raise OSError(
                f"Expected to write {target} but got: {error.strerror or error}.{note}"
            ) from error

    def _leave_out_objects(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint that can be loaded, without objects of the user's own classes.

        Hyperparameters are left out without a warning, because no resume reads them.
        """
        parts: dict[str, Any] = {}
        for name, part in checkpoint.items():
            if name in _HYPERPARAMETERS:
                parts[name] = {key: part[key] for key in part if can_be_loaded(part[key])}
            elif name == "callbacks":
                states = {
                    key: part[key] for key in part if self._can_keep(f"state of {key}", part[key])
                }
                parts[name] = states
            elif name == "lr_schedulers":
                effect = "a resumed run has those of its own schedule"
                self._can_keep("objects in the state of a schedule", part, effect)
                parts[name] = _drop_objects(part)
            elif name in _OWN_PARTS or self._can_keep(f"part `{name}`", part):
                parts[name] = part
        return parts

    def _can_keep(
        self, name: str, content: Any, effect: str = "a resumed run begins without it"
    ) -> bool:
        """Return whether a part can be loaded again; warn once of the effect if it cannot."""
        if can_be_loaded(content):
            return True
        if name not in self._left_out:
            self._left_out.add(name)
            rank_zero_warn(
                f"Checkpoints leave out the {name}, so that {effect}: it has objects other than"
                " tensors, numbers, strings and containers of these. Save the values of these"
                " objects instead."
            )
        return False

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Load a checkpoint; every process loads the path of the first process.

        Args:
            path: A file, or a URL that ``torch.hub`` (http, https) or fsspec can fetch.
            map_location: See ``torch.load``.
            weights_only: Ignored; it is always ``True``.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If it cannot be fetched, or is not a complete checkpoint of pl_fed.
        """
        if dist.is_available() and dist.is_initialized():
            chosen = [str(path)]
            dist.broadcast_object_list(chosen)
            path = chosen[0]
        with _local_copy(path) as file:
            if not file.is_file():
                raise FileNotFoundError(
                    f"Expected argument `ckpt_path` to be a checkpoint but got {path}: no such"
                    " file."
                )
            if self._needs_checksums(file):
                _check_checksums(file, path)
            checkpoint = _read(file, path, map_location)
        _check_parts(checkpoint, path)
        return _copy_to_memory(checkpoint)

    def _needs_checksums(self, file: Path) -> bool:
        """Return whether to read the complete file and compare its checksums."""
        return True


class ClientSubsetIO(AtomicCheckpointIO):
    """Client subset I/O: loads a checkpoint with the states of some clients only.

    A checkpoint may contain the states of a million clients.

    Args:
        clients: Ids of the clients to load, int64 [n].
    """

    def __init__(self, clients: Tensor) -> None:
        super().__init__()
        self.clients = clients

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint without the other clients' states."""
        checkpoint = super().load_checkpoint(path, *args, **kwargs)
        store = checkpoint["federation"]["store"]
        checkpoint["federation"]["store"] = select_clients(
            store, lambda ids: torch.isin(ids, self.clients)
        )
        checkpoint["federation"]["subset"] = True
        return checkpoint

    def _needs_checksums(self, file: Path) -> bool:
        """Return whether the file is small; only a part of a large file is read."""
        return not _is_large(file)


def local_path(source: str | Path) -> Path | None:
    """Return the path of a file on this machine, or ``None`` for another URL."""
    protocol, path = split_protocol(str(source))
    return Path(path) if protocol in (None, "file", "local") else None


def check_source(path: str | Path) -> None:
    """Raise ``ValueError`` if a path or URL is empty or has an unknown protocol."""
    if not str(path):
        raise ValueError(
            "Expected argument `ckpt_path` to be a checkpoint, last or best but got ''."
        )
    protocol, _ = split_protocol(str(path).split("::")[0])
    if protocol is None:
        return
    try:
        get_filesystem_class(protocol)
    except (ValueError, ImportError) as error:
        raise ValueError(
            f"Expected argument `ckpt_path` to be a file or a URL that fsspec can read but got"
            f" {path}: {_one_line(error)}."
        ) from error


def check_weights_only(weights_only: bool | None) -> None:
    """Raise ``ValueError`` if ``weights_only`` is ``False``."""
    if weights_only is False:
        raise ValueError(
            "Expected argument `weights_only` to be True, or left out, but got False: with False, a"
            " checkpoint may run any code, and a checkpoint of pl_fed never needs it."
        )


def read_identity(path: str | Path | None) -> dict[str, Any]:
    """Return the identity of a checkpoint's federation; empty without a readable local file."""
    identity = _read_leniently(path).get("federation", {}).get("identity")
    return identity if isinstance(identity, dict) else {}


def read_round(path: str | Path | None) -> int | None:
    """Return the number of finished rounds in a checkpoint; ``None`` if it cannot be read."""
    rounds = _read_leniently(path).get("global_step")
    return rounds if isinstance(rounds, int) else None


def _read_leniently(path: str | Path | None) -> dict[str, Any]:
    """Return a checkpoint's content without its tensors' data; empty if it cannot be read."""
    file = None if path is None else local_path(path)
    if file is None or not file.is_file() or not zipfile.is_zipfile(file):
        return {}
    with contextlib.suppress(Exception):  # loading the checkpoint explains the error
        checkpoint = safe_load(file, map_location="cpu", mmap=True)
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get("federation", {}), dict):
            return checkpoint
    return {}


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint, and raise the original error of a failed write: torch.save hides it."""
    file = _Stream(path.open("wb", buffering=0))
    try:
        with file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        if file.error is None:
            raise
        raise file.error from error


@contextlib.contextmanager
def _local_copy(source: str | Path) -> Iterator[Path]:
    """Yield a local file: the source itself, or a temporary copy of the file at a URL."""
    if (path := local_path(source)) is not None:
        yield path
        return
    check_source(source)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / _FETCHED
        try:
            _fetch(str(source), target)
        except Exception as error:  # errors of any package, depending on the protocol
            raise ValueError(
                "Expected argument `ckpt_path` to be a checkpoint that can be fetched but got"
                f" {source}: {_one_line(error)}."
            ) from error
        yield target


def _fetch(url: str, target: Path) -> None:
    if url.lower().startswith(("http://", "https://")):  # uses the proxies of the environment
        torch.hub.download_url_to_file(url, str(target), progress=False)
    else:
        system, path = url_to_fs(url)
        system.get_file(path, str(target))


def _drop_objects(state: Any) -> Any:
    """Return a state without the objects that cannot be loaded.

    In a list, ``None`` takes the place of such an object. A schedule of a resumed run keeps the
    objects that it was made with.
    """
    if can_be_loaded(state):
        return state
    if isinstance(state, dict):
        values = {name: _drop_objects(value) for name, value in state.items()}
        return {name: value for name, value in values.items() if value is not _Missing}
    if isinstance(state, list):
        return [None if value is _Missing else value for value in map(_drop_objects, state)]
    return _Missing


def _check_checksums(file: Path, source: str | Path) -> None:
    """Refuse a file with wrong checksums.

    Args:
        file: The local file.
        source: The path or URL of the checkpoint, for the error message.
    """
    broken = Path(source).name
    try:
        with zipfile.ZipFile(file) as archive:
            broken = archive.testzip() or ""
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place before the beginning of a file that was cut
            raise
    except Exception:  # zipfile has no error of its own for some kinds of damage
        pass
    if broken:
        raise ValueError(
            f"Expected argument `ckpt_path` to be a complete checkpoint but got {source}, which is"
            f" broken (in {broken}), or no checkpoint: use an earlier checkpoint."
        )


def _read(file: Path, source: str | Path, map_location: Any) -> Any:
    """Load tensors, numbers and strings; refuse a file with other objects."""
    mapped = _is_large(file) and file.name != _FETCHED
    try:
        return safe_load(file, map_location=map_location, mmap=mapped)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"Expected argument `ckpt_path` to be a checkpoint of pl_fed but got {source}, which"
            " contains objects other than tensors, numbers and strings, and is not loaded:"
            f" {_one_line(error)}"
        ) from error


def _check_parts(checkpoint: Any, source: str | Path) -> None:
    """Refuse a checkpoint with a missing part, or a part of another type."""
    if not isinstance(checkpoint, dict) or "federation" not in checkpoint:
        raise ValueError(
            f"Expected argument `ckpt_path` to be a checkpoint of pl_fed but got {source}, which"
            " contains no federation: to start from a checkpoint of your own module, set"
            " `model.net` to a function that returns `<class>.load_from_checkpoint(path)`."
        )
    _check_format(checkpoint["federation"], source)
    for name, kind in _PARTS.items():
        part: Any = checkpoint
        for key in name.split("."):
            part = part.get(key, _Missing)
        if not isinstance(part, kind):
            got = "none" if part is _Missing else f"one of type {type(part).__name__}"
            raise ValueError(
                f"Expected argument `ckpt_path` to be a checkpoint with the part `{name}` but got"
                f" {source} with {got}: use a checkpoint that pl_fed wrote."
            )
    for name, rows in checkpoint["federation"]["store"].items():
        try:
            check_saved(name, rows)
        except ValueError as error:
            raise ValueError(f"{error} It is in {source}.") from error


def _check_format(federation: Any, source: str | Path) -> None:
    """Refuse a checkpoint of another version of pl_fed."""
    saved = federation.get("format", 1) if isinstance(federation, Mapping) else CHECKPOINT_FORMAT
    if saved != CHECKPOINT_FORMAT:
        raise ValueError(
            f"Expected argument `ckpt_path` to be a checkpoint of format {CHECKPOINT_FORMAT} but"
            f" got {source} of format {saved}, which another version of pl_fed has written: resume"
            " it by that version, or start a new run."
        )


class _Missing:
    """Placeholder of a missing part."""


def _is_large(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > _LARGE and zipfile.is_zipfile(path)


def _copy_to_memory(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Copy all tensors except the clients' rows, so that the restored rows alone map the file."""
    store = checkpoint["federation"].pop("store", None)
    copied: dict[str, Any] = apply_to_collection(checkpoint, Tensor, torch.clone)
    copied["federation"]["store"] = store
    return copied


def _one_line(error: Exception) -> str:
    """Return the first sentence of an error's message, without its full stop."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message.split(". ")[0].rstrip(".")


class _Stream(BufferedWriter):
    """Stream: a file that releases the memory of mapped rows after writing them.

    Attributes:
        error: The error that ended a write, or ``None``. torch.save replaces it by a
            ``RuntimeError``.
    """

    error: BaseException | None = None

    def write(self, content: Any) -> int:
        try:
            written = super().write(content)
            if len(content) > _PIECE:
                DiskRows.give_back()
        except BaseException as error:
            self.error = error
            raise
        return written
