"""The random layers: dropout of elements and of branches, and the mixture of Shake-Shake.

Unbound, they draw from torch's global generator. Bound by `bind_draws`, they draw from a key that
the training loop sets before each step. A number is then a function of key, layer and the image's
place in the global batch: the same alone or beside other runs, on one rank or on several.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isda.experiments.data import counter_rng

__all__ = ["DropPath", "Dropout", "ShakeShake", "bind_draws"]


class _RandomLayer(nn.Module):
    """A layer that draws numbers for each image of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.key: Tensor | None = None  # kept by reference, not a buffer: the loop owns it
        self.stream = 0  # tells the layers of a network apart
        self.offset = 0  # images of the global batch in front of this rank's

    def uniform(self, shape: tuple[int, ...], key: Tensor) -> Tensor:
        start = self.offset * math.prod(shape[1:])
        return counter_rng.uniform(shape, counter_rng.fold(key, self.stream), start=start)


class Dropout(_RandomLayer):
    """Zeroes each element with probability ``drop_rate``, scales others by 1 / (1 - drop_rate)."""

    def __init__(self, drop_rate: float) -> None:
        super().__init__()
        self.drop_rate = drop_rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.key is None:
            return F.dropout(x, self.drop_rate)
        kept = self.uniform(tuple(x.shape), self.key) >= self.drop_rate
        return x * kept * (1 / (1 - self.drop_rate))  # in this order it keeps x's memory format

    def extra_repr(self) -> str:
        return f"drop_rate={self.drop_rate}"


class DropPath(Dropout):
    """Zeroes all of an image with probability ``drop_rate``, scales others by 1 / (1 - drop_rate).

    Stochastic depth (Huang et al., 2016), at the end of a branch.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        shape = (x.shape[0], *[1] * (x.dim() - 1))
        if self.key is None:
            drawn = torch.rand(shape, device=x.device)
        else:
            drawn = self.uniform(shape, self.key)
        return x * (drawn >= self.drop_rate) * (1 / (1 - self.drop_rate))


class ShakeShake(_RandomLayer):
    """Mixture of two branches by a random weight per image (Gastaldi, 2017).

    A second weight mixes the gradient.

    Forward ``α x1 + (1 - α) x2``, backward ``β`` and ``1 - β``; in evaluation the mean.
    """

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        if not self.training:
            return 0.5 * (x1 + x2)
        shape = (x1.shape[0], 2)
        if self.key is None:
            weights = torch.rand(shape, device=x1.device)
        else:
            weights = self.uniform(shape, self.key)
        weights = weights.to(x1.dtype)[:, :, None, None, None]  # (N, 2, 1, 1, 1)
        return _Shake.apply(x1, x2, weights[:, 0], weights[:, 1])


def bind_draws(network: nn.Module, key: Tensor | None, *, offset: int = 0) -> int:
    """Let every random layer of a network draw from a key; returns how many there are.

    Args:
        network: its layers of the kinds in this file are bound, each to a stream of its own.
        key: int64 scalar on the network's device, kept by reference: write each step's key into it.
            None goes back to torch's global generator.
        offset: number of images of the global batch in front of this rank's slice.
    """
    layers = [module for module in network.modules() if isinstance(module, _RandomLayer)]
    for stream, layer in enumerate(layers):
        layer.key, layer.stream, layer.offset = key, stream, offset
    return len(layers)


class _Shake(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x1: Tensor, x2: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        ctx.save_for_backward(beta)
        return alpha * x1 + (1 - alpha) * x2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (beta,) = ctx.saved_tensors
        return beta * grad, (1 - beta) * grad, None, None
