"""What must be the same for a checkpoint to fit."""

import hashlib
from collections.abc import Mapping
from typing import Any

from pl_fed.clients.base import Client
from pl_fed.data.client_data import ClientData

_SPLIT = "clients' numbers of training samples"
_OTHER_SPLIT = "data.dataset, data.partitioner, the fractions or the seed are others"


def identity_of(client: Client, data: ClientData, seed: int) -> dict[str, Any]:
    """Return what must be the same for a checkpoint to fit, by what it is called."""
    layout = client.row("global").layout
    shapes = zip(layout.names, layout.shapes)
    sizes = data.train.sizes
    digest = hashlib.blake2b(sizes.numpy().tobytes(), digest_size=8).hexdigest()
    return {
        "seed": seed,
        "algorithm": type(client).__name__,
        "net": "; ".join(f"{name} {list(shape)}" for name, shape in shapes),
        "number of clients": len(sizes),
        _SPLIT: f"{int(sizes.sum())} with digest {digest}",
    }


def check_identity(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if what a checkpoint holds is not what it has to be."""
    for what, here in identity.items():
        there = saved.get(what)
        if there != here:
            hint = f": {_OTHER_SPLIT}" if what == _SPLIT else ""
            raise ValueError(
                f"Expected a checkpoint whose {what} is {_short(here)} but got one with"
                f" {_short(there)}{hint}."
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
