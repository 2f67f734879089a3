"""Bounds on the spreads that FedTilt's tables report: for any model and any training.

One test of n clients, K test groups of equal size in each of them. All numbers are in %. A client
has accuracy a_k in group k, and lacks x_k = 100 − a_k ≥ 0. Let D = mean_k x_k = 100 − (the client's
accuracy), and let s be the population standard deviation of a_k over the K groups. Over clients, d
= mean D = 100 − accuracy, σ is the standard deviation of D (or of accuracy), μ_σ the mean of s and
σ_σ its standard deviation. Then

(a) μ_σ ≤ d √(K − 1),
(b) μ_σ² + σ_σ² ≤ (K − 1) (σ² + d²),
(c) |σ √(K − 1) − σ_σ| ≤ √(n − 1) (d √(K − 1) − μ_σ).

Proof. The x_k are not negative, so Σ x_k² ≤ (Σ x_k)² = K² D². Hence s² = (1/K) Σ x_k² − D² ≤
(K − 1) D², for each client. The root of it, averaged over clients, is (a). Its average over clients
is (b), because mean s² = μ_σ² + σ_σ² and mean D² = σ² + d². For (c), let t = D √(K − 1) − s ≥ 0,
with mean d √(K − 1) − μ_σ. n numbers that are not negative have a standard deviation of at most
√(n − 1) times their mean. That of t is at least the difference of those of D √(K − 1) and s, by the
triangle inequality. Equality holds in all three if each client has all its errors in one group,
which needs D ≤ 100 / K. ∎

So a μ_σ near the limit (a) forces σ_σ to be near σ √(K − 1). A mean of several tests obeys (a), but
not always (b) and (c).

With the sample standard deviation (division by K − 1) over groups, s² is larger by K / (K − 1), so
that K replaces K − 1 in all bounds. Standard deviations over clients are population ones. Sample
ones over n clients have larger squares, by n / (n − 1); for n of 10 and 100, this changes no count
of the paper's rows.

Groups of unequal size do not obey the bounds: a client with 1 error in a group of 1 image, and none
in a group of 99, has D = 1 and s = 50. For two groups, the smaller with share q of the images,
s = |x_1 − x_2| / 2 ≤ max x_k / 2 ≤ D / (2 q), so that

(d) q ≤ d / (2 μ_σ).

The mean accuracy of n clients with T test images each is

(e) a multiple of 100 / (n T).
"""

import math
from collections.abc import Iterable

from experiments.fedtilt.paper import Figures

ROUNDING = 0.005  # published figures have two decimals
MOST_CLIENTS = 100  # of the paper's setting; with fewer tested clients, fewer rows are possible


def bound_mean(figures: Figures, groups: int, sample_std: bool = False) -> float:
    """Return bound (a), the largest possible μ_σ in %, at the figures' accuracy.

    Args:
        figures: The accuracy is used, in [0, 100].
        groups: Number K of test groups of equal size, at least 1.
        sample_std: Use the sample instead of the population standard deviation over groups.
    """
    return (100 - figures.accuracy) * math.sqrt(_factor(groups, sample_std))


def bound_square(figures: Figures, groups: int, sample_std: bool = False) -> float:
    """Return bound (b), the largest possible μ_σ² + σ_σ², at the figures' accuracy and σ.

    Args:
        figures: The accuracy and σ are used.
        groups: Number K of test groups of equal size, at least 1.
        sample_std: Use the sample instead of the population standard deviation over groups.
    """
    square = figures.accuracy_std**2 + (100 - figures.accuracy) ** 2
    return _factor(groups, sample_std) * square


def bound_minority_share(figures: Figures) -> float:
    """Return bound (d), the largest possible share of the smaller of two groups, at most 0.5."""
    if figures.class_std_mean == 0:
        return 0.5
    return min(0.5, (100 - figures.accuracy) / (2 * figures.class_std_mean))


def bound_gap(figures: Figures, groups: int, clients: int, sample_std: bool = False) -> float:
    """Return bound (c), the largest possible distance of σ_σ from σ √(K − 1).

    Args:
        figures: The accuracy and μ_σ are used.
        groups: Number K of test groups of equal size, at least 1.
        clients: Number n of tested clients, at least 1.
        sample_std: Use the sample instead of the population standard deviation over groups.
    """
    room = bound_mean(figures, groups, sample_std) - figures.class_std_mean
    return math.sqrt(clients - 1) * room


def is_possible(
    figures: Figures, groups: int, clients: int = MOST_CLIENTS, sample_std: bool = False
) -> bool:
    """Return whether the figures obey (a), (b) and (c), with all rounding in their favour.

    Args:
        figures: The figures, with two decimals.
        groups: Number K of test groups of equal size, at least 1.
        clients: Number n of tested clients, at least 1.
        sample_std: Use the sample instead of the population standard deviation over groups.
    """
    largest = Figures(
        accuracy=figures.accuracy - ROUNDING,
        accuracy_std=figures.accuracy_std + ROUNDING,
        class_std_mean=max(0.0, figures.class_std_mean - ROUNDING),
        class_std_std=max(0.0, figures.class_std_std - ROUNDING),
    )
    square = largest.class_std_mean**2 + largest.class_std_std**2
    root = math.sqrt(_factor(groups, sample_std))
    gap = abs(root * figures.accuracy_std - figures.class_std_std) - (root + 1) * ROUNDING
    limits = [
        (largest.class_std_mean, bound_mean(largest, groups, sample_std)),
        (square, bound_square(largest, groups, sample_std)),
        (gap, bound_gap(largest, groups, clients, sample_std)),
    ]
    return all(value <= limit + 1e-9 * (1 + abs(limit)) for value, limit in limits)


def count_possible(
    rows: Iterable[Figures], groups: int, clients: int = MOST_CLIENTS, sample_std: bool = False
) -> int:
    """Return the number of rows that obey (a), (b) and (c)."""
    return sum(is_possible(figures, groups, clients, sample_std) for figures in rows)


def is_multiple(accuracy: float, images: int) -> bool:
    """Return whether an accuracy in % obeys (e): k of ``images`` give it, rounded to two decimals.

    Halves may be rounded up or down.
    """
    nearest = round(accuracy / 100 * images)
    return abs(100 * nearest / images - accuracy) <= ROUNDING + 1e-9


def _factor(groups: int, sample_std: bool) -> int:
    return groups if sample_std else groups - 1
