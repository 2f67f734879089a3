"""Ditto's CNN for Fashion-MNIST.

T. Li, S. Hu, A. Beirami and V. Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, arXiv 2012.04221, Table 4 ("CNN"). The layers are those of the
reference code: 3,274,634 parameters.
"""

from torch import Tensor, nn

from pl_fed.arguments import check_integers
from pl_fed.models._building import initialize_as_tensorflow


class DittoFashionCNN(nn.Module):
    """Ditto's CNN for Fashion-MNIST: two 5×5 convolutions with pooling, and a dense layer of 1,024.

    Source: Ditto (Li et al., ICML 2021, Table 4) and its reference code. The convolutions have 32
    and 64 channels, and there is no dropout.

    Args:
        in_channels: Channels of the images, at least 1.
        num_classes: Number of classes, at least 1.
        image_size: Height and width of the images in pixels, at least 4.
        glorot: Whether the initial weights are Glorot-uniform with zero biases, as in TensorFlow
            and therefore in the reference code. ``False`` keeps PyTorch's initial weights.

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
