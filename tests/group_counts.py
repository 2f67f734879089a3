"""Counts of samples by group and class, for contexts of rounds."""

import functools

import torch

from pl_fed.functional.group_fairness import count_groups


@functools.cache
def make_group_counts(clients, samples=40, groups=2, classes=3):
    """Return counts of random predictions, int64 [clients, 3, groups, classes], to be read only."""
    draw = torch.Generator().manual_seed(0)
    positions = torch.arange(clients).repeat_interleave(samples)
    sizes = (groups, classes, classes)
    ids = [torch.randint(size, (len(positions),), generator=draw) for size in sizes]
    return count_groups(positions, *ids, (clients, groups, classes))
