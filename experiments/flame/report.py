"""Report of FLAME's Table III and its pictures, from the rows of the runs.

python -m experiments.flame.report
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.flame.run import METHODS
from experiments.grid import Row, finished_rows, group_rows, read
from experiments.tables import COLOURS, MARKERS, Comparison, format_mean_and_std, markdown, notes

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
EXTRA = {  # columns that the paper lacks
    "FLAME HM by validation": ("FLAME", "hybrid_accuracy"),
    "FLAME GM of the last round": ("FLAME", "global_accuracy"),
    "pFedMe, step 1, PM": ("pFedMe, step 1", "personal_accuracy"),
    "pFedMe, step 1, GM": ("pFedMe, step 1", "global_accuracy"),
    "Ditto PM": ("Ditto", "personal_accuracy"),
    "Ditto GM": ("Ditto", "global_accuracy"),
}
SAME = "pFedMe, step 1"  # has FLAME's values, so it is drawn larger to be visible
GLOBAL_BAND, STDS = 0.03, 2.0  # personal and hybrid models: twice the paper's std over its runs


class Results:
    """Results of the runs, as values over seeds by setting, method and column."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self._by: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in self.rows:
            self._by[row["setting"], row["method"]].append(row)

    def values(self, setting: str, method: str, column: str) -> list[float]:
        """Return a column's values, one per seed."""
        return [float(r[column]) for r in self._by[setting, method] if r.get(column)]


def figures() -> dict[str, dict[str, Comparison]]:
    """Return the comparisons of the committed runs."""
    return comparisons(Results(finished_rows(HERE / "results.csv")), read(HERE / "paper.csv"))


def comparisons(results: Results, paper: Iterable[Row]) -> dict[str, dict[str, Comparison]]:
    """Return the comparisons with the paper by setting, then by the paper's column."""
    found: dict[str, dict[str, Comparison]] = {}
    for row in paper:
        ours = results.values(row["setting"], *COLUMNS[row["column"]])
        mean, std = float(row["mean"]), float(row["std"])
        band = GLOBAL_BAND if row["column"].endswith("GM") else STDS * std
        if ours:
            compared = Comparison(mean, std, ours, band)
            found.setdefault(row["setting"], {})[row["column"]] = compared
    return found


def tables(results: Results, compared: Mapping[str, Mapping[str, Comparison]]) -> str:
    """Return all tables."""
    parts = []
    for title in ("FLAME", "pFedMe", "Ditto"):
        names = [name for name in COLUMNS if name.startswith(title)]
        head = ["setting"]
        for name in names:
            head += [f"{name}, paper", "ours", "difference"]
        complete = {s: columns for s, columns in compared.items() if columns.keys() >= {*names}}
        if not complete:
            continue
        verdicts = [columns[name].agrees for columns in complete.values() for name in names]
        rows = [
            [s, *(c for n in names for c in columns[n].cells())] for s, columns in complete.items()
        ]
        title += ", as coded" if title == "Ditto" else ""
        count = f"{sum(verdicts)} of {len(verdicts)} figures agree"
        parts.append(f"## {title}: {count}\n\n" + markdown(head, rows))
    rows = [
        [
            setting,
            *(
                format_mean_and_std(results.values(setting, method, name))
                for method, name in EXTRA.values()
            ),
        ]
        for setting in compared
    ]
    parts.append("## What the paper lacks\n\n" + markdown(["setting", *EXTRA], rows))
    return "\n".join(parts)


