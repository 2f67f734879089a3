"""A setting where FedTilt's two-level fairness can be told from Ditto's.

PL_FED_DATA=../data python -m experiments.fedtilt_levels.run

README.md has the setting and its theory. Each finished run is a row of results.csv, with a row for
each client in clients.csv, and is not repeated.
"""

import argparse
import functools
import importlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.grid import Job, Row, Rows, build_trainer, run_missing, shorten

if TYPE_CHECKING:
    import pl_fed

HERE = Path(__file__).parent
NAMES = ("sizes", "losses", "method", "seed")
SEEDS = tuple(range(10))
CLIENTS, COHORT, ROUNDS, CLASSES = 50, 10, 60, 5
RATIOS = {"unequal": 10.0, "equal": 1.0}  # of a client's largest class to its smallest one
LOSSES: dict[str, dict[str, Any]] = {  # the pull is Ditto's λ and FedTilt's μ
    "remain": {"share": 1.0, "hidden": [], "pull": 0.1, "lr": 0.05, "batch": 100, "epochs": 2},
    "vanish": {"share": 0.1, "hidden": [64], "pull": 0.001, "lr": 0.1, "batch": 60, "epochs": 20},
}
DITTO = "Ditto"
TILTS: dict[str, dict[str, float]] = {
    "FedTilt, τ = 1": {"tau": 1.0},
    "FedTilt, τ = 3": {"tau": 3.0},
    "FedTilt, τ = 10": {"tau": 10.0},
    "FedTilt, τ = 3, λ = 3": {"tau": 3.0, "lam": 3.0},
    "FedTilt, τ = 50, λ = 100": {"tau": 50.0, "lam": 100.0},
}
METHODS = (DITTO, *TILTS)
METRICS = ("accuracy", "own_accuracy", "class_std", "worst_class")


def jobs(seeds: tuple[int, ...] = SEEDS) -> list[Job]:
    """Return the jobs, all settings of a seed before the next seed."""
    return [
        Job((sizes, losses, method, str(seed)))
        for seed in seeds
        for sizes in RATIOS
        for losses in LOSSES
        for method in METHODS
    ]


@functools.cache
def data_of(sizes: str, losses: str, seed: int) -> "pl_fed.FederatedData":
    """Return the clients' data, loaded once in each process."""
    from experiments.ditto.data import Share
    from experiments.fedtilt_levels.data import Graded
    from pl_fed.data import FashionMNIST, FederatedData

    share = LOSSES[losses]["share"]
    return FederatedData(
        FashionMNIST() if share == 1 else Share(FashionMNIST(), share),
        Graded(CLASSES, RATIOS[sizes]),
        num_clients=CLIENTS,
        split="official",
        val_fraction=0.0,
        batch_size=LOSSES[losses]["batch"],
        normalize="channel",
        seed=seed,
    )


def run(job: Job, rounds: int = ROUNDS) -> Rows:
    """Run one federation, and return its row and a row for each client."""
    import torch

    import pl_fed
    from pl_fed.clients import Ditto, FedTilt
    from pl_fed.models import MLP
    from pl_fed.samplers import Uniform

    sizes, losses, method, seed = job.key
    setting = LOSSES[losses]
    torch.manual_seed(int(seed))
    net = MLP(784, setting["hidden"], 10)
    training = {
        "local_epochs": setting["epochs"],
        "optimizer": functools.partial(torch.optim.SGD, lr=setting["lr"]),
    }
    if method == DITTO:
        client = Ditto(net, lam=setting["pull"], **training)
    else:
        client = FedTilt(net, mu=setting["pull"], **TILTS[method], **training)
    engine = pl_fed.EngineOptions("stacked_compiled")
    federation = pl_fed.Federation(Uniform(COHORT), engine=engine, seed=int(seed))
    data = data_of(sizes, losses, int(seed))
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(federation, folder, rounds)
        trainer.fit(client, data)
        trainer.test(client, data, verbose=False)
    clients = client_rows(federation)
    row = {"clients": str(len(clients)), "untrained": str(sum(c["rounds"] == "0" for c in clients))}
    return {"results.csv": [row], "clients.csv": clients}


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
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    if not options.report:
        results = HERE / "results.csv"
        run_missing(jobs(tuple(options.seeds)), results, NAMES, run, options.workers)
    importlib.import_module("experiments.fedtilt_levels.report").write()


if __name__ == "__main__":
    main()
