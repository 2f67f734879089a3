"""FedTilt's figures beside ours: accuracy and three spreads, by setting and tested model.

A client's spread is over its two classes, or over ten random groups of its test images. The text
says neither.
"""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from experiments.experiment import group_rows, read_csv
from experiments.papers import DATA_NAMES, Comparison, fold, markdown
from pl_fed.functional.fairness import class_std
from pl_fed.random import generator
from pl_fed.statistics import t_interval

HERE = Path(__file__).parent
BAND = 2.0  # points: largest difference that counts as agreement, for all four figures
METRICS = ("accuracy", "accuracy_std", "class_std_mean", "class_std_std", "accuracy_worst10")
SYMBOLS = {
    "accuracy": "accuracy",
    "accuracy_std": "σ",
    "class_std_mean": "μ_σ",
    "class_std_std": "σ_σ",
}
CONDITIONS = {"clean": "clean", "corruption": "random corruptions", "gaussian": "Gaussian noise"}
TABLES = {"clean": "II", "corruption": "III", "gaussian": "VII"}  # of the paper
TESTED_MODELS = {  # rows of the tables → the method of our runs and the model
    "FedAvg, global w": ("FedAvg", "global"),
    "FedAvg, w_n after 10 local passes": ("FedAvg", "personal"),
    "FedAvg, w after 3 local steps": ("FedAvg, 3 steps", "personal"),
    "Ditto": ("Ditto", "personal"),
    "FedTilt": ("FedTilt", "personal"),
}
Compared = dict[tuple[str, str], dict[str, Comparison]]  # by setting and row, then by figure


def compare(ours: Mapping[tuple[str, str, str], list[list[float]]]) -> Compared:
    """Return the comparisons with the paper.

    Args:
        ours: The four figures in %, one list per seed, by setting, method and model.
    """
    compared: Compared = {}
    paper = read_csv(HERE / "paper.csv")
    for setting in dict.fromkeys(row["setting"] for row in paper):
        theirs = {row["method"]: row for row in paper if row["setting"] == setting}
        for name, (method, model) in TESTED_MODELS.items():
            if seeds := ours.get((setting, method, model)):
                published = theirs[method.split(",")[0]]
                compared[setting, name] = {
                    metric: Comparison(float(published[metric]), None, values, BAND)
                    for metric, values in zip(SYMBOLS, map(list, zip(*seeds)))
                }
    return compared


def compare_whole() -> Compared:
    """Return the comparisons of the tests on whole classes: all clients, two classes."""
    ours: dict[tuple[str, str, str], list[list[float]]] = {}
    for row in read_csv(HERE / "whole.csv"):
        for model in ("global", "personal"):
            values = [row[f"test/{model}/{metric}"] for metric in SYMBOLS]
            if all(values):
                key = (row["setting"], row["method"], model)
                ours.setdefault(key, []).append([100 * float(value) for value in values])
    return compare(ours)


def compare_own(groups: int = 10) -> Compared:
    """Return the comparisons of "own 10 %", tested on all clients.

    Args:
        groups: Number of random groups of a client's test images; 2 are its two classes.
    """
    ours: dict[tuple[str, str, str], list[list[float]]] = {}
    runs = group_rows(read_csv(HERE / "clients.csv"), "setting", "method", "seed")
    for (setting, method, seed), clients in sorted(runs, key=lambda run: int(run[0][2])):
        ordered = sorted(clients, key=lambda row: int(row["client"]))
        sizes = torch.tensor([int(row["test_samples"]) for row in ordered])
        for model in ("global", "personal"):
            if ordered[0][f"{model}_accuracy"]:
                accuracies, stds = (
                    torch.tensor(
                        [float(row[f"{model}_{name}"]) for row in ordered], dtype=torch.float64
                    )
                    for name in ("accuracy", "class_std")
                )
                if groups != 2:
                    errors = ((1 - accuracies) * sizes).round().long()
                    stds = deal_errors(errors, sizes, groups, int(seed))
                key = (setting, method, model)
                ours.setdefault(key, []).append(measure(accuracies, stds))
    return compare(ours)


