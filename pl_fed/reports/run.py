"""Runs, read from the files in their folders."""

import csv
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import yaml
from numpy.typing import NDArray

from pl_fed.reports import configs
from pl_fed.reports.metric_table import MetricTable, is_damaged, parse_cells

Columns = Mapping[str, NDArray[np.float64]]

csv.field_size_limit(2**31 - 1)  # a client may have many owners in one cell

_MAIN_METRICS = (["accuracy"], ["loss"])  # every model has one of them
_OWNER, _GROUP = "owner", "group"
CENTRAL = "central"
"""The place of the server's samples in the names of metrics, where others have the model."""
_TRAINED = "_trained"  # within the names of metrics over the clients that took part
_FIRST = ("personal", "global", "hybrid")  # models that come first in pictures and tables


class NoFitError(ValueError):
    """Raised for a folder without a fit that a report can show.

    Args:
        folder: The folder.
        reason: The reason, as the end of a sentence.

    Attributes:
        note: The folder and the reason.
    """

    def __init__(self, folder: Path, reason: str) -> None:
        self.note = f"{folder}: {reason}."
        super().__init__(f"Expected argument `runs` to hold fits but got {self.note}")


@dataclass(frozen=True)
class Run:
    """A run, as its files describe it.

    Attributes:
        folder: The run's folder.
        name: A name that differs from those of other runs.
        config: ``config.yaml``, or ``python_config.yaml`` of a run from Python; empty without any.
        table: The numbers in ``metrics.csv``.
        clients: The columns of ``per_client.csv``, each [clients]; empty before a test.
        benign: Whether each client is benign, bool [clients]. Read from ``per_client.csv``, or
            before a test from ``per_client_validation.csv``; empty without both.
        classes: The columns of ``per_class.csv``, each [rows]; empty without the file.
        attributes: The columns of text in ``per_client.csv`` besides ``owner``, each [clients].
        held_out: The columns of ``per_client.csv`` of held-out clients, each [held-out clients];
            ``clients``, ``benign`` and ``attributes`` are those of training clients.
        summary: ``summary.json``; empty without a readable file.
        engine: The engine that ran the clients, or ``None``.
        earlier_configs: The configs before a resume with a changed config, by the round up to
            which the run had them: ``config_to_round_<n>.yaml``.
        damage: Descriptions of damaged or missing data, which are left out.
        sample_groups: The columns of ``per_group.csv``, each [rows]; empty without the file.
        group_names: The column ``group`` of ``per_group.csv``: the name of each row's group.
    """

    folder: Path
    name: str
    config: configs.Config
    table: MetricTable
    clients: Columns
    benign: NDArray[np.bool_]
    classes: Columns
    engine: str | None
    earlier_configs: Mapping[int, configs.Config] = field(default_factory=dict)
    damage: tuple[str, ...] = ()
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    held_out: Columns = field(default_factory=dict)
    sample_groups: Columns = field(default_factory=dict)
    group_names: tuple[str, ...] = ()

    @property
    def counts(self) -> Mapping[str, Any]:
        """The counts in ``summary.json``; empty without them."""
        counts = self.summary.get("counts")
        return counts if isinstance(counts, Mapping) else {}

    @property
    def rows(self) -> Mapping[int, Mapping[str, float]]:
        """The numbers in ``metrics.csv``, by round and metric."""
        return self.table.rows

    def curve(self, metric: str) -> dict[int, float]:
        """Return a metric by round, without rounds that lack it."""
        return self.table.curve(metric)

    def final(self, metric: str) -> float | None:
        """Return the last value of a metric, or ``None``; of several tests, that of the last one.

        A test metric over trained clients is the metric over all clients if each took part.
        """
        metric = self._find_logged_name(metric)
        return self.table.last(metric)[1] if metric in self.metrics else None

    def _find_logged_name(self, metric: str) -> str:
        """Return the metric that has the value of another one; held-out clients never train."""
        is_over_trained = metric.startswith("test/") and _TRAINED in metric
        if metric in self.metrics or not is_over_trained or metric.startswith("test/held_out/"):
            return metric
        is_same = "rounds" in self.clients and not self.untrained_clients
        return metric.replace(_TRAINED, "") if is_same else metric

    def is_undefined(self, metric: str) -> bool:
        """Return whether a test metric is undefined, as for a model that has diverged."""
        part, _, name = self._find_logged_name(metric).partition("/")
        metrics = self.summary.get("metrics")
        values = metrics.get(part) if isinstance(metrics, Mapping) else None
        return isinstance(values, Mapping) and name in values and values[name] is None

    def mark_results(self, model: str, metric: str) -> NDArray[np.bool_]:
        """Return the clients with a test result of a metric in ``per_client.csv``, bool [clients].

        The result of a client whose model has diverged is NaN or infinite: then so is the run's
        mean over clients. If that is finite, the metric of a client with NaN is undefined, such as
        the area under the curve of a single class. Means leave the client out.

        Args:
            model: The model.
            metric: The metric, a column of the model.
        """
        values, name = self.clients[f"{model}_{metric}"], f"test/{model}/{metric}"
        is_result: NDArray[np.bool_] = ~np.isnan(values)
        mean = self.final(name)
        if mean is None or not np.isfinite(mean) or self.is_undefined(name):
            is_result |= self.clients.get("test_samples", np.zeros(len(values))) > 0
        return is_result

    @cached_property
    def metrics(self) -> set[str]:
        """The names of all metrics."""
        return set(self.table.columns)

    def models(self, part: str) -> list[str]:
        """Return the models that were evaluated on clients' ``"val"`` or ``"test"`` data."""
        return list(self._models.get(part, ()))

    @cached_property
    def _models(self) -> dict[str, list[str]]:
        """The models by part of the data."""
        names = [name.split("/") for name in self.metrics]
        evaluated = [n for n in names if n[2:] in _MAIN_METRICS and n[1] != CENTRAL]
        parts = dict.fromkeys(name[0] for name in evaluated)
        return {
            part: sort_models(name[1] for name in evaluated if name[0] == part) for part in parts
        }

    def held_out_models(self, part: str) -> list[str]:
        """Return the models that were evaluated on the data of held-out clients."""
        names = [name.split("/") for name in self.metrics]
        return sort_models(
            name[2]
            for name in names
            if name[:2] == [part, "held_out"] and name[3:] in _MAIN_METRICS
        )

    @property
    def has_test(self) -> bool:
        """Whether the run has been tested."""
        return _has_test(self.table)

    @property
    def num_rounds(self) -> int:
        """The number of completed rounds.

        An evaluation after the last round has this number as its round.
        """
        names = [name for name in ("time/round", "train/loss") if name in self.table.columns]
        default = max(self.table.rounds, default=-1) + (0 if self.has_test else 1)
        return max((self.table.last(name)[0] + 1 for name in names), default=default)

    @property
    def planned_rounds(self) -> int | None:
        """The number of rounds that the config allows; ``None`` without a limit."""
        settings = configs.flatten(self.config)
        limits = [settings.get(f"trainer.{name}") for name in ("max_epochs", "max_steps")]
        return min(
            (limit for limit in limits if isinstance(limit, int) and limit >= 0), default=None
        )

    @property
    def is_diverged(self) -> bool:
        """Whether the run ended because uploads held NaN or infinity: a result, and no damage."""
        return bool(self.summary.get("diverged")) and not self.has_test

    @property
    def is_finished(self) -> bool:
        """Whether the run has a test, which may follow an early stop, or all planned rounds.

        A run without a config counts as finished, and so does one that diverged.
        """
        has_ended = self.has_test or self.is_diverged or not self.config
        return has_ended or self.num_rounds == self.planned_rounds

    @property
    def num_clients(self) -> int | None:
        """The number of clients, or ``None`` if neither the files nor the config have it."""
        return len(self.benign) or configs.flatten(self.config).get("data.num_clients")

    @property
    def rounds_without_step(self) -> int:
        """The number of rounds with too small a cohort for the aggregator."""
        return int(self.counts.get("rounds_without_step") or 0)

    @property
    def untrained_clients(self) -> int:
        """The number of benign clients without a round in ``per_client.csv``; 0 if unknown."""
        rounds = self.clients.get("rounds", np.empty(0))
        return int((self.benign[: len(rounds)] & (rounds == 0)).sum())

    @property
    def byzantine_share(self) -> float | None:
        """The share of Byzantine clients, in [0, 1], or ``None`` if it is unknown.

        It is counted in the files of clients, or else read from the config.
        """
        if len(self.benign):
            return float(np.mean(~self.benign))
        return configs.byzantine_share(self.config)


