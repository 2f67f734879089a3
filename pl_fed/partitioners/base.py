"""The contract of a partitioner."""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from pl_fed.arguments import check_at_most, check_integers, check_positive
from pl_fed.configurable import Configurable
from pl_fed.partitioners._counts import apportion, class_indices, deal


class Partitioner(Configurable, ABC):
    """Partitioner: splits one data set over the clients.

    A subclass defines :meth:`split`; :meth:`split_matching` has a default that uses it. All draws
    use the ``generator`` argument. A partitioner never changes the labels. The index tensors are
    ascending: shuffle them before you divide them into training and test samples.

    Example:
        >>> class EveryOther(Partitioner):
        ...     def split(self, labels, num_clients, generator):
        ...         return [torch.arange(k, len(labels), num_clients) for k in range(num_clients)]
        >>> EveryOther().split(torch.zeros(5, dtype=torch.int64), 2, torch.Generator())
        [tensor([0, 2, 4]), tensor([1, 3])]
    """

    splits: Literal["labels", "owners"] = "labels"
    """Kind of the ``labels`` argument of :meth:`split`: targets, or ids of the samples' owners."""

    overlapping: bool = False
    """Whether clients share samples on purpose: a training sample of one client may then be a test
    sample of another."""

    needs_official: str | None = None
    """Name of the argument in use that requires an official test set; ``None`` if there is none."""

    @abstractmethod
    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """Return the samples of each client: disjoint, complete, at least one per client.

        Args:
            labels: Target of each sample: class ids [n]. Partitioners that ignore the labels also
                accept real values [n, ...].
            num_clients: Number of clients, 1 to n.
            generator: Source of all randomness.

        Returns:
            ``num_clients`` int64 tensors of indices into ``labels``.

        Raises:
            TypeError: If the partitioner needs class ids and the labels are real values.
            ValueError: If the split is impossible; the message contains the numbers.
        """

    def split_matching(
        self, labels: Tensor, test_labels: Tensor, num_clients: int, generator: torch.Generator
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Split a training set and its test set, with equal class distributions on each client.

        The clients' numbers of test samples of a class are in proportion to their numbers of
        training samples of that class, rounded by largest remainders. Test samples of a class
        without training samples are split evenly. Real-valued targets count as one class. A client
        with few training samples may get no test sample.

        Args:
            labels: Targets of the training set, [n] (see :meth:`split`).
            test_labels: Targets of the test set, [m].
            num_clients: Number of clients, 1 to n.
            generator: Source of all randomness.

        Returns:
            The indices of each client into the training set, and into the test set; both are
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
        pools = class_indices(test_labels, classes)
        train_counts = torch.stack(
            [(labels[part] == classes[:, None]).sum(1) for part in train], dim=1
        )
        train_counts[train_counts.sum(1) == 0] = 1
        counts = [apportion(len(pool), row, generator) for pool, row in zip(pools, train_counts)]
        return train, deal(pools, torch.stack(counts), generator)


def check_parts(
    partitioner: Partitioner, split: object, num_samples: int, num_clients: int
) -> list[Tensor]:
    """Return the result of :meth:`Partitioner.split` if it is one tensor of indices per client.

    Args:
        partitioner: The partitioner, for the error message.
        split: The result of its ``split``.
        num_samples: Number of samples of the data set.
        num_clients: Number of clients.

    Raises:
        ValueError: If it is anything else; the message contains the difference.
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
    index = torch.cat(list(split))  # one pass over all clients: there may be a million
    out_of_range = (index < 0) | (index >= num_samples)
    if out_of_range.any():
        sizes = torch.tensor([len(part) for part in split])
        client = int((sizes.cumsum(0) > int(out_of_range.nonzero()[0])).nonzero()[0])
        low, high = split[client].aminmax()
        raise ValueError(
            f"{expected} from 0 to {num_samples - 1} but {name} gave {int(low)} to {int(high)} for"
            f" client {client}."
        )
    return list(split)


def check_concentration(beta: float) -> None:
    """Raise ``ValueError`` unless ``beta`` is a valid concentration of a Dirichlet distribution."""
    check_positive(beta=beta)
    check_at_most(1e300, beta=beta)  # the product with the number of clients stays finite


def check_split(labels: Tensor, num_clients: int, class_ids: bool = False) -> None:
    """Raise an error unless a split of ``labels`` over ``num_clients`` is possible.

    Args:
        labels: Targets, [n, ...].
        num_clients: Number of clients.
        class_ids: Whether the labels must be class ids, [n].

    Raises:
        TypeError: If ``num_clients`` is not an integer, or ``class_ids`` is set and the labels are
            real values.
        ValueError: If there is less than one client, there are more clients than samples, or
            ``class_ids`` is set and the labels are not of shape [n].
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
    """Raise ``ValueError`` unless there are ``min_size`` samples for every client."""
    if num_clients * min_size > samples:
        raise ValueError(
            "Expected argument `num_clients` times `min_size` to be at most the number of samples "
            f"({samples}) but got {num_clients} x {min_size} = {num_clients * min_size}."
        )


def check_test_labels(test_labels: Tensor) -> None:
    """Raise ``ValueError`` if the test set is empty."""
    if len(test_labels) == 0:
        raise ValueError("Expected argument `test_labels` to hold at least one sample but got 0.")
