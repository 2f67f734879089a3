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
_OWNER = "owner"  # the only column of text
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
        damage: What of its files is damaged or missing, and left out.
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
    damage: tuple[str, ...] = ()

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
    damage: list[str] = []
    rows = _rounds(folder / "metrics.csv", damage)
    tested = _tested(rows)
    config = _config(folder / "config.yaml") or _config(folder / configs.PYTHON_CONFIG)
    clients = _columns(folder / "per_client.csv", damage, "byzantine") if tested else {}
    if tested:
        damage += _missing_clients(clients, config)
    found = clients or _columns(folder / "per_client_validation.csv", damage, "byzantine")
    return Run(
        folder=folder,
        name=name or folder.name,
        config=config,
        rows=rows,  # what an earlier test left is not that of a run that goes on
        clients=clients,
        benign=found.get("byzantine", np.empty(0)) == 0,
        classes=_columns(folder / "per_class.csv", damage, "byzantine", "class") if tested else {},
        engine=_engine(folder, damage),
        earlier=dict(_earlier(folder)),
        damage=tuple(damage),
    )


def _missing_clients(clients: Columns, config: configs.Config) -> list[str]:
    """Return what is missing of the clients of a run that was tested."""
    if not clients:
        return ["per_client.csv is missing or empty"]
    number = configs.dotted(config).get("data.num_clients")
    rows = len(clients["byzantine"])
    if isinstance(number, int) and rows < number:
        return [f"per_client.csv has {rows} of {number} clients"]
    return []


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


def _rounds(path: Path, damage: list[str]) -> dict[int, dict[str, float]]:
    """Return the numbers of each round, and add what is damaged to a list."""
    rows: dict[int, dict[str, float]] = {}
    broken_rows = broken_cells = 0
    with _read(path) as file:
        for row in csv.DictReader(file):
            broken_cells += sum(_is_broken(text) for name, text in row.items() if name)
            numbers = {name: _number(text) for name, text in row.items() if name}
            round = numbers.pop("round", math.nan)
            known = {name: value for name, value in numbers.items() if not math.isnan(value)}
            if math.isfinite(round):
                rows.setdefault(int(round), {}).update(known)
            else:
                broken_rows += 1
    damage += _told(path, broken_rows, broken_cells)
    return dict(sorted(rows.items()))


def _told(path: Path, rows: int, cells: int) -> list[str]:
    """Return what is said of damaged rows and cells of a file; nothing if there are none."""
    counts = {"row": rows, "cell": cells}
    parts = [f"{n} damaged {what}{'s' if n > 1 else ''}" for what, n in counts.items() if n]
    return [f"{path.name} has {' and '.join(parts)}"] if parts else []


def _is_broken(text: object) -> bool:
    """Whether a cell holds something that is no number."""
    if not isinstance(text, str) or not text:
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


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


def _columns(path: Path, damage: list[str], *known: str) -> dict[str, NDArray[np.float64]]:
    """Return a table by column, of which some are to be known throughout; nothing without it.

    What is damaged is added to a list.
    """
    if not path.is_file():
        return {}
    with _read(path) as file:
        lines = file.readlines()
        if lines and not lines[-1].endswith("\n"):
            raise NoFitError(path.parent, f"{path.name} was cut off")
        reader = csv.reader(lines)
        names = next(reader, [])
        rows = list(reader)
    complete = [row for row in rows if len(row) == len(names)]
    pairs = (pair for row in complete for pair in zip(names, row))
    cells = sum(_is_broken(text) for name, text in pairs if name != _OWNER)
    damage += _told(path, len(rows) - len(complete), cells)
    whole = [[_number(text) for text in row] for row in complete]
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


def _engine(folder: Path, damage: list[str]) -> str | None:
    path = folder / "engine.json"
    if not path.is_file():
        return None
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["engine"])
    except (OSError, ValueError, KeyError, TypeError):
        damage.append(f"{path.name} cannot be read")
        return None
