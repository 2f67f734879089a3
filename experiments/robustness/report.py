"""Tables and pictures of the runs of attacks against defences."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.tables import COLOURS, MARKERS, fold

Row = Mapping[str, str]
MODELS = ("global", "personal")
NOISE = 2.0  # points: smaller losses are noise of a single seed, and are not written


class Results:
    """Results of the runs, as means over seeds.

    Args:
        rows: The rows of results.csv.
        attacks: Names of the attacks in the order of the tables; the first means no attack.
        defences: Names of the defences in the order of the tables.
    """

    def __init__(
        self, rows: Iterable[Row], attacks: Sequence[str], defences: Sequence[str]
    ) -> None:
        self.rows = list(rows)
        self.none = attacks[0]
        self.attacks = [a for a in attacks[1:] if any(r["attack"] == a for r in self.rows)]
        self.defences = [d for d in defences if any(r["defence"] == d for r in self.rows)]

    def value(
        self, attack: str, defence: str, fraction: float, column: str = "global_accuracy"
    ) -> float | None:
        """Return the mean of a column over the runs of a cell; ``None`` without such runs."""
        cell = (attack, defence, fraction)
        values = [
            float(row[column])
            for row in self.rows
            if (row["attack"], row["defence"], float(row["fraction"])) == cell and row[column]
        ]
        return statistics.mean(values) if values else None

    def worst(self, defence: str, fraction: float, model: str) -> tuple[float, str] | None:
        """Return a defence's lowest accuracy over all attacks, and the attack."""
        values = [(self.value(a, defence, fraction, f"{model}_accuracy"), a) for a in self.attacks]
        return min(((v, a) for v, a in values if v is not None), default=None)

    def sort_defences(self, fraction: float) -> list[str]:
        """Return the defences by the lowest accuracy of the global model, the best one first."""
        lowest = {d: self.worst(d, fraction, "global") for d in self.defences}
        return sorted(self.defences, key=lambda d: lowest[d] or (0.0, ""), reverse=True)

    def drops(self, attack: str, fraction: float, model: str) -> list[tuple[float, str]]:
        """Return an attack's drops of the accuracy under the defences, largest first."""
        drops = []
        for defence in self.defences:
            column = f"{model}_accuracy"
            clean = self.value(self.none, defence, fraction, column)
            value = self.value(attack, defence, fraction, column)
            if clean is not None and value is not None:
                drops.append((clean - value, defence))
        return sorted(drops, reverse=True)


def write(
    rows: Iterable[Row],
    folder: Path,
    attacks: Sequence[str],
    defences: Sequence[str],
    curves: Mapping[str, Sequence[str]],
    grid: Sequence[float],
) -> None:
    """Write table.md and the pictures."""
    results = Results(rows, attacks, defences)
    head = (Path(__file__).parent / "head.md").read_text()
    (folder / "table.md").write_text(f"{head}\n{tables(results, grid)}")
    for fraction in grid:
        name = f"{100 * fraction:.0f}"
        draw_grid(results, fraction, folder / f"grid_{name}.png")
        draw_models(results, fraction, folder / f"models_{name}.png")
    draw_curves(results, curves, folder / "fractions.png")
    print(tables(results, grid))


# Tables


def tables(results: Results, grid: Sequence[float]) -> str:
    """Return all tables."""
    parts = []
    for fraction in grid:
        share = f"{100 * fraction:.0f} % Byzantine clients"
        parts += [f"## Worst case of each defence, {share}", "", worst_table(results, fraction)]
        parts += [f"## Strength of attacks, {share}", "", strength_table(results, fraction)]
        for model in MODELS:
            parts += [
                f"## Accuracy of {model} models, {share}",
                "",
                fold("All defences and attacks", grid_table(results, fraction, model)),
            ]
        success = success_table(results, fraction)
        if success:
            parts += [f"## Success of backdoors, {share}", "", fold("All defences", success)]
    failed = {
        f"- {r['attack']}, {r['defence']}, {r['fraction']}: {r['failed']}"
        for r in results.rows
        if r["failed"]
    }
    if failed:
        parts += ["## Runs that ended by an error", "", "\n".join(sorted(failed)), ""]
    return "\n".join(parts)


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def number(value: float | None, sign: str = "") -> str:
    """Return a number of three digits, or a dash."""
    return "–" if value is None else f"{value:{sign}.3f}"


