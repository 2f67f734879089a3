"""One page about runs, which needs nothing but itself: tables, pictures, configs."""

import base64
import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from pl_fed.reports import classes, clients, configs, curves, robustness, spread, tables, times
from pl_fed.reports.group import Group, grouped
from pl_fed.reports.picture import Picture, write_csv
from pl_fed.reports.run import Run

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
td.name { min-width: 8rem; overflow-wrap: anywhere; }
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

    Args:
        runs: The runs, at least one.
        folder: Where; it is made if need be.
        skipped: Sentences about what could not be shown.

    Returns:
        The page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups = grouped(runs)
    write_csv(
        folder / "runs.csv", [tables.facts(group, run) for group in groups for run in group.runs]
    )
    parts = [_head(groups, skipped), _section("Runs", tables.of_runs(groups), "runs")]
    parts.append(_section("Test results", tables.of_results(groups), "results"))
    for title, pictures in _chapters(groups).items():
        shown = []
        for picture in pictures:
            picture.write(folder)
            shown.append(picture)
        missing = _missing(title, groups)
        if shown or missing:
            parts.append(_section(title, _figures(shown) + missing, _anchor(title)))
    parts.append(
        _section("What differs between the configs", tables.of_differences(groups), "differences")
    )
    parts.append(_section("Configs", tables.of_configs(groups), "configs"))
    page = folder / "report.html"
    text = f"{_HEAD}{''.join(parts)}</body>\n</html>\n"
    page.write_text(text, encoding="utf-8")
    return page


def _chapters(groups: Sequence[Group]) -> dict[str, Iterator[Picture]]:
    return {
        "Mean against spread": spread.against_spread(groups),
        "Robustness": robustness.against_fraction(groups),
        "Clients": clients.distributions(groups),
        _CLASSES: classes.by_class(groups),
        "Validation over rounds": curves.validation(groups),
        "Training loss": curves.training(groups),
        "Uploads": curves.uploads(groups),
        "Time": times.of_rounds(groups),
    }


_CLASSES = "Classes"


def _missing(title: str, groups: Sequence[Group]) -> str:
    """Say which runs have no table of classes, though they have classes."""
    if title != _CLASSES:
        return ""
    lacking = [
        run.name
        for group in groups
        for run in group.tested
        if not run.classes and any(name.endswith("/accuracy") for name in run.metrics)
    ]
    if not lacking:
        return ""
    text = f"Without per_class.csv, so not shown here: {', '.join(lacking)}."
    return f'<p class="note">{html.escape(text)}</p>\n'


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _section(title: str, content: str, anchor: str) -> str:
    return f'<section id="{anchor}">\n<h2>{html.escape(title)}</h2>\n{content}</section>\n'


def _head(groups: Sequence[Group], skipped: Sequence[str]) -> str:
    runs = [run for group in groups for run in group.runs]
    names = list(dict.fromkeys(configs.algorithm(group.config) for group in groups if group.config))
    title = f"{_count(len(runs), 'run')}: {', '.join(names[:6]) or runs[0].name}"
    title += ", …" if len(names) > 6 else ""
    notes = []
    if len(groups) < len(runs):
        notes.append(
            "Runs that differ in nothing but the seed are one group: means over its runs, with ±"
            " one standard deviation over runs (n − 1) in tables, and their range in pictures."
        )
    unfinished = [run.name for run in runs if not run.tested]
    if unfinished:
        notes.append(f"Unfinished, shown with what they have: {', '.join(unfinished)}.")
    notes += [f"Not shown: {each}" for each in skipped]
    notes.append("Numbers are over benign clients: byzantine ones are left out everywhere.")
    text = "".join(f'<p class="note">{html.escape(note)}</p>\n' for note in notes)
    return (
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{text}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


# Pictures


def _figures(pictures: Sequence[Picture]) -> str:
    """Return pictures beside each other, and what their captions have in common above them."""
    captions = list(dict.fromkeys(picture.caption for picture in pictures))
    text = "".join(f'<p class="note">{html.escape(caption)}</p>\n' for caption in captions)
    figures = "".join(map(_figure, pictures))
    return f'{text}<div class="pictures">\n{figures}</div>\n'


def _figure(picture: Picture) -> str:
    """Return a picture with its title and links to its files."""
    source = f"data:image/svg+xml;base64,{base64.b64encode(picture.svg()).decode()}"
    width = picture.width
    least = min(width, 520)  # a narrower page is scrolled: letters stay readable
    return (
        f'<figure id="{picture.name}">\n<figcaption><strong>{html.escape(picture.title)}</strong>'
        f' <span class="files"><a href="{picture.name}.png">PNG</a>'
        f' <a href="{picture.name}.csv">CSV</a></span></figcaption>\n'
        f'<div class="wide"><img alt="{html.escape(picture.alt)}" src="{source}"'
        f' style="width:{width}px;max-width:max(100%,{least}px)"></div>\n</figure>\n'
    )
