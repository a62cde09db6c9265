"""ResNeXt for CIFAR (Xie et al., 2017): 9n + 2 layers, bottlenecks with grouped convolutions."""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from isda.experiments.networks.network import ConvNetwork, conv, shortcut, stages

__all__ = ["GroupedBottleneck", "resnext29_8x64d"]


def resnext29_8x64d(*, num_classes: int, in_channels: int = 3) -> ConvNetwork:
    """ResNeXt-29, 8x64d: 34.4 M parameters, A = 1024."""
    return _resnext(29, 8, 64, num_classes, in_channels)


class GroupedBottleneck(nn.Module):
    """1×1, grouped 3×3 and 1×1 convolution, and a shortcut.

    A group has ``base_width`` channels in the first stage, which has 256 output channels, and
    proportionally more in the later stages.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, *, groups: int, base_width: int
    ) -> None:
        super().__init__()
        width = groups * base_width * out_channels // 256
        self.conv1 = conv(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, stride=stride, groups=groups)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, out_channels, 1)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        residual = F.relu(self.bn1(self.conv1(x)), inplace=True)
        residual = F.relu(self.bn2(self.conv2(residual)), inplace=True)
        residual = self.bn3(self.conv3(residual))
        return F.relu(residual + self.shortcut(x), inplace=True)


def _resnext(
    depth: int, groups: int, base_width: int, num_classes: int, in_channels: int
) -> ConvNetwork:
    block = partial(GroupedBottleneck, groups=groups, base_width=base_width)
    body = nn.Sequential(
        conv(in_channels, 64),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        stages(block, 64, (256, 512, 1024), (depth - 2) // 9),
    )
    return ConvNetwork(body, 1024, num_classes)