def grid_table(results: Results, fraction: float, model: str) -> str:
    """Return defences in rows, attacks in columns, and the worst case of each defence."""
    lines = []
    for defence in results.defences:
        names = [results.none, *results.attacks]
        values = [results.value(a, defence, fraction, f"{model}_accuracy") for a in names]
        worst = results.worst(defence, fraction, model)
        if worst is not None:
            last = f"**{worst[0]:.3f}** ({worst[1]})"
            lines.append([defence, *map(number, values), last])
    return table(["", results.none, *results.attacks, "worst case"], lines)


def worst_table(results: Results, fraction: float) -> str:
    """Return the worst case of each defence for both models, the best defence first."""
    lines = []
    for defence in results.sort_defences(fraction):
        cells = [defence]
        for model in MODELS:
            clean = results.value(results.none, defence, fraction, f"{model}_accuracy")
            worst = results.worst(defence, fraction, model)
            cells += [number(clean), "–" if worst is None else f"{worst[0]:.3f} ({worst[1]})"]
        lines.append(cells)
    columns = [f"{model}, {case}" for model in MODELS for case in ("no attack", "worst attack")]
    return table(["", *columns], lines)


def strength_table(results: Results, fraction: float) -> str:
    """Return the attacks by their mean drop of the global models' accuracy over the defences."""
    lines = []
    for attack in results.attacks:
        cells, order = [attack], 0.0
        for model in MODELS:
            drops = results.drops(attack, fraction, model)
            if not drops:
                break
            mean = statistics.mean(drop for drop, _ in drops)
            order = mean if model == "global" else order
            cells += [number(mean, "+"), f"{drops[0][0]:+.3f} ({drops[0][1]})"]
        else:
            lines.append((order, cells))
    lines.sort(key=lambda line: line[0], reverse=True)
    columns = [f"{model}, {drop} drop" for model in MODELS for drop in ("mean", "largest")]
    return table(["", *columns], [cells for _, cells in lines])


def success_table(results: Results, fraction: float) -> str:
    """Return the success of backdoors by defence; an empty text if no attack has a trigger."""
    names = [
        (attack, model)
        for attack in results.attacks
        for model in MODELS
        if any(
            results.value(attack, d, fraction, f"{model}_backdoor_success") is not None
            for d in results.defences
        )
    ]
    if not names:
        return ""
    lines = [
        [d, *(number(results.value(a, d, fraction, f"{m}_backdoor_success")) for a, m in names)]
        for d in results.defences
    ]
    return table(["", *(f"{attack}, {model}" for attack, model in names)], lines)


# Pictures


def figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """Return a figure and its panels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)


def draw_grid(results: Results, fraction: float, path: Path) -> None:
    """Draw the loss of accuracy by each attack under each defence, for both models.

    Defences are sorted by their accuracy in the worst case of the global model.
    """
    defences = results.sort_defences(fraction)
    size = (3.2 + 0.55 * (len(results.attacks) + 2), 2.0 + 0.5 * len(defences))
    sheet, panels = figure(2, 1, size, sharex=True)
    for panel, model in zip(panels[:, 0], MODELS):
        draw_losses(panel, results, defences, fraction, model)
    sheet.suptitle(
        f"Loss of accuracy by an attack, in points, with {100 * fraction:.0f} % Byzantine clients",
        fontweight="bold",
    )
    save(sheet, path)


def draw_losses(
    panel: Any, results: Results, defences: Sequence[str], fraction: float, model: str
) -> None:
    """Draw a model's losses of accuracy as a map, after its accuracy without an attack."""
    column = f"{model}_accuracy"
    names = ["accuracy, no attack", *results.attacks, "largest loss"]
    losses = []
    for defence in defences:
        clean = results.value(results.none, defence, fraction, column)
        values = [results.value(attack, defence, fraction, column) for attack in results.attacks]
        drops = [
            float("nan") if clean is None or value is None else 100 * (clean - value)
            for value in values
        ]
        defined = [drop for drop in drops if drop == drop]  # without NaN
        losses.append([float("nan"), *drops, max(defined, default=float("nan"))])
        text = "–" if clean is None else f"{clean:.2f}"
        panel.text(0, len(losses) - 1, text, ha="center", va="center", fontsize=8)
    panel.imshow(losses, cmap="Oranges", vmin=0, vmax=60, aspect="auto")
    for i, row in enumerate(losses):
        for j, loss in enumerate(row):
            if j and loss == loss and loss >= NOISE:
                colour = "white" if loss > 42 else "black"
                style = {"ha": "center", "va": "center", "fontsize": 8, "color": colour}
                panel.text(j, i, f"{loss:.0f}", **style)
    panel.axvline(0.5, color="0.6", lw=1)
    panel.axvline(len(names) - 1.5, color="0.6", lw=1)
    panel.set_xticks(range(len(names)), names, rotation=55, ha="right")
    panel.set_yticks(range(len(defences)), defences)
    panel.set_title(f"{model} models", loc="left", fontsize=11)
    panel.tick_params(length=0)


