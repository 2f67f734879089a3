"""The arguments of ``export`` on the command line."""

import argparse
import unicodedata
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from pl_fed.arguments import check_choice, check_writable
from pl_fed.data import FederatedData
from pl_fed.exports.formats import check_formats
from pl_fed.run_folder import LAST, last_checkpoint

SELECTIONS = ("personal", "global", "validation")


@dataclass(frozen=True)
class Request:
    """Request for an export: the run, its models and the file formats.

    Attributes:
        checkpoint: The checkpoint; ``last`` until the command has found the newest run.
        client: Ids of clients or names of their owners, as text, or ``all``.
        with_global: Whether to write the global model to a file of its own.
        select: The model of each client: ``personal``, ``global``, or by ``validation`` data the
            better of both.
        formats: Names in :data:`pl_fed.exports.FORMATS`.
        out: The folder to write; ``None`` for a new one in the run's folder.
        config: The files of the run's config.
        overrides: Further command-line arguments, as changes of the config.

    Raises:
        ModuleNotFoundError: If a format needs a package that is not installed.
        ValueError: If an argument has no allowed value, no model is requested, or the folder
            cannot be written.
    """

    checkpoint: Path
    client: tuple[str, ...]
    with_global: bool
    select: str
    formats: tuple[str, ...]
    out: Path | None
    config: tuple[Path, ...]
    overrides: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice(SELECTIONS, select=self.select)
        check_formats(self.formats)
        if not self.client and not self.with_global:
            raise ValueError(
                "Expected argument `client` to be ids or owners of clients, or all, but got none:"
                " add `--client all`, or `--global` for the global model."
            )
        if "all" in self.client and len(self.client) > 1:
            raise ValueError(
                "Expected argument `client` to be ids or owners of clients, or all alone, but got"
                f" {' '.join(self.client)}."
            )
        if self.out is not None:
            check_writable(out=self.out)
            if self.out.exists() and any(self.out.iterdir()):
                raise ValueError(
                    f"Expected argument `out` to be a new or an empty folder but got {self.out},"
                    " which is not empty: choose another folder."
                )

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> "Request":
        """Return the request of a command line.

        Args:
            arguments: The words after ``export``.

        Raises:
            FileNotFoundError: If there is no checkpoint, or no config beside it.
            ModuleNotFoundError: If a format needs a package that is not installed.
            ValueError: If the file is no checkpoint, or an argument is invalid.
        """
        namespace, overrides = _parser().parse_known_args(arguments)
        if namespace.ckpt is None:
            raise ValueError(
                "Expected argument `ckpt` to be a checkpoint, the folder of a run, or last, but got"
                " none: add `--ckpt` with its path, or `--ckpt last` and `--config`."
            )
        is_last = namespace.ckpt == LAST
        checkpoint = Path(LAST) if is_last else find_checkpoint(Path(namespace.ckpt))
        return cls(
            checkpoint=checkpoint,
            client=tuple(namespace.client),
            with_global=namespace.with_global,
            select=namespace.select,
            formats=tuple(dict.fromkeys(namespace.format)),
            out=namespace.out,
            config=tuple(namespace.config or ([] if is_last else [find_config(checkpoint)])),
            overrides=tuple(overrides),
        )

    @property
    def run(self) -> Path:
        """The folder of the run: the parent of ``checkpoints``, or else the checkpoint's folder."""
        return _run_folder(self.checkpoint)

    def clients(self, data: FederatedData) -> Tensor:
        """Return the ids of the requested clients, int64 [n]; ``all`` are the training clients.

        Args:
            data: The data of the federation.

        Raises:
            ValueError: If an id is out of range, or no client or several ones have an owner's name.
        """
        if self.client == ("all",):
            return torch.arange(data.clients.num_clients)
        number, owners = data.num_evaluated, data.evaluated_owners
        ids = [find_client(word, number, owners) for word in self.client]
        return torch.tensor(list(dict.fromkeys(ids)), dtype=torch.int64)


