"""The page of a study's report: one file, which reads without JavaScript and filters with it."""

import html
from collections.abc import Iterator, Mapping, Sequence

from pl_fed.reports.page import render_figure, render_links, render_note, render_page
from pl_fed.reports.picture import Picture
from pl_fed.studies.comparison import NO_VALUE, MetricComparison
from pl_fed.studies.fronts import render_fronts
from pl_fed.studies.heat_map import name_length, render_heat_map
from pl_fed.studies.pictures import find_worst10
from pl_fed.studies.tables import NO_RESULT, CellPlace, Table, name_files, split_metric
from pl_fed.text import format_csv

_STYLE = """
#choose { position: sticky; top: 0; z-index: 2; background: var(--page); }
#choose h2, nav a[href="#choose"] { display: none; }
.choosers { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; padding: .5rem 0; font-size: .85rem;
  border-bottom: 1px solid var(--line); }
[hidden] { display: none !important; }
.choosers select { max-width: 16rem; }
select, button { font: inherit; color: var(--text); background: var(--soft);
  border: 1px solid var(--strong); border-radius: 4px; padding: .15rem .5rem; }
.copy { display: flex; flex-wrap: wrap; gap: .4rem; margin: .5rem 0; font-size: .85rem; }
tbody th { font-weight: 600; }
.study thead th { white-space: normal; overflow-wrap: break-word; min-width: 4.5rem; }
.long { max-height: 36rem; overflow: auto; border: 1px solid var(--line); }
.long thead { position: sticky; top: 0; z-index: 1; background: var(--page); }
@media print { .long { max-height: none; } }
td.open { color: var(--warn); font-weight: 600; }
.study th[scope=row] { max-width: 16rem; white-space: normal; }
.heat td { text-align: center; min-width: 3rem; border: 1px solid var(--page); }
.heat thead th { text-align: center; }
.heat .hatched { background:
  repeating-linear-gradient(45deg, var(--line) 0 2px, transparent 2px 7px); }
.facets { display: grid; gap: .4rem .8rem;
  grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); }
.facets figure { margin: 0; max-width: 22rem; display: flex; flex-direction: column;
  justify-content: flex-end; }
.facets figcaption { text-align: center; overflow-wrap: anywhere; color: var(--text); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .4rem 0; font-size: .85rem; }
.panel { width: 100%; height: auto; display: block; fill: currentColor; font-size: 11px; }
.panel .grid { stroke: var(--line); } .panel .axis { stroke: var(--strong); fill: none; }
@media (max-width: 40rem) { #choose { position: static; } .choosers label { width: 100%; }
  .facets { grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); } }
"""

_SCRIPT = """
const all = (query, root) => [...(root || document).querySelectorAll(query)];
const hide = (part, isHidden) => part.toggleAttribute("hidden", isHidden);
const isShown = part => !part.hasAttribute("hidden");
function choose() {
  const chosen = name => { const select = document.getElementById(name);
    return select ? select.value : ""; };
  const differs = (value, own) => value !== "" && value !== own;
  all("[data-metric]").forEach(part => hide(part,
    differs(chosen("metric"), part.dataset.name) || differs(chosen("model"), part.dataset.model)));
  const hidden = {method: new Set(), condition: new Set()};
  all("select[data-side]").forEach(select => {
    const text = select.selectedOptions[0].dataset.hides;
    (text ? text.split(" ") : []).forEach(place => hidden[select.dataset.side].add(place));
  });
  all("[data-method], [data-condition]").forEach(part => hide(part,
    (part.dataset.method || " ").split(" ").every(place => hidden.method.has(place)) ||
    hidden.condition.has(part.dataset.condition)));
  all(".study table").forEach(hideEmptyLines);
  all(".facet").filter(isShown).forEach(facet =>
    hide(facet, all("[data-method]", facet).length > 0 &&
      !all("[data-method]", facet).some(isShown)));
}
function hideEmptyLines(table) {
  const rows = [...table.tBodies[0].rows].filter(isShown);
  const isEmpty = cells => cells.every(cell => !isShown(cell) || cell.textContent === "");
  rows.forEach(row => hide(row, isEmpty([...row.cells].slice(1))));
  const shown = rows.filter(isShown);
  [...table.tHead.rows[0].cells].slice(1).forEach((head, place) => {
    if (isShown(head) && isEmpty(shown.map(row => row.cells[place + 1])))
      [head, ...shown.map(row => row.cells[place + 1])].forEach(cell => hide(cell, true));
  });
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
    gains: Sequence[Table] = (),
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
        gains: The table of gains over local training, if the study has local runs.
    """
    results = "".join(
        _mark_metric(item, _render_table(table, item, place == 0) + _render_tests(test, item))
        for place, (item, table, test) in enumerate(zip(comparisons, tables, tests))
    )
    captions: set[str] = set()
    drawn = "".join(
        _mark_metric(
            item, _render_pictures(item, find_worst10(item, comparisons), pictures, captions)
        )
        for item in comparisons
    )
    chapters = {
        "Cells without a number": _render_cells(cells),
        "Choose": _render_choosers(comparisons),
        "Results": results,
        "Gains over local training": "".join(_render_table(g, comparisons[0]) for g in gains),
        "Pictures": drawn,
        "Tuned equally": "".join(_render_table(table, None) for table in tuned),
    }
    return render_page(f"Study {name}", notes, chapters, _STYLE, _SCRIPT)


