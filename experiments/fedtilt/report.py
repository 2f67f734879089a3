"""FedTilt's Tables II, III and VII and a picture of the tilts, from the runs' rows.

python -m experiments.fedtilt.report
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from experiments.fedtilt.run import (
    CIFAR10_SETTINGS,
    DITTO_LAM,
    SEEDS,
    SETTINGS,
    SPLITS,
    SWEEP,
    SWEPT,
    WHOLE,
    job,
)
from experiments.grid import Row, finished_rows, group_rows, key_of, read
from experiments.tables import DATA_NAMES, Comparison, fold, markdown, notes, tabulate_misses

HERE = Path(__file__).parent
BAND = 2.0  # points, for all four figures
METRICS = {
    "accuracy": "accuracy, %",
    "accuracy_std": "σ over clients",
    "class_std_mean": "μ_σ over classes",
    "class_std_std": "σ_σ over classes",
}
SPREADS = [metric for metric in METRICS if metric != "accuracy"]
METRIC_WORDS = {  # in the picture
    "accuracy": "accuracy, %",
    "accuracy_std": "spread over clients (σ)",
    "class_std_mean": "spread over classes (μ_σ)",
    "class_std_std": "spread of the latter (σ_σ)",
}
SWEPT_WORDS = {"fmnist/clean": "clean", "fmnist/corruption": "corrupted"}
READINGS = {  # rows of the table → the paper's method, our method and our model
    "FedAvg, global w": ("FedAvg", "FedAvg", "global"),
    "FedAvg, w_n after 10 local passes": ("FedAvg", "FedAvg", "personal"),
    "Ditto": ("Ditto", "Ditto", "personal"),
    "FedTilt": ("FedTilt", "FedTilt", "personal"),
}
CONDITION_WORDS = {
    "clean": "clean",
    "corruption": "random corruptions",
    "gaussian": "Gaussian noise",
}
TABLES = {"clean": "II", "corruption": "III", "gaussian": "VII"}  # of the paper


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
    return [row for row in read(HERE / "paper.csv") if row["setting"] in ours]


def figures() -> dict[tuple[str, str], dict[str, Comparison]]:
    """Return the comparisons of the committed runs, by setting and reading."""
    return comparisons(Results(finished_rows(HERE / "results.csv")), WHOLE)


def comparisons(results: Results, split: str) -> dict[tuple[str, str], dict[str, Comparison]]:
    """Return the comparisons with the paper by setting and reading, then by figure."""
    theirs = {(row["setting"], row["method"]): row for row in read_published_rows()}
    found: dict[tuple[str, str], dict[str, Comparison]] = {}
    for setting in dict.fromkeys(setting for setting, _ in theirs):
        for name, (method, ours, model) in READINGS.items():
            for metric in METRICS:
                values = results.values(setting, ours, f"{model}_{metric}", split)
                if values:
                    comparison = Comparison(
                        float(theirs[setting, method][metric]), None, values, BAND
                    )
                    found.setdefault((setting, name), {})[metric] = comparison
    return found


def describe(setting: str) -> str:
    """Return a setting in words."""
    data, condition = setting.split("/")
    return f"{DATA_NAMES[data]}, {CONDITION_WORDS[condition]}"


def table(
    compared: Mapping[tuple[str, str], Mapping[str, Comparison]], condition: str, more: str = ""
) -> str:
    """Return the table of a condition; ``more`` is appended to its title."""
    rows = [
        [
            f"{DATA_NAMES[setting.split('/')[0]]}, {name}",
            *(cell for metric in METRICS for cell in row[metric].cells(2)),
        ]
        for (setting, name), row in compared.items()
        if setting.endswith(condition)
    ]
    head = [""] + [cell for metric in METRICS.values() for cell in (metric, "ours", "difference")]
    if not rows:
        return ""
    title = f"## Table {TABLES[condition]}: {CONDITION_WORDS[condition]}{more}"
    return f"{title}\n\n" + fold("All figures", markdown(head, rows))


def orders(results: Results) -> str:
    """Return the table of the methods' ranking by each figure, in the paper and in our runs."""
    rows = []
    for (setting,), own in group_rows(read_published_rows(), "setting"):
        theirs = {row["method"]: row for row in own}
        for metric, title in METRICS.items():
            sign = -1 if metric == "accuracy" else 1
            found = {
                method: results.values(setting, method, f"personal_{metric}", WHOLE)
                for method in theirs
            }
            if not all(found.values()):
                continue
            ours = sorted(found, key=lambda m: sign * statistics.mean(found[m]))
            order = sorted(theirs, key=lambda m: sign * float(theirs[m][metric]))
            same = "✓" if ours == order else ("first ✓" if ours[0] == order[0] else "✗")
            rows.append([describe(setting), title, " > ".join(order), " > ".join(ours), same])
    ranks = markdown(["setting", "figure", "the paper", "ours", "same"], rows)
    return (
        "## Ranking of the methods\n\nFedAvg is represented by w_n after 10 local passes.\n\n"
        + fold("All rankings", ranks)
    )


