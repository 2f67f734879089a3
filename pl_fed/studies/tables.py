"""Tables of a study's report, as text, markdown, LaTeX and CSV."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pl_fed.functional.client_figures import split_figure
from pl_fed.statistics import Interval, format_p_value
from pl_fed.studies.comparison import ALPHA, NO_VALUE, Difference, Entry, MetricComparison
from pl_fed.studies.plans import ALL, Choices, Tuning, find_space
from pl_fed.studies.plans import Interval as Range
from pl_fed.studies.search import is_at_edge

DIVERGED_RULE = (
    "A run that diverged is a result, not a gap. Where a method has one, the method has no mean"
    " and no test, and that condition is its worst case. The run has the last rank of its seed."
    " The mean over the other runs is in the CSV file."
)
SEEDS_RULE = (
    "Each run is one number, and seeds are taken as independent. The clients of a seed share a"
    " model, so they are not independent, and no test counts them as further evidence."
)
RANK_RULE = (
    "Within a seed, methods are ranked by their mean rank over conditions. Seeds are independent"
    " blocks."
)
NO_RESULT = "no result"
NOTHING_CHOSEN = "nothing yet"  # of the values that a tuning searches
_STATISTICS = {
    "_worst10": "mean of the worst 10 % of clients",
    "_best10": "mean of the best 10 % of clients",
    "_std": "deviation over clients",
    "_weighted": "weighted by samples",
    "_jain": "Jain's index over clients",
}
_WIDEST = 6  # columns of numbers in a LaTeX table
COMPARISON_COLUMNS = (
    *("metric", "condition", "method", "compared_with", "pairs", "diverged", "unpaired"),
    *("difference", "low", "high", "p_value", "p_holm", "verdict", "smallest_difference"),
)
"""The columns of ``comparisons.csv``, also without any comparison."""
WORST = "worst case"
"""The heading of the worst case over conditions."""
_WORDS = ("backslash", "asciitilde", "asciicircum", "bar")
_SYMBOLS = (
    r"± \pm|− -|≤ \le|≥ \ge|< <|> >|→ \to|∞ \infty|× \times|· \cdot|⁺ ^{+}|⁻ ^{-}|α \alpha|β \beta"
    r"|γ \gamma|δ \delta|Δ \Delta|ε \varepsilon|η \eta|λ \lambda|μ \mu|ρ \rho|σ \sigma|τ \tau"
    r"|ζ \zeta|θ \theta|κ \kappa|ν \nu|ξ \xi|π \pi|φ \phi|χ \chi|ψ \psi|ω \omega|Γ \Gamma|Θ \Theta"
    r"|Λ \Lambda|Π \Pi|Σ \Sigma|Φ \Phi|Ψ \Psi|Ω \Omega|≠ \ne|≈ \approx"
)
_LATEX = {
    **{letter: rf"\{letter}" for letter in "&%$#_{}"},
    **{letter: rf"\text{name}{{}}" for letter, name in zip("\\~^|", _WORDS)},
    **{item[0]: f"${item[2:]}$" for item in _SYMBOLS.split("|")},
    **{digit: f"$_{number}$" for number, digit in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    **{letter: f"{{{letter}}}" for letter in "[]*"},  # after a line break they are its arguments
    "–": "--",
    "…": r"\dots{}",
}


@dataclass(frozen=True)
class CellPlace:
    """Cell place: the subject of a cell of a table.

    Attributes:
        methods: The methods: one, or the two that a test compares.
        condition: The condition; ``None`` if the cell is about all of them.
    """

    methods: tuple[str, ...]
    condition: str | None = None


@dataclass(frozen=True)
class Table:
    """Table: texts with a header, and sentences for its reader.

    Attributes:
        name: The name of its files.
        title: The title.
        header: The names of the columns; the first one is that of the headings.
        rows: The heading and the cells of each row.
        notes: The sentences below the table.
        records: The numbers of the table, for CSV.
        cells: For each cell, the methods and the condition that it is about, for pages.
    """

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    records: Sequence[Mapping[str, Any]]
    cells: Mapping[tuple[int, int], CellPlace] = field(default_factory=dict)

    def markdown(self) -> str:
        """Return the table in markdown, with its title and notes."""
        lines = [self.header, tuple("---" for _ in self.header), *self.rows]
        body = "".join(f"| {' | '.join(map(escape_markdown, line))} |\n" for line in lines)
        notes = "".join(f"- {escape_markdown(note)}\n" for note in self.notes)
        return f"# {escape_markdown(self.title)}\n\n{body}\n{notes}"

    def latex(self) -> str:
        """Return the table in LaTeX, with booktabs, at most six columns of cells side by side."""
        columns = range(1, len(self.header))
        starts = range(1, len(self.header), _WIDEST) or [1]
        blocks = [[0, *columns[first - 1 : first - 1 + _WIDEST]] for first in starts]
        tables = "\n\n\\medskip\n".join(self._format_tabular(block) for block in blocks)
        notes = "\n".join(escape_latex(note) for note in self.notes)
        return (
            "% needs \\usepackage{booktabs}\n\\begin{table}\n\\centering\n"
            f"\\caption{{{escape_latex(self.title)}.\n{notes}}}\n\\label{{tab:{self._label}}}\n"
            f"{tables}\n\\end{{table}}\n"
        )

    @property
    def _label(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.name, flags=re.ASCII).replace("_", "-")

    def _format_tabular(self, columns: Sequence[int]) -> str:
        def join(line: Sequence[str]) -> str:
            return f"{' & '.join(escape_latex(line[place]) for place in columns)} \\\\"

        body = "\n".join(map(join, self.rows))
        return (
            f"\\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}\n\\toprule\n{join(self.header)}\n"
            f"\\midrule\n{body}\n\\bottomrule\n\\end{{tabular}}"
        )


def escape_latex(text: str) -> str:
    r"""Return a text in which LaTeX finds no commands.

    Example:
        >>> print(escape_latex("50 % of a_b: 0.8 ± 0.1"))
        50 \% of a\_b: 0.8 $\pm$ 0.1
    """
    return "".join(_LATEX.get(letter, letter) for letter in text)


def escape_markdown(text: str) -> str:
    r"""Return a text that does not end a cell of a markdown table, or start an emphasis.

    Example:
        >>> print(escape_markdown("a|b_c"))
        a\|b\_c
    """
    return re.sub(r"([\\|*_`<>\[\]~$&])", r"\\\1", text).replace("\n", " ")


def format_estimate(interval: Interval, decimals: int, sign: bool = False) -> str:
    """Return mean ± half of the interval; the mean alone without an interval.

    Args:
        interval: The mean with its interval.
        decimals: The number of decimals.
        sign: Whether positive means have a plus sign.

    Example:
        >>> format_estimate(Interval(0.8125, 0.79, 0.835), 3)
        '0.812 ± 0.022'
        >>> format_estimate(Interval.point(-0.5), 2, sign=True)
        '−0.50'
    """
    mean = format_number(interval.estimate, decimals, sign)
    if math.isinf(interval.low):
        return mean
    return f"{mean} ± {(interval.high - interval.low) / 2:.{decimals}f}"


def format_number(number: float, decimals: int, sign: bool = False) -> str:
    """Return a number with a typographic minus sign."""
    return f"{number:{'+' if sign else ''}.{decimals}f}".replace("-", "−")


def choose_decimals(intervals: Sequence[Interval]) -> int:
    """Return the decimals that show two digits of the median half interval: 1 to 6, or else 3.

    Example:
        >>> choose_decimals([Interval(0.8, 0.77, 0.83)]), choose_decimals([Interval(80, 77, 83)])
        (3, 1)
    """
    halves = [(item.high - item.low) / 2 for item in intervals if math.isfinite(item.low)]
    half = statistics.median(halves) if halves else 0.0
    return min(6, max(1, 1 - math.floor(math.log10(half)))) if half > 0 else 3


def make_metric_table(comparison: MetricComparison, name: str) -> Table:
    """Return the table of a metric: methods × conditions, worst case and average rank.

    Conditions are rows if they are more than six, and more than the methods.

    Args:
        comparison: The comparison of all methods by the metric.
        name: The name of the table's files.
    """
    layout, entries = comparison.layout, comparison.entries
    intervals = [entry.interval for entry in entries.values() if entry.interval is not None]
    decimals = choose_decimals(intervals)
    headings = [*layout.conditions]
    columns = [
        [_describe_entry(comparison, method, condition, decimals) for method in layout.methods]
        for condition in layout.conditions
    ]
    if len(layout.conditions) > 1:
        headings.append(WORST)
        columns.append([_describe_worst(comparison, m, decimals) for m in layout.methods])
    if comparison.ranks is not None:
        headings.append("rank")
        columns.append([f"{comparison.find_rank(m) or 0:.2f}" for m in layout.methods])
    method_name = ", ".join(layout.method_axes) or "study"
    by_condition = len(layout.conditions) > max(6, len(layout.methods))
    header: tuple[str, ...] = (method_name, *headings)
    rows = [(method, *texts) for method, texts in zip(layout.methods, zip(*columns))]
    if by_condition:
        header = (f"{', '.join(layout.condition_axes)} \\ {method_name}", *layout.methods)
        rows = [(heading, *texts) for heading, texts in zip(headings, columns)]
    cells = {}
    for first in range(len(headings)):
        for second, method in enumerate(layout.methods):
            place = (first, second + 1) if by_condition else (second, first + 1)
            is_condition = first < len(layout.conditions)
            cells[place] = CellPlace((method,), headings[first] if is_condition else None)
    return Table(
        name,
        describe_metric(comparison.metric),
        header,
        tuple(rows),
        tuple(_describe_table(comparison, decimals)),
        [_record(comparison, key, entry) for key, entry in entries.items()],
        cells,
    )


def name_files(metric: str) -> str:
    """Return the name of a metric's files.

    Example:
        >>> name_files("test/personal/accuracy_worst10")
        'test_personal_accuracy_worst10'
    """
    return re.sub(r"\W+", "_", metric, flags=re.ASCII)


def split_metric(metric: str) -> tuple[str, str, str]:
    """Return the stage, the model and the name of a metric; empty if it has none.

    Example:
        >>> split_metric("test/personal/accuracy")
        ('test', 'personal', 'accuracy')
        >>> split_metric("test/held_out/personal/accuracy")
        ('test', 'held_out/personal', 'accuracy')
    """
    stage, model, name = [*metric.split("/", 2), "", ""][:3]
    if model == "held_out":
        model, _, name = name.partition("/")
        model = f"held_out/{model}"
    return stage, model, name


def describe_metric(metric: str) -> str:
    """Return a metric in words.

    Example:
        >>> describe_metric("test/personal/accuracy_worst10")
        'accuracy, mean of the worst 10 % of clients (test, personal model)'
        >>> describe_metric("test/held_out/global/loss")
        'loss (test, global model of held-out clients)'
        >>> describe_metric("test/global/loss_gap")
        'loss, largest minus smallest (test, global model)'
    """
    stage, model, name = split_metric(metric)
    for suffix, text in _STATISTICS.items():
        if name.endswith(suffix):
            name = f"{name.removesuffix(suffix)}, {text}"
    if (parts := split_figure(name)) is not None:
        name = f"{parts[0]}, {parts[1].title}"
    clients = " of held-out clients" if model.startswith("held_out/") else ""
    model = model.removeprefix("held_out/")
    return f"{name} ({stage}, {model} model{clients})" if name else metric


def _describe_entry(
    comparison: MetricComparison, method: str, condition: str, decimals: int
) -> str:
    entry = comparison.entries.get((method, condition))
    if entry is None:
        return ""
    if entry.diverged:
        return f"{len(entry.diverged)} of {entry.planned} diverged"
    if entry.interval is None:
        return NO_VALUE if {*entry.unfinished.values()} == {NO_VALUE} else NO_RESULT
    difference = comparison.find_difference(method, condition)
    mark = {"better": " ⁺", "worse": " ⁻"}.get(difference.verdict if difference else "", "")
    missing = f" ({len(entry.values)} of {entry.planned})" if entry.unfinished else ""
    return f"{format_estimate(entry.interval, decimals)}{mark}{missing}"


def _describe_worst(comparison: MetricComparison, method: str, decimals: int) -> str:
    worst = comparison.find_worst(method)
    if worst.has_diverged:
        return "diverged"
    if worst.mean is None:
        return NO_RESULT
    bound = ("≤ " if comparison.is_higher_better else "≥ ") if worst.is_bound else ""
    return f"{bound}{format_number(worst.mean, decimals)}"


def _describe_table(comparison: MetricComparison, decimals: int) -> list[str]:
    """Return the sentences below the table of a metric."""
    layout, entries = comparison.layout, comparison.entries
    counts = [entry.planned for entry in entries.values()]
    seeds = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    direction = "Larger" if comparison.is_higher_better else "Smaller"
    notes = [
        f"Mean over {seeds} seed{'' if seeds == '1' else 's'} ± half of Student's 95 % interval,"
        " which assumes independent seeds with about normal results. With one seed there is no"
        f" interval. {direction} values are better.",
        SEEDS_RULE,
    ]
    if len(counts) < len(layout.methods) * len(layout.conditions):
        notes.append(
            "An empty cell is a combination that the study leaves out. It has no part in the worst"
            " case of its method, and ranks are over the conditions of all methods."
        )
    notes += _describe_tests(comparison, decimals)
    if len(layout.conditions) > 1:
        sign = "≤" if comparison.is_higher_better else "≥"
        notes.append(
            "Worst case: the worst mean over conditions. The worst of several estimates tends to be"
            f" too pessimistic. {sign} marks methods with conditions that have no mean yet."
        )
    notes += _describe_ranks(comparison)
    diverged = sum(len(entry.diverged) for entry in entries.values())
    if diverged:
        notes.append(f"{_count(diverged, 'run')} diverged. {DIVERGED_RULE}")
    states = [state for entry in entries.values() for state in entry.unfinished.values()]
    without_value = states.count(NO_VALUE)
    if unfinished := len(states) - without_value:
        notes.append(f"{_count(unfinished, 'run')} without a result.")
    if without_value:
        notes.append(f"{_count(without_value, 'finished run')} without a value of this metric.")
    if states:
        notes.append(
            "Cells with such runs count the others, as in (2 of 3). Means are over the other seeds,"
            " and pairs are the seeds that both methods have."
        )
    return notes


def _count(number: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> _count(1, "run"), _count(2, "run")
        ('1 run', '2 runs')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _describe_tests(comparison: MetricComparison, decimals: int) -> list[str]:
    """Return the sentences on paired tests and on their power."""
    if not comparison.tests:
        return ["No test: it needs two methods with two common seeds that have not diverged."]
    baseline = comparison.layout.baseline
    subject = (
        f"⁺ and ⁻ mark methods that are better and worse than {baseline}"
        if baseline is not None
        else "A further table compares all pairs of methods"
    )
    notes = [
        f"{subject} by a paired t-test over seeds (p < {ALPHA:g} after Holm's correction for"
        f" {_count(comparison.tests, 'comparison')}). It assumes independent seeds, and differences"
        " that are about normal."
    ]
    if any(item.pairs > 1 and len(set(item.values)) == 1 for item in comparison.differences):
        notes.append(
            "Where all seeds have the same difference, the p-value is that of the sign-flip test."
        )
    smallest = [item.smallest for item in comparison.differences if item.smallest > 0]
    if smallest:
        notes.append(
            "Power: these seeds find a true difference of"
            f" {statistics.median(smallest):.{decimals}f} (median over comparisons; the largest is"
            f" {max(smallest):.{decimals}f}) with a chance of 80 %, at the strictest level of the"
            " correction. Smaller differences need more seeds."
        )
    else:
        notes.append("Power: unknown, because the differences do not vary over these seeds.")
    return notes


def _describe_ranks(comparison: MetricComparison) -> list[str]:
    ranks, left_out = comparison.ranks, comparison.incomplete_seeds
    note = f" {_count(left_out, 'seed')} with missing runs left out." if left_out else ""
    if ranks is None:
        return [f"No ranks: fewer than two seeds are complete.{note}"] if left_out else []
    p_value = format_p_value(ranks.friedman.p_value)
    equals = "" if p_value.startswith("<") else "= "
    return [
        f"Rank: average over {_count(ranks.friedman.blocks, 'seed')}, 1 for the best. {RANK_RULE}"
        f" Friedman's test that all methods are equal: p {equals}{p_value}. If it rejects, methods"
        f" differ whose ranks are more than {ranks.difference:.2f} apart (Nemenyi, α ="
        f" {ranks.alpha:g}).{note}"
    ]


def _record(comparison: MetricComparison, key: tuple[str, str], entry: Entry) -> dict[str, Any]:
    """Return the numbers of a method under a condition."""
    worst = comparison.find_worst(key[0])
    difference = comparison.find_difference(*key)
    numbers = {
        "metric": comparison.metric,
        "seeds": len(entry.values),
        "diverged": len(entry.diverged),
        "without_result": len(entry.unfinished),
        "mean_of_finished": entry.interval.estimate if entry.interval else "",
        **_record_ends("", entry.interval),
        "verdict": difference.verdict if difference else "",
        "p_holm": _blank(difference.corrected) if difference else "",
        "worst_case": "diverged" if worst.has_diverged else worst.mean,
        "worst_case_is_bound": int(worst.is_bound),
        "rank": comparison.find_rank(key[0]),
    }
    return join_columns(entry.labels, numbers)


def join_columns(labels: Mapping[str, str], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of labels and numbers; a number named like an axis gets an underscore.

    Example:
        >>> join_columns({"rank": "8"}, {"rank": 1.5, "seeds": 3})
        {'rank': '8', 'rank_': 1.5, 'seeds': 3}
    """
    return {**labels, **{f"{n}_" if n in labels else n: item for n, item in numbers.items()}}


