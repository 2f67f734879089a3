"""PFLlib's CNN for images of 28×28."""

from torch import Tensor, nn


class FedAvgCNN(nn.Module):
    """FedAvg CNN: two 5×5 convolutions without padding, each with pooling, and two dense layers.

    Source: the class of this name in PFLlib (``system/flcore/trainmodel/models.py``), the 4-layer
    CNN of its published tables. It has 582,026 parameters for images of one channel and 10 classes.

    Args:
        num_classes: The number of classes.

    Shape:
        - input: [batch, 1, 28, 28].
        - output: [batch, num_classes].
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, 512),
            nn.ReLU(),
            nn.Linear(512, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images."""
        logits: Tensor = self.layers(x)
        return logits
