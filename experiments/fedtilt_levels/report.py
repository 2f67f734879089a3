"""The tables and the picture of two-level fairness, from the runs' rows.

python -m experiments.fedtilt_levels.run --report
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from experiments.evidence import interval, paired_p_value, paired_rank_p_value
from experiments.fedtilt_levels.run import DITTO, LOSSES, NAMES, RATIOS, TILTS
from experiments.grid import Row, finished_rows, group_rows, read
from experiments.tables import COLOURS, MARKERS, markdown

HERE = Path(__file__).parent
DECISIVE = "FedTilt, τ = 3"
FIGURES = {
    "accuracy": "accuracy, %",
    "own_accuracy": "in the client's proportions, %",
    "class_std": "μ_σ over classes",
    "worst_class": "worst class, %",
    "spread": "σ over clients",
}
LETTERS = dict(zip(((s, k) for k in LOSSES for s in RATIOS), "ABCD"))
Setting = tuple[str, str]


@dataclass(frozen=True)
class SeedResult:
    """Results of a run: a value per client for each figure, in points.

    Args:
        seed: The seed.
        values: The clients' values by figure.
        untrained: Number of clients that never took part.
    """

    seed: str
    values: dict[str, list[float]]
    untrained: int

    def figure(self, name: str) -> float:
        """Return a figure of the run: a mean over clients; σ is a population deviation."""
        if name == "spread":
            return statistics.pstdev(self.values["accuracy"])
        return statistics.mean(self.values[name])


Results = dict[tuple[str, str, str], list[SeedResult]]


def read_results(folder: Path = HERE) -> Results:
    """Return the results of finished runs by sizes, losses and method, in the order of seeds."""
    done = {tuple(row[name] for name in NAMES) for row in finished_rows(folder / "results.csv")}
    results: Results = {}
    for key, rows in group_rows(read(folder / "clients.csv"), *NAMES):
        if key in done:
            *cell, seed = key
            results.setdefault((cell[0], cell[1], cell[2]), []).append(_of_seed(seed, rows))
    return {key: sorted(runs, key=lambda run: int(run.seed)) for key, runs in results.items()}


def _of_seed(seed: str, rows: Sequence[Row]) -> SeedResult:
    names = [name for name in FIGURES if name != "spread"]
    values = {name: [100 * float(row[name]) for row in rows] for name in names}
    return SeedResult(seed, values, sum(row["rounds"] == "0" for row in rows))


def pairs(results: Results, setting: Setting, method: str) -> list[tuple[SeedResult, SeedResult]]:
    """Return Ditto's and a method's results of the same seeds."""
    base = {run.seed: run for run in results.get((*setting, DITTO), [])}
    runs = results.get((*setting, method), [])
    return [(base[run.seed], run) for run in runs if run.seed in base]


def tabulate_setting(results: Results, setting: Setting) -> str:
    """Return the table of a setting: Ditto's figures, and the others' differences from them."""
    base = results[(*setting, DITTO)]
    own = [interval([run.figure(name) for run in base]).text() for name in FIGURES]
    rows = [[DITTO, *own]]
    for method in TILTS:
        both = pairs(results, setting, method)
        if both:
            rows.append([f"{method}, minus Ditto", *(_difference(both, n) for n in FIGURES)])
    return markdown(["", *FIGURES.values()], rows)


def _difference(both: Sequence[tuple[SeedResult, SeedResult]], name: str) -> str:
    differences = [run.figure(name) - base.figure(name) for base, run in both]
    return interval(differences).text(sign=True)


def tabulate_decisive(results: Results) -> str:
    """Return the table of the decisive comparison: μ_σ of one tilt against Ditto."""
    rows = []
    for setting in LETTERS:
        both = pairs(results, setting, DECISIVE)
        if not both:
            continue
        by_seed = [[run.figure("class_std") for run in runs] for runs in zip(*both)]
        by_client = [[v for run in runs for v in run.values["class_std"]] for runs in zip(*both)]
        rows.append(
            [
                describe(setting),
                _difference(both, "class_std"),
                _difference(both, "accuracy"),
                _p_value(paired_p_value(*by_seed)),
                str(len(both)),
                _p_value(paired_rank_p_value(*by_client)),
                str(len(by_client[0])),
            ]
        )
    head = ["", "μ_σ", "accuracy", "p, seeds", "seeds", "p, clients", "clients"]
    return markdown(head, rows)


def _p_value(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def describe(setting: Setting) -> str:
    """Return a setting in words."""
    sizes, losses = setting
    return f"{LETTERS[setting]}: {sizes} sizes, losses {losses}"


def draw(results: Results, path: Path) -> None:
    """Draw each method's difference from Ditto in accuracy and in μ_σ, with 95 % intervals."""
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    panels = figure.subplots(2, 2)
    for axes, setting in zip(panels.flat, LETTERS):
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.axvline(0, color="0.6", linewidth=0.8)
        for method, colour, marker in zip(TILTS, COLOURS[1:], MARKERS):
            both = pairs(results, setting, method)
            if not both:
                continue
            x, y = (
                interval([run.figure(name) - base.figure(name) for base, run in both])
                for name in ("accuracy", "class_std")
            )
            error = {"xerr": x.high - x.mean, "yerr": y.high - y.mean} if len(both) > 1 else {}
            axes.errorbar(
                x.mean, y.mean, fmt=marker, color=colour, label=method, capsize=2, **error
            )
        axes.set_title(describe(setting), fontsize=10.5)
        axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel("accuracy over classes of equal size, minus Ditto's, points")
    for row in panels:
        row[0].set_ylabel("μ_σ over classes, minus Ditto's, points")
    panels[0][0].legend(fontsize=8)
    figure.suptitle("FedTilt against Ditto; lower right is better", fontweight="bold")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def make_tables(results: Results) -> str:
    """Return the page of all tables."""
    runs = [run for found in results.values() for run in found]
    untrained = sum(run.untrained for run in runs)
    lines = [
        "# Two-level fairness: all figures",
        "",
        f"{len(runs)} runs. Figures are means over clients, in points; brackets hold 95 % intervals"
        " by Student's t over seeds.",
        f"Clients that never took part, over all runs: {untrained}. The setting and the predictions"
        " are in [README.md](README.md).",
        "",
        f"## {DECISIVE} and λ = 0, minus Ditto",
        "",
        tabulate_decisive(results),
        "p: a paired t-test over seeds, and Wilcoxon's signed-rank test over the clients of all"
        " seeds, both of μ_σ. Seeds are independent;",
        "clients of one seed share a global model.",
        "",
    ]
    for setting in LETTERS:
        if (*setting, DITTO) in results:
            table = tabulate_setting(results, setting)
            lines += [f"## {describe(setting)}", "", table, ""]
    return "\n".join(lines)


def write(folder: Path = HERE) -> None:
    """Write the tables and the picture."""
    results = read_results(folder)
    (folder / "table.md").write_text(make_tables(results), encoding="utf-8")
    draw(results, folder / "levels.png")
