"""Random layers: dropout, stochastic depth and Shake-Shake.

By default they use torch's global generator. After :func:`bind_key` they use a key that the
training loop sets before each step. Random numbers then depend only on the key, the layer and the
index of the image in the global batch, so they do not change with other runs side by side or
with several ranks.
"""

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from isda.experiments.data import counter_rng

__all__ = [
    "DropPath",
    "Dropout",
    "ShakeShake",
    "bind_key",
    "optional_dropout",
    "replace_random_layers",
]


class _RandomLayer(nn.Module):
    """A layer with random numbers for each image of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.key: Tensor | None = None  # a reference, not a buffer: the training loop owns it
        self.stream = 0  # index of the layer in the network
        self.offset = 0  # images of the global batch on lower ranks

    def uniform(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Uniform random numbers in [0, 1); the first dimension counts the images."""
        if self.key is None:
            return torch.rand(shape, device=device)
        start = self.offset * math.prod(shape[1:])
        return counter_rng.uniform(shape, counter_rng.fold(self.key, self.stream), start=start)


class Dropout(_RandomLayer):
    """Zeroes elements with probability ``drop_rate`` and scales the rest by 1 / (1 - drop_rate)."""

    def __init__(self, drop_rate: float) -> None:
        super().__init__()
        self.drop_rate = drop_rate

    @property
    def p(self) -> float:
        """Name of the rate in ``nn.Dropout``, which some models read for fused attention."""
        return self.drop_rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = self.uniform(tuple(x.shape), x.device) >= self.drop_rate
        return x * kept * (1 / (1 - self.drop_rate))  # this order keeps the memory format of x

    def extra_repr(self) -> str:
        return f"drop_rate={self.drop_rate}"


class DropPath(Dropout):
    """Zeroes whole images with probability ``drop_rate``, scales the rest by 1 / (1 - drop_rate).

    Stochastic depth (Huang et al., 2016), at the end of a residual branch.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = self.uniform((len(x), *[1] * (x.dim() - 1)), x.device) >= self.drop_rate
        return x * kept * (1 / (1 - self.drop_rate))


def optional_dropout(drop_rate: float) -> nn.Module:
    """A dropout layer; at rate 0, a layer that does nothing and draws no random numbers."""
    return Dropout(drop_rate) if drop_rate else nn.Identity()


class ShakeShake(_RandomLayer):
    """Mixes two branches with a random weight per image (Gastaldi, 2017).

    The forward pass is ``α x1 + (1 - α) x2``; the backward pass uses an independent weight ``β``
    instead of ``α``. In eval mode both weights are ½.
    """

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        if not self.training:
            return 0.5 * (x1 + x2)
        weights = self.uniform((len(x1), 2), x1.device).to(x1.dtype)
        weights = weights[:, :, None, None, None]  # (N, 2, 1, 1, 1)
        return _Shake.apply(x1, x2, weights[:, 0], weights[:, 1])


def bind_key(network: nn.Module, key: Tensor, *, offset: int = 0) -> int:
    """Make the random layers of a network use a key; return the number of such layers.

    Args:
        network: network with layers of this module.
        key: int64 scalar on the device of the network, kept by reference: write the key of every
            step into it.
        offset: number of images of the global batch on lower ranks.
    """
    layers = [module for module in network.modules() if isinstance(module, _RandomLayer)]
    for stream, layer in enumerate(layers):
        layer.key, layer.stream, layer.offset = key, stream, offset
    return len(layers)


def replace_random_layers(model: nn.Module) -> None:
    """Replace active dropout and stochastic depth of torch, torchvision and timm by ours."""
    from torchvision.ops import StochasticDepth  # slow to import

    timm = sys.modules.get("timm.layers")  # a model with timm's layers has imported it
    for path, layer in [*model.named_modules(remove_duplicate=False)]:  # one may have two paths
        if isinstance(layer, nn.Dropout) and layer.p:
            model.set_submodule(path, Dropout(layer.p))
        elif isinstance(layer, StochasticDepth) and layer.p and layer.mode == "row":
            model.set_submodule(path, DropPath(layer.p))
        elif timm is not None and isinstance(layer, timm.DropPath) and layer.drop_prob:
            model.set_submodule(path, DropPath(layer.drop_prob))


class _Shake(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x1: Tensor, x2: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        ctx.save_for_backward(beta)
        return alpha * x1 + (1 - alpha) * x2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (beta,) = ctx.saved_tensors
        return beta * grad, (1 - beta) * grad, None, None
