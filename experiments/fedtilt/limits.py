"""Tables of FedTilt's published rows alone: possible readings, and the share of sampling noise."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from experiments.fedtilt.bounds import (
    bound_mean,
    bound_minority_share,
    count_possible,
    is_multiple,
    is_possible,
)
from experiments.fedtilt.noise import (
    DRAWS,
    IMAGES,
    Design,
    expect,
    fit_slope,
    rate_differences,
    rate_small_spread,
)
from experiments.fedtilt.paper import (
    BAND,
    CONDITION_WORDS,
    GROUP_WORDS,
    METRICS,
    SPREADS,
    Figures,
    describe,
    read_all_rows,
)
from experiments.grid import Row
from experiments.tables import COLOURS, DATA_NAMES, MARKERS, fold, markdown
from pl_fed.statistics import format_p_value

TEMPLATE = Path(__file__).parent / "published.md"
ROWS = read_all_rows()
FIGURES = [Figures.from_row(row) for row in ROWS]
OTHERS = [  # without Ditto's rows, which are from another code
    figures for row, figures in zip(ROWS, FIGURES) if row["method"] != "Ditto"
]
PAIRS = (("FedTilt", "Ditto"), ("FedTilt", "FedAvg"), ("Ditto", "FedAvg"))
LEVEL = 0.05
CLIENTS = (100, 10)  # tested clients: all of them, or one cohort
RatedPairs = dict[tuple[str, str, str], dict[str, float]]  # setting and methods → p-values


def images_of(row: Row) -> int:
    """Return the number of test images of a client with a tenth of its samples."""
    return IMAGES[row["setting"].split("/")[0]]


def tabulate_possible() -> str:
    """Return the numbers of published rows that obey the bounds, by reading."""
    rows = []
    for groups, words in GROUP_WORDS.items():
        for sample_std in (False, True):
            name = f"{words} of equal size" + (", sample standard deviation" if sample_std else "")
            counts = [
                f"{count_possible(figures, groups, clients, sample_std)} of {len(figures)}"
                for clients in CLIENTS
                for figures in (FIGURES, OTHERS)
            ]
            rows.append([name, *counts])
    head = [f"{n} clients: {text}" for n in CLIENTS for text in ("possible", "FedAvg and FedTilt")]
    return markdown(["test groups of a client", *head], rows)


def list_impossible(groups: int) -> str:
    """Return the names of the rows that are impossible with 100 tested clients."""
    names = [
        f"{row['method']}'s on {describe(row['setting'])}"
        for row, figures in zip(ROWS, FIGURES)
        if not is_possible(figures, groups)
    ]
    return "; ".join(names)


def tabulate_multiples() -> str:
    """Return the numbers of published accuracies that a number of tested clients can give."""
    rows = []
    for clients in CLIENTS:
        images = [clients * images_of(row) for row in ROWS]
        possible = [is_multiple(f.accuracy, n) for f, n in zip(FIGURES, images)]
        chance = sum(min(1.0, n / 10_000) for n in images)
        name = f"{clients} clients, 60 or 50 images each"
        rows.append([name, f"{sum(possible)} of {len(ROWS)}", f"{chance:.0f}"])
    return markdown(["tested clients", "possible accuracies", "expected by chance"], rows)


def tabulate_identical_clients() -> str:
    """Return the number of published spreads that identical clients explain, by reading."""
    rows = []
    for groups, words in GROUP_WORDS.items():
        for clients in CLIENTS:
            agrees = {metric: 0 for metric in SPREADS}
            for row, figures in zip(ROWS, FIGURES):
                if row["method"] != "Ditto":
                    expected = expect(figures.accuracy, Design(clients, images_of(row), groups))
                    for metric in SPREADS:
                        gap = abs(getattr(expected, metric) - getattr(figures, metric))
                        agrees[metric] += gap <= BAND
            rows.append([f"{words}, {clients} clients", *map(str, agrees.values())])
    best = [str(count_best_constant(metric)) for metric in SPREADS]
    rows.append(["for comparison: the best single number for all rows", *best])
    heads = [f"{METRICS[metric].split()[0]}, of {len(OTHERS)}" for metric in SPREADS]
    return markdown(["no training at all", *heads], rows)


def count_best_constant(metric: str) -> int:
    """Return the largest number of rows of FedAvg and FedTilt within the band of one number."""
    values = [getattr(figures, metric) for figures in OTHERS]
    return max(sum(0 <= value - low <= 2 * BAND for value in values) for low in values)


def count_small_spreads(clients: int, level: float = 0.01) -> int:
    """Return the number of rows with a smaller σ than identical clients have, at a level."""
    return sum(
        rate_small_spread(figures, Design(clients, images_of(row), 10)) < level
        for row, figures in zip(ROWS, FIGURES)
    )


def tabulate_rows() -> str:
    """Return all published rows with their bounds, and those of identical clients."""
    rows = []
    for row, figures in zip(ROWS, FIGURES):
        cells = [f"{describe(row['setting'])}: {row['method']}"]
        cells += [f"{getattr(figures, metric):.2f}" for metric in METRICS]
        for groups in GROUP_WORDS:
            mark = "✓" if is_possible(figures, groups) else "✗"
            cells.append(f"{min(50.0, bound_mean(figures, groups)):.2f} {mark}")
        cells.append(f"{bound_minority_share(figures):.2f}")
        for groups in GROUP_WORDS:
            expected = expect(figures.accuracy, Design(100, images_of(row), groups))
            cells.append(" / ".join(f"{getattr(expected, metric):.2f}" for metric in SPREADS))
        rows.append(cells)
    head = ["row", "accuracy, %", "σ", "μ_σ", "σ_σ", "largest μ_σ, two classes"]
    head += ["largest μ_σ, ten groups", "largest share of the smaller of two classes"]
    head += [f"no training, {words}: σ / μ_σ / σ_σ" for words in GROUP_WORDS.values()]
    return markdown(head, rows)


def rate_published_differences(clients: int) -> RatedPairs:
    """Return the p-values of the spreads' differences in ten groups, for all pairs of methods."""
    rated: RatedPairs = {}
    for setting in dict.fromkeys(row["setting"] for row in ROWS):
        own = {r["method"]: f for r, f in zip(ROWS, FIGURES) if r["setting"] == setting}
        design = Design(clients, IMAGES[setting.split("/")[0]], 10)
        for first, second in PAIRS:
            rated[setting, first, second] = rate_differences(own[first], own[second], design)
    return rated


