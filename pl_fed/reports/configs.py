"""Settings of configs, as text, and the differences between configs."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml

from pl_fed.plain_yaml import load_yaml

Config = Mapping[str, Any]
PYTHON_CONFIG = "python_config.yaml"  # describes the objects of a run from Python

_SEEDS = {"seed_everything": "", "data.seed": "data ", "federation.seed": "federation "}
_OUTPUTS = (  # folders, loggers, displays and further statistics: they change no result
    *("trainer.default_root_dir", "trainer.logger", "trainer.log_every_n_steps"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary"),
    *("federation.storage.folder", "federation.statistics"),
    *("ckpt_path", "weights_only", "config"),
)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # five times as fast with libyaml
_SECTION_START = re.compile(r"(?m)^(?=[A-Za-z_]\w*:(?:\s|$))")


class ClassPath(str):
    """The dotted path of a class, as configs name it."""

    __slots__ = ()

    @property
    def short(self) -> str:
        """The name of the class."""
        return self.rpartition(".")[2]


class Section:
    """Section: top-level keys of a loaded config with their constant values.

    The configs of a study differ in few sections. Equal sections are read, flattened and written
    once.

    Args:
        values: The values by top-level key.
    """

    def __init__(self, values: Config) -> None:
        self.values = values

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The values by their command-line keys."""
        return dict(_entries(self.values, ""))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that may change results, with the seeds."""
        return _select_settings(self.flat, _OUTPUTS)

    @cached_property
    def settings_without_seeds(self) -> dict[str, Any]:
        """The settings that may change results, without the seeds."""
        return _select_settings(self.flat, (*_OUTPUTS, *_SEEDS))

    @cached_property
    def text(self) -> str:
        """The section as YAML."""
        return str(yaml.dump(dict(self.values), Dumper=_Dumper, sort_keys=False))


class LoadedConfig(dict[str, Any]):
    """Loaded config: the constant config of a run.

    Args:
        sections: The sections, without a key in common.

    Attributes:
        sections: The sections.
    """

    def __init__(self, sections: Sequence[Section]) -> None:
        super().__init__(item for section in sections for item in section.values.items())
        self.sections = sections

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The values by their command-line keys."""
        return {key: value for section in self.sections for key, value in section.flat.items()}


def load(text: str) -> LoadedConfig | None:
    """Return the config in a YAML text, or ``None`` if the text is no mapping.

    Raises:
        yaml.YAMLError: If the text is not YAML.
    """
    try:
        return LoadedConfig(_load_sections(text))
    except (ValueError, yaml.YAMLError):  # unusual YAML: aliases, or quoted keys, for example
        values = load_yaml(text)
        return LoadedConfig([Section(values)]) if isinstance(values, dict) else None


def read_config(file: Path) -> dict[str, Any] | None:
    """Return the config in a file; ``None`` if it cannot be read, or holds none."""
    try:
        config = load_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return config if isinstance(config, dict) else None


def _load_sections(text: str) -> list[Section]:
    """Return the sections of a config with one plain key at the beginning of each section."""
    head, *parts = _SECTION_START.split(text)
    if not parts:
        raise ValueError("no section")
    parts[0] = head + parts[0]  # comments at the top
    sections = [_load_section(part) for part in parts]
    names = {name for section in sections for name in section.values}
    if len(names) < len(sections) or "class_path" in names:
        raise ValueError("repeated keys, or a class in place of a config")
    return sections


@lru_cache(maxsize=4096)
def _load_section(text: str) -> Section:
    values = load_yaml(text)
    if not isinstance(values, dict) or len(values) != 1 or not isinstance(next(iter(values)), str):
        raise ValueError("not one section")
    return Section(values)


def dump(config: Config) -> str:
    """Return a config as YAML."""
    sections = config.sections if isinstance(config, LoadedConfig) else [Section(config)]
    return "".join(section.text for section in sections)


def flatten(config: Config) -> Mapping[str, Any]:
    """Return the values of a config by their command-line keys.

    The key of an argument that takes a class holds the path of the class.

    Example:
        >>> flatten({"model": {"class_path": "pl_fed.clients.Ditto", "init_args": {"lam": 0.1}}})
        {'model': 'pl_fed.clients.Ditto', 'model.lam': 0.1}
    """
    return config.flat if isinstance(config, LoadedConfig) else dict(_entries(config, ""))


