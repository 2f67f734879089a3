"""A trial of a collate function: whether each row of a batch comes from one sample alone."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pl_fed.data.redraw import spaced_positions
from pl_fed.data.sample_reader import SampleReader
from pl_fed.data.sample_structure import align
from pl_fed.trees import leaves

_DRAWS = range(1, 4)


def mixes_samples(dataset: Any, reader: SampleReader, seed: Callable[[int], None]) -> bool:
    """Return whether rows of a batch depend on other samples, or are in another order.

    Rows that are stored, or drawn anew sample by sample, are then not those of a DataLoader: mixup
    would mix each sample with itself, and sorted samples would change their owners and parts.

    Args:
        dataset: The map-style data set.
        reader: Joins and separates the samples.
        seed: Seeds the global generators.

    Example:
        >>> from torch.utils.data import default_collate
        >>> from pl_fed.data.batch_roles import BatchRoles
        >>> def center(samples):
        ...     inputs, targets = default_collate(samples)
        ...     return inputs - inputs.mean(0), targets
        >>> samples = [(float(k), 0) for k in range(3)]
        >>> mixes_samples(samples, SampleReader(BatchRoles(), center), torch.manual_seed)
        True
    """
    try:
        samples = [dataset[position] for position in spaced_positions(len(dataset))]
        if len(samples) < 2:
            return False

        def join(places: range | list[int], draw: int) -> list[Tensor]:
            """Return copies of the samples at some places, joined."""
            seed(draw)
            joined = reader(copy.deepcopy([samples[place] for place in places])).by_name
            return leaves(align(joined, like, "a sample"))

        like = reader(copy.deepcopy(samples)).by_name  # its keys give the order

        places = range(len(samples))
        for draw in _DRAWS:  # the first row takes the first draws, whatever the others are
            rows, copies = join(places, draw), join([0] * len(samples), draw)
            if not all(_are_close(a[:1], b[:1]) for a, b in zip(rows, copies, strict=True)):
                return True
        if not all(map(_are_close, join(places, 0), join(places, 1))):
            return False  # random rows differ by their place
        backwards = join(places[::-1], 0)
        return not all(_are_close(a, b.flip(0)) for a, b in zip(join(places, 0), backwards))
    except Exception:  # it comes again, with a sentence, when all samples are read
        return False


def _are_close(first: Tensor, second: Tensor) -> bool:
    """Return whether tensors are equal up to rounding; those of other shapes are padded."""
    if first.shape != second.shape:
        return True
    return torch.allclose(first.double(), second.double(), 1e-4, 1e-6, equal_nan=True)
