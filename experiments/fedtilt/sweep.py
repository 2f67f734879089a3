"""Picture of FedTilt over its tilts τ and λ."""

import itertools
import math
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from experiments.fedtilt.paper import METRICS
from experiments.fedtilt.results import Results
from experiments.fedtilt.run import SEEDS, SWEEP, SWEPT, WHOLE, job

METRIC_WORDS = {
    "accuracy": "accuracy, %",
    "accuracy_std": "spread over clients (σ)",
    "class_std_mean": "spread over classes (μ_σ)",
    "class_std_std": "spread of the latter (σ_σ)",
}
SWEPT_WORDS = {"fmnist/clean": "clean", "fmnist/corruption": "corrupted"}


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
