"""A little is enough: all attackers send an upload slightly below the mean of the honest uploads.

M. Baruch, G. Baruch and Y. Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed
Learning", NeurIPS 2019, arXiv 1902.06156::

    Δ_kj = μ_j − z · σ_j      for each coordinate j
    z = the largest with φ(z) < (n − m − s) / (n − m),   s = ⌊n / 2 + 1⌋ − m

for n clients, of which m are attackers. μ_j and σ_j are the mean and the standard deviation of the
uploads that the attackers know: in the paper, their own. φ is the distribution function of the
normal distribution. The expected number of benign clients beyond the forged uploads is s. Together
with them, the attackers are a majority.

σ_j is the population's standard deviation, as in the authors' code. The library ByzFL takes the
sample's, and the other side of the mean.

Departs from the paper: z is at least 0 where the attackers are too few for a positive z; s is at
least 1 where the attackers alone are the majority.
"""

from statistics import NormalDist

from torch import Tensor

from pl_fed.attacks.line_attack import Factor, LineAttack
from pl_fed.functional.forging import mean_row, standard_deviations
from pl_fed.types import RoundContext


class ALittleIsEnough(LineAttack):
    """A little is enough: an upload z standard deviations below the mean, equal for all attackers.

    Args:
        factor: z; ``None`` computes the paper's z from the numbers of clients and attackers in the
            cohort; ``"search"`` searches for the z that does most harm: see :class:`LineAttack`.
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
        >>> ALittleIsEnough(factor=1.5).forge(honest, own, RoundContext())
        tensor([[0.5000, 2.0000]])
    """

    def __init__(self, factor: Factor | None = None, trials: int = 20) -> None:
        super().__init__(factor, trials)

    def line(self, reference: Tensor, own: Tensor, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Return the mean and the negative standard deviation."""
        mean = mean_row(reference)
        return mean, -standard_deviations(reference, mean)

    def default_factor(
        self, reference: Tensor, centre: Tensor, direction: Tensor, context: RoundContext
    ) -> float:
        """Return the paper's z."""
        return largest_quantile(len(context.clients), len(context.attackers))


def largest_quantile(clients: int, attackers: int) -> float:
    """Return the paper's z for a cohort of n clients with m attackers.

    Example:
        >>> round(largest_quantile(clients=50, attackers=24), 3)  # φ(z) < 24 / 26
        1.426
    """
    benign = max(1, clients - attackers)
    supporters = max(1, clients // 2 + 1 - attackers)
    return NormalDist().inv_cdf(max(0.5, (benign - supporters) / benign))
