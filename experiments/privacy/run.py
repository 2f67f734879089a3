"""Privacy, attacks and personal models together, on real data.

PL_FED_DATA=../data python -m experiments.privacy.run

Fashion-MNIST has 800 clients with two classes and 50 samples each; MNIST has 836 clients, one
writer each. A fifth of the samples are for the test. In each of 50 rounds, a client takes part with
probability 0.1 (Poisson sampling), and takes 5 local steps of 10 samples with an MLP 784-32-10.
Uploads are clipped to norm 0.5. ε is that of the runs themselves, at δ = 1e-5: no larger federation
is simulated. In runs with ε = ∞ the uploads are clipped to the same norm, and there is no noise.

20 % of the clients are Byzantine: they train on random labels, or flip the sign of their upload.
Metrics are over benign clients, in the runs "none" over the same ones.

Each finished run is a row of results.csv and is not repeated. table.md and the picture are made
from the rows. ``--epsilons``, ``--attacks``, ``--algorithms``, ``--data`` and ``--seeds`` select
runs, ``--workers`` sets the number of processes, and ``--report`` runs nothing.
"""

import argparse
import functools
import importlib
import math
from pathlib import Path
from typing import Any

from experiments.grid import Job, Rows, fit_and_test, format_results, read, run_missing

HERE = Path(__file__).parent
EPSILONS = ("1", "2", "4", "8", "inf")
ATTACKS = ("none", "label poisoning", "sign flipping")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "Ditto": {"lam": 0.1},
    "Finetuning": {"finetune_epochs": 3},
    "FedRep": {"head_steps": 5},
    "MeanRegularized": {"lam": 0.1},
}
DATA = ("Fashion-MNIST", "MNIST writers")
NAMES = ("data", "epsilon", "attack", "algorithm", "seed")
METRICS = ("accuracy", "accuracy_worst10", "accuracy_std")
ROUNDS, RATE, CLIP_NORM, DELTA = 50, 0.1, 0.5, 1e-5
CLIENTS, SAMPLES = 800, 40_000


def cells(options: argparse.Namespace) -> list[Job]:
    """Return the jobs, all settings of a seed before the next seed."""
    return [
        Job((data, epsilon, attack, algorithm, str(seed)))
        for seed in options.seeds
        for data in options.data
        for attack in options.attacks
        for epsilon in options.epsilons
        for algorithm in options.algorithms
    ]


@functools.cache
def data_of(name: str, seed: int) -> Any:
    """Return the clients' data, loaded once in each process."""
    import torch

    from pl_fed.data import Arrays, DataSource, FashionMNIST, FederatedData, MNISTWriters
    from pl_fed.partitioners import Shards

    class Subset(DataSource):
        """Random samples of Fashion-MNIST, drawn by the seed."""

        def load(self) -> Arrays:
            arrays = FashionMNIST().load()
            draw = torch.Generator().manual_seed(seed)
            index = torch.randperm(len(arrays.inputs), generator=draw)[:SAMPLES]
            return Arrays(
                arrays.inputs[index], arrays.targets[index], num_classes=arrays.num_classes
            )

    settings: dict[str, Any] = {"batch_size": 10, "val_fraction": 0.0, "test_fraction": 0.2}
    public = {"normalize": [0.3, 0.35], "seed": seed}  # rounded, and not computed from clients
    if name == "MNIST writers":
        return FederatedData(MNISTWriters(), split="own", **settings, **public)
    return FederatedData(Subset(), Shards(2), num_clients=CLIENTS, **settings, **public)


def run(job: Job, rounds: int = ROUNDS) -> Rows:
    """Run one federation and return its row."""
    import torch

    import pl_fed
    from pl_fed import clients
    from pl_fed.aggregators import Clipping
    from pl_fed.attacks import RandomLabels, SignFlipping
    from pl_fed.models import MLP
    from pl_fed.samplers import Poisson

    data, epsilon, attack, algorithm, seed = job.key
    torch.manual_seed(int(seed))
    kind = getattr(clients, algorithm)
    client = kind(
        MLP(784, [32], 10),
        local_steps=5,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        **ALGORITHMS[algorithm],
    )
    privacy = None
    if epsilon != "inf":
        privacy = pl_fed.DifferentialPrivacy(
            clip_norm=CLIP_NORM,
            epsilon=float(epsilon),
            delta=DELTA,
            rounds=rounds,
            noise_seed=int(seed),  # the rows can be made anew; nobody publishes the models
        )
    federation = pl_fed.Federation(
        Poisson(RATE),
        pre_aggregators=[Clipping(CLIP_NORM)] if privacy is None else None,
        adversary=pl_fed.Adversary(
            SignFlipping() if attack == "sign flipping" else RandomLabels(),
            fraction=0.2,
            start_round=rounds if attack == "none" else 0,
            knowledge="own",
        ),
        max_rejected=1.0,
        engine=pl_fed.EngineOptions("stacked", chunk_size=50),
        privacy=privacy,
        seed=int(seed),
    )
    metrics = fit_and_test(federation, client, data_of(data, int(seed)), rounds)
    spent = metrics.get("privacy/epsilon", math.inf)
    row = {"rounds": str(rounds), "spent": f"{float(spent):.4g}"}
    return {"results.csv": [row | format_results(metrics, METRICS)]}


def main() -> None:
    """Run the missing runs, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--epsilons", nargs="+", default=list(EPSILONS), choices=EPSILONS)
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=DATA)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=HERE, help="where to write")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    if options.rounds != ROUNDS and options.folder == HERE:
        parser.error(f"expected a --folder of its own for {options.rounds} rounds")
    results = options.folder / "results.csv"
    if not options.report:
        run_job = functools.partial(run, rounds=options.rounds)
        run_missing(cells(options), results, NAMES, run_job, options.workers)
    report = importlib.import_module("experiments.privacy.report")
    report.write(read(results), options.folder)


if __name__ == "__main__":
    main()
