"""The tables of a report, as HTML: runs, test results, and differences between configs."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from pl_fed.functional.client_figures import split_figure
from pl_fed.reports import configs
from pl_fed.reports.answers import Answer
from pl_fed.reports.group import (
    Final,
    Group,
    is_higher_better,
    list_models,
    main_metric,
)
from pl_fed.reports.picture import FEW
from pl_fed.reports.run import CENTRAL, Run, sort_models
from pl_fed.reports.titles import result_titles

_NONE = configs.format_value(None)
_COMMIT_LETTERS = 8
_SHORT = 24  # letters of a cell without line breaks
_LARGE = 100.0  # larger numbers are shown without three decimals
_ENDINGS = ("_weighted", "_std", "_var", "_trained")  # of means and spreads over clients
_HELD_OUT = "held_out/"  # begins the models of held-out clients
_SETTINGS = (  # columns of the table of groups
    *("algorithm", "net", "data", "partition", "clients", "cohort", "attack", "byzantine"),
    "defence",
)
_RUN_FACTS = (  # columns of the table of runs
    *("run", "state", "seed", "rounds", "never took part", "engine", "start-up"),
    *("time of rounds", "version"),
)


def describe_run(group: Group, run: Run) -> dict[str, str]:
    """Return the row of a run in the table of runs, by column."""
    describe_setting = partial(configs.describe_at, run.config)
    none = configs.format_value(None)
    byzantine = run.byzantine_share
    planned = run.planned_rounds
    total = f" of {planned}" if planned not in (None, run.num_rounds) else ""
    defence = [
        describe_setting("federation", "pre_aggregators"),
        describe_setting("federation", "aggregator"),
    ]
    default = "Mean" if run.config else none
    _, seconds = run.table.finite_points("time/round")
    cohort = run.counts.get("cohort")  # the expected one if cohorts vary
    cohort = cohort if isinstance(cohort, int) else run.final("train/cohort")
    return {
        "number": str(group.number),
        "run": run.name,
        "state": "diverged" if run.is_diverged else "" if run.is_finished else "unfinished",
        "algorithm": configs.algorithm(run.config) if run.config else none,
        "net": describe_setting("model", "init_args", "net"),
        "data": describe_setting("data", "dataset"),
        "partition": describe_setting("data", "partitioner"),
        "clients": configs.format_value(run.num_clients),
        "cohort": f"{cohort:g}" if cohort is not None else none,
        "rounds": f"{run.num_rounds}{total}",
        "attack": describe_setting("federation", "adversary", "attack"),
        "byzantine": f"{byzantine:.4g}" if byzantine is not None else none,
        "defence": " → ".join(step for step in defence if step != none) or default,
        "seed": configs.describe_seeds(run.config) or none,
        "engine": configs.format_value(run.engine),
        "time of rounds": _duration(sum(seconds)),
        **_describe_summary(run),
    }


def _describe_summary(run: Run) -> dict[str, str]:
    """Return the cells that come from a run's ``summary.json`` and its participation."""
    parts = {name: run.summary.get(name) for name in ("seconds", "versions", "git")}
    seconds, versions, git = (part if isinstance(part, Mapping) else {} for part in parts.values())
    start_up = seconds.get("start_up")
    version = str(versions.get("pl_fed", ""))
    commit = str(git.get("commit", ""))[:_COMMIT_LETTERS]
    commit += "*" if commit and git.get("dirty") else ""
    untrained = run.untrained_clients
    return {
        "never took part": str(untrained) if "rounds" in run.clients else "",
        "start-up": _duration(start_up) if isinstance(start_up, int | float) else "",
        "version": " ".join(filter(None, (version, commit))),
    }


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def render_constants(groups: Sequence[Group]) -> str:
    """Return the settings and facts that all runs share, as a list of names and values."""
    rows = [describe_run(group, run) for group in groups for run in group.runs]
    facts = {
        name: rows[0][name]
        for name in _SETTINGS
        if rows[0][name] not in ("", _NONE) and not _differs(rows, name)
    }
    items = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in facts.items()
    )
    return f'<dl class="facts">{items}</dl>\n' if items else ""


def render_runs(groups: Sequence[Group]) -> str:
    """Return the table of groups with the settings that differ, and a folded table of runs."""
    runs = [(group, run) for group in groups for run in group.runs]
    rows = [describe_run(group, run) for group, run in runs]
    differing = [name for name in _SETTINGS if _differs(rows, name)]
    lines = []
    for group in groups:
        row = describe_run(group, group.runs[0])
        cells = [_name(group, group.runs), *(row[name] for name in differing)]
        lines.append(_line(str(group.number), cells, group=group.number))
    table = _table(["", "name", *differing], lines) if len(groups) > 1 else ""
    columns = [name for name in _RUN_FACTS if any(row[name] for row in rows)]
    run_lines = [
        _line(str(group.number), [row[name] for name in columns], group=group.number)
        for (group, _), row in zip(runs, rows)
    ]
    return table + _fold(f"Each run ({len(rows)})", _table(["", *columns], run_lines))


