"""``config.yaml`` in a run's folder, and its differences from another config."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.callbacks.python_config import KEPT_OPTIONS
from pl_fed.command.run_files import CONFIG
from pl_fed.files import replace_file
from pl_fed.plain_yaml import load_yaml
from pl_fed.reports.configs import find_differences, flatten, list_changes, read_config

_LENGTHS = {f"trainer.max_{name}" for name in ("epochs", "steps", "time")}  # a resume may raise
_PROCESSES = ("trainer.devices", "trainer.num_nodes", "trainer.strategy")

PREVIOUS_CONFIG = "config_to_round_{}.yaml"
"""The name of the config of a run's first rounds, up to a resume under another config."""
_MAX_CHANGES = 3  # most differences that a list of runs names
_EVALUATION_OPTIONS = (  # of all evaluations; no trained model depends on them
    *("data.predict_clients", "data.clients_per_eval_batch"),
    *("federation.evaluate_clients", "federation.metrics", "federation.smoothing"),
    *("federation.statistics", "federation.untrained_models"),
)
Completion = Callable[[dict[str, Any]], dict[str, Any]]
"""Adds the defaults of the arguments that a saved config lacks, see :func:`add_defaults`."""


class SaveAndLogConfig(SaveConfigCallback):
    """Callback that writes ``config.yaml`` and logs the config to every logger.

    A resumed run writes its config after loading the checkpoint, because loading may fail. If the
    config has changed, the callback keeps the previous one as ``config_to_round_<n>.yaml``.
    """

    _resumes = False

    def setup(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        """Write the config of a new run."""
        if stage == "fit" and self.config.ckpt_path == "last":  # also for the folder of a run
            self._resumes = True
            self.config = self.config.clone()
            self.config.ckpt_path = None  # a fit with the saved config starts a new run
        if not self._resumes:
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Write the config of a resumed run, unless no round is left for it."""
        if self._resumes and trainer.fit_loop.done:
            self._warn_of_no_round(Path(trainer.default_root_dir))
            return
        if trainer.is_global_zero and not self.already_saved:
            self._keep_previous(Path(trainer.default_root_dir), trainer.global_step)
        super().setup(trainer, pl_module, "fit")

    def _warn_of_no_round(self, folder: Path) -> None:
        """Warn if a run without a round left has another config."""
        if changes := self._describe_changes(folder / CONFIG):
            rank_zero_warn(
                f"The run has no round left, so this config ({changes}) trains nothing and the test"
                " uses the models of the previous config: raise `trainer.max_epochs`, or start a"
                " new run without `--ckpt_path`."
            )

    def _keep_previous(self, folder: Path, round: int) -> None:
        """Keep the previous config if the new one differs, and warn with the differences.

        If the folder already has a previous config for this round, ``config.yaml`` belongs to an
        attempt without a saved round, and is not kept.
        """
        previous = folder / PREVIOUS_CONFIG.format(round)
        before = previous if previous.exists() else folder / CONFIG
        if changes := self._describe_changes(before):
            before.rename(previous)
            rank_zero_warn(
                f"The run resumes with another config from round {round} on ({changes}). The"
                f" previous config is in {previous.name}. {KEPT_OPTIONS}"
            )
        else:
            previous.unlink(missing_ok=True)  # config.yaml is the same again

    def _describe_changes(self, file: Path) -> str:
        """Describe the differences of this config from a config file, other than its length."""
        config = self._plain_config()
        changes = _differences(
            read_config(file) or config, config, lambda saved: add_defaults(saved, self.parser)
        )
        return "" if changes.keys() <= _LENGTHS else list_changes(changes)

    def save_config(
        self, trainer: LightningTrainer, pl_module: LightningModule, stage: str
    ) -> None:
        """Write the config whole or not at all, because ``last`` reads it, and log it."""
        text = dump_config(self.config, self.parser)
        with replace_file(Path(trainer.default_root_dir) / CONFIG) as temporary:
            temporary.write_text(text, encoding="utf-8")
        config = load_yaml(text)
        for logger in trainer.loggers:
            logger.log_hyperparams(config)

    def _plain_config(self) -> dict[str, Any]:
        """Return the config in the form of ``config.yaml``."""
        config: dict[str, Any] = load_yaml(dump_config(self.config, self.parser))
        return config


def dump_config(config: Namespace, parser: LightningArgumentParser) -> str:
    """Return the text of ``config.yaml``. It is not validated again: that takes most of the time.

    Args:
        config: A config that the parser has returned.
        parser: The parser.
    """
    text: str = parser.dump(config, skip_none=False, skip_validation=True)
    return text


def add_defaults(saved: dict[str, Any], parser: LightningArgumentParser) -> dict[str, Any]:
    """Add the defaults of the arguments that a saved config lacks: earlier versions had fewer.

    Args:
        saved: The config of a run.
        parser: Parses such a config.

    Returns:
        The complete config, or the saved one if this version cannot parse it.
    """
    exits = parser.exit_on_error
    parser.exit_on_error = False
    try:
        text = dump_config(parser.parse_object(saved), parser)
    except (ArgumentError, TypeError, ValueError, KeyError, AttributeError, ImportError):
        return saved
    finally:
        parser.exit_on_error = exits
    complete: dict[str, Any] = load_yaml(text)
    return complete


def find_changes(file: Path, config: dict[str, Any], complete: Completion) -> str:
    """Describe the differences of a config from that of a run, other than length and processes.

    Args:
        file: The config of the run.
        config: The other config.
        complete: Adds defaults to the run's config.

    Returns:
        The differences, the first of them if there are many; empty if the configs match.
    """
    saved = read_config(file)
    if saved is None:
        return f"no readable {file.name}"
    changes = find_differences([saved, config])
    shared = changes.keys() & flatten(saved).keys()
    if all(map(_may_change, shared)):  # else completing, a fifth of a second, would be in vain
        changes = _differences(saved, config, complete)
    listed = {key: change for key, change in changes.items() if not _may_change(key)}
    return list_changes(listed, _MAX_CHANGES)


def find_config_changes(file: Path, config: dict[str, Any], parser: LightningArgumentParser) -> str:
    """Describe all differences of a config from that of a run, also in its length.

    Folders, loggers and displays are no differences.

    Args:
        file: The config of the run.
        config: The other config.
        parser: Adds defaults to the run's config.

    Returns:
        The differences, the first of them if there are many; empty if the configs match.
    """
    saved = read_config(file)
    if saved is None:
        return f"no readable {file.name}"
    changes = _differences(saved, config, lambda before: add_defaults(before, parser))
    return list_changes(changes, _MAX_CHANGES)


def _may_change(key: str) -> bool:
    """Return whether a resumed run may change an argument: its length, and its processes."""
    return key in _LENGTHS or key.startswith(_PROCESSES)


def find_model_changes(file: Path, config: dict[str, Any], complete: Completion) -> str:
    """Describe the differences of an evaluation's config from that of a run.

    The trainer and the options of evaluations make no difference.

    Args:
        file: The config of the run.
        config: The other config.
        complete: Adds defaults to the run's config.

    Returns:
        The differences, the first of them if there are many; empty without any.
    """
    changes = _differences(read_config(file) or config, config, complete)
    sections = ("model", "data", "federation", "seed_everything")
    listed = {
        key: change
        for key, change in changes.items()
        if key.startswith(sections) and not key.startswith(_EVALUATION_OPTIONS)
    }
    return list_changes(listed, _MAX_CHANGES)


def is_longer(file: Path, config: dict[str, Any]) -> bool:
    """Return whether a config asks for more rounds, or another time, than that of a run."""
    saved = read_config(file) or {}
    before, after = saved.get("trainer") or {}, config.get("trainer") or {}
    more_time = before.get("max_time") != after.get("max_time")
    return _count_rounds(after) > _count_rounds(before) or more_time


def _count_rounds(trainer: dict[str, Any]) -> float:
    """Return the largest number of rounds that the section ``trainer`` allows."""
    limits = [trainer.get("max_epochs"), trainer.get("max_steps")]
    return min(
        (float(limit) for limit in limits if isinstance(limit, int) and limit >= 0),
        default=math.inf,
    )


def _differences(
    saved: dict[str, Any], config: dict[str, Any], complete: Completion
) -> dict[str, list[Any]]:
    """Return the differences of a config from a saved one, whose missing keys have defaults."""
    changes = find_differences([saved, config])
    if changes.keys() - flatten(saved).keys():
        return find_differences([complete(saved), config])
    return changes
