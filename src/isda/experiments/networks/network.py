"""What every network of the evaluation offers, and the parts the CIFAR networks share (Appendix B).

Initialisation follows the authors' code: convolutions N(0, 2 / fan), batch normalisation 1 and 0,
linear layers as torch leaves them.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn

__all__ = ["ConvNetwork", "Network", "conv", "initialise_convolutions", "stages"]

Fan = Literal["fan_in", "fan_out"]


class Network(nn.Module):
    """An image classifier whose last layer is linear: ``logits = head(forward_features(images))``.

    Shape:
        images (N, channels, height, width); features (N, A); logits (N, C).
    """

    def forward_features(self, x: Tensor) -> Tensor:
        """Features (N, A) directly in front of the linear head."""
        raise NotImplementedError

    def get_classifier(self) -> nn.Linear:
        """The linear head."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C)."""
        return self.get_classifier()(self.forward_features(x))

    def check(self, images: Tensor, logits: Tensor) -> None:
        """Raise InputError if the logits of these images are not the network's own."""

    @property
    def num_features(self) -> int:
        """A, the width of the features."""
        return self.get_classifier().in_features

    @property
    def num_classes(self) -> int:
        """C, the number of logits."""
        return self.get_classifier().out_features


class ConvNetwork(Network):
    """Convolutional body, global average pooling, linear head: the form of every CIFAR network.

    Args:
        body: maps images to (N, A, height, width).
        num_features: A.
        num_classes: C.
        fan: ``"fan_out"`` or ``"fan_in"``, what scales the convolutions' initial weights.
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
    """Convolution without bias (a batch normalisation follows) that keeps the size at stride 1."""
    padding = kernel_size // 2
    return nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=False
    )


def stages(
    block: Callable[[int, int, int], nn.Module], in_channels: int, widths: Sequence[int], depth: int
) -> nn.Sequential:
    """One stage of ``depth`` blocks per width; every stage but the first halves the resolution.

    ``block(in_channels, out_channels, stride)`` builds a block.
    """
    result = nn.Sequential()
    for index, width in enumerate(widths):
        first = block(in_channels, width, 2 if index else 1)
        result.append(nn.Sequential(first, *(block(width, width, 1) for _ in range(depth - 1))))
        in_channels = width
    return result


def initialise_convolutions(module: nn.Module, fan: Fan = "fan_out") -> None:
    """Draw every convolution from N(0, 2 / fan); fan_out is kernel area × output channels."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode=fan, nonlinearity="relu")
