"""What must be the same for a checkpoint to fit."""

from collections.abc import Mapping
from typing import Any

from pl_fed.clients.base import Client
from pl_fed.data.client_data import ClientData
from pl_fed.data.fingerprint import digest_of, same_inputs

CHECKPOINT_FORMAT = 2
"""The number of the format in which a federation is saved; it counts up when that changes."""

_SIZES = "clients' numbers of training samples"
_OTHER_SPLIT = "data.dataset, data.partitioner, the fractions or the seed are others"
_OTHER_DATA = "data.dataset holds other samples than when the checkpoint was written"
_DATA = {
    "samples": ("assignment of samples to clients", _OTHER_SPLIT),
    "labels": ("labels", _OTHER_DATA),
    "owners": ("owners of the samples", _OTHER_DATA),
    "inputs": ("inputs", _OTHER_DATA),
}
"""The parts of an identity that have no words of their own: their names, and why they differ."""


def identity_of(client: Client, data: ClientData, seed: int) -> dict[str, Any]:
    """Return what must be the same for a checkpoint to fit, by what it is called."""
    return {
        **kind_of(client, data, seed),
        **data.digests,
        "inputs": data.fingerprint,
    }


def kind_of(client: Client, data: ClientData, seed: int) -> dict[str, Any]:
    """Return what must be the same for clients' states to be of these clients."""
    layout = client.row("global").layout
    shapes = zip(layout.names, layout.shapes)
    sizes = data.train.sizes
    return {
        "seed": seed,
        "algorithm": type(client).__name__,
        "net": "; ".join(f"{name} {list(shape)}" for name, shape in shapes),
        "number of clients": len(sizes),
        _SIZES: f"{int(sizes.sum())} with digest {digest_of(sizes)}",
    }


def check_identity(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if what a checkpoint holds is not what it has to be."""
    for name, expected in identity.items():
        got = saved.get(name)
        if _agree(expected, got):
            continue
        if name in _DATA:
            words, hint = _DATA[name]
            raise ValueError(
                f"Expected a checkpoint of a run with the same {words} but got one with others:"
                f" {hint}."
            )
        hint = f": {_OTHER_SPLIT}" if name == _SIZES else ""
        raise ValueError(
            f"Expected a checkpoint whose {name} is {_short(expected)} but got one with"
            f" {_short(got)}{hint}."
        )


def _agree(expected: Any, got: Any) -> bool:
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        return same_inputs(expected, got)
    return type(expected) is type(got) and bool(expected == got)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
