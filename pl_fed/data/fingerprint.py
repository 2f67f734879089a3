"""Fingerprints of data sets: digests of integers and names, and projections of the inputs."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pl_fed.trees import Tree, leaves

_ROWS = 64  # number of inputs that are projected and compared
_ENTRIES = 1 << 16  # number of labels to hash if there are more than _LARGE bytes
_LARGE = 1 << 26  # largest size of labels that are hashed in full, in bytes
_TOLERANCE = 0.01  # of the projections' size: image libraries decode slightly differently


def digest_of(*tensors: Tensor) -> str:
    """Return a digest of the values, dtypes and shapes of tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_of_names(names: Iterable[Iterable[str]]) -> str:
    """Return a digest of the clients' lists of names."""
    digest = hashlib.blake2b(digest_size=8)
    for client in names:
        for name in client:
            digest.update(name.encode(errors="surrogatepass") + b"\0")
        digest.update(b"\1")
    return digest.hexdigest()


def digest_of_labels(labels: Tree, samples: Tensor) -> str:
    """Return a digest of the labels of samples; of 65,536 if all labels take more than 64 MiB."""
    if not isinstance(labels, Tensor):
        return " ".join(digest_of_labels(leaf, samples) for leaf in leaves(labels))
    if labels.nbytes > _LARGE and len(samples) > _ENTRIES:
        samples = samples[_spaced_indices(len(samples), _ENTRIES)]
    return digest_of(labels[samples])


def fingerprint_of(inputs: Tree) -> dict[str, Any]:
    """Return a fingerprint that distinguishes inputs of the same shape.

    Take it before normalization, so that a run can resume on another machine.

    Args:
        inputs: Inputs [samples, ...], before normalization.

    Returns:
        ``shape``, ``dtype`` and ``projections``: the products of 64 inputs with a fixed random
        vector. For a tree of several tensors: the list of shapes, the list of dtypes and the
        projections of all tensors.

    Example:
        >>> fingerprint_of(torch.zeros(2, 3))
        {'shape': [2, 3], 'dtype': 'torch.float32', 'projections': [0.0, 0.0]}
    """
    if not isinstance(inputs, Tensor):
        prints = [fingerprint_of(leaf) for leaf in leaves(inputs)]
        return {
            "shape": [fingerprint["shape"] for fingerprint in prints],
            "dtype": [fingerprint["dtype"] for fingerprint in prints],
            "projections": [number for leaf in prints for number in leaf["projections"]],
        }
    # torch 2.9 has no `inputs[indices]` for unsigned integers of 16 bits and more
    rows = inputs.index_select(0, _spaced_indices(len(inputs), _ROWS))
    rows = rows.unsqueeze(-1).flatten(1).double()
    random = torch.Generator().manual_seed(0)
    vector = torch.randn(rows.shape[1], generator=random, dtype=torch.float64)
    return {
        "shape": list(inputs.shape),
        "dtype": str(inputs.dtype),
        "projections": (rows * vector).sum(1).tolist(),
    }


def same_inputs(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two fingerprints belong to the same inputs, within rounding."""
    kinds = [str(record.get("dtype")).replace("float64", "float32") for record in (first, second)]
    if first.get("shape") != second.get("shape") or kinds[0] != kinds[1]:
        return False
    projections, others = first["projections"], second.get("projections")
    if not isinstance(others, list) or len(others) != len(projections):
        return False
    scale = math.sqrt(sum(a * a for a in projections) / max(1, len(projections)))
    tolerance = _TOLERANCE * scale
    return all(
        isinstance(b, float) and abs(a - b) <= tolerance for a, b in zip(projections, others)
    )


def _spaced_indices(size: int, number: int) -> Tensor:
    """Return ``number`` evenly spaced indices from 0 to ``size`` − 1, or all if there are fewer."""
    number = min(size, number)
    return torch.arange(number) * size // max(1, number)
