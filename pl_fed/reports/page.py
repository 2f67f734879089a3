"""A self-contained page about runs: tables, pictures, configs."""

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pl_fed.reports import (
    classes,
    clients,
    configs,
    curves,
    robustness,
    spread,
    systems,
    tables,
    times,
)
from pl_fed.reports.answers import find_answers
from pl_fed.reports.group import Group, group_runs, main_metric
from pl_fed.reports.picture import BLACK, COLOURS, LINES, Picture, encode, encode_csv
from pl_fed.reports.privacy import describe_guarantees
from pl_fed.reports.run import Run

_SPREAD, _CLIENTS, _CLASSES = "Mean against spread", "Clients", "Classes"
_ROBUSTNESS, _DIFFERENCES = "Robustness", "Differences between the configs"
_PRIVACY = "Privacy"
_NOT_PERSONAL = {"global", "lagged_global", "smoothed", "hybrid", "hybrid_by_test_data"}
_FIGURE = '<figure id="picture-'
_MAX_NAMES = 6
_MAX_DRAWN = len(COLOURS) * len(LINES)  # more groups would have equal lines
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #111; --muted: #555; --line: #ddd;
  --strong: #888; --soft: #f4f4f4; --link: #005a8d; --warn: #a03c00; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --text: #eaeaea; --muted: #aab0b6;
  --line: #343a41; --strong: #6d757d; --soft: #20252b; --link: #7cc4f0; --warn: #ffab7a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1rem; background: var(--page);
  color: var(--text); font: 16px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem; } h3 { font-size: 1rem; margin: 1.4rem 0 .2rem; }
