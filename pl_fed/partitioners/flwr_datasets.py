"""Data splits by the partitioners of the package flwr-datasets of Flower."""

import copy
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pl_fed.partitioners.base import Partitioner, check_split
from pl_fed.text import first_line

_INDEX = "pl_fed_index"  # the column of the samples' positions


class FlwrDatasets(Partitioner):
    """Flwr datasets: splits samples by a partitioner of the package flwr-datasets.

    The partitioner receives a ``datasets.Dataset`` of two columns: the labels of the samples, and
    their positions. It draws by its own ``seed`` and not by ``data.seed``.

    Needs the package datasets and the partitioner's own: ``pip install flwr-datasets``. Its version
    0.6.1 asks for datasets below 5.

    Args:
        partitioner: An object of ``flwr_datasets.partitioner``, such as ``DirichletPartitioner``,
            or in a config its ``class_path`` and ``init_args``. Its ``num_partitions`` must equal
            ``data.num_clients``.
        column: The name of the column of labels. ``None`` uses the partitioner's ``partition_by``.
        owners: Whether the column holds the owners of samples in place of their labels, for example
            for ``NaturalIdPartitioner``.

    Shape:
        labels: class ids [n], or ids of owners [n].

    Raises:
        TypeError: If ``partitioner`` has no ``load_partition``.
        ValueError: If the class of ``class_path`` cannot be built.
        ModuleNotFoundError: By :meth:`split`, if the package datasets is not installed.
        ValueError: By :meth:`split`, if the number of partitions differs from the number of
            clients, or the partitioner fails.
    """

    def __init__(self, partitioner: Any, column: str | None = None, owners: bool = False) -> None:
        if isinstance(partitioner, Mapping):
            partitioner = _build_partitioner(partitioner)
        if not hasattr(partitioner, "load_partition"):
            raise TypeError(
                "Expected argument `partitioner` to be a partitioner of flwr_datasets, with"
                f" `load_partition`, but got {type(partitioner).__name__}."
            )
        self.partitioner = partitioner
        self.column = column or getattr(partitioner, "_partition_by", None) or "label"
        self.splits = "owners" if owners else "labels"

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """Return the samples of each client (see :class:`Partitioner`)."""
        check_split(labels, num_clients, class_ids=True)
        partitioner = copy.deepcopy(self.partitioner)  # it takes a data set only once
        name = type(partitioner).__name__
        try:
            partitioner.dataset = self._build_dataset(labels)
            num_partitions = int(partitioner.num_partitions)
        except ModuleNotFoundError:
            raise
        except Exception as error:  # of any type
            raise ValueError(f"Expected {name} to split the samples but got {error!r}.") from error
        if num_partitions != num_clients:
            raise ValueError(
                f"Expected argument `num_clients` to be the {num_partitions} partitions of {name}"
                f" but got {num_clients}: set `data.num_clients` to {num_partitions}."
            )
        parts = [partitioner.load_partition(client)[_INDEX] for client in range(num_clients)]
        return [torch.tensor([*part], dtype=torch.int64).sort().values for part in parts]

    def _build_dataset(self, labels: Tensor) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise ModuleNotFoundError(
                "Expected the package datasets to be installed but it is not: run `pip install"
                " flwr-datasets`."
            ) from error
        columns = {self.column: labels.numpy(), _INDEX: torch.arange(len(labels)).numpy()}
        return datasets.Dataset.from_dict(columns)


def _build_partitioner(config: Mapping[str, Any]) -> Any:
    """Return the object of a config's ``class_path`` and ``init_args``."""
    path = str(config.get("class_path"))
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)(**(config.get("init_args") or {}))
    except Exception as error:  # of any type
        raise ValueError(
            "Expected argument `partitioner` to be the `class_path` of a partitioner, such as"
            f" flwr_datasets.partitioner.IidPartitioner, and its `init_args`, but got {path} and"
            f" {type(error).__name__}: {first_line(error)}."
        ) from error
