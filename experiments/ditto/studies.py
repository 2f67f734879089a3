"""Ditto's Tables 1, 5, 7 and 9 as studies: Vehicle and Fashion-MNIST.

PL_FED_DATA=../data python -m experiments ditto/vehicle
"""

import functools
from typing import Any

import numpy as np

from experiments.ditto import page
from experiments.ditto.results import (
    CONDITIONS,
    DEFENCES,
    WEAK,
    is_strong,
    name_ditto,
)
from experiments.experiment import ON_CPU, CellRun, Content, Experiment, Row, shorten

COHORT = 10
METRICS = ("accuracy_weighted", "accuracy", "accuracy_std")
MODELS = ("global", "personal")
KRUM = {"aggregator": "Krum", "aggregator.without_neighbours": "first"}
AGGREGATORS: dict[str, Content] = {
    "fair": {"aggregator": "Term", "aggregator.t": 1.0},
    "median": {"aggregator": "Median"},
    "Krum": {**KRUM, "aggregator.num_selected": 1},
    "multi-Krum": {**KRUM, "aggregator.num_selected": None},
    "clipping": {"pre_aggregators": [{"class_path": "pl_fed.aggregators.Clipping"}]},
    "k-norm": {"aggregator": "KNorm"},
    "k-loss": {"aggregator": "KLoss"},
    **{
        f"FedMGDA+, ε = {e:g}": {"aggregator": "FedMGDA", "aggregator.epsilon": e}
        for e in (0.0, 0.1, 0.5, 1.0)
    },
}
METHODS: dict[str, Content] = {
    **{name_ditto(lam): {"model": "Ditto", "model.lam": lam} for lam in (0.05, 0.1, 0.2, 1.0, 2.0)},
    "local": {"model": "Local"},
    **{name: {"model": "FedAvg", "federation": AGGREGATORS[name]} for name in DEFENCES},
    "MOCHA": {"model": "Mocha"},
    "finetuning": {
        "model": "Finetuning",
        "model.finetune_epochs": 40,
        "trainer.limit_val_batches": 0,
    },
}
COMMON: Content = {
    **ON_CPU,
    "federation.sampler": "BySize",
    "federation.sampler.cohort_size": COHORT,
    "federation.aggregator": "Mean",
    "federation.model_selection": None,
    "federation.max_rejected": 1.0,
    "data.drop_last": True,
}
VEHICLE: Content = {
    **COMMON,
    "model": {"net": "LinearSVM", "local_steps": 1, "optimizer": "SGD", "optimizer.lr": 0.1},
    "model.optimizer.weight_decay": 0.02,
    "model.criterion": "torch.nn.MultiMarginLoss",
    "model.criterion.margin": 2.0,
    "data": {"dataset": "Vehicle", "batch_size": 32, "val_fraction": 0.08, "test_fraction": 0.2},
    "federation.engine.name": "stacked",
    "trainer": {"max_epochs": 600, "check_val_every_n_epoch": 600},
}
FASHION: Content = {
    **COMMON,
    "model": {"net": "DittoFashionCNN", "local_steps": 2, "optimizer": "SGD"},
    "model.optimizer.lr": 0.05,
    "data": {"dataset": "FashionMNIST", "batch_size": 16, "val_fraction": 0.1},
    "data.split": "official",
    "data.normalize": "feature",
    "data.partitioner": "DittoFashion",
    "data.partitioner.classes_per_client": 5,
    "data.partitioner.overlapping": True,
    "data.partitioner.reference_seed": 233,
    "data.num_clients": 500,
    "federation.engine.name": "one_by_one_compiled",
    "trainer": {"max_epochs": 5_000, "check_val_every_n_epoch": 5_000},
}
UPLOADS = {"A2": "pl_fed.attacks.RandomUpdates", "A3": "pl_fed.attacks.ModelReplacement"}