def _entries(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and "class_path" in value:
        yield key, ClassPath(value["class_path"])
        value = {**_mapping_at(value, "init_args"), **_mapping_at(value, "dict_kwargs")}
        if not value:
            return
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _entries(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def settings(config: Config, seeds: bool = False) -> dict[str, Any]:
    """Return the settings that may change results, by dotted key.

    Folders, loggers and settings that are ``None`` are left out.

    Args:
        config: A config.
        seeds: Whether to include the seeds.
    """
    sections = config.sections if isinstance(config, LoadedConfig) else [Section(config)]
    parts = [part.settings if seeds else part.settings_without_seeds for part in sections]
    return {key: value for part in parts for key, value in part.items()}


def _select_settings(values: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    """Return the values that are not ``None``, without ignored keys and all keys below them."""
    return {
        key: value
        for key, value in values.items()
        if value is not None
        and not key.endswith(".dirpath")
        and not any(key == name or key.startswith(f"{name}.") for name in ignored)
    }


def identity(config: Config) -> str:
    """Return a text that is equal for two configs if they differ only in seeds or outputs."""
    return json.dumps(settings(config), sort_keys=True, default=str)


def group_name(config: Config) -> str:
    """Return a short name for the group of runs that differ only in the seed.

    Example:
        >>> config = {"model": {"class_path": "pl_fed.clients.Ditto"}, "seed_everything": 3}
        >>> group_name(config), group_name({**config, "seed_everything": 4})
        ('Ditto-c266ce15', 'Ditto-c266ce15')
    """
    digest = hashlib.sha256(identity(config).encode()).hexdigest()
    return f"{algorithm(config)}-{digest[:8]}"


def algorithm(config: Config) -> str:
    """Return the name of the client's class."""
    return ClassPath(flatten(config).get("model") or "run").short


def describe_seeds(config: Config) -> str:
    """Return a run's global seed, and the seeds of the data and the federation if they are set."""
    values = flatten(config)
    seeds = [
        f"{prefix}{values[key]}" for key, prefix in _SEEDS.items() if values.get(key) is not None
    ]
    return ", ".join(seeds)


def byzantine_share(config: Config) -> float | None:
    """Return the share of Byzantine clients, in [0, 1], or ``None`` if the config lacks it.

    A config that lists the ids of Byzantine clients has a share only if it also has
    ``data.num_clients``.
    """
    arguments = flatten(config)
    fraction, ids = (arguments.get(f"federation.adversary.{name}") for name in ("fraction", "ids"))
    if not {"federation.adversary.fraction", "federation.adversary.ids"} & arguments.keys():
        return None
    if not arguments.get("federation.adversary.attack"):
        return 0.0
    if not ids:
        return float(fraction or 0.0) if isinstance(fraction, int | float | None) else None
    clients = arguments.get("data.num_clients")
    if not isinstance(ids, list) or not isinstance(clients, int):  # long lists are text
        return None
    return len(ids) / clients if clients else None


def find_differences(configs: Sequence[Config]) -> dict[str, list[Any]]:
    """Return the settings that differ between configs, including seeds.

    Returns:
        For each differing key, its value in each config; ``None`` for a config without the key.

    Example:
        >>> find_differences([{"model": {"lam": lam, "mu": 0.5}} for lam in (0.1, 1.0)])
        {'model.lam': [0.1, 1.0]}
    """
    rows = [settings(config, seeds=True) for config in configs]
    keys = dict.fromkeys(key for row in rows for key in row)
    table = {key: [row.get(key) for row in rows] for key in keys}
    return {
        key: values for key, values in table.items() if any(value != values[0] for value in values)
    }


def list_changes(changes: Mapping[str, Sequence[Any]], most: int | None = None) -> str:
    """Describe the differences of two configs, from the first to the second.

    Args:
        changes: The two values of each argument, from :func:`find_differences`.
        most: The largest number of arguments; ``None`` describes all.

    Example:
        >>> list_changes({"model.lam": [1, 2], "seed": [0, 1]}, most=1)
        'model.lam 1 → 2, 1 more'
    """
    texts = [
        f"{key} {format_value(saved)} → {format_value(value)}"
        for key, (saved, value) in changes.items()
    ]
    more = [] if most is None or len(texts) <= most else [f"{len(texts) - most} more"]
    return ", ".join([*texts[:most], *more])


def format_value(value: Any) -> str:
    """Return a value as text: a class as its name, ``None`` as a dash."""
    if value is None:
        return "–"
    if isinstance(value, ClassPath):
        return value.short
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe_at(config: Config, *keys: str) -> str:
    """Return a description of the part of a config under nested keys."""
    section: Any = config
    for key in keys:
        section = section.get(key) if isinstance(section, Mapping) else None
    return describe(section)


def describe(section: Any) -> str:
    """Return a class with its arguments, except those that are ``None`` or false.

    Example:
        >>> describe({"class_path": "pl_fed.partitioners.Shards", "init_args": {"classes": 2}})
        'Shards(classes=2)'
    """
    if isinstance(section, list):
        return ", ".join(map(describe, section)) or "–"
    if not isinstance(section, Mapping) or "class_path" not in section:
        return format_value(section)
    arguments = [
        f"{name}={_argument(value)}"
        for name, value in _mapping_at(section, "init_args").items()
        if value is not None and value is not False
    ]
    name = ClassPath(section["class_path"]).short
    return f"{name}({', '.join(arguments)})" if arguments else name


def _argument(value: Any) -> str:
    return f"[{', '.join(map(_argument, value))}]" if isinstance(value, list) else describe(value)


def _mapping_at(section: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping under a key, or an empty one if a damaged config has something else."""
    value = section.get(key)
    return value if isinstance(value, Mapping) else {}
