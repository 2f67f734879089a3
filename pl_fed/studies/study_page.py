"""The page of a study's report: one file, which reads without JavaScript and filters with it."""

import html
from collections.abc import Iterator, Mapping, Sequence

from pl_fed.reports.page import render_figure, render_note, render_page
from pl_fed.reports.picture import Picture, encode_csv
from pl_fed.studies.comparison import MetricComparison
from pl_fed.studies.tables import Table, describe_metric, name_files

_NARROW = 600  # width of a picture that fits a small screen, in CSS pixels
_SMALLEST = 0.75  # of the width of a wider one

_STYLE = """
.choosers { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; padding: .5rem 0; position: sticky;
  top: 0; background: var(--page); z-index: 1; font-size: .85rem; }
.choosers[hidden], .copy[hidden], [hidden] { display: none; }
.choosers select { max-width: 16rem; }
select, button { font: inherit; color: var(--text); background: var(--soft);
  border: 1px solid var(--strong); border-radius: 4px; padding: .15rem .5rem; }
.copy { display: flex; flex-wrap: wrap; gap: .4rem; margin: .5rem 0; font-size: .85rem; }
td.number, th.number { white-space: nowrap; } tbody th { font-weight: 600; }
td.open { color: var(--warn); font-weight: 600; }
.study th[scope=row] { max-width: 16rem; white-space: normal; }
"""

_SCRIPT = """
const all = (query, root) => [...(root || document).querySelectorAll(query)];
function choose() {
  const metric = document.querySelector("#metric");
  all("[data-metric]").forEach(part =>
    part.hidden = metric.value !== "" && part.dataset.metric !== metric.value);
  const hidden = {method: new Set(), condition: new Set()};
  all("select[data-side]").forEach(select => {
    const text = select.selectedOptions[0].dataset.hides;
    (text ? text.split(" ") : []).forEach(place => hidden[select.dataset.side].add(place));
  });
  all("[data-method], [data-condition]").forEach(cell => cell.hidden =
    hidden.method.has(cell.dataset.method) || hidden.condition.has(cell.dataset.condition));
}
function copy(button) {
  const text = document.getElementById(button.dataset.copy).textContent;
  const done = () => { const name = button.textContent; button.textContent = "Copied";
    setTimeout(() => button.textContent = name, 1200); };
  const byHand = () => { const area = document.createElement("textarea"); area.value = text;
    document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
    done(); };
  if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, byHand); else byHand();
}
all(".choosers, .copy").forEach(part => part.hidden = false);
all(".choosers select").forEach(select => select.addEventListener("change", choose));
all("button[data-copy]").forEach(button => button.addEventListener("click", () => copy(button)));
"""


def render_report(
    name: str,
    notes: Sequence[str],
    comparisons: Sequence[MetricComparison],
    tables: Sequence[Table],
    tests: Sequence[Table],
    tuned: Sequence[Table],
    pictures: Sequence[Picture],
    cells: Sequence[Mapping[str, str]],
) -> str:
    """Return the page of a study.

    Args:
        name: The name of the study.
        notes: The sentences at the top.
        comparisons: The comparisons of the methods by each metric.
        tables: The table of each metric.
        tests: The table of paired comparisons by each metric.
        tuned: The table of tuning, if the study tunes.
        pictures: The pictures of all metrics.
        cells: The cells that are not done, with their states.
    """
    parts = {
        item.metric: _render_table(table, item) + _render_tests(test, item)
        for item, table, test in zip(comparisons, tables, tests)
    }
    results = "".join(
        f'<div data-metric="{html.escape(metric)}">\n{part}</div>\n'
        for metric, part in parts.items()
    )
    drawn = "".join(
        f'<div data-metric="{html.escape(item.metric)}">\n'
        f"{_render_pictures(item, pictures)}</div>\n"
        for item in comparisons
    )
    chapters = {
        "Cells without a number": _render_cells(cells),
        "Results": _render_choosers(comparisons) + results,
        "Pictures": drawn,
        "Tuned equally": "".join(_render_table(table, None) for table in tuned),
    }
    return render_page(f"Study {name}", notes, chapters, _STYLE, _SCRIPT)


def _render_cells(cells: Sequence[Mapping[str, str]]) -> str:
    """Return the table of the cells that are missing, failed, diverged or unfinished."""
    if not cells:
        return ""
    header = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in cells[0])
    rows = ""
    for cell in cells:
        texts = [
            f'<td class="{"open" if column == "status" else "text"}">{html.escape(text)}</td>'
            for column, text in cell.items()
        ]
        rows += f"<tr>{''.join(texts)}</tr>\n"
    table = f"<table>\n<thead><tr>{header}</tr></thead>\n<tbody>\n{rows}</tbody></table>"
    summary = f"{len(cells)} cells are not done"
    return (
        f"<details{' open' if len(cells) <= 12 else ''}><summary>{summary}</summary>\n"
        f'<div class="wide" tabindex="0" role="region" aria-label="table">{table}</div></details>\n'
    )


def _render_choosers(comparisons: Sequence[MetricComparison]) -> str:
    """Return the choosers of metric and axis values; hidden until the script runs."""
    options = "".join(
        f'<option value="{html.escape(item.metric)}">{html.escape(describe_metric(item.metric))}'
        "</option>"
        for item in comparisons
    )
    choosers = (
        f'<label>metric <select id="metric"><option value="">all</option>{options}</select></label>'
    )
    for axis, side, hides in _list_axes(comparisons[0]):
        labels = "".join(
            f'<option data-hides="{" ".join(map(str, places))}">{html.escape(label)}</option>'
            for label, places in hides.items()
        )
        choosers += (
            f'<label>{html.escape(axis)} <select data-side="{side}"><option>all</option>{labels}'
            "</select></label>"
        )
    note = "Choosers show a part of the tables; worst cases, ranks and copies stay those of all."
    return f'<div class="choosers" hidden>{choosers}</div>\n{render_note(note)}'


