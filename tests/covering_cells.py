"""Few cells of a study that show all its labels, or all classes and keys of its configs."""

import re

NUMBER = re.compile(r"(?<![\w.])-?\d+(\.\d+)?(e-?\d+)?")


def labels_of(cell):
    """Return the label of a cell on each axis."""
    return frozenset(cell.values.items())


def settings_of(cell):
    """Return the settings of a cell without their numbers, each with the class of its section.

    Configs that differ in numbers alone go through the same checks.
    """
    words = (NUMBER.sub("0", word).partition("=") for word in cell.arguments)
    values = {key: value for key, _, value in words}
    sections = (key.rpartition(".")[0] for key in values)
    return frozenset(zip(values, values.values(), map(values.get, sections)))


def choose_cells(cells, facets_of):
    """Yield few cells that have all facets of the cells: next the one with the most new facets."""
    cells = {facets_of(cell): cell for cell in cells}
    missing = set().union(*cells)
    while missing:
        facets = max(cells, key=lambda facets: len(facets & missing))
        missing -= facets
        yield cells[facets]
