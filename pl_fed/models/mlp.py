"""The multilayer perceptrons of FLAME and FedTilt.

S. Zhu, J. Zeng, S. Wang, Y. Sun, X. Li, Y. Yao and Z. Peng, "On ADMM in Heterogeneous Federated
Learning: Personalization, Robustness, and Fairness" (FLAME), arXiv 2407.16397: 784-128-64-10 ("two
hidden layers"), 109,386 parameters; its Table II says 7,850.
B. Zhang, L. Mares De La Cruz and B. Wang, "FedTilt: Towards Multi-Level Fairness-Preserving and
Robust Federated Learning", arXiv 2503.13537: "3 linear layers", without widths. This project takes
784-300-100-10 for it: ``MLP(hidden=[300, 100])``.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from pl_fed.arguments import check_integers


class MLP(nn.Module):
    """Multilayer perceptron: linear layers with ReLU between them.

    Source: FLAME (Zhu et al., arXiv 2407.16397) by default.

    Args:
        in_features: Numbers in a sample, at least 1.
        hidden: Widths of the hidden layers, each at least 1; an empty list gives logistic
            regression.
        num_classes: Number of classes, at least 1.

    Shape:
        [batch, ...] with ``in_features`` numbers in a sample → logits [batch, num_classes].

    Raises:
        ValueError: If an argument is below 1.

    Example:
        >>> import torch
        >>> MLP(hidden=[300, 100])(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, in_features: int = 784, hidden: Sequence[int] = (128, 64), num_classes: int = 10
    ) -> None:
        super().__init__()
        check_integers(1, in_features=in_features, num_classes=num_classes)
        layers: list[nn.Module] = [nn.Flatten()]
        width = in_features
        for next_width in hidden:
            check_integers(1, hidden=next_width)
            layers += [nn.Linear(width, next_width), nn.ReLU()]
            width = next_width
        self.layers = nn.Sequential(*layers, nn.Linear(width, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.layers(x)
        return logits
