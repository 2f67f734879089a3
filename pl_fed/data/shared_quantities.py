"""Quantities that the data module computes over all clients: the complete list.

Another client's data change such a quantity, and thereby everybody's inputs or targets.
``federation.privacy`` refuses each of them, unless the user gives it as a public constant. The
number of clients, the names of owners, the number of classes and the shapes of samples, such as the
length of padding, count as public. A partitioner simulates the clients and is not part of a
release. ``tests/data/test_shared_quantities.py`` finds a quantity that this list lacks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pl_fed.data.lightning_data import LightningData
from pl_fed.data.module import FederatedData
from pl_fed.data.torch_dataset import TorchDataset


@dataclass(frozen=True)
class SharedQuantity:
    """Shared quantity: numbers that the data module computes over all clients.

    Attributes:
        name: The name of the quantity.
        option: The option that gives it, or switches it off.
        allowed: The values of the option without such a quantity.
        remedy: What to set instead.
        find: Returns what is computed, or ``None`` if nothing is.
    """

    name: str
    option: str
    allowed: str
    remedy: str
    find: Callable[[FederatedData], str | None]

    def describe(self, datamodule: FederatedData, purpose: str) -> str | None:
        """Return the reason against the quantity, or ``None`` if it is not computed.

        Args:
            datamodule: The data.
            purpose: The setting that refuses it, such as "for `federation.privacy`".
        """
        computed = self.find(datamodule)
        if computed is None:
            return None
        return (
            f"Expected argument `{self.option}` to be {self.allowed} {purpose}, because"
            f" {self.name} of all clients' samples are not private, but got {computed}:"
            f" {self.remedy}."
        )


def _find_statistics(datamodule: FederatedData) -> str | None:
    mode = datamodule.normalize
    return repr(mode) if mode in ("channel", "feature") else None


def _find_transforms(datamodule: FederatedData) -> str | None:
    names = [type(transform).__name__ for transform in datamodule.transforms]
    return ", ".join(names) or None


def _find_draw(option: str) -> Callable[[FederatedData], str | None]:
    def find(datamodule: FederatedData) -> str | None:
        if datamodule.draws_server_samples != option:
            return None
        return repr(getattr(datamodule, option))

    return find


def _find_frozen_draws(datamodule: FederatedData) -> str | None:
    source = datamodule.dataset
    is_frozen = isinstance(source, TorchDataset | LightningData) and source.options.redraw is False
    return "false" if is_frozen else None


def _find_ordered_draws(datamodule: FederatedData) -> str | None:
    reads_samples = isinstance(datamodule.dataset, TorchDataset | LightningData)
    return (datamodule.clients.ordered_draws or None) if reads_samples else None


def _find_in_source(option: str) -> Callable[[FederatedData], str | None]:
    return lambda datamodule: datamodule.dataset.list_shared_quantities().get(option)


SHARED_QUANTITIES = (
    SharedQuantity(
        "the statistics",
        "data.normalize",
        '"none" or a pair [mean, std]',
        "give public numbers, for example [0.5, 0.5]",
        _find_statistics,
    ),
    SharedQuantity(
        "the results of modules that see the samples of all clients at once, and draw for them in"
        " their order,",
        "data.transforms",
        "left out",
        "use `data.augment`, or transform the samples before",
        _find_transforms,
    ),
    SharedQuantity(
        "the server's draws",
        "data.root_samples",
        "0",
        "another client's samples would change its draw from those of all; leave it out",
        _find_draw("root_samples"),
    ),
    SharedQuantity(
        "the server's draws",
        "data.central",
        "a data source of its own, or official for data with an official validation part",
        "another client's samples would change its draw from those of all; set `data.val_fraction`"
        " to 0, say",
        _find_draw("central"),
    ),
    SharedQuantity(
        "the numbers of categories and classes",
        "data.dataset.categories",
        "set for all columns of categories and classes",
        "give their public values, for example `animal: [cat, dog]`",
        _find_in_source("categories"),
    ),
    SharedQuantity(
        "the numbers of classes",
        "data.dataset.classes",
        "a list of class names",
        "give the public names, for example [cat, dog]",
        _find_in_source("classes"),
    ),
    SharedQuantity(
        "random samples that are drawn once, in the order",
        "data.dataset.redraw",
        "true or null",
        "leave it out, so that each minibatch draws its own, or draw nothing in the data set",
        _find_frozen_draws,
    ),
    SharedQuantity(
        "draws in the order",
        "data.dataset.redraw",
        "true, with draws from global generators,",
        "draw from the generators of torch, NumPy or Python and set it to true, or draw nothing in"
        " the data set",
        _find_ordered_draws,
    ),
    SharedQuantity(
        "the numbers of characters",
        "data.dataset.characters",
        "a text with the vocabulary",
        "give the public characters",
        _find_in_source("characters"),
    ),
)


def describe_shared_quantity(datamodule: FederatedData, purpose: str) -> str | None:
    """Return the reason against the first quantity over all clients, or ``None`` without any.

    Args:
        datamodule: The data.
        purpose: The setting that refuses it, such as "for `federation.privacy`".
    """
    refusals = (quantity.describe(datamodule, purpose) for quantity in SHARED_QUANTITIES)
    options = {quantity.option.rpartition(".")[2] for quantity in SHARED_QUANTITIES}
    for option, computed in datamodule.dataset.list_shared_quantities().items():
        if option not in options:
            return (
                f"Expected argument `data.dataset.{option}` to give a public constant {purpose},"
                f" because quantities of all clients' samples are not private, but got {computed}."
            )
    return next(filter(None, refusals), None)
