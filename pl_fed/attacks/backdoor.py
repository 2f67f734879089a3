"""Backdoor: the model shall classify every sample with a stamp as the attacker's target class.

T. Gu, B. Dolan-Gavitt and S. Garg, "BadNets: Identifying Vulnerabilities in the Machine Learning
Model Supply Chain", arXiv 1708.06733 (a bright pattern in a corner of the image)::

    (x, y) ← (x with the stamp, target)      for a share of the Byzantine clients' samples

In federated learning: E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin and V. Shmatikov, "How To Backdoor
Federated Learning", AISTATS 2020, arXiv 1807.00459. All other samples stay unchanged, so that the
model remains accurate on clean samples. The metric ``backdoor_success`` measures the success: among
benign clients' samples of other classes, the share that the stamp makes the model classify as the
target.
"""

from types import EllipsisType
from typing import Literal, get_args

from torch import Tensor

from pl_fed.arguments import check_choice, check_finite, check_integers
from pl_fed.attacks.trigger_attack import TriggerAttack
from pl_fed.types import Batch, ClientContext

Corner = Literal["top_left", "top_right", "bottom_left", "bottom_right"]
_CORNERS = get_args(Corner)


class Backdoor(TriggerAttack):
    """Backdoor: a square stamped on some training samples, which get the attacker's target label.

    Every sample has one independent draw for all rounds. The share of stamped samples is therefore
    ``samples`` in expectation only.

    Args:
        target: The class that the attacker wants for stamped samples, at least 0.
        samples: Share of a Byzantine client's samples with a stamp, in [0, 1].
        size: Width and height of the square, in pixels, at least 1.
        corner: The corner of the square. In inputs with one dimension, the stamp is the first
            ``size²`` numbers (top) or the last ones (bottom).
        value: The value of all pixels of the square, in the units of the normalised inputs;
            ``None`` takes the largest number of the sample.

    Shape:
        - ``batch.inputs``: [batch, ..., height, width], all channels get the stamp;
          or [batch, numbers].
        - ``batch.targets``: class ids, [batch].
        - ``batch.samples``: [batch]; keys the draws.

    Raises:
        TypeError: If ``target`` or ``size`` is not an integer.
        ValueError: If an argument is out of range; on use, if ``target`` is not a class of the
            data, the square does not fit the inputs, or ``batch.samples`` is missing.

    Example:
        >>> import torch
        >>> x = torch.tensor([[[0.0, 0.1, 0.2], [0.3, 0.4, 0.5], [0.6, 0.7, 0.8]]])
        >>> stamped = Backdoor(target=3, size=2, value=1.0).trigger(Batch(x, torch.tensor([5])))
        >>> stamped.inputs, stamped.targets, stamped.mask
        (tensor([[[0.0000, 0.1000, 0.2000],
                 [0.3000, 1.0000, 1.0000],
                 [0.6000, 1.0000, 1.0000]]]), tensor([3]), tensor([True]))
    """

    def __init__(
        self,
        target: int,
        samples: float = 0.5,
        size: int = 3,
        corner: Corner = "bottom_right",
        value: float | None = None,
    ) -> None:
        super().__init__(target, samples)
        check_integers(1, size=size)
        check_choice(_CORNERS, corner=corner)
        check_finite(value=value)
        self.size = size
        self.corner = corner
        self.value = value

    def add_trigger(self, batch: Batch, context: ClientContext | None) -> Tensor:
        """Return the inputs with the stamp on every sample."""
        return self._add_stamp(batch.inputs)

    def _add_stamp(self, x: Tensor) -> Tensor:
        """Return a copy of the inputs with the stamp on every sample."""
        x, index = x.clone(), self.stamp_index(x)
        value = x.flatten(1).amax(1) if self.value is None else x.new_tensor(self.value)
        x[index] = value.reshape(-1, *[1] * (x.ndim - 1))
        return x

    def stamp_index(self, x: Tensor) -> tuple[slice | EllipsisType, ...]:
        """Return the index of the stamp in inputs."""
        is_image = x.ndim > 2
        width = self.size if is_image else self.size**2
        max_width = min(x.shape[-2:]) if is_image else x.shape[-1]
        if width > max_width:
            raise ValueError(
                f"Expected argument `size` to fit inputs of shape {list(x.shape[1:])} but got"
                f" {self.size}."
            )
        rows = slice(width) if self.corner.startswith("top") else slice(-width, None)
        columns = slice(width) if self.corner.endswith("left") else slice(-width, None)
        return (..., rows, columns) if is_image else (..., rows)
