"""Table and pictures of attacks against defences, from the committed results."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.experiment import Row, read_csv
from experiments.papers import COLOURS, MARKERS, fold, markdown

HERE = Path(__file__).parent
MODELS = ("global", "personal")
NONE = "none"  # the attack of the runs without one
FRACTION = 0.2  # where everything meets everything
SHARE = f"{100 * FRACTION:.0f} % Byzantine clients"
CURVES = ("Mean", "Median", "TrimmedMean", "Krum", "Clipping", "GeometricMedian", "DnC")
NOISE = 2.0  # points: smaller losses are noise of a single seed, and are not written


class Results:
    """Results of the runs, as means over seeds.

    Args:
        rows: The rows of results.csv.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self.attacks = [a for a in dict.fromkeys(r["attack"] for r in self.rows) if a != NONE]
        self.defences = list(dict.fromkeys(row["defence"] for row in self.rows))
        self.fractions = sorted({float(row["fraction"]) for row in self.rows})
        self._values: dict[tuple[str, str, float], list[Row]] = {}
        for row in self.rows:
            cell = row["attack"], row["defence"], float(row["fraction"])
            self._values.setdefault(cell, []).append(row)

    def value(
        self,
        attack: str,
        defence: str,
        model: str,
        metric: str = "accuracy",
        fraction: float = FRACTION,
    ) -> float | None:
        """Return the mean of a metric over the runs of a cell; ``None`` without such runs."""
        rows = self._values.get((attack, defence, fraction), [])
        column = f"test/{model}/{metric}"
        values = [float(row[column]) for row in rows if row.get(column)]
        return statistics.mean(values) if values else None

    def accuracies(self, defence: str, model: str) -> dict[str, float]:
        """Return a defence's accuracy under each attack that has one."""
        values = {attack: self.value(attack, defence, model) for attack in self.attacks}
        return {attack: value for attack, value in values.items() if value is not None}

    def worst(self, defence: str, model: str) -> tuple[float, str] | None:
        """Return a defence's lowest accuracy over all attacks, and the attack."""
        values = ((value, name) for name, value in self.accuracies(defence, model).items())
        return min(values, default=None)

    def sort_defences(self) -> list[str]:
        """Return the defences by the lowest accuracy of the global model, the best one first."""
        lowest = {defence: self.worst(defence, "global") for defence in self.defences}
        return sorted(self.defences, key=lambda d: lowest[d] or (0.0, ""), reverse=True)

    def drops(self, attack: str, model: str) -> list[tuple[float, str]]:
        """Return an attack's drops of the accuracy under the defences, largest first."""
        drops = []
        for defence in self.defences:
            clean, value = (self.value(name, defence, model) for name in (NONE, attack))
            if clean is not None and value is not None:
                drops.append((clean - value, defence))
        return sorted(drops, reverse=True)


def read_results() -> Results:
    """Return the committed results."""
    return Results(read_csv(HERE / "results.csv"))


def write() -> None:
    """Write table.md and the pictures from the committed results."""
    results = read_results()
    (HERE / "table.md").write_text(make_page(results))
    draw_grid(results).savefig(HERE / "grid_20.png", dpi=120)
    draw_models(results).savefig(HERE / "models_20.png", dpi=120)
    draw_curves(results).savefig(HERE / "fractions.png", dpi=120)


# Tables


def make_page(results: Results) -> str:
    """Return the text of table.md."""
    parts = [(HERE / "head.md").read_text()]
    parts += [f"## Worst case of each defence, {SHARE}\n", tabulate_worst(results)]
    parts += [f"## Strength of attacks, {SHARE}\n", tabulate_strength(results)]
    for model in MODELS:
        table = fold("All defences and attacks", tabulate_grid(results, model))
        parts += [f"## Accuracy of {model} models, {SHARE}\n", table]
    table = fold("All defences", tabulate_success(results))
    return "\n".join([*parts, f"## Success of backdoors, {SHARE}\n", table])


