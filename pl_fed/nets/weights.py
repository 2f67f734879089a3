"""Weights from a file: a checkpoint of Lightning or pl_fed, a state dict, or safetensors."""

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pl_fed.safe_load import safe_load

_COMPILED = "_orig_mod."  # within names of modules that torch.compile has wrapped
_GLOBAL = "global_model."  # before the names of the global model in a checkpoint of pl_fed
_MAX_NAMES = 3
_WANTS = "Expected argument `federation.initial_model` to be"


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a net by name, on the CPU.

    Args:
        path: A checkpoint of Lightning (its ``state_dict``), a checkpoint of pl_fed (its global
            model), a state dict of ``torch.save``, or a file that ends in ``.safetensors``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file holds no tensors by name, or objects other than tensors and values;
            or if it is a checkpoint of an algorithm whose global model nobody trains.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{_WANTS} a file with weights but got {path}: no such file.")
    content = _load(path)
    weights = content.get("state_dict", content) if isinstance(content, Mapping) else {}
    is_named = isinstance(weights, Mapping) and bool(weights)
    if not is_named or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise ValueError(
            f"{_WANTS} a checkpoint, a state dict or safetensors but got {path}, which holds no"
            " tensors by name."
        )
    if "federation" in content:
        _check_trained(content, path)
        own = ((name, tensor) for name, tensor in weights.items() if name.startswith(_GLOBAL))
        return {name.removeprefix(_GLOBAL): tensor for name, tensor in own}
    return {name.replace(_COMPILED, ""): tensor for name, tensor in weights.items()}


def _check_trained(content: Mapping[str, Any], path: Path) -> None:
    """Refuse the global model of ``Local``, which sends nothing, and of several centers, as IFCA's.

    It is still that of the first round.
    """
    federation = content["federation"]
    sends = federation.get("traffic", {"up": 1})["up"] > 0
    has_centers = "centers" in federation.get("server", {}).get("states", {})
    if content.get("global_step") and (has_centers or not sends):
        raise ValueError(
            f"{_WANTS} trained weights but got {path} of {federation['identity']['algorithm']},"
            " whose global model nobody trains: give the file of a client's model, which"
            " `python -m pl_fed export` writes."
        )


def _load(path: Path) -> Any:
    """Return the content of a file, without running code in it."""
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file  # only such files need the package
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"Expected the package safetensors to be installed to read {path} but it is"
                ' missing: run pip install "pl_fed[safetensors]".'
            ) from error
        return load_file(path)
    try:
        return safe_load(path, map_location="cpu")
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(path):
            raise ValueError(
                f"{_WANTS} a checkpoint, a state dict or safetensors but got {path}: it is broken,"
                " or of another kind."
            ) from error
        raise ValueError(
            f"{_WANTS} a file of tensors but got {path}, which holds other objects: if you trust"
            f' it, write its tensors alone by torch.save(torch.load("{path}",'
            ' weights_only=False)["state_dict"], "weights.pt").'
        ) from error


def fit_names(weights: Mapping[str, Tensor], net: nn.Module, path: Path) -> dict[str, Tensor]:
    """Return weights under the names of a net's tensors.

    A LightningModule and the net within it name the same tensors with and without a prefix, as
    ``net.0.weight`` and ``0.weight``; so does DistributedDataParallel.

    Args:
        weights: The tensors of a net by name.
        net: The net.
        path: The file of the weights, for messages.

    Raises:
        ValueError: If names or shapes differ; with the first names.
    """
    own = net.state_dict()
    candidates = ({rename(n): t for n, t in weights.items()} for rename in _renamings(weights, own))
    renamed = next((names for names in candidates if names.keys() == own.keys()), None)
    if renamed is None:
        raise ValueError(
            f"{_WANTS} weights of {type(net).__name__} but got {path}, which"
            f" {_describe_difference(weights, own)}: use the weights of this net."
        )
    for name, tensor in renamed.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{_WANTS} weights of {type(net).__name__}, with shape {list(own[name].shape)} for"
                f" {name}, but got {path} with shape {list(tensor.shape)}: use the weights of this"
                " net."
            )
    return renamed


def _renamings(
    weights: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> Iterator[Callable[[str], str]]:
    """Yield functions that rename a tensor of the file.

    The first one keeps the name. Others remove a prefix of all weights, or add a prefix of all
    tensors of the net.
    """
    yield lambda name: name
    for others, change in ((weights, _remove_prefix), (own, _add_prefix)):
        prefix = next(iter(others), "")
        while "." in prefix:
            prefix = prefix.rpartition(".")[0]
            if all(name.startswith(f"{prefix}.") for name in others):
                yield change(f"{prefix}.")


def _remove_prefix(prefix: str) -> Callable[[str], str]:
    """Return a function that removes a prefix of names."""
    return lambda name: name.removeprefix(prefix)


def _add_prefix(prefix: str) -> Callable[[str], str]:
    """Return a function that puts a prefix before names."""
    return lambda name: f"{prefix}{name}"


def _describe_difference(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """Return the names that weights lack, and those that the net lacks."""
    missing = [name for name in own if name not in weights]
    unknown = [name for name in weights if name not in own]
    texts = [f"{verb} {_shorten(n)}" for verb, n in (("lacks", missing), ("has", unknown)) if n]
    return " and ".join(texts)


def _shorten(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
