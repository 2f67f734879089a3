"""Tables of our runs of "own 10 %" beside the paper: agreement by reading, and paired tests."""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.fedtilt.limits import LEVEL, PAIRS
from experiments.fedtilt.noise import expect
from experiments.fedtilt.paper import BAND, METRICS, SPREADS, Figures, describe, read_all_rows
from experiments.fedtilt.readings import (
    READINGS,
    TEN_GROUPS,
    TESTED_MODELS,
    ClientResults,
    ClientRun,
    Reading,
    count_never_drawn,
    measure_cohort_noise,
    rate_cohorts_in_band,
)
from experiments.tables import DATA_NAMES, Comparison, fold, markdown
from pl_fed.random import generator
from pl_fed.statistics import (
    correct_by_holm,
    format_p_value,
    paired_differences,
    paired_t_test,
    swap_test,
    t_interval,
)

TEMPLATE = Path(__file__).parent / "own.md"
PUBLISHED = {(row["setting"], row["method"]): Figures.from_row(row) for row in read_all_rows()}
PERSONAL = {"FedAvg": "FedAvg, w_n after 10 local passes", "Ditto": "Ditto", "FedTilt": "FedTilt"}
SYMBOLS = {metric: title.split()[0].strip(",") for metric, title in METRICS.items()}
TWO_CLASSES = READINGS[0]
SWAPS = 10_000  # of a permutation test
Floats = NDArray[np.float64]
Compared = dict[tuple[str, str], dict[str, Comparison]]  # by setting and row, then by figure


def compare(results: ClientResults, reading: Reading = TEN_GROUPS) -> Compared:
    """Return the comparisons of our runs with the paper under a reading."""
    compared: Compared = {}
    for setting in results.settings:
        for name, (method, _) in TESTED_MODELS.items():
            for metric, values in results.values(setting, name, reading).items():
                paper = getattr(PUBLISHED[setting, method], metric)
                row = compared.setdefault((setting, name), {})
                row[metric] = Comparison(paper, None, values, BAND)
    return compared


def expect_untrained(results: ClientResults, reading: Reading) -> Compared:
    """Return the comparisons of identical clients at the published accuracies with the paper."""
    compared: Compared = {}
    for setting, name in compare(results, reading):
        published = PUBLISHED[setting, TESTED_MODELS[name][0]]
        expected = expect(published.accuracy, reading.design_for(setting))
        compared[setting, name] = {
            metric: Comparison(getattr(published, metric), None, [getattr(expected, metric)], BAND)
            for metric in METRICS
        }
    return compared


def count_agreeing(
    compared: Compared, data: str | None, names: Collection[str], metrics: Iterable[str]
) -> str:
    """Return the number of agreeing figures of some rows, over a data set's or all settings."""
    agrees = [
        figures[metric].agrees
        for (setting, row), figures in compared.items()
        for metric in metrics
        if data in (None, setting.split("/")[0]) and row in names
    ]
    return f"{sum(agrees)} of {len(agrees)}" if agrees else "–"


def tabulate_agreement(results: ClientResults, metrics: Sequence[str]) -> str:
    """Return the number of agreeing figures by data set and reading, and without training."""
    readings = READINGS if "accuracy" not in metrics else READINGS[::2]
    tables = {
        (reading.clients if "accuracy" in metrics else reading.name): compare(results, reading)
        for reading in readings
    }
    if "accuracy" not in metrics:
        untrained = {f"no training: {r.name}": expect_untrained(results, r) for r in READINGS}
        tables = {**tables, **untrained}
    rows = [
        [f"{DATA_NAMES[data]}: {name}"]
        + [count_agreeing(compared, data, [row], metrics) for row in TESTED_MODELS]
        for data in dict.fromkeys(setting.split("/")[0] for setting in results.settings)
        for name, compared in tables.items()
    ]
    return markdown(["", *TESTED_MODELS], rows)


def tabulate_all_agreement(tables: Mapping[str, Compared]) -> str:
    """Return the number of agreeing figures, all four together, by data set and reading.

    Args:
        tables: Names of readings → comparisons.
    """
    rows = [
        [f"{name}: {reading}"]
        + [count_agreeing(compared, data, [row], METRICS) for row in TESTED_MODELS]
        for data, name in DATA_NAMES.items()
        for reading, compared in tables.items()
    ]
    head = ["figures in the band", *TESTED_MODELS]
    return markdown(head, [row for row in rows if set(row[1:]) != {"–"}])


def tabulate_figures(compared: Mapping[tuple[str, str], Mapping[str, Comparison]]) -> str:
    """Return all figures: the paper's, ours with its interval over seeds, and the difference."""
    rows = [
        [f"{describe(setting)}: {name}"]
        + [cell for metric in METRICS for cell in interval_cells(row[metric])]
        for (setting, name), row in compared.items()
    ]
    head = [cell for symbol in SYMBOLS.values() for cell in (symbol, "ours", "difference")]
    return markdown(["", *head], rows)


