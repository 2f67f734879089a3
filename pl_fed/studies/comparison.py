"""Comparison of the methods of a study: means over seeds, paired tests, ranks and worst cases.

Seeds are independent of each other. The clients of a seed are not, so each run is one number.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from pl_fed.command.messages import suggest_name
from pl_fed.statistics import (
    Interval,
    RankComparison,
    compare_ranks,
    correct_by_holm,
    paired_differences,
    paired_t_test,
    sign_flip_test,
    smallest_difference,
    t_interval,
)
from pl_fed.statistics.ranks import block_ranks
from pl_fed.studies.axes import Axis
from pl_fed.studies.cell_folder import State
from pl_fed.studies.metrics import choose_name, require_direction
from pl_fed.studies.plans import Comparison
from pl_fed.studies.readers import refuse
from pl_fed.studies.selection import SEED

ALPHA = 0.05
"""The level of all tests, after Holm's correction."""

EVERYTHING = "all"
"""The condition of a study with a single axis."""

NO_VALUE = "no value"
"""The state of a finished run without the metric."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """Layout: the axes of a study that are methods, and those that are conditions.

    Attributes:
        method_axes: The axes of ``compare.baseline``; without it the first axis.
        condition_axes: The other axes.
        methods: The methods, in the order of the study.
        conditions: The conditions, in the order of the study.
        baseline: The method that others are compared with; ``None`` compares all pairs.
    """

    method_axes: tuple[str, ...]
    condition_axes: tuple[str, ...]
    methods: tuple[str, ...]
    conditions: tuple[str, ...]
    baseline: str | None

    def find_method(self, row: Row) -> str:
        """Return the method of a row."""
        return _join(row, self.method_axes)

    def find_condition(self, row: Row) -> str:
        """Return the condition of a row."""
        return _join(row, self.condition_axes)


def _join(row: Row, axes: Sequence[str]) -> str:
    """Return the name of a combination of labels; other combinations have other names."""
    labels = [str(row[axis]) for axis in axes]
    if len(labels) > 1:
        labels = [f"({label})" if ", " in label else label for label in labels]
    return ", ".join(labels) or EVERYTHING


def arrange(axes: Sequence[Axis], compare: Comparison | None, rows: Sequence[Row]) -> Layout:
    """Return the methods and conditions of a study.

    Args:
        axes: The axes of the study.
        compare: The comparison that the study file describes.
        rows: The rows of all cells.

    Raises:
        StudyError: If ``compare.baseline`` is not one method.
    """
    labels = {} if compare is None else dict(compare.baseline.labels)
    names = [axis.name for axis in axes]
    for axis, values in labels.items():
        if axis == SEED or len(values) > 1:
            got = f"{axis}={' or '.join(values)}"
            refuse("compare.baseline", "have one label of each axis that it names", got)
    method_axes = tuple(name for name in names if name in labels) or tuple(names[:1])
    condition_axes = tuple(name for name in names if name not in method_axes)
    chosen = {axis: values[0] for axis, values in labels.items()}
    baseline = _join(chosen, method_axes) if labels else None
    methods = _list_names(axes, method_axes, rows)
    if baseline is not None and baseline not in methods:
        refuse("compare.baseline", f"be one of the methods {', '.join(methods)}", baseline)
    conditions = _list_names(axes, condition_axes, rows)
    return Layout(method_axes, condition_axes, methods, conditions, baseline)


def _list_names(axes: Sequence[Axis], part: Sequence[str], rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the names of the combinations of labels on some axes, in the order of their labels."""
    selected = [axis for axis in axes if axis.name in part]
    places = {
        _join(row, part): [axis.labels.index(str(row[axis.name])) for axis in selected]
        for row in rows
    }
    return tuple(sorted(places, key=lambda name: places[name]))


