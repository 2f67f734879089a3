"""Robust aggregators of noisy sums, against the mean of one noisy sum.

PL_FED_DATA=../data python -m experiments.privacy.buckets

The federation is that of run.py: 800 clients of Fashion-MNIST with two classes each, 50 rounds of
about 80 clients. Ditto (λ = 0.1) has the global model of FedAvg, and personal models. A defence is
the mean of one sum, or an aggregator of B noisy sums (``federation.privacy.buckets``). 20 % of the
clients are Byzantine, about 16 in a cohort. They flip the sign of their upload, or they all send
the opposite of the mean of their honest uploads, at the clipping norm. In runs with ε = ∞ the sums
have no noise.

Each finished run is a row of buckets.csv and is not repeated. buckets.md is made from the rows.
"""

import argparse
import functools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.grid import Job, Row, Rows, fit_and_test, format_results, read, run_missing
from experiments.privacy.report import values
from experiments.privacy.run import (
    ALGORITHMS,
    CLIP_NORM,
    DELTA,
    HERE,
    METRICS,
    RATE,
    ROUNDS,
    data_of,
)

NAMES = ("epsilon", "attack", "defence", "seed")
EPSILONS = ("2", "8", "inf")
ATTACKS = ("none", "sign flipping", "opposite mean")
DEFENCES: dict[str, tuple[str, int | None]] = {  # aggregator and number of buckets
    "Mean, one sum": ("Mean", None),
    "Median, 8 buckets": ("Median", 8),
    "GeometricMedian, 16 buckets": ("GeometricMedian", 16),
    "Median, 64 buckets": ("Median", 64),
}


def cells(seeds: Sequence[int]) -> list[Job]:
    """Return the jobs, all settings of a seed before the next seed."""
    return [
        Job((epsilon, attack, defence, str(seed)))
        for seed in seeds
        for attack in ATTACKS
        for epsilon in EPSILONS
        for defence in DEFENCES
    ]


def build_adversary(attack: str, rounds: int) -> Any:
    """Return the Byzantine clients; without an attack the same clients are honest."""
    from pl_fed import Adversary
    from pl_fed.attacks import InnerProductManipulation, SignFlipping

    opposite = attack == "opposite mean"
    return Adversary(
        InnerProductManipulation(factor=100.0) if opposite else SignFlipping(),
        fraction=0.2,
        start_round=rounds if attack == "none" else 0,
        knowledge="own",
    )


def run(job: Job, rounds: int = ROUNDS) -> Rows:
    """Run one federation and return its row."""
    import torch
    from lightning.pytorch import Callback

    import pl_fed
    from experiments.privacy.audit import ChangeMechanism, leave_out_noise
    from pl_fed import aggregators
    from pl_fed.clients import Ditto
    from pl_fed.models import MLP
    from pl_fed.samplers import Poisson

    epsilon, attack, defence, seed = job.key
    aggregator, buckets = DEFENCES[defence]
    torch.manual_seed(int(seed))
    client = Ditto(
        MLP(784, [32], 10),
        local_steps=5,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        **ALGORITHMS["Ditto"],
    )
    is_private = epsilon != "inf"
    noise: dict[str, Any] = {"noise_multiplier": 1.0}  # which is left out
    if is_private:
        noise = {"epsilon": float(epsilon), "rounds": rounds}
    federation = pl_fed.Federation(
        Poisson(RATE),
        getattr(aggregators, aggregator)(),
        adversary=build_adversary(attack, rounds),
        max_rejected=1.0,
        engine=pl_fed.EngineOptions("stacked", chunk_size=50),
        privacy=pl_fed.DifferentialPrivacy(
            clip_norm=CLIP_NORM, delta=DELTA, buckets=buckets, noise_seed=int(seed), **noise
        ),
        seed=int(seed),
    )
    data = data_of("Fashion-MNIST", int(seed))
    callbacks: list[Callback] = [] if is_private else [ChangeMechanism(leave_out_noise)]
    metrics = fit_and_test(federation, client, data, rounds, callbacks)
    spent = metrics["privacy/epsilon"] if is_private else math.inf
    row = {"rounds": str(rounds), "spent": f"{float(spent):.4g}"}
    return {"buckets.csv": [row | format_results(metrics, METRICS)]}


def summarize(rows: Sequence[Row], column: str, **cell: str) -> str:
    """Return the mean over the seeds, and the largest difference of a seed from it."""
    numbers = values(rows, column, **cell)
    if not numbers:
        return "-"
    mean = statistics.mean(numbers)
    if len(numbers) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {max(abs(number - mean) for number in numbers):.3f}"


def make_table(rows: Sequence[Row]) -> str:
    """Return the tables in Markdown, one for each metric."""
    seeds = ", ".join(sorted({row["seed"] for row in rows}))
    lines = [
        f"Ditto on Fashion-MNIST, 800 clients, δ = {DELTA:g}, seeds {seeds}: the mean, and the",
        "largest difference of a seed from it if a cell has several. Accuracy is the mean over",
        "benign clients.",
    ]
    total = len(cells(range(3)))
    if len(rows) < total:
        lines += ["", f"**Unfinished: {len(rows)} of {total} runs.** A dash is a missing run."]
    columns = {
        "Accuracy of the global model, which is FedAvg's": "global_accuracy",
        "Accuracy of the personal models": "personal_accuracy",
        "Accuracy of the personal models, worst tenth of the clients": "personal_accuracy_worst10",
    }
    for title, column in columns.items():
        lines += ["", f"## {title}", ""]
        lines += [f"| attack | defence | {' | '.join(f'ε = {e}' for e in EPSILONS)} |"]
        lines += ["|---|---|" + "---|" * len(EPSILONS)]
        for attack in ATTACKS:
            for defence in DEFENCES:
                cells_of_row = [
                    summarize(rows, column, attack=attack, defence=defence, epsilon=epsilon)
                    for epsilon in EPSILONS
                ]
                lines.append(f"| {attack} | {defence} | {' | '.join(cells_of_row)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the missing runs, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=HERE, help="where to write")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    if options.rounds != ROUNDS and options.folder == HERE:
        parser.error(f"expected a --folder of its own for {options.rounds} rounds")
    results = options.folder / "buckets.csv"
    if not options.report:
        run_job = functools.partial(run, rounds=options.rounds)
        run_missing(cells(options.seeds), results, NAMES, run_job, options.workers)
    (options.folder / "buckets.md").write_text(make_table(read(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
