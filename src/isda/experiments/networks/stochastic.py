"""Random layers: dropout, stochastic depth and Shake-Shake.

By default they use torch's global generator. After :func:`bind_keys` each layer uses a key that
the training loop sets before each step. Random numbers then depend only on this key and the index
of the image in the global batch, so they do not change with other runs side by side or with several
ranks.
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
    "bind_keys",
    "count_random_layers",
    "optional_dropout",
    "replace_random_layers",
]


class _RandomLayer(nn.Module):
    """A layer with random numbers for each image of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor | None = None  # of all layers; not a buffer: the training loop owns it
        self.place = 0  # of this layer's key
        self.offset = 0  # images of the global batch on lower ranks

    def uniform(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Uniform random numbers in [0, 1); the first dimension counts the images."""
        if self.keys is None:
            return torch.rand(shape, device=device)
        start = self.offset * math.prod(shape[1:])
        return counter_rng.uniform(shape, self.keys[self.place], start=start)


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


def count_random_layers(network: nn.Module) -> int:
    """Number of layers of this module in a network."""
    return len(_random_layers(network))


def bind_keys(network: nn.Module, keys: Tensor, *, offset: int = 0) -> None:
    """Make the random layers of a network use keys.

    Args:
        network: network with L random layers.
        keys: their keys on the device of the network, int64, kept by reference: write the keys of
            every step into it.
        offset: number of images of the global batch on lower ranks.

    Shape:
        keys (L,).
    """
    for place, layer in enumerate(_random_layers(network)):
        layer.keys, layer.place, layer.offset = keys, place, offset


def _random_layers(network: nn.Module) -> list[_RandomLayer]:
    return [module for module in network.modules() if isinstance(module, _RandomLayer)]


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
