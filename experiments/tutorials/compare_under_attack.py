"""Tutorial: compare three algorithms under an attack, with and without a defence.

python -m experiments.tutorials.compare_under_attack

The data are scikit-learn's digits, without a download: 30 clients with two classes each. A fifth of
the clients is Byzantine and sends its update with the sign flipped, times 4. The script takes a
quarter of a minute on one CPU core and prints a table. README.md in this folder explains it.
"""

import logging
import tempfile
import warnings

import torch

import pl_fed
from pl_fed import aggregators, attacks, clients, data, models, partitioners, samplers

ALGORITHMS = {
    "FedAvg": (clients.FedAvg, {}, "global"),  # class, arguments, the model that it is judged by
    "Ditto": (clients.Ditto, {"lam": 0.1}, "personal"),
    "FedRep": (clients.FedRep, {}, "personal"),
}
CONDITIONS = {  # share of Byzantine clients, aggregator
    "no attack, mean": (0.0, aggregators.Mean),
    "no attack, median": (0.0, aggregators.Median),
    "attack, mean": (0.2, aggregators.Mean),
    "attack, median": (0.2, aggregators.Median),
}
METRICS = ("accuracy", "accuracy_worst10")


def build_federation(byzantine: float, aggregator: type) -> pl_fed.Federation:
    """Step 1: the federation has everything but the algorithm and the data."""
    attack = attacks.SignFlipping(factor=4.0) if byzantine else None
    return pl_fed.Federation(
        sampler=samplers.All(),
        aggregator=aggregator(),
        adversary=pl_fed.Adversary(attack, fraction=byzantine or None),
        engine=pl_fed.EngineOptions("stacked"),
        seed=0,
    )


def run(algorithm: str, condition: str, rounds: int) -> list[float]:
    """Step 2: train one algorithm under one condition, and return its test metrics."""
    client_class, arguments, model = ALGORITHMS[algorithm]
    torch.manual_seed(0)  # the net's initial weights
    net = models.MLP(in_features=64, hidden=[32], num_classes=10)
    client = client_class(net, local_epochs=1, **arguments)
    digits = data.FederatedData(
        data.Digits(), partitioners.Shards(2), num_clients=30, batch_size=10, seed=0
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl_fed.Trainer(
            build_federation(*CONDITIONS[condition]),
            max_epochs=rounds,
            accelerator="cpu",
            default_root_dir=folder,
            check_val_every_n_epoch=rounds,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(client, digits)
        results = trainer.test(client, digits, verbose=False)[0]
    return [results[f"test/{model}/{metric}"] for metric in METRICS]


def compare(rounds: int = 30) -> dict[tuple[str, str], list[float]]:
    """Step 3: run all pairs. Draws depend on the seed only, so all pairs see the same clients."""
    return {
        (algorithm, condition): run(algorithm, condition, rounds)
        for algorithm in ALGORITHMS
        for condition in CONDITIONS
    }


def format_table(results: dict[tuple[str, str], list[float]]) -> str:
    """Step 4: mean accuracy and worst 10 % of the benign clients, as a Markdown table."""
    lines = [
        "| algorithm | " + " | ".join(CONDITIONS) + " |",
        "|---|" + "---:|" * len(CONDITIONS),
    ]
    for algorithm, (_, _, model) in ALGORITHMS.items():
        cells = [
            " / ".join(f"{value:.2f}" for value in results[algorithm, condition])
            for condition in CONDITIONS
        ]
        lines.append(f"| {algorithm}, {model} model | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    print(format_table(compare()))


if __name__ == "__main__":
    main()
