"""Cells of a study: one run each, with a value of every axis and a seed."""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from yaml import YAMLError

from pl_fed.command.config_files import read_text
from pl_fed.plain_yaml import list_tokens
from pl_fed.studies.best_round import BestRound
from pl_fed.studies.changes import Change, find_layer, format_override
from pl_fed.studies.plans import find_space
from pl_fed.studies.readers import StudyError, refuse
from pl_fed.studies.selection import SEED
from pl_fed.studies.spec import StudySpec

_UNSAFE = re.compile(r"[^\w.+-]")
_MAX_BYTES = 180  # of a folder's name, with room for the suffix of one moved aside
_YAML = (".yaml", ".yml")
_CONFIGS = (*_YAML, ".json")
_DIGITS = 8  # of the hash that tells shortened names apart
_TABLE_DIGITS = 12  # of the hash that tells configs apart in the table of results


@dataclass(frozen=True)
class Cell:
    """Cell: one run of a study.

    Attributes:
        values: Its label on each axis.
        seed: Its seed.
        change: Its config, as layers and overrides.
        best: The choice of the round whose models are tested; ``None`` for the last one.
        is_tuned: Whether its config is known: all values that the study tunes are chosen.
    """

    values: Mapping[str, str]
    seed: int
    change: Change
    best: BestRound | None = None
    is_tuned: bool = True

    @property
    def name(self) -> str:
        """The name, such as ``algorithm=ditto,attack=none,seed=0``."""
        return ",".join(f"{axis}={label}" for axis, label in self.labels.items())

    @property
    def labels(self) -> dict[str, str]:
        """The labels by axis, with the seed."""
        return {**self.values, SEED: str(self.seed)}

    @property
    def condition(self) -> str:
        """The name without the seed; empty in a study without axes."""
        return ",".join(f"{axis}={label}" for axis, label in self.values.items())

    @property
    def path(self) -> str:
        """The folder below that of the study, such as ``algorithm=ditto,attack=none/seed=0``."""
        seed = f"{SEED}={self.seed}"
        return f"{folder_name(self.values)}/{seed}" if self.values else seed

    @cached_property
    def arguments(self) -> list[str]:
        """The words of the command line ``fit``, without the name of the command."""
        return [*self.change.words(), f"--seed_everything={self.seed}"]

    @property
    def is_tested(self) -> bool:
        """Whether its run is tested after the fit."""
        return True

    @property
    def best_words(self) -> list[str]:
        """The metric and the mode that choose the tested round; empty for the last round."""
        return [] if self.best is None else [self.best.metric, self.best.mode]

    @cached_property
    def digest(self) -> str:
        """A hash of the words and of all layers but comments: equal inputs give equal configs."""
        return _hash([*self.best_words, *self.arguments, *self._read_layers()])

    @cached_property
    def config_digest(self) -> str:
        """A short hash of its config in the table of results: without the seed and names of layers.

        It is the same on another machine, unless a value is a path.
        """
        values = Change(overrides=self.change.overrides).words()
        return _hash([*self.best_words, *values, *self._read_layers()])[:_TABLE_DIGITS]

    def _read_layers(self) -> list[str]:
        """Return the texts of all layers and config files, without comments.

        A config file is a value of an argument, or a part of one, or such a value in another file.
        """
        files = [*map(find_layer, self.change.layers), *self._list_config_files()]
        for value in self.change.overrides.values():
            files += _list_named_files(format_override(value), Path(), files)
        for file in files:  # the list grows by the files that its files name
            files += _list_named_files(read_text(file), file.parent, files)
        return [_remove_comments(read_text(file)) for file in files]

    def _list_config_files(self) -> list[Path]:
        """Return the config files that are values of arguments, such as ``model: ditto.yaml``."""
        values = [str(value) for value in self.change.overrides.values()]
        return [Path(v) for v in values if v.endswith(_CONFIGS) and Path(v).is_file()]


def _list_named_files(text: str, folder: Path, listed: Sequence[Path]) -> list[Path]:
    """Return the YAML files that a YAML text names, from its folder or the current one.

    Args:
        text: The text.
        folder: The folder of the text.
        listed: Files that are left out.
    """
    places = [place / name for name in _list_file_names(text) for place in (folder, Path())]
    return [path for path in dict.fromkeys(places) if path not in listed and path.is_file()]


