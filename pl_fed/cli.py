"""The command line: LightningCLI with the sections model, data, federation and trainer."""

import contextlib
import copy
import errno
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import traceback
import warnings
import zipfile
from argparse import Action
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import DefaultHelpFormatter, Namespace, set_loader
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.enums import StrEnum

import pl_fed.models
import pl_fed.optimizers  # noqa: F401 (imported, their classes are known by their short names)
from pl_fed.callbacks import Predictions, Summary
from pl_fed.checkpoints import RowsOf, check_source, check_weights_only, local_path
from pl_fed.clients import Client
from pl_fed.config_files import (
    check_arguments,
    check_values,
    fill_empty_sections,
    load,
    wrong_config,
)
from pl_fed.data import FederatedData
from pl_fed.exports import Export, Request
from pl_fed.federation import Federation
from pl_fed.functional.arguments import check_writable
from pl_fed.loggers import wandb_loggers
from pl_fed.messages import of_a_class, of_a_file, printable, sentence
from pl_fed.reports import command
from pl_fed.reports.configs import differing, group_name, shown
from pl_fed.reports.split import Split
from pl_fed.runs import (
    RunLock,
    is_first_process,
    last_checkpoint,
    last_run,
    new_folder,
)
from pl_fed.trainer import Trainer

_LENGTHS = {f"trainer.max_{name}" for name in ("epochs", "steps", "time")}  # raised as one likes
_CONFIG = "config.yaml"
_BEGUN = {_CONFIG, "checkpoints"}  # what a run's folder has in it before the first round
_MOST_CLASSES = 12
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
_TO_PARTITION = [  # any model, in place of one that may be large, or not given; and any machine
    *("--model=pl_fed.clients.FedAvg", "--model.net=torch.nn.Linear"),
    *("--model.net.in_features=1", "--model.net.out_features=1"),
    *("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=1"),
    *("--trainer.strategy=auto", "--trainer.precision=32-true"),
]
_TO_LOAD = [  # a checkpoint, in one process: what is to be predicted is nothing
    *("--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.strategy=auto"),
    *("--trainer.logger=null", "--trainer.callbacks=null", "--trainer.profiler=null"),
    *("--trainer.enable_checkpointing=false", "--data.predict_clients=[]"),
]
_ROWS_BEFORE = "metrics_before.csv"  # of rounds that no checkpoint holds, in a run that begins anew
_RUN_ID = "wandb_run_id"  # a file in the run's folder: a resumed run is the same run
_YAML = "checked yaml"  # jsonargparse's name for the function that loads texts
_SWEEP = "WANDB_SWEEP_ID"  # set by the agent of a sweep for the runs that it starts

# Timer's argument `interval` is one of Lightning's enums, which config.yaml could not hold
yaml.SafeDumper.add_multi_representer(
    StrEnum, lambda dumper, value: dumper.represent_str(value.value)
)


set_loader(_YAML, load, exceptions=(yaml.YAMLError,))


