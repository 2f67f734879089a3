"""What every partitioner promises."""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from pl_fed.arguments import check_at_most, check_integers, check_positive
from pl_fed.configurable import Configurable
from pl_fed.partitioners._counts import apportion, deal, members


class Partitioner(Configurable, ABC):
    """Splits one data set over the clients.

    A subclass defines :meth:`split`; :meth:`split_matching` follows from it. All draws come from
    the given generator, the labels are never changed, and the index tensors are ascending: shuffle
    one before cutting it into train and test parts.

    Example:
        >>> class EveryOther(Partitioner):
        ...     def split(self, labels, num_clients, generator):
        ...         return [torch.arange(k, len(labels), num_clients) for k in range(num_clients)]
        >>> EveryOther().split(torch.zeros(5, dtype=torch.int64), 2, torch.Generator())
        [tensor([0, 2, 4]), tensor([1, 3])]
    """

    splits: Literal["labels", "owners"] = "labels"
    """What it is given in the place of labels: the targets, or the ids of the samples' owners."""

    overlapping: bool = False
    """Whether clients are meant to share samples: one's training samples may be another's test
    samples then."""

    needs_official: str | None = None
    """Which of its arguments, as given, means nothing without an official test set, if one does."""

    @abstractmethod
    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """Return the samples of each client: disjoint, complete, none empty.

        Args:
            labels: Target of each sample: class ids [n], or real values [n, ...] for those
                partitioners that do not look at them.
            num_clients: Number of clients, 1 to n.
            generator: Source of all randomness.

        Returns:
            ``num_clients`` int64 tensors of indices into ``labels``.

        Raises:
            TypeError: If the partitioner needs class ids and the labels are real values.
            ValueError: If the split cannot be made; the message names the numbers.
        """

    def split_matching(
        self, labels: Tensor, test_labels: Tensor, num_clients: int, generator: torch.Generator
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Split a training set and its official test set, so that each client tests on its own mix.

        The test samples of a class are shared out in proportion to the clients' training samples of
        that class, rounded by largest remainders; those of a class that nobody trains on are shared
        evenly. Real-valued targets count as one class. A client with few training samples may get
        no test sample.

        Args:
            labels: Targets of the training set, [n] (see :meth:`split`).
            test_labels: Targets of the test set, [m].
            num_clients: Number of clients, 1 to n.
            generator: Source of all randomness.

        Returns:
            The indices of each client into the training set, and those into the test set; both
            disjoint and complete.

        Raises:
            ValueError: If the test set is empty, or the training set cannot be split.
        """
        check_test_labels(test_labels)
        train = self.split(labels, num_clients, generator)
        if labels.is_floating_point():
            labels = torch.zeros(len(labels), dtype=torch.int64)
            test_labels = torch.zeros(len(test_labels), dtype=torch.int64)
        classes = test_labels.unique()
        pools = members(test_labels, classes)
        held = torch.stack([(labels[part] == classes[:, None]).sum(1) for part in train], dim=1)
        held[held.sum(1) == 0] = 1
        counts = [apportion(len(pool), row, generator) for pool, row in zip(pools, held)]
        return train, deal(pools, torch.stack(counts), generator)


def check_parts(
    partitioner: Partitioner, split: object, num_samples: int, num_clients: int
) -> list[Tensor]:
    """Return what :meth:`Partitioner.split` gave, if it is one tensor of indices for each client.

    Raises:
        ValueError: With what came, if it is not.
    """
    name = type(partitioner).__name__
    expected = f"Expected argument `partitioner` to give {num_clients} tensors of indices (int64)"
    if not isinstance(split, list | tuple) or len(split) != num_clients:
        got = len(split) if isinstance(split, list | tuple) else type(split).__name__
        raise ValueError(f"{expected}, one for each client, but {name} gave {got}.")
    for client, part in enumerate(split):
        if not isinstance(part, Tensor) or part.dtype != torch.int64 or part.dim() != 1:
            got = (
                f"{part.dtype} {list(part.shape)}"
                if isinstance(part, Tensor)
                else type(part).__name__
            )
            raise ValueError(f"{expected} but {name} gave {got} for client {client}.")
    index = torch.cat(list(split))  # one pass over all: clients may be a million
    wrong = (index < 0) | (index >= num_samples)
    if wrong.any():
        sizes = torch.tensor([len(part) for part in split])
        client = int((sizes.cumsum(0) > int(wrong.nonzero()[0])).nonzero()[0])
        low, high = split[client].aminmax()
        raise ValueError(
            f"{expected} from 0 to {num_samples - 1} but {name} gave {int(low)} to {int(high)} for"
            f" client {client}."
        )
    return list(split)


def check_concentration(beta: float) -> None:
    """Raise ``ValueError`` unless ``beta`` is one that a Dirichlet distribution can have."""
    check_positive(beta=beta)
    check_at_most(1e300, beta=beta)  # clients times as much is a number still


def check_split(labels: Tensor, num_clients: int, class_ids: bool = False) -> None:
    """Raise unless ``labels`` can be split over ``num_clients`` at all.

    Args:
        labels: Targets, [n, ...].
        num_clients: Number of clients.
        class_ids: Whether the labels must be class ids, [n].

    Raises:
        TypeError: If ``num_clients`` is no integer, or class ids are needed and the labels are
            real.
        ValueError: If there is less than one client, more clients than samples, or class ids are
            needed and the labels are not of shape [n].
    """
    check_integers(1, num_clients=num_clients)
    if num_clients > len(labels):
        raise ValueError(
            "Expected argument `num_clients` to be at most the number of samples "
            f"({len(labels)}) but got {num_clients}."
        )
    if class_ids and (labels.is_floating_point() or labels.is_complex()):
        raise TypeError(f"Expected argument `labels` to be class ids but got {labels.dtype}.")
    if class_ids and labels.ndim != 1:
        raise ValueError(
            f"Expected argument `labels` to be of shape [n] but got {list(labels.shape)}."
        )


def check_size(samples: int, num_clients: int, min_size: int) -> None:
    """Raise ``ValueError`` unless so many clients can have ``min_size`` samples each."""
    if num_clients * min_size > samples:
        raise ValueError(
            "Expected argument `num_clients` times `min_size` to be at most the number of samples "
            f"({samples}) but got {num_clients} x {min_size} = {num_clients * min_size}."
        )


def check_test_labels(test_labels: Tensor) -> None:
    """Raise ``ValueError`` if there is no test sample."""
    if len(test_labels) == 0:
        raise ValueError("Expected argument `test_labels` to hold at least one sample but got 0.")
