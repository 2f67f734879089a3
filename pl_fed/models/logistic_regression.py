"""Multinomial logistic regression: the convex model for tests of theory.

FLAME (Zhu et al., arXiv 2407.16397) lists 7,850 parameters for MNIST in its Table II. This is the
number of this model, although the paper's text and figures use the :class:`~pl_fed.models.mlp.MLP`.
"""

from torch import Tensor, nn

from pl_fed.arguments import check_integers


class LogisticRegression(nn.Module):
    """Multinomial logistic regression: one linear layer. The loss contains the softmax.

    Args:
        in_features: Numbers in a sample, at least 1.
        num_classes: Number of classes, at least 1.

    Shape:
        [batch, ...] with ``in_features`` numbers in a sample → logits [batch, num_classes].

    Raises:
        ValueError: If an argument is below 1.

    Example:
        >>> import torch
        >>> LogisticRegression()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, in_features: int = 784, num_classes: int = 10) -> None:
        super().__init__()
        check_integers(1, in_features=in_features, num_classes=num_classes)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(in_features, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.layers(x)
        return logits