def tabulate_differences() -> str:
    """Return the number of differences within the noise, and all p-values folded."""
    hundred, ten = (rate_published_differences(clients) for clients in CLIENTS)
    rows = []
    for data, name in DATA_NAMES.items():
        for pair in PAIRS:
            columns = [
                [key for key in ten if key[1:] == pair and key[0] == f"{data}/{condition}"]
                for condition in CONDITION_WORDS
            ]
            keys = [key for column in columns for key in column]
            cells = [_count_noise(ten, column) for column in [*columns, keys]]
            rows.append([f"{name}: {' − '.join(pair)}", *cells, _count_noise(hundred, keys)])
    head = ["10 clients: " + words for words in [*CONDITION_WORDS.values(), "all"]]
    counts = markdown(["spreads within the noise", *head, "100 clients: all"], rows)
    full = [
        [f"{describe(key[0])}: {' − '.join(key[1:])}{_mark_impossible(key)}"]
        + [format_p_value(p) for table in (ten, hundred) for p in table[key].values()]
        for key in ten
    ]
    heads = [f"{METRICS[m].split()[0]}, {n} clients" for n in (10, 100) for m in SPREADS]
    return counts + "\n" + fold("All p-values", markdown(["", *heads], full))


def count_ordered_by_accuracy() -> str:
    """Return the number of pairs in which the more accurate method has the smaller μ_σ."""
    ordered = []
    for setting in dict.fromkeys(row["setting"] for row in ROWS):
        own = [figures for row, figures in zip(ROWS, FIGURES) if row["setting"] == setting]
        for first, second in itertools.combinations(own, 2):
            gap = first.class_std_mean - second.class_std_mean
            ordered.append((first.accuracy - second.accuracy) * gap < 0)
    return f"{sum(ordered)} of {len(ordered)}"


