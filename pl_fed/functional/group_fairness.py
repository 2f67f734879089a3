"""Group fairness: gaps of a classifier between the groups of a sensitive attribute.

Demographic parity: C. Dwork, M. Hardt, T. Pitassi, O. Reingold and R. Zemel, "Fairness through
Awareness", ITCS 2012. Equalized odds: M. Hardt, E. Price and N. Srebro, "Equality of Opportunity in
Supervised Learning", NeurIPS 2016. Worst group accuracy: S. Sagawa, P. W. Koh, T. B. Hashimoto and
P. Liang, "Distributionally Robust Neural Networks for Group Shifts", ICLR 2020.

A gap is the largest minus the smallest rate of the groups with samples. With more than two classes,
it is the largest gap of a class against all others. With two classes this is the usual gap: the one
class has the gaps of the other.

A group without samples of a class has no true positive rate, and a group of a single class has no
false positive rate for it. A rate that no group has is left out. A rate that some groups lack makes
the gap undefined, NaN, and never 0: nobody has compared these groups. A gap needs two groups.

Counts are [..., 3, groups, classes]: the number of samples of each class, of samples that the model
assigns to each class, and of samples of each class that it assigns correctly.
"""

import torch
from torch import Tensor

GROUP_FIGURES = ("demographic_parity", "equalized_odds", "accuracy_gap", "accuracy_worst")
"""The names of the figures of :func:`measure_groups`; the last one is better if it is larger."""


def count_groups(
    positions: Tensor, groups: Tensor, targets: Tensor, predicted: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """Return the counts of samples by client, group and class.

    Args:
        positions: The position of each sample's client, int64 [samples].
        groups: The group of each sample, int64 [samples].
        targets: The class of each sample, int64 [samples].
        predicted: The class that the model assigns to each sample, int64 [samples].
        shape: The numbers of clients, groups and classes.

    Returns:
        int64 [clients, 3, groups, classes].

    Example:
        >>> zeros, classes = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 1])
        >>> counts = count_groups(zeros, zeros, classes, torch.tensor([1, 1, 1]), (1, 1, 2))
        >>> counts.tolist()
        [[[[1, 2]], [[0, 3]], [[0, 2]]]]
    """
    clients, num_groups, num_classes = shape
    counts = targets.new_zeros(clients, 3, num_groups, num_classes)
    add_group_counts(counts, positions, groups, targets, predicted)
    return counts


def add_group_counts(
    counts: Tensor, positions: Tensor, groups: Tensor, targets: Tensor, predicted: Tensor
) -> None:
    """Add samples to counts by client, group and class, in place.

    Args:
        counts: int64 [clients, 3, groups, classes].
        positions: The position of each sample's client, int64 [samples].
        groups: The group of each sample, int64 [samples].
        targets: The class of each sample, int64 [samples].
        predicted: The class that the model assigns to each sample, int64 [samples].
    """
    _, _, num_groups, num_classes = counts.shape
    is_correct = (targets == predicted).to(counts.dtype)
    for kind, classes in enumerate((targets, predicted, targets)):
        cells = ((positions * 3 + kind) * num_groups + groups) * num_classes + classes
        numbers = is_correct if kind == 2 else torch.ones_like(cells)
        counts.view(-1).index_add_(0, cells, numbers)


def measure_groups(counts: Tensor) -> dict[str, Tensor]:
    """Return the gaps between groups, and the accuracy of the worst group.

    Args:
        counts: int64 [..., 3, groups, classes], as in the module's text.

    Returns:
        float64 [...] in [0, 1] for each name in :data:`GROUP_FIGURES`; NaN if undefined.

    Example:
        >>> targets = torch.tensor([1, 1, 0, 0, 1, 0, 1, 0])
        >>> predicted = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0])
        >>> groups = torch.arange(2).repeat_interleave(4)
        >>> shape = (1, 2, 2)
        >>> counts = count_groups(torch.zeros_like(groups), groups, targets, predicted, shape)
        >>> figures = measure_groups(counts)
        >>> [float(figures[name][0]) for name in ("demographic_parity", "equalized_odds")]
        [0.0, 0.5]
    """
    positives, assigned, correct = counts.unbind(-3)
    samples = positives.sum(-1, keepdim=True)  # [..., groups, 1]
    is_present = samples > 0
    accuracy = correct.sum(-1, keepdim=True).double() / samples
    true_rates = correct.double() / positives  # 0 / 0 is NaN
    false_rates = (assigned - correct).double() / (samples - positives)
    odds = torch.cat([true_rates, false_rates], -1)
    worst = torch.where(is_present, accuracy, torch.inf).amin((-2, -1))
    values = (
        _largest_gap(assigned.double() / samples, is_present),
        _largest_gap(odds, is_present),
        _largest_gap(accuracy, is_present),
        torch.where(worst.isinf(), torch.nan, worst),
    )
    return dict(zip(GROUP_FIGURES, values))


def _largest_gap(rates: Tensor, is_present: Tensor) -> Tensor:
    """Return the largest gap of several rates between the groups with samples; NaN if undefined.

    Args:
        rates: The rates of each group, [..., groups, rates]; NaN if undefined.
        is_present: Whether a group has samples, bool [..., groups, 1].
    """
    has_rate = ~rates.isnan() & is_present
    highest = torch.where(has_rate, rates, -torch.inf).amax(-2)
    lowest = torch.where(has_rate, rates, torch.inf).amin(-2)
    is_compared = has_rate.any(-2)  # [..., rates]
    is_partial = is_compared & (has_rate != is_present).any(-2)
    gap = torch.where(is_compared, highest - lowest, -torch.inf).amax(-1)
    is_undefined = is_partial.any(-1) | ~is_compared.any(-1) | (is_present.sum((-2, -1)) < 2)
    return torch.where(is_undefined, torch.nan, gap)
