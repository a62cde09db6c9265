"""Wide ResNet for CIFAR (Zagoruyko and Komodakis, 2016).

Pre-activation, 6n + 4 layers; where the shape changes, the shortcut is a 1×1 convolution.
"""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from isda.experiments.networks.network import ConvNetwork, conv, stages
from isda.experiments.networks.stochastic import optional_dropout

__all__ = ["PreactivationBlock", "wide_resnet16_8", "wide_resnet28_10"]


def wide_resnet16_8(
    *, num_classes: int, in_channels: int = 3, drop_rate: float = 0.0
) -> ConvNetwork:
    """Wide-ResNet-16-8: 11.0 M parameters, A = 512."""
    return _wide_resnet(16, 8, num_classes, in_channels, drop_rate)


def wide_resnet28_10(
    *, num_classes: int, in_channels: int = 3, drop_rate: float = 0.0
) -> ConvNetwork:
    """Wide-ResNet-28-10: 36.5 M parameters, A = 640; the paper uses drop_rate 0.3."""
    return _wide_resnet(28, 10, num_classes, in_channels, drop_rate)


class PreactivationBlock(nn.Module):
    """Batch norm and ReLU before each of two 3×3 convolutions, with optional dropout between.

    Where the shape changes, the shortcut starts after the first activation.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, *, drop_rate: float = 0.0
    ) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = conv(in_channels, out_channels, stride=stride)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.dropout = optional_dropout(drop_rate)
        self.conv2 = conv(out_channels, out_channels)
        self.shortcut = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = conv(in_channels, out_channels, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x), inplace=True)
        residual = F.relu(self.bn2(self.conv1(active)), inplace=True)
        residual = self.conv2(self.dropout(residual))
        return residual + (x if self.shortcut is None else self.shortcut(active))


def _wide_resnet(
    depth: int, widening: int, num_classes: int, in_channels: int, drop_rate: float
) -> ConvNetwork:
    widths = 16 * widening, 32 * widening, 64 * widening
    block = partial(PreactivationBlock, drop_rate=drop_rate)
    body = nn.Sequential(
        conv(in_channels, 16),
        stages(block, 16, widths, (depth - 4) // 6),
        nn.BatchNorm2d(widths[-1]),
        nn.ReLU(inplace=True),
    )
    return ConvNetwork(body, widths[-1], num_classes)
