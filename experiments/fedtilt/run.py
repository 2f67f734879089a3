"""FedTilt's Tables II, III and VII: clean data, random corruptions, Gaussian noise.

PL_FED_DATA=../data python -m experiments.fedtilt.run

``... run cifar10`` runs CIFAR-10, clean, for a tenth of the rounds; ``... run select`` chooses
Ditto's λ by validation data, ``... run sweep`` runs FedTilt over τ and λ, ``... run split`` clean
data that are shared out and tested in other ways. ``... run own`` tests each client on a tenth of
its own samples, with five seeds, and writes a row for each client; ``... run own_cifar10`` does so
for CIFAR-10.
"""

import argparse
import importlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.grid import (
    QUIET,
    Config,
    FitResult,
    Job,
    Rows,
    merge_configs,
    shorten,
    spec,
    test_again,
    work,
)
from experiments.make_cifar10_npz import OUTPUT, write_if_missing
from pl_fed.data.folders import data_root

HERE = Path(__file__).parent
SEEDS = (0, 1)
FIVE_SEEDS = (0, 1, 2, 3, 4)  # of the reading "own 10 %"
SGD = spec("torch.optim.SGD", lr=0.01)
MLP = spec("pl_fed.models.MLP", in_features=784, hidden=[300, 100], num_classes=10)
DATASETS = {
    "mnist": {"dataset": spec("pl_fed.data.MNIST")},
    "fmnist": {"dataset": spec("pl_fed.data.FashionMNIST")},
    "cifar10": {"dataset": spec("pl_fed.data.Npz", path=str(OUTPUT))},
}
NETS = {"mnist": MLP, "fmnist": MLP, "cifar10": spec("pl_fed.models.FedTiltCNN")}
GREY = ("mnist", "fmnist")
CONDITIONS: dict[str, Config] = {
    "clean": {},
    "corruption": {
        "adversary": {"corruption": spec("pl_fed.attacks.Outliers", samples=0.3, pixels=0.3)}
    },
    "gaussian": {
        "adversary": {"corruption": spec("pl_fed.attacks.GaussianNoise", samples=0.3, std=1.0)}
    },
}
TILTS = {  # the paper's λ and τ
    "mnist": {"clean": (100.0, 50.0), "corruption": (1.0, -0.5), "gaussian": (-10.0, 50.0)},
    "fmnist": {"clean": (100.0, 50.0), "corruption": (10.0, -1.0), "gaussian": (-10.0, 50.0)},
    "cifar10": {"clean": (1.0, 2.0)},
}
SETTINGS = [f"{data}/{condition}" for condition in CONDITIONS for data in GREY]
CIFAR10_SETTINGS = ["cifar10/clean"]
WHOLE = "whole classes"
OWN_TENTH = "own 10 %"
FEW_STEPS = 3  # of the third reading of FedAvg: w with a few local steps, as many as fit
OWN: Config = {"split": "own", "val_fraction": 0.0, "test_fraction": 0.2}
SPLITS: dict[str, Config] = {
    WHOLE: {
        "partitioner": spec(
            "pl_fed.partitioners.Shards", classes_per_client=2, whole_test_classes=True
        ),
        "split": "official",
        "val_fraction": 0.0,
    },
    "own 20 %": {
        "partitioner": spec("pl_fed.partitioners.Shards", classes_per_client=2),
        **OWN,
    },
    "own 20 %, ten to one": {
        "partitioner": spec("experiments.fedtilt.data.Unbalanced", ratio=10.0),
        **OWN,
    },
    OWN_TENTH: {
        "partitioner": spec("pl_fed.partitioners.Shards", classes_per_client=2),
        "split": "own",
        "val_fraction": 0.1,
        "test_fraction": 0.1,
    },
}
DITTO_LAM = 0.1  # the best of LAMS by validation: see select.csv
LAMS = (0.01, 0.1, 1.0)
SWEEP = {"tau": (-1.0, 0.0, 1.0, 10.0, 50.0), "lam": (-10.0, 0.0, 1.0, 10.0, 100.0)}
SWEPT = ("fmnist/clean", "fmnist/corruption")
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("pl_fed.clients.Finetuning", {"lam": 0.0, "finetune_epochs": 10}),
    "Ditto": ("pl_fed.clients.Ditto", {"lam": DITTO_LAM}),
    "FedTilt": ("pl_fed.clients.FedTilt", {"mu": 0.01}),
}
COMMON: Config = {
    "data": {"num_clients": 100, "batch_size": 10, "normalize": "channel"},
    "federation": {
        "sampler": spec("pl_fed.samplers.Uniform", cohort_size=10),
        "model_selection": None,
        "engine": {"name": "one_by_one_compiled"},
    },
    "trainer": {
        "max_epochs": 50,  # the paper: 500 of CIFAR-10
        "limit_val_batches": 0,
        **QUIET,
    },
}
NAMES = ("setting", "split", "method", "arguments", "seed")
METRICS = ("accuracy", "accuracy_std", "class_std_mean", "class_std_std", "accuracy_worst10")