def draw_models(results: Results, fraction: float, path: Path) -> None:
    """Draw each defence without attack, in the mean and in the worst case, for both models."""
    defences = results.sort_defences(fraction)
    sheet, panels = figure(1, 2, (11, 1.6 + 0.32 * len(defences)), sharex=True, sharey=True)
    for panel, model in zip(panels[0], MODELS):
        column = f"{model}_accuracy"
        for place, defence in enumerate(defences):
            clean = results.value(results.none, defence, fraction, column)
            values = [results.value(a, defence, fraction, column) for a in results.attacks]
            defined = [value for value in values if value is not None]
            if clean is None or not defined:
                continue
            panel.plot([min(defined), clean], [place, place], color="0.75", lw=2, zorder=1)
            points = (clean, statistics.mean(defined), min(defined))
            words = ("no attack", "mean over attacks", "worst attack")
            for value, word, colour, marker in zip(points, words, COLOURS[3:6], "osv"):
                label = word if place == 0 else None
                panel.scatter(
                    value, place, color=colour, marker=marker, label=label, zorder=2, s=36
                )
        panel.set_title(f"{model} models", loc="left", fontweight="bold")
        panel.set_xlabel("mean accuracy of benign clients")
        panel.grid(axis="x", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_yticks(range(len(defences)), defences)
    panels[0][0].invert_yaxis()
    handles, labels = panels[0][0].get_legend_handles_labels()
    sheet.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    sheet.suptitle(f"{100 * fraction:.0f} % Byzantine clients")
    save(sheet, path)


def draw_curves(results: Results, curves: Mapping[str, Sequence[str]], path: Path) -> None:
    """Draw accuracy against the fraction of Byzantine clients: a panel per defence and model."""
    attacks = [attack for attack in curves["attacks"] if attack in results.attacks]
    defences = [defence for defence in curves["defences"] if defence in results.defences]
    if not attacks:
        return
    size = (1.75 * len(defences) + 0.8, 5.2)
    sheet, panels = figure(2, len(defences), size, sharex=True, sharey="row")
    fractions = sorted({float(row["fraction"]) for row in results.rows})
    for line, model in enumerate(MODELS):
        for panel, defence in zip(panels[line], defences):
            for attack, colour, marker in zip(attacks, COLOURS[3:], MARKERS):
                points = []
                for fraction in fractions:
                    name = attack if fraction else results.none
                    value = results.value(name, defence, fraction, f"{model}_accuracy")
                    points += [] if value is None else [(100 * fraction, value)]
                if points:
                    style = {"color": colour, "marker": marker, "ms": 4, "lw": 1.6}
                    panel.plot(*zip(*points), label=attack, **style)
            panel.set_title(defence, fontsize=9.5)
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
        panels[line][0].set_ylabel(f"{model} models")
    panels[-1][len(defences) // 2].set_xlabel("Byzantine clients, %")
    sheet.suptitle(
        "Mean accuracy of benign clients (each row has its own scale)",
        fontweight="bold",
        fontsize=11,
    )
    handles, labels = panels[0][0].get_legend_handles_labels()
    sheet.legend(handles, labels, loc="outside lower center", ncols=len(attacks), frameon=False)
    save(sheet, path)


def save(sheet: Any, path: Path) -> None:
    """Write a figure."""
    import matplotlib.pyplot as plt

    sheet.savefig(path, dpi=120)
    plt.close(sheet)
