"""Counter-based random numbers: a draw depends on its key, and on nothing else.

Every draw in pl_fed has a key of (seed, purpose, round, client, ...). There is no hidden state. A
key gives equal numbers after any earlier draws, in any order, chunk or process, eager or under
``torch.vmap``. The numbers are those of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014), as a hash of (key + i · γ).
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def key(seed: int, purpose: str, *parts: int) -> int:
    """Return the 64-bit key of a draw.

    Args:
        seed: The seed of the federation.
        purpose: The purpose of the draw, such as ``"batches"``; two purposes never share numbers.
        parts: Further numbers that distinguish the draw: round, client, step.

    Returns:
        A signed 64-bit integer.

    Example:
        >>> key(0, "batches", 3) == key(0, "batches", 3)
        True
        >>> key(0, "batches", 3) == key(0, "batches", 4)
        False
    """
    text = "/".join((str(seed), purpose, *(str(int(part)) for part in parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def generator(seed: int, purpose: str, *parts: int) -> torch.Generator:
    """Return a CPU generator seeded with :func:`key`, for draws by torch itself.

    torch reads 32 bits of a seed: two keys give equal numbers with a probability of 2⁻³².
    """
    return torch.Generator().manual_seed(key(seed, purpose, *parts) & (2**63 - 1))


@contextmanager
def fork_torch_rng(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds torch's global generators; restore them at the end.

    It serves code that draws from torch itself: layers and transforms from outside pl_fed.

    Args:
        device: The device of the code. Its generator is forked beside the CPU's.

    Example:
        >>> with fork_torch_rng(torch.device("cpu")) as seed:
        ...     seed(key(0, "example"))
        ...     print(torch.rand(1))
        tensor([0.2881])
    """
    gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if gpu else []):

        def seed(draw: int) -> None:
            """Seed the generators of the CPU and of the device with a key."""
            # torch.manual_seed visits all kinds of devices and takes 0.1 ms
            torch.default_generator.manual_seed(draw & (2**63 - 1))
            if gpu:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(draw & (2**63 - 1))

        yield seed


@contextmanager
def fork_all_generators(
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds the global generators of torch, numpy and python.

    Their states are restored at the end. It serves data sets and steps that draw at random.

    Args:
        device: The device of the code. Its generator is forked beside the CPU's.

    Example:
        >>> with fork_all_generators() as seed:
        ...     seed(key(0, "example"))
        ...     print(random.random())
        0.2152456988824567
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with fork_torch_rng(device) as seed_torch:

        def seed(draw: int) -> None:
            """Seed the generators with a key."""
            seed_torch(draw)
            random.seed(draw)
            np.random.seed(draw & (2**32 - 1))  # noqa: NPY002

        try:
            yield seed
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def read_global_state() -> Any:
    """Return the states of the global generators of Python and NumPy, to be compared."""
    kind, numbers, *counts = np.random.get_state()  # noqa: NPY002
    return random.getstate(), kind, bytes(np.asarray(numbers)), counts


def read_generators() -> tuple[bytes, Any]:
    """Return the states of the CPU's global generators of torch, Python and NumPy."""
    return bytes(torch.get_rng_state().numpy()), read_global_state()


def mix(z: Tensor) -> Tensor:
    """Return SplitMix64's output function of int64 ``z``, element by element, with wrap-around."""
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def random_bits(keys: Tensor | int, counters: Tensor) -> Tensor:
    """Return 64 random bits for each counter under each key.

    Args:
        keys: An int64 tensor that broadcasts with ``counters``, or one key.
        counters: The indices of the numbers of a key, int64.

    Returns:
        int64 tensor of the broadcast shape.
    """
    return mix(mix(counters * _GAMMA + keys) + _GAMMA)


def uniforms(keys: Tensor | int, counters: Tensor) -> Tensor:
    """Return float32 numbers, uniform on [0, 1), for each counter under each key.

    Args:
        keys: An int64 tensor that broadcasts with ``counters``, or one key.
        counters: The indices of the numbers of a key, int64.

    Example:
        >>> uniforms(key(0, "example"), torch.arange(2)).lt(1).all()
        tensor(True)
    """
    return _shift(random_bits(keys, counters), 40).to(torch.float32) * 2.0**-24


def normals(keys: Tensor | int, counters: Tensor) -> Tensor:
    """Return standard normal float32 numbers for each counter under each key (Box–Muller).

    They are computed in float64, so that a number does not depend on the numbers computed with it.
    Their absolute values are at most 5.8.

    Args:
        keys: An int64 tensor that broadcasts with ``counters``, or one key.
        counters: The indices of the numbers of a key, int64.

    Example:
        >>> normals(key(0, "example"), torch.arange(2))
        tensor([0.8215, 1.3504])
    """
    radius = (-2 * (1 - uniforms(keys, 2 * counters).double()).log()).sqrt()
    angle = 2 * math.pi * uniforms(keys, 2 * counters + 1).double()
    return (radius * angle.cos()).to(torch.float32)


def normal_row(key: int, length: int) -> Tensor:
    """Return standard normal float64 numbers of one key, [length], on the CPU.

    NumPy's generator SFC64 with the ziggurat method draws them: all 53 bits and the tails are
    exact, in half the time of :func:`normals`. It is not cryptographic.

    Args:
        key: The key of the row.
        length: The number of numbers.

    Example:
        >>> normal_row(key(0, "example"), 2).dtype
        torch.float64
    """
    return torch.from_numpy(numpy_generator(key).standard_normal(length))


def numpy_generator(key: int) -> np.random.Generator:
    """Return a generator of NumPy, SFC64, for one key.

    Example:
        >>> numpy_generator(key(0, "example")).permutation(3).shape
        (3,)
    """
    return np.random.Generator(np.random.SFC64(key & (2**64 - 1)))


def integers(keys: Tensor | int, counters: Tensor, high: int) -> Tensor:
    """Return int64 numbers, uniform on {0, ..., high - 1}, for each counter under each key.

    Args:
        keys: An int64 tensor that broadcasts with ``counters``, or one key.
        counters: The indices of the numbers of a key, int64.
        high: The number of possible values.
    """
    return _shift(random_bits(keys, counters), 33).remainder(high)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right without the sign extension of torch's ``>>``."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
