"""AutoAugment (Section 4.1) with the CIFAR-10 policy, drawn separately for every image.

The settings are those of the authors' code, which differ from torchvision's: pixels outside
the image are grey (128), shears are bicubic, translations and rotations take the nearest pixel,
rotations are never negated, thresholds of Solarize go from 256 to 0, and the second operation of
sub-policy 16 has the probability 0.8 instead of 0.6. Every operation gives the same bytes as
Pillow's.

All images with the same operation and magnitude are changed together, which takes about eighty
calls for a data set of any size. The group sizes are read back to the host, so this runs between
epochs and not inside a captured step.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import AutoAugment, AutoAugmentPolicy
from torchvision.transforms.v2.functional import equalize, invert, posterize, solarize

from isda.experiments.data.counter_rng import fold, integers, uniform

__all__ = ["FILL", "POLICY", "autoaugment", "draw_policies"]

FILL = 128
"""Value of pixels outside the image."""

# 25 pairs of (operation, probability, level or None)
POLICY: tuple[tuple[tuple[str, float, int | None], ...], ...] = tuple(
    (first, ("Equalize", 0.8, None)) if number == 16 else (first, second)
    for number, (first, second) in enumerate(AutoAugment(AutoAugmentPolicy.CIFAR10).policies)
)


def autoaugment(images: Tensor, key: Tensor) -> Tensor:
    """Apply to each image the two operations of a randomly drawn sub-policy.

    Equivalent to the operations of Pillow on every image, with the random choices of
    :func:`draw_policies`.

    Args:
        images: uint8 images of one or three channels, on the key's device.
        key: key of this run and epoch (see :mod:`isda.experiments.data.counter_rng`).

    Shape:
        images (N, C, H, W); output (N, C, H, W).
    """
    choice, applied, negative = draw_policies(len(images), key)
    variants, table = _variants(images.shape[-2], images.shape[-1])
    index = torch.tensor(table, device=images.device)  # (25, 2, 2)
    chunk = max(1, _CHUNK // max(1, images[:1].numel()))
    images = images.clone()
    for position in range(2):
        variant = index[choice, position, negative[:, position].long()]  # (N,)
        variant = torch.where(applied[:, position], variant, len(variants))
        counts = torch.bincount(variant, minlength=len(variants) + 1).tolist()
        groups = variant.argsort(stable=True).split(counts)  # the last group is not changed
        for (operation, magnitude), group in zip(variants, groups[:-1], strict=True):
            for rows in group.split(chunk) if len(group) else ():
                images[rows] = _OPERATIONS[operation](images[rows], magnitude)
    return images


def draw_policies(number: int, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sub-policy of every image, whether its two operations apply, and whether they are negated.

    Shape:
        outputs (N,) int64 in [0, 25), (N, 2) bool, (N, 2) bool.
    """
    choice = integers((number,), fold(key, 0), high=len(POLICY))
    chance = [[probability for _, probability, _ in pair] for pair in POLICY]
    applied = uniform((number, 2), fold(key, 1))
    applied = applied < torch.tensor(chance, device=key.device)[choice]
    return choice, applied, integers((number, 2), fold(key, 2), high=2) == 1


_CHUNK = 2**25  # elements per call, which become float32 and int64


def _blend(degenerate: Tensor, images: Tensor, factor: float) -> Tensor:
    """``Image.blend``: interpolate or extrapolate from a degenerate image, and truncate."""
    mixed = degenerate + factor * (images.float() - degenerate)
    return mixed.clamp(0, 255).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """Luma as in ``Image.convert("L")``, (N, 1, H, W) int32."""
    if images.shape[1] == 1:
        return images.int()
    red, green, blue = images.int().unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16)[:, None]


