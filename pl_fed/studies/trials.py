"""Trials of a tuning: values of arguments, and the cells that try them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pl_fed.studies.cells import Cell, folder_name
from pl_fed.studies.changes import Change
from pl_fed.studies.plans import Tuning
from pl_fed.studies.readers import StudyError
from pl_fed.studies.spec import StudySpec

TUNING = "tuning"
"""Name of the folder of all trials in a study's folder."""

FIRST_SEED = 1_000_000
"""The first seed of trials: the study's own seeds are others, so that no choice has seen them."""


@dataclass(frozen=True)
class TrialCell(Cell):
    """Trial cell: one run of a trial.

    Attributes:
        tuned: The axis with a choice for each label.
        trial: The number of the trial, from 0.
    """

    tuned: str = ""
    trial: int = 0

    @property
    def labels(self) -> dict[str, str]:
        """The labels by axis, with the trial and the seed."""
        return {**self.values, "trial": str(self.trial), "seed": str(self.seed)}

    @property
    def condition(self) -> str:
        """The name without the seed."""
        labels = ",".join(f"{axis}={label}" for axis, label in self.values.items())
        return f"{labels},trial={self.trial}"

    @property
    def is_tested(self) -> bool:
        """False: validations score trials, and no choice may see a test."""
        return False

    @property
    def path(self) -> str:
        """The folder below that of the study."""
        tuned = folder_name({self.tuned: self.values[self.tuned]})
        others = {axis: label for axis, label in self.values.items() if axis != self.tuned}
        name = folder_name({**others, "seed": str(self.seed)})
        return f"{TUNING}/{tuned}/trial={self.trial:03d}/{name}"


@dataclass(frozen=True)
class Trial:
    """Trial: values of arguments that a tuning tries for one label.

    Attributes:
        label: The label of the tuned axis.
        number: Its number, from 0.
        values: The values by the paths of arguments.
        cells: Its runs, one for each seed and each combination of the labels of ``tune.on``.
    """

    label: str
    number: int
    values: Mapping[str, Any]
    cells: tuple[TrialCell, ...] = field(default=(), repr=False)


def build_trial(spec: StudySpec, plan: Tuning, label: str, number: int, values: Mapping) -> Trial:  # type: ignore[type-arg]
    """Return a trial with its cells.

    An axis that ``tune.on`` does not name has its first label.
    """
    options = [
        [label] if axis.name == plan.per else plan.on.labels.get(axis.name, axis.labels[:1])
        for axis in spec.axes
    ]
    cells = []
    for labels in itertools.product(*options):
        change = spec.base
        for axis, own in zip(spec.axes, labels):
            change += axis.changes[own]
        change += Change(overrides=values)
        by_axis = {axis.name: own for axis, own in zip(spec.axes, labels)}
        cells += [
            TrialCell(by_axis, seed, change, tuned=plan.per, trial=number)
            for seed in list_tuning_seeds(spec, plan)
        ]
    return Trial(label, number, dict(values), tuple(cells))


def list_tuning_seeds(spec: StudySpec, plan: Tuning) -> Sequence[int]:
    """Return the seeds of the trials.

    Raises:
        StudyError: If the study has one of them.
    """
    seeds = range(FIRST_SEED, FIRST_SEED + plan.seeds)
    if shared := sorted({*seeds} & {*spec.seeds}):
        raise StudyError(
            f"Expected argument `seeds` to leave the seeds from {FIRST_SEED} on to the tuning,"
            f" which must not see the final runs, but got {shared[0]}."
        )
    return seeds
