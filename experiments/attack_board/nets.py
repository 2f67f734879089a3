"""Nets for CIFAR-10: ResNet-18, as FLPoison and BackFed use it, and a small one."""

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet


class CifarResNet18(nn.Module):
    """ResNet-18 with a first convolution of 3×3, stride 1, and no pooling after it.

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, and the common
    implementation for CIFAR-10. It has 11,173,962 parameters for 10 classes.

    Args:
        num_classes: The number of classes.
        blocks: The number of residual blocks of each of the four stages: 2 for ResNet-18, and 1 for
            the small variant of the quick studies.

    Shape:
        - input: [batch, 3, 32, 32].
        - output: [batch, num_classes].
    """

    def __init__(self, num_classes: int = 10, blocks: int = 2) -> None:
        super().__init__()
        net = ResNet(BasicBlock, [blocks] * 4, num_classes=num_classes)
        net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images."""
        logits: Tensor = self.net(x)
        return logits


class StridedCNN(nn.Module):
    """Two convolutions and a linear layer for images of 32×32, small enough for one core.

    The first convolution has a stride of 2. The net shifts and scales its inputs itself, because
    ``data.normalize`` does not apply to the pool of an edge case.

    Args:
        num_classes: The number of classes.
        widths: The channels of the two convolutions.

    Shape:
        - input: [batch, 3, 32, 32], in [0, 1].
        - output: [batch, num_classes].
    """

    def __init__(self, num_classes: int = 10, widths: tuple[int, int] = (16, 32)) -> None:
        super().__init__()
        first, second = widths
        self.body = nn.Sequential(
            nn.Conv2d(3, first, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(second * 4 * 4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images."""
        logits: Tensor = self.head(self.body(4 * x - 2))
        return logits
