"""The driver of all experiments: runs the missing cells of a study, and writes its pages.

PL_FED_DATA=../data python -m experiments ditto/vehicle

``--only``, ``--status``, ``--dry_run``, ``--again`` and the other options are those of
``python -m pl_fed study``. ``--report`` writes the pages from the committed results, and runs
nothing.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from experiments.experiment import Experiment
from pl_fed.command.messages import suggest_name
from pl_fed.studies import command
from pl_fed.studies.readers import StudyError

ROOMS = (
    *("adapters", "compression", "ditto", "fashion_mnist", "fedtilt", "fedtilt_levels"),
    *("flame", "privacy", "robustness", "shakespeare", "systems"),
)
"""Folders with a module ``studies``; its ``EXPERIMENTS`` are functions that make experiments."""


def find_experiments() -> Mapping[str, Callable[..., Experiment]]:
    """Return the functions that make the experiments, by the names of the experiments."""
    modules = [import_module(f"experiments.{room}.studies") for room in ROOMS]
    return {name: make for module in modules for name, make in module.EXPERIMENTS.items()}


def open_experiment(name: str, folder: str | None = None, on: str | None = None) -> Experiment:
    """Return an experiment.

    Args:
        name: Its name, such as ``ditto/vehicle``.
        folder: The folder of its runs; by default one below ``runs/experiments``.
        on: The engine that runs cells; by default this machine.

    Raises:
        ValueError: If there is no such experiment.
    """
    experiments = find_experiments()
    if name not in experiments:
        raise StudyError(
            f"Expected argument `study` to be one of {', '.join(experiments)} but got"
            f" {name}{suggest_name(name, list(experiments))}."
        )
    return experiments[name](folder=folder, on=on)


def main(arguments: Sequence[str]) -> None:
    """Run a command; without arguments, list the experiments."""
    if not arguments:
        print("\n".join(find_experiments()))
        return
    command.main(arguments, open_experiment, "python -m experiments")


if __name__ == "__main__":
    main(sys.argv[1:])
