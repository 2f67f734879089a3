"""Sections of a config: model, data, federation and trainer."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

import pl_fed.models
import pl_fed.optimizers  # noqa: F401 (the import makes their short names available)
from pl_fed.clients import Client
from pl_fed.command.config_files import check_arguments, check_values, name_engine
from pl_fed.command.faults import find_fault
from pl_fed.command.hints import format_error, name_config_path
from pl_fed.command.messages import summarize
from pl_fed.command.parser import Parser, RefusalError
from pl_fed.command.saved_config import add_defaults, dump_config
from pl_fed.command.shipped_configs import put_configs_first, resolve_config_names
from pl_fed.command.trainer_arguments import check_trainer_arguments
from pl_fed.command.wandb_runs import is_logger_off
from pl_fed.data import FederatedData
from pl_fed.federation import Federation
from pl_fed.plain_yaml import load_yaml

# Attributes of LightningCLI that hold its parsers and describe their arguments
_PARSERS = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")


class SectionsCLI(LightningCLI):
    """Sections CLI: LightningCLI with the sections model, data, federation and trainer.

    Args:
        args: List of arguments to parse; ``None`` uses the command line.
        **arguments: Further arguments of LightningCLI.
    """

    _shared_parsers: ClassVar[dict[tuple[Any, ...], dict[str, Any]]] = {}

    def __init__(self, args: ArgsType = None, **arguments: Any) -> None:
        self._arguments = sys.argv[1:] if args is None else args
        if isinstance(self._arguments, list):
            args = name_engine(put_configs_first(resolve_config_names(self._arguments)))
        with self._error_paths():
            super().__init__(
                Client,
                FederatedData,
                trainer_class=LightningTrainer,
                seed_everything_default=0,
                parser_class=Parser,
                subclass_mode_model=True,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                args=args,
                **arguments,
            )

    @contextlib.contextmanager
    def _error_paths(self) -> Iterator[None]:
        """Name the argument of an error by its path in the config."""
        try:
            yield
        except (OSError, TypeError, ValueError) as error:
            if error.args and isinstance(error.args[0], str) and hasattr(self, "config"):
                message = name_config_path(error.args[0], self._subcommand_config())
                error.args = (message, *error.args[1:])
            raise

    def _subcommand_config(self) -> dict[str, Any]:
        """Return the config of the called subcommand, or of a command line without subcommands."""
        config: dict[str, Any] = self.config.as_dict()
        return config.get(str(config.get("subcommand"))) or config

    def plain_config(self) -> dict[str, Any]:
        """Return the config of the called subcommand in the form of ``config.yaml``."""
        config: dict[str, Any] = load_yaml(dump_config(self.config, self.parser))
        section: dict[str, Any] = config[str(self.subcommand)]
        return section

    def add_defaults(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a saved config with the defaults of the arguments that it lacks."""
        name = str(self.subcommand)
        complete = add_defaults({"subcommand": name, name: saved}, self.parser)
        config: dict[str, Any] = complete[name]
        return config

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the subcommands that need a parser, with the arguments to skip.

        If the command line starts with a subcommand, only that one needs a parser: building a
        parser takes longer than parsing a command line.
        """
        subcommands = LightningCLI.subcommands()
        name = self._arguments[0] if isinstance(self._arguments, list) and self._arguments else ""
        return {name: subcommands[name]} if name in subcommands else subcommands

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Take the parsers of an earlier command line of this kind, or build them.

        Building a parser takes longer than parsing a command line, and a study parses many.
        """
        kind = (type(self), *self.subcommands(), repr(main_kwargs), repr(subparser_kwargs))
        if kind not in self._shared_parsers:
            super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
            state = vars(self)
            self._shared_parsers[kind] = {name: state[name] for name in _PARSERS if name in state}
        vars(self).update(self._shared_parsers[kind])
        words = self._arguments if isinstance(self._arguments, list) else []
        for parser in (self.parser, *getattr(self, "_subcommand_parsers", {}).values()):
            parser.logger_is_off = is_logger_off(words)
            vars(parser).pop("print_config", None)  # asked for by a refused command line

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the section ``federation``.

        Its sampler has a class, so that ``--federation.sampler.cohort_size`` needs none before it.
        """
        parser.add_class_arguments(Federation, "federation", sub_configs=True)
        parser.set_defaults({"federation.sampler": {"class_path": "pl_fed.samplers.Uniform"}})

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments; exit with one sentence if they are refused.

        Raises:
            ValueError: If a value is invalid for every argument, such as NaN.
        """
        words = sys.argv[1:] if args is None else args
        check_arguments(words if isinstance(words, list) else [])
        try:
            super().parse_arguments(parser, args)
        except UnicodeDecodeError as error:
            raise ValueError(
                "Expected Python to read files as UTF-8 but got"
                f" {error.encoding}: set the environment variable PYTHONUTF8=1."
            ) from None
        except (RefusalError, AttributeError, KeyError, TypeError, ValueError) as error:
            text = find_fault(parser, words) if isinstance(words, list) else ""
            text = text or summarize(str(error))
            if not text.startswith("Expected "):
                text = f"Expected a valid command line but got: {text.rstrip('.')}."
            parser.exit(2, format_error(text, self._arguments))
        config = self._subcommand_config()
        check_trainer_arguments(config.get("trainer") or {})
        check_values(config)
        seed = config["seed_everything"]
        if seed is None or isinstance(seed, bool) or not 0 <= seed < 2**32:
            got = "null" if seed is None else str(seed).lower()
            raise ValueError(
                "Expected argument `seed_everything` to be an integer from 0 to 4294967295 but got"
                f" {got}: set a number, for example 0."
            )
