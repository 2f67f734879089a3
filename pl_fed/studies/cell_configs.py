"""Complete configs of cells, parsed and checked as ``python -m pl_fed fit`` would."""

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pl_fed.command.messages import first_refusal, summarize
from pl_fed.command.run_files import active_loggers
from pl_fed.command.saved_config import dump_config, find_config_changes
from pl_fed.command.sections import SectionsCLI
from pl_fed.plain_yaml import load_yaml

_SEVERAL_PROCESSES = ("ddp", "fsdp", "deepspeed", "hsdp", "model_parallel")


class InvalidCellError(ValueError):
    """Invalid cell: a config that no run can have; the message is one sentence."""


class CheckCLI(SectionsCLI):
    """Check CLI: parses a config and instantiates its classes, without a run.

    Args:
        args: The words of the command line, without the name of a command.
    """

    def __init__(self, args: list[str]) -> None:
        super().__init__(save_config_callback=None, run=False, args=args)

    def instantiate_classes(self) -> None:
        """Instantiate the model, the data and the federation; loggers would write files."""
        config = self.config.clone()
        config.trainer.logger = active_loggers(False)
        config.trainer.callbacks = None
        self.parser.instantiate_classes(config)

    @property
    def complete_config(self) -> dict[str, Any]:
        """The config in the form of ``config.yaml``."""
        config: dict[str, Any] = load_yaml(dump_config(self.config, self.parser))
        return config


def check_config(arguments: list[str]) -> CheckCLI:
    """Parse and check the config of a cell.

    Args:
        arguments: The words of the command line, without the name of the command.

    Raises:
        InvalidCellError: If ``fit`` would refuse it before it reads data.
    """
    output = io.StringIO()
    try:
        with (
            contextlib.redirect_stderr(output),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            checked = CheckCLI(arguments)
    except SystemExit:
        raise InvalidCellError(first_refusal(output.getvalue())) from None
    except (
        *(ValueError, TypeError, OSError, RuntimeError, ImportError, KeyError),
        *(AttributeError, MisconfigurationException),
    ) as error:
        raise InvalidCellError(summarize(str(error))) from error
    _check_processes(checked.config.trainer)
    _check_attackers(checked.config.federation)
    return checked


def _check_processes(trainer: Namespace) -> None:
    """Refuse runs of several processes: a worker is one process."""
    devices, nodes = trainer.devices, trainer.num_nodes or 1
    count = len(devices) if isinstance(devices, list) else devices
    is_one = count in ("auto", "1", "-1", None, 1)
    strategy = str(trainer.strategy)
    if not is_one or nodes != 1 or any(name in strategy for name in _SEVERAL_PROCESSES):
        raise InvalidCellError(
            "Expected argument `trainer.devices` of a study's run to be 1 but got devices"
            f" {devices}, num_nodes {nodes} and strategy {strategy}: workers of the study use the"
            " cores, so set trainer.devices to 1."
        )


def _check_attackers(federation: Namespace) -> None:
    """Refuse an attack without attackers: the results of the cell would be those of no attack."""
    adversary = federation.adversary
    if adversary.attack is not None and adversary.fraction is None and adversary.ids is None:
        name = adversary.attack.class_path.rpartition(".")[2]
        raise InvalidCellError(
            "Expected argument `federation.adversary.fraction` of a study's run to be given with"
            f" the attack {name} but got none, so that no client would attack: set it in `base`,"
            " for example to 0.2, or to 0 for runs without attackers."
        )


def describe_changes(file: Path, checked: CheckCLI) -> str:
    """Describe the differences between a run's config and that of a cell; empty without any.

    Args:
        file: ``config.yaml`` of the run.
        checked: The config of the cell.
    """
    return find_config_changes(file, checked.complete_config, checked.parser)
