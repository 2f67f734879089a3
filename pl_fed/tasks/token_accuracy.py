"""The share of correctly predicted tokens."""

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenAccuracy(Metric):
    """Token accuracy: the share of positions with the correct most likely token.

    Args:
        ignore_index: Target of the positions that do not count.

    Shape of ``update``: logits [batch, length, vocabulary], and tokens, int64 [batch, length].

    Example:
        >>> metric = TokenAccuracy()
        >>> metric.update(torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]), torch.tensor([[1, 0]]))
        >>> metric.compute()
        tensor(0.5000)
    """

    full_state_update = False
    higher_is_better = True

    correct: Tensor
    total: Tensor

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.add_state("correct", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, tokens: Tensor) -> None:
        """Count tokens."""
        counts = tokens != self.ignore_index
        self.correct += ((logits.argmax(-1) == tokens) & counts).sum()
        self.total += counts.sum()

    def compute(self) -> Tensor:
        """Return the accuracy; NaN without tokens."""
        return self.correct / self.total