def draw_sweep(results: Results, path: Path) -> None:
    """Draw accuracy and the three spreads over τ and λ, for the first seed."""
    first = Results(row for row in results.rows if row["seed"] == str(SEEDS[0]))
    figure = Figure(figsize=(15, 3.4 * len(SWEPT)), layout="constrained")
    panels = figure.subplots(len(SWEPT), len(METRICS), squeeze=False)
    lams, taus = SWEEP["lam"], SWEEP["tau"]
    for row, setting in zip(panels, SWEPT):
        for axes, metric in zip(row, METRICS):
            grid = [[math.nan] * len(taus) for _ in lams]
            for (i, lam), (j, tau) in itertools.product(enumerate(lams), enumerate(taus)):
                arguments = job(setting, WHOLE, "FedTilt", SEEDS[0], lam=lam, tau=tau).key[3]
                column = f"personal_{metric}"
                values = first.values(setting, "FedTilt", column, WHOLE, arguments)
                grid[i][j] = next(iter(values), math.nan)
            best = "viridis" if metric == "accuracy" else "viridis_r"
            image = axes.imshow(grid, cmap=best, aspect="auto")
            for i, j in itertools.product(range(len(lams)), range(len(taus))):
                *colour, _ = image.cmap(image.norm(grid[i][j]))
                ink = "white" if statistics.mean(colour) < 0.5 else "black"
                text = f"{grid[i][j]:.2f}"
                axes.text(j, i, text, ha="center", va="center", fontsize=8, color=ink)
            axes.set_xticks(range(len(taus)), [f"{t:g}" for t in taus])
            axes.set_yticks(range(len(lams)), [f"{lam:g}" for lam in lams])
            axes.set_title(f"{SWEPT_WORDS[setting]}: {METRIC_WORDS[metric]}", fontsize=10.5)
            axes.set(xlabel="τ", ylabel="λ")
    figure.suptitle(
        "FedTilt on Fashion-MNIST, personal models; yellow is better", fontweight="bold"
    )
    figure.savefig(path, dpi=120)


def describe_selection() -> str:
    """Return the validation accuracies that decided the choice of Ditto's λ."""
    texts = [
        f"{describe(setting)}: "
        + ", ".join(f"{float(row['personal_validation']):.4f}" for row in rows)
        for (setting,), rows in group_rows(finished_rows(HERE / "select.csv"), "setting")
    ]
    return "; ".join(texts)


def write(folder: Path = HERE) -> None:
    """Write tables.md and the pictures."""
    results = Results(finished_rows(folder / "results.csv"))
    hours = sum(float(row["seconds"]) for row in results.rows) / 3600
    compared = comparisons(results, WHOLE)
    accuracies = {
        f"{describe(setting)}: {name}": row["accuracy"] for (setting, name), row in compared.items()
    }
    spreads = [row[metric].agrees for row in compared.values() for metric in SPREADS]
    head = (
        (HERE / "head.md")
        .read_text()
        .format(
            runs=len(results.rows),
            hours=hours,
            lam=DITTO_LAM,
            chosen=describe_selection(),
            band=BAND,
            misses=tabulate_misses(accuracies, 2),
            spreads=sum(spreads),
            compared_spreads=len(spreads),
        )
    )
    parts = [table(compared, condition) for condition in TABLES]
    others = [split for split in SPLITS if split != WHOLE]
    parts += [table(comparisons(results, split), "clean", f": {split}") for split in others]
    runs = {(r["setting"], r["arguments"]) for r in results.rows if r["method"] == "FedTilt"}
    if all(len([run for run in runs if run[0] == setting]) > 1 for setting in SWEPT):
        draw_sweep(results, folder / "tilts.png")
    (folder / "tables.md").write_text(
        head + "\n".join([*filter(None, parts), orders(results)]) + notes(HERE)
    )


if __name__ == "__main__":
    write()