@dataclass(frozen=True)
class Entry:
    """Entry: the runs of a method under a condition.

    Attributes:
        labels: The label of each axis.
        values: The metric of each finished run by its seed.
        diverged: The seeds of runs that diverged, or ended with a metric that is infinite or NaN.
        unfinished: The states of the other planned runs by their seeds.
    """

    labels: Mapping[str, str]
    values: Mapping[str, float]
    diverged: tuple[str, ...]
    unfinished: Mapping[str, str]

    @cached_property
    def interval(self) -> Interval | None:
        """Mean over the finished runs, with Student's interval; ``None`` without any."""
        return t_interval(list(self.values.values())) if self.values else None

    @property
    def mean(self) -> float | None:
        """The mean that compares methods: ``None`` if a run diverged, or none has finished."""
        return None if self.diverged or self.interval is None else self.interval.estimate

    @property
    def planned(self) -> int:
        """The number of planned runs."""
        return len(self.values) + len(self.diverged) + len(self.unfinished)


@dataclass(frozen=True)
class Difference:
    """Difference: a paired comparison of two methods under a condition, by seed.

    Attributes:
        condition: The condition.
        first: The method.
        second: The method that it is compared with, such as the baseline.
        values: first − second for each common seed of finished runs.
        diverged: The number of seeds on which one of both diverged; then there is no test.
        unpaired: The number of seeds with a result of one method alone.
        p_value: p-value of the paired t-test, without a correction; NaN without a test. Of the
            sign-flip test if all differences are equal.
        corrected: p-value after Holm's correction over all comparisons of the metric.
        smallest: Smallest true difference that this number of seeds finds with a power of 80 %, at
            the strictest level of the correction; NaN if all differences are equal, or without a
            test.
        is_better: Whether the first method is better in the mean.
    """

    condition: str
    first: str
    second: str
    values: tuple[float, ...]
    diverged: int
    unpaired: int
    p_value: float
    corrected: float = math.nan
    smallest: float = math.nan
    is_better: bool = False

    @property
    def pairs(self) -> int:
        """The number of common seeds."""
        return len(self.values)

    @cached_property
    def interval(self) -> Interval | None:
        """Mean difference, with Student's interval; ``None`` without a common seed."""
        return t_interval(self.values) if self.values else None

    @property
    def verdict(self) -> str:
        """``better`` or ``worse`` by the corrected test; empty if it decides neither."""
        if not self.corrected < ALPHA:
            return ""
        return "better" if self.is_better else "worse"


@dataclass(frozen=True)
class WorstCase:
    """Worst case: the worst mean of a method over its conditions.

    Attributes:
        condition: The condition with this mean; empty without any.
        mean: The mean; ``None`` without any, or if the method diverged in a condition.
        has_diverged: Whether the method diverged in a condition, which is the worst of all.
        is_bound: Whether conditions have no result yet, so that the worst case may be worse.
    """

    condition: str
    mean: float | None
    has_diverged: bool
    is_bound: bool


@dataclass(frozen=True)
class MetricComparison:
    """Metric comparison: all methods by one metric.

    Attributes:
        metric: The metric.
        is_higher_better: Whether larger values are better.
        layout: The methods and conditions.
        entries: The runs by method and condition; none for a combination that the study leaves out.
        differences: The paired comparisons, one family for Holm's correction.
        ranks: The average ranks of the methods over seeds; ``None`` for fewer than three methods or
            two complete seeds.
        incomplete_seeds: The number of seeds that ranks leave out: a run has no result yet.
    """

    metric: str
    is_higher_better: bool
    layout: Layout
    entries: Mapping[tuple[str, str], Entry]
    differences: tuple[Difference, ...]
    ranks: RankComparison | None
    incomplete_seeds: int

    @property
    def tests(self) -> int:
        """The number of tests in the family."""
        return sum(not math.isnan(item.p_value) for item in self.differences)

    def find_worst(self, method: str) -> WorstCase:
        """Return the worst case of a method over its conditions."""
        entries = {key[1]: entry for key, entry in self.entries.items() if key[0] == method}
        for condition, entry in entries.items():
            if entry.diverged:
                return WorstCase(condition, None, True, False)
        means = {c: entry.mean for c, entry in entries.items() if entry.mean is not None}
        if not means:
            return WorstCase("", None, False, True)
        select = min if self.is_higher_better else max
        condition = select(means, key=lambda name: means[name])
        return WorstCase(condition, means[condition], False, len(means) < len(entries))

    def find_rank(self, method: str) -> float | None:
        """Return the average rank of a method, 1 for the best; ``None`` without ranks."""
        if self.ranks is None:
            return None
        return float(self.ranks.average_ranks[self.ranks.names.index(method)])

    def find_difference(self, method: str, condition: str) -> Difference | None:
        """Return the comparison of a method with the baseline; ``None`` without one."""
        for item in self.differences if self.layout.baseline is not None else ():
            if (item.first, item.condition) == (method, condition):
                return item
        return None


