"""A language model of Shakespeare's characters, with one client for each speaking role.

PL_FED_DATA=../data python -m experiments shakespeare
"""

import statistics
from pathlib import Path
from typing import Any

from experiments.experiment import CellRun, Experiment, Row, read_csv, read_study, shorten
from experiments.papers import COLOURS, format_mean_and_std, markdown

HERE = Path(__file__).parent
MODELS = {"FedAvg": "global", "Ditto": "personal", "finetuning": "personal"}
METRICS = ("perplexity", "perplexity_std", "perplexity_worst10", "token_accuracy")


def collect(run: CellRun) -> dict[str, list[Row]]:
    """Return the results of the model that stands for the method, and those of each role."""
    model = MODELS[run.row["method"]]
    clients = [
        {name: client[name] for name in ("client", "train_samples", "rounds")}
        | {"perplexity": shorten(client[f"{model}_perplexity"])}
        for client in run.read("per_client.csv")
    ]
    columns = [f"test/{model}/{name}" for name in METRICS]
    return {"results.csv": [run.select(*columns)], "clients.csv": clients}


def build_table(rows: list[Row]) -> str:
    """Return the table of results: means over seeds with their standard deviations."""
    lines = []
    for method, model in MODELS.items():
        own = [row for row in rows if row["method"] == method]
        columns = ([float(row[f"test/{model}/{name}"]) for row in own] for name in METRICS)
        seconds = statistics.median(float(row["seconds/total"]) for row in own)
        cells = [format_mean_and_std(column, 3) for column in columns]
        lines.append([f"{method}, {model} model", *cells, f"{seconds:.0f}"])
    head = ["", "perplexity", "spread (std)", "worst 10 % of roles", "accuracy", "seconds"]
    return markdown(head, lines)


def draw_perplexity(clients: list[Row], path: Path) -> None:
    """Draw the perplexity of each role against its number of training sequences, for seed 0."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for color, (method, model) in zip(COLOURS[1:], MODELS.items()):
        own = [row for row in clients if row["method"] == method and row["seed"] == "0"]
        sizes = [int(row["train_samples"]) for row in own]
        values = [float(row["perplexity"]) for row in own]
        label = f"{method}, {model} model (mean {statistics.mean(values):.2f})"
        axes.scatter(sizes, values, s=14, alpha=0.7, color=color, label=label)
    axes.set(
        xscale="log",
        xlabel="training sequences of the role",
        ylabel="perplexity on the role's test sequences",
        title="One point for each speaking role; lower is better",
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def write_pages() -> None:
    """Write the table and the picture."""
    table = build_table(read_csv(HERE / "results.csv"))
    command = "`python -m experiments shakespeare` makes this"
    text = f"{command}: 200 rounds, means over seeds ± their standard deviation.\n\n{table}"
    (HERE / "table.md").write_text(text, encoding="utf-8")
    draw_perplexity(read_csv(HERE / "clients.csv"), HERE / "perplexity.png")


def make(**options: Any) -> Experiment:
    """Return the experiment."""
    content = read_study(HERE / "study.yaml")
    return Experiment("shakespeare", content, collect, write_pages, options)


EXPERIMENTS = {"shakespeare": make}
