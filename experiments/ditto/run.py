"""Ditto's Tables 1, 5, 7 and 9: Vehicle, Fashion-MNIST, and Fashion-MNIST in the small.

PL_FED_DATA=../data python -m experiments.ditto.run vehicle
"""

import argparse
import importlib
from pathlib import Path
from typing import Any

import numpy as np

from experiments.grid import (
    QUIET,
    Config,
    FitResult,
    Job,
    Rows,
    merge_configs,
    shorten,
    spec,
    work,
)

HERE = Path(__file__).parent
NAMES = ("condition", "method", "seed")
COHORT = 10
CLIENTS = {
    "vehicle": 23,
    "vehicle_rounded_down": 23,
    "fashion_small": 100,
    "fashion_small_pixels": 100,
    "fashion": 500,
}
METRICS = ("accuracy_weighted", "accuracy", "accuracy_std")
MODELS = ("global", "personal")
ALL = ["clean", "A1_20", "A1_50", "A1_80", "A2_20", "A2_50", "A2_80", "A3_10", "A3_20", "A3_50"]
DITTO = "pl_fed.clients.Ditto"
MEAN = spec("pl_fed.aggregators.Mean")
DEFENCES: dict[str, Config] = {
    "fair": {"aggregator": spec("pl_fed.aggregators.Term", t=1.0)},
    "median": {"aggregator": spec("pl_fed.aggregators.Median")},
    "Krum": {
        "aggregator": spec("pl_fed.aggregators.Krum", num_selected=1, without_neighbours="first")
    },
    "multi-Krum": {
        "aggregator": spec("pl_fed.aggregators.Krum", num_selected=None, without_neighbours="first")
    },
    "clipping": {
        "aggregator": MEAN,
        "pre_aggregators": [spec("pl_fed.aggregators.Clipping")],
    },
    "k-norm": {"aggregator": spec("pl_fed.aggregators.KNorm")},
    "k-loss": {"aggregator": spec("pl_fed.aggregators.KLoss")},
    **{
        f"FedMGDA+, ε = {e:g}": {"aggregator": spec("pl_fed.aggregators.FedMGDA", epsilon=e)}
        for e in (0.0, 0.1, 0.5, 1.0)
    },
}
UPLOADS = {
    "A2": spec("pl_fed.attacks.RandomUpdates"),
    "A3": spec("pl_fed.attacks.ModelReplacement"),
}
WEAK, STRONG = (0.1, 1.0, 2.0), (0.05, 0.1, 0.2)  # the clients' choices of λ
MIN_VALIDATION = 4  # validation samples that a client needs to choose λ
FASHION: dict[str, Any] = {
    "net": spec("pl_fed.models.DittoFashionCNN"),
    "optimizer": spec("torch.optim.SGD", lr=0.05),
    "local_steps": 2,
}
VEHICLE: dict[str, Any] = {
    "net": spec("pl_fed.models.LinearSVM"),
    "optimizer": spec("torch.optim.SGD", lr=0.1, weight_decay=0.02),
    "criterion": spec("torch.nn.MultiMarginLoss", margin=2.0),
    "local_steps": 1,
}


def rounds(number: int) -> Config:
    """Return settings of the trainer for a number of rounds, with one validation at the end."""
    return {"max_epochs": number, "check_val_every_n_epoch": number}


FASHION_DATA: Config = {
    "dataset": spec("pl_fed.data.FashionMNIST"),
    "partitioner": spec(
        "pl_fed.partitioners.DittoFashion",
        classes_per_client=5,
        overlapping=True,
        reference_seed=233,
    ),
    "num_clients": CLIENTS["fashion"],
    "batch_size": 16,
    "split": "official",
    "normalize": "feature",
    "drop_last": True,
    "val_fraction": 0.1,
}
VEHICLE_TABLE: Config = {
    "data": {
        "dataset": spec("pl_fed.data.Vehicle"),
        "batch_size": 32,
        "val_fraction": 0.08,
        "test_fraction": 0.2,
        "drop_last": True,
    },
    "trainer": {**QUIET, **rounds(600)},
    "federation": {"engine": {"name": "stacked"}},
}
FIFTH = spec("experiments.ditto.data.Share", dataset=spec("pl_fed.data.FashionMNIST"), share=0.2)
FASHION_SMALL: Config = {
    "data": {**FASHION_DATA, "dataset": FIFTH, "num_clients": CLIENTS["fashion_small"]},
    "trainer": {**QUIET, **rounds(1000)},
    "federation": {"engine": {"name": "one_by_one_compiled"}},
}
TABLES: dict[str, Config] = {
    "vehicle": VEHICLE_TABLE,
    "vehicle_rounded_down": VEHICLE_TABLE,
    "fashion_small": FASHION_SMALL,
    "fashion_small_pixels": merge_configs(
        FASHION_SMALL,
        {"data": {"dataset": spec("experiments.ditto.data.Pixels", dataset=FIFTH)}},
    ),
    "fashion": {
        "data": FASHION_DATA,
        "trainer": {**QUIET, **rounds(5000)},
        "federation": {"engine": {"name": "one_by_one_compiled"}},
    },
}
FIVE = (0, 1, 2, 3, 4)
SEEDS = {
    "vehicle": FIVE,
    "vehicle_rounded_down": FIVE,
    "fashion_small": (0,),
    "fashion_small_pixels": (0,),
    "fashion": (0,),
}
SOME = ["clean", "A1_50", "A2_50", "A3_20"]
CONDITIONS = {
    "vehicle": ALL,
    "vehicle_rounded_down": ALL[1:],
    "fashion_small": SOME,
    "fashion_small_pixels": ["clean"],
    "fashion": SOME,
}
METHODS = {  # beside Ditto
    "vehicle": ["local", *DEFENCES, "MOCHA"],
    "vehicle_rounded_down": ["Krum", "multi-Krum", "k-norm", "k-loss"],
    "fashion_small": ["local", *DEFENCES, "finetuning"],
    "fashion_small_pixels": ["local", "median"],
    "fashion": ["local", "fair", "median", "multi-Krum", "clipping", "finetuning"],
}


