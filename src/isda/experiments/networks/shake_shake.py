"""Shake-Shake for CIFAR (Gastaldi, 2017): two branches with random weights per image.

The ReLU is at the start of each branch, so identity shortcuts also carry negative values.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isda.experiments.networks.network import ConvNetwork, conv, stages
from isda.experiments.networks.stochastic import ShakeShake

__all__ = ["ShakeBlock", "ShiftedShortcut", "shake_shake26_2x32d", "shake_shake26_2x112d"]


def shake_shake26_2x32d(*, num_classes: int, in_channels: int = 3) -> ConvNetwork:
    """Shake-Shake (26, 2x32d): 2.9 M parameters, A = 128."""
    return _shake_shake(26, 32, num_classes, in_channels)


def shake_shake26_2x112d(*, num_classes: int, in_channels: int = 3) -> ConvNetwork:
    """Shake-Shake (26, 2x112d): 35.6 M parameters, A = 448."""
    return _shake_shake(26, 112, num_classes, in_channels)


class ShakeBlock(nn.Module):
    """Random mixture of two residual branches, and a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.branch1 = _branch(in_channels, out_channels, stride)
        self.branch2 = _branch(in_channels, out_channels, stride)
        self.shake = ShakeShake()
        self.shortcut = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = ShiftedShortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(x)
        mixture = self.shake(self.branch1(active), self.branch2(active))
        return mixture + (x if self.shortcut is None else self.shortcut(active))


class ShiftedShortcut(nn.Module):
    """Half of the channels from every stride-th pixel, half from its upper left neighbour."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, out_channels // 2, 1, stride=stride)
        self.conv2 = conv(in_channels, out_channels // 2, 1, stride=stride)
        self.bn = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        shifted = F.pad(x, (1, -1, 1, -1))  # one pixel right and down
        return self.bn(torch.cat((self.conv1(x), self.conv2(shifted)), 1))


def _branch(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        conv(in_channels, out_channels, stride=stride),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
        conv(out_channels, out_channels),
        nn.BatchNorm2d(out_channels),
    )


def _shake_shake(depth: int, width: int, num_classes: int, in_channels: int) -> ConvNetwork:
    body = nn.Sequential(
        conv(in_channels, 16),
        nn.BatchNorm2d(16),
        stages(ShakeBlock, 16, (width, 2 * width, 4 * width), (depth - 2) // 6),
        nn.ReLU(inplace=True),
    )
    return ConvNetwork(body, 4 * width, num_classes, fan="fan_in")
