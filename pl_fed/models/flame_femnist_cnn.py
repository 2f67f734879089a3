"""FLAME's CNN for FEMNIST.

S. Zhu, J. Zeng, S. Wang, Y. Sun, X. Li, Y. Yao and Z. Peng, "On ADMM in Heterogeneous Federated
Learning: Personalization, Robustness, and Fairness", arXiv 2407.16397, Table II ("CNN2"): 214,590
parameters. This count requires 62 classes, where the table says 10.
"""

from torch import Tensor, nn

from pl_fed.arguments import check_integers


class FlameFemnistCNN(nn.Module):
    """FLAME's CNN for FEMNIST: a 7×7 and a 3×3 convolution with pooling, and a linear layer.

    Source: FLAME (Zhu et al., arXiv 2407.16397, Table II). The convolutions have 32 and 64
    channels.

    Args:
        in_channels: Channels of the images, at least 1.
        num_classes: Number of classes, at least 1.
        image_size: Height and width of the images in pixels, at least 4.

    Shape:
        [batch, in_channels, image_size, image_size] → logits [batch, num_classes].

    Raises:
        ValueError: If an argument is too small.

    Example:
        >>> sum(parameter.numel() for parameter in FlameFemnistCNN().parameters())
        214590
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 62, image_size: int = 28) -> None:
        super().__init__()
        check_integers(1, in_channels=in_channels, num_classes=num_classes)
        check_integers(4, image_size=image_size)
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, 32, kernel_size=7, padding=3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (image_size // 4) ** 2, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.layers(x)
        return logits
