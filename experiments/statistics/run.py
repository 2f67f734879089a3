"""Simulation of pl_fed.statistics: sizes and powers of tests, and coverages of intervals.

python -m experiments.statistics.run
"""

import argparse
import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.tables import markdown
from pl_fed.random import key
from pl_fed.statistics import (
    PairedTest,
    Pairs,
    aggregate_interval,
    bootstrap_interval,
    correct_by_holm,
    critical_difference,
    friedman_test,
    paired_t_power,
    paired_t_test,
    sign_flip_test,
    t_interval,
    wilcoxon_test,
)

HERE = Path(__file__).parent
ALPHA = 0.05
SEEDS = (3, 5, 10, 20)
SAMPLES, FEW_SAMPLES = 10_000, 2_000  # of tests, and of intervals that resample
CLIENTS, COMPARISONS = 20, 23
Floats = NDArray[np.float64]
Row = Mapping[str, str]
Shares = dict[str, float]  # quantity → share of the samples

TESTS: dict[str, Callable[[Floats, Floats], PairedTest]] = {
    "paired t": paired_t_test,
    "Wilcoxon": wilcoxon_test,
    "sign flips": sign_flip_test,
}


@dataclass(frozen=True)
class Differences:
    """Distribution of the difference of two methods, with a mean of 0.

    Args:
        draw: Draws differences of a shape from a generator.
        deviation: The standard deviation.
        symmetric: Whether the distribution is symmetric about 0.
    """

    draw: Callable[[np.random.Generator, tuple[int, ...]], Floats]
    deviation: float
    symmetric: bool = True


DATA = {
    "normal": Differences(lambda generator, size: generator.normal(size=size), 1.0),
    "heavy tails": Differences(
        lambda generator, size: generator.standard_t(3, size=size), math.sqrt(3)
    ),
    "two skewed methods": Differences(
        lambda generator, size: generator.exponential(size=size) - generator.exponential(size=size),
        math.sqrt(2),
    ),
    "ties": Differences(
        lambda generator, size: np.rint(generator.normal(size=size)), math.sqrt(13 / 12)
    ),
    "skewed difference": Differences(
        lambda generator, size: generator.exponential(size=size) - 1, 1.0, symmetric=False
    ),
}


def make_generator(purpose: str, seeds: int) -> np.random.Generator:
    """Return the generator of a cell: equal cells give equal numbers, in any order."""
    return np.random.default_rng(key(0, purpose, seeds) & (2**63 - 1))


def simulate_tests(data: str, seeds: int, effect: float, samples: int = SAMPLES) -> Shares:
    """Return the share of samples that each paired test rejects.

    Args:
        data: Name of the distribution of the differences.
        seeds: Number of seeds.
        effect: True mean difference in standard deviations of the differences.
        samples: Number of samples.
    """
    distribution, zeros = DATA[data], np.zeros(seeds)
    draws = distribution.draw(make_generator(f"tests {data} {effect}", seeds), (samples, seeds))
    draws = draws + effect * distribution.deviation
    return {
        name: float(np.mean([test(draw, zeros).p_value <= ALPHA for draw in draws]))
        for name, test in TESTS.items()
    }


def simulate_coverage(data: str, seeds: int, samples: int = FEW_SAMPLES) -> Shares:
    """Return the share of samples of which each 95 % interval contains the true mean, 0."""
    draws = DATA[data].draw(make_generator(f"coverage {data}", seeds), (samples, seeds))
    kinds = {
        "Student's t": t_interval,
        "bootstrap, percentile": lambda x: bootstrap_interval(x, method="percentile", draws=1999),
        "bootstrap, BCa": lambda x: bootstrap_interval(x, draws=1999),
    }
    intervals = {name: [kind(draw) for draw in draws] for name, kind in kinds.items()}
    return {
        name: float(np.mean([i.low <= 0 <= i.high for i in members]))
        for name, members in intervals.items()
    }


