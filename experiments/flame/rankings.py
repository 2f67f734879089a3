"""FLAME's claim, that its models beat those of pFedMe and Ditto, as paired comparisons."""

from collections.abc import Iterable, Mapping, Sequence

from experiments.evidence import (
    Pairs,
    count_tests,
    explain_tests,
    tabulate_pairs,
    tabulate_rankings,
)
from experiments.flame.results import COLUMNS, GLOBAL, PERSONAL, Results, describe
from experiments.grid import Row
from experiments.tables import fold

OURS = {**PERSONAL, **GLOBAL}
PAPER = {  # our columns → the paper's, with both Dittos for its only one
    "FLAME HM by validation": "FLAME HM",
    "Ditto PM, as coded": "Ditto PM",
    "Ditto GM, as coded": "Ditto GM",
    **{name: name for name in COLUMNS},
}
OTHERS = ("pFedMe PM", "Ditto PM, as coded", "Ditto PM")
FAMILIES = {  # tables of comparisons → pairs of our columns
    "Personal models": [("FLAME PM", other) for other in OTHERS],
    "FLAME's hybrid model": [("FLAME HM by validation", name) for name in ("FLAME PM", *OTHERS)],
    "Global models": [("FLAME GM", other.replace("PM", "GM")) for other in OTHERS],
    "pFedMe with server step 1, without a counterpart in the paper": [
        ("FLAME PM", "pFedMe PM, step 1"),
        ("FLAME GM of the last round", "pFedMe GM, step 1"),
    ],
}
Groups = Mapping[str, Sequence[Pairs]]


def pair_columns(
    results: Results, paper: Iterable[Row], columns: Iterable[tuple[str, str]]
) -> Groups:
    """Return the comparisons of pairs of columns in all settings, by the names of the columns.

    Args:
        results: The results of the runs.
        paper: The rows of the paper's figures.
        columns: Pairs of our columns; the second one is subtracted from the first one.
    """
    published = {(row["setting"], row["column"]): float(row["mean"]) for row in paper}
    groups: dict[str, list[Pairs]] = {}
    for names in columns:
        for setting in dict.fromkeys(setting for setting, _ in published):
            first, second = (results.values(setting, *OURS[name]) for name in names)
            if first and second:
                clients = [results.client_values(setting, *OURS[name]) for name in names]
                figures = [published.get((setting, PAPER.get(name, ""))) for name in names]
                difference = None if None in figures else figures[0] - figures[1]
                title = " − ".join(names)
                pairs = Pairs([title, describe(setting)], first, second, *clients, paper=difference)
                groups.setdefault(title, []).append(pairs)
    return groups


def tabulate_all_rankings(results: Results, paper: Sequence[Row]) -> str:
    """Return the tables of all rankings; the means are without data sets with a single seed."""
    parts = [fold("The tests in words", explain_tests())]
    for title, columns in FAMILIES.items():
        groups = pair_columns(results, paper, columns)
        pairs = [pair for group in groups.values() for pair in group]
        details = tabulate_pairs(["comparison", "setting"], pairs, digits=4)
        parts += [f"**{title}**\n", tabulate_rankings(groups, digits=4)]
        parts += [fold(count_tests(pairs), details)]
    return "\n".join(parts)