nav { display: flex; flex-wrap: wrap; gap: .2rem .9rem; margin: .6rem 0; }
a { color: var(--link); }
.facts { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; margin: .6rem 0; font-size: .85rem; }
.facts div { display: flex; gap: .4rem; } .facts dt { color: var(--muted); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; background:
  linear-gradient(to right, var(--page) 1rem, transparent) local,
  linear-gradient(to left, var(--page) 1rem, transparent) local,
  linear-gradient(to right, #0004, transparent .6rem),
  linear-gradient(to left, #0004, transparent .6rem); }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
thead th { border-bottom: 2px solid var(--strong); vertical-align: bottom; max-width: 9rem; }
th[scope=row] { white-space: nowrap; }
td.number { text-align: right; white-space: nowrap; } th.number { text-align: right; }
td.name { min-width: 11rem; overflow-wrap: anywhere; }
td.short { white-space: nowrap; } td.text { overflow-wrap: break-word; max-width: 22rem; }
tr.again > * { border-bottom-style: dotted; }
.swatch { display: inline-block; width: .7rem; height: .7rem; margin-right: .4rem;
  border-radius: 2px; background: currentColor; }
SWATCHES
.pictures { display: grid; gap: 0 2rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); }
figure { margin: .6rem 0 1.2rem; min-width: 0; break-inside: avoid; }
svg.picture { display: block; width: 100%; height: auto; fill: currentColor; }
svg.picture * { stroke-linejoin: round; stroke-linecap: butt; }
svg.picture text { fill: currentColor; }
svg.picture [style*="stroke: #000000"] { stroke: currentColor !important; }
svg.picture [style*="fill: #000000"] { fill: currentColor !important; }
figcaption, .note { font-size: .85rem; color: var(--muted); max-width: 46rem; }
.note { margin: .3rem 0; }
figcaption strong { color: var(--text); }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; font-size: .8rem; }
summary { cursor: pointer; padding: .2rem 0; overflow-wrap: anywhere; }
.unfinished { color: var(--warn); font-weight: 600; }
@media (max-width: 40rem) { body { padding: .6rem; }
  th, td { padding: .25rem .4rem; } td.name { min-width: 8rem; }
  th[scope=row] { position: sticky; left: 0; background: var(--page); } }
@media print { body { max-width: none; font-size: 11px; } .wide { overflow: visible; }
  nav, .files { display: none; } table { font-size: 8px; } th, td { padding: 1px 3px; } }
""".replace(
    "SWATCHES",
    "\n".join(
        f".g{place} {{ background: {'currentColor' if colour == BLACK else colour}; }}"
        for place, colour in enumerate(COLOURS)
    ),
)
_HEAD = (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    '<meta http-equiv="Content-Security-Policy"'
    " content=\"default-src 'none'; style-src 'unsafe-inline'SCRIPT\">\n"
)


def write(runs: Sequence[Run], folder: Path, skipped: Sequence[str] = ()) -> Path:
    """Write ``report.html``, and beside it each picture as PNG and its numbers as CSV.

    It removes the pictures of an earlier report in the folder once the new ones are drawn.

    Args:
        runs: The runs, at least one.
        folder: The folder of the report; created if missing.
        skipped: Sentences about folders that are left out.

    Returns:
        The path of the page.
    """
    groups = group_runs(runs)
    facts = [tables.describe_run(group, run) for group in groups for run in group.runs]
    all_runs = [run for group in groups for run in group.runs]
    files = {"runs.csv": encode_csv(facts)}
    found_answers = find_answers(groups)
    files |= {f"{answer.name}.csv": encode_csv(answer.rows) for answer in found_answers}
    chapters = {
        "Runs": tables.render_constants(groups) + tables.render_runs(groups),
        "Test results": tables.render_results(groups),
        "Answers": "".join(tables.render_answer(answer) for answer in found_answers),
        **{title: _render(pictures, files) for title, pictures in _pictures(groups).items()},
        _DIFFERENCES: tables.render_differences(groups) if len(facts) > 1 else "",
        "Configs": tables.render_configs(groups),
    }
    chapters[_PRIVACY] += "".join(map(render_note, describe_guarantees(all_runs)))
    for title in (_SPREAD, _CLIENTS):
        chapters[title] += _note_missing_metric(groups) if chapters[title] else ""
    chapters[_CLASSES] += _note_missing_classes(groups)
    if missing := robustness.list_missing_groups(groups):
        chapters[_ROBUSTNESS] += render_note(f"Not shown here: {missing}.")
    text = encode(render_page(_title(groups), _notes(groups, skipped), chapters))
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    _remove_pictures(page)
    for name, content in {**files, page.name: text}.items():
        (folder / name).write_bytes(content)
    return page


def _pictures(groups: Sequence[Group]) -> dict[str, Iterator[Picture]]:
    drawn = groups[:_MAX_DRAWN]
    return {
        _SPREAD: spread.draw_spread(drawn),
        _ROBUSTNESS: robustness.draw_robustness(groups),
        _CLIENTS: clients.draw_distributions(drawn),
        "Gains over local training": clients.draw_gains(drawn),
        _CLASSES: classes.draw_class_accuracy(drawn),
        "Validation over rounds": curves.draw_validation(drawn),
        "Validation over simulated time": systems.draw_simulated_time(drawn),
        "Training loss": curves.draw_training_loss(drawn),
        "Uploads": curves.draw_uploads(drawn),
        _PRIVACY: curves.draw_privacy(drawn),
        "Time": times.draw_round_times(drawn),
    }


def render_page(
    title: str, notes: Sequence[str], chapters: Mapping[str, str], style: str = "", script: str = ""
) -> str:
    """Return a page that needs no other file.

    Args:
        title: The title.
        notes: The sentences at the top.
        chapters: The HTML of each chapter by its title; empty ones are left out.
        style: Further CSS.
        script: JavaScript; the page runs no other.
    """
    contents = {name: content for name, content in chapters.items() if content}
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>\n' for name in contents)
    sections = "".join(
        f'<section id="{_anchor(name)}">\n<h2>{name}</h2>\n{content}</section>\n'
        for name, content in contents.items()
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head = _HEAD.replace("SCRIPT", f"; script-src 'sha256-{digest}'" if script else "")
    element = f"<script>{script}</script>\n" if script else ""
    return (
        f"{head}<title>{html.escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n"
        f"<body>\n<h1>{html.escape(title)}</h1>\n{''.join(map(render_note, notes))}<nav>\n{links}"
        f"</nav>\n{sections}{element}</body>\n</html>\n"
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def render_note(text: str) -> str:
    """Return the HTML of a sentence to the reader."""
    return f'<p class="note">{html.escape(text)}</p>\n'


def _title(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    names = list(dict.fromkeys(configs.algorithm(group.config) for group in groups if group.config))
    subject = ", ".join(names[:_MAX_NAMES]) or runs[0].name
    more = ", …" if len(names) > _MAX_NAMES else ""
    return f"{len(runs)} run{'s' if len(runs) > 1 else ''}: {subject}{more}"


def _notes(groups: Sequence[Group], skipped: Sequence[str]) -> list[str]:
    """Return the notes at the top of the page."""
    notes = []
    if any(len(group.runs) > 1 for group in groups):
        notes.append(
            "Runs that differ only in the seed are one group. Tables show the mean over its runs"
            " ± one standard deviation (n − 1); pictures show the mean and the range."
        )
    if repeated := [group for group in groups if group.has_repeated_seeds]:
        names = ", ".join(f"{group.title} ({group.seeds})" for group in repeated)
        notes.append(
            f"Repeated runs of one seed: {names}. Means, deviations and curves take their mean as"
            " the seed's result, and comparisons of clients take the first of them."
        )
    if len(groups) > _MAX_DRAWN:
        notes.append(
            f"Pictures show the first {_MAX_DRAWN} of {len(groups)} groups, which have different"
            " lines; tables and the pictures of robustness show all. To draw other groups, name"
            " their folders."
        )
    diverged = [run.name for group in groups for run in group.runs if run.is_diverged]
    if diverged:
        notes.append(f"Diverged runs (NaN or infinity), without a test: {', '.join(diverged)}.")
    unfinished = [run.name for group in groups for run in group.runs if not run.is_finished]
    if unfinished:
        notes.append(f"Unfinished runs, shown with their results so far: {', '.join(unfinished)}.")
    damaged = [run for group in groups for run in group.runs if run.damage]
    notes += [f"Damaged data, left out: {run.name}: {', '.join(run.damage)}." for run in damaged]
    counts = {run.name: run.rounds_without_step for group in groups for run in group.runs}
    if texts := [f"{count} in {name}" for name, count in counts.items() if count]:
        notes.append(f"Rounds without a step, because the cohort was small: {', '.join(texts)}.")
    notes += _note_untrained([run for group in groups for run in group.runs])
    notes += [f"Not shown: {sentence}" for sentence in skipped]
    return [*notes, "All numbers are over benign clients; Byzantine clients are left out."]


def _note_untrained(runs: Sequence[Run]) -> list[str]:
    """Return notes on the runs with personal models of clients that never took part."""
    counts: dict[bool, list[str]] = {}
    for run in runs:
        if run.untrained_clients and not _NOT_PERSONAL.issuperset(run.models("test")):
            replaced = configs.flatten(run.config).get("federation.untrained_models") == "global"
            count = f"{run.untrained_clients} of {int(run.benign.sum())} in {run.name}"
            counts.setdefault(replaced, []).append(count)
    remarks = {
        False: "Personal models that they keep between rounds were never trained, but count in the"
        " metrics: compare trained clients. Personal models made from the global model before each"
        " evaluation are not affected.",
        True: "The global model replaces their personal models.",
    }
    return [
        f"Benign clients that never took part: {', '.join(counts[replaced])}. {remark}"
        for replaced, remark in remarks.items()
        if replaced in counts
    ]


def _note_missing_classes(groups: Sequence[Group]) -> str:
    """Return a note on tested classification runs without a table of classes."""
    return _note_missing(
        "per_class.csv",
        (
            run.name
            for group in groups
            for run in group.tested_runs
            if not run.classes and any(name.endswith("/accuracy") for name in run.metrics)
        ),
    )


def _note_missing_metric(groups: Sequence[Group]) -> str:
    """Return a note on finished runs without the main metric, such as accuracy of a regression."""
    metric = main_metric(groups, "test")
    return _note_missing(
        f"test {metric}",
        (
            run.name
            for group in groups
            for run in group.runs
            if run.is_finished
            and not any(f"test/{model}/{metric}" in run.metrics for model in run.models("test"))
        ),
    )


def _note_missing(item: str, names: Iterable[str]) -> str:
    """Return a note on runs that lack an item, by name, or an empty string."""
    runs = ", ".join(names)
    return render_note(f"Not shown here, without {item}: {runs}.") if runs else ""


# Pictures


def _remove_pictures(page: Path) -> None:
    """Remove the PNG and CSV files of the pictures and answers on a page."""
    text = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    for name in re.findall(f'{_FIGURE}([^"/]+)"', text):
        for suffix in ("png", "csv"):
            (page.parent / f"{name}.{suffix}").unlink(missing_ok=True)
    for name in re.findall(r'<h3>[^<]* <span class="files"><a href="(\w+\.csv)"', text):
        (page.parent / name).unlink(missing_ok=True)


def _render(pictures: Iterator[Picture], files: dict[str, bytes]) -> str:
    """Return the HTML of pictures beside each other, below their captions without repetition.

    Args:
        pictures: The pictures, which are drawn one after the other.
        files: The contents of files by name; the files of the pictures are added.
    """
    captions: dict[str, None] = {}
    figures = []
    for picture in pictures:
        files |= picture.files()
        captions[picture.caption] = None
        figures.append(render_figure(picture))
    notes, content = "".join(map(render_note, captions)), "".join(figures)
    return f'{notes}<div class="pictures">\n{content}</div>\n' if figures else ""


def render_figure(picture: Picture, folder: str = "") -> str:
    """Return the HTML of a picture with its title and links to its files.

    Args:
        picture: The picture.
        folder: The folder of the files below that of the page, with a slash at its end.
    """
    title = f"<strong>{html.escape(picture.title)}</strong>"
    return (
        f'{_FIGURE}{picture.stem}">\n<figcaption>{title}'
        f" {render_links(picture, folder)}</figcaption>\n"
        f"{picture.inline_svg()}\n{render_note(picture.note) if picture.note else ''}</figure>\n"
    )


def render_links(picture: Picture, folder: str = "") -> str:
    """Return links to the files of a picture.

    Args:
        picture: The picture.
        folder: The folder of the files below that of the page, with a slash at its end.
    """
    return (
        f'<span class="files"><a href="{folder}{picture.stem}.png">PNG</a>'
        f' <a href="{folder}{picture.stem}.csv">CSV</a></span>'
    )