def measure(accuracies: Tensor, stds: Tensor) -> list[float]:
    """Return the four figures in the order of ``SYMBOLS``, in %.

    Args:
        accuracies: The accuracy of each client, in [0, 1].
        stds: The standard deviation over the client's test groups.
    """
    means, deviations = (
        [float(100 * function(values)) for values in (accuracies, stds)]
        for function in (torch.mean, functools.partial(torch.std, correction=0))
    )
    return [means[0], deviations[0], means[1], deviations[1]]


def deal_errors(errors: Tensor, test_samples: Tensor, groups: int, seed: int) -> Tensor:
    """Deal each client's errors at random into groups of its test images.

    The draw is keyed by the seed and the client, so that two models with equal errors have equal
    spreads. Sizes of groups differ by at most one image.

    Args:
        errors: Number of errors of each client, int64 [clients].
        test_samples: Number of test images of each client, at least ``groups``, int64 [clients].
        groups: Number of test groups.
        seed: The seed of the run.

    Returns:
        Population standard deviation of the accuracies of a client's groups, float64 [clients].
    """
    correct, count = [], []
    for client, (wrong, size) in enumerate(zip(errors.tolist(), test_samples.tolist())):
        group_of = _shuffle_groups(size, groups, seed, client)
        correct.append(torch.bincount(group_of[wrong:], minlength=groups))
        count.append(torch.bincount(group_of, minlength=groups))
    return class_std(torch.stack(correct), torch.stack(count))


@functools.cache
def _shuffle_groups(size: int, groups: int, seed: int, client: int) -> Tensor:
    """Return the group of each test image in random order; the first images are the errors."""
    order = torch.randperm(size, generator=generator(seed, "test groups", client, size))
    return order.remainder(groups)


def describe(setting: str) -> str:
    """Return a setting in words."""
    data, condition = setting.split("/")
    return f"{DATA_NAMES[data]}, {CONDITIONS[condition]}"


def tabulate(compared: Compared) -> str:
    """Return all figures: the paper's, ours with its interval over seeds, and the difference."""
    rows = []
    for (setting, name), row in compared.items():
        cells = [f"{describe(setting)}: {name}"]
        for comparison in row.values():
            paper, _, difference = comparison.cells(2)
            cells += [paper, t_interval(comparison.ours).text(2), difference]
        rows.append(cells)
    head = [cell for symbol in SYMBOLS.values() for cell in (symbol, "ours", "difference")]
    return markdown(["", *head], rows)


def count_agreeing(compared: Compared, metrics: Iterable[str]) -> str:
    """Return the number of agreeing figures, such as ``10 of 24``."""
    agrees = [row[metric].agrees for row in compared.values() for metric in metrics]
    return f"{sum(agrees)} of {len(agrees)}"


def make_page() -> str:
    """Return the page of all figures."""
    parts = [
        "# FedTilt's figures beside ours\n",
        "`python -m experiments fedtilt/whole` and `fedtilt/own` make this page;"
        " [tables.md](tables.md) discusses it. Means over seeds in points, with 95 % intervals;"
        f" ✓ marks those within {BAND:g} points of the paper's.\n",
        "## Tests on whole classes\n",
    ]
    official = compare_whole()
    for condition, number in TABLES.items():
        selected = {key: row for key, row in official.items() if key[0].endswith(condition)}
        parts.append(fold(f"Table {number}, {CONDITIONS[condition]}", tabulate(selected)))
    parts.append("## Tests on 10 % of a client's own samples\n")
    for name, compared in (
        ("all clients, two classes", compare_own(2)),
        ("all clients, ten groups", compare_own(10)),
    ):
        spreads = count_agreeing(compared, list(SYMBOLS)[1:])
        counts = f"{count_agreeing(compared, ['accuracy'])} accuracies and {spreads} spreads agree"
        parts.append(fold(f"All figures: {name}; {counts}", tabulate(compared)))
    return "\n".join(parts)


def write() -> None:
    """Write figures.md."""
    (HERE / "figures.md").write_text(make_page(), encoding="utf-8")
