"""The parser of the command line: configs of YAML, short help, errors of one sentence."""

import os
import re
from argparse import Action
from typing import Any, NoReturn

import yaml
from jsonargparse import DefaultHelpFormatter, Namespace, set_loader
from lightning.pytorch.cli import LightningArgumentParser
from lightning_utilities.core.enums import StrEnum

from pl_fed.command.config_files import fill_empty_sections, load, wrong_config
from pl_fed.command.messages import printable, sentence

_MOST_CLASSES = 12
_YAML = "checked yaml"  # jsonargparse's name for the function that loads texts

# Timer's argument `interval` is one of Lightning's enums, which config.yaml could not hold
yaml.SafeDumper.add_multi_representer(
    StrEnum, lambda dumper, value: dumper.represent_str(value.value)
)

set_loader(_YAML, load, exceptions=(yaml.YAMLError,))


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


class ShortHelpFormatter(DefaultHelpFormatter):
    """Names at most a dozen classes where an argument takes any: there are hundreds of modules."""

    def _expand_help(self, action: Action) -> str:
        text: str = super()._expand_help(action)
        return re.sub(r"known subclasses: ([^()]*)", _shorten_classes, text, flags=re.DOTALL)


def _shorten_classes(found: re.Match[str]) -> str:
    names = found.group(1).split(", ")
    if len(names) <= _MOST_CLASSES:
        return found.group(0)
    own = [name for name in names if name.startswith("pl_fed.")][:_MOST_CLASSES]
    rest = [name for name in names if not name.startswith("pl_fed.")]
    shown = [*own, *rest[: max(0, _MOST_CLASSES - len(own))]]
    return f"known subclasses: {', '.join(shown)}, … ({len(names)} in all)"
