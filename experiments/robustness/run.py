"""Attacks against defences on real Fashion-MNIST, for global and personal models of the same runs.

PL_FED_DATA=../data python -m experiments.robustness.run

20 clients with about 300 training and 300 test samples each, split by Dirichlet(0.5). All clients
take part in each of 30 rounds of one pass, with minibatches of 32. The algorithm is Ditto with an
MLP 784-128-64-10, on the CPU, with one thread per process and one seed: differences of 0.02 are
noise. The server has 100 samples of its own for one defence, and knows the number of Byzantine
clients. In the runs "none" the same clients are Byzantine but never attack, so that the metrics of
all runs are over the same clients.

Every attack meets every defence at one fraction of Byzantine clients; some pairs at all fractions.
Each finished run is a row of results.csv and is not repeated. table.md and the pictures are made
from the rows. ``--attacks``, ``--defences`` and ``--grid`` select runs, ``--workers`` sets the
number of processes, and ``--report`` runs nothing.
"""

import argparse
import functools
import importlib
from pathlib import Path
from typing import Any

from experiments.grid import Job, Rows, fit_and_test, format_results, read, run_missing

HERE = Path(__file__).parent
Spec = tuple[str, dict[str, Any]]  # a class of the package, and its arguments

ATTACKS: dict[str, Spec | None] = {
    "none": None,
    "random labels": ("attacks.RandomLabels", {}),
    "flipped labels": ("attacks.FlippedLabels", {}),
    "backdoor": ("attacks.Backdoor", {"target": 0}),
    "random updates": ("attacks.RandomUpdates", {}),
    "replacement": ("attacks.ModelReplacement", {}),
    "same value": ("attacks.SameValue", {}),
    "sign flipping": ("attacks.SignFlipping", {}),
    "IPM": ("attacks.InnerProductManipulation", {}),
    "ALIE": ("attacks.ALittleIsEnough", {}),
    "Min-Max": ("attacks.MinMax", {}),
    "Min-Sum": ("attacks.MinSum", {}),
    "mimic": ("attacks.Mimic", {}),
    "Fang": ("attacks.Fang", {}),
    "boosted backdoor": (
        "attacks.Combined",
        {
            "attacks": [
                ("attacks.Backdoor", {"target": 0}),
                ("attacks.ModelReplacement", {"factor": 5.0}),
            ]
        },
    ),
}
IDLE: Spec = ("attacks.RandomLabels", {})  # attack of the runs "none", which never starts
DEFENCES: dict[str, list[Spec]] = {  # pre-aggregators, then the aggregator
    "Mean": [("aggregators.Mean", {})],
    "Median": [("aggregators.Median", {})],
    "TrimmedMean": [("aggregators.TrimmedMean", {})],
    "Krum": [("aggregators.Krum", {})],
    "multi-Krum": [("aggregators.Krum", {"num_selected": 10})],
    "GeometricMedian": [("aggregators.GeometricMedian", {})],
    "CenteredClipping": [("aggregators.CenteredClipping", {"tau": 1.0, "num_steps": 3})],
    "KNorm": [("aggregators.KNorm", {})],
    "KLoss": [("aggregators.KLoss", {})],
    "FedMGDA": [("aggregators.FedMGDA", {})],
    "Bulyan": [("aggregators.Bulyan", {})],
    "MeaMed": [("aggregators.MeaMed", {})],
    "DnC": [("aggregators.DnC", {})],
    "SignGuard": [("aggregators.SignGuard", {})],
    "FLTrust": [("aggregators.FLTrust", {})],
    "TiltedMean, q = −2": [("aggregators.TiltedMean", {"q": -2.0})],
    "Clipping": [("aggregators.Clipping", {}), ("aggregators.Mean", {})],
    "AdaptiveClipping": [("aggregators.AdaptiveClipping", {}), ("aggregators.Mean", {})],
    "NormFilter": [("aggregators.NormFilter", {}), ("aggregators.Mean", {})],
    "mixing + TrimmedMean": [
        ("aggregators.NearestNeighborMixing", {}),
        ("aggregators.TrimmedMean", {}),
    ],
    "buckets + Median": [("aggregators.Bucketing", {}), ("aggregators.Median", {})],
}
GRID = (0.2,)  # where everything meets everything
FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4)  # where these meet these
CURVES = {
    "attacks": ("random labels", "sign flipping", "ALIE", "Min-Max"),
    "defences": ("Mean", "Median", "TrimmedMean", "Krum", "Clipping", "GeometricMedian", "DnC"),
}
CLIENTS, SAMPLES, ROOT, ROUNDS = 20, 12_000, 100, 30
NAMES = ("attack", "defence", "fraction", "seed")
METRICS = ("accuracy", "accuracy_worst10", "backdoor_success")


