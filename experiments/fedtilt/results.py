"""Results of FedTilt's runs over seeds, and their comparison with the paper."""

from collections.abc import Iterable

from experiments.fedtilt.paper import BAND, METRICS, read_all_rows
from experiments.fedtilt.readings import TESTED_MODELS
from experiments.fedtilt.run import CIFAR10_SETTINGS, SETTINGS, job
from experiments.grid import Row, key_of
from experiments.tables import Comparison


class Results:
    """Results of the runs, as values over seeds."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)

    def values(
        self, setting: str, method: str, column: str, split: str, arguments: str | None = None
    ) -> list[float]:
        """Return a column's values in %, one per seed, by default for the table's arguments."""
        arguments = arguments or job(setting, split, method, 0).key[3]
        run = (setting, method, split, arguments)
        names = ("setting", "method", "split", "arguments")
        return [
            100 * float(row[column])
            for row in self.rows
            if key_of(row, names) == run and row.get(column)
        ]


def read_published_rows() -> list[Row]:
    """Return the paper's rows for the settings that are run."""
    ours = {*SETTINGS, *CIFAR10_SETTINGS}
    return [row for row in read_all_rows() if row["setting"] in ours]


def comparisons(results: Results, split: str) -> dict[tuple[str, str], dict[str, Comparison]]:
    """Return the comparisons with the paper by setting and reading, then by figure."""
    theirs = {(row["setting"], row["method"]): row for row in read_published_rows()}
    found: dict[tuple[str, str], dict[str, Comparison]] = {}
    for setting in dict.fromkeys(setting for setting, _ in theirs):
        for name, (method, model) in TESTED_MODELS.items():
            for metric in METRICS:
                values = results.values(setting, method, f"{model}_{metric}", split)
                if values:
                    comparison = Comparison(
                        float(theirs[setting, method][metric]), None, values, BAND
                    )
                    found.setdefault((setting, name), {})[metric] = comparison
    return found
