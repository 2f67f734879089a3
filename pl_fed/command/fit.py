"""``python -m pl_fed {fit,validate,test,predict}``."""

import contextlib
import copy
import errno
import re
import shlex
import signal
import sys
import zipfile
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pl_fed.arguments import check_writable
from pl_fed.callbacks import Predictions, Summary
from pl_fed.command.run_files import (
    CONFIG,
    class_entries,
    discard_unstarted_run,
    place_logger,
    saves_into_run_folder,
)
from pl_fed.command.saved_config import SaveAndLogConfig, is_config_of
from pl_fed.command.sections import SectionsCLI
from pl_fed.federation import Federation
from pl_fed.lightning.checkpoints import check_source, check_weights_only, local_path
from pl_fed.lightning.trainer import Trainer
from pl_fed.reports.configs import group_name
from pl_fed.run_folder import RunLock, is_first_process, last_checkpoint, last_run, new_folder

_PROGRAM = {
    "prog": "python -m pl_fed",
    "description": "Federated learning: personalized, fair and robust at once.",
    "epilog": (
        "Three more train nothing: partition (who has which samples), report (runs side by side in"
        " one page), export (clients' models as files). Each has its own --help."
    ),
}
_NOT_A_FILE = re.compile(r"last$|best$|hpc$|registry")  # what else Lightning takes for one
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ROWS_BEFORE = "metrics_before.csv"  # of rounds that no checkpoint holds, in a restarted run


