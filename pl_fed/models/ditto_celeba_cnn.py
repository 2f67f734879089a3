"""Ditto's CNN for CelebA.

T. Li, S. Hu, A. Beirami and V. Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, arXiv 2012.04221, Table 4. The layers are those of the reference code,
which took them from LEAF (Caldas et al., arXiv 1812.01097).

As in the reference code, batch normalisation always uses the statistics of the current batch, also
at test time. Therefore the net has no running statistics, and the logits of a sample depend on its
batch. This also lets the net run under ``torch.vmap``.
"""

from torch import Tensor, nn

from pl_fed.arguments import check_integers
from pl_fed.models._building import initialize_as_tensorflow


class DittoCelebaCNN(nn.Module):
    """Ditto's CNN for CelebA: four blocks of convolution, batch normalisation, pooling and ReLU.

    Source: Ditto (Li et al., ICML 2021, Table 4) and its reference code. The convolutions are 3×3
    with 32 channels, and a linear layer returns the logits.

    Args:
        in_channels: Channels of the images, at least 1.
        num_classes: Number of classes, at least 1.
        image_size: Height and width of the images in pixels, at least 2. Each of the four poolings
            halves it, and rounds up as TensorFlow's "same" padding does.
        glorot: Whether the initial weights are Glorot-uniform with zero biases, as in TensorFlow
            and therefore in the reference code. ``False`` keeps PyTorch's initial weights.

    Shape:
        [batch, in_channels, image_size, image_size] → logits [batch, num_classes].

    Raises:
        ValueError: If an argument is too small.

    Example:
        >>> import torch
        >>> DittoCelebaCNN()(torch.zeros(2, 3, 84, 84)).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 2,
        image_size: int = 84,
        glorot: bool = True,
    ) -> None:
        super().__init__()
        check_integers(1, in_channels=in_channels, num_classes=num_classes)
        check_integers(2, image_size=image_size)
        layers: list[nn.Module] = []
        for channels in (in_channels, 32, 32, 32):
            layers += [
                nn.Conv2d(channels, 32, kernel_size=3, padding=1),
                nn.BatchNorm2d(32, eps=1e-3, track_running_stats=False),  # eps: TensorFlow's
                nn.MaxPool2d(2, ceil_mode=True),
                nn.ReLU(),
            ]
            image_size = -(-image_size // 2)
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(32 * image_size**2, num_classes)
        )
        if glorot:
            initialize_as_tensorflow(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.layers(x)
        return logits
