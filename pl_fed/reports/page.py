"""One page about runs, which needs nothing but itself: tables, pictures, configs."""

import base64
import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pl_fed.reports import classes, clients, configs, curves, robustness, spread, tables, times
from pl_fed.reports.group import Group, grouped, measure_of
from pl_fed.reports.picture import Picture, as_csv, encoded
from pl_fed.reports.run import Run

_SPREAD, _CLIENTS, _CLASSES = "Mean against spread", "Clients", "Classes"
_ROBUSTNESS = "Robustness"
_NOT_PERSONAL = {"global", "lagged_global", "hybrid", "hybrid_by_test_data"}
_FIGURE = '<figure id="picture-'
_MOST_NAMES = 6
_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 82rem; padding: 1rem; background: #fff; color: #111;
  font: 16px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; margin: .5rem 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
nav a { margin-right: .9rem; } a { color: #005a8d; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #888; } th[scope=row] { border-bottom: 1px solid #ddd; }
td.number { text-align: right; white-space: nowrap; }
td.name { min-width: 12rem; overflow-wrap: anywhere; }
tr.single td, tr.single th { color: #555; font-weight: normal; }
tr.single th { padding-left: 1.6rem; }
.pictures { display: flex; flex-wrap: wrap; gap: 0 2rem; align-items: flex-start; }
figure { margin: .6rem 0 1.2rem; max-width: 100%; break-inside: avoid; }
figure img { display: block; height: auto; }
figcaption, .note { font-size: .85rem; color: #333; max-width: 46rem; }
.note { margin: .3rem 0; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .8rem; }
summary { cursor: pointer; padding: .2rem 0; }
.unfinished { color: #a03c00; font-weight: 600; }
@media print { body { max-width: none; font-size: 11px; } .wide { overflow: visible; }
  figure img { max-width: 100% !important; } nav, .files { display: none; }
  table { font-size: 8px; } th, td { padding: 1px 3px; } }
"""
_HEAD = (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    '<meta http-equiv="Content-Security-Policy"'
    " content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
)


def write(runs: Sequence[Run], folder: Path, skipped: Sequence[str] = ()) -> Path:
    """Write ``report.html``, and beside it each picture as PNG and its numbers as CSV.

    The pictures of a report that was there are removed once those of this one are drawn.

    Args:
        runs: The runs, at least one.
        folder: Where; it is made if need be.
        skipped: Sentences about what could not be shown.

    Returns:
        The page.
    """
    groups = grouped(runs)
    facts = [tables.facts(group, run) for group in groups for run in group.runs]
    files = {"runs.csv": as_csv(facts)}
    chapters = {
        "Runs": tables.of_runs(groups),
        "Test results": tables.of_results(groups),
        **{title: _drawn(drawn, files) for title, drawn in _pictures(groups).items()},
        "What differs between the configs": tables.of_differences(groups),
        "Configs": tables.of_configs(groups),
    }
    for title in (_SPREAD, _CLIENTS):
        chapters[title] += _without_measure(groups) if chapters[title] else ""
    chapters[_CLASSES] += _without_classes(groups)
    if missing := robustness.left_out(groups):
        chapters[_ROBUSTNESS] += _note(f"Not shown here: {missing}.")
    text = encoded(_page(_title(groups), _notes(groups, skipped), chapters))
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    _remove_pictures(page)
    for name, content in {**files, page.name: text}.items():
        (folder / name).write_bytes(content)
    return page


def _pictures(groups: Sequence[Group]) -> dict[str, Iterator[Picture]]:
    return {
        _SPREAD: spread.against_spread(groups),
        _ROBUSTNESS: robustness.against_fraction(groups),
        _CLIENTS: clients.distributions(groups),
        _CLASSES: classes.by_class(groups),
        "Validation over rounds": curves.validation(groups),
        "Training loss": curves.training(groups),
        "Uploads": curves.uploads(groups),
        "Time": times.of_rounds(groups),
    }


def _page(title: str, notes: Sequence[str], chapters: Mapping[str, str]) -> str:
    shown = {name: content for name, content in chapters.items() if content}
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>\n' for name in shown)
    sections = "".join(
        f'<section id="{_anchor(name)}">\n<h2>{name}</h2>\n{content}</section>\n'
        for name, content in shown.items()
    )
    return (
        f"{_HEAD}<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{''.join(map(_note, notes))}<nav>\n{links}</nav>\n"
        f"{sections}</body>\n</html>\n"
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>\n'


def _title(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    names = list(dict.fromkeys(configs.algorithm(group.config) for group in groups if group.config))
    what = ", ".join(names[:_MOST_NAMES]) or runs[0].name
    more = ", …" if len(names) > _MOST_NAMES else ""
    return f"{len(runs)} run{'s' if len(runs) > 1 else ''}: {what}{more}"


def _notes(groups: Sequence[Group], skipped: Sequence[str]) -> list[str]:
    """Return what is to be known before anything is read."""
    notes = []
    if any(len(group.runs) > 1 for group in groups):
        notes.append(
            "Runs that differ in nothing but the seed are one group: means over its runs, with ±"
            " one standard deviation over runs (n − 1) in tables, and their range in pictures."
        )
    unfinished = [run.name for group in groups for run in group.runs if not run.finished]
    if unfinished:
        notes.append(f"Unfinished, shown with what they have: {', '.join(unfinished)}.")
    damaged = [run for group in groups for run in group.runs if run.damage]
    notes += [f"Damaged, and left out: {run.name}: {', '.join(run.damage)}." for run in damaged]
    notes += _without_training([run for group in groups for run in group.runs])
    notes += [f"Not shown: {each}" for each in skipped]
    return [*notes, "Numbers are over benign clients: byzantine ones are left out everywhere."]


def _without_training(runs: Sequence[Run]) -> list[str]:
    """Return a note on the runs whose personal models are partly of clients never trained."""
    counts = ", ".join(
        f"{run.untrained_clients} of {int(run.benign.sum())} in {run.name}"
        for run in runs
        if run.untrained_clients and not _NOT_PERSONAL.issuperset(run.models("test"))
    )
    if not counts:
        return []
    return [
        f"Benign clients that never took part: {counts}. A personal model that such a client keeps"
        " was never trained, and counts in the metrics all the same; one that is made from the"
        " global model before an evaluation is not affected."
    ]


def _without_classes(groups: Sequence[Group]) -> str:
    """Say which runs have no table of classes, though they have classes."""
    return _without(
        "per_class.csv",
        (
            run.name
            for group in groups
            for run in group.tested
            if not run.classes and any(name.endswith("/accuracy") for name in run.metrics)
        ),
    )


def _without_measure(groups: Sequence[Group]) -> str:
    """Say which finished runs lack what clients' tests are shown by: losses, beside accuracies."""
    measure = measure_of(groups, "test")
    return _without(
        f"test {measure}",
        (
            run.name
            for group in groups
            for run in group.runs
            if run.finished
            and not any(f"test/{model}/{measure}" in run.metrics for model in run.models("test"))
        ),
    )


def _without(what: str, names: Iterable[str]) -> str:
    found = ", ".join(names)
    return _note(f"Without {what}, so not shown here: {found}.") if found else ""


# Pictures


def _remove_pictures(page: Path) -> None:
    """Remove the files of the pictures that a page shows."""
    text = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    for name in re.findall(f'{_FIGURE}([^"/]+)"', text):
        for suffix in ("png", "csv"):
            (page.parent / f"{name}.{suffix}").unlink(missing_ok=True)


def _drawn(pictures: Iterator[Picture], files: dict[str, bytes]) -> str:
    """Return pictures beside each other, below what their captions have in common.

    They are drawn one after the other, and their files are added to those given.
    """
    captions: dict[str, None] = {}
    figures = []
    for picture in pictures:
        files |= picture.files()
        captions[picture.caption] = None
        figures.append(_figure(picture))
    notes, shown = "".join(map(_note, captions)), "".join(figures)
    return f'{notes}<div class="pictures">\n{shown}</div>\n' if figures else ""


def _figure(picture: Picture) -> str:
    """Return a picture with its title and links to its files."""
    source = f"data:image/svg+xml;base64,{base64.b64encode(picture.svg()).decode()}"
    width = picture.width
    title = f"<strong>{html.escape(picture.title)}</strong>"
    least = min(width, 520)  # a narrower page is scrolled: letters stay readable
    return (
        f'{_FIGURE}{picture.stem}">\n<figcaption>{title}'
        f' <span class="files"><a href="{picture.stem}.png">PNG</a>'
        f' <a href="{picture.stem}.csv">CSV</a></span></figcaption>\n'
        f'<div class="wide"><img alt="{html.escape(picture.alt)}" src="{source}"'
        f' style="width:{width}px;max-width:max(100%,{least}px)"></div>\n</figure>\n'
    )