def choose_metrics(compare: Comparison | None, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the metrics of the report: those of the study file, else the main metric of the test.

    The main metric is accuracy, if there is one, else the first with a worst 10 % of clients. Its
    mean over clients and its worst 10 % are reported.

    Args:
        compare: The comparison that the study file describes.
        rows: The rows of all cells.

    Raises:
        StudyError: If runs are finished, and none has one of these metrics.
    """
    finished = [row for row in rows if row["status"] == State.DONE]
    names = dict.fromkeys(name for row in finished for name in row if name.startswith("test/"))
    if compare is not None:
        for metric in compare.metrics if finished else ():
            if not any(_choose_name(metric, row) in row for row in finished):
                names_there = [n for row in finished[:1] for n in row if n.count("/") >= 2]
                refuse(
                    "compare.metrics",
                    "be metrics of the results",
                    f"{metric}, which no finished run has{suggest_name(metric, names_there)}",
                )
        return compare.metrics
    mains = [
        name.split("/", 2)[2]
        for name in names
        if f"{name}_worst10" in names and name.count("/") == 2
    ]
    main = next(iter(sorted(mains, key=lambda name: (name != "accuracy", name == "loss"))), None)
    main = main or "accuracy"
    return f"test/personal/{main}", f"test/personal/{main}_worst10"


def compare_methods(
    metric: str,
    layout: Layout,
    rows: Sequence[Row],
    directions: Mapping[str, bool | None],
    declared: Mapping[str, bool] = MappingProxyType({}),
) -> MetricComparison:
    """Return the comparison of all methods by a metric.

    Args:
        metric: The metric, such as ``test/personal/accuracy``.
        layout: The methods and conditions.
        rows: The rows of all cells, also of those without a result.
        directions: The directions of metrics without statistics over clients.
        declared: The directions of metrics in the study file, which win.

    Raises:
        StudyError: If it is unknown whether larger or smaller values are better.
    """
    is_higher = declared.get(metric)
    if is_higher is None:
        is_higher = require_direction("compare.metrics", metric, directions)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        key = layout.find_method(row), layout.find_condition(row)
        groups.setdefault(key, []).append(row)
    axes = (*layout.method_axes, *layout.condition_axes)
    entries = {
        key: _read_entry(metric, {axis: str(members[0][axis]) for axis in axes}, members)
        for key, members in groups.items()
    }
    differences = _correct(
        [
            _subtract(condition, pair, entries, is_higher)
            for pair in _list_pairs(layout)
            for condition in layout.conditions
            if all((method, condition) in entries for method in pair)
        ]
    )
    ranks, incomplete = _rank(layout, entries, is_higher)
    return MetricComparison(metric, is_higher, layout, entries, differences, ranks, incomplete)


def _read_entry(metric: str, labels: Mapping[str, str], rows: Sequence[Row]) -> Entry:
    values: dict[str, float] = {}
    unfinished: dict[str, str] = {}
    diverged = []
    for row in rows:
        seed, value = str(row[SEED]), row.get(_choose_name(metric, row))
        if row["status"] == State.DIVERGED:
            diverged.append(seed)
        elif row["status"] != State.DONE:
            unfinished[seed] = str(row["status"])
        elif value is None:
            unfinished[seed] = NO_VALUE
        elif not math.isfinite(value):
            diverged.append(seed)
        else:
            values[seed] = float(value)
    return Entry(labels, values, tuple(diverged), unfinished)


def _choose_name(metric: str, row: Row) -> str:
    """Return the name under which a row has a metric."""
    return choose_name(metric, row, row.get("counts/untrained"))


def _list_pairs(layout: Layout) -> list[tuple[str, str]]:
    """Return the compared methods: all with the baseline, or all pairs."""
    if layout.baseline is None:
        return [(b, a) for a, b in itertools.combinations(layout.methods, 2)]
    return [(method, layout.baseline) for method in layout.methods if method != layout.baseline]


def _subtract(
    condition: str,
    pair: tuple[str, str],
    entries: Mapping[tuple[str, str], Entry],
    is_higher: bool,
) -> Difference:
    """Return the paired comparison of two methods, without a correction."""
    first, second = (entries[method, condition] for method in pair)
    seeds = [seed for seed in first.values if seed in second.values]
    results = [{*entry.values, *entry.diverged} for entry in (first, second)]
    common = results[0] & results[1]
    diverged = len(common) - len(seeds)
    differences: tuple[float, ...] = ()
    p_value = math.nan
    if seeds:
        numbers = [[entry.values[seed] for seed in seeds] for entry in (first, second)]
        differences = tuple(paired_differences(*numbers).tolist())
        p_value = math.nan if diverged else _test(*numbers)
    total = math.fsum(differences)
    return Difference(
        condition,
        *pair,
        differences,
        diverged,
        unpaired=len(results[0] ^ results[1]),
        p_value=p_value,
        is_better=total > 0 if is_higher else total < 0,
    )


def _test(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of the paired t-test; of the sign-flip test if all differences are equal.

    The t-test takes equal differences as certain, even of two seeds. Differences of small test sets
    take few values, so they may well be equal by chance.
    """
    differences = paired_differences(first, second)
    is_equal = len(differences) > 1 and bool((differences == differences[0]).all())
    test = sign_flip_test if is_equal else paired_t_test
    return test(first, second).p_value


def _correct(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    """Return comparisons with their p-values corrected, and what their seeds can decide."""
    corrected = correct_by_holm([item.p_value for item in differences])
    tests = sum(not math.isnan(item.p_value) for item in differences)
    return tuple(
        replace(item, corrected=p_value, smallest=_find_smallest(item, tests))
        for item, p_value in zip(differences, corrected)
    )


def _find_smallest(difference: Difference, tests: int) -> float:
    """Return the smallest difference that a test at the strictest level of the family finds."""
    if math.isnan(difference.p_value) or len(set(difference.values)) < 2:
        return math.nan
    return float(np.std(difference.values, ddof=1)) * _smallest_effect(difference.pairs, tests)


@cache
def _smallest_effect(pairs: int, tests: int) -> float:
    """Return the smallest effect in standard deviations; NaN beyond the range of the t-test."""
    try:
        return smallest_difference(1.0, pairs, alpha=ALPHA / tests)
    except ValueError:  # two seeds in a large family: no difference is large enough
        return math.nan


def _rank(
    layout: Layout, entries: Mapping[tuple[str, str], Entry], is_higher: bool
) -> tuple[RankComparison | None, int]:
    """Return the average ranks of methods over seeds, and the number of seeds left out.

    A block is a seed. Its score of a method is the mean rank over the conditions that all methods
    have, and the methods of a seed are ranked by these scores. A run that diverged has the last
    rank.
    """
    methods = layout.methods
    conditions = [c for c in layout.conditions if all((m, c) in entries for m in methods)]
    if len(methods) < 3 or not conditions:
        return None, 0
    worst = -math.inf if is_higher else math.inf
    results = {
        key: {**entry.values, **dict.fromkeys(entry.diverged, worst)}
        for key, entry in entries.items()
    }
    seeds = dict.fromkeys(
        seed for entry in entries.values() for seed in (*entry.values, *entry.diverged)
    )
    complete = [s for s in seeds if all(s in results[m, c] for m in methods for c in conditions)]
    planned = {*seeds, *(seed for entry in entries.values() for seed in entry.unfinished)}
    left_out = len(planned) - len(complete)
    if len(complete) < 2:
        return None, left_out
    mean_ranks = [
        block_ranks([[results[m, c][seed] for m in methods] for c in conditions], is_higher).mean(0)
        for seed in complete
    ]
    ranks = compare_ranks(np.stack(mean_ranks), methods, higher_is_better=False, alpha=ALPHA)
    return ranks, left_out
