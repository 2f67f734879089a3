"""A setting where FedTilt's two-level fairness can be told from Ditto's.

PL_FED_DATA=../data python -m experiments.fedtilt_levels.run

README.md has the setting and its theory. Each finished run is a row of results.csv, with a row for
each client in clients.csv, and is not repeated. ``... run select`` chooses the learning rate of
each method by validation data, ``... run same`` gives all methods Ditto's, and ``... run small``
takes three times as many steps of a third of the size.
"""

import argparse
import functools
import importlib
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.grid import (
    Job,
    Row,
    Rows,
    build_trainer,
    finished_rows,
    fit_and_test,
    group_rows,
    run_missing,
    shorten,
)

if TYPE_CHECKING:
    import pl_fed
    from pl_fed.clients import Client

HERE = Path(__file__).parent
NAMES = ("sizes", "losses", "method", "lr", "seed")
SEEDS = tuple(range(10))
SELECTION_SEED = 100
FACTORS = (1.0, 0.3, 0.1, 0.03)  # of the learning rate, for the selection
CLIENTS, COHORT, ROUNDS, CLASSES = 50, 10, 60, 5
RATIOS = {"unequal": 10.0, "equal": 1.0}  # of a client's largest class to its smallest one
LOSSES: dict[str, dict[str, Any]] = {  # the pull is Ditto's λ and FedTilt's μ
    "remain": {"share": 1.0, "hidden": [], "pull": 0.1, "lr": 0.05, "batch": 100, "epochs": 2},
    "vanish": {"share": 0.1, "hidden": [64], "pull": 0.001, "lr": 0.1, "batch": 60, "epochs": 20},
}
SMALL_STEPS = "remain, small steps"  # added after the first results
ALL_LOSSES = LOSSES | {SMALL_STEPS: {**LOSSES["remain"], "lr": 0.005, "epochs": 6}}
DITTO = "Ditto"
TILTS: dict[str, dict[str, float]] = {
    "FedTilt, τ = 1": {"tau": 1.0},
    "FedTilt, τ = 3": {"tau": 3.0},
    "FedTilt, τ = 10": {"tau": 10.0},
    "FedTilt, τ = 3, λ = 3": {"tau": 3.0, "lam": 3.0},
    "FedTilt, τ = 50, λ = 100": {"tau": 50.0, "lam": 100.0},
}
METHODS = (DITTO, *TILTS)
SMALL_METHODS = tuple(method for method in METHODS if "λ" not in method)


def jobs(seeds: Iterable[int], rates: Mapping[tuple[str, str, str], str]) -> list[Job]:
    """Return the jobs, all settings of a seed before the next seed.

    Args:
        seeds: The seeds.
        rates: The learning rates by sizes, losses and method.
    """
    return [
        Job((sizes, losses, method, rates[sizes, losses, method], str(seed)))
        for seed in seeds
        for sizes in RATIOS
        for losses in LOSSES
        for method in METHODS
    ]


def small_jobs(seeds: Iterable[int]) -> list[Job]:
    """Return the jobs with more and smaller steps, without λ."""
    return [Job((*key, rate, str(seed))) for seed in seeds for key, rate in small_rates().items()]


def selection_jobs() -> list[Job]:
    """Return the jobs that choose the learning rates, by :func:`validate`."""
    return [
        Job((sizes, losses, method, shorten(factor * setting["lr"]), str(SELECTION_SEED)))
        for sizes in RATIOS
        for losses, setting in LOSSES.items()
        for method in METHODS
        for factor in FACTORS
    ]


def same_rates() -> dict[tuple[str, str, str], str]:
    """Return Ditto's learning rate for every method, by sizes, losses and method."""
    return {
        (sizes, losses, method): shorten(setting["lr"])
        for sizes in RATIOS
        for losses, setting in LOSSES.items()
        for method in METHODS
    }


def small_rates() -> dict[tuple[str, str, str], str]:
    """Return the learning rate of small steps by sizes, losses and method."""
    rate = shorten(ALL_LOSSES[SMALL_STEPS]["lr"])
    return {(sizes, SMALL_STEPS, method): rate for sizes in RATIOS for method in SMALL_METHODS}


def chosen_rates() -> dict[tuple[str, str, str], str]:
    """Return the learning rate with the best validation accuracy by sizes, losses and method."""
    rates = {}
    for (sizes, losses, method), rows in group_rows(
        finished_rows(HERE / "select.csv"), "sizes", "losses", "method"
    ):
        best = max(rows, key=lambda row: float(row["personal_validation"]))
        rates[sizes, losses, method] = best["lr"]
    if missing := same_rates().keys() - rates.keys():
        raise SystemExit(f"Expected select.csv to have {sorted(missing)[0]}: run `select` first.")
    return rates