def sort_models(models: Iterable[str]) -> list[str]:
    """Return models without repetition: personal, global, hybrid, then by the alphabet."""
    return sorted(set(models), key=lambda model: (*(model != first for first in _FIRST), model))


def find_runs(paths: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """Read the runs in some folders.

    Args:
        paths: Folders of runs, or folders with runs anywhere below them.

    Returns:
        The runs, and a sentence for each folder below ``paths`` that is left out.

    Raises:
        FileNotFoundError: If a folder does not exist or has no run in it.
        NoFitError: If a folder has only runs without a round, damaged runs, or runs that are no
            fits.
    """
    runs: dict[Path, Run] = {}  # by resolved folder, so that no run is read twice
    skipped: list[str] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(f"Expected argument `runs` to be folders but got {path}.")
        folders = _run_folders(path)
        if not folders:
            raise FileNotFoundError(
                "Expected argument `runs` to be folders of runs, with a metrics.csv, or folders"
                f" with runs below them, but got {path}."
            )
        errors = []
        for folder in folders:
            place = folder.resolve()
            try:
                runs[place] = runs.get(place) or _read_fit(folder)
            except NoFitError as error:
                errors.append(error)
        if len(errors) == len(folders):
            raise errors[0]
        skipped += [error.note for error in errors]
    names = _unique_names(list(runs))
    return [replace(run, name=name) for run, name in zip(runs.values(), names)], skipped


def _run_folders(path: Path, parents: tuple[Path, ...] = ()) -> list[Path]:
    """Return a folder if it is a run's, otherwise the folders of all runs below it.

    A folder with a config but without metrics is a run only if there is no run below it. Links are
    followed, except links to a parent.

    Args:
        path: The folder.
        parents: The folders, or links to folders, that lead to it.
    """
    if path.resolve() in parents:
        return []
    try:
        if (path / "metrics.csv").is_file():
            return [path]
        children = [child for child in sorted(path.iterdir()) if child.is_dir()]
        lineage = (*parents, path.resolve())
        folders = [folder for child in children for folder in _run_folders(child, lineage)]
        return folders or ([path] if (path / "config.yaml").is_file() else [])
    except PermissionError:
        return [path]  # reading it reports the error


def _read_fit(folder: Path) -> Run:
    try:
        if reason := _reason_unusable(folder):
            raise NoFitError(folder, reason)
        return read_run(folder)
    except OSError as error:
        raise NoFitError(folder, f"cannot be read ({error.strerror})") from error


def _reason_unusable(folder: Path) -> str:
    """Return the reason why a report cannot show a run, or an empty string if it can."""
    if _read_summary(folder / "summary.json", []).get("diverged"):
        return ""
    if not (folder / "metrics.csv").is_file():
        has_predictions = (folder / "predictions.csv").is_file()
        return "only predictions" if has_predictions else "no metrics.csv, so no round was run"
    names = _read_header(folder / "metrics.csv")
    if not any(name.startswith(("train/", "val/", "test/")) for name in names):
        return "no numbers in metrics.csv, so no round was run"
    if "time/round" not in names and not (folder / "engine.json").is_file():
        return "only evaluated, no round was run"
    return ""


def _read_header(path: Path) -> list[str]:
    with _open_csv(path) as file:
        return next(csv.reader(file), [])


def _unique_names(folders: list[Path]) -> list[str]:
    """Return a name for each folder: the shortest end of its path that no other folder has."""
    names = {folder: str(folder) for folder in folders}
    remaining, length = list(names), 1
    while remaining:
        counts = Counter(folder.parts[-length:] for folder in names)
        for folder in remaining:
            if counts[folder.parts[-length:]] == 1:
                names[folder] = "/".join(folder.parts[-length:])
        remaining = [
            folder
            for folder in remaining
            if counts[folder.parts[-length:]] > 1 and length < len(folder.parts)
        ]
        length += 1
    return [names[folder] for folder in folders]


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read the run in a folder.

    Files of an earlier test are ignored if the run went on after it.

    Args:
        folder: The run's folder.
        name: The name of the run; ``None`` takes the folder's.

    Raises:
        NoFitError: If a fit cannot have written a file.
    """
    damage: list[str] = []
    table = _read_metrics(folder / "metrics.csv", damage)
    clients: Columns = {}
    classes: Columns = {}
    sample_groups: Columns = {}
    group_names: tuple[str, ...] = ()
    texts: dict[str, tuple[str, ...]] = {}
    config = _read_config(folder / "config.yaml") or _read_config(folder / configs.PYTHON_CONFIG)
    has_test = _has_test(table)
    if has_test:
        texts = _read_texts(folder / "per_client.csv")
        clients = _read_columns(folder / "per_client.csv", damage, "byzantine", texts=texts)
        damage += _describe_missing_clients(clients, config)
    clients, held_out, texts = _separate_held_out(clients, texts)
    validated = clients or _read_columns(folder / "per_client_validation.csv", damage, "byzantine")
    validated, _, _ = _separate_held_out(validated, {})
    if has_test:
        path = folder / "per_class.csv"
        classes = _read_columns(path, damage, "byzantine", "class", texts=(_OWNER, "class_name"))
        path = folder / "per_group.csv"
        sample_groups = _read_columns(path, damage, "byzantine", "samples", texts=(_GROUP,))
        group_names = _read_column(path, _GROUP) if sample_groups else ()
    return Run(
        folder=folder,
        name=name or folder.name,
        config=config,
        table=table,
        clients=clients,
        benign=validated.get("byzantine", np.empty(0)) == 0,
        classes=classes,
        held_out=held_out,
        sample_groups=sample_groups,
        group_names=group_names,
        engine=_read_engine(folder, damage),
        earlier_configs=dict(_read_earlier_configs(folder)),
        damage=tuple(damage),
        attributes={name: cells for name, cells in texts.items() if name != _OWNER},
        summary=_read_summary(folder / "summary.json", damage),
    )


def _separate_held_out(
    columns: Columns, texts: Mapping[str, tuple[str, ...]]
) -> tuple[Columns, Columns, dict[str, tuple[str, ...]]]:
    """Separate the rows of training clients from those of held-out clients.

    Returns:
        The columns of training clients, those of held-out clients, and the training clients' texts.
    """
    if "held_out" not in columns:
        return columns, {}, dict(texts)
    is_held_out = columns["held_out"] == 1
    columns = {name: values for name, values in columns.items() if name != "held_out"}
    training = {name: values[~is_held_out] for name, values in columns.items()}
    held_out = {name: values[is_held_out] for name, values in columns.items()}
    kept_texts = {
        name: tuple(cell for cell, new in zip(cells, is_held_out) if not new)
        for name, cells in texts.items()
    }
    return training, held_out, kept_texts


def _describe_missing_clients(clients: Columns, config: configs.Config) -> list[str]:
    """Return a description of the clients that are missing in the files of a tested run."""
    if not clients:
        return ["per_client.csv is missing or empty"]
    number = configs.flatten(config).get("data.num_clients")
    rows = len(clients["byzantine"])
    if isinstance(number, int) and rows < number:
        return [f"per_client.csv has {rows} of {number} clients"]
    return []


def _read_earlier_configs(folder: Path) -> Iterator[tuple[int, configs.Config]]:
    paths = {path.stem.rpartition("_")[2]: path for path in folder.glob("config_to_round_*.yaml")}
    for round in sorted(filter(str.isdecimal, paths), key=int):
        yield int(round), _read_config(paths[round])


def _read_config(path: Path) -> configs.Config:
    if not path.is_file():
        return {}
    try:
        config = configs.load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError):
        config = None
    if config is None or "model" not in config:
        raise NoFitError(path.parent, f"{path.name} is not the config of a run")
    return config


def _read_metrics(path: Path, damage: list[str]) -> MetricTable:
    """Return the numbers of each round.

    Args:
        path: The path of ``metrics.csv``.
        damage: A list that a description of damaged rows and cells is added to.
    """
    if not path.is_file():  # a run that diverged in its first round
        return MetricTable([], {})
    with _open_csv(path) as file:
        table = MetricTable.read(file)
    damage += _describe_damage(path, table.damaged_rows, table.damaged_cells)
    return table


def _describe_damage(path: Path, rows: int, cells: int) -> list[str]:
    """Return a description of the damaged rows and cells of a file, if there are any."""
    counts = {"row": rows, "cell": cells}
    parts = [f"{n} damaged {unit}{'s' if n > 1 else ''}" for unit, n in counts.items() if n]
    return [f"{path.name} has {' and '.join(parts)}"] if parts else []


@contextmanager
def _open_csv(path: Path) -> Iterator[TextIO]:
    """Open a CSV file, also one with the mark of a spreadsheet at its beginning.

    Raises:
        NoFitError: If the text cannot be decoded or parsed.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except (UnicodeDecodeError, csv.Error):
        raise NoFitError(path.parent, f"{path.name} is not readable CSV") from None


def _has_test(table: MetricTable) -> bool:
    """Return whether no round was trained after the last test.

    The last row is empty after a test without a benign client that has test samples.
    """
    rows = {"test/": -1, "train/": -1, "time/": -1}
    for name, cell in table.last_cells.items():
        for kind in rows:
            if name.startswith(kind):
                rows[kind] = max(rows[kind], cell.row)
    tested = rows.pop("test/")
    return table.ends_empty or (tested >= 0 and tested >= max(rows.values()))


def _read_texts(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the columns of a table whose cells hold texts, none of them a number."""
    if not path.is_file():
        return {}
    with _open_csv(path) as file:
        reader = csv.reader(file)
        names = next(reader, [])
        rows = [row for row in reader if row]
    columns = {}
    for place, name in enumerate(names):
        if name and rows and (name == _OWNER or is_damaged("".join(rows[0][place : place + 1]))):
            cells = tuple("".join(row[place : place + 1]) for row in rows)  # rows may be short
            if name == _OWNER or all(map(is_damaged, cells)):
                columns[name] = cells
    return columns


def _read_column(path: Path, column: str) -> tuple[str, ...]:
    """Return the texts in a column of a table, of its complete rows."""
    with _open_csv(path) as file:
        reader = csv.reader(file)
        names = next(reader, [])
        place = names.index(column)
        return tuple(row[place].removeprefix("'") for row in reader if len(row) == len(names))


def _read_summary(path: Path, damage: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = None
    if not isinstance(summary, dict):
        damage.append(f"{path.name} cannot be read")
        return {}
    return summary


def _read_columns(
    path: Path, damage: list[str], *required: str, texts: Collection[str] = (_OWNER,)
) -> dict[str, NDArray[np.float64]]:
    """Return the columns of a table, or an empty dictionary if there is no file.

    Args:
        path: The path of a CSV file.
        damage: A list that a description of damaged rows and cells is added to.
        *required: Columns that must have a finite number in each row.
        texts: Columns that may hold texts.

    Raises:
        NoFitError: If the file was cut off or lacks a required number.
    """
    if not path.is_file():
        return {}
    with _open_csv(path) as file:
        lines = file.readlines()
        if lines and not lines[-1].endswith("\n"):
            raise NoFitError(path.parent, f"{path.name} was cut off")
        reader = csv.reader(lines)
        names = next(reader, [])
        rows = list(reader)
    complete = [row for row in rows if len(row) == len(names)]
    table, cells = parse_cells(complete, names, texts)
    damage += _describe_damage(path, len(rows) - len(complete), cells)
    columns = dict(zip(names, table))
    for name in required:
        if columns and not (name in columns and np.isfinite(columns[name]).all()):
            raise NoFitError(path.parent, f"{path.name} lacks a number in its column `{name}`")
    return columns


def _read_engine(folder: Path, damage: list[str]) -> str | None:
    path = folder / "engine.json"
    if not path.is_file():
        return None
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["engine"])
    except (OSError, ValueError, KeyError, TypeError):
        damage.append(f"{path.name} cannot be read")
        return None
