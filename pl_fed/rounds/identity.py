"""The identity of a federation: a checkpoint fits if its identity is equal."""

from collections.abc import Mapping, Sequence
from typing import Any

from pl_fed.clients.base import Client
from pl_fed.data.client_data import ClientData
from pl_fed.data.fingerprint import digest_of, same_inputs

CHECKPOINT_FORMAT = 2
"""The version of the checkpoint format of a federation; each change of the format increases it."""

_NUMBER = "number of clients"
_SIZES = "clients' numbers of training samples"
_KEPT_STATE = "kept state of local optimizers"
_OTHER_SPLIT = "data.dataset, data.partitioner, the fractions or the seed differ"
_OTHER_DATA = "data.dataset has other samples than the run that wrote the checkpoint"
_REMEDY = " To continue with other clients or samples, set `federation.match_clients: true`."
_DATA = {
    "samples": ("assignment of samples to clients", _OTHER_SPLIT),
    "labels": ("labels", _OTHER_DATA),
    "owners": ("owners of the samples", _OTHER_DATA),
    "inputs": ("inputs", _OTHER_DATA),
}
"""Digests in an identity: the name of each in messages, and the reason of a difference."""


def federation_identity(client: Client, data: ClientData, seed: int) -> dict[str, Any]:
    """Return the identity of a federation by name: a checkpoint must have an equal one."""
    return {
        **states_identity(client, data, seed),
        **data.digests,
        "inputs": data.fingerprint,
    }


def states_identity(client: Client, data: ClientData, seed: int) -> dict[str, Any]:
    """Return the identity of the clients' states by name: states fit clients with an equal one."""
    layout = client.row("global").layout
    shapes = zip(layout.names, layout.shapes)
    sizes = data.train.sizes
    return {
        "seed": seed,
        "algorithm": type(client).__name__,
        "net": "; ".join(f"{name} {list(shape)}" for name, shape in shapes),
        _NUMBER: len(sizes),
        _SIZES: f"{int(sizes.sum())} with digest {digest_of(sizes)}",
    }


def optimizer_identity(client: Client) -> dict[str, Any]:
    """Return the names of the states that clients keep of their local optimizers, or nothing."""
    layouts = client.optimizer_layouts
    states = [f"{model} with {', '.join(layout.names)}" for model, layout in layouts.items()]
    return {_KEPT_STATE: "; ".join(states)} if states else {}


def check_optimizer_identity(saved: Mapping[str, Any], client: Client) -> None:
    """Raise ``ValueError`` if the clients of a checkpoint keep other states of their optimizers.

    Args:
        saved: The identity in the checkpoint.
        client: The algorithm.
    """
    expected = optimizer_identity(client).get(_KEPT_STATE, "none")
    got = saved.get(_KEPT_STATE, "none")
    if got != expected:
        raise ValueError(
            f"Expected a checkpoint with the {_KEPT_STATE} {expected} but got one with"
            f" {_shorten(got)}: set `federation.engine.keep_optimizer_state` and the optimizer as"
            " in its run."
        )


def check_identity(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a checkpoint has another identity.

    Args:
        saved: The identity in the checkpoint.
        identity: The required identity.
    """
    for name, expected in identity.items():
        got = saved.get(name)
        if _is_equal(expected, got):
            continue
        if name in _DATA:
            words, hint = _DATA[name]
            raise ValueError(
                f"Expected a checkpoint of a run with the same {words} but got one with others:"
                f" {hint}.{_REMEDY}"
            )
        hint = f": {_OTHER_SPLIT}" if name == _SIZES else ""
        remedy = _REMEDY if name in (_SIZES, _NUMBER) else ""
        raise ValueError(
            f"Expected a checkpoint with the {name} {_shorten(expected)} but got one with"
            f" {_shorten(got)}{hint}.{remedy}"
        )


def check_equal_data(identities: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` if processes have other data or another seed than the first one.

    Each process loads the data by itself, and trains a part of the clients with them.

    Args:
        identities: The identity in each process, by rank.
    """
    first, *others = identities
    for rank, identity in enumerate(others, 1):
        for name, expected in first.items():
            if _is_equal(expected, identity[name]):
                continue
            words = _DATA[name][0] if name in _DATA else name
            raise ValueError(
                f"Expected all {len(identities)} processes to have the same {words} but process"
                f" {rank} has others than process 0: draw data by a fixed seed, and sort names"
                " that come from a set or a folder, because their order may differ by process."
            )


def check_model_identity(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a checkpoint has another seed, algorithm or net; data may differ.

    Args:
        saved: The identity in the checkpoint.
        identity: The required identity.
    """
    data_names = (*_DATA, _NUMBER, _SIZES)
    check_identity(saved, {name: identity[name] for name in identity if name not in data_names})


def has_identity(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has an identity."""
    return all(_is_equal(expected, saved.get(name)) for name, expected in identity.items())


def _is_equal(expected: Any, got: Any) -> bool:
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        return same_inputs(expected, got)
    return type(expected) is type(got) and bool(expected == got)


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