def simulate_clients(correlation: float, seeds: int, samples: int = FEW_SAMPLES) -> Shares:
    """Return the rejections of tests over clients and over seeds, without a difference.

    Args:
        correlation: Intraclass correlation of the clients of one seed.
        seeds: Number of seeds, with 20 clients each.
        samples: Number of samples.
    """
    generator = make_generator(f"clients {correlation}", seeds)
    names = tuple(np.repeat(np.arange(seeds), CLIENTS).tolist())
    shares = {"Wilcoxon over clients": 0, "paired t over seeds": 0}
    for _ in range(samples):
        shared = math.sqrt(correlation) * generator.normal(size=(seeds, 1))
        own = math.sqrt(1 - correlation) * generator.normal(size=(seeds, CLIENTS))
        pairs = Pairs((shared + own).ravel(), np.zeros(seeds * CLIENTS), names, names)
        by_seed = pairs.average_clients()
        shares["Wilcoxon over clients"] += wilcoxon_test(pairs.first, pairs.second).p_value <= ALPHA
        test = paired_t_test(by_seed.first, by_seed.second)
        shares["paired t over seeds"] += test.p_value <= ALPHA
    return {name: float(count / samples) for name, count in shares.items()}


def simulate_ranks(methods: int, blocks: int, samples: int = FEW_SAMPLES) -> Shares:
    """Return the rejections of tests over ranks of equal methods; Nemenyi's for any pair."""
    scores = make_generator(f"ranks {methods}", blocks).normal(size=(samples, blocks, methods))
    tests = [friedman_test(table, draws=499) for table in scores]
    difference = critical_difference(methods, blocks, ALPHA)
    return {
        "Friedman, permutations": float(np.mean([test.p_value <= ALPHA for test in tests])),
        "Friedman, χ²": float(np.mean([test.chi2_p_value <= ALPHA for test in tests])),
        "Friedman, F": float(np.mean([test.f_p_value <= ALPHA for test in tests])),
        "Nemenyi, any pair": float(
            np.mean([np.ptp(test.average_ranks) > difference for test in tests])
        ),
    }


def simulate_family(data: str, seeds: int, samples: int = FEW_SAMPLES) -> Shares:
    """Return the shares of families of paired t-tests with any false rejection.

    Each family compares 23 equal methods with one baseline, on the same seeds.
    """
    size = (samples, COMPARISONS + 1, seeds)
    runs, uncorrected, corrected = (
        DATA[data].draw(make_generator(f"family {data}", seeds), size),
        0,
        0,
    )
    for methods in runs:
        p_values = [paired_t_test(method, methods[0]).p_value for method in methods[1:]]
        uncorrected += min(p_values) <= ALPHA
        corrected += min(correct_by_holm(p_values)) <= ALPHA
    return {"uncorrected": float(uncorrected / samples), "Holm": float(corrected / samples)}