@functools.cache
def data_of(
    sizes: str, losses: str, seed: int, val_fraction: float = 0.0
) -> "pl_fed.FederatedData":
    """Return the clients' data, loaded once in each process."""
    from experiments.ditto.data import Share
    from experiments.fedtilt_levels.data import Graded
    from pl_fed.data import FashionMNIST, FederatedData

    setting = ALL_LOSSES[losses]
    return FederatedData(
        FashionMNIST() if setting["share"] == 1 else Share(FashionMNIST(), setting["share"]),
        Graded(CLASSES, RATIOS[sizes]),
        num_clients=CLIENTS,
        split="official",
        val_fraction=val_fraction,
        batch_size=setting["batch"],
        normalize="channel",
        seed=seed,
    )


def build(job: Job) -> "tuple[Client, pl_fed.Federation]":
    """Return the algorithm of a job and its federation."""
    import torch

    import pl_fed
    from pl_fed.clients import Client, Ditto, FedTilt
    from pl_fed.models import MLP
    from pl_fed.samplers import Uniform

    _, losses, method, lr, seed = job.key
    setting = ALL_LOSSES[losses]
    torch.manual_seed(int(seed))
    net = MLP(784, setting["hidden"], 10)
    training: dict[str, Any] = {
        "local_epochs": setting["epochs"],
        "optimizer": functools.partial(torch.optim.SGD, lr=float(lr)),
    }
    client: Client
    if method == DITTO:
        client = Ditto(net, lam=setting["pull"], **training)
    else:
        client = FedTilt(net, mu=setting["pull"], **TILTS[method], **training)
    engine = pl_fed.EngineOptions("stacked_compiled")
    return client, pl_fed.Federation(Uniform(COHORT), engine=engine, seed=int(seed))


def run(job: Job) -> Rows:
    """Run one federation, and return its row and a row for each client."""
    client, federation = build(job)
    data = data_of(*job.key[:2], int(job.key[-1]))
    fit_and_test(federation, client, data, ROUNDS)
    clients = client_rows(federation)
    untrained = sum(row["rounds"] == "0" for row in clients)
    row = {"clients": str(len(clients)), "untrained": str(untrained)}
    return {"results.csv": [row], "clients.csv": clients}


def validate(job: Job) -> Rows:
    """Run one federation, and return its personal models' mean accuracy on validation data."""
    client, federation = build(job)
    data = data_of(*job.key[:2], int(job.key[-1]), val_fraction=0.2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(federation, folder, ROUNDS)
        trainer.fit(client, data)
        trainer.limit_val_batches = 1.0
        trainer.validate(client, data, verbose=False)
        accuracy = float(trainer.callback_metrics["val/personal/accuracy"])
    return {"select.csv": [{"personal_validation": shorten(accuracy)}]}


def client_rows(federation: "pl_fed.Federation") -> list[Row]:
    """Return the test results of each client's personal model.

    ``accuracy`` is over test classes of equal size, ``own_accuracy`` in the proportions of the
    client's own training classes, and ``class_std`` the population deviation over its classes.
    """
    import torch

    by_class, samples = federation.metrics("test")["personal"].per_class()
    taken = federation.participation
    data = federation.data
    rows = []
    for client in range(data.num_clients):
        first, size = int(data.train.offsets[client]), int(data.train.sizes[client])
        targets = data.targets[data.train.index[first : first + size]]  # type: ignore[index]
        shares = torch.bincount(targets, minlength=by_class.shape[1]) / size
        has = samples[client] > 0
        accuracies, own = by_class[client][has].double(), shares[has].double()
        values = {
            "accuracy": accuracies.mean(),
            "own_accuracy": (own * accuracies).sum(),
            "class_std": accuracies.std(correction=0),
            "worst_class": accuracies.min(),
        }
        row = {"client": str(client), "rounds": "" if taken is None else str(int(taken[client]))}
        rows.append(row | {name: shorten(float(value)) for name, value in values.items()})
    return rows


def main() -> None:
    """Run the missing runs, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parts = ["table", "select", "same", "small"]
    parser.add_argument("part", nargs="?", default="table", choices=parts)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    if options.part == "select":
        run_missing(selection_jobs(), HERE / "select.csv", NAMES, validate, options.workers)
        return
    if not options.report:
        if options.part == "same":
            selected = jobs(options.seeds or SEEDS[:1], same_rates())
        elif options.part == "small":
            selected = small_jobs(options.seeds or SEEDS)
        else:
            selected = jobs(options.seeds or SEEDS, chosen_rates())
        run_missing(selected, HERE / "results.csv", NAMES, run, options.workers)
    importlib.import_module("experiments.fedtilt_levels.report").write()


if __name__ == "__main__":
    main()
