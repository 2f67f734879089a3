"""FLAME's CNNs for CIFAR-10 and Medical MNIST.

S. Zhu, J. Zeng, S. Wang, Y. Sun, X. Li, Y. Yao and Z. Peng, "On ADMM in Heterogeneous Federated
Learning: Personalization, Robustness, and Fairness", arXiv 2407.16397, Table II:

- CIFAR-10: ``FlameCNN()``, 268,650 parameters.
- Medical MNIST: ``FlameCNN(num_classes=6, image_size=28, dropout=0.5, first_bias=False)``, 206,678
  parameters. This count follows from 28×28 images with 3 channels and a first convolution without
  bias.

The paper's text has a dropout layer before the output of both nets. As in the reference code, the
default (CIFAR-10) has none.
"""

from torch import Tensor, nn

from pl_fed.arguments import check_integers, check_interval


class FlameCNN(nn.Module):
    """FLAME's CNN for CIFAR-10 and Medical MNIST: two 3×3 convolutions and a dense layer of 128.

    Source: FLAME (Zhu et al., arXiv 2407.16397, Table II) and its reference code. The convolutions
    have 16 and 32 channels, and pooling after each.

    Args:
        in_channels: Channels of the images, at least 1.
        num_classes: Number of classes, at least 1.
        image_size: Height and width of the images in pixels, at least 4.
        dropout: Probability of dropping a number before the output layer, in [0, 1).
        first_bias: Whether the first convolution has a bias.

    Shape:
        [batch, in_channels, image_size, image_size] → logits [batch, num_classes].

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> sum(parameter.numel() for parameter in FlameCNN().parameters())
        268650
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        image_size: int = 32,
        dropout: float = 0.0,
        first_bias: bool = True,
    ) -> None:
        super().__init__()
        check_integers(1, in_channels=in_channels, num_classes=num_classes)
        check_integers(4, image_size=image_size)
        check_interval("[0, 1)", dropout=dropout)
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, 16, kernel_size=3, padding=1, bias=first_bias),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (image_size // 4) ** 2, 128),
            nn.ReLU(),
            # A dropout layer of 0 still draws random numbers, which vmap may refuse.
            nn.Dropout(dropout) if dropout else nn.Identity(),
            nn.Linear(128, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.layers(x)
        return logits
