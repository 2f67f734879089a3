"""FedTilt's Tables II, III and VII and their pictures, from the paper's rows and our runs.

python -m experiments.fedtilt.report
"""

import statistics
from collections.abc import Mapping
from pathlib import Path

from experiments.evidence import Pairs, tabulate_pairs
from experiments.fedtilt.agreement import (
    PERSONAL,
    SYMBOLS,
    Compared,
    compare,
    count_agreeing,
    count_small,
    describe_never_drawn,
    describe_own,
    interval_cells,
    tabulate_all_agreement,
    tabulate_figures,
)
from experiments.fedtilt.bounds import count_possible
from experiments.fedtilt.limits import (
    FIGURES,
    PAIRS,
    ROWS,
    count_noise_by_figure,
    count_ordered_by_accuracy,
    describe_published,
    draw_published,
)
from experiments.fedtilt.paper import BAND, CONDITION_WORDS, METRICS, SPREADS, describe
from experiments.fedtilt.readings import READINGS, TEN_GROUPS, TESTED_MODELS, ClientResults
from experiments.fedtilt.results import Results, comparisons, read_published_rows
from experiments.fedtilt.run import DITTO_LAM, OWN_TENTH, SEEDS, SPLITS, SWEPT, WHOLE
from experiments.fedtilt.sweep import draw_sweep
from experiments.grid import finished_rows, group_rows, read
from experiments.tables import Comparison, fold, markdown, notes

HERE = Path(__file__).parent
TABLES = {"clean": "II", "corruption": "III", "gaussian": "VII"}  # of the paper


def figures() -> Compared:
    """Return the comparisons of the committed runs, by setting and tested model."""
    return comparisons(Results(finished_rows(HERE / "results.csv")), WHOLE)


def own_figures() -> Compared:
    """Return the comparisons of the committed runs of "own 10 %": all clients, ten groups."""
    return compare(ClientResults(read(HERE / "clients.csv")))


def short_table() -> str:
    """Return the number of agreeing figures of the committed runs by data set and reading."""
    own = ClientResults(read(HERE / "clients.csv"))
    tables = {"whole classes, two classes": figures()}
    tables |= {reading.name: compare(own, reading) for reading in READINGS}
    return tabulate_all_agreement(tables)


def table(
    compared: Mapping[tuple[str, str], Mapping[str, Comparison]], condition: str, more: str = ""
) -> str:
    """Return the table of a condition; ``more`` is appended to its title."""
    selected = {key: row for key, row in compared.items() if key[0].endswith(condition)}
    if not selected:
        return ""
    title = f"Table {TABLES[condition]}, {CONDITION_WORDS[condition]}{more}"
    return fold(title, tabulate_figures(selected))


def pair_whole_classes(results: Results) -> list[Pairs]:
    """Return the comparisons of personal models by seed, tested on whole classes."""
    theirs = {(row["setting"], row["method"]): row for row in read_published_rows()}
    compared = []
    for setting in dict.fromkeys(setting for setting, _ in theirs):
        for first, second in PAIRS:
            for metric, symbol in SYMBOLS.items():
                column = f"personal_{metric}"
                ours = [results.values(setting, m, column, WHOLE) for m in (first, second)]
                if len(ours[0]) == len(ours[1]) > 1:
                    paper = [float(theirs[setting, m][metric]) for m in (first, second)]
                    names = [f"{describe(setting)}: {first} − {second}", symbol]
                    compared.append(Pairs(names, *ours, paper=paper[0] - paper[1]))
    return compared


def describe_whole(results: Results) -> str:
    """Return the section on the runs with all test images of a client's classes."""
    compared = comparisons(results, WHOLE)
    misses = [
        [f"{describe(setting)}: {name}", *interval_cells(row["accuracy"])]
        for (setting, name), row in compared.items()
        if not row["accuracy"].agrees
    ]
    spreads = [row[metric].agrees for row in compared.values() for metric in SPREADS]
    pairs = pair_whole_classes(results)
    others = [split for split in SPLITS if split not in (WHOLE, OWN_TENTH)]
    tables = [table(compared, condition) for condition in TABLES]
    tables += [table(comparisons(results, split), "clean", f": {split}") for split in others]
    return (
        (HERE / "whole.md")
        .read_text()
        .format(
            agreeing=sum(row["accuracy"].agrees for row in compared.values()),
            accuracies=len(compared),
            spreads=sum(spreads),
            compared_spreads=len(spreads),
            never=describe_never_drawn(SEEDS),
            misses=markdown(["", "the paper", "ours", "difference"], misses),
            small=count_small(pair.p_value for pair in pairs),
            pairs=fold("All paired tests", tabulate_pairs(["", "figure"], pairs, 2)),
            tables="\n".join(filter(None, tables)),
        )
    )


