"""Large products of compiled steps and evaluations on AMD's processors: by oneDNN, not by MKL.

MKL, which torch takes for products of matrices, keeps to AVX2 on processors that are not Intel's;
oneDNN, which torch takes for convolutions, runs their AVX-512: on a core of an AMD EPYC (Zen 5) at
twice the speed (``experiments/benchmarks/products.py``).
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_fed.torch_internals import OperatorMode, onednn_product

_WORTH = 1 << 21  # multiplications from which it pays: an operator in Python takes some µs


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    by_onednn = onednn_product()
    if by_onednn is None:
        raise RuntimeError("Expected torch to have products by oneDNN but it has none.")
    return by_onednn(a, b.t(), bias)


def _shape_of_product(a: Tensor, b: Tensor, *_: Tensor | None) -> Tensor:
    return a.new_empty(len(a), b.shape[1])


_LIBRARY = torch.library.Library("pl_fed", "DEF")
_LIBRARY.define("product(Tensor a, Tensor b, Tensor? bias=None) -> Tensor")
_LIBRARY.impl("product", _product, "CPU")
_LIBRARY.impl("product", _shape_of_product, "Meta")


@cache
def mkl_held_back() -> bool:
    """Return whether MKL's products are slower on this machine than oneDNN's."""
    built = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not built or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    if onednn_product() is None:
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:  # another system than Linux
        return False


class FasterProducts(OperatorMode):
    """Runs large products of float32 matrices on the CPU by oneDNN."""

    def run(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a large product by oneDNN, and anything else as it is."""
        if operator is torch.ops.aten.mm.default and _worth(*args):
            return torch.ops.pl_fed.product(*args)
        if operator is torch.ops.aten.addmm.default and not kwargs and _worth(*args[1:]):
            bias, a, b = args
            if bias.dim() == 1 and len(bias) == b.shape[1]:
                return torch.ops.pl_fed.product(a, b, bias)
        return operator(*args, **kwargs)


def _worth(a: Tensor, b: Tensor) -> bool:
    plain = a.device.type == "cpu" and a.dtype == b.dtype == torch.float32
    return plain and a.numel() * b.shape[1] >= _WORTH