def job(setting: str, split: str, method: str, seed: int, **arguments: Any) -> Job:
    """Return a job; ``arguments`` are the method's, by default FedTilt's tilts."""
    data, condition = setting.split("/")
    path, own = METHODS[method]
    if method == "FedTilt":
        own = {**own, **dict(zip(("lam", "tau"), TILTS[data][condition]))}
    own = {**own, **arguments}
    model = spec(path, local_epochs=10, optimizer=SGD, net=NETS[data], **own)
    config = merge_configs(
        COMMON,
        {"seed_everything": seed, "model": model, "data": DATASETS[data]},
        {"data": SPLITS[split], "federation": CONDITIONS[condition]},
    )
    text = " ".join(f"{name}={value:g}" for name, value in own.items())
    return Job((setting, split, method, text, str(seed)), config)


def rows_of(fitted: FitResult) -> Rows:
    """Return the row of a run."""
    models = fitted.tested_models(("global", "personal"))
    row = {f"{m}_{n}": shorten(fitted.last[f"test/{m}/{n}"]) for m in models for n in METRICS}
    return {"results.csv": [row]}


def client_rows_of(fitted: FitResult) -> Rows:
    """Return the row of a run, a row for each client, and FedAvg's w after a few local steps."""
    tables = {**rows_of(fitted)}
    models = fitted.tested_models(("global", "personal"))
    names = [f"{model}_{name}" for model in models for name in ("accuracy", "class_std")]
    columns = ["rounds", "train_samples", "test_samples", *names]
    clients = [
        {"client": row["client"], **{name: shorten(row[name]) for name in columns}}
        for row in fitted.clients
    ]
    if fitted.config["model"]["class_path"] == METHODS["FedAvg"][0]:
        change = {"model": {**fitted.config["model"]}}
        arguments = {**change["model"]["init_args"], "finetune_steps": FEW_STEPS}
        del arguments["finetune_epochs"]
        change["model"]["init_args"] = arguments
        again = test_again(fitted, change)
        for name in METRICS:
            value = again.last[f"test/personal/{name}"]
            tables["results.csv"][0][f"stepped_{name}"] = shorten(value)
        for row, other in zip(clients, again.clients):
            row["stepped_accuracy"] = shorten(other["personal_accuracy"])
            row["stepped_class_std"] = shorten(other["personal_class_std"])
    return {**tables, "clients.csv": clients}


def validation_rows_of(fitted: FitResult) -> Rows:
    """Return the row of a run with the last accuracy on validation data."""
    accuracy = shorten(fitted.last_value("val/personal/accuracy"))
    return {"select.csv": [{"personal_validation": accuracy}]}


def table_jobs(seeds: Iterable[int], settings: Iterable[str] = SETTINGS) -> list[Job]:
    """Return the jobs of the tables."""
    return [job(s, WHOLE, m, seed) for seed in seeds for s in settings for m in METHODS]


def split_jobs(seeds: Iterable[int]) -> list[Job]:
    """Return jobs on clean data with other data splits and test sets."""
    return [
        job(f"{data}/clean", split, method, seed)
        for seed in seeds
        for split in SPLITS
        if split not in (WHOLE, OWN_TENTH)
        for data in GREY
        for method in METHODS
    ]


def own_tenth_jobs(seeds: Iterable[int], settings: Iterable[str] = SETTINGS) -> list[Job]:
    """Return the jobs of the reading "own 10 %", all settings of a seed before the next seed."""
    return [job(s, OWN_TENTH, m, seed) for seed in seeds for s in settings for m in METHODS]


def sweep_jobs(seeds: Iterable[int]) -> list[Job]:
    """Return FedTilt's jobs over τ and λ."""
    tilts = list(itertools.product(SWEEP["lam"], SWEEP["tau"]))
    return [
        job(setting, WHOLE, "FedTilt", seed, lam=lam, tau=tau)
        for seed in seeds
        for setting in SWEPT
        for lam, tau in tilts
    ]


def select_jobs(seeds: Iterable[int]) -> list[Job]:
    """Return Ditto's jobs with a tenth of the training data for validation."""
    jobs = []
    change: Config = {"data": {"val_fraction": 0.1}}
    change["trainer"] = {"limit_val_batches": 1.0, "check_val_every_n_epoch": 50}
    for seed in seeds:
        for data in GREY:
            for lam in LAMS:
                base = job(f"{data}/clean", WHOLE, "Ditto", seed, lam=lam)
                jobs.append(Job(base.key, merge_configs(base.config, change)))
    return jobs


def main() -> None:
    """Run the missing runs, and write tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parts = ["table", "cifar10", "select", "sweep", "split", "own", "own_cifar10"]
    parser.add_argument("part", nargs="?", default="table", choices=parts)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    default_seeds = {"table": SEEDS, "own": FIVE_SEEDS}
    seeds = options.seeds or default_seeds.get(options.part, SEEDS[:1])
    if options.part == "select":
        work(select_jobs(seeds), HERE / "select.csv", NAMES, validation_rows_of, options.workers)
        return
    if options.part.endswith("cifar10"):
        write_if_missing(data_root(None))
    jobs = {
        "table": table_jobs(seeds),
        "cifar10": table_jobs(seeds, CIFAR10_SETTINGS),
        "sweep": sweep_jobs(seeds),
        "split": split_jobs(seeds),
        "own": own_tenth_jobs(seeds),
        "own_cifar10": own_tenth_jobs(seeds, CIFAR10_SETTINGS),
    }[options.part]
    rows = client_rows_of if options.part.startswith("own") else rows_of
    work(jobs, HERE / "results.csv", NAMES, rows, options.workers)
    importlib.import_module("experiments.fedtilt.report").write()


if __name__ == "__main__":
    main()
