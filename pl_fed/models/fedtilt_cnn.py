"""FedTilt's CNN for CIFAR-10.

B. Zhang, L. Mares De La Cruz and B. Wang, "FedTilt: Towards Multi-Level Fairness-Preserving and
Robust Federated Learning", arXiv 2503.13537: three convolutional blocks and a fully connected
layer. The paper states no widths and no kernel sizes, and has no code. The defaults, 32-64-128 with
3×3 kernels and 2×2 max-pooling, are our choice.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from pl_fed.arguments import check_integers


class FedTiltCNN(nn.Module):
    """FedTilt's CNN for CIFAR-10: blocks of 3×3 convolution, ReLU and pooling, and a linear layer.

    Source: FedTilt (Zhang et al., arXiv 2503.13537); the sizes are our choice.

    Args:
        in_channels: Channels of the images, at least 1.
        num_classes: Number of classes, at least 1.
        image_size: Height and width of the images in pixels, at least 2 to the power of the number
            of blocks.
        widths: Channels after each block. There is at least one block, and every width is at least
            1.

    Shape:
        [batch, in_channels, image_size, image_size] → logits [batch, num_classes].

    Raises:
        ValueError: If an argument is too small.

    Example:
        >>> import torch
        >>> FedTiltCNN()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        image_size: int = 32,
        widths: Sequence[int] = (32, 64, 128),
    ) -> None:
        super().__init__()
        check_integers(1, in_channels=in_channels, num_classes=num_classes)
        if not widths:
            raise ValueError("Expected argument `widths` to name at least one block but got none.")
        check_integers(2 ** len(widths), image_size=image_size)
        layers: list[nn.Module] = []
        channels = in_channels
        for width in widths:
            check_integers(1, widths=width)
            layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)]
            channels = width
        features = channels * (image_size // 2 ** len(widths)) ** 2
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.layers(x)
        return logits
