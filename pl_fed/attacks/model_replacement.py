"""Model replacement, or boosting: each attacker enlarges its own upload.

E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin and V. Shmatikov, "How To Backdoor Federated Learning",
AISTATS 2020, arXiv 1807.00459; attack A3 of Ditto (T. Li, S. Hu, A. Beirami and V. Smith, ICML
2021, arXiv 2012.04221)::

    Δ_k ← factor · Δ_k

so that the upload outweighs all others in a mean. In Ditto's code, the factor is the number of
clients in the cohort, and the attackers train on random labels: use ``Combined`` with
``RandomLabels`` for that.
"""

from torch import Tensor

from pl_fed.attacks.line_attack import Factor, LineAttack
from pl_fed.functional.aggregation import merging_dtype
from pl_fed.types import RoundContext


class ModelReplacement(LineAttack):
    """Model replacement: each attacker multiplies its own upload by a factor.

    Args:
        factor: The factor; ``None`` takes the number of clients in the cohort; ``"search"``
            searches for the factor that does most harm: see :class:`LineAttack`.
        trials: Number of runs of the defence in a search, at least 1.

    Shape:
        - ``honest``: [h, d]; only a search reads it.
        - ``own``: [b, d].
        - output: [b, d].

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> context = RoundContext(clients=torch.arange(10))
        >>> ModelReplacement().forge(torch.zeros(9, 2), torch.tensor([[1.0, -2.0]]), context)
        tensor([[ 10., -20.]])
    """

    def __init__(self, factor: Factor | None = None, trials: int = 20) -> None:
        super().__init__(factor, trials)

    def line(self, reference: Tensor, own: Tensor, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Return 0 and the attackers' own uploads."""
        own = own.to(merging_dtype(own))
        return own.new_zeros(()), own

    def default_factor(
        self, reference: Tensor, centre: Tensor, direction: Tensor, context: RoundContext
    ) -> float:
        """Return the number of clients in the cohort."""
        return float(len(context.clients))
