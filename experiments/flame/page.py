"""The page of FLAME's Table III, from the committed results."""

from collections.abc import Iterable, Mapping, Sequence

from experiments.experiment import Row, read_csv
from experiments.flame.results import COLUMNS, GLOBAL, HERE, OURS, PERSONAL, Results, describe
from experiments.papers import (
    DATA_NAMES,
    Comparison,
    PaperTable,
    count_agreements,
    fold,
    format_interval,
    markdown,
    notes,
    tabulate_misses,
)
from experiments.rankings import (
    Pairs,
    count_tests,
    explain_tests,
    tabulate_pairs,
    tabulate_rankings,
)

GLOBAL_BAND, STDS = 0.03, 2.0  # personal and hybrid models: twice the paper's std over its runs
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
Comparisons = Mapping[str, Mapping[str, Comparison]]  # by setting, then by the paper's column


def read_paper() -> list[Row]:
    """Return the paper's figures."""
    return read_csv(HERE / "paper.csv")


def compare(results: Results, paper: Iterable[Row]) -> Comparisons:
    """Return the comparisons with the paper by setting, then by the paper's column."""
    compared: dict[str, dict[str, Comparison]] = {}
    for row in paper:
        ours = results.values(row["setting"], *COLUMNS[row["column"]])
        mean, std = float(row["mean"]), float(row["std"])
        band = GLOBAL_BAND if row["column"].endswith("GM") else STDS * std
        if ours:
            comparison = Comparison(mean, std, ours, band)
            compared.setdefault(row["setting"], {})[row["column"]] = comparison
    return compared


def tabulate(results: Results, compared: Comparisons) -> str:
    """Return all tables."""
    parts = []
    for title in ("FLAME", "pFedMe", "Ditto"):
        names = [name for name in COLUMNS if name.startswith(title)]
        head = ["setting", *(h for n in names for h in (f"{n}, paper", "ours", "difference"))]
        complete = {s: columns for s, columns in compared.items() if columns.keys() >= {*names}}
        rows = [
            [describe(setting), *(cell for name in names for cell in columns[name].cells())]
            for setting, columns in complete.items()
        ]
        count = count_agreements(columns[n] for columns in complete.values() for n in names)
        title += ", as coded" if title == "Ditto" else ""
        table = fold("All figures", markdown(head, rows))
        parts += [f"## {title}: {count} figures agree\n\n{table}"] if rows else []
    parts.append("## Our means with 95 % intervals over seeds\n")
    for title, names in (("Personal and hybrid models", PERSONAL), ("Global models", GLOBAL)):
        rows = [
            [describe(s), *(format_interval(results.values(s, *name)) for name in names.values())]
            for s in compared
        ]
        parts.append(fold(title, markdown(["setting", *names], rows)))
    return "\n".join(parts)


def pair_columns(
    results: Results, paper: Iterable[Row], columns: Iterable[tuple[str, str]]
) -> dict[str, list[Pairs]]:
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


def tabulate_families(results: Results, paper: Sequence[Row]) -> str:
    """Return the tables of all rankings; the means are without data sets with a single seed."""
    parts = [fold("The tests in words", explain_tests())]
    for title, columns in FAMILIES.items():
        groups = pair_columns(results, paper, columns)
        pairs = [pair for group in groups.values() for pair in group]
        details = tabulate_pairs(["comparison", "setting"], pairs, digits=4)
        parts += [f"**{title}**\n", tabulate_rankings(groups, digits=4)]
        parts += [fold(count_tests(pairs), details)]
    return "\n".join(parts)


def make_page() -> str:
    """Return the text of table3.md."""
    results, paper = Results.read(), read_paper()
    compared = compare(results, paper)
    seeds = sorted({row["seed"] for row in results.rows}, key=int)
    named = {
        f"{describe(setting)}: {name}": comparison
        for setting, columns in compared.items()
        for name, comparison in columns.items()
    }
    head = (HERE / "head.md").read_text().format(
        runs=len(results.rows), seeds=len(seeds), each=", ".join(seeds), lr=0.1, stds=STDS,
        hours=sum(float(row["seconds/total"]) for row in results.rows) / 3600, band=GLOBAL_BAND,
        agree=count_agreements(named.values()), misses=tabulate_misses(named),
        rankings=tabulate_families(results, paper),
    )  # fmt: skip
    return head + tabulate(results, compared) + notes(HERE)


def summarize() -> list[PaperTable]:
    """Return the tables for the summary of all experiments."""
    results = Results.read()
    figures = {
        (setting, name): comparison
        for setting, columns in compare(results, read_paper()).items()
        for name, comparison in columns.items()
    }
    main = {
        (f"{data}/{split}", f"FLAME {model}"): f"FLAME, {DATA_NAMES[data]}, {words}: {models}"
        for data in ("mnist", "fmnist")
        for split, words in (
            ("label_q2", "2 classes per client"),
            ("hybrid_q2_dir0.5", "half by label, half by size"),
        )
        for model, models in (("PM", "personal models"), ("GM", "global model"))
    }
    names = {False: "MNIST and Fashion-MNIST", True: "CIFAR-10, two of its settings"}
    return [
        PaperTable(
            f"FLAME, Table III: {words}",
            "flame/table3.md",
            "experiments flame/table3",
            {key: f for key, f in figures.items() if key[0].startswith("cifar10/") == is_cifar},
            [row for row in results.rows if (row["data"] == "cifar10") == is_cifar],
            {} if is_cifar else main,
        )
        for is_cifar, words in names.items()
    ]
