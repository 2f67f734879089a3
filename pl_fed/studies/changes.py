"""Changes of a config: layers, and values of arguments by their paths."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pl_fed.command.messages import suggest_name
from pl_fed.command.shipped_configs import find_configs
from pl_fed.studies.readers import StudyError, refuse

_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_OF_A_CLASS = {"class_path", "init_args", "dict_kwargs"}
_OF_THE_STUDY = {  # arguments that a study sets by itself
    "seed_everything": "set the study's `seeds`",
    "trainer.default_root_dir": "set `options.folder`",
    "ckpt_path": "leave it out: a study resumes its runs by itself",
    "config": "write it as a layer",
}


@dataclass(frozen=True)
class Change:
    """Change: how a study changes a config.

    Attributes:
        layers: Names or paths of configs; a later one wins.
        overrides: Values by the paths of arguments, such as ``model.lam``. They win over all
            layers, as on the command line.
    """

    layers: tuple[str, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __add__(self, other: "Change") -> "Change":
        """Return both changes; where they contradict each other, the second one wins."""
        return Change(self.layers + other.layers, {**self.overrides, **other.overrides})

    def words(self) -> list[str]:
        """Return the change as words of a command line.

        A class comes before its arguments: a later class could not take them all.
        """
        layers = [word for layer in self.layers for word in ("--config", layer)]
        paths = sorted(self.overrides, key=lambda path: (path.count("."), path))
        return [*layers, *(f"--{path}={format_override(self.overrides[path])}" for path in paths)]


def read_change(path: str, value: Any) -> Change:
    """Return the change that a study file describes.

    Args:
        path: The path of the value in the study.
        value: The name of a layer, a mapping of overrides, or a list of both.

    Raises:
        StudyError: If the value describes none, or a layer does not exist.
    """
    change = Change()
    for part in value if isinstance(value, list | tuple) else [value]:
        if isinstance(part, Mapping):
            change += Change(overrides=_read_overrides(path, part))
        elif isinstance(part, str) and part.strip():
            change += Change(layers=(_read_layer(path, part),))
        else:
            refuse(path, "be names of configs, values of arguments by their paths, or both", part)
    return change


def _read_layer(path: str, name: str) -> str:
    """Return the name of a layer that exists."""
    configs = find_configs()
    if Path(name).is_file() or name.removesuffix(".yaml") in configs:
        return name
    raise StudyError(
        f"Expected argument `{path}` to name configs but got {name}: there is no such file, and no"
        f" such config in the package{suggest_name(name, list(configs))}."
    )


def find_layer(name: str) -> Path:
    """Return the file of a layer; a file wins over a config of the package of the same name."""
    return Path(name) if Path(name).is_file() else find_configs()[name.removesuffix(".yaml")]


def _read_overrides(path: str, value: Mapping[Any, Any]) -> dict[str, Any]:
    """Return overrides by the full paths of their arguments."""
    overrides = dict(flatten_overrides(value))
    for name, item in overrides.items():
        check_path(path, name)
        if isinstance(item, float) and math.isnan(item):
            refuse(f"{path}.{name}", "be a number", "NaN")
    return overrides


def check_path(path: str, name: str) -> None:
    """Refuse a path that cannot belong to an argument of a config.

    Args:
        path: The path of the value in the study.
        name: The path of the argument.

    Raises:
        StudyError: If the study sets the argument by itself, or the path is none.
    """
    if name in _OF_THE_STUDY:
        refuse(path, "leave the study's own arguments alone", name, _OF_THE_STUDY[name])
    if not _PATH.fullmatch(name):
        refuse(path, "have paths of arguments, such as model.lam,", name)


def flatten_overrides(value: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the values of a nested mapping by their dotted paths; a class stays one value.

    Example:
        >>> flatten_overrides({"model": {"lam": 1}, "trainer.max_epochs": 2})
        [('model.lam', 1), ('trainer.max_epochs', 2)]
    """
    overrides: list[tuple[str, Any]] = []
    for name, item in value.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(item, Mapping) and item and not _OF_A_CLASS & item.keys():
            overrides += flatten_overrides(item, path)
        else:
            overrides.append((path, item))
    return overrides


def format_override(value: Any) -> str:
    """Return a value as a word of a command line.

    Example:
        >>> [format_override(value) for value in (True, None, 0.1, "Median", [1, 2])]
        ['true', 'null', '0.1', 'Median', '[1, 2]']
        >>> print(format_override({"class_path": "Dirichlet", "init_args": {"beta": math.inf}}))
        {"class_path": "Dirichlet", "init_args": {"beta": .inf}}
    """
    return value if isinstance(value, str) else _format_nested(value)


def _format_nested(value: Any) -> str:
    """Return a value as JSON, with infinite numbers as in YAML: JSON has none."""
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    if isinstance(value, Mapping):
        names = [name if isinstance(name, str) else json.dumps(name) for name in value]
        items = zip(map(json.dumps, names), map(_format_nested, value.values()))
        return f"{{{', '.join(f'{name}: {item}' for name, item in items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format_nested, value))}]"
    return json.dumps(value)