class SectionsCLI(LightningCLI):
    """LightningCLI with the sections model, data, federation and trainer.

    Args:
        **how: What else LightningCLI takes.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(
            Client,
            FederatedData,
            trainer_class=LightningTrainer,
            seed_everything_default=0,
            parser_class=Parser,
            subclass_mode_model=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            **how,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the section ``federation``."""
        parser.add_class_arguments(Federation, "federation", sub_configs=True)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments, and refuse values that no argument can mean."""
        check_arguments(args if isinstance(args, list) else sys.argv[1:])
        try:
            super().parse_arguments(parser, args)
        except UnicodeDecodeError as error:
            raise ValueError(_wrong_encoding(error)) from None
        config = self.config.as_dict()
        config = config.get(config.get("subcommand")) or config
        check_values(config)
        if isinstance(config["seed_everything"], bool):
            raise ValueError(
                "Expected argument `seed_everything` to be an integer from 0 to 4294967295 but got"
                f" {str(config['seed_everything']).lower()}: set a number, for example 0."
            )


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
            except BaseException as error:
                self._end_early(error)
                raise
            if getattr(self.trainer, "fast_dev_run", False):  # which leaves no file
                _discard(self.run_dir)

    def _end_early(self, error: BaseException) -> None:
        """Remove the folder of a run that did not begin; of another, say how it can go on.

        Raises:
            OSError: If a disk is full, and the error does not say of which files.
        """
        _discard(self.run_dir)
        if self.run_dir is not None and isinstance(error, OSError) and error.errno in _NO_ROOM:
            remedy = "Make room, and start it again."
            if last_checkpoint(self.run_dir):
                remedy = "Its last checkpoint is kept: make room, and go on by --ckpt_path last."
            raise OSError(
                f"Expected room for the files of the run in {self.run_dir} but got:"
                f" {error.strerror}. {remedy}"
            ) from error
        if self.run_dir is None or not self.run_dir.is_dir():
            return
        interrupted = getattr(getattr(self, "trainer", None), "interrupted", False)
        if isinstance(error, SIGTERMException):
            print(f"Stopped by SIGTERM. {self._how_to_go_on(self.run_dir)}", file=sys.stderr)
        elif interrupted and isinstance(error, SystemExit | KeyboardInterrupt):
            print(f"Stopped by Ctrl-C. {self._how_to_go_on(self.run_dir)}", file=sys.stderr)

    def _how_to_go_on(self, run_dir: Path) -> str:
        """Return where the run's folder is, and the command that resumes the run, if there is."""
        place = f"The run's folder is {run_dir}"
        checkpoint = last_checkpoint(run_dir)
        if self.subcommand != "fit" or not isinstance(self._arguments, list):
            return f"{place}."
        if checkpoint is None and not (run_dir / "checkpoints").is_dir():
            return f"{place}; it has no checkpoints/last.ckpt to go on from."
        command = shlex.join([*_PROGRAM["prog"].split(), *_resuming(self._arguments)])
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
        begun = self._has_config_of if resumes else None
        last = last_run(root, begun) if config.ckpt_path == "last" else None
        if is_first_process():  # it chooses the folder, and writes into it
            self._take_folder(last if last and resumes else new_folder(root))
            if last and resumes:
                check_writable(run_dir=last)  # before any file is touched
            if self.subcommand == "fit" and _saves_here(config.trainer):
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
        for logger in _entries(config.trainer.logger):
            if self.run_dir is not None:
                _place(logger, self.run_dir, group)
        super().instantiate_classes()

    def _take_folder(self, folder: Path) -> None:
        """Keep other processes out of a folder to the end, and write into it."""
        self._lock = RunLock(folder)
        self._until_the_end.enter_context(self._lock)
        self.run_dir = folder

    def _has_config_of(self, run: Path) -> bool:
        """Whether a run is of the config that is asked for, or does not say of which it is."""
        asked = yaml.safe_load(self.parser.dump(self.config, skip_none=False))[self.subcommand]
        return not _changes(run / _CONFIG, asked)

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


class PartitionCLI(SectionsCLI):
    """``python -m pl_fed partition --config x.yaml``: who has which samples; nothing is trained.

    Args:
        args: What to parse, if not the command line: a list of arguments.
    """

    def __init__(self, args: ArgsType = None) -> None:
        self.folder: Path | None = None
        try:
            super().__init__(
                save_config_callback=None,
                parser_kwargs={
                    "prog": "python -m pl_fed partition",
                    "description": "Print and draw which client has which samples.",
                },
                run=False,
                args=args,
            )
            self._show()
        except BaseException:
            _discard(self.folder)
            raise

    def _show(self) -> None:
        self.split = Split(self.datamodule.clients)
        self.split.show()
        self._save(Path(self.trainer.default_root_dir))

    def instantiate_classes(self) -> None:
        """Make everything, with the loggers writing into a new folder."""
        folder = self.folder = new_folder(self.config.trainer.default_root_dir or "runs")
        self.config.trainer.default_root_dir = str(folder)
        for logger in _entries(self.config.trainer.logger):
            _place(logger, folder)
        super().instantiate_classes()

    def _save(self, folder: Path) -> None:
        """Write the table and the picture, and give them to loggers that take such."""
        self.split.write(folder / "split.csv")
        self.split.draw(folder / "split.png")
        for logger in wandb_loggers(self.trainer):
            rows = self.split.rows()
            logger.log_image("split", [str(folder / "split.png")])
            logger.log_table("clients", list(rows[0]), [list(row.values()) for row in rows])
            logger.experiment.finish()
        print(f"split.csv and split.png are in {folder}")


class ExportCLI(SectionsCLI):
    """``python -m pl_fed export --ckpt runs/x/… --client 3``: models that load without pl_fed.

    Args:
        args: What to parse: a list of arguments.
    """

    def __init__(self, args: list[str]) -> None:
        request = self.request = Request.parse(args)
        configs = [f"--config={path}" for path in request.config]
        given = [*configs, "--trainer.accelerator=auto", *request.others, *_TO_LOAD]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(callbacks used to create|length of .* is zero).*")
            super().__init__(save_config_callback=None, args=["predict", *given])
        self.model.to(self.trainer.strategy.root_device)
        print(f"The models are in {self.export.write()}")

    def before_instantiate_classes(self) -> None:
        """Name the checkpoint, all of which Lightning would have read for its hyperparameters."""
        self.config.predict.ckpt_path = str(self.request.checkpoint)

    def instantiate_trainer(self, **kwargs: Any) -> LightningTrainer:
        """Make the trainer, which reads of the checkpoint what is asked for."""
        federation: Federation = self._get(self.config_init, "federation")
        self.trainer_class = Trainer
        clients = self.request.clients(self.datamodule.clients.num_clients)
        self.export = Export(federation, self.request, clients, self.model.evaluated)
        how = {"run_dir": self.request.checkpoint.parent, "plugins": [RowsOf(clients)]}
        return super().instantiate_trainer(federation=federation, **how, **kwargs)


