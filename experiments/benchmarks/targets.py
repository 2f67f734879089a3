"""``python experiments/benchmarks/targets.py``: does pl_fed reach its targets of speed?

For each row, three programs run the same federation: pl_fed (``Trainer(...).fit``, without
validation, with a row of metrics every 1000 rounds), a loop written by hand, and pfl-research 0.6.
For the latter, run ``pip install pfl==0.6.0`` in an environment with pl_fed; without it the column
stays empty. The programs take turns in processes of their own with one thread each, with short
rounds in blocks of 0.1 s. A round of pl_fed lasts from its start to the start of the next. The
script prints medians.

``--rows cnn mlp`` selects rows, ``--engine stacked`` selects an engine, and ``--save`` writes
``results.md`` and ``targets.csv``. ``--device cuda`` uses a GPU and adds rows of 100 and 1000
stacked clients (untested: written without a GPU).
"""

import argparse
import statistics
import sys
from dataclasses import dataclass

from cases import NETS, STACKED, TARGETS, Case
from race import race
from report import machine, print_row, save, save_rows, table
from settings import Settings

NEVER_SLOWER = 1 / 1.03


@dataclass(frozen=True)
class Row:
    """Row of the table.

    Attributes:
        case: The federation to run.
        against: Competitors of pl_fed out of ``hand`` and ``pfl``.
        processes: Number of processes that share a round.
        targets: Competitor → the factor by which pl_fed should be faster.
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
    medians = {program: 1e3 * statistics.median(seconds) for program, seconds in times.items()}
    ours = medians.get("pl_fed")
    faster = {
        program: medians[program] / ours for program in row.against if ours and program in medians
    }
    title = row.case.title + (f", {row.processes} processes" if row.processes > 1 else "")
    line = [
        title,
        *(
            f"{medians[program]:.2f}" if program in medians else "–"
            for program in (*BOTH, "pl_fed")
        ),
        *(f"{faster[program]:.2f}" if program in faster else "–" for program in BOTH),
        *judge_targets(row, faster),
        engine or "–",
    ]
    return line, [numbers(name, program, seconds) for program, seconds in times.items()]


def judge_targets(row: Row, faster: dict[str, float]) -> tuple[str, str]:
    """Return the targets as text, and a verdict on each."""
    names = {"hand": "by hand", "pfl": "pfl"}
    words = [f"{names[program]} ≥ {factor:.2f}" for program, factor in row.targets.items()]
    verdicts = [
        ("yes" if faster[program] >= factor else "no") if program in faster else "not measured"
        for program, factor in row.targets.items()
    ]
    return ", ".join(words) or "–", ", ".join(verdicts) or "–"


def numbers(name: str, program: str, times: list[float]) -> dict[str, object]:
    """Return a line of the CSV, in milliseconds."""
    first, median, third = (1e3 * quantile for quantile in statistics.quantiles(times, n=4))
    return {
        "row": name,
        "who": program,
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
    settings = Settings.from_arguments(arguments)
    chosen = arguments.rows or list(rows if settings.device == "cuda" else ROWS)
    print(machine(settings.device), "\n\n", table(HEADER, []), sep="", end="")
    lines, plain = [], []
    for name in chosen:
        line, behind = measure(name, rows[name], settings)
        lines.append(line)
        plain += behind
        print_row(line)
    if arguments.save:
        text = f"## Targets\n\n{machine(settings.device)}\n\n{table(HEADER, lines)}"
        save("targets", text)
        save_rows("targets.csv", plain)


if __name__ == "__main__":
    main()
