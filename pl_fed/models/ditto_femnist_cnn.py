"""Ditto's CNN for FEMNIST.

T. Li, S. Hu, A. Beirami and V. Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, arXiv 2012.04221, Table 4 ("CNN"). The layers are those of the
reference code: 222,078 parameters.

Departs from the reference code, where dropout stays active at test time: here ``eval()`` turns it
off.
"""

from torch import Tensor, nn

from pl_fed.arguments import check_integers, check_interval
from pl_fed.models._building import initialize_as_tensorflow


class DittoFemnistCNN(nn.Module):
    """Ditto's CNN for FEMNIST: two 5×5 convolutions, a dense layer of 128, and two dropouts.

    Source: Ditto (Li et al., ICML 2021, Table 4) and its reference code. The convolutions have 16
    and 32 channels.

    Args:
        in_channels: Channels of the images, at least 1.
        num_classes: Number of classes, at least 1.
        image_size: Height and width of the images in pixels, at least 4.
        dropout: Probability of dropping a number before the dense layer, in [0, 1).
        dense_dropout: Probability of dropping a number before the output layer, in [0, 1).
        glorot: Whether the initial weights are Glorot-uniform with zero biases, as in TensorFlow
            and therefore in the reference code. ``False`` keeps PyTorch's initial weights.

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
        check_interval("[0, 1)", dropout=dropout, dense_dropout=dense_dropout)
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
