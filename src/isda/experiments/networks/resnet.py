"""ResNet for CIFAR (He et al., 2016) and its squeeze-and-excitation form (Hu et al., 2018).

Post-activation, 6n + 2 layers; where the shape changes, the shortcut is a 1×1 convolution with
batch norm.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isda.experiments.networks.network import ConvNetwork, conv, shortcut, stages
from isda.experiments.networks.stochastic import optional_dropout

__all__ = ["BasicBlock", "SqueezeExcitation", "resnet8", "resnet32", "resnet110", "se_resnet110"]


def resnet8(*, num_classes: int, in_channels: int = 3, drop_rate: float = 0.0) -> ConvNetwork:
    """ResNet-8, the smallest of the family; not in the paper, used for the digits."""
    return _resnet(8, num_classes, in_channels, drop_rate)


def resnet32(*, num_classes: int, in_channels: int = 3, drop_rate: float = 0.0) -> ConvNetwork:
    """ResNet-32: 0.5 M parameters, A = 64."""
    return _resnet(32, num_classes, in_channels, drop_rate)


def resnet110(*, num_classes: int, in_channels: int = 3, drop_rate: float = 0.0) -> ConvNetwork:
    """ResNet-110: 1.7 M parameters, A = 64."""
    return _resnet(110, num_classes, in_channels, drop_rate)


def se_resnet110(*, num_classes: int, in_channels: int = 3, drop_rate: float = 0.0) -> ConvNetwork:
    """SE-ResNet-110: 1.7 M parameters, A = 64."""
    return _resnet(110, num_classes, in_channels, drop_rate, reduction=16)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, with optional dropout between the convolutions."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        *,
        drop_rate: float = 0.0,
        reduction: int | None = None,
    ) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, out_channels, stride=stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.dropout = optional_dropout(drop_rate)
        self.conv2 = conv(out_channels, out_channels)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.se = SqueezeExcitation(out_channels, reduction) if reduction else None
        self.shortcut = shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        residual = F.relu(self.bn1(self.conv1(x)), inplace=True)
        residual = self.bn2(self.conv2(self.dropout(residual)))
        if self.se is not None:
            residual = self.se(residual)
        return F.relu(residual + self.shortcut(x), inplace=True)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a factor in (0, 1) computed from the means of all channels."""

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, channels // reduction, bias=False)
        self.excite = nn.Linear(channels // reduction, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))  # (N, channels)
        return x * scale[:, :, None, None]


def _resnet(
    depth: int, num_classes: int, in_channels: int, drop_rate: float, reduction: int | None = None
) -> ConvNetwork:
    block = partial(BasicBlock, drop_rate=drop_rate, reduction=reduction)
    body = nn.Sequential(
        conv(in_channels, 16),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        stages(block, 16, (16, 32, 64), (depth - 2) // 6),
    )
    return ConvNetwork(body, 64, num_classes)
