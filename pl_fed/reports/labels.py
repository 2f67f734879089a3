"""Short names of runs: their algorithm, and in what they differ from others."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pl_fed.reports.configs import ClassPath, Config, settings, shown

_LONG = 60  # letters of a name, beyond which it does not say all
_SECTIONS = "model data federation trainer"  # in the order in which names say what differs
_Kinds = dict[tuple[str, tuple[str, ...]], set[str]]  # values of a key within the same classes
_Marks = Mapping[str, str]  # what a name may say, by key


def labels(configs: Sequence[Config]) -> list[str]:
    """Return a short name for each config: its algorithm, and in what it differs from the others.

    Arguments are compared among those that give them to the same class. Where the names would be
    long, they say what is needed to tell them apart, the most telling first, so that a name that is
    cut still tells; then what fits, classes first.

    Example:
        >>> ditto = {"class_path": "pl_fed.clients.Ditto"}
        >>> labels([{"model": {**ditto, "init_args": {"lam": lam}}} for lam in (0.1, 1.0)])
        ['Ditto, lam=0.1', 'Ditto, lam=1']
    """
    return labels_of([settings(config) for config in configs])


def labels_of(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a short name for each config, given its settings."""
    kinds: _Kinds = {}
    keys = list(dict.fromkeys(key for own in found for key in own))
    for key in keys:
        for own in found:
            values = kinds.setdefault((key, _classes_around(key, own)), set())
            values.add(str(own.get(key)))
    marks = [dict(_marks(own, kinds)) for own in found]
    whole = [", ".join(each.values()) for each in marks]
    if max(map(len, whole), default=0) <= _LONG:
        return whole
    chosen = ["model", *_telling(marks)]
    for key in sorted(keys, key=lambda key: not any(_is_class(own.get(key)) for own in found)):
        if max(map(len, _names(marks, [*chosen, key]))) <= _LONG:
            chosen.append(key)
    return _names(marks, chosen)


def _names(marks: Sequence[_Marks], chosen: Sequence[str]) -> list[str]:
    keys = dict.fromkeys(chosen)
    return [", ".join(each[key] for key in keys if key in each) for each in marks]


def _marks(own: Mapping[str, Any], kinds: _Kinds) -> Iterator[tuple[str, str]]:
    """Yield, by key, a config's algorithm and what tells it from the others."""
    yield "model", shown(own.get("model", "run"))
    for key in sorted(own, key=lambda key: _SECTIONS.find(key.split(".")[0])):
        if key != "model" and len(kinds[key, _classes_around(key, own)]) > 1:
            name = "" if _is_class(own[key]) else f"{_last(key)}="
            yield key, f"{name}{shown(own[key])}"


def _telling(marks: Sequence[_Marks]) -> list[str]:
    """Return few keys that tell apart what all keys do: one after the other, the most telling."""
    keys = dict.fromkeys(key for each in marks for key in each)

    def kinds(chosen: Iterable[str]) -> int:
        names = list(chosen)
        return len({tuple(each.get(key) for key in names) for each in marks})

    chosen: list[str] = []
    while kinds(chosen) < kinds(keys):
        chosen.append(max(keys, key=lambda key: kinds([*chosen, key])))
    return chosen


def _is_class(value: Any) -> bool:
    return isinstance(value, ClassPath)


def _classes_around(key: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the classes that an argument is given to, from the outermost to its own."""
    parts = key.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
    return tuple(config[each] for each in prefixes if _is_class(config.get(each)))


def _last(key: str) -> str:
    """Return the end of a key: of an optimizer's argument, with the optimizer.

    Example:
        >>> _last("model.optimizer.lr"), _last("federation.engine.name")
        ('optimizer.lr', 'engine')
    """
    parts = key.removesuffix(".name").split(".")
    return ".".join(parts[-2:] if "optimizer" in parts[-2:][0] else parts[-1:])