def _contrast(images: Tensor, factor: float) -> Tensor:
    pixels = images.shape[-2] * images.shape[-1]
    total = _grey(images).sum((1, 2, 3), keepdim=True)  # int64
    return _blend((2 * total + pixels) // (2 * pixels), images, factor)  # the rounded mean


def _sharpness(images: Tensor, factor: float) -> Tensor:
    smooth = images.int()
    if min(images.shape[-2:]) > 2:  # the border is not smoothed
        height, width = images.shape[-2:]
        window = [
            smooth[..., y : height - 2 + y, x : width - 2 + x] for y in range(3) for x in range(3)
        ]
        total = torch.stack(window).sum(0) + 4 * window[4]  # weights 1, in the centre 5
        smooth[..., 1:-1, 1:-1] = (2 * total + 13) // 26
    return _blend(smooth, images, factor)


def _autocontrast(images: Tensor) -> Tensor:
    low, high = images.amin((-2, -1), keepdim=True), images.amax((-2, -1), keepdim=True)
    span = high.double() - low
    scale = torch.full_like(span, 255.0) / span  # 255.0 / span would round the reciprocal first
    stretched = images * scale + -low.double() * scale
    stretched = stretched.nan_to_num(0.0).clamp(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, images)  # a constant channel stays


def _shear_y(images: Tensor, magnitude: float) -> Tensor:
    """Move every column by its own distance, by Pillow's cubic interpolation (a = -1)."""
    height, width = images.shape[-2:]
    x, y = (torch.arange(size, device=images.device).double() + 0.5 for size in (width, height))
    source = magnitude * x[None] + y[:, None]  # (H, W)
    outside = (source < 0) | (source >= height)
    first = (source - 0.5).floor()
    d = source - 0.5 - first
    rows = [(first.long() + tap).clamp(0, height - 1).expand_as(images) for tap in (-1, 0, 1, 2)]
    v1, v2, v3, v4 = (images.gather(2, row).double() for row in rows)
    cubic = 2 * (v1 - v2) + v3 - v4 + d * (-v1 + v2 - v3 + v4)
    value = v2 + d * (v3 - v1 + d * cubic)
    return value.clamp(0, 255).to(torch.uint8).masked_fill(outside, FILL)


def _move(operation: str, images: Tensor, magnitude: float) -> Tensor:
    """Translate or rotate: take every pixel from the one that Pillow takes, or fill it."""
    height, width = images.shape[-2:]
    source = torch.from_numpy(_source(operation, magnitude, height, width)).to(images.device)
    index = source.clamp(min=0)
    return images[..., index // width, index % width].masked_fill(source < 0, FILL)


@lru_cache
def _source(operation: str, magnitude: float, height: int, width: int) -> np.ndarray:
    """Number of the pixel that Pillow takes for each pixel, -1 outside, (H, W)."""
    numbers = Image.fromarray(np.arange(height * width, dtype=np.int32).reshape(height, width))
    if operation == "Rotate":
        return np.array(numbers.rotate(magnitude, fillcolor=-1)).astype(np.int64)
    x, y = (magnitude, 0.0) if operation == "TranslateX" else (0.0, magnitude)
    moved = numbers.transform(
        numbers.size, Image.Transform.AFFINE, (1, 0, x, 0, 1, y), fillcolor=-1
    )
    return np.array(moved).astype(np.int64)


_OPERATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "ShearY": _shear_y,
    **{name: partial(_move, name) for name in ("TranslateX", "TranslateY", "Rotate")},
    "Brightness": lambda images, magnitude: _blend(torch.zeros_like(images), images, 1 + magnitude),
    "Color": lambda images, magnitude: _blend(_grey(images), images, 1 + magnitude),
    "Contrast": lambda images, magnitude: _contrast(images, 1 + magnitude),
    "Sharpness": lambda images, magnitude: _sharpness(images, 1 + magnitude),
    "Posterize": lambda images, magnitude: posterize(images, int(magnitude)),
    "Solarize": solarize,
    "AutoContrast": lambda images, magnitude: _autocontrast(images),
    "Equalize": lambda images, magnitude: equalize(images),
    "Invert": lambda images, magnitude: invert(images),
}


@lru_cache
def _variants(height: int, width: int) -> tuple[list[tuple[str, float]], list[list[list[int]]]]:
    """All (operation, magnitude) pairs, and their index by [sub-policy][position][sign]."""
    largest = {"ShearY": 0.3, "Rotate": 30.0}
    largest |= dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), 0.9)
    largest |= {"TranslateX": 150 / 331 * width, "TranslateY": 150 / 331 * height}

    def variant(operation: str, level: int | None, sign: int) -> tuple[str, float]:
        if level is None:
            return operation, 0.0
        if operation == "Posterize":
            return operation, 8 - round(level * 4 / 9)  # bits to keep
        if operation == "Solarize":
            return operation, float(np.linspace(256, 0, 10)[level])
        magnitude = float(np.linspace(0, largest[operation], 10)[level])
        return operation, magnitude if operation == "Rotate" else sign * magnitude

    table = [[[variant(name, level, s) for s in (1, -1)] for name, _, level in p] for p in POLICY]
    variants = sorted({v for pair in table for signs in pair for v in signs})
    return variants, [[[variants.index(v) for v in signs] for signs in pair] for pair in table]