def byzantine(table: str, share: float) -> list[int]:
    """Return the Byzantine clients that the authors' code draws by its seed 1234567."""
    clients = CLIENTS[table]
    draw = np.random.RandomState(1234567)
    return sorted(draw.choice(clients, int(share * clients), replace=False).tolist())


def adversary_config(table: str, condition: str) -> Config:
    """Return the adversary of a condition as a config; A1, A2 and A3 all poison labels."""
    if condition == "clean":
        return {}
    labels = spec(
        f"pl_fed.attacks.{'FlippedLabels' if table.startswith('vehicle') else 'RandomLabels'}"
    )
    kind, percent = condition.split("_")
    attack = labels
    if kind in UPLOADS:
        attack = spec("pl_fed.attacks.Combined", attacks=[labels, UPLOADS[kind]])
    share = int(percent) / 100
    ids, expected = byzantine(table, share), round(share * COHORT)
    if table == "vehicle_rounded_down":
        expected = COHORT * len(ids) // CLIENTS[table]
    return {"adversary": {"attack": attack, "ids": ids, "expected": expected}}


def is_strong(condition: str) -> bool:
    """Return whether clients choose small λ (Appendix D.2): A3, or a Byzantine majority."""
    return condition.startswith("A3") or condition.endswith("80")


def lams_of(condition: str) -> list[float]:
    """Return the λ of all runs: the paper's and the clients' choices."""
    return sorted({*WEAK, *choices_of(condition)})


def choices_of(condition: str) -> tuple[float, ...]:
    """Return the clients' choices of λ."""
    return STRONG if is_strong(condition) else WEAK


def fallback_of(condition: str) -> float:
    """Return the λ of clients with too few validation samples for a choice."""
    return 0.1 if is_strong(condition) else 1.0


def ditto(lam: float) -> str:
    """Return the name of the method Ditto with a λ."""
    return f"Ditto, λ = {lam:g}"


def methods(table: str, condition: str) -> list[str]:
    """Return the methods of a table under a condition."""
    exceptions = {"vehicle_rounded_down": [], "fashion_small_pixels": [1.0]}
    lams = exceptions.get(table, lams_of(condition))
    return [*map(ditto, lams), *METHODS[table]]


def config(table: str, condition: str, method: str, seed: int) -> Config:
    """Return the config of a run."""
    common = VEHICLE if table.startswith("vehicle") else FASHION
    clients: dict[str, Config] = {
        **{ditto(lam): spec(DITTO, lam=lam, **common) for lam in lams_of(condition)},
        "local": spec("pl_fed.clients.Local", **common),
        "MOCHA": spec("pl_fed.clients.Mocha", **common),
        "finetuning": spec("pl_fed.clients.Finetuning", finetune_epochs=40, **common),
    }
    federation: Config = {
        "sampler": spec("pl_fed.samplers.BySize", cohort_size=COHORT),
        "aggregator": MEAN,
        "model_selection": None,
        "max_rejected": 1.0,
    }
    return merge_configs(
        TABLES[table],
        {"seed_everything": seed, "federation": federation},
        {"model": clients.get(method, spec("pl_fed.clients.FedAvg", **common))},
        {"federation": adversary_config(table, condition)},
        {"federation": DEFENCES.get(method, {})},
        {"trainer": {"limit_val_batches": 0} if method == "finetuning" else {}},
    )


def rows_of(fitted: FitResult) -> Rows:
    """Return the row of a run, and for Ditto the rows of its benign clients."""
    models = fitted.tested_models(MODELS)
    row = {f"{m}_{n}": shorten(fitted.last[f"test/{m}/{n}"]) for m in models for n in METRICS}
    if not fitted.validation:
        return {"results.csv": [row]}
    for model in models:
        accuracy = fitted.last_value(f"val/{model}/accuracy_weighted")
        row[f"{model}_validation"] = shorten(accuracy)
    if fitted.config["model"]["class_path"] != DITTO:
        return {"results.csv": [row]}
    clients = [
        {
            "client": tested["client"],
            "test_samples": tested["test_samples"],
            "accuracy": shorten(tested["personal_accuracy"]),
            "val_samples": validated["val_samples"],
            "val_loss": shorten(validated["personal_loss"]),
        }
        for tested, validated in zip(fitted.clients, fitted.validation, strict=True)
        if tested["byzantine"] == "0" and tested["test_samples"] != "0"
    ]
    return {"clients.csv": clients, "results.csv": [row]}


def main() -> None:
    """Run the missing runs, and write tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--conditions", nargs="+", choices=ALL)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    table = options.table
    conditions = options.conditions or CONDITIONS[table]
    choices = {method for condition in conditions for method in methods(table, condition)}
    if unknown := {*(options.methods or ())} - choices:
        parser.error(f"expected --methods to be among {sorted(choices)} but got {sorted(unknown)}")
    jobs = [
        Job((condition, method, str(seed)), config(table, condition, method, seed))
        for seed in options.seeds or SEEDS[table]
        for condition in conditions
        for method in methods(table, condition)
        if method in (options.methods or choices)
    ]
    work(jobs, HERE / table / "results.csv", NAMES, rows_of, options.workers)
    importlib.import_module("experiments.ditto.report").write(table)


if __name__ == "__main__":
    main()