@lru_cache
def _list_file_names(text: str) -> tuple[str, ...]:
    """Return the scalars of a YAML text that are names of YAML files."""
    if not any(suffix in text for suffix in _YAML):
        return ()
    try:
        values = [value for _, value, _ in list_tokens(text) if isinstance(value, str)]
    except YAMLError:
        return ()
    return tuple(value for value in values if value.endswith(_YAML))


def _hash(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode())
    return digest.hexdigest()


@lru_cache
def _remove_comments(text: str) -> str:
    """Return the tokens of a YAML text, in which comments, blank lines and line ends are gone."""
    try:
        return repr(list_tokens(text))
    except YAMLError:
        return text


def folder_name(values: Mapping[str, str]) -> str:
    """Return the name of a folder for some labels; a hash replaces characters that are not safe.

    Args:
        values: The labels by axis.

    Example:
        >>> folder_name({"attack": "none", "aggregator": "Median"})
        'attack=none,aggregator=Median'
        >>> folder_name({"net": "MLP(64, 10)"})
        'net=MLP_64__10_-38604cf1'
    """
    parts = [f"{axis}={_UNSAFE.sub('_', label)}" for axis, label in values.items()]
    name = ",".join(parts)
    is_safe = all(_UNSAFE.search(label) is None for label in values.values())
    if is_safe and len(name.encode()) <= _MAX_BYTES:
        return name
    digest = hashlib.sha256(json.dumps(dict(values)).encode()).hexdigest()[:_DIGITS]
    shortened = name.encode()[: _MAX_BYTES - _DIGITS - 1].decode(errors="ignore")
    return f"{shortened}-{digest}"


def expand(spec: StudySpec, tuned: Mapping[str, Mapping[str, Any]] | None = None) -> list[Cell]:
    """Return the cells of a study: all combinations of labels and seeds that it does not leave out.

    The first axis changes slowest, and the seed fastest.

    Args:
        spec: The study.
        tuned: The tuned values of arguments for each label of the axis ``tune.per``.

    Raises:
        StudyError: If an entry of ``leave_out`` matches no cell, or all cells are left out.
    """
    cells, matches = [], [0] * len(spec.leave_out)
    for labels in itertools.product(*(axis.labels for axis in spec.axes)):
        values = {axis.name: label for axis, label in zip(spec.axes, labels)}
        change, is_tuned = spec.base, True
        for axis in spec.axes:
            change += axis.changes[values[axis.name]]
        if tuned is not None and spec.tune is not None:
            chosen = tuned[values[spec.tune.per]]
            change += Change(overrides=chosen)
            is_tuned = bool(chosen) or not find_space(spec.tune, values[spec.tune.per])
        for seed in spec.seeds:
            matched = [selection.includes(values, seed) for selection in spec.leave_out]
            matches = [count + match for count, match in zip(matches, matched)]
            if not any(matched):
                cells.append(Cell(values, seed, change, spec.options.best, is_tuned))
    for place, count in enumerate(matches):
        if not count:
            raise StudyError(
                f"Expected argument `leave_out[{place}]` to match at least one cell but got"
                f" {_describe(spec.leave_out[place].labels)}, which matches none."
            )
    if not cells:
        refuse("leave_out", "leave at least one cell", "entries that match all")
    return cells


def _describe(labels: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(f"{axis}={' or '.join(names)}" for axis, names in labels.items())


def find_cell(name: str, cells: Sequence[Cell]) -> Cell:
    """Return the cell with a name, or with a folder that ends with a text.

    Args:
        name: The labels in any order, such as ``seed=0,algorithm=ditto``, or a folder.
        cells: The cells of the study.

    Raises:
        StudyError: If there is no such cell.
    """
    labels = set(name.split(","))
    for cell in cells:
        is_folder = name.rstrip("/") == cell.path or name.rstrip("/").endswith(f"/{cell.path}")
        if is_folder or name == cell.name or labels == set(cell.name.split(",")):
            return cell
    raise StudyError(
        f"Expected argument `again` to be the name of a cell, such as {cells[0].name}, but got"
        f" {name}: --dry_run lists the cells."
    )
