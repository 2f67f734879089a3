"""Tables and pictures of the runs of attacks against defences."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.tables import COLOURS, MARKERS

Row = Mapping[str, str]
MODELS = ("global", "personal")


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
    (folder / "table.md").write_text(tables(results, grid))
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
        share = f"{100 * fraction:.0f} % byzantine clients"
        for model in MODELS:
            parts += [
                f"## Accuracy of {model} models, {share}",
                "",
                grid_table(results, fraction, model),
            ]
        parts += [f"## Strength of attacks, {share}", "", strength_table(results, fraction)]
        success = success_table(results, fraction)
        if success:
            parts += [f"## Success of backdoors, {share}", "", success]
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
    """Draw attacks against defences as a map, with the worst case of each defence beside it."""
    names = [results.none, *results.attacks]
    size = (3.4 + 0.5 * (len(names) + 1), 2.2 + 0.54 * len(results.defences))
    sheet, panels = figure(2, 1, size, sharex=True)
    for panel, model in zip(panels[:, 0], MODELS):
        column = f"{model}_accuracy"
        numbers = []
        for defence in results.defences:
            worst = results.worst(defence, fraction, model)
            found = [results.value(attack, defence, fraction, column) for attack in names]
            numbers.append([*found, worst and worst[0]])
        plain = [[float("nan") if v is None else v for v in row] for row in numbers]
        image = panel.imshow(plain, cmap="cividis", vmin=0, vmax=0.9, aspect="auto")
        for i, row in enumerate(numbers):
            for j, value in enumerate(row):
                dark = value is not None and value < 0.5
                text = "–" if value is None else f"{value:.2f}".removeprefix("0")
                style = {"color": "white" if dark else "black", "fontsize": 7.5}
                panel.text(j, i, text, ha="center", va="center", **style)
        panel.axvline(0.5, color="white", lw=3)
        panel.axvline(len(names) - 0.5, color="white", lw=3)
        panel.set_xticks(range(len(names) + 1), [*names, "worst case"], rotation=55, ha="right")
        panel.set_yticks(range(len(results.defences)), results.defences)
        panel.set_title(f"{model} models")
    sheet.colorbar(image, ax=panels, label="mean accuracy of benign clients", shrink=0.8, pad=0.01)
    sheet.suptitle(f"{100 * fraction:.0f} % byzantine clients")
    save(sheet, path)


def draw_models(results: Results, fraction: float, path: Path) -> None:
    """Draw each defence without attack, in the mean and in the worst case, for both models."""
    sheet, panels = figure(1, 2, (11, 1.6 + 0.32 * len(results.defences)), sharex=True, sharey=True)
    for panel, model in zip(panels[0], MODELS):
        column = f"{model}_accuracy"
        for place, defence in enumerate(results.defences):
            clean = results.value(results.none, defence, fraction, column)
            values = [results.value(a, defence, fraction, column) for a in results.attacks]
            defined = [value for value in values if value is not None]
            if clean is None or not defined:
                continue
            panel.plot([min(defined), clean], [place, place], color="0.75", lw=2, zorder=1)
            points = (clean, statistics.mean(defined), min(defined))
            words = ("nobody lies", "mean over attacks", "worst attack")
            for value, word, colour, marker in zip(points, words, COLOURS[3:6], "osv"):
                label = word if place == 0 else None
                panel.scatter(
                    value, place, color=colour, marker=marker, label=label, zorder=2, s=36
                )
        panel.set_title(f"{model} models")
        panel.set_xlabel("mean accuracy of benign clients")
        panel.grid(axis="x", alpha=0.3)
    panels[0][0].set_yticks(range(len(results.defences)), results.defences)
    panels[0][0].invert_yaxis()
    handles, labels = panels[0][0].get_legend_handles_labels()
    sheet.legend(handles, labels, loc="outside lower center", ncols=3)
    sheet.suptitle(f"{100 * fraction:.0f} % byzantine clients")
    save(sheet, path)


def draw_curves(results: Results, curves: Mapping[str, Sequence[str]], path: Path) -> None:
    """Draw accuracy against the fraction of byzantine clients: a line for each defence."""
    attacks = [attack for attack in curves["attacks"] if attack in results.attacks]
    if not attacks:
        return
    sheet, panels = figure(2, len(attacks), (3.4 * len(attacks) + 0.6, 7), sharex=True, sharey=True)
    fractions = sorted({float(row["fraction"]) for row in results.rows})
    for line, model in enumerate(MODELS):
        for panel, attack in zip(panels[line], attacks):
            for defence, colour, marker in zip(curves["defences"], COLOURS, MARKERS):
                points = []
                for fraction in fractions:
                    name = attack if fraction else results.none
                    value = results.value(name, defence, fraction, f"{model}_accuracy")
                    points += [] if value is None else [(fraction, value)]
                if points:
                    style = {"color": colour, "marker": marker, "ms": 5, "lw": 1.4}
                    panel.plot(*zip(*points), label=defence, **style)
            panel.set_title(f"{attack}, {model}")
            panel.grid(alpha=0.3)
            panel.set_ylim(0, 0.95)
    for panel in panels[-1]:
        panel.set_xlabel("fraction of byzantine clients")
    for row in panels:
        row[0].set_ylabel("mean accuracy of benign clients")
    handles, labels = panels[0][0].get_legend_handles_labels()
    sheet.legend(handles, labels, loc="outside lower center", ncols=2 * len(attacks))
    save(sheet, path)


def save(sheet: Any, path: Path) -> None:
    """Write a figure."""
    import matplotlib.pyplot as plt

    sheet.savefig(path, dpi=120)
    plt.close(sheet)