class Parser(LightningArgumentParser):
    """Lightning's parser, whose help and error messages are short."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(
            *args, **{"parser_mode": _YAML, **kwargs, "formatter_class": ShortHelpFormatter}
        )

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with one sentence, not with the usage of a hundred options."""
        if not self.exit_on_error or "JSONARGPARSE_DEBUG" in os.environ:
            super().error(message, ex)
        self.exit(2, f"error: {printable(sentence(message))}\n")

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Namespace:
        """Parse a config; if it is none, name the file, which may be one of several."""
        if wrong := wrong_config(path):
            raise TypeError(
                f"Expected argument `config` to be a file of YAML with sections but got {path}:"
                f" {wrong}."
            )
        config: Namespace = super().parse_path(path, *args, **kwargs)
        return config

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Namespace:
        """Parse the text of a config, in which empty sections have their defaults."""
        text = fill_empty_sections(content.removeprefix("\ufeff"))
        config: Namespace = super().parse_string(text, *args, **kwargs)
        return config


def _wrong_encoding(error: UnicodeDecodeError) -> str:
    """Return what to do where Python cannot read a config: it, or a file that it names."""
    if error.encoding.lower().replace("-", "") == "utf8":
        return (
            "Expected each file of the config to be UTF-8 but one that it names has byte"
            f" 0x{error.object[error.start]:02x}: save it as UTF-8."
        )
    return (
        f"Expected Python to read files as UTF-8 but got {error.encoding}: set the environment"
        " variable PYTHONUTF8=1."
    )


class ShortHelpFormatter(DefaultHelpFormatter):
    """Names at most a dozen classes where an argument takes any: there are hundreds of modules."""

    def _expand_help(self, action: Action) -> str:
        text: str = super()._expand_help(action)
        return re.sub(r"known subclasses: ([^()]*)", _shortened, text, flags=re.DOTALL)


def _shortened(found: re.Match[str]) -> str:
    names = found.group(1).split(", ")
    if len(names) <= _MOST_CLASSES:
        return found.group(0)
    own = [name for name in names if name.startswith("pl_fed.")][:_MOST_CLASSES]
    rest = [name for name in names if not name.startswith("pl_fed.")]
    shown = [*own, *rest[: max(0, _MOST_CLASSES - len(own))]]
    return f"known subclasses: {', '.join(shown)}, … ({len(names)} in all)"


