"""Attacks against defences as a study."""

from typing import Any

from experiments.experiment import CellRun, Experiment, Row, read_study
from experiments.robustness import page

METRICS = ("accuracy", "accuracy_worst10", "backdoor_success")


def collect(run: CellRun) -> dict[str, list[Row]]:
    """Return the row of a run."""
    columns = [f"test/{model}/{metric}" for model in page.MODELS for metric in METRICS]
    return {"results.csv": [run.select(*columns)]}


def make_experiment(**options: Any) -> Experiment:
    """Return 21 defences under 14 attacks."""
    content = read_study(page.HERE / "study.yaml")
    return Experiment("robustness", content, collect, page.write, options)


EXPERIMENTS = {"robustness": make_experiment}
