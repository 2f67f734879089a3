"""Selections of cells by some of their values."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pl_fed.command.messages import suggest_name
from pl_fed.reports.configs import format_value
from pl_fed.studies.axes import Axis
from pl_fed.studies.readers import StudyError, read_mapping, refuse

SEED = "seed"
"""The name that selects cells by their seeds."""


@dataclass(frozen=True)
class Selection:
    """Selection: the cells with some labels.

    Attributes:
        labels: For each axis that matters, the labels of the selected cells.
    """

    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def includes(self, values: Mapping[str, str], seed: int) -> bool:
        """Return whether a cell belongs to the selection.

        Args:
            values: The labels of the cell by axis.
            seed: The seed of the cell.
        """
        all_values = {**values, SEED: str(seed)}
        return all(all_values[name] in labels for name, labels in self.labels.items())


def read_selection(path: str, value: Any, axes: Sequence[Axis]) -> Selection:
    """Return the selection that a study file describes.

    Args:
        path: The path of the value in the study.
        value: A label, or a list of labels, for each axis that matters.
        axes: The axes of the study.

    Raises:
        StudyError: If an axis or a label does not exist.
    """
    if not isinstance(value, Mapping):
        refuse(path, "be a mapping of axes to labels", value)
    labels = {axis.name: axis.labels for axis in axes}
    selected = {}
    for name, item in read_mapping(path, value).items():
        if name not in labels and name != SEED:
            names = [*labels, SEED]
            raise StudyError(
                f"Expected argument `{path}` to name axes of the study ({', '.join(names)}) but got"
                f" {name}{suggest_name(name, names)}."
            )
        items = item if isinstance(item, list | tuple) else [item]
        texts = tuple(_find_label(value, labels.get(name, ())) for value in items)
        for text in texts:
            if name in labels and text not in labels[name]:
                raise StudyError(
                    f"Expected argument `{path}.{name}` to be one of {', '.join(labels[name])} but"
                    f" got {text}{suggest_name(text, list(labels[name]))}."
                )
        selected[name] = texts
    return Selection(selected)


def _find_label(value: Any, labels: Sequence[str]) -> str:
    """Return the label that a value of YAML stands for: 0.1 is also the label ``0.10``."""
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, bool | str) or text in labels:
        return text
    text = format_value(value)
    return text if text in labels else next((x for x in labels if _is_equal(x, value)), text)


def _is_equal(label: str, number: float) -> bool:
    """Return whether a label is a number in another form, such as ``1e-3`` of 0.001."""
    try:
        return float(label) == number
    except ValueError:
        return False


def match_label(text: str, labels: Sequence[str]) -> str:
    """Return the label that a text of a table stands for, else the text.

    Programs for tables write numbers in other forms.

    Example:
        >>> match_label("1.0", ["0.1", "1"]), match_label("Ditto", ["0.1", "1"])
        ('1', 'Ditto')
    """
    if text in labels:
        return text
    try:
        number = float(text)
    except ValueError:
        return text
    return next((label for label in labels if _is_equal(label, number)), text)


def read_only(words: Sequence[str], axes: Sequence[Axis]) -> Selection:
    """Return the selection of words such as ``algorithm=ditto``; the same axis twice means either.

    Raises:
        StudyError: If a word is not of this form, or its axis or label does not exist.
    """
    selected: dict[str, list[str]] = {}
    labels = {axis.name: axis.labels for axis in axes}
    for word in words:
        name, equals, label = word.partition("=")
        if not equals:
            refuse("only", "be an axis and a label, such as algorithm=ditto,", word)
        if "," in label and "=" in label and label not in labels.get(name, ()):
            options = " ".join(f"--only {shlex.quote(part)}" for part in word.split(","))
            refuse("only", f"be one axis and one label, as in `{options}`,", word)
        selected.setdefault(name, []).append(label)
    return read_selection("only", selected, axes)
