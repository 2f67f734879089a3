"""Drawing anew: training samples of a data set that draws at random, read for each minibatch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from pl_fed.data.sample_reader import SampleReader, Samples
from pl_fed.data.sample_structure import align
from pl_fed.random import fork_all_generators, key, read_global_state
from pl_fed.text import find_code_line, first_line
from pl_fed.trees import Tree, join, leaves, tree_map

_READ_TWICE = 16  # samples that are read again, to find random draws


@dataclass(frozen=True)
class Redraw:
    """Redraw: reads samples of a data set under given keys, so that draws do not depend on order.

    Each sample is read and collated by itself, after the global generators of torch, numpy and
    python were seeded with its key. It is the same in any minibatch, engine and process.

    Attributes:
        dataset: The map-style data set, all parts one after another.
        reader: Joins and separates the samples.
        shapes: The shape of a sample's tensors, inputs before targets.
        like: Inputs and targets without samples, which give the order of keys; ``None`` for that of
            the first sample.

    Example:
        >>> import torch
        >>> from torch.utils.data import default_collate
        >>> from pl_fed.data.batch_roles import BatchRoles
        >>> class Noise:
        ...     def __getitem__(self, index):
        ...         return torch.rand(1), index
        >>> redraw = Redraw(Noise(), SampleReader(BatchRoles(), default_collate), [(1,), ()])
        >>> torch.equal(redraw([4, 2], [10, 11])[0], redraw([2, 4], [11, 10])[0].flip(0))
        True
    """

    dataset: Any
    reader: SampleReader
    shapes: Sequence[Sequence[int]]
    like: Tree = None

    def __call__(self, positions: list[int], keys: list[int]) -> tuple[Tree, Tree]:
        """Return inputs and targets of the samples at some positions.

        Args:
            positions: Positions of the samples in the data set.
            keys: The key of the draws of each sample.

        Raises:
            ValueError: If a sample cannot be read, or has another shape than before.
        """
        pieces = []
        with fork_all_generators() as seed, explain_errors(name_of(self.dataset)):
            for position, draw in zip(positions, keys, strict=True):
                seed(draw)
                samples = self.reader([self.dataset[position]], position)
                piece = (samples.inputs, samples.targets)
                if self.like is not None:
                    piece = align(piece, self.like, f"sample {position}")
                self._check_shapes(piece)
                pieces.append(piece)
        inputs, targets = join(pieces)
        return inputs, targets

    def _check_shapes(self, samples: Tree) -> None:
        for leaf, shape in zip(leaves(samples), self.shapes, strict=True):
            if tuple(leaf.shape[1:]) != tuple(shape):
                raise ValueError(
                    f"Expected samples to keep their shape {list(shape)} when they are drawn anew"
                    f" but got {list(leaf.shape[1:])}: set `padding` to the number that pads the"
                    " shorter ones, let `collate_fn` pad to a fixed length, set `redraw` to false,"
                    " or set `batches` to own for the steps of a LightningModule"
                )


def choose_redraw(
    dataset: Any,
    pieces: Sequence[Any],
    reader: SampleReader,
    samples: Samples,
    option: bool | None,
) -> tuple[Redraw | None, str]:
    """Return how training samples are drawn anew; ``None`` if all samples are read once.

    The second result is in words: draws of samples that are read once, whose numbers depend on the
    order of reading; empty without such draws.

    Args:
        dataset: The data set, all parts one after another.
        pieces: The parts; the training part comes first.
        reader: Joins and separates the samples.
        samples: All samples, read once.
        option: Whether to draw anew; ``None`` if the training part draws at random.

    Raises:
        ValueError: If the option is true, and the draws do not depend on the global generators; or
            if samples drawn anew have other shapes.
    """
    if option is False or not len(pieces[0]):
        return None, ""
    readings = [_read_twice(piece, reader) for piece in pieces]
    random = [piece for piece, reading in zip(pieces, readings) if reading.differs]
    name = name_of(random[0] if random else pieces[0])
    if option is None and not readings[0].differs:
        if random:
            rank_zero_info(f"{name} draws at random: pl_fed draws its samples once.")
        drawing = [piece for piece, reading in zip(pieces, readings) if any(reading)]
        return None, f"{name_of(drawing[0])} with rare draws" if drawing else ""
    like = tree_map(lambda leaf: leaf[:0], (samples.inputs, samples.targets))
    redraw = Redraw(dataset, reader, [leaf.shape[1:] for leaf in leaves(like)], like)
    first, second = (_read_some(redraw, len(pieces[0])) for _ in range(2))
    if not _are_equal(first, second):
        problem = (
            f"{name} gives other samples when it is read again with the same seeds, because it"
            " draws from a generator of its own: draw from the global generators of torch, numpy"
            " or random"
        )
        if option:
            raise ValueError(f"Expected samples that `redraw` can repeat but {problem}.")
        rank_zero_warn(
            f"{problem}, or set `data.augment`. pl_fed reads each sample once, so its random"
            " augmentation is frozen."
        )
        return None, f"{name} with a generator or a memory of its own"
    if random:
        rank_zero_info(
            f"{name} draws at random: pl_fed draws training samples anew in each minibatch, and"
            " validation and test samples once. Set `data.dataset.redraw` to false to draw all"
            " once."
        )
    return redraw, ""


def spaced_positions(length: int) -> list[int]:
    """Return the positions of up to 16 samples, spread over a data set."""
    number = min(_READ_TWICE, length)
    return [k * length // number for k in range(number)]


class _Reading(NamedTuple):
    """Reading: the signs of random draws in two readings of some samples.

    Attributes:
        differs: Whether the samples differ.
        draws: Whether a global generator moves. It does with each sample, although a rare change is
            seen in few of them.
    """

    differs: bool
    draws: bool


def _read_twice(dataset: Any, reader: SampleReader) -> _Reading:
    """Read some samples twice, and look for random draws."""
    positions = spaced_positions(len(dataset))
    if not positions:
        return _Reading(False, False)
    before = torch.get_rng_state(), read_global_state()
    first, second = (reader([dataset[k] for k in positions]) for _ in range(2))
    draws = not torch.equal(torch.get_rng_state(), before[0]) or read_global_state() != before[1]
    return _Reading(not _are_equal(first, second), draws)


def _read_some(redraw: Redraw, length: int) -> Samples:
    """Return some samples under fixed keys."""
    positions = spaced_positions(length)
    keys = [key(0, "data set", position) for position in positions]
    return Samples(*redraw(positions, keys), None, None)


def _are_equal(first: Samples, second: Samples) -> bool:
    """Return whether samples are the same; NaN, such as a missing value, equals NaN."""
    pairs = zip(first.leaves, second.leaves, strict=True)
    return all(
        leaf.shape == other.shape
        and bool(((leaf == other) | ((leaf != leaf) & (other != other))).all())
        for leaf, other in pairs
    )


@contextmanager
def explain_errors(name: str) -> Iterator[None]:
    """Replace any error of a user's data set or function by one sentence."""
    try:
        yield
    except Exception as error:  # of any type
        text = first_line(error)
        if text.startswith("Expected "):
            place = f" (in {name})"
            raise ValueError(f"{text.removesuffix('.').removesuffix(place)}{place}.") from error
        if "equal size" in text:
            raise ValueError(
                f"Expected all samples of {name} to have the same shape but got several: set"
                " `padding` to the number that pads the shorter ones, or give images one size and"
                " one colour mode before, or join samples by the `collate_fn` of a TorchDataset."
            ) from error
        places = [*getattr(error, "__notes__", ()), find_code_line(error)]
        place = "; ".join(filter(None, places))
        raise ValueError(
            f"Expected {name} to give samples that its `collate_fn` joins but got"
            f" {type(error).__name__}: {text}{f' ({place})' if place else ''}."
        ) from error


def name_of(dataset: Any) -> str:
    """Return the name of a data set's class; pl_fed's own views have none for users."""
    name = type(dataset).__name__
    return "the data set" if name.startswith("_") else name
