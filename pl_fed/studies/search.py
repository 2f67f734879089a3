"""The search for values of arguments: proposes trials from the scores of earlier ones."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pl_fed.studies.plans import Choices, Interval, Tuning
from pl_fed.studies.readers import StudyError

GENERATION = 5
"""Trials that are proposed together. They do not know each other's scores, so the proposals do not
depend on the number of workers."""

_SEED = 0  # of the sampler, the same for each label
_DIGITS = 4  # significant digits of a proposed number

Values = Mapping[str, Any]


def propose(
    plan: Tuning,
    space: Mapping[str, Interval | Choices],
    maximizes: bool,
    scores: Sequence[Sequence[float | None]],
) -> list[Values]:
    """Return the values of the next generation of trials; an empty list at the end of the budget.

    Proposals depend on the scores of earlier generations alone. So a search that is repeated with
    the scores in the folders of finished trials proposes the same trials.

    Args:
        plan: The tuning.
        space: The searched values by the paths of arguments; without any there are no trials.
        maximizes: Whether larger scores are better.
        scores: The scores of each earlier generation; ``None`` for a trial that failed.

    Raises:
        StudyError: If a grid has intervals or more trials than the budget, or Optuna is missing.
    """
    if not space:
        return []
    if plan.sampler == "grid":
        return [] if scores else _list_grid(plan, space)
    study = _create_study(plan.sampler, maximizes)
    for generation in scores:
        trials = _ask(study, space, len(generation))
        for trial, score in zip(trials, generation, strict=True):
            if score is None:
                study.tell(trial, state=_failure())
            else:
                study.tell(trial, score)
    number = min(GENERATION, plan.budget - sum(map(len, scores)))
    return [
        {path: _round(trial.params[path], values) for path, values in space.items()}
        for trial in _ask(study, space, number)
    ]


def _ask(study: Any, space: Mapping[str, Interval | Choices], number: int) -> list[Any]:
    distributions = {path: _distribution(values) for path, values in space.items()}
    return [study.ask(distributions) for _ in range(number)]


def _failure() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL


def _create_study(sampler: str, maximizes: bool) -> Any:
    try:
        import optuna
    except ImportError:
        raise StudyError(
            "Expected Optuna to be installed for `tune.sampler` tpe and random but found none:"
            " install pl_fed[study], or use `tune.sampler: grid`."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    return optuna.create_study(
        direction="maximize" if maximizes else "minimize", sampler=kinds[sampler](seed=_SEED)
    )


def _distribution(values: Interval | Choices) -> Any:
    from optuna import distributions

    if isinstance(values, Choices):
        return distributions.CategoricalDistribution(values.values)
    if values.scale == "int":
        return distributions.IntDistribution(int(values.low), int(values.high))
    return distributions.FloatDistribution(values.low, values.high, log=values.scale == "log")


def _round(value: Any, values: Interval | Choices) -> Any:
    """Return a proposed number with few digits, within its interval."""
    if isinstance(values, Choices) or values.scale == "int":
        return value
    rounded = float(f"{value:.{_DIGITS}g}")
    return min(max(rounded, values.low), values.high)


def _list_grid(plan: Tuning, space: Mapping[str, Interval | Choices]) -> list[Values]:
    """Return all combinations of the choices."""
    for path, values in space.items():
        if not isinstance(values, Choices):
            raise StudyError(
                f"Expected argument `tune.space` to have lists of values for `tune.sampler: grid`"
                f" but got an interval for {path}: list its values, or use the sampler tpe."
            )
    columns = [values.values for values in space.values() if isinstance(values, Choices)]
    combinations = math.prod(map(len, columns))
    if combinations > plan.budget:
        raise StudyError(
            f"Expected argument `tune.budget` to be at least {combinations}, the number of"
            f" combinations of the grid, but got {plan.budget}."
        )
    return [dict(zip(space, row)) for row in itertools.product(*columns)] if space else []


def write_journal(
    path: Path,
    name: str,
    space: Mapping[str, Interval | Choices],
    maximizes: bool,
    trials: Sequence[tuple[Values, float | None]],
) -> None:
    """Write trials as a study of Optuna, for its dashboard and plots; nothing without Optuna.

    Args:
        path: The journal, which is replaced: ``JournalStorage(JournalFileBackend(path))`` reads it.
        name: The name of the study.
        space: The searched values by the paths of arguments.
        maximizes: Whether larger scores are better.
        trials: The values of each trial, with its score; ``None`` for a trial without one.
    """
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        return
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with TemporaryDirectory(dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(temporary))),
            study_name=name,
            direction="maximize" if maximizes else "minimize",
        )
        distributions = {argument: _distribution(values) for argument, values in space.items()}
        for values, score in trials:
            study.add_trial(
                optuna.trial.create_trial(
                    state=_failure() if score is None else optuna.trial.TrialState.COMPLETE,
                    params=dict(values),
                    distributions=distributions,
                    value=score,
                )
            )
        temporary.replace(path)


def is_at_edge(value: Any, values: Interval | Choices) -> bool:
    """Return whether a chosen value lies at an end of its space: a better one may lie beyond.

    The ends of an interval are its outer twentieths, on the interval's scale. Choices have ends if
    they are three or more numbers.

    Example:
        >>> is_at_edge(0.011, Interval(0.01, 10, "log")), is_at_edge(0.1, Interval(0.01, 10, "log"))
        (True, False)
        >>> is_at_edge(3, Choices((1, 2, 3))), is_at_edge("a", Choices(("a", "b", "c")))
        (True, False)
    """
    if isinstance(values, Choices):
        numbers = [v for v in values.values if isinstance(v, int | float)]
        is_ordered = len(numbers) == len(values.values) > 2
        return is_ordered and value in (min(numbers), max(numbers))
    ends = (values.low, value, values.high)
    low, at, high = map(math.log, ends) if values.scale == "log" else ends
    share = (at - low) / (high - low)
    return not 0.05 < share < 0.95
