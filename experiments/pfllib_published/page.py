"""PFLlib's published accuracies beside ours.

python -m experiments.pfllib_published.page                                          # the page
python -m experiments.pfllib_published.page experiments/pfllib_published/study.yaml  # of these runs
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from experiments.experiment import Row, read_csv, shorten, write_csv
from experiments.papers import Comparison, count_agreements, table
from pl_fed.studies.cell_folder import State
from pl_fed.studies.metrics import choose_model
from pl_fed.studies.results import make_row
from pl_fed.studies.study import Study

HERE = Path(__file__).parent
OURS = HERE / "results.csv"
BAND = 1.5
"""Largest difference that counts as agreement, in points of accuracy."""

_METRIC = "test/personal/accuracy_weighted"
_KEYS = ("study", "split", "method")


def collect(studies: Iterable[Path]) -> None:
    """Write the accuracies of all finished runs into results.csv."""
    rows = {_key(row): row for row in read_csv(OURS)}
    for path in studies:
        study = Study.from_file(path)
        for status in study.read_states():
            if status.state is State.DONE:
                numbers = make_row(status)
                labels = {name: str(status.cell.values[name]) for name in _KEYS[1:]}
                row = {"study": study.spec.name, **labels, "seed": str(status.cell.seed)}
                row["accuracy"] = shorten(100 * numbers[choose_model(_METRIC, numbers)])
                rows[_key(row)] = row
    write_csv(OURS, list(rows.values()))


def _key(row: Row) -> tuple[str, ...]:
    return (*(row[name] for name in _KEYS), row["seed"])


def compare(study: str) -> dict[tuple[str, str], Comparison]:
    """Return the published accuracies with those of a study, by split and method."""
    ours: dict[tuple[str, str], list[float]] = {}
    for row in read_csv(OURS):
        if row["study"] == study:
            ours.setdefault((row["split"], row["method"]), []).append(float(row["accuracy"]))
    return {
        key: Comparison(float(row["accuracy"]), float(row["std"]), ours[key], BAND)
        for row in read_csv(HERE / "published.csv")
        if (key := (row["split"], row["method"])) in ours
    }


def make_page() -> str:
    """Return the tables of published figures beside ours, one for each study with runs."""
    parts = [
        "# PFLlib's table beside ours\n",
        f"Accuracy in %, mean over samples. ✓ is a difference of at most {BAND} points.\n",
    ]
    for study in dict.fromkeys(row["study"] for row in read_csv(OURS)):
        comparisons = compare(study)
        rows = [[*key, *item.cells(2)] for key, item in comparisons.items()]
        parts += [
            f"## {study}\n",
            f"{count_agreements(comparisons.values())} agree.\n",
            table(["split", "method", "PFLlib", "ours", "difference"], rows),
        ]
    return "\n".join(parts if len(parts) > 2 else [*parts, "No run of the study is recorded.\n"])


if __name__ == "__main__":
    if sys.argv[1:]:
        collect(map(Path, sys.argv[1:]))
    (HERE / "table.md").write_text(make_page(), encoding="utf-8")
