"""The configs that come with pl_fed, found by their names."""

import itertools
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")  # in a wheel, in a repository


def find_configs() -> dict[str, Path]:
    """Return the paths of the configs by name, such as ``ditto``."""
    for folder in _FOLDERS:
        if (folder / "quickstart.yaml").is_file():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def resolve_config_names(arguments: Sequence[str]) -> list[str]:
    """Return a command line in which each name of a config is replaced by its path.

    A file takes precedence over a config of the same name. Other words stay unchanged.

    Args:
        arguments: The command line without the program's name.

    Example:
        >>> resolve_config_names(["fit", "--config", "quickstart"])[2].endswith("quickstart.yaml")
        True
        >>> resolve_config_names(["fit", "--config=mine.yaml"])
        ['fit', '--config=mine.yaml']
    """
    resolved: list[str] = []
    for word in arguments:
        if resolved and resolved[-1] in ("--config", "-c"):
            word = _resolve(word)
        elif word.startswith("--config="):
            word = f"--config={_resolve(word.removeprefix('--config='))}"
        resolved.append(word)
    return resolved


def put_configs_first(arguments: Sequence[str]) -> list[str]:
    """Return a command line with its configs in front of its options: the options win.

    jsonargparse lets a later word win, so that a config would undo the options before it. Configs
    keep their order, and so do options.

    Args:
        arguments: The command line without the program's name.

    Example:
        >>> put_configs_first(["fit", "--model", "Ditto", "--config", "a", "--seed_everything=1"])
        ['fit', '--config', 'a', '--model', 'Ditto', '--seed_everything=1']
    """
    configs: list[str] = []
    options: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in ("--config", "-c") and (value := next(words, None)) is not None:
            configs += [word, value]
        elif word.startswith("--config="):
            configs.append(word)
        else:
            options.append(word)
    commands = list(itertools.takewhile(lambda word: not word.startswith("-"), options))
    return [*commands, *configs, *options[len(commands) :]]


def _resolve(name: str) -> str:
    """Return the path of a config by its name; any other text unchanged."""
    path = find_configs().get(name.removesuffix(".yaml"))
    return name if path is None or Path(name).is_file() else str(path)