def build(spec: Any) -> Any:
    """Build the object of a spec, or a list of objects; return other values unchanged."""
    if isinstance(spec, list):
        return [build(item) for item in spec]
    if not isinstance(spec, tuple):
        return spec
    (room, name), arguments = spec[0].split("."), spec[1]
    kind = getattr(importlib.import_module(f"pl_fed.{room}"), name)
    return kind(**{argument: build(value) for argument, value in arguments.items()})


def cells(
    attacks: list[str], defences: list[str], grid: list[float], seeds: list[int]
) -> list[Job]:
    """Return the jobs of the grid, and of the curves over fractions."""
    everything = [(a, d, f) for f in grid for a in attacks for d in defences]
    curves = [
        (attack if fraction else "none", defence, fraction)
        for fraction in FRACTIONS
        for attack in CURVES["attacks"]
        for defence in CURVES["defences"]
        if attack in attacks and defence in defences
    ]
    selected = dict.fromkeys(everything + curves)
    return [Job((a, d, str(f), str(seed))) for seed in seeds for a, d, f in selected]


@functools.cache
def data_of(seed: int) -> Any:
    """Return the clients' data, loaded once in each process."""
    import torch

    from pl_fed.data import Arrays, DataSource, FashionMNIST, FederatedData
    from pl_fed.partitioners import Dirichlet

    class Subset(DataSource):
        """Random samples of Fashion-MNIST, drawn by the seed."""

        def load(self) -> Arrays:
            arrays = FashionMNIST().load()
            draw = torch.Generator().manual_seed(seed)
            index = torch.randperm(len(arrays.inputs), generator=draw)[:SAMPLES]
            return Arrays(
                arrays.inputs[index], arrays.targets[index], num_classes=arrays.num_classes
            )

    return FederatedData(
        Subset(),
        Dirichlet(0.5, min_size=40),
        num_clients=CLIENTS,
        batch_size=32,
        val_fraction=0.0,
        test_fraction=0.5,
        normalize="channel",
        root_samples=ROOT,
        seed=seed,
    )


def run(job: Job, rounds: int = ROUNDS) -> Rows:
    """Run one federation and return its row."""
    import torch

    import pl_fed
    from pl_fed.clients import Ditto
    from pl_fed.models import MLP
    from pl_fed.samplers import All

    attack, defence, fraction, seed = job.key
    spec = ATTACKS[attack]
    *first, last = DEFENCES[defence]
    torch.manual_seed(int(seed))
    client = Ditto(
        MLP(784, [128, 64], 10),
        lam=0.1,
        local_epochs=1,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )
    federation = pl_fed.Federation(
        All(),
        aggregator=build(last),
        pre_aggregators=build(first),
        adversary=pl_fed.Adversary(
            build(spec or IDLE),
            fraction=float(fraction),
            start_round=0 if spec else rounds,
        ),
        max_rejected=1.0,  # a destroyed model is a result, too
        engine=pl_fed.EngineOptions("one_by_one"),
        seed=int(seed),
    )
    metrics = fit_and_test(federation, client, data_of(int(seed)), rounds)
    return {"results.csv": [{"rounds": str(rounds)} | format_results(metrics, METRICS)]}


def main() -> None:
    """Run the missing runs, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--defences", nargs="+", default=list(DEFENCES), choices=list(DEFENCES))
    parser.add_argument("--grid", type=float, nargs="+", default=list(GRID))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=HERE, help="where to write")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    if options.rounds != ROUNDS and options.folder == HERE:
        parser.error(f"expected a --folder of its own for --rounds other than {ROUNDS}")
    results = options.folder / "results.csv"
    if not options.report:
        jobs = cells(options.attacks, options.defences, options.grid, options.seeds)
        run_job = functools.partial(run, rounds=options.rounds)
        run_missing(jobs, results, NAMES, run_job, options.workers)
    report = importlib.import_module("experiments.robustness.report")
    report.write(read(results), options.folder, list(ATTACKS), list(DEFENCES), CURVES, options.grid)


if __name__ == "__main__":
    main()
