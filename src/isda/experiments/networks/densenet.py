"""DenseNet-BC for CIFAR (Huang et al., 2017): bottlenecks, compression 0.5, a stem of 2k channels.

The authors' code has a stem of 24 channels for any growth rate k, but the parameter counts in the
paper are those of 2k.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isda.experiments.networks.network import ConvNetwork, conv
from isda.experiments.networks.stochastic import optional_dropout

__all__ = ["DenseLayer", "densenet_bc100_12", "densenet_bc190_40"]


def densenet_bc100_12(
    *, num_classes: int, in_channels: int = 3, drop_rate: float = 0.0
) -> ConvNetwork:
    """DenseNet-BC-100-12: 0.8 M parameters, A = 342."""
    return _densenet(100, 12, num_classes, in_channels, drop_rate)


def densenet_bc190_40(
    *, num_classes: int, in_channels: int = 3, drop_rate: float = 0.0
) -> ConvNetwork:
    """DenseNet-BC-190-40: 25.6 M parameters, A = 2190."""
    return _densenet(190, 40, num_classes, in_channels, drop_rate)


class DenseLayer(nn.Module):
    """Concatenates ``growth`` new channels, computed by a bottleneck of 4 × growth, to its input.

    Dropout, if enabled, follows each of the two convolutions.
    """

    def __init__(self, in_channels: int, growth: int, *, drop_rate: float = 0.0) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = conv(in_channels, 4 * growth, 1)
        self.dropout1 = optional_dropout(drop_rate)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = conv(4 * growth, growth)
        self.dropout2 = optional_dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        new = self.dropout1(self.conv1(F.relu(self.bn1(x), inplace=True)))
        new = self.dropout2(self.conv2(F.relu(self.bn2(new), inplace=True)))
        return torch.cat((x, new), 1)


def _densenet(
    depth: int, growth: int, num_classes: int, in_channels: int, drop_rate: float
) -> ConvNetwork:
    channels = 2 * growth
    body = nn.Sequential(conv(in_channels, channels))
    for block in range(3):
        if block:
            body.append(_transition(channels, drop_rate))
            channels //= 2
        for _ in range((depth - 4) // 6):
            body.append(DenseLayer(channels, growth, drop_rate=drop_rate))
            channels += growth
    body.extend((nn.BatchNorm2d(channels), nn.ReLU(inplace=True)))
    return ConvNetwork(body, channels, num_classes)


def _transition(channels: int, drop_rate: float) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        conv(channels, channels // 2, 1),
        optional_dropout(drop_rate),
        nn.AvgPool2d(2),
    )
