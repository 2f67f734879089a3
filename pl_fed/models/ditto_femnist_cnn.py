"""Ditto's net for FEMNIST.

Tian Li, Shengyuan Hu, Ahmad Beirami, Virginia Smith, "Ditto: Fair and Robust Federated Learning
Through Personalization", ICML 2021, arXiv:2012.04221, Table 4 ("CNN"; the layers are those of the
reference code): 222,078 parameters.

Departs from the reference code, where dropout stays on at test time: here ``eval()`` turns it off.
"""

from torch import Tensor, nn

from pl_fed.arguments import check_integers
from pl_fed.models._building import check_dropout, initialize_as_tensorflow


class DittoFemnistCNN(nn.Module):
    """Two 5×5 convolutions (16 and 32 wide) with pooling, a dense layer of 128, two dropouts.

    Args:
        in_channels: Channels of the images, >= 1.
        num_classes: Number of classes, >= 1.
        image_size: Height and width of the images in pixels, >= 4.
        dropout: Probability, in [0, 1), that training drops a number before the dense layer.
        dense_dropout: The same before the output layer.
        glorot: Begin with Glorot-uniform weights and zero biases, as TensorFlow does and so the
            reference code; ``False`` leaves PyTorch's initial weights.

    Shape:
        [batch, in_channels, image_size, image_size] → logits [batch, num_classes].

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> sum(parameter.numel() for parameter in DittoFemnistCNN().parameters())
        222078
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 62,
        image_size: int = 28,
        dropout: float = 0.25,
        dense_dropout: float = 0.5,
        glorot: bool = True,
    ) -> None:
        super().__init__()
        check_integers(1, in_channels=in_channels, num_classes=num_classes)
        check_integers(4, image_size=image_size)
        check_dropout(dropout=dropout, dense_dropout=dense_dropout)
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, 16, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(32 * (image_size // 4) ** 2, 128),
            nn.ReLU(),
            nn.Dropout(dense_dropout),
            nn.Linear(128, num_classes),
        )
        if glorot:
            initialize_as_tensorflow(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.layers(x)
        return logits
