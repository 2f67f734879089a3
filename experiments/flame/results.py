"""Results of FLAME's Table III: the runs by setting and method."""

from collections.abc import Iterable
from pathlib import Path

from experiments.grid import Row, group_rows
from experiments.tables import DATA_NAMES

HERE = Path(__file__).parent
COLUMNS = {  # the paper's columns → our method and column
    "FLAME HM": ("FLAME", "hybrid_by_test_accuracy"),
    "FLAME PM": ("FLAME", "personal_accuracy"),
    "FLAME GM": ("FLAME", "lagged_global_accuracy"),
    "pFedMe PM": ("pFedMe", "personal_accuracy"),
    "pFedMe GM": ("pFedMe", "global_accuracy"),
    "Ditto PM": ("Ditto, as coded", "personal_accuracy"),
    "Ditto GM": ("Ditto, as coded", "global_accuracy"),
}
PERSONAL = {  # our figures of personal and hybrid models
    "FLAME HM by validation": ("FLAME", "hybrid_accuracy"),
    "FLAME PM": ("FLAME", "personal_accuracy"),
    "pFedMe PM": ("pFedMe", "personal_accuracy"),
    "pFedMe PM, step 1": ("pFedMe, step 1", "personal_accuracy"),
    "Ditto PM, as coded": ("Ditto, as coded", "personal_accuracy"),
    "Ditto PM": ("Ditto", "personal_accuracy"),
}
GLOBAL = {  # our figures of global models
    "FLAME GM": ("FLAME", "lagged_global_accuracy"),
    "FLAME GM of the last round": ("FLAME", "global_accuracy"),
    "pFedMe GM": ("pFedMe", "global_accuracy"),
    "pFedMe GM, step 1": ("pFedMe, step 1", "global_accuracy"),
    "Ditto GM, as coded": ("Ditto, as coded", "global_accuracy"),
    "Ditto GM": ("Ditto", "global_accuracy"),
}
SPLITS = {
    "hybrid_q2_dir0.5": "half by label, half by size",
    "label_dir0.5": "label skew, Dirichlet(0.5)",
    **{f"label_q{q}": f"label skew, {q} classes" for q in range(2, 7)},
    "quality_gau0.1": "quality skew, noise 0.1",
    "quantity_dir0.5": "quantity skew, Dirichlet(0.5)",
}


class Results:
    """Results of the runs, as values over seeds by setting, method and column.

    Args:
        rows: Rows of the successful runs.
        clients: Rows of the clients of these runs.
    """

    def __init__(self, rows: Iterable[Row], clients: Iterable[Row] = ()) -> None:
        self.rows = list(rows)
        self._clients = dict(group_rows(clients, "setting", "method"))
        self._runs = dict(group_rows(self.rows, "setting", "method"))

    def values(self, setting: str, method: str, column: str) -> list[float]:
        """Return a column's values, one per seed."""
        return _read_column(self._runs.get((setting, method), []), column)

    def client_values(self, setting: str, method: str, column: str) -> list[float]:
        """Return a column's values, one per client of all seeds."""
        return _read_column(self._clients.get((setting, method), []), column)


def _read_column(rows: Iterable[Row], column: str) -> list[float]:
    return [float(row[column]) for row in rows if row.get(column)]


def describe(setting: str) -> str:
    """Return a setting in words."""
    data, split = setting.split("/")
    return f"{DATA_NAMES[data]}: {SPLITS[split]}"