def tabulate_reading(results: ClientResults, reading: Reading) -> str:
    """Return all figures under a reading, with a row of identical clients for each method."""
    compared, untrained = compare(results, reading), expect_untrained(results, reading)
    rows: Compared = {}
    for setting in results.settings:
        rows |= {key: row for key, row in compared.items() if key[0] == setting}
        rows |= {
            (setting, f"{method}, no training"): untrained[setting, name]
            for method, name in PERSONAL.items()
            if (setting, name) in untrained
        }
    return tabulate_figures(rows)


def interval_cells(comparison: Comparison) -> list[str]:
    """Return three cells: the paper's figure, ours with its interval over seeds, the difference."""
    paper, _, difference = comparison.cells(2)
    return [paper, t_interval(comparison.ours).text(2), difference]


def tabulate_cohorts(results: ClientResults) -> str:
    """Return the share of random cohorts of ten clients with all four figures in the band."""
    rows = []
    for setting in results.settings:
        cells = [describe(setting)]
        for method in PERSONAL:
            shares = [
                rate_cohorts_in_band(run, PUBLISHED[setting, method])
                for run in results.select(setting, method)
            ]
            cells.append(f"{100 * statistics.mean(shares):.0f} %" if shares else "–")
        rows.append(cells)
    return markdown(["all four figures in the band", *PERSONAL.values()], rows)


def tabulate_cohort_noise(results: ClientResults) -> tuple[str, list[bool]]:
    """Return published differences beside those of two cohorts of one run of FedTilt.

    Also returns, for each published difference, whether it is smaller.
    """
    rows, smaller = [], []
    for setting in results.settings:
        runs = results.select(setting, "FedTilt")
        if not runs:
            continue
        noise = measure_cohort_noise(runs)
        cells = [describe(setting), *(f"{noise[metric]:.2f}" for metric in SPREADS)]
        for first, second in PAIRS:
            gaps = [
                getattr(PUBLISHED[setting, first], metric)
                - getattr(PUBLISHED[setting, second], metric)
                for metric in SPREADS
            ]
            marks = [abs(gap) <= noise[metric] for gap, metric in zip(gaps, SPREADS)]
            text = " / ".join(f"{gap:+.2f}".replace("-", "−") for gap in gaps)
            cells.append(f"{text} ({sum(marks)} of {len(marks)})")
            smaller += marks
        rows.append(cells)
    pairs = [f"the paper: {first} − {second}" for first, second in PAIRS]
    head = ["", *(f"noise of {SYMBOLS[metric]}" for metric in SPREADS), *pairs]
    return markdown(head, rows), smaller


@dataclass(frozen=True)
class PairTest:
    """Test of one figure of two methods' personal models, tested on all clients, in two classes.

    Args:
        setting: Data set and condition, such as ``mnist/clean``.
        methods: Names of the two methods.
        metric: Name of the figure, one of ``METRICS``.
        paper: The paper's first figure minus its second, in points.
        first: The first method's figures, one per seed.
        second: The second method's figures on the same seeds.
        client_p_value: p-value of a permutation test that swaps the methods of a client.
    """

    setting: str
    methods: tuple[str, str]
    metric: str
    paper: float
    first: Sequence[float]
    second: Sequence[float]
    client_p_value: float

    @property
    def is_worse(self) -> bool:
        """Whether the first method is less accurate, or has the larger spread."""
        difference = paired_differences(self.first, self.second).mean()
        return bool(difference < 0 if self.metric == "accuracy" else difference > 0)


def compare_pairs(results: ClientResults) -> list[PairTest]:
    """Return the tests of all figures for all pairs of methods with runs of equal seeds."""
    return [
        compare_pair(setting, methods, metric, runs)
        for setting in results.settings
        for methods in PAIRS
        if (runs := list(results.pairs(setting, methods[0], methods[1])))
        for metric in METRICS
    ]


def compare_pair(
    setting: str,
    methods: tuple[str, str],
    metric: str,
    runs: Sequence[tuple[ClientRun, ClientRun]],
) -> PairTest:
    """Return the test of one figure of two methods.

    Args:
        setting: Data set and condition, such as ``mnist/clean``.
        methods: Names of the two methods.
        metric: Name of the figure.
        runs: Runs of the two methods, one pair per seed.
    """
    first_runs = [first for first, _ in runs]
    second_runs = [second for _, second in runs]
    first_paper, second_paper = (getattr(PUBLISHED[setting, method], metric) for method in methods)
    test = swap_test(
        _client_values(first_runs, metric),
        _client_values(second_runs, metric),
        _deviation if metric in ("accuracy_std", "class_std_std") else _mean,
        draws=SWAPS,
        seed=TorchUniforms(),
    )
    return PairTest(
        setting,
        methods,
        metric,
        paper=first_paper - second_paper,
        first=[_figure(run, metric) for run in first_runs],
        second=[_figure(run, metric) for run in second_runs],
        client_p_value=test.p_value,
    )