def _mark_metric(comparison: MetricComparison, content: str) -> str:
    """Return content about a metric, with attributes for the choosers."""
    _, model, name = split_metric(comparison.metric)
    attributes = {"metric": comparison.metric, "model": model, "name": name}
    texts = "".join(f' data-{key}="{html.escape(text)}"' for key, text in attributes.items())
    return f"<div{texts}>\n{content}</div>\n"


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
    summary = "1 cell is not done" if len(cells) == 1 else f"{len(cells)} cells are not done"
    return (
        f"<details{' open' if len(cells) <= 12 else ''}><summary>{summary}</summary>\n"
        f'<div class="wide" tabindex="0" role="region" aria-label="table">{table}</div></details>\n'
    )


def _render_choosers(comparisons: Sequence[MetricComparison]) -> str:
    """Return the choosers of model, metric and axis values; hidden until the script runs."""
    parts = [split_metric(item.metric) for item in comparisons]
    choosers = ""
    for kind, names in (("model", [p[1] for p in parts]), ("metric", [p[2] for p in parts])):
        if len({*names}) > 1:
            options = "".join(
                f'<option value="{html.escape(name)}">{html.escape(name)}</option>'
                for name in dict.fromkeys(names)
            )
            choosers += (
                f'<label>{kind} <select id="{kind}"><option value="">all</option>{options}'
                "</select></label>"
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
    if not choosers:
        return ""
    note = (
        "Choosers show a part of tables and pictures. Worst cases, ranks, fronts and copies stay"
        " those of all."
    )
    return f'<div class="choosers" hidden>{choosers}{render_note(note)}</div>\n'


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


def _render_table(
    table: Table, comparison: MetricComparison | None, shows_notes: bool = True
) -> str:
    """Return a table with its notes, and its LaTeX, markdown and CSV to copy.

    Args:
        table: The table.
        comparison: The comparison that it shows; ``None`` for a table of tuning.
        shows_notes: Whether to show the notes; otherwise they are folded.
    """
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
    if not shows_notes:
        notes = f"<details><summary>Notes</summary>\n{notes}</details>\n"
    return (
        f"<h3>{html.escape(table.title)}</h3>\n"
        f'<div class="wide study{name_length(len(table.rows))}" tabindex="0" role="region"'
        f' aria-label="table"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>'
        f"</table></div>\n{_render_copies(table)}{notes}"
    )


def _is_open(text: str) -> bool:
    return "diverged" in text or text in (NO_RESULT, NO_VALUE)


def _number_names(comparison: MetricComparison | None) -> dict[str, dict[str, int]]:
    """Return the places of methods and conditions, by side."""
    if comparison is None:
        return {"method": {}, "condition": {}}
    layout = comparison.layout
    return {
        "method": {name: place for place, name in enumerate(layout.methods)},
        "condition": {name: place for place, name in enumerate(layout.conditions)},
    }


def _describe_cell(place: CellPlace | None, places: Mapping[str, Mapping[str, int]]) -> str:
    """Return the attributes of a cell for the choosers.

    A cell is hidden with its condition, or with all its methods.
    """
    if place is None:
        return ""
    methods = " ".join(str(places["method"][name]) for name in place.methods)
    attributes = f' data-method="{methods}"' if methods else ""
    if place.condition is not None:
        attributes += f' data-condition="{places["condition"][place.condition]}"'
    return attributes


def _describe_line(
    table: Table, line: Sequence[tuple[int, int]], places: Mapping[str, Mapping[str, int]]
) -> str:
    """Return the attributes that all cells of a row or column share."""
    cells = [table.cells[place] for place in line if place in table.cells]
    methods, conditions = ({cell.methods for cell in cells}, {cell.condition for cell in cells})
    return _describe_cell(
        CellPlace(
            methods.pop() if len(methods) == 1 else (),
            conditions.pop() if len(conditions) == 1 else None,
        ),
        places,
    )


def _render_tests(table: Table, comparison: MetricComparison) -> str:
    """Return the folded table of paired comparisons."""
    if not table.rows:
        return ""
    content = _render_table(table, comparison, shows_notes=False)
    summary = f"Paired comparisons ({len(table.rows)})"
    return f"<details><summary>{summary}</summary>\n{content}</details>\n"


def _render_copies(table: Table) -> str:
    """Return the texts of a table to copy, and their buttons."""
    texts = {
        "LaTeX": table.latex(),
        "markdown": table.markdown(),
        "CSV": format_csv(table.records),
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


def _render_pictures(
    comparison: MetricComparison,
    worst: MetricComparison | None,
    pictures: Sequence[Picture],
    captions: set[str],
) -> str:
    """Return the pictures of a metric, and captions that the page does not have yet.

    Args:
        comparison: The comparison by the metric.
        worst: The comparison by its worst 10 % of clients, if there is one.
        pictures: The pictures of all metrics, for their files.
        captions: The captions of the page so far; those of the pictures are added.
    """
    stem = name_files(comparison.metric)
    drawn = {
        f"heat_map_{stem}": lambda: render_heat_map(comparison),
        f"front_{stem}": lambda: render_fronts(comparison, worst) if worst else "",
        f"ranks_{stem}": None,
    }
    content = ""
    for name, render in drawn.items():
        for picture in (picture for picture in pictures if picture.name == name):
            content += _render_picture(picture, None if render is None else render())
            content += "" if picture.caption in captions else render_note(picture.caption)
            captions.add(picture.caption)
    return content


def _render_picture(picture: Picture, content: str | None) -> str:
    """Return a picture with its title, links and note.

    Args:
        picture: The picture.
        content: HTML that stands for it, and that choosers filter; ``None`` shows the picture.
    """
    if content is None:
        length = name_length(len(picture.rows))
        return f'<div class="{length.strip()}">{render_figure(picture, "pictures/")}</div>\n'
    title = f"<h3>{html.escape(picture.title)} {render_links(picture, 'pictures/')}</h3>\n"
    return f"{title}{content}{render_note(picture.note) if picture.note else ''}"