def count_noise_by_figure(first: str, second: str) -> str:
    """Return in how many settings a difference is within the noise of ten clients, by figure."""
    rated = rate_published_differences(min(CLIENTS))
    pairs = [p_values for key, p_values in rated.items() if key[1:] == (first, second)]
    texts = [
        f"{METRICS[metric].split()[0]} in {sum(p[metric] >= LEVEL for p in pairs)}"
        for metric in SPREADS
    ]
    return f"{', '.join(texts[:-1])} and {texts[-1]} of {len(pairs)} settings"


def _mark_impossible(key: tuple[str, str, str]) -> str:
    """Return a mark for a pair with a row that is impossible in ten groups, for 100 clients."""
    setting, *methods = key
    found = [
        is_possible(figures, 10)
        for row, figures in zip(ROWS, FIGURES)
        if row["setting"] == setting and row["method"] in methods
    ]
    return "" if all(found) else " †"


def _count_noise(rated: RatedPairs, keys: Iterable[tuple[str, str, str]]) -> str:
    """Return the number of differences that are as large without any difference of methods."""
    keys = list(keys)
    explained = [p_value >= LEVEL for key in keys for p_value in rated[key].values()]
    marks = "".join(sorted({_mark_impossible(key) for key in keys}))
    return f"{sum(explained)} of {len(explained)}{marks}"


def describe_slope() -> str:
    """Return the slopes of log μ_σ against log p(1 − p): published, and of identical clients."""
    line, r = fit_slope(FIGURES)
    texts = []
    for groups, words in GROUP_WORDS.items():
        designs = [Design(100, images_of(row), groups) for row in ROWS]
        noise = [expect(f.accuracy, design) for f, design in zip(FIGURES, designs)]
        texts.append(f"{fit_slope(noise)[0].estimate:.2f} for identical clients in {words}")
    proportional = [replace(f, class_std_mean=100 - f.accuracy) for f in FIGURES]
    texts.append(
        f"{fit_slope(proportional)[0].estimate:.2f} for spreads in proportion to the errors"
    )
    return f"{line.text(2)}, r = {r:.2f}. Others: {', '.join(texts)}"


def draw_published(path: Path) -> None:
    """Draw μ_σ of all published rows against p(1 − p), with noise and the bound of two classes."""
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    for number, (data, name) in enumerate(DATA_NAMES.items()):
        own = [f for r, f in zip(ROWS, FIGURES) if r["setting"].split("/")[0] == data]
        shares = [f.accuracy / 100 for f in own]
        axes.plot(
            [p * (1 - p) for p in shares],
            [f.class_std_mean for f in own],
            MARKERS[number],
            color=COLOURS[number + 1],
            markeredgecolor="black",
            label=f"{name}, published",
        )
    accuracies = [0.5 + 0.493 * math.sin(step * math.pi / 80) for step in range(41)]
    variances = [p * (1 - p) for p in accuracies]
    noise = [expect(100 * p, Design(100, 60, 10)).class_std_mean for p in accuracies]
    axes.plot(
        variances, noise, color=COLOURS[0], label="identical clients, ten groups of six images"
    )
    bound = [100 * (1 - p) for p in accuracies]
    axes.plot(variances, bound, "--", color=COLOURS[5], label="bound for two equal classes")
    axes.fill_between(variances, bound, 100, color=COLOURS[5], alpha=0.08)
    axes.set(xscale="log", yscale="log", ylim=(1, 50), xlabel="p(1 − p), p the published accuracy")
    axes.set_ylabel("spread within clients, μ_σ (points)")
    axes.set_title("Published spreads beside the noise of a small test set", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)


def describe_published() -> str:
    """Return the section on the published rows: summary, counts and folded tables."""
    title = "All published rows: bounds and identical clients"
    return TEMPLATE.read_text().format(
        possible=tabulate_possible(),
        impossible=list_impossible(10),
        smallest=min(map(bound_minority_share, FIGURES)),
        rows=len(ROWS),
        slope=describe_slope(),
        band=BAND,
        identical=tabulate_identical_clients(),
        level=100 * LEVEL,
        draws=DRAWS,
        ordered=count_ordered_by_accuracy(),
        fedavg=count_noise_by_figure("FedTilt", "FedAvg"),
        ditto=count_noise_by_figure("FedTilt", "Ditto"),
        differences=tabulate_differences(),
        small_hundred=count_small_spreads(100),
        small_ten=count_small_spreads(10),
        multiples=tabulate_multiples(),
        full=fold(title, tabulate_rows()),
    )