def _differs(rows: Sequence[Mapping[str, str]], name: str) -> bool:
    return len({row[name] for row in rows}) > 1


def render_results(groups: Sequence[Group]) -> str:
    """Return the table of test results of each group, and a folded table of single runs.

    A mean is bold if it is better than those of the other groups by more than the standard
    deviations over runs.
    """
    models = list_models(groups, "test")
    parts = [name.split("/", 2) for name in _test_metrics(groups) if name.count("/") == 2]
    names = {name for _, model, name in parts if model != CENTRAL}
    central = {  # a mean over samples, beside such means of clients
        f"{name}_weighted" if f"{name}_weighted" in names else name: name
        for _, model, name in parts
        if model == CENTRAL
    }
    columns = {
        metric: title
        for metric, title in result_titles(names, main_metric(groups, "test")).items()
        if any(group.final(f"test/{model}/{metric}") for group in groups for model in models)
    }
    if not columns:
        return '<p class="note">No run has test results.</p>\n'
    best = {(m, metric): _best_group(groups, m, metric) for m in models for metric in columns}
    models += [f"held_out/{model}" for model in _held_out_models(groups)]
    lines, run_lines = [], []
    for group in groups:
        for place, model in enumerate(model for model in models if _has_test(group, model)):
            finals = [group.final(f"test/{model}/{metric}") for metric in columns]
            name = "" if place else _name(group, group.tested_runs)
            bold = [False, False, *(best.get((model, m)) == group.number for m in columns)]
            title = describe_model(model)
            cells = [name, title, *map(_format_result, finals)]
            lines.append(_line(str(group.number), cells, bool(place), group.number, bold))
            for run in group.tested_runs if len(group.runs) > 1 else ():
                results = [run.final(f"test/{model}/{metric}") for metric in columns]
                name = f"{run.name}, seed {configs.describe_seeds(run.config) or _NONE}"
                cells = [name, title, *map(_format_result, results)]
                run_lines.append(_line(str(group.number), cells, group=group.number))
        finals = [group.final(f"test/{CENTRAL}/{central.get(metric)}") for metric in columns]
        if any(finals):
            cells = ["", "global, on the server's samples", *map(_format_result, finals)]
            lines.append(_line(str(group.number), cells, True, group.number))
    header = ["", "name", "model", *columns.values()]
    folded = _fold(f"Each run ({len(run_lines)} rows)", _table(header, run_lines))
    return _table(header, lines) + (folded if run_lines else "")


def _best_group(groups: Sequence[Group], model: str, metric: str) -> int | None:
    """Return the number of the group that is better than all others beyond the spread over runs."""
    finals = {group.number: group.final(f"test/{model}/{metric}") for group in groups}
    known_finals = {number: final for number, final in finals.items() if final is not None}
    if len(known_finals) < 2 or any(final.std is None for final in known_finals.values()):
        return None
    runs = [run for group in groups for run in group.runs]
    is_spread = metric.endswith(("_std", "_var")) or metric.startswith("backdoor_success")
    base, figure = split_figure(metric) or (metric, None)
    for ending in _ENDINGS:
        base = base.removesuffix(ending)
    if figure is not None and figure.higher_is_better is not None:
        is_higher: bool | None = figure.higher_is_better
    else:
        is_higher = is_higher_better(runs, metric)
        if is_higher is None:
            is_higher = False if is_spread else is_higher_better(runs, base)
    if is_higher is None:
        return None
    sign = 1 if is_higher else -1
    order = sorted(known_finals, key=lambda number: sign * known_finals[number].mean)
    first, second = known_finals[order[-1]], known_finals[order[-2]]
    gap = abs(first.mean - second.mean)
    return order[-1] if gap > (first.std or 0.0) + (second.std or 0.0) else None


def _test_metrics(groups: Sequence[Group]) -> Iterable[str]:
    """Yield the names of the test metrics of all runs."""
    for group in groups:
        for run in group.runs:
            yield from (name for name in run.metrics if name.startswith("test/"))


def _name(group: Group, runs: Sequence[Run]) -> str:
    return f"{group.label} ({group.describe_seeds(runs)})" if len(group.runs) > 1 else group.label


def _has_test(group: Group, model: str) -> bool:
    if model.startswith(_HELD_OUT):
        name = model.removeprefix(_HELD_OUT)
        return any(name in run.held_out_models("test") for run in group.runs)
    return any(model in run.models("test") for run in group.runs)


