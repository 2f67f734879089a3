"""Tuning of a study: the same number of trials for each label of an axis, scored by validation."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from pl_fed.studies.cell_folder import LOG, CellFolder, State, write_text
from pl_fed.studies.cells import Cell, folder_name
from pl_fed.studies.execution import Event, Execution
from pl_fed.studies.inspection import CellStatus, check_configs, read_states
from pl_fed.studies.metrics import VALIDATION, choose_name, find_direction, require_direction
from pl_fed.studies.plans import Tuning, find_space
from pl_fed.studies.pool import Pool
from pl_fed.studies.readers import StudyError
from pl_fed.studies.search import is_at_edge, propose, write_journal
from pl_fed.studies.spec import StudySpec
from pl_fed.studies.trials import TUNING, Trial, build_trial
from pl_fed.text import format_csv

TABLE = "tuning.csv"
"""Name of the table of all trials in a study's folder."""

JOURNAL = "optuna.log"
"""End of the names of Optuna's journals, one for each label, in the folder of the trials."""


@dataclass(frozen=True)
class ScoredTrial:
    """Scored trial: a trial with its result.

    Attributes:
        trial: The trial.
        score: The mean of the metric over its runs; the worst number if one diverged, and ``None``
            if one failed or has not ended.
        state: ``done``, ``diverged``, ``failed`` or ``missing``.
    """

    trial: Trial
    score: float | None
    state: State