def _record_ends(prefix: str, interval: Interval | None) -> dict[str, Any]:
    """Return the ends of an interval, empty without one."""
    has_ends = interval is not None and math.isfinite(interval.low)
    low, high = (interval.low, interval.high) if interval is not None and has_ends else ("", "")
    return {f"{prefix}low": low, f"{prefix}high": high}


def _blank(number: float) -> Any:
    return "" if math.isnan(number) else number


def _record_difference(comparison: MetricComparison, difference: Difference) -> dict[str, Any]:
    """Return the row of a comparison in ``comparisons.csv``."""
    return {
        "metric": comparison.metric,
        "condition": difference.condition if comparison.layout.condition_axes else "",
        "method": difference.first,
        "compared_with": difference.second,
        "pairs": difference.pairs,
        "diverged": difference.diverged,
        "unpaired": difference.unpaired,
        "difference": difference.interval.estimate if difference.interval else "",
        **_record_ends("", difference.interval),
        "p_value": _blank(difference.p_value),
        "p_holm": _blank(difference.corrected),
        "verdict": difference.verdict,
        "smallest_difference": _blank(difference.smallest),
    }


def make_test_table(comparison: MetricComparison, name: str) -> Table:
    """Return the table of the paired comparisons of a metric.

    Args:
        comparison: The comparison of all methods by the metric.
        name: The name of the table's files.
    """
    differences = comparison.differences
    intervals = [item.interval for item in differences if item.interval is not None]
    decimals = choose_decimals(intervals)
    header = ("method", "compared with", "condition", "difference", "p", "p (Holm)", "80 % power")
    rows = tuple(
        (
            item.first,
            item.second,
            item.condition,
            _describe_difference(item, decimals),
            format_p_value(item.p_value),
            format_p_value(item.corrected),
            "–" if math.isnan(item.smallest) else format_number(item.smallest, decimals),
        )
        for item in differences
    )
    cells = {
        (row, column): CellPlace((item.first, item.second), item.condition)
        for row, item in enumerate(differences)
        for column in range(1, len(header))
    }
    title = f"Paired comparisons by {describe_metric(comparison.metric)}"
    records = [_record_difference(comparison, item) for item in differences]
    notes = [
        "Difference: mean over the seeds that both methods have ± half of Student's 95 % interval,"
        " without a correction. 80 % power: the smallest true difference that this test finds.",
        *_describe_tests(comparison, decimals),
        SEEDS_RULE,
    ]
    return Table(name, title, header, rows, tuple(notes), records, cells)


