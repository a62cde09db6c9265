"""Augmentation of CIFAR (Section 4.1): crop, flip, AutoAugment and Cutout, batched on the device.

Input and output are uint8 images (N, C, H, W). The functions are pure and take the random values as
arguments. :class:`Augmentation` draws them from a key; those for image i depend only on key and i.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from isda.experiments.data.counter_rng import fold, integers
from isda.experiments.errors import InputError

__all__ = ["Augmentation", "crop_and_flip", "cutout"]

_PADDING = 4  # pixels


def crop_and_flip(
    images: Tensor, offsets: Tensor | None, flip: Tensor | None, *, padding: int = _PADDING
) -> Tensor:
    """Pad every image by reflection, crop it back to its size at its own offset, and flip it.

    Equivalent to ``F.pad(image, [padding] * 4, mode="reflect")[:, y : y + H, x : x + W]`` for each
    image and its offset (y, x), and to ``image.flip(-1)`` afterwards where ``flip`` is true, but
    with index arithmetic and one gather.

    Args:
        images: images of any type.
        offsets: row and column in the padded image, in ``[0, 2 * padding]``; None: no crop.
        flip: images to flip horizontally; None: no flip.
        padding: pixels added on each side; must be smaller than the image.

    Shape:
        images (N, C, H, W), offsets (N, 2), flip (N,) bool; output (N, C, H, W).
    """
    number, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device)[None]  # (1 or N, H)
    columns = torch.arange(width, device=images.device)[None]  # (1 or N, W)
    if flip is not None:
        columns = torch.where(flip[:, None], width - 1 - columns, columns)
    if offsets is not None:
        if padding >= min(height, width):
            raise InputError(
                f"padding must be smaller than the image, got {padding} for {height} x {width} "
                "pixels"
            )
        shift = offsets - padding
        rows = _reflect(rows + shift[:, :1], height)
        columns = _reflect(columns + shift[:, 1:], width)
    image = torch.arange(number, device=images.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=images.device).view(1, -1, 1, 1)
    return images[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def cutout(images: Tensor, centre: Tensor, *, size: int = 16) -> Tensor:
    """Set one square of every image to zero, clipped at the border (DeVries and Taylor, 2017).

    Args:
        images: images before normalisation.
        centre: row and column of the pixel to the lower right of the centre of the square.
        size: side of the square.

    Shape:
        images (N, C, H, W), centre (N, 2); output (N, C, H, W).
    """
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device)  # (H,)
    columns = torch.arange(width, device=images.device)  # (W,)
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

    names: tuple[str, ...]  # of AUGMENTATIONS, in whose order they are applied

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
            images = cutout(images, centre)
        return images

    def _autoaugment(self, images: Tensor, key: Tensor) -> Tensor:
        from isda.experiments.data.autoaugment import autoaugment  # imports torchvision

        return autoaugment(self._crop_and_flip(images, key, 0), fold(key, 3))

    def _crop_and_flip(self, images: Tensor, key: Tensor, start: int) -> Tensor:
        if not {"crop", "flip"} & {*self.names}:
            return images
        offsets = flip = None
        if "crop" in self.names:
            places = 2 * _PADDING + 1
            offsets = _pairs(len(images), fold(key, 0), high=(places, places), start=start)
        if "flip" in self.names:
            flip = integers((len(images),), fold(key, 1), high=2, start=start) == 1
        return crop_and_flip(images, offsets, flip)


def _reflect(position: Tensor, size: int) -> Tensor:
    last = size - 1
    return last - (last - position.abs()).abs()


def _pairs(number: int, key: Tensor, *, high: tuple[int, int], start: int) -> Tensor:
    first = integers((number,), fold(key, 0), high=high[0], start=start)
    return torch.stack((first, integers((number,), fold(key, 1), high=high[1], start=start)), 1)
