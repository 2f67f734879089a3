"""``OMP_NUM_THREADS=1 python experiments/benchmarks/evaluation.py``: evaluations of many clients.

Evaluates 100,000 clients with one minibatch each, whose personal models have 50 parameters, by a
run of two rounds with a validation after each. It prints a Markdown table of the times: a
validation of all clients, of random samples (``federation.evaluate_clients``) and the test, as a
user waits for them, with the files that they write. The last columns compare the standard error
with the distance from the mean over all clients. The goal: at most 3 s for all clients.
"""

import argparse
import csv
import logging
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from pl_fed import EngineOptions, Federation, Trainer
from pl_fed.clients import Ditto
from pl_fed.data import FederatedData
from pl_fed.data.source import Arrays, DataSource
from pl_fed.models import MLP
from pl_fed.samplers import Uniform

SAMPLES = 10  # of a client: 7 for training, 1 for validation, 2 for the test
METRIC = "val/personal/loss"


class Owned(DataSource):
    """Random samples with two classes, ten for each client."""

    def __init__(self, clients: int) -> None:
        self.clients = clients

    def load(self) -> Arrays:
        """Return the samples."""
        count = self.clients * SAMPLES
        inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
        owners = torch.arange(count) // SAMPLES
        return Arrays(inputs, (inputs[:, 0] > 0).long(), owners, num_classes=2)


class Clock(Callback):
    """Measures the seconds of validations and tests, with the hooks of all other callbacks."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"validation": [], "test": []}
        self._begin = 0.0

    def on_validation_start(self, *_: Any) -> None:
        """Start the clock."""
        self._begin = time.perf_counter()

    on_test_start = on_validation_start

    def on_validation_end(self, *_: Any) -> None:
        """Stop the clock."""
        self.seconds["validation"].append(time.perf_counter() - self._begin)

    def on_test_end(self, *_: Any) -> None:
        """Stop the clock."""
        self.seconds["test"].append(time.perf_counter() - self._begin)


def measure(
    clients: int, evaluated: int | float | None, folder: str
) -> tuple[Clock, dict[str, float]]:
    """Return the times of a run, and the metrics of its last validation."""
    torch.manual_seed(0)
    client = Ditto(MLP(8, [4], 2), local_epochs=1)
    data = FederatedData(Owned(clients), batch_size=10, val_fraction=0.1, test_fraction=0.2)
    clock = Clock()
    trainer = Trainer(
        Federation(
            Uniform(100), evaluate_clients=evaluated, engine=EngineOptions("stacked"), seed=0
        ),
        default_root_dir=folder,
        max_epochs=2,
        accelerator="cpu",
        callbacks=[clock],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(client, data)
    trainer.test(client, data, verbose=False)
    with (Path(trainer.run_dir) / "metrics.csv").open() as file:
        row = [row for row in csv.DictReader(file) if row.get(METRIC)][-1]
    return clock, {name: float(value) for name, value in row.items() if value}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100_000)
    clients = parser.parse_args().clients
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    mean = 0.0
    print("| clients evaluated | first validation (s) | second (s) | test of all (s) |", end="")
    print(f" {METRIC} | standard error | distance from the mean of all |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for evaluated in (None, 0.1, 0.01, 0.001):
        with tempfile.TemporaryDirectory() as folder:
            clock, metrics = measure(clients, evaluated, folder)
        mean = metrics[METRIC] if evaluated is None else mean
        number = clients if evaluated is None else round(evaluated * clients)
        first, second = clock.seconds["validation"][-2:]
        error = metrics.get(f"{METRIC}_se", 0.0)
        print(
            f"| {number:,} | {first:.2f} | {second:.2f} | {clock.seconds['test'][-1]:.2f}"
            f" | {metrics[METRIC]:.4f} | {error:.4f} | {abs(metrics[METRIC] - mean):.4f} |"
        )


if __name__ == "__main__":
    main()
