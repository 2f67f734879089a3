"""FedTilt's Tables II, III and VII: clean data, random corruptions, Gaussian noise.

PL_FED_DATA=../data python -m experiments fedtilt/whole   # tests on whole classes
PL_FED_DATA=../data python -m experiments fedtilt/own     # tests on 10 % of a client's own samples

CIFAR-10 has clean data, one seed and 50 of the paper's 500 rounds.
"""

from typing import Any

from experiments.experiment import ON_CPU, CellRun, Content, Experiment, Row, shorten
from experiments.fedtilt.figures import HERE, METRICS, write
from experiments.make_cifar10_npz import OUTPUT, write_if_missing
from pl_fed.data.folders import data_root
from pl_fed.studies.cells import Cell
from pl_fed.studies.pool import WorkerPool

MLP: Content = {
    "model.net": "pl_fed.models.MLP",
    "model.net.in_features": 784,
    "model.net.hidden": [300, 100],
    "model.net.num_classes": 10,
}
DATASETS: dict[str, Content] = {
    "mnist": {"data.dataset": "MNIST", **MLP},
    "fmnist": {"data.dataset": "FashionMNIST", **MLP},
    "cifar10": {
        "data.dataset": "Npz",
        "data.dataset.path": str(OUTPUT),
        "model.net": "FedTiltCNN",
    },
}
CORRUPTION = "federation.adversary.corruption"
CONDITIONS: dict[str, Content] = {
    "clean": {},
    "corruption": {
        CORRUPTION: "Outliers",
        f"{CORRUPTION}.samples": 0.3,
        f"{CORRUPTION}.pixels": 0.3,
    },
    "gaussian": {
        CORRUPTION: "GaussianNoise",
        f"{CORRUPTION}.samples": 0.3,
        f"{CORRUPTION}.std": 1.0,
    },
}
TILTS = {  # the paper's λ and τ
    "mnist/clean": (100.0, 50.0),
    "fmnist/clean": (100.0, 50.0),
    "mnist/corruption": (1.0, -0.5),
    "fmnist/corruption": (10.0, -1.0),
    "mnist/gaussian": (-10.0, 50.0),
    "fmnist/gaussian": (-10.0, 50.0),
    "cifar10/clean": (1.0, 2.0),
}
FINETUNING: Content = {"model": "Finetuning", "model.lam": 0.0}
METHODS: dict[str, Content] = {
    "FedAvg": {**FINETUNING, "model.finetune_epochs": 10},
    "FedAvg, 3 steps": {**FINETUNING, "model.finetune_steps": 3},  # as many as fit
    "Ditto": {"model": "Ditto", "model.lam": 0.1},  # of 0.01, 0.1 and 1: see select.csv
    "FedTilt": {"model": "FedTilt", "model.mu": 0.01},
}
COMMON: Content = {
    **ON_CPU,
    "model": {"local_epochs": 10, "optimizer": "SGD", "optimizer.lr": 0.01},
    "data": {"num_clients": 100, "batch_size": 10, "normalize": "channel"},
    "data.partitioner": "Shards",
    "data.partitioner.classes_per_client": 2,
    "federation.sampler": "Uniform",
    "federation.sampler.cohort_size": 10,
    "federation.model_selection": None,
    "federation.engine.name": "one_by_one_compiled",
    "trainer.max_epochs": 50,
    "trainer.limit_val_batches": 0,
}
WHOLE: Content = {
    "data.partitioner.whole_test_classes": True,
    "data.split": "official",
    "data.val_fraction": 0.0,
}
OWN: Content = {"data.split": "own", "data.val_fraction": 0.1, "data.test_fraction": 0.1}


class Tables(Experiment):
    """Tables of FedTilt; their workers need CIFAR-10 as one file."""

    def open_pool(self, workers: int | None = None, cells: int | None = None) -> WorkerPool:
        """Write CIFAR-10 if it is missing, and start workers on this machine."""
        write_if_missing(data_root(None))
        return super().open_pool(workers, cells)


def make_content(split: Content, methods: list[str], seeds: int) -> Content:
    """Return the study of a reading of the test; CIFAR-10 has the first seed alone.

    Args:
        split: The data split, and the samples of the test.
        methods: The methods.
        seeds: The number of seeds.
    """
    settings = {}
    for setting in TILTS:
        data, condition = setting.split("/")
        settings[setting] = {**DATASETS[data], **CONDITIONS[condition]}
    return {
        "base": {**COMMON, **split},
        "axes": {"setting": settings, "method": {name: METHODS[name] for name in methods}},
        "seeds": seeds,
        "leave_out": [{"setting": "cifar10/clean", "seed": list(range(1, seeds))}],
    }


def choose_tilts(cell: Cell) -> Content:
    """Return the tilts of FedTilt, which the paper gives for each setting."""
    if cell.values["method"] != "FedTilt":
        return {}
    lam, tau = TILTS[cell.values["setting"]]
    return {"model.lam": lam, "model.tau": tau}


def select_row(run: CellRun) -> Row:
    """Return the row of a run."""
    return run.select(*(f"test/{m}/{name}" for m in ("global", "personal") for name in METRICS))


def collect_whole(run: CellRun) -> dict[str, list[Row]]:
    """Return the row of a run."""
    return {"whole.csv": [select_row(run)]}


def collect_own(run: CellRun) -> dict[str, list[Row]]:
    """Return the row of a run, and a row for each client."""
    clients = run.read("per_client.csv")
    columns = ["rounds", "train_samples", "test_samples"]
    columns += [f"{m}_{n}" for m in ("global", "personal") for n in ("accuracy", "class_std")]
    rows = [
        {"client": client["client"]}
        | {name: shorten(client[name]) for name in columns if client.get(name)}
        for client in clients
    ]
    return {"own.csv": [select_row(run)], "clients.csv": rows}


def make_whole(**options: Any) -> Experiment:
    """Return the tests on all official test images of a client's classes: 39 runs."""
    content = make_content(WHOLE, ["FedAvg", "Ditto", "FedTilt"], seeds=2)
    return Tables(
        "fedtilt/whole", content, collect_whole, write, options, HERE, "whole.csv", choose_tilts
    )


def make_own(**options: Any) -> Experiment:
    """Return the tests on a tenth of a client's own samples: 124 runs."""
    content = make_content(OWN, list(METHODS), seeds=5)
    return Tables(
        "fedtilt/own", content, collect_own, write, options, HERE, "own.csv", choose_tilts
    )


EXPERIMENTS = {"fedtilt/whole": make_whole, "fedtilt/own": make_own}
