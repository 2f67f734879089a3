"""Accuracy against bytes of uploads, for four methods and seven codecs.

PL_FED_DATA=../data python -m experiments compression
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.experiment import CellRun, Experiment, Row, read_csv, read_study, shorten
from experiments.papers import COLOURS, MARKERS, format_mean_and_std, markdown

HERE = Path(__file__).parent
METHODS = {"FedAvg": "global", "Ditto": "personal", "FedPer": "personal", "LoRA": "global"}
"""The methods, and the model that stands for each."""
CODECS = (
    *("none", "QSGD, 8 bits", "QSGD, 2 bits", "signs"),
    *("PowerSGD, rank 2", "top 1 %", "random 1 %"),
)
COUNTS = ("upload_bytes", "bytes_up", "bytes_down")
LEVEL = 0.97  # of the accuracy without a codec


def collect(run: CellRun) -> dict[str, list[Row]]:
    """Return the results of the model that stands for the method, and its curve over bytes."""
    model = METHODS[run.row["method"]]
    accuracy = f"val/{model}/accuracy"
    curve = [
        {
            "round": row["round"],
            "bytes_up": f"{float(row['bytes/up']):.0f}",
            "accuracy": shorten(value),
        }
        for row in run.read("metrics.csv")
        if (value := row.get(accuracy)) and row.get("bytes/up")
    ]
    row = {
        name: shorten(run.row[f"test/{model}/{name}"]) for name in ("accuracy", "accuracy_worst10")
    }
    row |= {name: f"{run.row[f'counts/{name}']:.0f}" for name in COUNTS}
    return {"results.csv": [row | run.select()], "curves.csv": curve}


def select(rows: Sequence[Row], **labels: str) -> list[Row]:
    """Return the rows with some labels."""
    return [row for row in rows if all(row[name] == label for name, label in labels.items())]


def average_curve(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Return the megabytes that all clients uploaded, and the mean accuracy over seeds."""
    rounds = sorted({int(row["round"]) for row in rows})
    points = [select(rows, round=str(round)) for round in rounds]
    megabytes = [statistics.mean(float(row["bytes_up"]) for row in own) / 1e6 for own in points]
    return megabytes, [statistics.mean(float(row["accuracy"]) for row in own) for own in points]


def find_level(curve: tuple[list[float], list[float]], level: float) -> str:
    """Return the megabytes at the first point of a curve on a level, or a dash."""
    reached = (size for size, accuracy in zip(*curve) if accuracy >= level)
    size = next(reached, None)
    return "–" if size is None else f"{size:.3g}"


def build_table(results: Sequence[Row], curves: Sequence[Row]) -> str:
    """Return the table of results: means over seeds with their standard deviations."""
    lines = []
    for method, model in METHODS.items():
        full = average_curve(select(curves, method=method, codec="none"))
        for codec in CODECS:
            own = select(results, method=method, codec=codec)
            columns = (
                [float(row[name]) for row in own] for name in ("accuracy", "accuracy_worst10")
            )
            size = float(own[0]["upload_bytes"]) / 1e3
            total = statistics.mean(float(row["bytes_up"]) for row in own) / 1e6
            curve = average_curve(select(curves, method=method, codec=codec))
            numbers = [f"{size:.4g}", f"{total:.3g}", find_level(curve, LEVEL * full[1][-1])]
            cells = [format_mean_and_std(column, 3) for column in columns]
            lines.append([f"{method}, {model} model", codec, *numbers, *cells])
    head = ["method", "codec", "kB an upload", "MB uploaded", f"MB until {LEVEL}"]
    return markdown([*head, "accuracy", "worst 10 % of clients"], lines)


def draw_curves(curves: Sequence[Row], path: Path) -> None:
    """Draw the accuracy against the bytes that all clients uploaded, a panel for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True).flat
    for axes, (method, model) in zip(panels, METHODS.items()):
        for codec, color, marker in zip(CODECS, ("black", *COLOURS[1:]), MARKERS):
            megabytes, accuracies = average_curve(select(curves, method=method, codec=codec))
            axes.plot(megabytes, accuracies, color=color, marker=marker, ms=4, lw=1.2, label=codec)
        axes.set_xscale("log")
        axes.set_title(f"{method}: {model} model", fontsize=10)
        axes.grid(alpha=0.3)
    for axes in figure.axes[2:]:
        axes.set_xlabel("MB uploaded by all clients")
    for axes in figure.axes[::2]:
        axes.set_ylabel("validation accuracy")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, loc="outside lower center", ncols=len(CODECS))
    figure.savefig(path, dpi=130)


def write_pages() -> None:
    """Write the table and the picture."""
    results, curves = read_csv(HERE / "results.csv"), read_csv(HERE / "curves.csv")
    seeds = len({row["seed"] for row in results})
    text = (
        f"`python -m experiments compression` makes this: 100 rounds, {seeds} seeds. MB uploaded"
        f" are those of all clients together. MB until {LEVEL} are those until the validation"
        f" accuracy, measured every 10 rounds, is at least {LEVEL} of the method's last one without"
        " a codec; – if it never is.\n\n"
    )
    (HERE / "table.md").write_text(text + build_table(results, curves), encoding="utf-8")
    draw_curves(curves, HERE / "bytes.png")


def make(**options: Any) -> Experiment:
    """Return the experiment: 56 runs."""
    return Experiment("compression", read_study(HERE / "study.yaml"), collect, write_pages, options)


EXPERIMENTS = {"compression": make}
