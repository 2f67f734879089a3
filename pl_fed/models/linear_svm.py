"""The linear support vector machine of Ditto's experiment on Vehicle.

T. Li, S. Hu, A. Beirami and V. Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, arXiv 2012.04221, appendix C.1: linear SVM, 100 features, two classes.

The loss, as in the reference code, is the mean of max(0, 1 − y s) + 0.01 ‖w‖² with y = ±1, and the
first w is 0. The net returns the logits −s and s. Then ``torch.nn.MultiMarginLoss(margin=2)`` is
exactly the hinge loss: max(0, 2 − 2 y s) / 2. ``weight_decay=0.02`` of ``torch.optim.SGD`` is the
other term. Stacked clients work, but torch computes this criterion one client at a time.

Departs from the reference code: the prediction for a score of 0 is the first class. The reference
code counts it as neither class.
"""

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers


class LinearSVM(nn.Module):
    """Linear support vector machine: score s = ⟨w, x⟩, returned as the two logits −s and s.

    Source: Ditto (Li et al., ICML 2021, appendix C.1).

    Args:
        in_features: Numbers in a sample, at least 1.
        bias: Whether the score has an intercept, s = ⟨w, x⟩ + b.

    Shape:
        [batch, ...] with ``in_features`` numbers in a sample → logits [batch, 2].

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