def find_client(word: str, number: int, owners: Sequence[Sequence[str]]) -> int:
    """Return the id of a client.

    Args:
        word: Its id, or the name of its owner. A number is an id.
        number: The number of clients, with the held-out clients after the training clients.
        owners: The names of the owners of each client's samples; empty if they have none.

    Raises:
        ValueError: If there is no such client, or several clients have the name.

    Example:
        >>> find_client("1", 2, []), find_client("clinic b", 2, [["clinic a"], ["clinic b"]])
        (1, 1)
    """
    if word.isdecimal() and int(word) < number:
        return int(word)
    name = unicodedata.normalize("NFC", word)
    named = [
        client
        for client, names in enumerate(owners)
        if any(unicodedata.normalize("NFC", own) == name for own in names)
    ]
    if len(named) == 1:
        return named[0]
    if named:
        raise ValueError(
            f"Expected argument `client` to be an owner of one client but got {word!r}, which owns"
            f" samples of {len(named)} clients: name one by its id, for example {named[0]}."
        )
    other = f", or names of owners such as {owners[0][0]!r}," if owners and owners[0] else ""
    raise ValueError(
        f"Expected argument `client` to be ids from 0 to {number - 1}{other} but got {word!r}."
    )


def find_checkpoint(path: Path, argument: str = "ckpt") -> Path:
    """Return a checkpoint.

    Args:
        path: The path of the checkpoint or of its run's folder.
        argument: The name of the argument, for messages.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If the file is no checkpoint.
    """
    checkpoint = last_checkpoint(path) if path.is_dir() else path
    if checkpoint is None or not checkpoint.is_file():
        reason = "no such file" if checkpoint else "no checkpoints/last.ckpt in it"
        raise FileNotFoundError(
            f"Expected argument `{argument}` to be a checkpoint, or the folder of a run, but got"
            f" {path}: {reason}."
        )
    if not zipfile.is_zipfile(checkpoint) or not _is_torch_file(checkpoint):
        raise ValueError(
            f"Expected argument `{argument}` to be a checkpoint of pl_fed but got {path}: it is"
            " broken, or of another kind."
        )
    return checkpoint


def _is_torch_file(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("data.pkl") for name in archive.namelist())


def _run_folder(checkpoint: Path) -> Path:
    """Return the folder that holds ``checkpoints``.

    A checkpoint may lie deeper, because slashes in a metric's name make folders.
    """
    folders = checkpoint.parents
    return next((folder.parent for folder in folders if folder.name == "checkpoints"), folders[0])


def find_config(checkpoint: Path) -> Path:
    """Return the ``config.yaml`` of a checkpoint's run.

    Raises:
        FileNotFoundError: If there is none.
    """
    for folder in (_run_folder(checkpoint), checkpoint.parent.parent, checkpoint.parent):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    raise FileNotFoundError(
        "Expected argument `ckpt` to be a checkpoint in the folder of its run, with the config.yaml"
        f" that defines the net, but got {checkpoint} without one: add `--config` with its path,"
        " or for a run from Python, use `federation.model_of(client)`."
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"Expected arguments as --help shows them but got: {message}.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m pl_fed export",
        description="Write clients' models as files that load without pl_fed, and manifest.json,"
        " which describes the models and the preparation of inputs.",
        epilog="All arguments of `fit` are accepted and change the run's config, for example"
        " --data.dataset.root.",
        allow_abbrev=False,
    )
    parser.add_argument(
        *("--ckpt", "--ckpt_path"),
        help="a run's checkpoint, its folder for the last checkpoint, or last for the newest run of"
        " --config (required)",
    )
    parser.add_argument(
        "--client",
        nargs="+",
        default=[],
        metavar="ID",
        help="ids of clients, names of their owners, or all",
    )
    parser.add_argument(
        "--global", action="store_true", dest="with_global", help="the global model too"
    )
    parser.add_argument(
        "--select",
        default="personal",
        help="the model of each client: its personal model, the global one, or the better of both"
        " by its validation data (personal, global, validation; default: personal)",
    )
    parser.add_argument(
        "--format",
        nargs="+",
        default=["state_dict", "torch_export"],
        help="file formats: state_dict (.pt, needs the net's class), safetensors (the same),"
        " lightning (.ckpt of a LightningModule), torch_export (.pt2, needs no class), onnx, peft"
        " (a folder with the adapters of pl_fed.models.LoRA); default: state_dict torch_export",
    )
    parser.add_argument(
        "--out", type=Path, help="a new folder (default: one below exports/ in the run's folder)"
    )
    parser.add_argument(
        "--config", type=Path, action="append", help="use this config, not the run's config.yaml"
    )
    return parser
