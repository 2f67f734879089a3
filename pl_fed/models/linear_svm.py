"""The linear support vector machine of Ditto's Vehicle.

T. Li, S. Hu, A. Beirami and V. Smith. "Ditto: Fair and robust federated learning through
personalization". ICML 2021. arXiv 2012.04221. Appendix C.1: linear SVM, 100 features, two classes.

The loss (as in the reference code) is the mean of max(0, 1 − y s) + 0.01 ‖w‖², where y = ±1, and
the first w is 0. As two logits −s and s, ``torch.nn.MultiMarginLoss(margin=2)`` is this hinge
exactly: (max(0, 2 − 2 y s)) / 2; ``weight_decay=0.02`` of ``torch.optim.SGD`` is the other term.
Stacked clients work, but torch runs this criterion one client at a time.

Departs from the reference code: a score of 0 is predicted as the first class, there as neither.
"""

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers


class LinearSVM(nn.Module):
    """A score s = ⟨w, x⟩, given as the logits −s of the first class and s of the second.

    Args:
        in_features: Numbers in one sample, >= 1.
        bias: Whether the score has an intercept, s = ⟨w, x⟩ + b.

    Shape:
        [batch, ...] with ``in_features`` numbers a sample → logits [batch, 2].

    Raises:
        ValueError: If ``in_features`` is below 1.

    Example:
        >>> LinearSVM(3)(torch.ones(2, 3)).shape
        torch.Size([2, 2])
    """

    def __init__(self, in_features: int = 100, bias: bool = False) -> None:
        super().__init__()
        check_integers(1, in_features=in_features)
        self.score = nn.Linear(in_features, 1, bias=bias)
        for parameter in self.score.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        score = self.score(x.flatten(1))
        return torch.cat([-score, score], dim=1)
