"""Inner product manipulation: all attackers send a negative multiple of the honest mean.

C. Xie, O. Koyejo and I. Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product
Manipulation", UAI 2019, arXiv 1903.03936::

    Δ_k = −ε · mean of the honest uploads

A small ε hides among the honest uploads. It still reverses the direction of the result if the
honest uploads are spread widely enough around their mean. A large ε reverses a plain mean. With
ε = 1, it is the sign flipping of the library ByzFL.
"""

from torch import Tensor

from pl_fed.attacks.line_attack import Factor, LineAttack
from pl_fed.functional.forging import mean_row
from pl_fed.types import RoundContext


class InnerProductManipulation(LineAttack):
    """Inner product manipulation: −ε times the honest mean, the same upload from all attackers.

    Args:
        factor: The paper's ε; ``"search"`` searches for the ε that does most harm: see
            :class:`LineAttack`.
        trials: Number of runs of the defence in a search, at least 1.

    Shape:
        - ``honest``: [h, d].
        - ``own``: [b, d].
        - output: [b, d].

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> honest, own = torch.tensor([[1.0, 2.0], [3.0, 2.0]]), torch.zeros(1, 2)
        >>> InnerProductManipulation(factor=0.5).forge(honest, own, RoundContext())
        tensor([[-1., -1.]])
    """

    def __init__(self, factor: Factor = 0.5, trials: int = 20) -> None:
        super().__init__(factor, trials)

    def line(self, reference: Tensor, own: Tensor, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Return 0 and the negative mean."""
        mean = mean_row(reference)
        return mean.new_zeros(()), -mean
