"""ResNet-18 for images of 32×32, as FLPoison and BackFed use it."""

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
