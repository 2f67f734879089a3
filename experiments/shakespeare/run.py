"""A language model of Shakespeare's characters, with one client for each speaking role.

PL_FED_DATA=../data python -m experiments.shakespeare.run

The setting of ``configs/shakespeare.yaml``: 141 roles with at least 1,000 characters, sequences of
80 characters, a GRU of 128 units, 10 clients per round, 200 rounds of one pass. FedAvg's global
model is compared with the personal models of Ditto and of finetuning, by each role's perplexity
on its own test sequences. Finished runs are not repeated. The script writes results.csv,
clients.csv, table.md and perplexity.png.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments.grid import (
    QUIET,
    Config,
    FitResult,
    Job,
    Row,
    Rows,
    merge_configs,
    read,
    shorten,
    spec,
    work,
)
from experiments.tables import COLOURS, format_mean_and_std, markdown

HERE = Path(__file__).parent
NAMES = ("method", "seed")
ROUNDS = 200
METRICS = ("perplexity", "perplexity_std", "perplexity_worst10", "token_accuracy")
METHODS = {  # the algorithm, and the model that stands for it
    "FedAvg": (("pl_fed.clients.FedAvg", {}), "global"),
    "Ditto": (("pl_fed.clients.Ditto", {"lam": 0.1}), "personal"),
    "finetuning": (("pl_fed.clients.Finetuning", {"finetune_epochs": 1}), "personal"),
}
COMMON: Config = {
    "data": {
        "dataset": spec("pl_fed.data.Shakespeare"),
        "batch_size": 10,
        "val_fraction": 0.1,
        "test_fraction": 0.2,
    },
    "federation": {"sampler": spec("pl_fed.samplers.Uniform", cohort_size=10)},
    "trainer": {
        "max_epochs": ROUNDS,
        "check_val_every_n_epoch": ROUNDS,
        "gradient_clip_val": 5.0,
        **QUIET,
    },
}
SHARED = {
    "net": spec("pl_fed.models.CharacterGRU", vocabulary=65),
    "task": spec("pl_fed.tasks.LanguageModelling"),
    "optimizer": spec("torch.optim.SGD", lr=1.0),
    "local_epochs": 1,
}


def build_job(method: str, seed: int) -> Job:
    """Return the run of a method."""
    (path, own), _ = METHODS[method]
    model = {"model": spec(path, **SHARED, **own), "seed_everything": seed}
    return Job((method, str(seed)), merge_configs(COMMON, model))


def build_rows(fitted: FitResult) -> Rows:
    """Return the rows of a run: the results of its last model, and those of each role."""
    model = "personal" if "test/personal/perplexity" in fitted.last else "global"
    row: Row = {name: shorten(fitted.last[f"test/{model}/{name}"]) for name in METRICS}
    clients = [
        {
            "client": client["client"],
            "train_samples": client["train_samples"],
            "rounds": client["rounds"],
            "perplexity": shorten(client[f"{model}_perplexity"]),
        }
        for client in fitted.clients
    ]
    return {"results.csv": [row], "clients.csv": clients}


def build_table(rows: Sequence[Row]) -> str:
    """Return the table of results: means over seeds with their standard deviations."""
    lines = []
    for method, (_, model) in METHODS.items():
        own = [row for row in rows if row["method"] == method]
        columns = ([float(row[name]) for row in own] for name in METRICS)
        seconds = statistics.median(float(row["seconds"]) for row in own)
        cells = [format_mean_and_std(column, 3) for column in columns]
        lines.append([f"{method}, {model} model", *cells, f"{seconds:.0f}"])
    head = ["", "perplexity", "spread (std)", "worst 10 % of roles", "accuracy", "seconds"]
    return markdown(head, lines)


def draw_perplexity(clients: Sequence[Row], path: Path) -> None:
    """Draw the perplexity of each role against its number of training sequences."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for color, (method, (_, model)) in zip(COLOURS[1:], METHODS.items()):
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


def main() -> None:
    """Run the missing runs, and write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    jobs = [build_job(method, seed) for seed in options.seeds for method in METHODS]
    work(jobs, HERE / "results.csv", NAMES, build_rows, options.workers)
    command = "`python -m experiments.shakespeare.run` makes this"
    table = build_table(read(HERE / "results.csv"))
    text = f"{command}: {ROUNDS} rounds, means over seeds ± their standard deviation.\n\n{table}"
    (HERE / "table.md").write_text(text)
    draw_perplexity(read(HERE / "clients.csv"), HERE / "perplexity.png")
    print(text)


if __name__ == "__main__":
    main()
