"""The tables of a report, as HTML: what was run, what came out, and in what configs differ."""

import html
import math
import re
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import yaml

from pl_fed.reports import configs
from pl_fed.reports.group import Final, Group, measure_of, measures_in, models_of
from pl_fed.reports.run import Run

RESULTS = {  # what the summary that a fit ends with shows, and a report's table, by metric
    "accuracy": "mean over clients",
    "accuracy_std": "spread over clients (std)",
    "accuracy_worst10": "worst 10 % of clients",
    "accuracy_best10": "best 10 % of clients",
    "accuracy_weighted": "over all samples",
    "loss": "loss",
    "backdoor_success": "taken for the backdoor's class",
}


def results_of(names: Collection[str], first: str | None = None) -> dict[str, str]:
    """Return what a summary and a report's table show, by metric.

    Args:
        names: The metrics that there are, without the part of the data and the model.
        first: The metric whose figures are all shown, where there is no accuracy.

    Example:
        >>> list(results_of(["mae", "mae_std", "mae_worst10", "loss"]))
        ['mae', 'mae_std', 'mae_worst10', 'loss']
    """
    measures = measures_in(names)
    main = first if first in measures else next(iter(measures), "loss")
    accuracies = {f: title for f, title in RESULTS.items() if f.startswith("accuracy")}
    others = {f: title for f, title in RESULTS.items() if not f.startswith("accuracy")}
    figures = {}
    if "accuracy" not in names and f"{main}_worst10" in names:
        figures = {
            figure.replace("accuracy", main): f"{main}, {title}"
            for figure, title in accuracies.items()
        }
    means = {name: f"{name}, mean over clients" for name in measures}
    titles = {**accuracies, **figures, **means, **others, **figures}
    return {name: title for name, title in titles.items() if name in names}


def facts(group: Group, run: Run) -> dict[str, str]:
    """Return what a run was, by column."""
    said = partial(configs.said, run.config)
    byzantine = run.byzantine_share
    planned = f" of {run.planned}" if run.planned not in (None, run.rounds) else ""
    defence = [said("federation", "pre_aggregators"), said("federation", "aggregator")]
    usual = "Mean" if run.config else configs.shown(None)
    seconds = [value for value in run.curve("time/round").values() if math.isfinite(value)]
    cohort = run.final("train/cohort")
    return {
        "number": str(group.number),
        "run": run.name,
        "state": "" if run.finished else "unfinished",
        "algorithm": configs.algorithm(run.config) if run.config else configs.shown(None),
        "net": said("model", "init_args", "net"),
        "data": said("data", "dataset"),
        "partition": said("data", "partitioner"),
        "clients": configs.shown(run.num_clients),
        "cohort": f"{cohort:g}" if cohort is not None else configs.shown(None),
        "rounds": f"{run.rounds}{planned}",
        "attack": said("federation", "adversary", "attack"),
        "byzantine": f"{byzantine:.4g}" if byzantine is not None else configs.shown(None),
        "defence": " → ".join(each for each in defence if each != configs.shown(None)) or usual,
        "seed": configs.seed(run.config) or configs.shown(None),
        "engine": configs.shown(run.engine),
        "time of rounds": _duration(sum(seconds)),
    }


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def of_runs(groups: Sequence[Group]) -> str:
    """Return the table of what was run."""
    found = [(group, [facts(group, run) for run in group.runs]) for group in groups]
    columns = [name for name in found[0][1][0] if any(row[name] for _, own in found for row in own)]
    lines = []
    for group, rows in found:
        for place, row in enumerate(rows):
            first = [str(group.number), _name(group, group.runs)] if place == 0 else ["", ""]
            lines.append(_line(first[0], [first[1], *(row[c] for c in columns[1:])], place > 0))
    return _table(["", "name", *columns[1:]], lines)


def of_results(groups: Sequence[Group]) -> str:
    """Return the table of the tests: of groups, and of the single runs where they are several."""
    models = models_of(groups, "test")
    names = {name.split("/", 2)[2] for name in _tested(groups) if name.count("/") == 2}
    columns = {
        metric: title
        for metric, title in results_of(names, measure_of(groups, "test")).items()
        if any(group.final(f"test/{model}/{metric}") for group in groups for model in models)
    }
    if not columns:
        return '<p class="note">No run has test results.</p>\n'
    lines = []
    for group in groups:
        for place, model in enumerate(each for each in models if _has(group, each)):
            finals = [group.final(f"test/{model}/{metric}") for metric in columns]
            name = "" if place else _name(group, group.tested)
            lines.append(_line(str(group.number), [name, model, *map(_number, finals)]))
            for run in group.tested if len(group.runs) > 1 else ():
                own = [run.final(f"test/{model}/{metric}") for metric in columns]
                name = f"{run.name}, seed {configs.seed(run.config) or '–'}"
                lines.append(_line("", [name, model, *map(_number, own)], True))
    return _table(["", "name", "model", *columns.values()], lines)


def _tested(groups: Sequence[Group]) -> Iterable[str]:
    """Yield the names of all test metrics."""
    for group in groups:
        for run in group.runs:
            yield from (name for name in run.metrics if name.startswith("test/"))


def _name(group: Group, runs: Sequence[Run]) -> str:
    return f"{group.label} ({group.seeds_of(runs)})" if len(group.runs) > 1 else group.label


def _has(group: Group, model: str) -> bool:
    return any(model in run.models("test") for run in group.runs)


def _number(value: Final | float | None) -> str:
    if value is None:
        return "–"
    return str(value) if isinstance(value, Final) else f"{value:.4f}"


def of_differences(groups: Sequence[Group]) -> str:
    """Return the table of the settings that are not the same in all runs."""
    runs = [(group, run) for group in groups for run in group.runs if run.config]
    table = configs.differing([run.config for _, run in runs])
    if not table:
        return '<p class="note">Nothing.</p>\n'
    lines = [
        _line(str(group.number), [run.name, *(configs.shown(row[k]) for row in table.values())])
        for k, (group, run) in enumerate(runs)
    ]
    return _table(["", "run", *table], lines)


def of_configs(groups: Sequence[Group]) -> str:
    """Return each run's config, folded away."""
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
    """Return a table's line: a heading, and cells, of which numbers are put to the right."""
    parts = [f'<th scope="row">{html.escape(name)}</th>']
    for place, cell in enumerate(cells):
        kind = "name" if place == 0 else "number" if _is_number(cell) else "text"
        marked = "unfinished" if cell == "unfinished" else kind
        parts.append(f'<td class="{marked}">{html.escape(cell)}</td>')
    kind = ' class="single"' if single else ""
    return f"<tr{kind}>{''.join(parts)}</tr>\n"


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?( ± [\d.]+)?|nan|-?inf", text))
