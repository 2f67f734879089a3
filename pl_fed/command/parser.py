"""Parser of the command line: YAML configs, short help and errors of one sentence."""

import copy
import os
import re
import sys
from argparse import Action
from collections.abc import Sequence
from typing import Any, NoReturn

import yaml
from jsonargparse import (
    DefaultHelpFormatter,
    Namespace,
    add_instantiator,
    dict_to_namespace,
    set_loader,
)
from lightning.pytorch.cli import LightningArgumentParser
from lightning_utilities.core.enums import StrEnum

from pl_fed.command.config_files import complete_config, find_config_fault, load
from pl_fed.command.help_pages import LIGHTNING_OPTIONS
from pl_fed.command.messages import make_object

_MAX_CLASSES = 12
_YAML = "checked yaml"  # name of the loader of texts in jsonargparse

# Save Lightning's enums, such as `interval` of the callback Timer, as text in config.yaml
yaml.SafeDumper.add_multi_representer(
    StrEnum, lambda dumper, value: dumper.represent_str(value.value)
)

set_loader(_YAML, load, exceptions=(yaml.YAMLError,))
add_instantiator(make_object, object)  # a class that cannot be made is named in the error


class RefusalError(Exception):
    """Refusal: jsonargparse refused a command line, with its message."""


class Parser(LightningArgumentParser):
    """Lightning's parser with short help and short error messages.

    Attributes:
        logger_is_off: Whether the command line turns off the loggers of its configs. Their classes
            are then not imported.
    """

    logger_is_off = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(
            *args, **{"parser_mode": _YAML, **kwargs, "formatter_class": ShortHelpFormatter}
        )

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a refusal; the command line describes it in its own words.

        Raises:
            RefusalError: If an error would end the process.
        """
        if not self.exit_on_error or "JSONARGPARSE_DEBUG" in os.environ:
            super().error(message, ex)
        raise RefusalError(message) from ex

    def get_defaults(self, *args: Any, **kwargs: Any) -> Namespace:
        """Return the defaults; of a default class, only the arguments that its signature sets.

        jsonargparse adds the other arguments of the final class in the end. If the default class
        had them here already, a class that replaces it would keep them: AdamW would have the weight
        decay 0 of the default SGD.
        """
        config: Namespace = super().get_defaults(*args, **kwargs)
        for action in self._actions:
            if isinstance(action.default, dict) and "class_path" in action.default:
                config[action.dest] = dict_to_namespace(action.default)
        return config

    def parse_args(self, args: Sequence[str] | None = None, **kwargs: Any) -> Namespace:  # type: ignore[override]
        """Parse a command line; one that begins with a subcommand only by that subcommand's parser.

        The parser of all subcommands would complete its values again, in as much time.
        """
        words = sys.argv[1:] if args is None else args
        action = self._subcommands_action
        prints = any(word.startswith("--p") for word in words)  # --print_config, also abbreviated
        if action is None or kwargs or prints or not words or words[0] not in action.choices:
            config: Namespace = super().parse_args(args, **kwargs)
            return config
        config = self.get_defaults()
        config[action.dest] = words[0]
        config[words[0]] = action.choices[words[0]].parse_args(words[1:])
        return config

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Namespace:
        """Parse a config file.

        Raises:
            TypeError: If the file is no config; the message names it, because there may be several.
        """
        if fault := find_config_fault(path):
            raise TypeError(
                f"Expected argument `config` to be a file of YAML with sections but got {path}:"
                f" {fault}."
            )
        config: Namespace = super().parse_path(path, *args, **kwargs)
        return config

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Namespace:
        """Parse the text of a config; empty sections get their defaults."""
        content = complete_config(content, self.logger_is_off)
        config: Namespace = super().parse_string(content, *args, **kwargs)
        return config


class ShortHelpFormatter(DefaultHelpFormatter):
    """Help formatter that lists at most a dozen classes per argument; torch has hundreds.

    Arguments of Lightning that mean something else in a federation have a text of pl_fed.
    """

    def _expand_help(self, action: Action) -> str:
        action = copy.copy(action)
        action.help = LIGHTNING_OPTIONS.get(action.dest, action.help)
        text: str = super()._expand_help(action)
        return re.sub(r"known subclasses: ([^()]*)", _shorten_classes, text, flags=re.DOTALL)


def _shorten_classes(match: re.Match[str]) -> str:
    """Shorten a list of classes, with pl_fed's own first."""
    names = match.group(1).split(", ")
    if len(names) <= _MAX_CLASSES:
        return match.group(0)
    own = [name for name in names if name.startswith("pl_fed.")]
    foreign = [name for name in names if not name.startswith("pl_fed.")]
    listed = [*own, *foreign][:_MAX_CLASSES]
    return f"known subclasses: {', '.join(listed)}, … ({len(names)} in total)"