def _describe_difference(difference: Difference, decimals: int) -> str:
    """Return a difference with its interval, or the reason why there is no test."""
    if difference.diverged:
        return f"diverged on {_count(difference.diverged, 'seed')}"
    if difference.interval is None:
        return "no common seed"
    return format_estimate(difference.interval, decimals, sign=True)


def make_tuning_table(plan: Tuning, trials: Sequence[Mapping[str, str]]) -> Table:
    """Return the table of tuning: for each label its trials, space, chosen values and score.

    Args:
        plan: The tuning.
        trials: The rows of ``tuning.csv``.
    """
    rows, records = [], []
    labels = dict.fromkeys([*(trial[plan.per] for trial in trials), *plan.space])
    for label in (name for name in labels if name != ALL):
        space = find_space(plan, label)
        members = [trial for trial in trials if trial[plan.per] == label]
        states = [trial["status"] for trial in members]
        best = next((trial for trial in members if trial["is_chosen"] == "1"), None)
        values = {path: best[path] for path in space} if best else {}
        edges = [path for path, text in values.items() if is_at_edge(_number(text), space[path])]
        record = {
            plan.per: label,
            "trials": f"{len(states) - states.count('missing')} of {_count_trials(plan, space)}",
            "diverged": states.count("diverged"),
            "failed": states.count("failed"),
            "searched": "; ".join(f"{path}: {_describe_range(r)}" for path, r in space.items()),
            "chosen": "; ".join(f"{p} = {text}" for p, text in values.items()) or NOTHING_CHOSEN,
            plan.metric: best[plan.metric] if best else "",
            "at the edge": ", ".join(edges) or "no",
        }
        records.append(record)
        score = _number(best[plan.metric] if best else "")
        texts = {**record, plan.metric: f"{score:.4f}" if isinstance(score, float) else "–"}
        rows.append(tuple(map(str, texts.values())))
    budget = f"the same budget of {_count(plan.budget, 'trial')}"
    if plan.sampler == "grid":
        budget = f"all combinations of its values, at most {_count(plan.budget, 'trial')},"
    notes = [
        f"Each label has {budget} of {_count(plan.seeds, 'seed')}, sampled by {plan.sampler}."
        " Validation chose, on seeds that the results above do not have.",
        "A diverged trial has the worst score. A failed one has none, and counts towards the"
        " budget. Labels that are not listed had no trial.",
        "A chosen value at the edge of its space may have a better one beyond it.",
    ]
    header = tuple(records[0]) if records else (plan.per,)
    title = f"Tuned equally, by {plan.metric}"
    return Table("tuned", title, header, tuple(rows), tuple(notes), records)


def _count_trials(plan: Tuning, space: Mapping[str, Range | Choices]) -> int:
    """Return the number of trials of a label."""
    if plan.sampler != "grid":
        return plan.budget
    return math.prod(len(values.values) for values in space.values() if isinstance(values, Choices))


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _describe_range(values: Range | Choices) -> str:
    """Return a searched space in a few letters."""
    if isinstance(values, Choices):
        return ", ".join(map(str, values.values))
    scale = "" if values.scale == "linear" else f" ({values.scale})"
    return f"{values.low:g} to {values.high:g}{scale}"
