"""Axes of a study: the values that its cells combine."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pl_fed.reports.configs import describe as describe_class
from pl_fed.reports.configs import flatten
from pl_fed.studies.changes import Change, check_path, read_change
from pl_fed.studies.readers import StudyError, read_list, read_mapping, refuse

SHORT_NAMES = {
    "aggregator": "federation.aggregator",
    "algorithm": "model",
    "attack": "federation.adversary.attack",
    "batch_size": "data.batch_size",
    "beta": "data.partitioner.beta",
    "cohort_size": "federation.sampler.cohort_size",
    "dataset": "data.dataset",
    "fraction": "federation.adversary.fraction",
    "lam": "model.lam",
    "local_epochs": "model.local_epochs",
    "local_steps": "model.local_steps",
    "lr": "model.optimizer.lr",
    "net": "model.net",
    "num_clients": "data.num_clients",
    "partitioner": "data.partitioner",
    "rounds": "trainer.max_epochs",
    "sampler": "federation.sampler",
}
"""Short names of axes, and the arguments that lists of their values set."""

SECTIONS = ("model", "data", "federation", "trainer")
RESERVED = ("seed", "status", "cell", "config_digest")  # names of columns in the table of results
_NAME = re.compile(r"[A-Za-z_][\w.-]*")


@dataclass(frozen=True)
class Axis:
    """Axis: named values of a study.

    Attributes:
        name: The name, such as ``attack``.
        changes: The change of the config for each label.
    """

    name: str
    changes: Mapping[str, Change]

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in their order."""
        return tuple(self.changes)


def read_axes(value: Any) -> tuple[Axis, ...]:
    """Return the axes that a study file describes.

    Raises:
        StudyError: If the value describes none.
    """
    axes = tuple(_read_axis(name, item) for name, item in read_mapping("axes", value).items())
    for place, axis in enumerate(axes):
        for other in axes[:place]:
            _check_independent(other, axis)
    return axes


def _read_axis(name: str, value: Any) -> Axis:
    path = f"axes.{name}"
    if not _NAME.fullmatch(name) or name in RESERVED:
        expected = f"have names of letters, digits, _, . and -, other than {', '.join(RESERVED)},"
        refuse("axes", expected, name)
    if isinstance(value, list | tuple):
        changes = dict(_read_values(path, _argument(path, name), list(value)))
    else:
        labels = read_mapping(path, value)
        changes = {
            label: read_change(f"{path}.{label}", {} if item is None else item)
            for label, item in labels.items()
        }
    if not changes:
        refuse(path, "have at least one value", value)
    _check_labels(path, list(changes))
    return Axis(name, changes)


def _argument(path: str, name: str) -> str:
    """Return the argument that the values of an axis set."""
    argument = SHORT_NAMES.get(name, name)
    if argument.split(".")[0] not in SECTIONS:
        raise StudyError(
            f"Expected argument `{path}` to be a mapping of labels, or to be named by the path of"
            f" an argument such as model.lam or by one of {', '.join(SHORT_NAMES)}, but got a list"
            " of values."
        )
    check_path(path, argument)
    return argument


def _read_values(path: str, argument: str, values: list[Any]) -> Iterator[tuple[str, Change]]:
    """Yield a label and a change for each value of a list."""
    labels = set()
    for value in read_list(path, values):
        is_class = isinstance(value, Mapping) and "class_path" in value
        if isinstance(value, Mapping) and not is_class:
            refuse(path, "be values of an argument", value, "write a mapping of labels")
        label = "null" if value is None else str(describe_class(value))
        if label in labels:
            refuse(path, "have each value once", label, "leave one of them out")
        labels.add(label)
        yield label, Change(overrides={argument: value})


def _check_labels(path: str, labels: list[str]) -> None:
    """Refuse labels that differ in case alone: some file systems cannot tell them apart."""
    folded: dict[str, str] = {}
    for label in labels:
        if not label.strip() or not label.isprintable():
            refuse(path, "have labels of printable text", repr(label))
        other = folded.setdefault(label.casefold(), label)
        if other != label:
            refuse(path, "have labels that differ in more than case", f"{other} and {label}")


def list_shared(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the paths that name the same argument, also if one has ``init_args``.

    A value that is a class with arguments sets its arguments, too.

    Args:
        first: Values by the paths of arguments.
        second: Other values by the paths of arguments.

    Example:
        >>> list_shared({"model.lam": 1, "data.seed": 0}, {"model.init_args.lam": 2})
        ['model.lam']
        >>> krum = {"class_path": "Krum", "init_args": {"num_byzantine": 1}}
        >>> list_shared({"federation.aggregator": krum}, {"federation.aggregator.num_byzantine": 2})
        ['federation.aggregator.num_byzantine']
    """
    others = set(_list_arguments(second))
    return [path for path in _list_arguments(first) if path in others]


def _list_arguments(values: Mapping[str, Any]) -> list[str]:
    """Return the paths of all arguments that some values set, without ``init_args``."""
    paths = [path for name, value in values.items() for path in flatten({name: value})]
    return [path.replace(".init_args.", ".") for path in paths]


def _check_independent(first: Axis, second: Axis) -> None:
    """Refuse two axes that set the same argument: one would undo the other."""
    for label, change in first.changes.items():
        for other, later in second.changes.items():
            for argument in list_shared(change.overrides, later.overrides):
                raise StudyError(
                    f"Expected argument `axes.{second.name}` to set other arguments than"
                    f" `axes.{first.name}` but got {argument}, which {first.name}={label} and"
                    f" {second.name}={other} both set: set it on one axis."
                )
