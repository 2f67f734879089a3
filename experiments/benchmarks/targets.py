"""``python experiments/benchmarks/targets.py``: is pl_fed as fast as it is meant to be?

For each row the same federation is run by pl_fed (``Trainer(...).fit``, without validation, a row
of metrics every 1000 rounds), by a loop written by hand, and by pfl-research 0.6 where that is
installed (``pip install pfl==0.6.0`` into an environment that has pl_fed; without it its column
stays empty). They take turns, short rounds in blocks of 0.1 s, in processes of their own with one
thread each; the clock of a round of pl_fed runs from its start to the start of the next. Medians
are printed.

``--rows cnn mlp`` runs some rows only, ``--engine stacked`` another engine, ``--save`` writes
``results.md`` and ``targets.csv``. ``--device cuda`` puts all on a GPU and adds rows of 100 and
1000 stacked clients (untested: written without a GPU at hand).
"""

import argparse
import statistics
import sys
from dataclasses import dataclass

from cases import NETS, STACKED, TARGETS, Case
from race import race
from report import machine, save, save_rows, table
from settings import Settings

NEVER_SLOWER = 1 / 1.03


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        case: What is run.
        against: What beside pl_fed: of ``hand``, ``pfl``.
        processes: That share a round.
        targets: By what factor pl_fed is to be faster than which of them.
    """

    case: Case
    against: tuple[str, ...]
    targets: dict[str, float]
    processes: int = 1


BOTH = ("hand", "pfl")
ROWS = {
    "logistic-10": Row(TARGETS["logistic-10"], BOTH, {"hand": 1.5, "pfl": 4}),
    "logistic-100": Row(TARGETS["logistic-100"], BOTH, {"hand": 3}),
    "mlp": Row(TARGETS["mlp"], BOTH, {"hand": 1.8}),
    "ditto": Row(TARGETS["ditto"], ("hand",), {"hand": 1.8}),
    "cnn": Row(TARGETS["cnn"], BOTH, {"hand": 1.1}),
    "cnn-2": Row(TARGETS["cnn"], BOTH, {"pfl": 1 / 0.67}, processes=2),
    **{name: Row(case, ("hand",), {"hand": NEVER_SLOWER}) for name, case in NETS.items()},
}
ON_GPU = {name: Row(case, BOTH, {}) for name, case in STACKED.items()}
HEADER = [
    "round",
    "by hand, ms",
    "pfl, ms",
    "pl_fed, ms",
    "by hand / pl_fed",
    "pfl / pl_fed",
    "target",
    "reached",
    "engine",
]


def measure(name: str, row: Row, settings: Settings) -> tuple[list[str], list[dict[str, object]]]:
    """Return a line of the table, and the numbers behind it."""
    times = race(row.case, settings, row.against, row.processes)
    note, engine = times.pop("note"), times.pop("engine")
    if note:
        print(f"{name}: {note}", file=sys.stderr)
    medians = {who: 1e3 * statistics.median(each) for who, each in times.items()}
    ours = medians.get("pl_fed")
    faster = {who: medians[who] / ours for who in row.against if ours and who in medians}
    title = row.case.title + (f", {row.processes} processes" if row.processes > 1 else "")
    line = [
        title,
        *(f"{medians[who]:.2f}" if who in medians else "–" for who in (*BOTH, "pl_fed")),
        *(f"{faster[who]:.2f}" if who in faster else "–" for who in BOTH),
        *judged(row, faster),
        engine or "–",
    ]
    return line, [numbers(name, who, each) for who, each in times.items()]


def judged(row: Row, faster: dict[str, float]) -> tuple[str, str]:
    """Return the targets in words, and whether they are reached."""
    names = {"hand": "by hand", "pfl": "pfl"}
    words = [f"{names[who]} ≥ {factor:.2f}" for who, factor in row.targets.items()]
    verdicts = [
        ("yes" if faster[who] >= factor else "no") if who in faster else "not measured"
        for who, factor in row.targets.items()
    ]
    return ", ".join(words) or "–", ", ".join(verdicts) or "–"


def numbers(name: str, who: str, times: list[float]) -> dict[str, object]:
    """Return a line of the CSV, in milliseconds."""
    first, median, third = (1e3 * each for each in statistics.quantiles(times, n=4))
    return {
        "row": name,
        "who": who,
        "rounds": len(times),
        "first_quartile_ms": round(first, 4),
        "median_ms": round(median, 4),
        "third_quartile_ms": round(third, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rows = {**ROWS, **ON_GPU}
    parser.add_argument("--rows", nargs="+", choices=rows, metavar="ROW", help=", ".join(rows))
    parser.add_argument("--save", action="store_true", help="write results.md and targets.csv")
    Settings.add_to(parser)
    arguments = parser.parse_args()
    settings = Settings.of(arguments)
    chosen = arguments.rows or list(rows if settings.device == "cuda" else ROWS)
    print(machine(settings.device), "\n\n", table(HEADER, []), sep="", end="")
    lines, plain = [], []
    for name in chosen:
        line, behind = measure(name, rows[name], settings)
        lines.append(line)
        plain += behind
        print(table(line, []).splitlines()[0], flush=True)
    if arguments.save:
        text = f"## Targets\n\n{machine(settings.device)}\n\n{table(HEADER, lines)}"
        save("targets", text)
        save_rows("targets.csv", plain)


if __name__ == "__main__":
    main()
