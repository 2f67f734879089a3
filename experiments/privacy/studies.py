"""Privacy, attacks and personal models together, on real data.

PL_FED_DATA=../data python -m experiments privacy
PL_FED_DATA=../data python -m experiments privacy/buckets
"""

from typing import Any

from experiments.experiment import CellRun, Content, Experiment, Row, read_study
from experiments.privacy import page
from pl_fed.studies.cells import Cell

METRICS = ("accuracy", "accuracy_worst10", "accuracy_std")


def follow_seed(cell: Cell) -> Content:
    """Return the values that follow the seed: the draw of the samples, and that of the noise.

    The noise has a seed, so that the runs can be made anew; nobody publishes the models.
    """
    paths = cell.change.overrides
    seeds = {}
    if paths["data.dataset"] != "MNISTWriters":
        seeds["data.dataset.seed"] = cell.seed
    if "federation.privacy.clip_norm" in paths:
        seeds["federation.privacy.noise_seed"] = cell.seed
    return seeds


def select_row(run: CellRun) -> Row:
    """Return the row of a run, with the ε that its rounds have spent."""
    columns = [f"test/{model}/{name}" for model in ("global", "personal") for name in METRICS]
    row = run.select(*columns)
    if run.row["epsilon"] != "inf":
        spent = [round["privacy/epsilon"] for round in run.read("metrics.csv")]
        row["privacy/epsilon"] = f"{float([epsilon for epsilon in spent if epsilon][-1]):.4g}"
    return row


def make(**options: Any) -> Experiment:
    """Return the study of accuracy against ε: 450 runs."""
    return Experiment(
        "privacy",
        read_study(page.HERE / "study.yaml"),
        lambda run: {"results.csv": [select_row(run)]},
        page.write,
        options,
        adjust=follow_seed,
    )


def make_buckets(**options: Any) -> Experiment:
    """Return the study of robust aggregators of noisy sums: 108 runs."""
    return Experiment(
        "privacy/buckets",
        read_study(page.HERE / "buckets.yaml"),
        lambda run: {"buckets.csv": [select_row(run)]},
        page.write_buckets,
        options,
        folder=page.HERE,
        results="buckets.csv",
        adjust=follow_seed,
    )


EXPERIMENTS = {"privacy": make, "privacy/buckets": make_buckets}
