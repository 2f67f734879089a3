"""The table and the picture of privacy, attacks and personal models."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments.grid import Row
from experiments.privacy.run import ALGORITHMS, ATTACKS, DATA, EPSILONS
from experiments.tables import COLOURS, MARKERS

MODELS = {"FedAvg": "global"}  # the model of the others is the personal one


def values(rows: Sequence[Row], column: str, **cell: str) -> list[float]:
    """Return the numbers of a column over the seeds of a cell."""
    return [
        float(row[column])
        for row in rows
        if row[column] and all(row[name] == value for name, value in cell.items())
    ]


def summarize(rows: Sequence[Row], column: str, **cell: str) -> str:
    """Return the mean over seeds; ``-`` without runs."""
    numbers = values(rows, column, **cell)
    return f"{statistics.mean(numbers):.3f}" if numbers else "-"


def describe_attack(attack: str) -> str:
    """Return an attack in words."""
    return "no attack" if attack == "none" else attack


def make_table(rows: Sequence[Row]) -> str:
    """Return the table in Markdown: mean, worst 10 % and spread, by ε and attack."""
    lines = [
        "# Accuracy against ε, with attacks and personal models",
        "",
        "Accuracy of benign clients: mean / worst 10 % / spread (standard deviation over clients).",
        "",
        "ε at δ = 1e-5, of the runs themselves: about 80 of 800 clients in a round (84 of 836 with",
        "MNIST by writers). Mean over the seeds of the column on the right.",
    ]
    total = len(DATA) * len(ATTACKS) * len(EPSILONS) * len(ALGORITHMS) * 3
    if len(rows) < total:
        lines += ["", f"**Unfinished: {len(rows)} of {total} runs.** A dash is a missing run."]
    for data in DATA:
        for attack in ATTACKS:
            if not values(rows, "spent", data=data, attack=attack):
                continue
            lines += ["", f"## {data}, {describe_attack(attack)}", ""]
            lines += [f"| algorithm | model | {' | '.join(f'ε = {e}' for e in EPSILONS)} | seeds |"]
            lines += ["|---|---|" + "---|" * (len(EPSILONS) + 1)]
            for algorithm in ALGORITHMS:
                for model in ("global", "personal"):
                    cell = {"data": data, "attack": attack, "algorithm": algorithm}
                    if not values(rows, f"{model}_accuracy", **cell):
                        continue
                    cells = [
                        " / ".join(
                            summarize(rows, f"{model}_accuracy{part}", epsilon=epsilon, **cell)
                            for part in ("", "_worst10", "_std")
                        )
                        for epsilon in EPSILONS
                    ]
                    seeds = len({row["seed"] for row in rows if row["data"] == data})
                    lines.append(f"| {algorithm} | {model} | {' | '.join(cells)} | {seeds} |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw mean and worst-10 % accuracy against ε, a column of pictures for each attack.

    Lines are means over seeds; areas reach from the lowest seed to the highest.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = {"": "mean", "_worst10": "worst 10 %"}
    drawn = [data for data in DATA if values(rows, "spent", data=data)]
    lines = [(data, part) for data in drawn for part in parts]
    size = (11, 0.5 + 2.7 * len(lines))
    figure, axes = pyplot.subplots(
        len(lines),
        len(ATTACKS),
        figsize=size,
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for row_axes, (data, part) in zip(axes, lines):
        for axis, attack in zip(row_axes, ATTACKS):
            for algorithm, colour, marker in zip(ALGORITHMS, COLOURS, MARKERS):
                column = f"{MODELS.get(algorithm, 'personal')}_accuracy{part}"
                cell = {"data": data, "attack": attack, "algorithm": algorithm}
                points = [
                    (place, statistics.mean(numbers), min(numbers), max(numbers))
                    for place, epsilon in enumerate(EPSILONS)
                    if (numbers := values(rows, column, epsilon=epsilon, **cell))
                ]
                if points:
                    places, means, lowest, highest = zip(*points)
                    axis.plot(places, means, color=colour, marker=marker, label=algorithm)
                    axis.fill_between(places, lowest, highest, color=colour, alpha=0.2)
            axis.set_xticks(range(len(EPSILONS)), [e.replace("inf", "∞") for e in EPSILONS])
            axis.grid(alpha=0.3)
        row_axes[0].set_ylabel(f"{data}\n{parts[part]} accuracy")
    for axis, attack in zip(axes[0], ATTACKS):
        axis.set_title(describe_attack(attack))
    for axis in axes[-1]:
        axis.set_xlabel("ε at δ = 1e-5")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    pyplot.close(figure)


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write the table and the picture."""
    (folder / "table.md").write_text(make_table(rows), encoding="utf-8")
    draw(rows, folder / "privacy.png")
