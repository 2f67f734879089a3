"""Canaries: clients that send a random direction, to audit differential privacy.

G. Andrew, P. Kairouz, S. Oh, A. Oprea, H. B. McMahan and V. Suriyakumar, "One-shot Empirical
Privacy Estimation for Federated Learning", ICLR 2024, arXiv 2302.03098, Algorithm 2: each canary
client k has a direction c_k, uniform on the unit sphere, and sends a multiple of it in each of its
rounds. The released models tell how much of it they contain:
:func:`pl_fed.functional.auditing.empirical_epsilon`.
"""

import torch
from torch import Tensor

from pl_fed.arguments import check_positive
from pl_fed.attacks.base import Attack
from pl_fed.functional.auditing import canary_direction
from pl_fed.types import RoundContext


class Canaries(Attack):
    """Canaries: every attacker sends its own random direction in each of its rounds.

    Source: Andrew et al., ICLR 2024, Algorithm 2.

    Args:
        norm: The norm of the uploads, above 0; at least the clipping norm for a meaningful audit.

    Shape:
        - ``honest``: [h, d]; not read.
        - ``own``: [b, d].
        - output: [b, d].

    Raises:
        ValueError: If ``norm`` is not positive.

    Example:
        >>> context = RoundContext(attackers=torch.tensor([4]))
        >>> Canaries(norm=2.0).forge(torch.zeros(0, 3), torch.zeros(1, 3), context).norm().round()
        tensor(2.)
    """

    def __init__(self, norm: float = 1000.0) -> None:
        check_positive(norm=norm)
        self.norm = norm

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return the attackers' directions, keyed by (seed, attacker)."""
        forged = torch.empty_like(own)
        for row, client in zip(forged, self.attacker_ids(own, context)):
            row.copy_(canary_direction(context.seed, client, len(row)) * self.norm)
        return forged
