"""Interface of all networks, and parts that the CIFAR networks share (Appendix B).

Initialisation follows the authors' code: convolutions N(0, 2 / fan), batch norm 1 and 0, linear
layers with torch's default.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from isda.experiments.networks.narrow_convolution import NarrowConv2d
from isda.experiments.networks.pretrained import LoadedWeights

__all__ = [
    "ConvNetwork",
    "Network",
    "conv",
    "initialise_convolutions",
    "seeded",
    "shortcut",
    "stages",
]

Fan = Literal["fan_in", "fan_out"]


class Network(nn.Module):
    """Image classifier with a linear head: ``logits = head(forward_features(images))``.

    Shape:
        images (N, channels, height, width); features (N, A); logits (N, C).
    """

    weights: LoadedWeights | None = None
    """What the network was started from; None: random numbers."""

    def forward_features(self, x: Tensor) -> Tensor:
        """Features (N, A), the input of the linear head."""
        raise NotImplementedError

    def get_classifier(self) -> nn.Linear:
        """The linear head."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C)."""
        return self.get_classifier()(self.forward_features(x))

    def check(self, images: Tensor, logits: Tensor) -> None:
        """Raise InputError if ``logits = head(forward_features(images))`` does not hold."""

    @property
    def num_features(self) -> int:
        """Number of features A."""
        return self.get_classifier().in_features

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return self.get_classifier().out_features


class ConvNetwork(Network):
    """Convolutional body, global average pooling and linear head, as in all CIFAR networks.

    Args:
        body: maps images to (N, A, height, width).
        num_features: number of features A.
        num_classes: number of classes C.
        fan: ``"fan_out"`` or ``"fan_in"``, which scales the initial weights of convolutions.
    """

    def __init__(
        self, body: nn.Module, num_features: int, num_classes: int, *, fan: Fan = "fan_out"
    ) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(num_features, num_classes)
        initialise_convolutions(self, fan)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.body(x).mean((2, 3))

    def get_classifier(self) -> nn.Linear:
        return self.head


def conv(
    in_channels: int, out_channels: int, kernel_size: int = 3, *, stride: int = 1, groups: int = 1
) -> nn.Conv2d:
    """Convolution with padding and without bias, since batch norm follows."""
    narrow = {in_channels, out_channels} <= {*NarrowConv2d.CHANNELS}
    if narrow and (kernel_size, stride, groups) == (3, 1, 1):
        return NarrowConv2d(in_channels, out_channels)
    padding = kernel_size // 2
    return nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=False
    )


def shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Identity, or where the shape changes, a 1×1 convolution with batch norm."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        conv(in_channels, out_channels, 1, stride=stride), nn.BatchNorm2d(out_channels)
    )


def stages(
    block: Callable[[int, int, int], nn.Module], in_channels: int, widths: Sequence[int], depth: int
) -> nn.Sequential:
    """Stages of ``depth`` blocks, one per width; all but the first halve the resolution.

    ``block(in_channels, out_channels, stride)`` builds a block.
    """
    result = nn.Sequential()
    for index, width in enumerate(widths):
        first = block(in_channels, width, 2 if index else 1)
        result.append(nn.Sequential(first, *(block(width, width, 1) for _ in range(depth - 1))))
        in_channels = width
    return result


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, which draws initial weights; its state is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def initialise_convolutions(module: nn.Module, fan: Fan = "fan_out") -> None:
    """Initialise every convolution with N(0, 2 / fan); fan_out is kernel area × out_channels."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode=fan, nonlinearity="relu")
