"""Large loss: attackers report a larger loss than their own to a server that favours large losses.

Fair aggregators give clients with large losses a large weight: q-FFL (T. Li, M. Sanjabi, A. Beirami
and V. Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, arXiv 1905.10497) and
TERM (T. Li, A. Beirami, M. Sanjabi and V. Smith, "Tilted Empirical Risk Minimization", ICLR 2021,
arXiv 2007.01162). The server cannot check these losses::

    F_k ← factor · F_k

The upload itself stays. With an attack on data, such as ``Combined`` with ``Backdoor``, the
poisoned update gets the weight of the worst-off client. No paper is known to us that measures it.
"""

from torch import Tensor

from pl_fed.arguments import check_positive
from pl_fed.attacks.base import Attack
from pl_fed.types import RoundContext


class LargeLoss(Attack):
    """Large loss: each attacker multiplies the loss that it reports.

    It changes nothing for aggregators that read no losses. Use ``Combined`` to poison data or
    uploads as well.

    Args:
        factor: The factor of the loss, positive. Losses above 0 grow by factors above 1. Below 1,
            the attacker hides from a server that leaves out uploads with large losses, such as
            ``KLoss``.

    Shape:
        - ``losses``: [b].
        - output: [b].

    Raises:
        ValueError: If ``factor`` is not positive and finite.

    Example:
        >>> import torch
        >>> LargeLoss(factor=4.0).forge_losses(torch.tensor([0.5, 2.0]), RoundContext())
        tensor([2., 8.])
    """

    def __init__(self, factor: float = 10.0) -> None:
        check_positive(factor=factor)
        self.factor = factor

    def forge_losses(self, losses: Tensor, context: RoundContext) -> Tensor:
        """Return the losses times the factor."""
        return self.factor * losses
