"""Augmentation of CIFAR (Section 4.1): crop, flip, AutoAugment and Cutout, batched on the device.

Input and output are uint8 images (N, C, H, W). The functions are pure and take the random values as
arguments. :class:`Augmentation` draws them from a key; those for image i depend only on key and i.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from isda.experiments.data.counter_rng import fold, integers
from isda.experiments.errors import InputError, unknown
from isda.experiments.settings import AUGMENTATIONS

__all__ = [
    "Augmentation",
    "create_augmentation",
    "crop_and_flip",
    "cutout",
    "random_crop",
    "random_flip",
]


def random_crop(images: Tensor, offsets: Tensor, *, padding: int = 4) -> Tensor:
    """Pad every image by reflection and crop it back to its size at its own offset.

    Equivalent to ``F.pad(image, [padding] * 4, mode="reflect")[:, y : y + H, x : x + W]`` for each
    image and its offset (y, x), but with index arithmetic and one gather.

    Args:
        images: images of any type.
        offsets: row and column in the padded image, in ``[0, 2 * padding]``.
        padding: pixels added on each side; must be smaller than the image.

    Shape:
        images (N, C, H, W), offsets (N, 2); output (N, C, H, W).
    """
    rows, columns = _positions(images)
    rows, columns = _shift(images, rows, columns, offsets, padding)
    return _gather(images, rows, columns)


def random_flip(images: Tensor, flip: Tensor) -> Tensor:
    """Flip images horizontally where ``flip`` is true.

    Shape:
        images (N, C, H, W), flip (N,) bool; output (N, C, H, W).
    """
    rows, columns = _positions(images)
    return _gather(images, rows, _mirror(columns, flip))


def crop_and_flip(images: Tensor, offsets: Tensor, flip: Tensor, *, padding: int = 4) -> Tensor:
    """``random_flip(random_crop(images, offsets, padding=padding), flip)`` in one gather."""
    rows, columns = _positions(images)
    rows, columns = _shift(images, rows, _mirror(columns, flip), offsets, padding)
    return _gather(images, rows, columns)


def cutout(images: Tensor, centre: Tensor, *, size: int = 16) -> Tensor:
    """Set one square of every image to zero, clipped at the border (DeVries and Taylor, 2017).

    Args:
        images: images before normalisation.
        centre: row and column of the pixel to the lower right of the centre of the square.
        size: side of the square.

    Shape:
        images (N, C, H, W), centre (N, 2); output (N, C, H, W).
    """
    rows, columns = _positions(images)
    first = centre - size // 2  # (N, 2)
    in_rows = (rows >= first[:, :1]) & (rows < first[:, :1] + size)  # (N, H)
    in_columns = (columns >= first[:, 1:]) & (columns < first[:, 1:] + size)  # (N, W)
    return images.masked_fill((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0)


@dataclass(frozen=True)
class Augmentation:
    """Random augmentation in two parts: one for every step, one for every epoch.

    A loop over a data set on the device reads

        images = train_images if augment.epoch is None else augment.epoch(train_images, epoch_key)
        batch = augment.step(images[indices], step_key)  # in every step

    ``step`` does not synchronise and has fixed shapes, so it can be compiled and captured in a CUDA
    graph. With AutoAugment, where every image has its own operations, ``epoch`` crops, flips and
    augments the whole data set, and ``step`` does the rest (Cutout). Otherwise ``epoch`` is None.
    """

    names: tuple[str, ...]  # names of AUGMENTATIONS, in that order
    padding: int = 4  # padding of the crop in pixels
    hole: int = 16  # side of Cutout's square in pixels

    @property
    def epoch(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Function of (all images, key), or None if ``step`` does everything."""
        return self._autoaugment if "autoaugment" in self.names else None

    def step(self, images: Tensor, key: Tensor, *, start: int = 0) -> Tensor:
        """Augment a batch, or the part of a larger batch that begins at ``start``.

        Args:
            images: batch of uint8 images, on the key's device.
            key: key of this run and step (see :mod:`isda.experiments.data.counter_rng`).
            start: index of the first image in the batch of all ranks.

        Shape:
            images (N, C, H, W); output (N, C, H, W).
        """
        if self.epoch is None:
            images = self._crop_and_flip(images, key, start)
        if "cutout" in self.names:
            height, width = images.shape[-2:]
            centre = _pairs(len(images), fold(key, 2), high=(height, width), start=start)
            images = cutout(images, centre, size=self.hole)
        return images

    def _autoaugment(self, images: Tensor, key: Tensor) -> Tensor:
        from isda.experiments.data.autoaugment import (
            autoaugment,  # imports torchvision: only if used
        )

        return autoaugment(self._crop_and_flip(images, key, 0), fold(key, 3))

    def _crop_and_flip(self, images: Tensor, key: Tensor, start: int) -> Tensor:
        number, places = len(images), 2 * self.padding + 1
        offsets = _pairs(number, fold(key, 0), high=(places, places), start=start)
        flip = integers((number,), fold(key, 1), high=2, start=start) == 1
        if "crop" in self.names and "flip" in self.names:
            return crop_and_flip(images, offsets, flip, padding=self.padding)
        if "crop" in self.names:
            return random_crop(images, offsets, padding=self.padding)
        return random_flip(images, flip) if "flip" in self.names else images


def create_augmentation(names: Iterable[str], *, padding: int = 4, hole: int = 16) -> Augmentation:
    """Augmentation from names; the order is always that of ``AUGMENTATIONS``.

    Args:
        names: operations to apply; without any, images do not change.
        padding: maximum shift of the crop in pixels.
        hole: side of Cutout's square in pixels.
    """
    names = tuple(names)
    for name in names:
        if name not in AUGMENTATIONS:
            raise unknown("augmentation", name, AUGMENTATIONS)
    if padding < 0:
        raise InputError(f"padding must be >= 0, got {padding}")
    if hole < 1:
        raise InputError(f"hole must be >= 1, got {hole}")
    return Augmentation(tuple(name for name in AUGMENTATIONS if name in names), padding, hole)


def _positions(images: Tensor) -> tuple[Tensor, Tensor]:
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device)[None]  # (1, H)
    return rows, torch.arange(width, device=images.device)[None]  # (1, W)


def _mirror(columns: Tensor, flip: Tensor) -> Tensor:
    return torch.where(flip[:, None], columns.shape[1] - 1 - columns, columns)  # (N, W)


def _shift(
    images: Tensor, rows: Tensor, columns: Tensor, offsets: Tensor, padding: int
) -> tuple[Tensor, Tensor]:
    height, width = images.shape[-2:]
    if padding >= min(height, width):
        raise InputError(
            f"padding must be smaller than the image, got {padding} for {height} x {width} pixels"
        )
    shift = offsets - padding  # (N, 2)
    return _reflect(rows + shift[:, :1], height), _reflect(columns + shift[:, 1:], width)


def _reflect(position: Tensor, size: int) -> Tensor:
    last = size - 1
    return last - (last - position.abs()).abs()


def _gather(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    number, channels = images.shape[:2]
    image = torch.arange(number, device=images.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=images.device).view(1, -1, 1, 1)
    return images[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _pairs(number: int, key: Tensor, *, high: tuple[int, int], start: int) -> Tensor:
    first = integers((number,), fold(key, 0), high=high[0], start=start)
    return torch.stack((first, integers((number,), fold(key, 1), high=high[1], start=start)), 1)
