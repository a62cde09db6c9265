"""AutoAugment (Section 4.1) with the CIFAR-10 policy, drawn separately for every image.

torchvision draws one policy per batch, so it would need a Python loop over the images. Here all
images with the same operation and magnitude go through torchvision's function together, which takes
about eighty calls for a data set of any size. The group sizes are read back to the host, so this
runs between epochs and not inside a captured step.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torchvision.transforms import AutoAugment, AutoAugmentPolicy
from torchvision.transforms.v2 import functional as F

from isda.experiments.data.counter_rng import fold, integers, uniform

__all__ = ["POLICY", "autoaugment", "draw_policies"]

# 25 pairs of (operation, probability, level or None)
POLICY: tuple[tuple[tuple[str, float, int | None], ...], ...] = tuple(
    AutoAugment(AutoAugmentPolicy.CIFAR10).policies
)


def autoaugment(images: Tensor, key: Tensor, *, start: int = 0) -> Tensor:
    """Apply to each image the two operations of a randomly drawn sub-policy.

    Equivalent to torchvision's ``v2.AutoAugment(AutoAugmentPolicy.CIFAR10)`` on every image, with
    the random choices of :func:`draw_policies`.

    Args:
        images: uint8 images of one or three channels, on the key's device.
        key: key of this run and epoch (see :mod:`isda.experiments.data.counter_rng`).
        start: index of the first image in the data set, if ``images`` is a slice of it.

    Shape:
        images (N, C, H, W); output (N, C, H, W).
    """
    choice, applied, negative = draw_policies(len(images), key, start=start)
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


def draw_policies(number: int, key: Tensor, *, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Sub-policy of every image, whether its two operations apply, and whether they are negated.

    Shape:
        outputs (N,) int64 in [0, 25), (N, 2) bool, (N, 2) bool.
    """
    choice = integers((number,), fold(key, 0), high=len(POLICY), start=start)
    chance = [[probability for _, probability, _ in pair] for pair in POLICY]
    applied = uniform((number, 2), fold(key, 1), start=2 * start)
    applied = applied < torch.tensor(chance, device=key.device)[choice]
    return choice, applied, integers((number, 2), fold(key, 2), high=2, start=2 * start) == 1


_CHUNK = 2**25  # elements per call, which become float32 and int64

_OPERATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "ShearY": lambda images, magnitude: F.affine(
        images, 0.0, [0, 0], 1.0, [0.0, math.degrees(math.atan(magnitude))], center=[0, 0]
    ),
    "TranslateX": lambda images, magnitude: F.affine(
        images, 0.0, [int(magnitude), 0], 1.0, [0.0, 0.0]
    ),
    "TranslateY": lambda images, magnitude: F.affine(
        images, 0.0, [0, int(magnitude)], 1.0, [0.0, 0.0]
    ),
    "Rotate": F.rotate,
    "Brightness": lambda images, magnitude: F.adjust_brightness(images, 1.0 + magnitude),
    "Color": lambda images, magnitude: F.adjust_saturation(images, 1.0 + magnitude),
    "Contrast": lambda images, magnitude: F.adjust_contrast(images, 1.0 + magnitude),
    "Sharpness": lambda images, magnitude: F.adjust_sharpness(images, 1.0 + magnitude),
    "Posterize": lambda images, magnitude: F.posterize(images, int(magnitude)),
    "Solarize": F.solarize,
    "AutoContrast": lambda images, magnitude: F.autocontrast(images),
    "Equalize": lambda images, magnitude: F.equalize(images),
    "Invert": lambda images, magnitude: F.invert(images),
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
            return operation, 255.0 * float(torch.linspace(1, 0, 10)[level])
        return operation, sign * float(torch.linspace(0, largest[operation], 10)[level])

    table = [[[variant(name, level, s) for s in (1, -1)] for name, _, level in p] for p in POLICY]
    variants = sorted({v for pair in table for signs in pair for v in signs})
    return variants, [[[variants.index(v) for v in signs] for signs in pair] for pair in table]
