"""What a run left in its folder."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import yaml
from numpy.typing import NDArray

from pl_fed.reports import configs

Columns = Mapping[str, NDArray[np.float64]]

csv.field_size_limit(2**31 - 1)  # a client's cell of owners may be long

_MEASURES = (["accuracy"], ["loss"])  # every model has one of them
_FIRST = ("personal", "global", "hybrid")  # the order in which models are shown


class NoFitError(ValueError):
    """Raised where a folder holds no fit that can be shown.

    Args:
        folder: The folder.
        why: What is wrong with it.

    Attributes:
        note: The same in short.
    """

    def __init__(self, folder: Path, why: str) -> None:
        self.note = f"{folder}: {why}."
        super().__init__(f"Expected argument `runs` to hold fits but got {self.note}")


@dataclass(frozen=True)
class Run:
    """A run, by its files.

    Attributes:
        folder: Where they are.
        name: What it is called among others.
        config: ``config.yaml``, or of a run from Python ``python_config.yaml``; empty without any.
        rows: ``metrics.csv``: the numbers of each round, by round.
        clients: ``per_client.csv`` by column, each [clients]; empty before a test.
        benign: Which clients are not byzantine, [clients], by ``per_client.csv``, or before a test
            by ``per_client_validation.csv``; empty if there is neither.
        classes: ``per_class.csv`` by column, each [rows]; empty if there is none.
        engine: The engine that ran the clients, if one did.
        earlier: The configs that it went on from with another, by the round up to which it had
            each: ``config_to_round_<n>.yaml``.
    """

    folder: Path
    name: str
    config: configs.Config
    rows: Mapping[int, Mapping[str, float]]
    clients: Columns
    benign: NDArray[np.bool_]
    classes: Columns
    engine: str | None
    earlier: Mapping[int, configs.Config] = field(default_factory=dict)

    def curve(self, metric: str) -> dict[int, float]:
        """Return a metric by round, of the rounds that have it."""
        return {round: row[metric] for round, row in self.rows.items() if metric in row}

    def final(self, metric: str) -> float | None:
        """Return a metric of the last round that has it."""
        return next(reversed(self.curve(metric).values()), None)

    @cached_property
    def metrics(self) -> set[str]:
        """The names of all metrics."""
        return {name for row in self.rows.values() for name in row}

    def models(self, part: str) -> list[str]:
        """Return the models that were evaluated on ``"val"`` or ``"test"``."""
        names = (name.split("/") for name in self.metrics)
        measured = [name for name in names if name[0] == part and name[2:] in _MEASURES]
        return in_order(name[1] for name in measured)

    @property
    def tested(self) -> bool:
        """Whether the run came to its test."""
        return _tested(self.rows)

    @property
    def rounds(self) -> int:
        """How many rounds were run: the row of an evaluation after them has that number."""
        ran = (n for n, row in self.rows.items() if "time/round" in row or "train/loss" in row)
        usual = max(self.rows, default=-1) + (0 if self.tested else 1)
        return max((n + 1 for n in ran), default=usual)

    @property
    def planned(self) -> int | None:
        """How many rounds the config allows; ``None`` if it sets no limit."""
        found = configs.dotted(self.config)
        limits = [found.get(f"trainer.{name}") for name in ("max_epochs", "max_steps")]
        return min((each for each in limits if isinstance(each, int) and each >= 0), default=None)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end: to its test, if need be early, or to its last round.

        Of a run without a config nothing says that it did not.
        """
        return self.tested or not self.config or self.rounds == self.planned

    @property
    def num_clients(self) -> int | None:
        """How many clients there are, if anything tells it."""
        return len(self.benign) or configs.dotted(self.config).get("data.num_clients")

    @property
    def untrained_clients(self) -> int:
        """How many benign clients took part in no round, by ``per_client.csv``; 0 if unknown."""
        rounds = self.clients.get("rounds", np.empty(0))
        return int((self.benign[: len(rounds)] & (rounds == 0)).sum())

    @property
    def byzantine_share(self) -> float | None:
        """The share of byzantine clients, in [0, 1]: of those that there are, or as configured."""
        if len(self.benign):
            return float(np.mean(~self.benign))
        return configs.byzantine_share(self.config)


def in_order(models: Iterable[str]) -> list[str]:
    """Return models in the order in which they are shown."""
    return sorted(set(models), key=lambda model: (*(model != each for each in _FIRST), model))


