"""Sampling noise of a small test set: figures of clients that do not differ at all.

No model is trained. Each client errs in each test image with the same probability, one minus the
published accuracy. The spreads that such clients show are due to the number of test images alone.
"""

import functools
from dataclasses import astuple, dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from experiments.fedtilt.paper import METRICS, SPREADS, Figures
from pl_fed.functional.fairness import class_std
from pl_fed.random import generator
from pl_fed.statistics import Interval
from pl_fed.statistics.intervals import LEVEL

SEED = 0
DRAWS = 1000
IMAGES = {"mnist": 60, "fmnist": 60, "cifar10": 50}  # a tenth of a client's own samples


@dataclass(frozen=True)
class Design:
    """Design of a test: its clients, and the groups of test images in each client.

    Args:
        clients: Number of tested clients, at least 1.
        images: Number of test images of a client, a multiple of ``groups``.
        groups: Number of test groups of equal size.
    """

    clients: int
    images: int
    groups: int


def measure(accuracies: Tensor, stds: Tensor) -> Tensor:
    """Return the four figures in the order of ``METRICS``, in %.

    Args:
        accuracies: Accuracy of each client in [0, 1], shape [..., clients].
        stds: Standard deviation over the client's test groups, shape [..., clients].

    Returns:
        Tensor of shape [..., 4].
    """
    means = [accuracies.mean(-1), stds.mean(-1)]
    spreads = [values.std(-1, correction=0) for values in (accuracies, stds)]
    return 100 * torch.stack([means[0], spreads[0], means[1], spreads[1]], dim=-1)


@functools.cache
def simulate(accuracy: float, design: Design, draws: int = DRAWS, seed: int = SEED) -> Tensor:
    """Return the figures of tests of identical clients, in %, shape [draws, 4].

    Args:
        accuracy: Probability of a correct prediction, in %.
        design: The test.
        draws: Number of independent tests.
        seed: Seed of the draws. Equal arguments give equal numbers.
    """
    size = design.images // design.groups
    count = torch.full((draws * design.clients, design.groups), float(size))
    chance = torch.full_like(count, accuracy / 100)
    parts = [round(100 * accuracy), design.clients, design.images, design.groups]
    draw = generator(seed, "identical clients", *parts)
    correct = torch.binomial(count, chance, generator=draw).double()
    accuracies = correct.sum(1) / (size * design.groups)
    shape = (draws, design.clients)
    return measure(accuracies.view(shape), class_std(correct, count).view(shape))


def expect(accuracy: float, design: Design) -> Figures:
    """Return the expected figures of identical clients."""
    mean = simulate(accuracy, design).mean(0).tolist()
    return Figures(**dict(zip(METRICS, mean)))


def rate_small_spread(figures: Figures, design: Design) -> float:
    """Return the probability that identical clients have at most the published σ."""
    drawn = simulate(figures.accuracy, design)[:, list(METRICS).index("accuracy_std")]
    return float((drawn <= figures.accuracy_std).double().mean())


@functools.cache
def deal_all_errors(
    accuracy: float, design: Design, draws: int = DRAWS, seed: int = SEED
) -> Tensor:
    """Return the figures of tests of identical clients with the published accuracy itself.

    The errors are dealt at random to all test images of all clients. Their number gives the
    accuracy; a fraction is rounded up or down at random, so that the mean is exact.

    Args:
        accuracy: The accuracy over all clients, in %.
        design: The test.
        draws: Number of independent tests.
        seed: Seed of the draws. Equal arguments give equal numbers.

    Returns:
        Figures in %, shape [draws, 4].
    """
    draw = np.random.default_rng([seed, round(100 * accuracy), *astuple(design)])
    size = design.images // design.groups
    sizes = [size] * (design.clients * design.groups)
    errors = (1 - accuracy / 100) * design.clients * design.images
    dealt = [
        draw.multivariate_hypergeometric(sizes, int(errors + draw.random())) for _ in range(draws)
    ]
    wrong = torch.from_numpy(np.stack(dealt)).view(-1, design.groups)
    count = torch.full_like(wrong, size)
    accuracies = 1 - wrong.double().sum(1) / design.images
    shape = (draws, design.clients)
    return measure(accuracies.view(shape), class_std(count - wrong, count).view(shape))


def rate_differences(first: Figures, second: Figures, design: Design) -> dict[str, float]:
    """Return p-values of the differences of two rows' spreads, by figure.

    Null hypothesis: a method makes as many errors as its published accuracy says, and they are
    dealt at random to the test images of all clients. The p-value is the share of draws with a
    difference as far from the expected one as the published.
    """
    drawn = deal_all_errors(first.accuracy, design)
    drawn = drawn - deal_all_errors(second.accuracy, design, seed=SEED + 1)
    p_values = {}
    for metric in SPREADS:
        values = drawn[:, list(METRICS).index(metric)]
        published = getattr(first, metric) - getattr(second, metric)
        distance = abs(published - float(values.mean()))
        p_values[metric] = float(
            ((values - values.mean()).abs() >= distance - 1e-9).double().mean()
        )
    return p_values


def fit_slope(rows: list[Figures]) -> tuple[Interval, float]:
    """Return the slope of log μ_σ against log p(1 − p) with its 95 % interval, and r.

    p is the accuracy. The standard deviation of sampling noise is √(p (1 − p) / images), slope ½.
    With few errors its mean over clients is smaller, because clients without errors have none, so
    that the slope is above ½. The rows share data sets and methods, so that the interval, which
    takes them as independent, is too narrow.
    """
    shares = torch.tensor([figures.accuracy / 100 for figures in rows], dtype=torch.float64)
    means = torch.tensor([figures.class_std_mean for figures in rows], dtype=torch.float64)
    line = stats.linregress((shares * (1 - shares)).log(), means.log())
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(rows) - 2) * line.stderr)
    middle = float(line.slope)
    return Interval(middle, middle - half, middle + half), float(line.rvalue)
