"""One low-rank adapter of a layer."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Adapter:
    """Adapter: the tensors of a layer W x + s B A x.

    Attributes:
        weight: The frozen W, [outputs, inputs]; or its transpose.
        a: A, [r, inputs].
        b: B, [outputs, r].
        name_a: The name of A among the parameters of the net.
        name_b: The name of B among the parameters of the net.
        scale: s = α / r.
        transposed: Whether the weight is stored transposed, as in GPT-2.
        is_plain: Whether the layer is linear, and computes nothing else.
    """

    weight: Tensor
    a: Tensor
    b: Tensor
    name_a: str
    name_b: str
    scale: float
    transposed: bool
    is_plain: bool
