"""What is asked for on the command line of ``export``."""

import argparse
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from pl_fed.arguments import check_choice, check_writable
from pl_fed.exports.formats import check_formats
from pl_fed.run_folder import last_checkpoint

SELECTIONS = ("personal", "global", "validation")


@dataclass(frozen=True)
class Request:
    """Which models of which run are to become files.

    Attributes:
        checkpoint: The checkpoint.
        client: Ids as words, or ``all``.
        with_global: Whether the global model becomes a file of its own.
        select: Each client's ``personal`` model, the ``global`` one, or by ``validation`` data the
            better of both.
        formats: Words of :data:`pl_fed.exports.FORMATS`.
        out: The folder to be made; ``None`` for a new one in the run's folder.
        config: Files of the run's config.
        others: Further arguments of the command line, which change that config.

    Raises:
        ModuleNotFoundError: If a format needs a package that is not there.
        ValueError: If an argument is not one of the words for it, nothing is asked for, or the
            folder cannot be made.
    """

    checkpoint: Path
    client: tuple[str, ...]
    with_global: bool
    select: str
    formats: tuple[str, ...]
    out: Path | None
    config: tuple[Path, ...]
    others: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check the words."""
        check_choice(SELECTIONS, select=self.select)
        check_formats(self.formats)
        if not self.client and not self.with_global:
            raise ValueError(
                "Expected argument `client` to be ids of clients, or all, but got none: say"
                " --client, or --global for the global model."
            )
        if "all" in self.client and len(self.client) > 1:
            raise ValueError(
                "Expected argument `client` to be ids of clients, or all alone, but got"
                f" {' '.join(self.client)}."
            )
        wrong = [word for word in self.client if not word.isdecimal()]
        if wrong and self.client != ("all",):
            raise ValueError(
                f"Expected argument `client` to be ids of clients, or all, but got {wrong[0]!r}."
            )
        if self.out is not None:
            check_writable(out=self.out)
            if self.out.exists() and any(self.out.iterdir()):
                raise ValueError(
                    f"Expected argument `out` to be a new or an empty folder but got {self.out},"
                    " which holds something."
                )

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> "Request":
        """Read a command line.

        Raises:
            FileNotFoundError: If there is no checkpoint, or no config beside it.
            ValueError: If the file is no checkpoint; see the class for the rest.
        """
        given, others = _parser().parse_known_args(arguments)
        if given.ckpt is None:
            raise ValueError(
                "Expected argument `ckpt` to be a checkpoint, or the folder of a run, but got none."
            )
        checkpoint = _found(Path(given.ckpt))
        return cls(
            checkpoint=checkpoint,
            client=tuple(given.client),
            with_global=given.with_global,
            select=given.select,
            formats=tuple(dict.fromkeys(given.format)),
            out=given.out,
            config=tuple(given.config or [_config_of(checkpoint)]),
            others=tuple(others),
        )

    @property
    def run(self) -> Path:
        """The folder of the run: the one with its config, or else that of the checkpoint."""
        return _run_of(self.checkpoint)

    def clients(self, number: int) -> Tensor:
        """Return the ids that are asked for, int64 [n], of so many clients.

        Raises:
            ValueError: If one is out of range.
        """
        if self.client == ("all",):
            return torch.arange(number)
        ids = list(dict.fromkeys(int(word) for word in self.client))
        if unknown := [one for one in ids if one >= number]:
            raise ValueError(
                f"Expected argument `client` to be ids from 0 to {number - 1} but got {unknown[0]}."
            )
        return torch.tensor(ids, dtype=torch.int64)


def _found(path: Path) -> Path:
    """Return a checkpoint, given it or the folder of its run."""
    found = last_checkpoint(path) if path.is_dir() else path
    if found is None or not found.is_file():
        what = "no such file" if found else "no checkpoints/last.ckpt in it"
        raise FileNotFoundError(
            f"Expected argument `ckpt` to be a checkpoint, or the folder of a run, but got {path}:"
            f" {what}."
        )
    if not zipfile.is_zipfile(found) or not _is_of_torch(found):
        raise ValueError(
            f"Expected argument `ckpt` to be a checkpoint of pl_fed but got {path}: it is broken,"
            " or of another kind."
        )
    return found


def _is_of_torch(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("data.pkl") for name in archive.namelist())


def _run_of(checkpoint: Path) -> Path:
    """Return what holds ``checkpoints``: a name with a metric's slashes lies in folders below."""
    folders = checkpoint.parents
    return next((each.parent for each in folders if each.name == "checkpoints"), folders[0])


def _config_of(checkpoint: Path) -> Path:
    for folder in (_run_of(checkpoint), checkpoint.parent.parent, checkpoint.parent):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    raise FileNotFoundError(
        "Expected argument `ckpt` to be a checkpoint in the folder of its run, whose config.yaml"
        f" says what the net is, but got {checkpoint} without any: give one by --config. Of a run"
        " from Python, `federation.model_of(client)` gives a client's model."
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"Expected arguments as --help shows them but got: {message}.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m pl_fed export",
        description="Write clients' models as files that load without pl_fed, and manifest.json,"
        " which says what they are and how inputs must be prepared.",
        epilog="Whatever else `fit` takes changes the run's config: --data.dataset.root, say.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ckpt", help="a checkpoint of a run, or the run's folder: its last one (needed)"
    )
    parser.add_argument(
        "--client", nargs="+", default=[], metavar="ID", help="ids of clients, or all"
    )
    parser.add_argument(
        "--global", action="store_true", dest="with_global", help="the global model too"
    )
    parser.add_argument(
        "--select",
        default="personal",
        help="what becomes a client's file: its personal model, the global one, or the better of"
        " both by its validation data (personal, global, validation; default: personal)",
    )
    parser.add_argument(
        "--format",
        nargs="+",
        default=["state_dict", "torch_export"],
        help="state_dict (.pt, for the net's class), torch_export (.pt2, needs no class), onnx"
        " (default: the first two)",
    )
    parser.add_argument(
        "--out", type=Path, help="the folder to be made (default: a new one in the run's, exports/)"
    )
    parser.add_argument(
        "--config", type=Path, action="append", help="instead of the run's config.yaml"
    )
    return parser
