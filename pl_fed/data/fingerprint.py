"""What tells data sets apart: digests of integers and names, and a few numbers of the inputs."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pl_fed.trees import Tree, leaves

_ROWS = 64  # samples whose inputs are compared
_ENTRIES = 1 << 16  # of large labels, as many as are hashed
_LARGE = 1 << 26  # bytes of labels that are hashed in full
_TOLERANCE = 0.01  # of their size, for images that another library has decoded


def digest_of(*tensors: Tensor) -> str:
    """Return a digest of tensors' values, dtypes and shapes."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_of_names(names: Iterable[Iterable[str]]) -> str:
    """Return a digest of the names of each of some clients."""
    digest = hashlib.blake2b(digest_size=8)
    for client in names:
        for name in client:
            digest.update(name.encode(errors="surrogatepass") + b"\0")
        digest.update(b"\1")
    return digest.hexdigest()


def digest_of_labels(labels: Tree, samples: Tensor) -> str:
    """Return a digest of the labels of samples: of 65,536 of them if labels are large."""
    if not isinstance(labels, Tensor):
        return " ".join(digest_of_labels(leaf, samples) for leaf in leaves(labels))
    if labels.nbytes > _LARGE and len(samples) > _ENTRIES:
        samples = samples[_evenly(len(samples), _ENTRIES)]
    return digest_of(labels[samples])


def fingerprint_of(inputs: Tree) -> dict[str, Any]:
    """Return a few numbers that tell inputs from others of the same shape.

    They are taken before anything is normalized, so that a resumed run may use another machine.

    Args:
        inputs: Shape [samples, ...].

    Returns:
        ``shape``; ``dtype``; and ``projections``, for 64 samples the product of the input and one
        fixed random vector. Of several tensors: lists of shapes and dtypes, and all projections.

    Example:
        >>> fingerprint_of(torch.zeros(2, 3))
        {'shape': [2, 3], 'dtype': 'torch.float32', 'projections': [0.0, 0.0]}
    """
    if not isinstance(inputs, Tensor):
        prints = [fingerprint_of(leaf) for leaf in leaves(inputs)]
        return {
            "shape": [each["shape"] for each in prints],
            "dtype": [each["dtype"] for each in prints],
            "projections": [number for each in prints for number in each["projections"]],
        }
    rows = inputs[_evenly(len(inputs), _ROWS)].unsqueeze(-1).flatten(1).double()
    random = torch.Generator().manual_seed(0)
    vector = torch.randn(rows.shape[1], generator=random, dtype=torch.float64)
    return {
        "shape": list(inputs.shape),
        "dtype": str(inputs.dtype),
        "projections": (rows * vector).sum(1).tolist(),
    }


def same_inputs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two fingerprints are of the same inputs, within rounding."""
    if any(one.get(part) != other.get(part) for part in ("shape", "dtype")):
        return False
    mine, others = one["projections"], other.get("projections")
    if not isinstance(others, list) or len(others) != len(mine):
        return False
    largest = _TOLERANCE * math.sqrt(sum(a * a for a in mine) / max(1, len(mine)))
    return all(isinstance(b, float) and abs(a - b) <= largest for a, b in zip(mine, others))


def _evenly(size: int, number: int) -> Tensor:
    """Return at most so many indices below a size, evenly spaced."""
    number = min(size, number)
    return torch.arange(number) * size // max(1, number)
