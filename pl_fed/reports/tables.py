"""The tables of a report, as HTML: runs, test results, and differences between configs."""

import html
import math
import re
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import yaml

from pl_fed.reports import configs
from pl_fed.reports.group import Final, Group, list_models, main_metric, task_metrics
from pl_fed.reports.run import Run

RESULTS = {  # titles of the metrics in a fit's summary and in a report
    "accuracy": "mean over clients",
    "accuracy_std": "spread over clients (std)",
    "accuracy_worst10": "worst 10 % of clients",
    "accuracy_best10": "best 10 % of clients",
    "accuracy_weighted": "over all samples",
    "accuracy_trained": "mean over trained clients",
    "accuracy_trained_std": "std over trained clients",
    "accuracy_trained_worst10": "worst 10 % of trained clients",
    "loss": "loss",
    "backdoor_success": "backdoor success rate",
}


def result_titles(names: Collection[str], first: str | None = None) -> dict[str, str]:
    """Return the metrics of a summary or a report, with their titles.

    Args:
        names: The available metrics, without the part of the data and the model.
        first: Without accuracy, the metric to show with its spread, worst and best clients;
            ``None`` takes the alphabetically first metric of the task.

    Example:
        >>> list(result_titles(["mae", "mae_std", "mae_worst10", "loss"]))
        ['mae', 'mae_std', 'mae_worst10', 'loss']
    """
    metrics = task_metrics(names)
    main = first if first in metrics else next(iter(metrics), "loss")
    accuracies = {name: title for name, title in RESULTS.items() if name.startswith("accuracy")}
    remaining = {name: title for name, title in RESULTS.items() if not name.startswith("accuracy")}
    statistics = {}
    if "accuracy" not in names and f"{main}_worst10" in names:
        statistics = {
            name.replace("accuracy", main): f"{main}, {title}" for name, title in accuracies.items()
        }
    means = {}
    for name in metrics:
        means[name] = f"{name}, mean over clients"
        if "accuracy" in names:
            means[f"{name}_worst10"] = f"{name}, worst 10 % of clients"
    titles = {**accuracies, **statistics, **means, **remaining, **statistics}
    return {name: title for name, title in titles.items() if name in names}


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
    seconds = [value for value in run.curve("time/round").values() if math.isfinite(value)]
    cohort = run.final("train/cohort")
    return {
        "number": str(group.number),
        "run": run.name,
        "state": "" if run.is_finished else "unfinished",
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
    }


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def render_runs(groups: Sequence[Group]) -> str:
    """Return the table of the runs; columns without a value are left out."""
    sections = [(group, [describe_run(group, run) for run in group.runs]) for group in groups]
    names = list(sections[0][1][0])
    columns = [name for name in names if any(row[name] for _, rows in sections for row in rows)]
    lines = []
    for group, rows in sections:
        for place, row in enumerate(rows):
            first = [str(group.number), _name(group, group.runs)] if place == 0 else ["", ""]
            lines.append(_line(first[0], [first[1], *(row[c] for c in columns[1:])], place > 0))
    return _table(["", "name", *columns[1:]], lines)


def render_results(groups: Sequence[Group]) -> str:
    """Return the table of test results of each group, and of its runs if it has several."""
    models = list_models(groups, "test")
    names = {name.split("/", 2)[2] for name in _test_metrics(groups) if name.count("/") == 2}
    columns = {
        metric: title
        for metric, title in result_titles(names, main_metric(groups, "test")).items()
        if any(group.final(f"test/{model}/{metric}") for group in groups for model in models)
    }
    if not columns:
        return '<p class="note">No run has test results.</p>\n'
    lines = []
    for group in groups:
        for place, model in enumerate(model for model in models if _has_test(group, model)):
            finals = [group.final(f"test/{model}/{metric}") for metric in columns]
            name = "" if place else _name(group, group.tested_runs)
            lines.append(_line(str(group.number), [name, model, *map(_format_result, finals)]))
            for run in group.tested_runs if len(group.runs) > 1 else ():
                results = [run.final(f"test/{model}/{metric}") for metric in columns]
                name = f"{run.name}, seed {configs.describe_seeds(run.config) or '–'}"
                lines.append(_line("", [name, model, *map(_format_result, results)], True))
    return _table(["", "name", "model", *columns.values()], lines)


def _test_metrics(groups: Sequence[Group]) -> Iterable[str]:
    """Yield the names of the test metrics of all runs."""
    for group in groups:
        for run in group.runs:
            yield from (name for name in run.metrics if name.startswith("test/"))


def _name(group: Group, runs: Sequence[Run]) -> str:
    return f"{group.label} ({group.describe_seeds(runs)})" if len(group.runs) > 1 else group.label


def _has_test(group: Group, model: str) -> bool:
    return any(model in run.models("test") for run in group.runs)


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


def render_configs(groups: Sequence[Group]) -> str:
    """Return the config of each run, collapsed."""
    parts = []
    for group in groups:
        for run in group.runs:
            text = yaml.safe_dump(dict(run.config), sort_keys=False) if run.config else "none\n"
            title = f"{group.number} {run.name}: {group.label}"
            parts.append(
                f"<details><summary>{html.escape(title)}</summary>"
                f"<pre>{html.escape(text)}</pre></details>\n"
            )
    return "".join(parts)


def _table(header: Iterable[str], lines: Iterable[str]) -> str:
    cells = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    head = f"<thead><tr>{cells}</tr></thead>"
    return f'<div class="wide"><table>\n{head}\n<tbody>\n{"".join(lines)}</tbody></table></div>\n'


def _line(name: str, cells: Sequence[str], single: bool = False) -> str:
    """Return a row of a table.

    Args:
        name: The heading of the row.
        cells: The cells; numbers are aligned to the right.
        single: Whether the row is about a single run of a group.
    """
    parts = [f'<th scope="row">{html.escape(name)}</th>']
    for place, cell in enumerate(cells):
        kind = "name" if place == 0 else "number" if _is_number(cell) else "text"
        cell_class = "unfinished" if cell == "unfinished" else kind
        parts.append(f'<td class="{cell_class}">{html.escape(cell)}</td>')
    row_class = ' class="single"' if single else ""
    return f"<tr{row_class}>{''.join(parts)}</tr>\n"


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?( ± [\d.]+)?|nan|-?inf", text))