class Tuner:
    """Tuner: runs the trials of a study, and chooses the values of each label.

    Args:
        spec: The study; with a tuning.

    Attributes:
        trials: The trials of each label, as far as they are proposed.
        tuned: The labels with all trials of the budget.

    Raises:
        StudyError: If the plan cannot be carried out.
    """

    def __init__(self, spec: StudySpec) -> None:
        if spec.tune is None:
            raise StudyError("Expected argument `tune` to be a plan but got nothing.")
        self.spec = spec
        self.plan: Tuning = spec.tune
        self.labels = next(axis.labels for axis in spec.axes if axis.name == self.plan.per)
        self.spaces = {label: find_space(self.plan, label) for label in self.labels}
        self.trials: dict[str, list[ScoredTrial]] = {}
        self.tuned: set[str] = set()
        for label in self.labels:  # refuse a plan before anything runs
            propose(self.plan, self.spaces[label], True, ())
            build_trial(spec, self.plan, label, 0, {})

    def count_runs(self, labels: Iterable[str]) -> int:
        """Return the number of all runs that the tuning of some labels has."""
        return sum(map(self._count_trials, labels)) * self.runs_per_trial

    @property
    def runs_per_trial(self) -> int:
        """The number of runs of a trial."""
        return len(build_trial(self.spec, self.plan, self.labels[0], 0, {}).cells)

    def count_missing_runs(self, labels: Iterable[str]) -> int:
        """Return the number of runs without a result that the tuning of some labels needs."""
        missing = sum(
            self._count_trials(label) - sum(item.state.is_result for item in self.trials[label])
            for label in labels
        )
        return missing * self.runs_per_trial

    def _count_trials(self, label: str) -> int:
        if self.plan.sampler == "grid":
            return len(propose(self.plan, self.spaces[label], True, ()))
        return self.plan.budget if self.spaces[label] else 0

    def read(self) -> None:
        """Read the results of finished trials.

        Raises:
            StudyError: If a finished run has no such metric.
        """
        self._search(lambda _: None)

    def chosen(self) -> dict[str, Mapping[str, Any]]:
        """Return the chosen values of each label; none for a label without all trials."""
        return {
            label: self.best(label).trial.values
            if label in self.tuned and self._has_score(label)
            else {}
            for label in self.labels
        }

    def _has_score(self, label: str) -> bool:
        return any(item.score is not None for item in self.trials[label])

    def run(
        self,
        open_pool: Callable[[], Pool],
        labels: Iterable[str],
        report: Callable[[Event], None],
    ) -> None:
        """Run the missing trials of some labels, and write the table of trials.

        Args:
            open_pool: Starts workers; called if a trial is missing.
            labels: The labels.
            report: Receives an event for each ended attempt, and ticks.

        Raises:
            StudyError: If the config of a trial is invalid, a run has no such metric, or all trials
                of a label have failed.
        """
        root, chosen_labels = self.spec.folder, set(labels)
        pools: list[Pool] = []
        stack = ExitStack()

        def report_and_check(event: Event) -> None:
            """Report an event, and refuse the metric at the first run without it."""
            report(event)
            if event.status is not None and event.status.state is State.DONE:
                self._read_metric(event.status)

        def run_missing(cells: Sequence[Cell]) -> None:
            """Run the cells of a generation without a result."""
            selected = [c for c in cells if c.values[self.plan.per] in chosen_labels]
            statuses = read_states(root, selected)
            if all(status.state.is_result for status in statuses):
                return
            if not pools:
                pools.append(stack.enter_context(open_pool()))
            statuses = check_configs(root, statuses, pools[0])
            todo = [status for status in statuses if not status.state.is_result]
            keep = self.spec.options.keep_checkpoints
            Execution(self.spec.name, root, todo, keep, report_and_check).run(pools[0])

        try:
            with stack:
                self._search(run_missing)
        finally:
            self.write_table()
        for label in chosen_labels:
            if self.spaces[label]:
                self.best(label)

    def _search(self, run_missing: Callable[[Sequence[Cell]], None]) -> None:
        """Propose and score trials, all labels side by side, as far as there are results."""
        self.trials = {label: [] for label in self.labels}
        scores: dict[str, list[list[float | None]]] = {label: [] for label in self.labels}
        active = list(self.labels)
        self.tuned = set()
        while active:
            generation = {label: self._propose(label, scores[label]) for label in active}
            run_missing([c for trials in generation.values() for t in trials for c in t.cells])
            for label, trials in generation.items():
                scored = [self._score(trial) for trial in trials]
                self.trials[label] += scored
                scores[label].append([item.score for item in scored])
                is_missing = any(item.state is State.MISSING for item in scored)
                if not trials:
                    self.tuned.add(label)
                if is_missing or not trials:
                    active.remove(label)

    def _propose(self, label: str, scores: Sequence[Sequence[float | None]]) -> list[Trial]:
        """Return the next generation of trials of a label."""
        maximizes = not scores or self._maximizes(label)
        first = sum(map(len, scores))
        return [
            build_trial(self.spec, self.plan, label, first + number, values)
            for number, values in enumerate(
                propose(self.plan, self.spaces[label], maximizes, scores)
            )
        ]

    def _score(self, trial: Trial) -> ScoredTrial:
        """Return a trial with the mean of the metric over its runs.

        Raises:
            StudyError: If a finished run has no such metric.
        """
        states = read_states(self.spec.folder, trial.cells)
        for state in (State.FAILED, State.DIVERGED):
            if any(status.state is state for status in states):
                worst = -math.inf if self._maximizes(trial.label, trial) else math.inf
                return ScoredTrial(trial, None if state is State.FAILED else worst, state)
        if any(status.state is not State.DONE for status in states):
            return ScoredTrial(trial, None, State.MISSING)
        values = [self._read_metric(status) for status in states]
        score = math.fsum(values) / len(values)
        if math.isnan(score):  # undefined for the samples, such as the R² of one sample
            score = -math.inf if self._maximizes(trial.label, trial) else math.inf
        return ScoredTrial(trial, score, State.DONE)

    def _read_metric(self, status: CellStatus) -> float:
        """Return the metric of a finished run: of its global model if it has no personal one.

        It is NaN if it is undefined, as for a model that has diverged.

        Raises:
            StudyError: If the run has no such metric.
        """
        summary = status.folder.read_summary()
        metrics = summary.get("metrics", {}).get("val") or {}
        names = [f"{VALIDATION}{name}" for name in metrics]
        untrained = (summary.get("counts") or {}).get("untrained")
        name = choose_name(self.plan.metric, names, untrained).removeprefix(VALIDATION)
        if name not in metrics:
            raise StudyError(
                f"Expected argument `tune.metric` to be a metric of the last validation but got"
                f" {self.plan.metric}, which {status.cell.name} does not have"
                f"{_describe_metrics(metrics)}."
            )
        value = metrics[name]
        return math.nan if value is None else float(value)

    def _maximizes(self, label: str, trial: Trial | None = None) -> bool:
        """Return whether larger scores are better, as a finished run of the label tells.

        Raises:
            StudyError: If the direction of the metric is unknown.
        """
        if self.plan.maximizes is not None:
            return self.plan.maximizes
        trials = [item.trial for item in self.trials[label]] + ([trial] if trial else [])
        for cell in (cell for item in trials for cell in item.cells):
            if summary := CellFolder(self.spec.folder, cell.path).read_summary():
                directions = summary.get("higher_is_better")
                declared = directions if isinstance(directions, Mapping) else {}
                return require_direction("tune.metric", self.plan.metric, declared)
        return find_direction(self.plan.metric, {}) is not False

    def best(self, label: str) -> ScoredTrial:
        """Return the best trial of a label; the first of equally good ones.

        Raises:
            StudyError: If all its trials have failed.
        """
        scored = [(item.score, item) for item in self.trials[label] if item.score is not None]
        if not scored:
            first = self.trials[label][0].trial.cells[0]
            raise StudyError(
                f"Expected argument `tune` to have a trial of {self.plan.per}={label} that ends but"
                f" all {len(self.trials[label])} failed; the first one's output is in"
                f" {self.spec.folder / first.path / LOG}."
            )
        select = max if self._maximizes(label) else min
        return select(scored, key=lambda pair: pair[0])[1]

    def warnings(self) -> list[str]:
        """Return a sentence for each label whose trials tie, and each value at an edge."""
        sentences = []
        for label, values in self.chosen().items():
            scores = [item.score for item in self.trials[label] if item.score is not None]
            if len(scores) > 1 and len(set(scores)) == 1:
                sentences.append(
                    f"{self.plan.per}={label}: all {len(scores)} trials have a score of {scores[0]}"
                    f" by {self.plan.metric}, so the first one's values are chosen: tune by a"
                    " metric that tells trials apart, such as a mean over clients."
                )
                continue
            sentences += [
                f"{self.plan.per}={label}: the chosen {path} = {value} lies at the edge of its"
                " space; a better value may lie beyond, so widen it."
                for path, value in values.items()
                if is_at_edge(value, self.spaces[label][path])
            ]
        return sentences

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each trial, in the order of their proposals."""
        rows = []
        for label in self.labels:
            is_tuned = label in self.tuned and self._has_score(label)
            best = self.best(label) if is_tuned else None
            for item in self.trials[label]:
                row: dict[str, Any] = {self.plan.per: label, "trial": item.trial.number}
                row |= {"status": str(item.state), self.plan.metric: item.score}
                row |= {"is_chosen": int(item is best), **item.trial.values}
                rows.append(row)
        return rows

    def write_table(self) -> None:
        """Write the table of trials, and Optuna's journal of them."""
        rows = self.rows()
        if not rows:
            return
        write_text(self.spec.folder / TABLE, format_csv(rows))
        for label in self.labels:
            if self.spaces[label] and self.trials[label]:
                write_journal(
                    self.spec.folder / TUNING / f"{folder_name({self.plan.per: label})}.{JOURNAL}",
                    f"{self.spec.name}: {self.plan.per}={label}",
                    self.spaces[label],
                    self._maximizes(label),
                    [(item.trial.values, item.score) for item in self.trials[label]],
                )


def _describe_metrics(metrics: Mapping[str, Any]) -> str:
    names = [name for name in metrics if "/" in name]
    if not names:
        return ": it had no validation, so set `trainer.check_val_every_n_epoch`"
    return f": its metrics are {', '.join(f'{VALIDATION}{name}' for name in names[:8])}"