def draw_table(compared: Mapping[str, Mapping[str, Comparison]], path: Path) -> None:
    """Draw the paper's figures and ours."""
    settings = list(compared)
    figure = Figure(figsize=(13, 0.32 * len(settings) + 1.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, model in zip(panels, ("HM", "PM", "GM")):
        columns = [name for name in COLUMNS if name.endswith(model)]
        for number, name in enumerate(columns):
            color, marker = COLOURS[(0, 5, 4)[number]], MARKERS[number]
            for place, setting in enumerate(settings):
                if name not in compared[setting]:
                    continue
                comparison = compared[setting][name]
                y = place + (number - 1) * 0.24
                axes.plot(
                    [comparison.paper - comparison.band, comparison.paper + comparison.band],
                    [y, y],
                    color=color, lw=5, alpha=0.25, solid_capstyle="butt",
                )  # fmt: skip
                axes.plot(comparison.paper, y, "|", color=color, ms=7)
                axes.plot(
                    statistics.mean(comparison.ours), y, marker, color=color, ms=4,
                    label=name.split()[0] if not place else None,
                )  # fmt: skip
        axes.set_title(model, fontsize="medium")
        axes.grid(axis="x", alpha=0.3)
        axes.set_xlabel("accuracy")
    panels[0].set_yticks(range(len(settings)), settings)
    panels[0].invert_yaxis()
    panels[-1].legend(frameon=False, fontsize="small", loc="lower left")
    figure.suptitle("bars: the paper's figure and its band; markers: ours", fontsize="medium")
    figure.savefig(path, dpi=130)


def draw_curves(curves: Iterable[Row], settings: Sequence[str], path: Path) -> None:
    """Draw validation accuracies over rounds, as in the paper's Figure 3: means over seeds."""
    figure = Figure(figsize=(6 * len(settings), 4.2), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(settings), squeeze=False)[0]
    all_rows = list(curves)
    for axes, setting in zip(panels, settings):
        rows = [row for row in all_rows if row["setting"] == setting]
        for (method,), own in group_rows(rows, "method"):
            number = list(METHODS).index(method)
            for model, line in (("personal", "-"), ("global", "--"), ("hybrid", ":")):
                if model == "hybrid" and method != "FLAME":
                    continue
                points = [
                    (int(r) + 1, statistics.mean(float(row[f"{model}_accuracy"]) for row in rows))
                    for (r,), rows in group_rows(own, "round")
                ]
                below = {"lw": 5, "alpha": 0.5} if method == SAME else {}
                axes.plot(
                    *zip(*points), line, color=COLOURS[number], marker=MARKERS[number], ms=3,
                    label=f"{method}, {model}", zorder=1 if below else 2, **below,
                )  # fmt: skip
        axes.set(title=setting, xlabel="round", ylabel="validation accuracy")
        axes.grid(alpha=0.3)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside right center",
        fontsize="x-small",
        handlelength=4,
    )
    figure.savefig(path, dpi=130)


def draw_fairness(clients: Iterable[Row], settings: Sequence[str], path: Path) -> None:
    """Draw accuracy against the variance of losses over clients, as in the paper's Figure 8.

    The upper panels use mean losses over a client's samples. The lower panels use sums over its
    minibatches of 100, as in the authors' code, so that clients with large test sets count more.
    """
    figure = Figure(figsize=(5.5 * len(settings), 8), layout="constrained")
    panels = figure.subplots(2, len(settings), squeeze=False, sharex="col")
    client_rows = list(clients)
    for column, setting in enumerate(settings):
        rows = [row for row in client_rows if row["setting"] == setting]
        for (method,), own in group_rows(rows, "method"):
            number = list(METHODS).index(method)
            for model, marker in (("global", "o"), ("personal", "^")):
                accuracies, means, sums = [], [], []
                for _, run in group_rows(own, "seed"):
                    accuracies.append(statistics.mean(float(r[f"{model}_accuracy"]) for r in run))
                    losses = [float(r[f"{model}_loss"]) for r in run]
                    batches = [-(-int(r["test_samples"]) // 100) for r in run]
                    means.append(statistics.variance(losses))
                    sums.append(statistics.variance(a * b for a, b in zip(losses, batches)))
                for axes, values in zip(panels[:, column], (means, sums)):
                    x, y = statistics.mean(accuracies), statistics.mean(values)
                    hollow = {"fillstyle": "none", "ms": 14} if method == SAME else {"ms": 8}
                    name = f"{method}, {model}"
                    axes.plot(x, y, marker, color=COLOURS[number], label=name, **hollow)
        for axes, loss in zip(panels[:, column], ("mean loss", "summed loss")):
            axes.set(yscale="log", ylabel=f"variance of clients' {loss}", title=setting)
            axes.grid(alpha=0.3, which="both")
        panels[1, column].set_xlabel("mean accuracy over clients")
    handles = panels[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", fontsize="small", labelspacing=1)
    figure.savefig(path, dpi=130)


def write(folder: Path = HERE) -> None:
    """Write table3.md and the pictures."""
    results = Results(finished_rows(folder / "results.csv"))
    compared = comparisons(results, read(HERE / "paper.csv"))
    seeds = sorted({row["seed"] for row in results.rows}, key=int)
    hours = sum(float(row["seconds"]) for row in results.rows) / 3600
    head = (HERE / "head.md").read_text().format(
        runs=len(results.rows), seeds=len(seeds), each=", ".join(seeds), hours=hours, lr=0.1,
        stds=STDS, band=GLOBAL_BAND,
    )  # fmt: skip
    (folder / "table3.md").write_text(head + tables(results, compared) + notes(HERE))
    draw_table(compared, folder / "table3.png")
    hybrid = [s for s in compared if "hybrid" in s]
    draw_curves(read(folder / "curves.csv"), hybrid, folder / "curves.png")
    draw_fairness(read(folder / "clients.csv"), hybrid, folder / "fairness.png")


if __name__ == "__main__":
    write()