def _figure(run: ClientRun, metric: str) -> float:
    """Return a figure of a run's personal models, in %."""
    return float(run.figures("personal", TWO_CLASSES)[list(METRICS).index(metric)])


def _client_values(runs: Iterable[ClientRun], metric: str) -> Tensor:
    """Return the clients' values behind a figure: accuracies or spreads, [seeds, clients]."""
    if metric.startswith("class"):
        return torch.stack([run.stds("personal", TWO_CLASSES.groups) for run in runs])
    return torch.stack([run.accuracies("personal") for run in runs])


def _mean(values: Floats) -> Floats:
    return np.asarray(values.mean(-1))


def _deviation(values: Floats) -> Floats:
    return np.asarray(values.std(-1))


class TorchUniforms:
    """Uniform numbers of torch's generator, with which the committed p-values were drawn."""

    def __init__(self) -> None:
        self._generator = generator(0, "swaps")

    def random(self, size: tuple[int, ...]) -> NDArray[np.float32]:
        """Return numbers that are uniform on [0, 1), of the given shape."""
        return torch.rand(size, generator=self._generator).numpy()


def tabulate_pairs(tests: Sequence[PairTest]) -> str:
    """Return the table of tests, with p-values corrected by Holm's method for each kind."""
    seeds = correct_by_holm([paired_t_test(test.first, test.second).p_value for test in tests])
    clients = correct_by_holm([test.client_p_value for test in tests])
    rows = [
        [
            f"{describe(test.setting)}: {' − '.join(test.methods)}",
            SYMBOLS[test.metric],
            f"{test.paper:+.2f}".replace("-", "−"),
            t_interval(paired_differences(test.first, test.second)).text(2, sign=True),
            str(len(test.first)),
            format_p_value(over_seeds),
            format_p_value(over_clients),
        ]
        for test, over_seeds, over_clients in zip(tests, seeds, clients)
    ]
    head = ["", "figure", "the paper", "ours", "seeds", "p over seeds", "p over clients"]
    return markdown(head, rows)


def count_small(p_values: Iterable[float]) -> str:
    """Return the number of p-values below the level after Holm's correction, such as 3 of 72."""
    corrected = [p for p in correct_by_holm(list(p_values)) if not math.isnan(p)]
    return f"{sum(p < LEVEL for p in corrected)} of {len(corrected)}"


def count_disadvantages(tests: Sequence[PairTest], method: str) -> str:
    """Return how many differences that a test over clients finds are against a method."""
    corrected = correct_by_holm([test.client_p_value for test in tests])
    found = [
        test.is_worse
        for test, p_value in zip(tests, corrected)
        if test.methods[0] == method and p_value < LEVEL
    ]
    return f"{sum(found)} of {len(found)}"


def describe_never_drawn(seeds: Iterable[int]) -> str:
    """Return the number of clients that take part in no round, for each seed, in words."""
    return ", ".join(f"{count_never_drawn(seed)} (seed {seed})" for seed in seeds)


def describe_own(results: ClientResults) -> str:
    """Return the section on the runs of "own 10 %"; empty without runs."""
    if not results.runs:
        return ""
    tests = compare_pairs(results)
    noise, smaller = tabulate_cohort_noise(results)
    full = [
        fold(f"All figures: {reading.name}", tabulate_reading(results, reading))
        for reading in READINGS
    ]
    runs = [run for by_seed in results.runs.values() for run in by_seed.values()]
    return TEMPLATE.read_text().format(
        runs=len(runs),
        seeds=", ".join(map(str, results.seeds)),
        fewest=min(int(run.test_samples.min()) for run in runs),
        most=max(int(run.test_samples.max()) for run in runs),
        band=BAND,
        never=describe_never_drawn(results.seeds),
        spreads=tabulate_agreement(results, SPREADS),
        accuracies=tabulate_agreement(results, ["accuracy"]),
        cohorts=tabulate_cohorts(results),
        noise=noise,
        covered=sum(smaller),
        differences=len(smaller),
        level=LEVEL,
        small_seeds=count_small(paired_t_test(test.first, test.second).p_value for test in tests),
        small_clients=count_small(test.client_p_value for test in tests),
        against=count_disadvantages(tests, "FedTilt"),
        pairs=fold("All paired tests", tabulate_pairs(tests)),
        full="\n".join(full),
    )
