"""Experiments: studies with results and pages that are committed.

A run folder stays below ``runs/experiments/``. The numbers that pages need are collected from it
into CSV files in the experiment's folder. Cells with a row there are not run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pl_fed import text
from pl_fed.studies.cell_folder import State, write_text
from pl_fed.studies.cells import Cell
from pl_fed.studies.changes import read_change
from pl_fed.studies.execution import Event
from pl_fed.studies.readers import StudyError
from pl_fed.studies.results import RESULTS, make_row
from pl_fed.studies.spec import read_spec
from pl_fed.studies.study import Study
from pl_fed.studies.yaml_texts import load_study

HERE = Path(__file__).parent
Row = dict[str, str]
Content = Mapping[str, Any]  # of a study file
ON_CPU: Content = {  # a run without files of a logger
    "trainer.accelerator": "cpu",
    "trainer.logger": False,
    "trainer.num_sanity_val_steps": 0,
}


@dataclass(frozen=True)
class CellRun:
    """Cell run: a finished run of a study.

    Attributes:
        row: Its labels, its seed, its status, and all numbers of its summary.
        folder: Its folder.
    """

    row: Mapping[str, Any]
    folder: Path

    def read(self, name: str) -> list[Row]:
        """Return the rows of a CSV file of the run; none without the file."""
        return read_csv(self.folder / name)

    def select(self, *columns: str) -> Row:
        """Return some numbers with five significant digits, and the time; without absent ones."""
        names = [name for name in (*columns, "seconds/total") if name in self.row]
        return {name: shorten(self.row[name]) for name in names}


Collect = Callable[[CellRun], Mapping[str, Sequence[Row]]]
"""Returns the rows of a run for each CSV file, with one row for the table of results."""


class Experiment(Study):
    """Experiment: a study with committed results.

    Args:
        name: The name, such as ``ditto/vehicle``.
        content: The content of a study file, without a name.
        collect: Returns the rows of a run.
        write_pages: Writes the pages and pictures from the committed results.
        options: Options of the study that replace those of ``content``.
        folder: The folder of the results; by default that of the name, below ``experiments/``.
        results: The name of the table of results.
        adjust: Returns further changes of a cell's config, such as those that depend on several
            axes.
    """

    def __init__(
        self,
        name: str,
        content: Content,
        collect: Collect,
        write_pages: Callable[[], None],
        options: Content | None = None,
        folder: Path | None = None,
        results: str = RESULTS,
        adjust: Callable[[Cell], Content] | None = None,
    ) -> None:
        self.name = name
        self.table = (folder or HERE / name) / results
        self._collect = collect
        self._write_pages = write_pages
        self._adjust = adjust
        changes = {"folder": f"runs/experiments/{name}", **content.get("options", {})}
        if self.table.is_file():
            changes["recorded"] = str(self.table)
        changes |= {key: value for key, value in (options or {}).items() if value is not None}
        spec = {**content, "name": name.replace("/", "_"), "options": changes}
        self._begin(read_spec(spec))

    def _expand(self) -> list[Cell]:
        """Return the cells, with the changes that depend on several axes."""
        cells = super()._expand()
        if self._adjust is None:
            return cells
        changes = [read_change("adjust", self._adjust(cell)) for cell in cells]
        return [replace(cell, change=cell.change + c) for cell, c in zip(cells, changes)]

    def run(
        self,
        workers: int | None = None,
        only: Sequence[str] = (),
        report: Callable[[Event], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Run the cells without a result, collect their rows, and write the pages."""
        rows = super().run(workers, only, report)
        self.collect()
        try:
            print(f"The pages in {self.report()} show the results.")
        except StudyError as error:
            print(error)
        return rows

    def report(self) -> Path:
        """Write the pages from the committed results, and return their folder.

        Raises:
            ValueError: If a cell has no result.
        """
        missing = [status for status in self.read_states() if not status.state.is_result]
        if missing:
            raise StudyError(
                f"Expected all {len(self.cells)} cells of {self.name} to have results before pages"
                f" are written but got {len(missing)} without, first {missing[0].cell.name}"
                f" ({missing[0].state}): run `python -m experiments {self.name}`."
            )
        self._write_pages()
        return self.table.parent

    def collect(self) -> None:
        """Write the rows of all finished runs into the committed tables, in the order of cells."""
        names = [axis.name for axis in self.spec.axes] + ["seed"]
        tables: dict[str, dict[tuple[str, ...], list[Row]]] = {}
        for status in self.read_states():
            if status.state in (State.DONE, State.DIVERGED):
                labels, row = status.cell.labels, make_row(status)
                for name, rows in self._collect(CellRun(row, status.folder.path)).items():
                    is_result = name == self.table.name
                    first = {**labels, **({"status": row["status"]} if is_result else {})}
                    lines = [{**first, **line} for line in rows]
                    tables.setdefault(name, {})[tuple(labels.values())] = lines
        order = {tuple(cell.labels.values()): place for place, cell in enumerate(self.cells)}
        for name, runs in tables.items():
            path = self.table.parent / name
            groups = dict(group_rows(read_csv(path), *names)) | runs
            keys = sorted(groups, key=lambda key: order.get(key, len(order)))
            write_csv(path, [row for key in keys for row in groups[key]])


def read_study(path: Path) -> Content:
    """Return the content of a study file."""
    content: Content = load_study(path.read_text(encoding="utf-8"))
    return content


def shorten(value: str | float) -> str:
    """Return a number with five significant digits."""
    return f"{float(value):.5g}"


def read_csv(path: Path) -> list[Row]:
    """Return the rows of a CSV file; none if it does not exist."""
    return text.read_csv(path) if path.exists() else []


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a CSV file, completely or not at all."""
    write_text(path, text.format_csv(rows))


def group_rows(rows: Iterable[Row], *names: str) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    """Yield groups of rows with equal values in some columns, in the order of their first rows."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    yield from groups.items()