def _list_axes(comparison: MetricComparison) -> Iterator[tuple[str, str, dict[str, list[int]]]]:
    """Yield each axis, its side of the tables, and the places that each of its labels hides."""
    layout = comparison.layout
    sides = {
        "method": (layout.method_axes, layout.methods, 0),
        "condition": (layout.condition_axes, layout.conditions, 1),
    }
    for side, (axes, names, part) in sides.items():
        labels = {key[part]: entry.labels for key, entry in comparison.entries.items()}
        for axis in axes:
            values = dict.fromkeys(labels[name][axis] for name in names)
            if len(values) > 1:
                hides = {
                    value: [p for p, name in enumerate(names) if labels[name][axis] != value]
                    for value in values
                }
                yield axis, side, hides


def _render_table(table: Table, comparison: MetricComparison | None) -> str:
    """Return a table with its notes, and its LaTeX, markdown and CSV to copy."""
    places = _number_names(comparison)
    rows, columns = range(len(table.rows)), range(1, len(table.header))
    head = "".join(
        f'<th scope="col" class="{"number" if place else "text"}"'
        f"{_describe_line(table, [(row, place) for row in rows], places)}>{html.escape(name)}</th>"
        for place, name in enumerate(table.header)
    )
    body = ""
    for row, (heading, *texts) in enumerate(table.rows):
        sides = [_describe_cell(table.cells.get((row, c + 1)), places) for c in range(len(texts))]
        cells = "".join(
            f'<td class="{"number" if comparison else "text"}{" open" if _is_open(text) else ""}"'
            f"{side}>{html.escape(text)}</td>"
            for text, side in zip(texts, sides)
        )
        line = _describe_line(table, [(row, place) for place in columns], places)
        body += f'<tr{line}><th scope="row">{html.escape(heading)}</th>{cells}</tr>\n'
    notes = "".join(map(render_note, table.notes))
    return (
        f'<h3>{html.escape(table.title)}</h3>\n<div class="wide study" tabindex="0" role="region"'
        f' aria-label="table"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>'
        f"</table></div>\n{_render_copies(table)}{notes}"
    )


def _is_open(text: str) -> bool:
    return "diverged" in text or text == "no result"


def _number_names(comparison: MetricComparison | None) -> dict[str, dict[str, int]]:
    """Return the places of methods and conditions, by side."""
    if comparison is None:
        return {"method": {}, "condition": {}}
    layout = comparison.layout
    return {
        "method": {name: place for place, name in enumerate(layout.methods)},
        "condition": {name: place for place, name in enumerate(layout.conditions)},
    }


def _describe_cell(names: Sequence[str] | None, places: Mapping[str, Mapping[str, int]]) -> str:
    """Return the attributes by which the script hides a cell."""
    return "".join(
        f' data-{side}="{places[side][name]}"'
        for side, name in zip(("method", "condition"), names or ())
        if name in places[side]
    )


def _describe_line(
    table: Table, line: Sequence[tuple[int, int]], places: Mapping[str, Mapping[str, int]]
) -> str:
    """Return the attributes that all cells of a row or column share."""
    names = [table.cells[place] for place in line if place in table.cells]
    shared = [next(iter(set(side))) if len(set(side)) == 1 else "" for side in zip(*names)]
    return _describe_cell(shared, places)


def _render_tests(table: Table, comparison: MetricComparison) -> str:
    """Return the folded table of paired comparisons."""
    if not table.rows:
        return ""
    content = _render_table(table, comparison)
    summary = f"Paired comparisons ({len(table.rows)})"
    return f"<details><summary>{summary}</summary>\n{content}</details>\n"


def _render_copies(table: Table) -> str:
    """Return the texts of a table to copy, and their buttons."""
    texts = {
        "LaTeX": table.latex(),
        "markdown": table.markdown(),
        "CSV": encode_csv(table.records).decode(),
    }
    buttons, folds = "", ""
    for kind, text in texts.items():
        name = f"{table.name}-{kind.lower()}"
        buttons += f'<button type="button" data-copy="{name}">Copy {kind}</button>'
        folds += (
            f'<details><summary>{kind}</summary><pre id="{name}">{html.escape(text)}</pre>'
            "</details>\n"
        )
    return f'<div class="copy" hidden>{buttons}</div>\n{folds}'


def _render_pictures(comparison: MetricComparison, pictures: Sequence[Picture]) -> str:
    """Return the pictures of a metric, each with its caption."""
    stem = name_files(comparison.metric)
    members = [
        picture
        for picture in pictures
        if picture.name in (f"heat_map_{stem}", f"ranks_{stem}", f"front_{stem}")
    ]
    return "".join(_render_picture(picture) for picture in members)


def _render_picture(picture: Picture) -> str:
    """Return a picture with its caption; on a narrow screen, a wide one scrolls."""
    figure = f"{render_figure(picture, 'pictures/')}{render_note(picture.caption)}"
    if picture.width <= _NARROW:
        return figure
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="picture">'
        f'<div style="min-width: {round(_SMALLEST * picture.width)}px">{figure}</div></div>\n'
    )
