"""Counter-based random numbers: functions of a key, which is made of seed, step and purpose.

Unlike a generator, a key has no state. The same key gives the same numbers on any device, with
other runs side by side, in eager mode, compiled or in a CUDA graph, and a resumed run has no
generator state to restore. The mixing function is the 32-bit finaliser of MurmurHash3 in int64
arithmetic.
"""

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["bits", "fold", "integers", "key", "normal", "permutation", "uniform"]

_MASK = 0xFFFFFFFF


def key(*parts: int, device: torch.device | str | None = None) -> Tensor:
    """Key of some integers, such as ``key(seed, purpose)``: an int64 scalar on ``device``."""
    result = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        result = fold(result, part)
    return result


def fold(key: Tensor, part: int | Tensor) -> Tensor:
    """New key from a key and an integer; different integers give independent keys.

    A tensor of integers gives as many keys.
    """
    part = part & _MASK
    low, high = key & _MASK, key >> 32
    low = _mix((low + 0x9E3779B9 + _mix(part ^ 0x5BD1E995)) & _MASK)
    high = _mix((high + low * 5 + part) & _MASK)
    return ((high & 0x7FFFFFFF) << 32) | low


def bits(shape: tuple[int, ...], key: Tensor, *, start: int = 0) -> Tensor:
    """Uniform integers in [0, 2³²) as int64; ``start`` skips that many, for part of a batch."""
    return _words(shape, key, start).to(torch.int64) & _MASK


def uniform(shape: tuple[int, ...], key: Tensor, *, start: int = 0) -> Tensor:
    """Uniform float32 numbers in [0, 1)."""
    return ((_words(shape, key, start) >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def integers(shape: tuple[int, ...], key: Tensor, *, high: int, start: int = 0) -> Tensor:
    """Uniform integers in [0, high) as int64."""
    return (bits(shape, key, start=start) * high) >> 32


def normal(shape: tuple[int, ...], key: Tensor) -> Tensor:
    """Standard normal float32 numbers, by the Box-Muller transform."""
    radius = (-2 * (1 - uniform(shape, fold(key, 0))).log()).sqrt()  # the logarithm of (0, 1]
    return radius * (2 * math.pi * uniform(shape, fold(key, 1))).cos()


def permutation(length: int, key: Tensor) -> Tensor:
    """Random permutation of ``range(length)``."""
    return torch.argsort(bits((length,), key), stable=True)


def _words(shape: tuple[int, ...], key: Tensor, start: int) -> Tensor:
    """Random 32-bit words as int32, which GPUs multiply several times faster than int64."""
    stop = start + math.prod(shape)
    index = torch.arange(start, stop, dtype=torch.int32, device=key.device).view(shape)
    return _mix_words(_mix_words(index ^ key.to(torch.int32)) + (key >> 32).to(torch.int32))


def _mix_words(x: Tensor) -> Tensor:
    """:func:`_mix` in int32, where products wrap around and shifts are arithmetic."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * (0x85EBCA6B - 2**32)
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * (0xC2B2AE35 - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def _mix(x: Any) -> Any:
    """Mix a Python integer, or an int64 tensor of 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)
