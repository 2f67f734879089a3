"""Results of FLAME's Table III: the committed runs by setting and method."""

from collections.abc import Iterable
from pathlib import Path

from experiments.experiment import Row, group_rows, read_csv
from experiments.papers import DATA_NAMES

HERE = Path(__file__).parent
METHODS = ("FLAME", "pFedMe", "pFedMe, step 1", "Ditto, as coded", "Ditto")
PERSONAL = {  # our figures of personal and hybrid models: method and column
    "FLAME HM by validation": ("FLAME", "test/hybrid/accuracy"),
    "FLAME PM": ("FLAME", "test/personal/accuracy"),
    "pFedMe PM": ("pFedMe", "test/personal/accuracy"),
    "pFedMe PM, step 1": ("pFedMe, step 1", "test/personal/accuracy"),
    "Ditto PM, as coded": ("Ditto, as coded", "test/personal/accuracy"),
    "Ditto PM": ("Ditto", "test/personal/accuracy"),
}
GLOBAL = {  # our figures of global models
    "FLAME GM": ("FLAME", "test/lagged_global/accuracy"),
    "FLAME GM of the last round": ("FLAME", "test/global/accuracy"),
    "pFedMe GM": ("pFedMe", "test/global/accuracy"),
    "pFedMe GM, step 1": ("pFedMe, step 1", "test/global/accuracy"),
    "Ditto GM, as coded": ("Ditto, as coded", "test/global/accuracy"),
    "Ditto GM": ("Ditto", "test/global/accuracy"),
}
OURS = {**PERSONAL, **GLOBAL}
COLUMNS = {  # the paper's columns → our method and column
    "FLAME HM": ("FLAME", "hybrid_by_test_accuracy"),
    "FLAME PM": OURS["FLAME PM"],
    "FLAME GM": OURS["FLAME GM"],
    "pFedMe PM": OURS["pFedMe PM"],
    "pFedMe GM": OURS["pFedMe GM"],
    "Ditto PM": OURS["Ditto PM, as coded"],
    "Ditto GM": OURS["Ditto GM, as coded"],
}
SPLITS = {
    "hybrid_q2_dir0.5": "half by label, half by size",
    "label_dir0.5": "label skew, Dirichlet(0.5)",
    **{f"label_q{q}": f"label skew, {q} classes" for q in range(2, 7)},
    "quality_gau0.1": "quality skew, noise 0.1",
    "quantity_dir0.5": "quantity skew, Dirichlet(0.5)",
}


class Results:
    """Results of the runs, as values over seeds by setting (data and split), method and column.

    Args:
        rows: Rows of the runs.
        clients: Rows of the clients of these runs.
    """

    def __init__(self, rows: Iterable[Row], clients: Iterable[Row] = ()) -> None:
        self.rows = list(rows)
        self._runs = dict(group_rows(self.rows, "data", "split", "method"))
        self._clients = dict(group_rows(clients, "data", "split", "method"))

    @classmethod
    def read(cls) -> "Results":
        """Return the committed results."""
        return cls(read_csv(HERE / "results.csv"), read_csv(HERE / "clients.csv"))

    def values(self, setting: str, method: str, column: str) -> list[float]:
        """Return a column's values, one per seed."""
        return _read_column(self._runs, setting, method, column)

    def client_values(self, setting: str, method: str, column: str) -> list[float]:
        """Return a column's values, one per client of all seeds."""
        name = column.removeprefix("test/").replace("/", "_")
        return _read_column(self._clients, setting, method, name)


def _read_column(
    groups: dict[tuple[str, ...], list[Row]], setting: str, method: str, column: str
) -> list[float]:
    rows = groups.get((*setting.split("/"), method), [])
    return [float(row[column]) for row in rows if row.get(column)]


def describe(setting: str) -> str:
    """Return a setting in words."""
    data, split = setting.split("/")
    return f"{DATA_NAMES[data]}: {SPLITS[split]}"