def draw_byzantine(clients: int, share: float) -> list[int]:
    """Return the Byzantine clients that the authors' code draws by its seed 1234567."""
    draw = np.random.RandomState(1234567)
    return sorted(draw.choice(clients, int(share * clients), replace=False).tolist())


def make_adversary(condition: str, clients: int, labels: str) -> Content:
    """Return the change of a condition; A1, A2 and A3 all poison labels.

    Args:
        condition: The attack and the percentage of Byzantine clients, such as ``A1_50``.
        clients: The number of clients.
        labels: The class of the attack on labels.
    """
    if condition == "clean":
        return {}
    kind, percent = condition.split("_")
    attack: Any = {"class_path": labels}
    if kind in UPLOADS:
        attacks = [attack, {"class_path": UPLOADS[kind]}]
        attack = {"class_path": "pl_fed.attacks.Combined", "init_args": {"attacks": attacks}}
    share = int(percent) / 100
    adversary = {"attack": attack, "ids": draw_byzantine(clients, share)}
    return {"federation.adversary": {**adversary, "expected": round(share * COHORT)}}


def make_axes(
    conditions: tuple[str, ...], methods: tuple[str, ...], clients: int, labels: str
) -> Content:
    """Return the axes of a table, and the λ that a condition leaves out.

    Args:
        conditions: The conditions.
        methods: The methods beside Ditto.
        clients: The number of clients.
        labels: The class of the attack on labels.
    """
    ditto = [method for method in METHODS if method.startswith("Ditto")]
    weak = [condition for condition in conditions if not is_strong(condition)]
    small = [name for name in ditto if name not in map(name_ditto, WEAK)]
    return {
        "axes": {
            "condition": {c: make_adversary(c, clients, labels) for c in conditions},
            "method": {name: METHODS[name] for name in (*ditto, *methods)},
        },
        "leave_out": [{"condition": weak, "method": small}],
    }


def collect(run: CellRun) -> dict[str, list[Row]]:
    """Return the row of a run, and for Ditto the rows of its benign clients."""
    columns = [f"test/{model}/{name}" for model in MODELS for name in METRICS]
    columns += [f"val/{model}/accuracy_weighted" for model in MODELS]
    tables = {"results.csv": [run.select(*columns)]}
    if run.row["method"].startswith("Ditto"):
        files = run.read("per_client.csv"), run.read("per_client_validation.csv")
        tables["clients.csv"] = [
            {
                "client": tested["client"],
                "test_samples": tested["test_samples"],
                "accuracy": shorten(tested["personal_accuracy"]),
                "val_samples": validated["val_samples"],
                "val_loss": shorten(validated["personal_loss"]),
            }
            for tested, validated in zip(files[0], files[1], strict=True)
            if tested["byzantine"] == "0" and tested["test_samples"] != "0"
        ]
    return tables


def make_vehicle(**options: Any) -> Experiment:
    """Return Tables 5 and 7 on Vehicle: 23 sensors under all attacks and defences."""
    methods = ("local", *DEFENCES, "MOCHA")
    axes = make_axes(CONDITIONS, methods, 23, "pl_fed.attacks.FlippedLabels")
    content = {"base": VEHICLE, "seeds": 5, **axes}
    write = functools.partial(page.write, "vehicle")
    return Experiment("ditto/vehicle", content, collect, write, options)


def make_fashion(**options: Any) -> Experiment:
    """Return Tables 1, 5 and 9 on Fashion-MNIST: 500 clients, 5,000 rounds."""
    methods = ("local", "fair", "median", "multi-Krum", "clipping", "finetuning")
    conditions = ("clean", "A1_50", "A2_50", "A3_20")
    axes = make_axes(conditions, methods, 500, "pl_fed.attacks.RandomLabels")
    write = functools.partial(page.write, "fashion")
    return Experiment("ditto/fashion", {"base": FASHION, **axes}, collect, write, options)


EXPERIMENTS = {
    "ditto/vehicle": make_vehicle,
    "ditto/fashion": make_fashion,
}
