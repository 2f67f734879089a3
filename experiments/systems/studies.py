"""Time to accuracy under rules for stragglers, as a study, and its page."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.experiment import (
    CellRun,
    Experiment,
    Row,
    group_rows,
    read_csv,
    read_study,
    shorten,
)
from experiments.papers import COLOURS, format_mean_and_std, markdown
from pl_fed.reports.worst_clients import rank_correlation

HERE = Path(__file__).parent
TARGETS = (0.6, 0.7, 0.74)
METRIC = "val/global/accuracy"
LAST = 700  # seconds from which on validations are averaged
FINAL = ("test/global/accuracy", "test/global/accuracy_worst10")
HEAD = [
    *("rule", "algorithm"),
    *(f"seconds to {target:.2f}" for target in TARGETS),
    *("accuracy, last 200 s", "worst 10 %", "clients that never counted", "Jain's index of rounds"),
    "correlation of rounds with accuracy",
]
STYLES = {"FedAvg": "-", "FedProx": ":", "FedNova": "--"}


def collect(run: CellRun) -> dict[str, list[Row]]:
    """Return the row of a run, and its curve over simulated time."""
    clock, points = 0.0, []
    for row in run.read("metrics.csv"):
        clock = float(row["systems/seconds"] or clock)
        if row.get(METRIC):
            points.append(
                {"round": row["round"], "seconds": shorten(clock), "accuracy": row[METRIC]}
            )
    points = [{**point, "accuracy": shorten(point["accuracy"])} for point in points]
    result = run.select(*FINAL, "counts/simulated_seconds")
    result |= {name: shorten(value) for name, value in measure_participation(run).items()}
    return {"results.csv": [result], "curves.csv": points}


def measure_participation(run: CellRun) -> dict[str, float]:
    """Return the number of clients that never counted, Jain's index, and a rank correlation."""
    clients = run.read("per_client.csv")
    rounds = [float(row["rounds"]) for row in clients]
    accuracies = [float(row["global_accuracy"]) for row in clients]
    squares = sum(count**2 for count in rounds)
    return {
        "never": sum(count == 0 for count in rounds),
        "jain": sum(rounds) ** 2 / (len(rounds) * squares),
        "correlation": rank_correlation(np.array(rounds), np.array(accuracies)),
    }


def find_time(points: Sequence[Row], target: float) -> float | None:
    """Return the simulated seconds of the first validation that reaches a target, if one does."""
    reached = [float(row["seconds"]) for row in points if float(row["accuracy"]) >= target]
    return reached[0] if reached else None


def make_lines() -> Iterator[list[str]]:
    """Yield the lines of the table."""
    curves = dict(group_rows(read_csv(HERE / "curves.csv"), "rule", "algorithm", "seed"))
    for (rule, algorithm), rows in group_rows(read_csv(HERE / "results.csv"), "rule", "algorithm"):
        cells = [rule, algorithm]
        for target in TARGETS:
            times = [find_time(curves[rule, algorithm, row["seed"]], target) for row in rows]
            cells.append(describe_times(times))
        last = [average_last(curves[rule, algorithm, row["seed"]]) for row in rows]
        cells.append(format_mean_and_std(last, 3))
        for name, digits in ((FINAL[1], 3), ("never", 1), ("jain", 2)):
            cells.append(format_mean_and_std([float(row[name]) for row in rows], digits))
        cells.append(format_mean_and_std([float(row["correlation"]) for row in rows], 2))
        yield cells


def average_last(points: Sequence[Row]) -> float:
    """Return the mean accuracy of the validations of the last 200 simulated seconds."""
    last = [float(row["accuracy"]) for row in points if float(row["seconds"]) >= LAST]
    return statistics.mean(last)


def describe_times(times: Sequence[float | None]) -> str:
    """Return the mean and deviation of the seeds that reached a target, with their number."""
    reached = [time for time in times if time is not None]
    if not reached:
        return "never"
    share = "" if len(reached) == len(times) else f" ({len(reached)} of {len(times)} seeds)"
    return format_mean_and_std(reached, 0) + share


def draw(path: Path) -> None:
    """Draw the accuracy over simulated time: mean and range over the seeds."""
    groups = dict(group_rows(read_csv(HERE / "curves.csv"), "rule", "algorithm", "round"))
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes = figure.subplots()
    rules = list(dict.fromkeys(rule for rule, _, _ in groups))
    lines: dict[tuple[str, str], list[tuple[float, list[float]]]] = {}
    for (rule, algorithm, _), rows in groups.items():
        time = statistics.mean(float(row["seconds"]) for row in rows)
        values = [float(row["accuracy"]) for row in rows]
        lines.setdefault((rule, algorithm), []).append((time, values))
    for (rule, algorithm), points in lines.items():
        if algorithm == "FedProx" or (algorithm == "FedNova" and rule != "partial"):
            continue  # near FedAvg, or equal to it
        seconds = [time for time, _ in points]
        colour = COLOURS[rules.index(rule)]
        means = [statistics.mean(values) for _, values in points]
        label = f"{rule}, {algorithm}"
        axes.plot(seconds, means, color=colour, ls=STYLES[algorithm], lw=1.8, label=label)
        if algorithm == "FedAvg":
            low, high = ([f(values) for _, values in points] for f in (min, max))
            axes.fill_between(seconds, low, high, color=colour, alpha=0.15, lw=0)
    axes.set(
        xlabel="simulated seconds", ylabel="mean validation accuracy over clients", xlim=(0, 900)
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(path, dpi=110)


def make_page() -> str:
    """Return the text of table.md."""
    title = "# Time to accuracy under rules for stragglers"
    note = (
        "Mean ± standard deviation over five seeds. Times are simulated seconds until a validation"
        " (every fifth round) reaches the mean accuracy over clients. The accuracy is that of the"
        " validations after 700 seconds, and the worst 10 % those of the test at the end."
    )
    return f"{title}\n\n{note}\n\n{markdown(HEAD, list(make_lines()))}\n"


def write_pages() -> None:
    """Write table.md and the picture."""
    (HERE / "table.md").write_text(make_page(), encoding="utf-8")
    draw(HERE / "time.png")


def make_experiment(**options: Any) -> Experiment:
    """Return the study of rules for stragglers."""
    return Experiment("systems", read_study(HERE / "study.yaml"), collect, write_pages, options)


EXPERIMENTS = {"systems": make_experiment}