class FederatedCLI(SectionsCLI):
    """``python -m pl_fed {fit,validate,test,predict} --config x.yaml``.

    Args:
        args: What to parse, if not the command line: a list of arguments.
    """

    def __init__(self, args: ArgsType = None) -> None:
        self.run_dir: Path | None = None
        self._lock: RunLock | None = None
        self._ckpt_path: str | None = None
        self._arguments = sys.argv[1:] if args is None else args
        with contextlib.ExitStack() as self._until_the_end:
            try:
                super().__init__(
                    save_config_callback=SaveAndLogConfig,
                    save_config_kwargs={"overwrite": True},
                    parser_kwargs=_PROGRAM,
                    args=args,
                )
            except KeyboardInterrupt as error:  # a second one, or before there is a trainer
                self._clean_up(error)
                raise SystemExit(128 + signal.SIGINT) from error
            except BaseException as error:
                self._clean_up(error)
                raise
            if getattr(self.trainer, "fast_dev_run", False):  # which leaves no file
                discard_unstarted_run(self.run_dir)

    def _clean_up(self, error: BaseException) -> None:
        """Remove the folder of a run that did not begin; of another, say how it can go on.

        Raises:
            OSError: If a disk is full, and the error does not say of which files.
        """
        discard_unstarted_run(self.run_dir)
        if self.run_dir is not None and isinstance(error, OSError) and error.errno in _NO_ROOM:
            remedy = "Make room, and start it again."
            if last_checkpoint(self.run_dir):
                remedy = "Its last checkpoint is kept: make room, and go on by --ckpt_path last."
            raise OSError(
                f"Expected room for the files of the run in {self.run_dir} but got:"
                f" {error.strerror}. {remedy}"
            ) from error
        interrupted = getattr(getattr(self, "trainer", None), "interrupted", False)
        if isinstance(error, SIGTERMException):
            self._report_stop("SIGTERM")
        elif isinstance(error, KeyboardInterrupt) or (
            interrupted and isinstance(error, SystemExit)
        ):
            self._report_stop("Ctrl-C")

    def _report_stop(self, signal_name: str) -> None:
        """Say that a run was stopped, and how it can be resumed."""
        if not is_first_process():
            return
        stopped = f"Stopped by {signal_name}"
        if self.run_dir is None or not self.run_dir.is_dir():
            print(f"{stopped} before a run began.", file=sys.stderr)
        else:
            print(f"{stopped}. {self._describe_resume(self.run_dir)}", file=sys.stderr)

    def _describe_resume(self, run_dir: Path) -> str:
        """Return where the run's folder is, and the command that resumes the run, if there is."""
        place = f"The run's folder is {run_dir}"
        checkpoint = last_checkpoint(run_dir)
        if self.subcommand != "fit" or not isinstance(self._arguments, list):
            return f"{place}."
        if checkpoint is None and not (run_dir / "checkpoints").is_dir():
            return f"{place}; it has no checkpoints/last.ckpt to go on from."
        command = shlex.join([*_PROGRAM["prog"].split(), *_resume_arguments(self._arguments)])
        begins = "" if checkpoint else " (from its first round, as no checkpoint is saved yet)"
        return f"{place}. This goes on with it{begins}:\n  {command}"

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments, and take the checkpoint: Lightning would read it for arguments."""
        super().parse_arguments(parser, args)
        config = self.config[self.config.subcommand]
        path = self._ckpt_path = config.ckpt_path
        config.ckpt_path = None
        check_weights_only(config.get("weights_only"))
        if path is None or _NOT_A_FILE.match(path):
            return
        check_source(path)
        file = local_path(path)
        if file is not None and not (file.is_file() and zipfile.is_zipfile(file)):
            wrong = "broken, or of another kind" if file.is_file() else "no such file"
            if file.is_dir():
                wrong = "a folder: those of a run are in its folder `checkpoints`"
            raise ValueError(
                "Expected argument `ckpt_path` to be a checkpoint, last or best but got"
                f" {path if path.isprintable() else repr(path)}: {wrong}."
            )

    def before_instantiate_classes(self) -> None:
        """Give the checkpoint back."""
        self.config[self.subcommand].ckpt_path = self._ckpt_path

    def instantiate_classes(self) -> None:
        """Make everything, with the loggers writing into the run's folder."""
        config = self.config[self.subcommand]
        root = config.trainer.default_root_dir or "runs"
        resumes = self.subcommand == "fit" and config.ckpt_path == "last"
        begun = self._has_same_config if resumes else None
        last = last_run(root, begun) if config.ckpt_path == "last" else None
        if is_first_process():  # it chooses the folder, and writes into it
            self._take_folder(last if last and resumes else new_folder(root))
            if last and resumes:
                check_writable(run_dir=last)  # before any file is touched
            if self.subcommand == "fit" and saves_into_run_folder(config.trainer):
                (self.run_dir / "checkpoints").mkdir(exist_ok=True)  # type: ignore[operator]
        self._asked_for = self.config
        self.config = copy.deepcopy(self.config)
        config = self.config[self.subcommand]
        if last and last_checkpoint(last) is None:
            config.ckpt_path = None
            if (rows := last / "metrics.csv").is_file():
                rows.replace(last / _ROWS_BEFORE)
            rank_zero_warn(f"{last} was stopped before its first checkpoint: it begins anew.")
        elif last and not resumes:
            config.ckpt_path = str(last_checkpoint(last))
        elif config.ckpt_path is None and self.subcommand != "fit":
            rank_zero_warn(
                f"No `ckpt_path` is given, so {self.subcommand} takes models that were not trained:"
                " --ckpt_path last takes those of the newest run."
            )
        group = group_name(config.as_dict())
        for logger in class_entries(config.trainer.logger):
            if self.run_dir is not None:
                place_logger(logger, self.run_dir, group)
        super().instantiate_classes()

    def _take_folder(self, folder: Path) -> None:
        """Keep other processes out of a folder to the end, and write into it."""
        self._lock = RunLock(folder)
        self._until_the_end.enter_context(self._lock)
        self.run_dir = folder

    def _has_same_config(self, run: Path) -> bool:
        """Whether a run is of the config that is asked for, or does not say of which it is."""
        asked = yaml.safe_load(self.parser.dump(self.config, skip_none=False))[self.subcommand]
        return is_config_of(run / CONFIG, asked)

    def instantiate_trainer(self, **kwargs: Any) -> LightningTrainer:
        """Make the trainer that runs the federation."""
        self.config = self._asked_for  # what is saved names no folder of this run
        federation: Federation = self._get(self.config_init, "federation")
        self.trainer_class = Trainer
        place = {"run_dir": self.run_dir, "lock": self._lock}
        trainer = super().instantiate_trainer(federation=federation, **place, **kwargs)
        added: list[Callback] = [Summary(federation, self.run_dir)]
        if self.subcommand == "predict":
            added.append(Predictions(self.run_dir or Path()))
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.extend(added)
        return trainer

    def after_fit(self) -> None:
        """Test the final models."""
        self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)


def _resume_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments of a command line that goes on with the last run."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith("--ckpt_path="):
            kept.append(argument)
        skip = argument == "--ckpt_path" and not skip
        if skip:
            kept.pop()
    return [*kept, "--ckpt_path", "last"]
