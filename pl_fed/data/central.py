"""The samples of the server: a central validation and test set beside those of the clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pl_fed.data.client_data import ClientData, Part, scale_images
from pl_fed.data.source import TEST, TRAIN, VAL, Arrays, DataSource
from pl_fed.random import generator
from pl_fed.tasks.own_batches import OwnBatches
from pl_fed.trees import Tree, describe, tree_map

SERVER = "server"
"""The name of the owner of central samples."""

CENTRAL = "central"
"""The place of the server's samples in the name of a metric: ``val/central/accuracy``."""


@dataclass(frozen=True)
class CentralParts:
    """Central parts: the samples of the server.

    Attributes:
        val: Ids of the validation samples, int64 [samples].
        test: Ids of the test samples, int64 [samples].
        withheld: Ids of the samples that no client gets, int64 [samples].
        is_drawn: Whether some of them were drawn from the training samples of all clients.
    """

    val: Tensor
    test: Tensor
    withheld: Tensor
    is_drawn: bool = False

    @classmethod
    def draw_official(
        cls, arrays: Arrays, source: str, split: str | None, val_fraction: float, seed: int
    ) -> "CentralParts":
        """Return the official parts of a data set as those of the server.

        The clients' own test samples are official ones, too, unless ``split`` is ``"own"``. A
        validation part that the data set lacks is drawn from its training samples, which no client
        gets then.

        Args:
            arrays: The samples.
            source: The name of the data source, for messages.
            split: See :class:`pl_fed.data.FederatedData`.
            val_fraction: Share of the training samples to draw where there is no validation part.
            seed: The seed of the data.

        Raises:
            ValueError: If the data set has no official training or test samples.
        """
        sizes = [0, 0, 0]
        if arrays.split is not None:
            sizes = arrays.split.bincount(minlength=3).tolist()
        if arrays.split is None or not (sizes[TRAIN] and sizes[TEST]):
            raise ValueError(
                "Expected a data set with official train and test parts for `data.central:"
                f" official` but got {source} with {sizes[TRAIN]} training and {sizes[TEST]} test"
                " samples: set `data.central` to a data source of its own."
            )
        train, val, test = (
            (arrays.split == part).nonzero().flatten() for part in (TRAIN, VAL, TEST)
        )
        drawn = train[:0]
        if not len(val):
            number = int(len(train) * val_fraction + 0.5)
            order = torch.randperm(len(train), generator=generator(seed, "central"))
            val = drawn = train[order[:number]].sort().values
        withheld = torch.cat((val, test)) if split == "own" else drawn
        return cls(val, test, withheld, is_drawn=len(drawn) > 0)

    @classmethod
    def draw_own(
        cls, arrays: Arrays, val_fraction: float, test_fraction: float, seed: int
    ) -> "CentralParts":
        """Return the parts of the server's own data source.

        Official validation and test parts stay, and training samples are left out. Without such
        parts, all samples are divided at random in the proportion of the two fractions.

        Raises:
            ValueError: If the data have no sample to evaluate.
        """
        none = torch.empty(0, dtype=torch.int64)
        if arrays.split is not None and int((arrays.split != TRAIN).sum()):
            val, test = ((arrays.split == part).nonzero().flatten() for part in (VAL, TEST))
            return cls(val, test, none)
        total = val_fraction + test_fraction
        if not total:
            raise ValueError(
                "Expected `data.central` to have official val or test samples, or"
                " `data.val_fraction` and `data.test_fraction` to divide its samples, but got"
                " neither."
            )
        order = torch.randperm(len(arrays), generator=generator(seed, "central"))
        number = int(len(arrays) * val_fraction / total + 0.5)
        return cls(order[:number].sort().values, order[number:].sort().values, none)

    def select(self, data: ClientData) -> ClientData:
        """Return data with the same samples of which the server is the only owner."""
        nothing = self.val[:0]
        train, val, test = (Part.from_pieces([i]) for i in (nothing, self.val, self.test))
        owners: Sequence[Sequence[str]] = [[SERVER]]
        return replace(
            data, train=train, val=val, test=test, root=nothing, owners=owners, redraw=None
        )


def check_central(
    source: DataSource,
    arrays: Arrays,
    inputs: Tree,
    clients: ClientData,
    columns: Mapping[str, Sequence[str]] | None,
) -> None:
    """Refuse samples of the server that are not read like those of the clients.

    Args:
        source: The server's data source.
        arrays: Its samples.
        inputs: Their inputs, prepared like those of the clients.
        clients: The data of the clients.
        columns: The columns of the clients' inputs, if they are those of a table.

    Raises:
        ValueError: If inputs, targets or classes have another form, or the source numbers
            categories or fills in values by its own samples.
    """
    names = tuple(map(str, arrays.class_names))
    quantities = source.list_shared_quantities()
    if names:  # they are compared below
        quantities.pop("classes", None)
    if quantities:
        option, got = next(iter(quantities.items()))
        raise ValueError(
            f"Expected argument `data.central.{option}` to be set, because the server's samples"
            f" have to be read like those of the clients, but got {got}: set it as for"
            " `data.dataset`, or give the samples as its official parts."
        )
    if isinstance(arrays.entries, OwnBatches) or isinstance(clients.entries, OwnBatches):
        raise ValueError(
            "Expected `data.central` to be official for data whose batches only the data set can"
            " form but got a data source of its own: give the server's samples as the official"
            " validation and test parts of `data.dataset`."
        )
    for name, own, others in (
        ("inputs", inputs, clients.inputs),
        ("targets", arrays.targets, clients.targets),
    ):
        expected, got = (str(describe(tree_map(_first_sample, tree))) for tree in (others, own))
        if expected != got:
            raise ValueError(
                f"Expected `data.central` to have {name} like those of the clients, {expected} for"
                f" a sample, but got {got}."
            )
    if columns and source.columns:
        _check_columns(source.columns, columns)
    if names and clients.class_names and names != tuple(clients.class_names):
        raise ValueError(
            f"Expected `data.central` to have the clients' classes {list(clients.class_names)} in"
            f" this order but got {list(names)}."
        )
    if arrays.num_classes > clients.num_classes:
        raise ValueError(
            f"Expected `data.central` to have class ids below {clients.num_classes}, the number of"
            f" the clients' classes, but got {arrays.num_classes - 1}."
        )


def _check_columns(
    columns: Mapping[str, Sequence[str]], expected: Mapping[str, Sequence[str]]
) -> None:
    """Refuse other columns of the server's table, another order, or other ids of their values."""
    if [*columns] != [*expected]:
        raise ValueError(
            "Expected `data.central` to have the columns of the clients' inputs,"
            f" {', '.join(expected)}, in this order but got {', '.join(columns)}: name them by"
            " `data.central.inputs`."
        )
    for name, values in columns.items():
        for own, others in zip(values, expected[name]):
            if own != others:
                raise ValueError(
                    f"Expected `data.central.categories` to number the values of {name!r} like"
                    f" those of the clients but got {own!r} for {others!r}: set both alike."
                )


def _first_sample(leaf: Tensor) -> Tensor:
    """Return the first sample of a tensor, as a batch has it; real numbers have its precision."""
    sample = scale_images(leaf[:1], torch.float32)
    return sample.to(torch.float32) if sample.is_floating_point() else sample
