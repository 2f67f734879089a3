"""A guard of models that a computation overwrites."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ModelRows


@contextmanager
def restore_models(client: Client, models: Iterable[str]) -> Iterator[dict[str, ModelRows]]:
    """Restore models of a client at the end of the context, and yield copies of their rows.

    Args:
        client: The algorithm.
        models: Names of the models that the block overwrites.

    Example:
        >>> import torch
        >>> from pl_fed.clients import FedAvg
        >>> client = FedAvg(torch.nn.Linear(1, 1))
        >>> with restore_models(client, ["global"]) as before:
        ...     _ = client.row("global").data.zero_()
        >>> torch.equal(client.row("global").data, before["global"].parameters)
        True
    """
    before = {name: client.model_rows(name).clone() for name in models}
    try:
        yield before
    finally:
        for name, rows in before.items():
            client.model_rows(name).copy_(rows)
