"""Ditto's net for Fashion-MNIST.

Tian Li, Shengyuan Hu, Ahmad Beirami, Virginia Smith, "Ditto: Fair and Robust Federated Learning
Through Personalization", ICML 2021, arXiv:2012.04221, Table 4 ("CNN"; the layers are those of the
reference code): 3,274,634 parameters.
"""

from torch import Tensor, nn

from pl_fed.arguments import check_integers
from pl_fed.models._building import initialize_as_tensorflow


class DittoFashionCNN(nn.Module):
    """Two 5×5 convolutions (32 and 64 wide) with pooling, a dense layer of 1,024, no dropout.

    Args:
        in_channels: Channels of the images, >= 1.
        num_classes: Number of classes, >= 1.
        image_size: Height and width of the images in pixels, >= 4.
        glorot: Begin with Glorot-uniform weights and zero biases, as TensorFlow does and so the
            reference code; ``False`` leaves PyTorch's initial weights.

    Shape:
        [batch, in_channels, image_size, image_size] → logits [batch, num_classes].

    Raises:
        ValueError: If an argument is too small.

    Example:
        >>> sum(parameter.numel() for parameter in DittoFashionCNN().parameters())
        3274634
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int = 28,
        glorot: bool = True,
    ) -> None:
        super().__init__()
        check_integers(1, in_channels=in_channels, num_classes=num_classes)
        check_integers(4, image_size=image_size)
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, 32, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (image_size // 4) ** 2, 1024),
            nn.ReLU(),
            nn.Linear(1024, num_classes),
        )
        if glorot:
            initialize_as_tensorflow(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.layers(x)
        return logits
