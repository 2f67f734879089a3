"""Report of Ditto's Tables 1, 5, 7 and 9 from the rows of the runs.

python -m experiments.ditto.report vehicle
"""

import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from scipy.stats import spearmanr

from experiments.ditto.draws import describe_draws
from experiments.ditto.rankings import tabulate_all_rankings
from experiments.ditto.results import (
    ORDER,
    REPEATED,
    Results,
    describe,
    describe_row,
    own_lam,
    results_of,
)
from experiments.evidence import format_interval
from experiments.grid import Row, read
from experiments.tables import Comparison, fold, markdown, notes, tabulate_misses

__all__ = ["comparisons", "describe", "figures", "own_lam", "table", "write"]
HERE = Path(__file__).parent
BANDS: dict[str, dict[str, float]] = {
    "fashion": {"clean": 0.015, "A1": 0.015, "A2": 0.05, "A3": 0.05},
    "fashion_small": {},
    "fashion_small_pixels": {},
    "vehicle": dict.fromkeys(("clean", "A1", "A2", "A3"), 0.05),
    "vehicle_rounded_down": dict.fromkeys(("A1", "A2", "A3"), 0.05),
}
PAPER = {  # folders without a paper.csv → the folder of the paper's figures
    "fashion_small": "fashion",
    "fashion_small_pixels": "fashion",
    "vehicle_rounded_down": "vehicle",
}


def figures(name: str) -> dict[tuple[str, str], Comparison]:
    """Return the comparisons of a folder's committed runs, by condition and row."""
    return comparisons(results_of(name), read(HERE / name / "paper.csv"), BANDS[name])


def comparisons(
    results: Results, paper: Iterable[Row], bands: Mapping[str, float]
) -> dict[tuple[str, str], Comparison]:
    """Return comparisons with the paper, by condition and row; none without a band."""
    compared = {}
    for row in paper:
        band = bands.get(row["condition"].split("_")[0])
        ours = results.values(row["condition"], row["row"], "accuracy_weighted")
        if ours and band is not None:
            comparison = Comparison(float(row["mean"]), None, ours, band)
            compared[row["condition"], row["row"]] = comparison
    return compared


def table(
    results: Results,
    paper: Iterable[Row],
    compared: Mapping[tuple[str, str], Comparison],
    condition: str,
) -> str:
    """Return the table of a condition; without a band, compares the order of the rows instead.

    Returns an empty text if no row has results.
    """
    theirs = {row["row"]: row for row in paper if row["condition"] == condition}
    rows, banded, pairs = [], [], []
    for name in ORDER:
        ours = results.values(condition, name, "accuracy_weighted")
        if not ours:
            continue
        cells = [describe_row(name)]
        if (condition, name) in compared:
            banded.append(compared[condition, name])
            cells += banded[-1].cells(3, format_interval)
        else:
            mean = f"{float(theirs[name]['mean']):.3f}" if name in theirs else "–"
            cells += [mean, format_interval(ours, 3), ""]
            if name in theirs and name not in REPEATED:
                pairs.append((float(theirs[name]["mean"]), statistics.mean(ours)))
        unweighted = format_interval(results.values(condition, name, "accuracy"), 3)
        std = format_interval(results.values(condition, name, "accuracy_std"), 3)
        cells += [unweighted, f"{float(theirs[name]['std']):.2f}" if name in theirs else "–", std]
        rows.append(cells)
    if not rows:
        return ""
    head = ["", "the paper", "ours", "difference", "ours, mean over devices"]
    head += ["std over devices, the paper", "ours"]
    verdict = ""
    if banded:
        agree = sum(comparison.agrees for comparison in banded)
        verdict = f": {agree} of {len(banded)} agree (within {banded[0].band})"
    elif len(pairs) > 2:
        correlation = spearmanr(pairs).statistic
        verdict = f": rank correlation with the paper {correlation:.2f} ({len(pairs)} rows)"
    words = describe(condition)
    title = f"## {words[0].upper()}{words[1:]}{verdict}"
    return f"{title}\n\n" + fold("All methods", markdown(head, rows))


def page(name: str) -> str:
    """Return the text of the table of a folder."""
    folder = HERE / name
    results = results_of(name)
    paper = read(HERE / PAPER.get(name, name) / "paper.csv")
    compared = comparisons(results, paper, BANDS[name])
    named = {
        f"{describe(condition)}: {describe_row(row)}": comparison
        for (condition, row), comparison in compared.items()
    }
    head = (
        (folder / "head.md")
        .read_text()
        .format(
            runs=len(results.rows),
            seeds=", ".join(results.seeds),
            seeds_n=len(results.seeds),
            hours=sum(float(row["seconds"]) for row in results.rows) / 3600,
            agree=sum(comparison.agrees for comparison in named.values()),
            compared=len(named),
            misses=tabulate_misses(named, 3, format_interval),
            draws=describe_draws(name, results.seeds),
        )
    )
    rankings = tabulate_all_rankings(name, results, paper)
    tables = (table(results, paper, compared, condition) for condition in results.conditions)
    return f"{head}{rankings}\n" + "\n".join(text for text in tables if text) + notes(folder)


def write(name: str) -> None:
    """Write the table of a folder."""
    file = HERE / name / "table.md"
    file.write_text(page(name))
    print(f"{file}: {len(results_of(name).rows)} runs")


def main() -> None:
    """Write the table of the folder that the command names."""
    if len(sys.argv) != 2 or sys.argv[1] not in BANDS:
        sys.exit(
            f"Expected the name of a table, one of {', '.join(BANDS)}, but got {sys.argv[1:]}."
        )
    write(sys.argv[1])


if __name__ == "__main__":
    main()
