"""What configs say, and in what they differ."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Config = Mapping[str, Any]
PYTHON_CONFIG = "python_config.yaml"  # what a run from Python was made of

_SEEDS = {"seed_everything": "", "data.seed": "data ", "federation.seed": "federation "}
_OUTPUTS = (  # where results go, and what is shown on the way: they change no result
    *("trainer.default_root_dir", "trainer.logger", "trainer.log_every_n_steps"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary"),
    *("federation.storage.folder", "ckpt_path", "weights_only", "config"),
)


class ClassPath(str):
    """The path of a class, as configs name it."""

    __slots__ = ()

    @property
    def short(self) -> str:
        """The name of the class."""
        return self.rpartition(".")[2]


def dotted(config: Config) -> dict[str, Any]:
    """Return a config with keys as on the command line, one for each value.

    A class stands under the key of the argument that takes it.

    Example:
        >>> dotted({"model": {"class_path": "pl_fed.clients.Ditto", "init_args": {"lam": 0.1}}})
        {'model': 'pl_fed.clients.Ditto', 'model.lam': 0.1}
    """
    return dict(_entries(config, ""))


def _entries(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and "class_path" in value:
        yield key, ClassPath(value["class_path"])
        value = {**_mapping_at(value, "init_args"), **_mapping_at(value, "dict_kwargs")}
        if not value:
            return
    if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from _entries(each, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def settings(config: Config, seeds: bool = False) -> dict[str, Any]:
    """Return what may change results, by dotted key: no folders, no loggers, nothing that is null.

    Args:
        config: A config.
        seeds: Whether the seeds are among them.
    """
    left_out = (*_OUTPUTS, *(() if seeds else _SEEDS))
    return {
        key: value
        for key, value in dotted(config).items()
        if value is not None
        and not key.endswith(".dirpath")
        and not any(key == name or key.startswith(f"{name}.") for name in left_out)
    }


def identity(config: Config) -> str:
    """Return what runs share that differ in nothing but the seed."""
    return json.dumps(settings(config), sort_keys=True, default=str)


def group_name(config: Config) -> str:
    """Return a short name that runs share which differ in nothing but the seed.

    Example:
        >>> config = {"model": {"class_path": "pl_fed.clients.Ditto"}, "seed_everything": 3}
        >>> group_name(config), group_name({**config, "seed_everything": 4})
        ('Ditto-c266ce15', 'Ditto-c266ce15')
    """
    digest = hashlib.sha256(identity(config).encode()).hexdigest()
    return f"{algorithm(config)}-{digest[:8]}"


def algorithm(config: Config) -> str:
    """Return the name of the client's class."""
    return ClassPath(dotted(config).get("model") or "run").short


def seed(config: Config) -> str:
    """Return the seeds of a run: of everything, and of a part that has its own."""
    found = dotted(config)
    given = [f"{what}{found[key]}" for key, what in _SEEDS.items() if found.get(key) is not None]
    return ", ".join(given)


def byzantine_share(config: Config) -> float | None:
    """Return the share of Byzantine clients, in [0, 1]; ``None`` if the config does not tell it.

    Ids are a share of the number of clients, which only the data may tell.
    """
    arguments = dotted(config)
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


def differing(configs: Sequence[Config]) -> dict[str, list[Any]]:
    """Return the keys in which configs differ, each with its values; ``None`` where there is none.

    Example:
        >>> differing([{"model": {"lam": lam, "mu": 0.5}} for lam in (0.1, 1.0)])
        {'model.lam': [0.1, 1.0]}
    """
    found = [settings(config, seeds=True) for config in configs]
    keys = dict.fromkeys(key for each in found for key in each)
    table = {key: [each.get(key) for each in found] for key in keys}
    return {key: row for key, row in table.items() if any(value != row[0] for value in row)}


def shown(value: Any) -> str:
    """Return a value as it is shown: a class by its name, a null as a dash."""
    if value is None:
        return "–"
    if isinstance(value, ClassPath):
        return value.short
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def said(config: Config, *keys: str) -> str:
    """Return what a part of a config says, described in a few words."""
    given: Any = config
    for key in keys:
        given = given.get(key) if isinstance(given, Mapping) else None
    return described(given)


def described(given: Any) -> str:
    """Return a class with the arguments that it is given, of those that are set.

    Example:
        >>> described({"class_path": "pl_fed.partitioners.Shards", "init_args": {"classes": 2}})
        'Shards(classes=2)'
    """
    if isinstance(given, list):
        return ", ".join(map(described, given)) or "–"
    if not isinstance(given, Mapping) or "class_path" not in given:
        return shown(given)
    arguments = [
        f"{name}={_argument(value)}"
        for name, value in _mapping_at(given, "init_args").items()
        if value is not None and value is not False
    ]
    name = ClassPath(given["class_path"]).short
    return f"{name}({', '.join(arguments)})" if arguments else name


def _argument(value: Any) -> str:
    return f"[{', '.join(map(_argument, value))}]" if isinstance(value, list) else described(value)


def _mapping_at(section: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping under a key; an empty one where a damaged config has something else."""
    value = section.get(key)
    return value if isinstance(value, Mapping) else {}