def tabulate(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with numbers to the right."""
    return markdown(head, rows, align="---:")


def format_number(value: float | None, sign: str = "") -> str:
    """Return a number of three digits, or a dash."""
    return "–" if value is None else f"{value:{sign}.3f}"


def tabulate_grid(results: Results, model: str) -> str:
    """Return defences in rows, attacks in columns, and the worst case of each defence."""
    rows = []
    for defence in results.defences:
        names = [NONE, *results.attacks]
        values = [results.value(attack, defence, model) for attack in names]
        if worst := results.worst(defence, model):
            last = f"**{worst[0]:.3f}** ({worst[1]})"
            rows.append([defence, *map(format_number, values), last])
    return tabulate(["", NONE, *results.attacks, "worst case"], rows)


def tabulate_worst(results: Results) -> str:
    """Return the worst case of each defence for both models, the best defence first."""
    rows = []
    for defence in results.sort_defences():
        cells = [defence]
        for model in MODELS:
            worst = results.worst(defence, model)
            cells.append(format_number(results.value(NONE, defence, model)))
            cells.append("–" if worst is None else f"{worst[0]:.3f} ({worst[1]})")
        rows.append(cells)
    columns = [f"{model}, {case}" for model in MODELS for case in ("no attack", "worst attack")]
    return tabulate(["", *columns], rows)


def tabulate_strength(results: Results) -> str:
    """Return the attacks by their mean drop of the global models' accuracy over the defences."""
    rows = []
    for attack in results.attacks:
        drops = [results.drops(attack, model) for model in MODELS]
        means = [statistics.mean(drop for drop, _ in of_model) for of_model in drops]
        cells = [attack]
        for mean, of_model in zip(means, drops):
            largest, defence = of_model[0]
            cells += [format_number(mean, "+"), f"{largest:+.3f} ({defence})"]
        rows.append((means[0], cells))
    rows.sort(key=lambda row: row[0], reverse=True)
    columns = [f"{model}, {drop} drop" for model in MODELS for drop in ("mean", "largest")]
    return tabulate(["", *columns], [cells for _, cells in rows])


def tabulate_success(results: Results) -> str:
    """Return the success of backdoors by defence, for the attacks with a trigger."""
    metric = "backdoor_success"
    names = [
        (attack, model)
        for attack in results.attacks
        for model in MODELS
        if any(results.value(attack, d, model, metric) is not None for d in results.defences)
    ]
    rows = [
        [d, *(format_number(results.value(a, d, m, metric)) for a, m in names)]
        for d in results.defences
    ]
    return tabulate(["", *(f"{attack}, {model}" for attack, model in names)], rows)


# Pictures


def draw_grid(results: Results) -> Figure:
    """Draw the loss of accuracy by each attack under each defence, for both models.

    Defences are sorted by their accuracy in the worst case of the global model.
    """
    defences = results.sort_defences()
    size = (3.2 + 0.55 * (len(results.attacks) + 2), 2.0 + 0.5 * len(defences))
    figure = Figure(figsize=size, layout="constrained")
    for axes, model in zip(figure.subplots(2, 1, sharex=True), MODELS):
        draw_losses(axes, results, defences, model)
    title = f"Loss of accuracy by an attack, in points, with {SHARE}"
    figure.suptitle(title, fontweight="bold")
    return figure


def draw_losses(axes: Axes, results: Results, defences: Sequence[str], model: str) -> None:
    """Draw a model's losses of accuracy as a map, after its accuracy without an attack."""
    nan = float("nan")
    names = ["accuracy, no attack", *results.attacks, "largest loss"]
    losses = []
    for defence in defences:
        clean, values = results.value(NONE, defence, model), results.accuracies(defence, model)
        drops = {} if clean is None else {a: 100 * (clean - value) for a, value in values.items()}
        row = [drops.get(attack, nan) for attack in results.attacks]
        losses.append([nan, *row, max(drops.values(), default=nan)])
        text = "–" if clean is None else f"{clean:.2f}"
        axes.text(0, len(losses) - 1, text, ha="center", va="center", fontsize=8)
    axes.imshow(losses, cmap="Oranges", vmin=0, vmax=60, aspect="auto")
    for i, row in enumerate(losses):
        for j, loss in enumerate(row):
            if j and loss >= NOISE:
                colour = "white" if loss > 42 else "black"
                style = {"ha": "center", "va": "center", "fontsize": 8, "color": colour}
                axes.text(j, i, f"{loss:.0f}", **style)
    axes.axvline(0.5, color="0.6", lw=1)
    axes.axvline(len(names) - 1.5, color="0.6", lw=1)
    axes.set_xticks(range(len(names)), names, rotation=55, ha="right")
    axes.set_yticks(range(len(defences)), defences)
    axes.set_title(f"{model} models", loc="left", fontsize=11)
    axes.tick_params(length=0)


def draw_models(results: Results) -> Figure:
    """Draw each defence without attack, in the mean and in the worst case, for both models."""
    defences = results.sort_defences()
    figure = Figure(figsize=(11, 1.6 + 0.32 * len(defences)), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    words = ("no attack", "mean over attacks", "worst attack")
    for axes, model in zip(panels, MODELS):
        for place, defence in enumerate(defences):
            clean = results.value(NONE, defence, model)
            values = list(results.accuracies(defence, model).values())
            axes.plot([min(values), clean], [place, place], color="0.75", lw=2, zorder=1)
            points = (clean, statistics.mean(values), min(values))
            for value, word, colour, marker in zip(points, words, COLOURS[3:6], "osv"):
                label = word if place == 0 else None
                axes.scatter(value, place, color=colour, marker=marker, label=label, zorder=2, s=36)
        axes.set_title(f"{model} models", loc="left", fontweight="bold")
        axes.set_xlabel("mean accuracy of benign clients")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(defences)), defences)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(SHARE)
    return figure


def draw_curves(results: Results) -> Figure:
    """Draw accuracy against the fraction of Byzantine clients: a panel per defence and model."""
    attacks = [
        attack
        for attack in results.attacks
        if results.value(attack, CURVES[0], "global", fraction=0.1) is not None
    ]
    figure = Figure(figsize=(1.75 * len(CURVES) + 0.8, 5.2), layout="constrained")
    panels = figure.subplots(2, len(CURVES), sharex=True, sharey="row")
    for line, model in zip(panels, MODELS):
        for axes, defence in zip(line, CURVES):
            for attack, colour, marker in zip(attacks, COLOURS[3:], MARKERS):
                points = []
                for fraction in results.fractions:
                    name = attack if fraction else NONE
                    value = results.value(name, defence, model, fraction=fraction)
                    points += [] if value is None else [(100 * fraction, value)]
                style = {"color": colour, "marker": marker, "ms": 4, "lw": 1.6}
                axes.plot(*zip(*points), label=attack, **style)
            axes.set_title(defence, fontsize=9.5)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(f"{model} models")
    panels[-1][len(CURVES) // 2].set_xlabel("Byzantine clients, %")
    title = "Mean accuracy of benign clients (each row has its own scale)"
    figure.suptitle(title, fontweight="bold", fontsize=11)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(attacks), frameon=False)
    return figure
