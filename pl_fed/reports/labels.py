"""Short names of runs: the algorithm, and the settings that differ between runs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pl_fed.reports.configs import ClassPath, Config, format_value, settings

_LONG = 60  # characters of a name; longer names are reduced to fewer settings
_SECTIONS = "model data federation trainer"  # the order of settings in a name
_Kinds = dict[tuple[str, tuple[str, ...]], set[str]]  # values of a key within the same classes
_Marks = Mapping[str, str]  # the parts that a name may have, by key


def labels(configs: Sequence[Config]) -> list[str]:
    """Return a short name for each config: its algorithm and its differences from the others.

    The values of an argument are compared only between configs that give it to the same class.
    If a name with all differences were long, names have only the settings needed to tell the
    configs apart. The most distinctive setting comes first, so that even a truncated name is
    distinctive. Further settings are added while they fit, classes first.

    Example:
        >>> ditto = {"class_path": "pl_fed.clients.Ditto"}
        >>> labels([{"model": {**ditto, "init_args": {"lam": lam}}} for lam in (0.1, 1.0)])
        ['Ditto, lam=0.1', 'Ditto, lam=1']
    """
    return label_settings([settings(config) for config in configs])


def label_settings(flat_configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a short name for each config, see :func:`labels`.

    Args:
        flat_configs: The :func:`~pl_fed.reports.configs.settings` of each config.
    """
    kinds: _Kinds = {}
    keys = list(dict.fromkeys(key for config in flat_configs for key in config))
    for key in keys:
        for config in flat_configs:
            values = kinds.setdefault((key, _enclosing_classes(key, config)), set())
            values.add(str(config.get(key)))
    marks = [dict(_marks(config, kinds)) for config in flat_configs]
    full_names = [", ".join(parts.values()) for parts in marks]
    if max(map(len, full_names), default=0) <= _LONG:
        return full_names
    chosen = ["model", *_distinctive_keys(marks)]
    classes_first = sorted(
        keys, key=lambda key: not any(_is_class(config.get(key)) for config in flat_configs)
    )
    for key in classes_first:
        if max(map(len, _names(marks, [*chosen, key]))) <= _LONG:
            chosen.append(key)
    return _names(marks, chosen)


def _names(marks: Sequence[_Marks], chosen: Sequence[str]) -> list[str]:
    keys = dict.fromkeys(chosen)
    return [", ".join(parts[key] for key in keys if key in parts) for parts in marks]


def _marks(config: Mapping[str, Any], kinds: _Kinds) -> Iterator[tuple[str, str]]:
    """Yield a config's algorithm and its differences from the others, by key."""
    yield "model", format_value(config.get("model", "run"))
    for key in sorted(config, key=lambda key: _SECTIONS.find(key.split(".")[0])):
        if key != "model" and len(kinds[key, _enclosing_classes(key, config)]) > 1:
            name = "" if _is_class(config[key]) else f"{_short_key(key)}="
            yield key, f"{name}{format_value(config[key])}"


def _distinctive_keys(marks: Sequence[_Marks]) -> list[str]:
    """Return few keys that tell apart as many configs as all keys do.

    The selection is greedy: the most distinctive key comes first.
    """
    keys = dict.fromkeys(key for parts in marks for key in parts)

    def count_kinds(chosen: Iterable[str]) -> int:
        """Return the number of configs that these keys tell apart."""
        names = list(chosen)
        return len({tuple(parts.get(key) for key in names) for parts in marks})

    chosen: list[str] = []
    while count_kinds(chosen) < count_kinds(keys):
        chosen.append(max(keys, key=lambda key: count_kinds([*chosen, key])))
    return chosen


def _is_class(value: Any) -> bool:
    return isinstance(value, ClassPath)


def _enclosing_classes(key: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the classes around an argument, from the outermost to the one that takes it."""
    parts = key.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
    return tuple(config[prefix] for prefix in prefixes if _is_class(config.get(prefix)))


def _short_key(key: str) -> str:
    """Return the last part of a key, and ``optimizer`` before an optimizer's argument.

    Example:
        >>> _short_key("model.optimizer.lr"), _short_key("federation.engine.name")
        ('optimizer.lr', 'engine')
    """
    parts = key.removesuffix(".name").split(".")
    return ".".join(parts[-2:] if "optimizer" in parts[-2:][0] else parts[-1:])