def tabulate_rankings(results: Results, own: ClientResults) -> str:
    """Return the methods' ranking by each figure: the paper's, and those of our runs."""
    rows = []
    for (setting,), published in group_rows(read_published_rows(), "setting"):
        theirs = {row["method"]: row for row in published}
        for place, (metric, symbol) in enumerate(SYMBOLS.items()):
            sign = -1 if place == 0 else 1
            order = sorted(theirs, key=lambda m: sign * float(theirs[m][metric]))
            column = f"personal_{metric}"
            ranked = (
                {m: results.values(setting, m, column, WHOLE) for m in order},
                {m: own.values(setting, PERSONAL[m], TEN_GROUPS).get(metric, []) for m in order},
            )
            cells = [describe(setting), symbol, " > ".join(order)]
            rows.append([*cells, *(_rank(values, sign, order) for values in ranked)])
    head = ["setting", "figure", "the paper", "ours, whole classes", "ours, own 10 %, ten groups"]
    return fold("All rankings", markdown(head, rows))


def _rank(values: Mapping[str, list[float]], sign: int, paper: list[str]) -> str:
    """Return the methods from the best to the worst mean, and whether the paper's are the same."""
    if not all(values.values()):
        return "–"
    ours = sorted(values, key=lambda method: sign * statistics.mean(values[method]))
    mark = "✓" if ours == paper else ("first ✓" if ours[0] == paper[0] else "✗")
    return f"{' > '.join(ours)} {mark}"


def describe_selection() -> str:
    """Return the validation accuracies that decided the choice of Ditto's λ."""
    texts = [
        f"{describe(setting)}: "
        + ", ".join(f"{float(row['personal_validation']):.4f}" for row in rows)
        for (setting,), rows in group_rows(finished_rows(HERE / "select.csv"), "setting")
    ]
    return "; ".join(texts)


def describe_head(results: Results, own: ClientResults) -> str:
    """Return the summary of the page, and the setting of the runs."""
    return (
        (HERE / "head.md")
        .read_text()
        .format(
            runs=len(results.rows),
            hours=sum(float(row["seconds"]) for row in results.rows) / 3600,
            lam=DITTO_LAM,
            chosen=describe_selection(),
            band=BAND,
            impossible=len(ROWS) - count_possible(FIGURES, 2),
            possible=count_possible(FIGURES, 10),
            rows=len(ROWS),
            ordered=count_ordered_by_accuracy(),
            fedavg=count_noise_by_figure("FedTilt", "FedAvg"),
            **_count_own(own),
        )
    )


def _count_own(own: ClientResults) -> dict[str, str]:
    """Return the numbers of agreeing figures in the page's summary, by their names in it."""
    methods = ("Ditto", "FedTilt")
    figures_in_band = {
        f"{data}_{reading.groups}": count_agreeing(compare(own, reading), data, methods, METRICS)
        for data in ("mnist", "fmnist")
        for reading in READINGS[:2]
    }
    accuracies = {
        model: count_agreeing(compare(own), None, [row], ["accuracy"])
        for row, (method, model) in TESTED_MODELS.items()
        if method == "FedAvg"
    }
    return figures_in_band | accuracies


def write(folder: Path = HERE) -> None:
    """Write tables.md and the pictures."""
    results = Results(finished_rows(folder / "results.csv"))
    own = ClientResults(read(folder / "clients.csv"))
    tilts = {(r["setting"], r["arguments"]) for r in results.rows if r["method"] == "FedTilt"}
    if all(len([run for run in tilts if run[0] == setting]) > 1 for setting in SWEPT):
        draw_sweep(results, folder / "tilts.png")
    draw_published(folder / "published.png")
    ranking = (
        "## Ranking of the methods\n\nFedAvg is represented by w_n after 10 local passes.\n\n"
        + tabulate_rankings(results, own)
    )
    parts = [
        describe_head(results, own),
        describe_published(),
        describe_own(own),
        describe_whole(results),
        ranking,
    ]
    (folder / "tables.md").write_text("\n".join(filter(None, parts)) + notes(HERE))


if __name__ == "__main__":
    write()