class SaveAndLogConfig(SaveConfigCallback):
    """Writes ``config.yaml``, and gives the whole config to every logger.

    That of a run that goes on is written when its checkpoint has been taken, which may be refused.
    If it is another than before, the other one is kept as ``config_to_round_<n>.yaml``.
    """

    _goes_on = False

    def setup(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        """Write the config of a new run."""
        if stage == "fit" and self.config.ckpt_path == "last":
            self._goes_on = True
            self.config = self.config.clone()
            self.config.ckpt_path = None  # a fit by the config that is written is another run
        if not self._goes_on:
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Write the config of a run that goes on."""
        if trainer.is_global_zero and not self.already_saved:
            self._keep_old(Path(trainer.default_root_dir), trainer.current_epoch)
        super().setup(trainer, pl_module, "fit")

    def on_fit_end(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Say so if a run was whole already, and the config is another than that of the run."""
        if not self._goes_on or self.already_saved or not trainer.is_global_zero:
            return
        if changes := _changes(Path(trainer.default_root_dir) / _CONFIG, self._dumped()):
            rank_zero_warn(
                f"The run was whole, so that nothing is trained by this config ({changes}): the"
                " models that are tested are those of the config before. To train with this one,"
                " raise `trainer.max_epochs`, or begin a run without `ckpt_path`."
            )

    def _keep_old(self, folder: Path, round: int) -> None:
        """Keep the config that is there, if the new one is another, and say what differs.

        If one is kept for this round, no round that counts was run by the one that is there.
        """
        kept = folder / f"config_to_round_{round}.yaml"
        before = kept if kept.exists() else folder / _CONFIG
        if changes := _changes(before, self._dumped()):
            before.rename(kept)
            rank_zero_warn(
                f"The run goes on with another config from round {round} on ({changes}); the one"
                f" before is kept in {kept.name}. Learning rates stay those of the checkpoint."
            )
        else:
            kept.unlink(missing_ok=True)  # it is written again

    def save_config(
        self, trainer: LightningTrainer, pl_module: LightningModule, stage: str
    ) -> None:
        """Log the config."""
        config = self._dumped()
        for logger in trainer.loggers:
            logger.log_hyperparams(config)

    def _dumped(self) -> dict[str, Any]:
        """Return the config as ``config.yaml`` holds it."""
        config: dict[str, Any] = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        return config


def main(args: ArgsType = None) -> None:
    """Run the command line; one clear sentence, not a trace, for what the user can mend."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "💡" not in record.getMessage()
    )
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended.*")
    if _SWEEP not in os.environ:  # whose agent waits for what its runs log
        os.environ.setdefault("WANDB_MODE", "offline")
    given = sys.argv[1:] if args is None else args
    try:
        if isinstance(given, list) and given[:1] == ["partition"]:
            PartitionCLI([*given[1:], *_TO_PARTITION])
        elif isinstance(given, list) and given[:1] == ["report"]:
            command.report(given[1:])
        elif isinstance(given, list) and given[:1] == ["export"]:
            ExportCLI(given[1:])
        else:
            FederatedCLI(args)
    except SIGTERMException:  # whose exit status would be that of a success
        sys.exit(128 + signal.SIGTERM)
    except KeyboardInterrupt:  # before there is a trainer, which would end the run in order
        if is_first_process():
            print("Stopped by Ctrl-C before a run began.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (
        ValueError,
        TypeError,
        OSError,
        RuntimeError,
        ImportError,
        KeyError,
        MisconfigurationException,
    ) as error:
        said = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        text = of_a_class(error) or of_a_file(error) or sentence(said)
        if not text.startswith("Expected") and not _is_lightnings_refusal(error):
            raise
        notes = getattr(error, "__notes__", [])
        print(f"error: {printable(' '.join([text, *notes]))}", file=sys.stderr)
        sys.exit(1)


def _is_lightnings_refusal(error: Exception) -> bool:
    """Whether Lightning itself raised an error: as a rule, it refuses a trainer argument."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return str(frames[-1][0].f_globals.get("__name__")).startswith("lightning.")


def _saves_here(trainer: Namespace) -> bool:
    """Whether a run's checkpoints, if it has any, go into its own folder."""
    given = [each.get("init_args") or {} for each in _entries(trainer.callbacks)]
    saves = trainer.enable_checkpointing is not False and not trainer.fast_dev_run
    return saves and not any(each.get("dirpath") for each in given)


def _changes(file: Path, config: dict[str, Any]) -> str:
    """Return how a config differs from one; nothing if by lengths only, or that cannot be read."""
    try:
        old: dict[str, Any] | None = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return ""
    changes = {} if old is None else differing([old, config])
    if changes.keys() <= _LENGTHS:
        return ""
    return ", ".join(f"{n} {shown(was)} → {shown(now)}" for n, (was, now) in changes.items())


def _discard(run_dir: Path | None) -> None:
    """Remove the folder of a run that ended before it began: it holds no results.

    One that cannot be removed stays: what ended the run is worth more words.
    """
    if run_dir is None:
        return
    with contextlib.suppress(OSError):
        if not (run_dir / "wandb").exists():
            (run_dir / _RUN_ID).unlink(missing_ok=True)  # of no run of W&B
        if {path.name for path in run_dir.rglob("*")} <= _BEGUN:
            shutil.rmtree(run_dir)


def _resuming(arguments: list[str]) -> list[str]:
    """Return the arguments of a command line that goes on with the last run."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith("--ckpt_path="):
            kept.append(argument)
        skip = argument == "--ckpt_path" and not skip
        if skip:
            kept.pop()
    return [*kept, "--ckpt_path", "last"]


def _entries(logger: Any) -> Iterator[Namespace]:
    """Yield the loggers of a config that are given by class."""
    for each in logger if isinstance(logger, list) else [logger]:
        if isinstance(each, Namespace) and "class_path" in each:
            yield each


def _place(logger: Namespace, folder: Path, group: str | None = None) -> None:
    """Make a logger write under the run's folder, and W&B go on with the folder's run.

    Args:
        logger: The logger's class and arguments.
        folder: The run's folder.
        group: W&B's name for runs of the same config but for the seed, unless the user gave one.
    """
    arguments = logger.get("init_args")
    if arguments is None:
        return
    if "save_dir" in arguments:
        arguments.save_dir = str(folder / (arguments.save_dir or "."))
    if not logger.class_path.endswith("WandbLogger"):
        return
    for variable in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):  # else these lie in the home folder
        os.environ.setdefault(variable, str((folder / "wandb").absolute()))
    if group and not arguments.get("group") and "WANDB_RUN_GROUP" not in os.environ:
        arguments.group = group
    if not arguments.get("id") and _SWEEP not in os.environ:  # a sweep gives its runs their ids
        file = folder / _RUN_ID
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        arguments.id = file.read_text()
        arguments.resume = "allow"
