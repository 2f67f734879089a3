"""Sampling noise of a small test set: figures of clients that do not differ at all.

No model is trained. Each client errs in each test image with the same probability, one minus the
published accuracy. The spreads that such clients show are due to the number of test images alone.
"""

import functools
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from experiments.evidence import LEVEL, Interval
from experiments.fedtilt.paper import METRICS, Figures
from pl_fed.functional.fairness import class_std
from pl_fed.random import generator

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


def rate_differences(first: Figures, second: Figures, design: Design) -> dict[str, float]:
    """Return p-values of the differences of two rows' spreads, by figure.

    Null hypothesis: the clients of a method are identical and err at its published accuracy. The
    p-value is the share of draws with a difference as far from the expected one as the published.
    """
    drawn = simulate(first.accuracy, design) - simulate(second.accuracy, design, seed=SEED + 1)
    p_values = {}
    for place, metric in enumerate(METRICS):
        centred = drawn[:, place] - drawn[:, place].mean()
        published = getattr(first, metric) - getattr(second, metric)
        distance = abs(published - float(drawn[:, place].mean()))
        p_values[metric] = float((centred.abs() >= distance).double().mean())
    return p_values


def fit_slope(rows: list[Figures]) -> tuple[Interval, float]:
    """Return the slope of log μ_σ against log p(1 − p) with its 95 % interval, and r.

    p is the accuracy. The standard deviation of sampling noise is √(p (1 − p) / images), slope ½.
    With few errors its mean over clients is smaller, because clients without errors have none, so
    that the slope is above ½. A gap between two classes in proportion to the errors has slope 1.
    """
    shares = torch.tensor([figures.accuracy / 100 for figures in rows], dtype=torch.float64)
    means = torch.tensor([figures.class_std_mean for figures in rows], dtype=torch.float64)
    line = stats.linregress((shares * (1 - shares)).log(), means.log())
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(rows) - 2) * line.stderr)
    middle = float(line.slope)
    return Interval(middle, middle - half, middle + half), float(line.rvalue)