def find_runs(paths: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """Read runs, given their folders, or folders that hold several.

    Returns:
        The runs, and a sentence for each folder within those given that holds no fit.

    Raises:
        FileNotFoundError: If there is no such folder, or no run in it.
        NoFitError: If a given folder holds only runs that did not begin, are broken, or no fits.
    """
    found: dict[Path, Run] = {}  # by where they are, so that none is read twice
    skipped: list[str] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(f"Expected argument `runs` to be folders but got {path}.")
        within = _run_folders(path)
        if not within:
            raise FileNotFoundError(
                "Expected argument `runs` to be folders of runs, which hold metrics.csv, or folders"
                f" of such, but got {path}."
            )
        told = []
        for folder in within:
            place = folder.resolve()
            try:
                found[place] = found.get(place) or _read_fit(folder)
            except NoFitError as error:
                told.append(error)
        if len(told) == len(within):
            raise told[0]
        skipped += [error.note for error in told]
    names = _names(list(found))
    return [replace(run, name=name) for run, name in zip(found.values(), names)], skipped


def _run_folders(path: Path, above: tuple[Path, ...] = ()) -> list[Path]:
    """Return a folder if it is that of a run, else those of the runs anywhere in it.

    A config beside folders of runs is not one that was begun. Links are followed, but not to a
    folder that they lie in.

    Args:
        path: The folder.
        above: Those that it lies in, or that links to it lie in.
    """
    if path.resolve() in above:
        return []
    try:
        if (path / "metrics.csv").is_file():
            return [path]
        within = [each for each in sorted(path.iterdir()) if each.is_dir()]
        found = [each for one in within for each in _run_folders(one, (*above, path.resolve()))]
        return found or ([path] if (path / "config.yaml").is_file() else [])
    except PermissionError:
        return [path]  # what can be said of it is said when it is read


def _read_fit(folder: Path) -> Run:
    try:
        if why := _unusable(folder):
            raise NoFitError(folder, why)
        return read_run(folder)
    except OSError as error:
        raise NoFitError(folder, f"cannot be read ({error.strerror})") from error


def _unusable(folder: Path) -> str:
    """Return why there is nothing to show of a run, if that is so."""
    if not (folder / "metrics.csv").is_file():
        predicted = (folder / "predictions.csv").is_file()
        return "only predictions" if predicted else "no metrics.csv, so no round was run"
    names = _header(folder / "metrics.csv")
    if not any(name.startswith(("train/", "val/", "test/")) for name in names):
        return "no numbers in metrics.csv, so no round was run"
    if "time/round" not in names and not (folder / "engine.json").is_file():
        return "only evaluated, no round was run"
    return ""


def _header(path: Path) -> list[str]:
    with _read(path) as file:
        return next(csv.reader(file), [])


def _names(folders: list[Path]) -> list[str]:
    """Return a name for each folder: the shortest end of its path that no other has."""
    names = []
    for folder in folders:
        ends = ["/".join(folder.parts[-length:]) for length in range(1, len(folder.parts) + 1)]
        others = [other.parts for other in folders if other != folder]
        own = (
            end
            for length, end in enumerate(ends, 1)
            if all(parts[-length:] != folder.parts[-length:] for parts in others)
        )
        names.append(next(own, str(folder)))
    return names


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read a run's folder.

    Raises:
        NoFitError: If a file is not what a fit writes.
    """
    rows = _rounds(folder / "metrics.csv")
    tested = _tested(rows)
    clients = _columns(folder / "per_client.csv", "byzantine") if tested else {}
    found = clients or _columns(folder / "per_client_validation.csv", "byzantine")
    return Run(
        folder=folder,
        name=name or folder.name,
        config=_config(folder / "config.yaml") or _config(folder / configs.PYTHON_CONFIG),
        rows=rows,  # what an earlier test left is not that of a run that goes on
        clients=clients,
        benign=found.get("byzantine", np.empty(0)) == 0,
        classes=_columns(folder / "per_class.csv", "byzantine", "class") if tested else {},
        engine=_engine(folder),
        earlier=dict(_earlier(folder)),
    )


def _earlier(folder: Path) -> Iterator[tuple[int, configs.Config]]:
    for path in sorted(folder.glob("config_to_round_*.yaml")):
        if (round := path.stem.rpartition("_")[2]).isdecimal():
            yield int(round), _config(path)


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError):
        config = None
    if not isinstance(config, dict) or "model" not in config:
        raise NoFitError(path.parent, f"{path.name} is not the config of a run")
    return config


def _rounds(path: Path) -> dict[int, dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    with _read(path) as file:
        for row in csv.DictReader(file):
            numbers = {name: _number(text) for name, text in row.items() if name}
            round = numbers.pop("round", math.nan)
            known = {name: value for name, value in numbers.items() if not math.isnan(value)}
            if math.isfinite(round):
                rows.setdefault(int(round), {}).update(known)
    return dict(sorted(rows.items()))


@contextmanager
def _read(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield file
    except (UnicodeDecodeError, csv.Error):
        raise NoFitError(path.parent, f"{path.name} is not readable CSV") from None


def _tested(rows: Mapping[int, Mapping[str, float]]) -> bool:
    """Whether rows end with that of a test; it is empty if no benign client has test samples."""
    if not rows:
        return False
    last = rows[max(rows)]
    return not last or any(name.startswith("test/") for name in last)


def _columns(path: Path, *known: str) -> dict[str, NDArray[np.float64]]:
    """Return a table by column, of which some are to be known throughout; nothing without it."""
    if not path.is_file():
        return {}
    with _read(path) as file:
        lines = file.readlines()
        if lines and not lines[-1].endswith("\n"):
            raise NoFitError(path.parent, f"{path.name} was cut off")
        reader = csv.reader(lines)
        names = next(reader, [])
        whole = [[_number(text) for text in row] for row in reader if len(row) == len(names)]
    table = np.array(whole, dtype=np.float64).reshape(len(whole), len(names))
    columns = {name: table[:, place] for place, name in enumerate(names)}
    for name in known:
        if columns and not (name in columns and np.isfinite(columns[name]).all()):
            raise NoFitError(path.parent, f"{path.name} does not say `{name}` of each of its rows")
    return columns


def _number(text: str | None) -> float:
    """Return a number; NaN where there is none."""
    try:
        return float(text or "nan")
    except (TypeError, ValueError):
        return math.nan


def _engine(folder: Path) -> str | None:
    try:
        found = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
        return str(found["engine"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
