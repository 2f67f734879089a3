"""``python experiments/benchmarks/jax_race.py``: is a round of pl_fed faster than one in JAX?

pl_fed runs ``Trainer(...).fit`` with all that belongs to a round. JAX runs a round written by hand:
see ``by_jax.py`` for its two forms, and ``README.md`` for its environment. First, the script
compares the weights of both after two rounds on the same minibatches. Then both take turns in one
process with one thread. ``--processes`` such processes follow each other, because equal processes
differ by up to 10 %. The script prints the median of their medians. On a shared machine, use
``--clock cpu``. ``--save`` writes the section into ``results.md``.
"""

import argparse
import os
import statistics

import jax
from by_jax import check_equal_rounds
from cases import TARGETS
from race import race
from report import machine, save, table
from settings import Settings

ROWS = ["logistic-10", "logistic-100", "mlp"]
RIVALS = {"jax": "JAX, `lax.map`", "jax-tuned": "JAX, tuned"}
HEADER = [
    "round",
    "pl_fed, ms",
    *(f"{title}, ms" for title in RIVALS.values()),
    *(f"{title} / pl_fed" for title in RIVALS.values()),
    "engine",
]


def measure(name: str, settings: Settings, processes: int) -> list[str]:
    """Return a line of the table."""
    case = TARGETS[name]
    check_equal_rounds(case, case.data())
    results = [race(case, settings, list(RIVALS)) for _ in range(processes)]
    medians = {
        program: [1e3 * statistics.median(result[program]) for result in results]
        for program in ("pl_fed", *RIVALS)
    }
    ratios = [
        statistics.median(other / own for own, other in zip(medians["pl_fed"], medians[rival]))
        for rival in RIVALS
    ]
    return [
        name,
        *(f"{statistics.median(times):.2f}" for times in medians.values()),
        *(f"{ratio:.2f}" for ratio in ratios),
        results[0]["engine"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW")
    parser.add_argument("--processes", type=int, default=5, help="that follow each other")
    parser.add_argument("--save", action="store_true", help="write results.md")
    Settings.add_to(parser)
    arguments = parser.parse_args()
    settings = Settings.from_arguments(arguments)
    lines = []
    for name in arguments.rows:
        lines.append(measure(name, settings, arguments.processes))
        print(table(HEADER, lines), flush=True)
    if arguments.save:
        load = f"Other programs used the machine, too: load average {os.getloadavg()[1]:.1f}."
        text = f"{machine(settings.device)} JAX {jax.__version__}. {load}"
        save("jax", f"## JAX\n\n{text}\n\n{table(HEADER, lines)}")


if __name__ == "__main__":
    main()