def simulate_tasks(tasks: int, seeds: int, samples: int = FEW_SAMPLES // 2) -> Shares:
    """Return the coverage of the interval of an interquartile mean over tasks; the true one is 0.

    The means of the tasks are spread evenly about 0, so that the interquartile mean is 0, too.
    """
    offsets = np.linspace(-1, 1, tasks)
    draws = make_generator(f"tasks {tasks}", seeds).normal(size=(samples, seeds, tasks)) + offsets
    intervals = [aggregate_interval(table, draws=500) for table in draws]
    return {"interquartile mean": float(np.mean([i.low <= 0 <= i.high for i in intervals]))}


@dataclass(frozen=True)
class Simulation:
    """Table of simulated shares.

    Args:
        name: Name of the table in the results.
        title: Title on the page.
        simulate: Returns the shares of a case with a number of seeds.
        cases: Names of the cases → the first argument of ``simulate``.
        samples: Number of samples per cell.
    """

    name: str
    title: str
    simulate: Callable[..., Shares]
    cases: Mapping[str, object]
    samples: int


SIMULATIONS = [
    Simulation(
        "size",
        "Size: rejections at 0.05 without a difference, in %",
        lambda data, seeds: simulate_tests(data, seeds, 0.0),
        {name: name for name in DATA},
        SAMPLES,
    ),
    Simulation(
        "power",
        "Power: rejections at 0.05 of a difference of one standard deviation, in %",
        lambda data, seeds: simulate_tests(data, seeds, 1.0),
        {name: name for name, data in DATA.items() if data.symmetric},
        SAMPLES,
    ),
    Simulation(
        "coverage",
        "Coverage of 95 % intervals of the mean, in %",
        simulate_coverage,
        {name: name for name in DATA},
        FEW_SAMPLES,
    ),
    Simulation(
        "clients",
        f"Rejections at 0.05 without a difference, {CLIENTS} clients per seed, in %",
        simulate_clients,
        {f"correlation {value} within a seed": value for value in (0.0, 0.1, 0.5)},
        FEW_SAMPLES,
    ),
    Simulation(
        "ranks",
        "Ranks: rejections at 0.05 of equal methods, in %; a seed is a block",
        simulate_ranks,
        {f"{number} methods": number for number in (3, 5, 10)},
        FEW_SAMPLES,
    ),
    Simulation(
        "family",
        f"Families of {COMPARISONS} t-tests with any false rejection at 0.05, in %",
        simulate_family,
        {name: name for name in ("normal", "heavy tails")},
        FEW_SAMPLES,
    ),
    Simulation(
        "tasks",
        "Coverage of 95 % intervals of the interquartile mean over tasks, in %",
        simulate_tasks,
        {f"{number} tasks": number for number in (4, 26)},
        FEW_SAMPLES // 2,
    ),
]


def simulate_all(simulations: Iterable[Simulation]) -> Iterator[dict[str, object]]:
    """Yield a row for each quantity of each cell."""
    for simulation in simulations:
        for case, argument in simulation.cases.items():
            for seeds in SEEDS:
                cell = {"table": simulation.name, "case": case, "seeds": seeds}
                for quantity, share in simulation.simulate(argument, seeds).items():
                    yield {
                        **cell,
                        "quantity": quantity,
                        "samples": simulation.samples,
                        "share": share,
                    }


def read_rows() -> list[Row]:
    """Return the committed rows; none without results.csv."""
    if not (HERE / "results.csv").exists():
        return []
    with (HERE / "results.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def make_page(rows: Sequence[Row]) -> str:
    """Return the page of all tables."""
    parts = ["# Sizes, powers and coverages\n"]
    parts += ["Made by `python -m experiments.statistics.run`; [what they say](README.md).\n"]
    for simulation in SIMULATIONS:
        shares = {
            (row["case"], row["quantity"], row["seeds"]): float(row["share"])
            for row in rows
            if row["table"] == simulation.name
        }
        lines = [
            [case, quantity, *(f"{100 * shares[case, quantity, str(n)]:.1f}" for n in SEEDS)]
            for case, quantity in dict.fromkeys(cell[:2] for cell in shares)
        ]
        if simulation.name == "power":
            powers = [f"{100 * paired_t_power(1.0, 1.0, n):.1f}" for n in SEEDS]
            lines.insert(0, ["normal", "`paired_t_power`", *powers])
        error = 100 * math.sqrt(0.05 * 0.95 / simulation.samples)
        head = ["", "", *(f"{number} seeds" for number in SEEDS)]
        parts += [f"## {simulation.title}\n", markdown(head, lines)]
        parts += [f"{simulation.samples:,} samples per cell: a share of 5 % ± {error:.2f}.\n"]
    return "\n".join(parts)


def main() -> None:
    """Simulate the cells of some tables, and write results.csv and table.md."""
    names = [simulation.name for simulation in SIMULATIONS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", help=f"tables to simulate: {', '.join(names)}; or all")
    parser.add_argument("--page", action="store_true", help="write table.md from results.csv alone")
    arguments = parser.parse_args()
    if unknown := set(arguments.tables) - set(names):
        parser.error(f"Expected tables among {', '.join(names)} but got {', '.join(unknown)}.")
    if not arguments.page:
        tables = arguments.tables or names
        rows: list[Mapping[str, object]] = [r for r in read_rows() if r["table"] not in tables]
        rows += simulate_all(s for s in SIMULATIONS if s.name in tables)
        rows.sort(key=lambda row: names.index(str(row["table"])))
        with (HERE / "results.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    (HERE / "table.md").write_text(make_page(read_rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
