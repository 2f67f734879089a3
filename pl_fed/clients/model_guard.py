"""Model guard: it restores models that a computation overwrites."""

from collections.abc import Iterable
from typing import Self

from torch import Tensor

from pl_fed.clients.base import Client


class ModelGuard:
    """Model guard: restores models of a client at the end of its ``with`` block.

    Args:
        client: The algorithm.
        models: Names of the models that the block overwrites.

    Attributes:
        rows: Copies of the models' rows from before the block, by model.
        statistics: Copies of the models' running statistics from before the block, by model.

    Example:
        >>> import torch
        >>> from pl_fed.clients import FedAvg
        >>> client = FedAvg(torch.nn.Linear(1, 1))
        >>> with ModelGuard(client, ["global"]) as guard:
        ...     _ = client.row("global").data.zero_()
        >>> torch.equal(client.row("global").data, guard.rows["global"])
        True
    """

    def __init__(self, client: Client, models: Iterable[str]) -> None:
        self.client = client
        self.models = tuple(models)
        self.rows: dict[str, Tensor] = {}
        self.statistics: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        for name in self.models:
            self.rows[name] = self.client.row(name).data.clone()
            self.statistics[name] = self.client.statistics(name).data.clone()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.models:
            self.client.row(name).data.copy_(self.rows[name])
            self.client.statistics(name).data.copy_(self.statistics[name])