def _held_out_models(groups: Sequence[Group]) -> list[str]:
    """Return the models with test results of held-out clients in any run."""
    return sort_models(
        model for group in groups for run in group.runs for model in run.held_out_models("test")
    )


def describe_model(model: str) -> str:
    """Return the name of a model in a table.

    Example:
        >>> describe_model("global"), describe_model("held_out/global")
        ('global', 'global, held-out clients')
    """
    if not model.startswith(_HELD_OUT):
        return model
    return f"{model.removeprefix(_HELD_OUT)}, held-out clients"


def _format_result(value: Final | float | None) -> str:
    if value is None:
        return "–"
    return str(value) if isinstance(value, Final) else f"{value:.4f}"


def render_differences(groups: Sequence[Group]) -> str:
    """Return the table of the settings that differ between runs."""
    runs = [(group, run) for group in groups for run in group.runs if run.config]
    table = configs.find_differences([run.config for _, run in runs])
    if not table:
        return '<p class="note">None.</p>\n'
    lines = []
    for place, (group, run) in enumerate(runs):
        values = [configs.format_value(settings[place]) for settings in table.values()]
        lines.append(_line(str(group.number), [run.name, *values]))
    return _table(["", "run", *table], lines)


def render_answer(answer: Answer) -> str:
    """Return the table of an answer, with a link to its CSV file."""
    names = dict.fromkeys(name for row in answer.rows for name in row if name != "group")
    columns = [name for name in names if any(row.get(name) is not None for row in answer.rows)]
    lines, previous = [], None
    for row in answer.rows:
        repeats = row["group"] == previous
        cells = [_format_cell(row.get(name)) for name in columns]
        if repeats:
            cells[0] = ""
        lines.append(_line(str(row["group"]), cells, repeats, row["group"]))
        previous = row["group"]
    link = f' <span class="files"><a href="{answer.name}.csv">CSV</a></span>'
    title = f"<h3>{html.escape(answer.question)}{link}</h3>\n"
    note = f'<p class="note">{html.escape(answer.note)}</p>\n'
    return title + note + _table(["", *columns], lines)


def _format_cell(value: Any) -> str:
    if value is None:
        return _NONE
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < _LARGE else f"{value:.4g}"
    return str(value)


def render_configs(groups: Sequence[Group]) -> str:
    """Return the config of each run, collapsed."""
    parts = []
    for group in groups:
        for run in group.runs:
            text = configs.dump(run.config) if run.config else "none\n"
            title = f"{group.number} {run.name}: {group.label}"
            parts.append(
                f"<details><summary>{html.escape(title)}</summary>"
                f"<pre>{html.escape(text)}</pre></details>\n"
            )
    return "".join(parts)


def _fold(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>\n{content}</details>\n"


def _table(header: Iterable[str], lines: Iterable[str]) -> str:
    lines = list(lines)
    classes = [re.findall(r'<td class="(\w+)">', line) for line in lines]
    columns = zip(*classes) if len({len(row) for row in classes}) == 1 else ()
    kinds = ["text", *("number" if "number" in column else "text" for column in columns)]
    cells = "".join(
        f'<th scope="col" class="{kind}">{html.escape(name)}</th>'
        for name, kind in zip_longest(header, kinds, fillvalue="text")
    )
    head = f"<thead><tr>{cells}</tr></thead>"
    scroll = '<div class="wide" tabindex="0" role="region" aria-label="table">'
    return f"{scroll}<table>\n{head}\n<tbody>\n{''.join(lines)}</tbody></table></div>\n"


def _line(
    name: str,
    cells: Sequence[str],
    repeats: bool = False,
    group: int | None = None,
    bold: Sequence[bool] = (),
) -> str:
    """Return a row of a table.

    Args:
        name: The heading of the row.
        cells: The cells; numbers are aligned to the right.
        repeats: Whether the row is about the group of the row above.
        group: The number of the group, for its colour.
        bold: Whether each cell is bold.
    """
    swatch = "" if group is None else f'<span class="swatch g{(group - 1) % FEW}"></span>'
    heading = "" if repeats else f"{swatch}{html.escape(name)}"
    parts = [f'<th scope="row">{heading}</th>']
    for place, cell in enumerate(cells):
        short = "short" if len(cell) < _SHORT else "text"
        kind = "name" if place == 0 else "number" if _is_number(cell) else short
        cell_class = "unfinished" if cell in ("unfinished", "diverged") else kind
        text = html.escape(cell)
        if place < len(bold) and bold[place]:
            text = f"<strong>{text}</strong>"
        parts.append(f'<td class="{cell_class}">{text}</td>')
    row_class = ' class="again"' if repeats else ""
    return f"<tr{row_class}>{''.join(parts)}</tr>\n"


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?( ± [\d.]+)?|\d+ of \d+|nan|-?inf", text))
