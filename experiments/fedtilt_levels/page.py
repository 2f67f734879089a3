"""The tables and the picture of two-level fairness, from the rows of the clients."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.experiment import Row, group_rows, read_csv
from experiments.papers import COLOURS, MARKERS, markdown
from experiments.rankings import Pairs, tabulate_pairs
from pl_fed.statistics import t_interval

HERE = Path(__file__).parent
DITTO = "Ditto"
DECISIVE = "FedTilt, τ = 3"
TILTS = (
    "FedTilt, τ = 1",
    "FedTilt, τ = 3",
    "FedTilt, τ = 10",
    "FedTilt, τ = 3, λ = 3",
    "FedTilt, τ = 50, λ = 100",
)
SMALL_STEPS = "remain, small steps"  # added after the first results
FIGURES = {
    "accuracy": "accuracy, %",
    "own_accuracy": "in the client's proportions, %",
    "class_std": "μ_σ over classes",
    "worst_class": "worst class, %",
    "spread": "σ over clients",
}
Setting = tuple[str, str]
LETTERS: dict[Setting, str] = {
    ("unequal", "remain"): "A",
    ("equal", "remain"): "B",
    ("unequal", "vanish"): "C",
    ("equal", "vanish"): "D",
}
SMALL_SETTINGS = [("unequal", SMALL_STEPS), ("equal", SMALL_STEPS)]


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


def read_results() -> Results:
    """Return the results of finished runs by sizes, losses and method, in the order of seeds."""
    results: Results = {}
    runs = group_rows(read_csv(HERE / "clients.csv"), "sizes", "losses", "method", "seed")
    for (sizes, losses, method, seed), rows in runs:
        results.setdefault((sizes, losses, method), []).append(build_result(seed, rows))
    return {key: sorted(runs, key=lambda run: int(run.seed)) for key, runs in results.items()}


def build_result(seed: str, rows: Sequence[Row]) -> SeedResult:
    """Return the results of a run from the rows of its clients."""
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
    own = [t_interval([run.figure(name) for run in base]).text() for name in FIGURES]
    rows = [[DITTO, *own]]
    for method in TILTS:
        both = pairs(results, setting, method)
        if both:
            rows.append([f"{method}, minus Ditto", *(_difference(both, n) for n in FIGURES)])
    return markdown(["", *FIGURES.values()], rows)


def _difference(both: Sequence[tuple[SeedResult, SeedResult]], name: str) -> str:
    differences = [run.figure(name) - base.figure(name) for base, run in both]
    return t_interval(differences).text(sign=True)


def tabulate_decisive(results: Results, settings: Iterable[Setting] = LETTERS) -> str:
    """Return the table of the decisive comparison: a tilt against Ditto in each setting."""
    settings = list(settings)
    compared = []
    for name in ("class_std", "accuracy"):
        for setting in settings:
            if both := pairs(results, setting, DECISIVE):
                base, runs = zip(*both)
                compared.append(
                    Pairs(
                        [describe(setting), FIGURES[name]],
                        [run.figure(name) for run in runs],
                        [run.figure(name) for run in base],
                        [value for run in runs for value in run.values[name]],
                        [value for run in base for value in run.values[name]],
                    )
                )
    return tabulate_pairs(["setting", "figure"], compared, 2)


def describe(setting: Setting) -> str:
    """Return a setting in words."""
    sizes, losses = setting
    letter = LETTERS[sizes, "remain" if losses == SMALL_STEPS else losses]
    return f"{letter}: {sizes} sizes, losses {losses}"


def draw(results: Results, path: Path) -> None:
    """Draw each method's difference from Ditto in accuracy and in μ_σ, with 95 % intervals.

    Args:
        results: The results; those with more and smaller steps have hollow markers.
        path: The file to write.
    """
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    panels = figure.subplots(2, 2)
    for axes, setting in zip(panels.flat, LETTERS):
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.axvline(0, color="0.6", linewidth=0.8)
        for method, colour, marker in zip(TILTS, COLOURS[1:], MARKERS):
            style = {"fmt": marker, "color": colour, "capsize": 2}
            _draw_method(axes, pairs(results, setting, method), {**style, "label": method})
            if setting[1] == "remain":
                small_pairs = pairs(results, (setting[0], SMALL_STEPS), method)
                _draw_method(axes, small_pairs, {**style, "markerfacecolor": "white"})
        axes.set_title(describe(setting), fontsize=10.5)
        axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel("accuracy over classes of equal size, minus Ditto's, points")
    for row in panels:
        row[0].set_ylabel("μ_σ over classes, minus Ditto's, points")
    panels[0][0].legend(fontsize=8, title="hollow: with small steps", title_fontsize=8)
    figure.suptitle("FedTilt against Ditto; lower right is better", fontweight="bold")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_method(
    axes: Axes, both: Sequence[tuple[SeedResult, SeedResult]], style: Mapping[str, Any]
) -> None:
    """Draw the mean difference of a method from Ditto; nothing without runs."""
    if not both:
        return
    x, y = (
        t_interval([run.figure(name) - base.figure(name) for base, run in both])
        for name in ("accuracy", "class_std")
    )
    error = {"xerr": x.high - x.estimate, "yerr": y.high - y.estimate} if len(both) > 1 else {}
    axes.errorbar(x.estimate, y.estimate, **error, **style)


def tabulate_settings(results: Results, settings: Iterable[Setting] = LETTERS) -> str:
    """Return the tables of some settings, without those that have no run."""
    parts = [
        f"### {describe(setting)}\n\n{tabulate_setting(results, setting)}"
        for setting in settings
        if (*setting, DITTO) in results
    ]
    return "\n".join(parts)


def make_tables(results: Results) -> str:
    """Return the page of all tables; rates.md has the choice of the learning rates."""
    runs = [run for key, own in results.items() if key[1] != SMALL_STEPS for run in own]
    untrained = sum(run.untrained for run in runs)
    seeds = len({run.seed for run in runs})
    rates = (HERE / "rates.md").read_text(encoding="utf-8")
    return f"""# Two-level fairness: all figures

{len(runs)} runs, {seeds} seeds. Figures are means over clients, in points; σ is a deviation over
clients. Brackets hold 95 % intervals by Student's t over seeds. {untrained} clients never took
part, over all runs. The setting and the predictions are in [README.md](README.md).

## {DECISIVE} and λ = 0, minus Ditto

{tabulate_decisive(results)}
p over seeds: a paired t-test. p over clients: Wilcoxon's signed-rank test on the clients of all
seeds; clients of one seed share a global model. Up / down: the shares of clients with more and with
less than under Ditto. All p-values are corrected by Holm's method for the number of tests of their
kind in this table.

## All methods

{tabulate_settings(results)}
## More and smaller steps

Added after the results above. All methods take six passes in a round with learning rate 0.005,
instead of two passes with the learning rates below.

{tabulate_decisive(results, SMALL_SETTINGS)}
{tabulate_settings(results, SMALL_SETTINGS)}
{rates}"""


def write() -> None:
    """Write the tables and the picture."""
    results = read_results()
    (HERE / "table.md").write_text(make_tables(results), encoding="utf-8")
    draw(results, HERE / "levels.png")
