"""The tables and the picture of privacy, attacks and personal models."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments.experiment import Row, read_csv
from experiments.papers import COLOURS, MARKERS

HERE = Path(__file__).parent
EPSILONS = ("1", "2", "4", "8", "inf")
ATTACKS = ("none", "label poisoning", "sign flipping")
MODELS = {  # algorithms, and the model that stands for each
    "FedAvg": "global",
    "Ditto": "personal",
    "Finetuning": "personal",
    "FedRep": "personal",
    "MeanRegularized": "personal",
}
DATA = ("Fashion-MNIST", "MNIST writers")
BUCKETS_EPSILONS = ("2", "8", "inf")
BUCKETS_ATTACKS = ("none", "sign flipping", "opposite mean")
DEFENCES = (
    "Mean, one sum",
    "Median, 8 buckets",
    "GeometricMedian, 16 buckets",
    "Median, 64 buckets",
)


def values(rows: Sequence[Row], column: str, **labels: str) -> list[float]:
    """Return the numbers of a column over the seeds of a cell."""
    return [
        float(row[column])
        for row in rows
        if row[column] and all(row[name] == label for name, label in labels.items())
    ]


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
    for data in DATA:
        seeds = len({row["seed"] for row in rows if row["data"] == data})
        for attack in ATTACKS:
            lines += ["", f"## {data}, {describe_attack(attack)}", ""]
            lines += [f"| algorithm | model | {' | '.join(f'ε = {e}' for e in EPSILONS)} | seeds |"]
            lines += ["|---|---|" + "---|" * (len(EPSILONS) + 1)]
            for algorithm in MODELS:
                for model in ("global", "personal"):
                    labels = {"data": data, "attack": attack, "algorithm": algorithm}
                    cells = []
                    for epsilon in EPSILONS:
                        numbers = [
                            values(rows, f"test/{model}/accuracy{part}", epsilon=epsilon, **labels)
                            for part in ("", "_worst10", "_std")
                        ]
                        means = [f"{statistics.mean(n):.3f}" for n in numbers if n]
                        cells.append(" / ".join(means))
                    if any(cells):
                        lines.append(f"| {algorithm} | {model} | {' | '.join(cells)} | {seeds} |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw mean and worst-10 % accuracy against ε, a column of pictures for each attack.

    Lines are means over seeds; areas reach from the lowest seed to the highest.
    """
    from matplotlib.figure import Figure

    parts = {"": "mean", "_worst10": "worst 10 %"}
    lines = [(data, part) for data in DATA for part in parts]
    figure = Figure(figsize=(11, 0.5 + 2.7 * len(lines)), layout="constrained")
    axes = figure.subplots(len(lines), len(ATTACKS), sharex=True, sharey="row", squeeze=False)
    for row_axes, (data, part) in zip(axes, lines):
        for axis, attack in zip(row_axes, ATTACKS):
            for (algorithm, model), colour, marker in zip(MODELS.items(), COLOURS, MARKERS):
                column = f"test/{model}/accuracy{part}"
                labels = {"data": data, "attack": attack, "algorithm": algorithm}
                points = [
                    (place, statistics.mean(numbers), min(numbers), max(numbers))
                    for place, epsilon in enumerate(EPSILONS)
                    if (numbers := values(rows, column, epsilon=epsilon, **labels))
                ]
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


def make_buckets_table(rows: Sequence[Row]) -> str:
    """Return the tables of robust aggregators in Markdown, one for each metric."""
    seeds = ", ".join(sorted({row["seed"] for row in rows}))
    lines = [
        f"Ditto on Fashion-MNIST, 800 clients, δ = 1e-05, seeds {seeds}: the mean, and the",
        "largest difference of a seed from it if a cell has several. Accuracy is the mean over",
        "benign clients.",
    ]
    columns = {
        "Accuracy of the global model, which is FedAvg's": "test/global/accuracy",
        "Accuracy of the personal models": "test/personal/accuracy",
        "Accuracy of the personal models, worst tenth of the clients": (
            "test/personal/accuracy_worst10"
        ),
    }
    for title, column in columns.items():
        lines += ["", f"## {title}", ""]
        lines += [f"| attack | defence | {' | '.join(f'ε = {e}' for e in BUCKETS_EPSILONS)} |"]
        lines += ["|---|---|" + "---|" * len(BUCKETS_EPSILONS)]
        for attack in BUCKETS_ATTACKS:
            for defence in DEFENCES:
                cells = []
                for epsilon in BUCKETS_EPSILONS:
                    labels = {"attack": attack, "defence": defence, "epsilon": epsilon}
                    numbers = values(rows, column, **labels)
                    mean = statistics.mean(numbers)
                    farthest = max(abs(number - mean) for number in numbers)
                    cells.append(f"{mean:.3f}" + (f" ± {farthest:.3f}" if len(numbers) > 1 else ""))
                lines.append(f"| {attack} | {defence} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write() -> None:
    """Write the table and the picture."""
    rows = read_csv(HERE / "results.csv")
    (HERE / "table.md").write_text(make_table(rows), encoding="utf-8")
    draw(rows, HERE / "privacy.png")


def write_buckets() -> None:
    """Write the tables of robust aggregators."""
    text = make_buckets_table(read_csv(HERE / "buckets.csv"))
    (HERE / "buckets.md").write_text(text, encoding="utf-8")
