"""FLAME's Table III: label, quality, quantity and hybrid skew, five methods, five seeds.

PL_FED_DATA=../data python -m experiments.flame.run
"""

import argparse
import importlib
import statistics
from pathlib import Path
from typing import Any

from experiments.grid import (
    QUIET,
    Config,
    FitResult,
    Job,
    Row,
    Rows,
    merge_configs,
    shorten,
    spec,
    work,
)
from experiments.make_cifar10_npz import OUTPUT, write_if_missing
from pl_fed.data.folders import data_root

HERE = Path(__file__).parent
SEEDS = (1, 10, 100, 1000, 10000)  # those of the authors' code
SGD = spec("torch.optim.SGD", lr=0.01, momentum=0.5, weight_decay=0.01)
MLP = spec("pl_fed.models.MLP", in_features=784, hidden=[128, 64], num_classes=10)
GREY, COLOUR = [0.1307, 0.3081], [0.5, 0.5]  # mean and std, of both grey data sets
DATASETS: dict[str, dict[str, Any]] = {
    "mnist": {"dataset": spec("pl_fed.data.MNIST"), "normalize": GREY},
    "fmnist": {"dataset": spec("pl_fed.data.FashionMNIST"), "normalize": GREY},
    "cifar10": {
        "dataset": spec("pl_fed.data.Npz", path=str(OUTPUT)),
        "normalize": COLOUR,
    },
}
NETS = {"mnist": MLP, "fmnist": MLP, "cifar10": spec("pl_fed.models.FlameCNN")}
PARTITIONS: dict[str, dict[str, Any]] = {
    "hybrid_q2_dir0.5": {
        "partitioner": spec(
            "pl_fed.partitioners.Hybrid",
            classes_per_client=2,
            beta=0.5,
            min_size=100,
            overlapping=True,
        )
    },
    "label_dir0.5": {
        "partitioner": spec("pl_fed.partitioners.Dirichlet", beta=0.5, overlapping=True)
    },
    **{
        f"label_q{q}": {
            "partitioner": spec("pl_fed.partitioners.Shards", classes_per_client=q, reference=True)
        }
        for q in range(2, 7)
    },
    "quality_gau0.1": {
        "partitioner": spec("pl_fed.partitioners.IID", shuffle=False),
        "skew": spec("pl_fed.skews.Quality", sigma=0.1, of="std"),
    },
    "quantity_dir0.5": {
        "partitioner": spec(
            "pl_fed.partitioners.Quantity", beta=0.5, min_size=100, overlapping=True
        )
    },
}
SETTINGS = [f"{data}/{partition}" for data in ("mnist", "fmnist") for partition in PARTITIONS]
CIFAR10_SETTINGS = ["cifar10/label_q2", "cifar10/hybrid_q2_dir0.5"]
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FLAME": (
        "pl_fed.clients.FLAME",
        {"lam": 1.0, "rho": 0.1, "pull_to": "broadcast", "lagged_global": True},
    ),
    "pFedMe": ("pl_fed.clients.PFedMeEpochs", {"lam": 1.0, "eta": 0.1}),
    "pFedMe, step 1": ("pl_fed.clients.PFedMeEpochs", {"lam": 1.0, "eta": 1.0}),
    "Ditto, as coded": (
        "experiments.flame.reference.UnsynchronizedDitto",
        {"lam": 1.0, "global_lr": 0.1},
    ),
    "Ditto": ("pl_fed.clients.Ditto", {"lam": 1.0}),
}
COMMON: Config = {
    "data": {
        "num_clients": 10,
        "batch_size": 100,
        "drop_last": True,
        "split": "own",
        "val_fraction": 0.1,
        "test_fraction": 0.1,
    },
    "federation": {
        "sampler": spec("pl_fed.samplers.All"),
        "model_selection": "validation",
        "engine": {"name": "one_by_one_compiled"},
    },
    "trainer": {
        "max_epochs": 100,
        "check_val_every_n_epoch": 10,
        **QUIET,
    },
}
NAMES = ("setting", "method", "seed")


def config(setting: str, method: str, seed: int, **arguments: Any) -> Config:
    """Return the config of a run; further arguments are the method's own."""
    data, partition = setting.split("/")
    path, own = METHODS[method]
    model = spec(
        path, **{"local_epochs": 1, "optimizer": SGD, "net": NETS[data], **own, **arguments}
    )
    return merge_configs(
        COMMON,
        {"seed_everything": seed, "model": model, "data": DATASETS[data]},
        {"data": PARTITIONS[partition]},
    )


def rows_of(fitted: FitResult) -> Rows:
    """Return the rows of a run: its results, clients and curves."""
    models = fitted.tested_models(("global", "lagged_global", "personal", "hybrid"))
    row: Row = {}
    for model in models:
        for metric in ("accuracy", "accuracy_std", "loss", "loss_var"):
            row[f"{model}_{metric}"] = shorten(fitted.last[f"test/{model}/{metric}"])
    old = "lagged_global" if "lagged_global" in models else "global"
    best = [max(float(c["personal_accuracy"]), float(c[f"{old}_accuracy"])) for c in fitted.clients]
    row["hybrid_by_test_accuracy"] = shorten(statistics.mean(best))
    clients = [
        {
            "client": client["client"],
            "train_samples": client["train_samples"],
            "test_samples": client["test_samples"],
            **{
                f"{model}_{metric}": shorten(client[f"{model}_{metric}"])
                for model in models
                for metric in ("accuracy", "loss")
            },
        }
        for client in fitted.clients
    ]
    curves = [
        {
            "round": validation["round"],
            **{
                f"{model}_{metric}": shorten(validation[f"val/{model}/{metric}"])
                for model in models
                for metric in ("accuracy", "loss")
            },
        }
        for validation in fitted.rounds
        if validation.get("val/personal/accuracy")
    ]
    return {"results.csv": [row], "clients.csv": clients, "curves.csv": curves}


def main() -> None:
    """Run the missing runs, and write tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    choices = [f"{data}/{partition}" for data in DATASETS for partition in PARTITIONS]
    parser.add_argument(
        "--settings", nargs="+", default=SETTINGS, choices=choices, metavar="SETTING"
    )
    parser.add_argument("--cifar10", action="store_true", help="two settings of CIFAR-10 instead")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    settings = CIFAR10_SETTINGS if options.cifar10 else options.settings
    if any(setting.startswith("cifar10") for setting in settings):
        write_if_missing(data_root(None))
    jobs = [
        Job((setting, method, str(seed)), config(setting, method, seed))
        for seed in options.seeds
        for setting in settings
        for method in options.methods
    ]
    work(jobs, HERE / "results.csv", NAMES, rows_of, options.workers)
    importlib.import_module("experiments.flame.report").write()


if __name__ == "__main__":
    main()
