"""Random resized crop and flip of images of any size, batched on the device.

:class:`PackedImages` holds images of different sizes without padding, one after the other. Crops
equal those of ``RandomResizedCrop`` and ``RandomHorizontalFlip`` of torchvision on uint8 tensors. A
GPU crops all images at once, with fixed shapes and without synchronisation, so that the step can be
compiled and captured. On a CPU torchvision crops one image after the other, which is faster there.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from isda.experiments.data.counter_rng import bits, fold, integers, uniform

__all__ = [
    "PackedImages",
    "RandomResizedCrop",
    "longest_side",
    "random_boxes",
    "resized_crop",
    "taps_for",
]

_AREA = (0.08, 1.0)  # share of the image
_RATIO = (3 / 4, 4 / 3)  # width / height
_ATTEMPTS = 10


class PackedImages(NamedTuple):
    """Images of different sizes in one tensor, row by row.

    Shape:
        pixels uint8 (P, 3), offset int64 (N,), size int64 (N, 2).
    """

    pixels: Tensor  # of all images
    offset: Tensor  # first pixel of each image
    size: Tensor  # height and width of each image

    def take(self, index: Tensor) -> "PackedImages":
        """Images at ``index``; their pixels are not copied."""
        return PackedImages(self.pixels, self.offset[index], self.size[index])

    def to(self, device: torch.device) -> "PackedImages":
        """The same images on another device."""
        return PackedImages(*(tensor.to(device) for tensor in self))


@dataclass(frozen=True)
class RandomResizedCrop:
    """Random crop of 8 to 100 % of an image, resized to a square and flipped in half of the cases.

    The counterpart of :class:`isda.experiments.data.augmentation.Augmentation` for images of
    different sizes.
    """

    image_size: int  # side S of the output
    taps: int  # see resized_crop
    interpolation: str = "bilinear"  # or bicubic

    def step(self, images: PackedImages, key: Tensor, *, start: int = 0) -> Tensor:
        """Crop a batch, or the part of a larger batch that begins at ``start``.

        Args:
            images: the batch, on the key's device.
            key: key of this run and step (see :mod:`isda.experiments.data.counter_rng`).
            start: index of the first image in the batch of all ranks.

        Shape:
            images of length N; output uint8 (N, 3, S, S).
        """
        boxes = random_boxes(images.size, fold(key, 0), start=start)
        flip = integers((len(images.size),), fold(key, 1), high=2, start=start) == 1
        if boxes.device.type == "cpu":
            return _resized_crop_one_by_one(
                images, boxes, flip, image_size=self.image_size, interpolation=self.interpolation
            )
        return resized_crop(
            images,
            boxes,
            flip,
            image_size=self.image_size,
            taps=self.taps,
            interpolation=self.interpolation,
        )


def random_boxes(size: Tensor, key: Tensor, *, start: int = 0) -> Tensor:
    """Boxes of ``torchvision.transforms.v2.RandomResizedCrop`` with its default settings.

    Ten attempts at a box of random area and aspect ratio; the first that fits counts. If there is
    none, the box is the largest central one with an aspect ratio from 3/4 to 4/3.

    Args:
        size: height and width of the images.
        key: key of the random numbers.
        start: index of the first image in the batch of all ranks.

    Shape:
        size (N, 2); output int64 (N, 4): top, left, height, width.
    """
    number = len(size)
    height, width = size.unbind(1)
    draws = uniform((number, _ATTEMPTS, 2), fold(key, 0), start=2 * _ATTEMPTS * start).double()
    area = (height * width)[:, None] * (_AREA[0] + (_AREA[1] - _AREA[0]) * draws[..., 0])
    low, high = math.log(_RATIO[0]), math.log(_RATIO[1])
    ratio = torch.exp(low + (high - low) * draws[..., 1])
    widths = (area * ratio).sqrt().round().long()  # (N, attempts)
    heights = (area / ratio).sqrt().round().long()
    fits = (widths > 0) & (widths <= width[:, None]) & (heights > 0) & (heights <= height[:, None])

    shape = width.double() / height.double()
    central_height = torch.where(
        shape < _RATIO[0], (width.double() / _RATIO[0]).round().long(), height
    )
    central_width = torch.where(
        shape > _RATIO[1], (height.double() * _RATIO[1]).round().long(), width
    )
    box_height, box_width, found = central_height, central_width, torch.zeros_like(fits[:, 0])
    for attempt in reversed(range(_ATTEMPTS)):
        box_height = torch.where(fits[:, attempt], heights[:, attempt], box_height)
        box_width = torch.where(fits[:, attempt], widths[:, attempt], box_width)
        found = found | fits[:, attempt]
    place = bits((number, 2), fold(key, 1), start=2 * start)
    room_below, room_beside = height - box_height, width - box_width
    top = torch.where(found, (place[:, 0] * (room_below + 1)) >> 32, room_below // 2)
    left = torch.where(found, (place[:, 1] * (room_beside + 1)) >> 32, room_beside // 2)
    return torch.stack((top, left, box_height, box_width), 1)


def resized_crop(
    images: PackedImages,
    boxes: Tensor,
    flip: Tensor,
    *,
    image_size: int,
    taps: int,
    interpolation: str = "bilinear",
) -> Tensor:
    """Cut a box out of every image, resize it to a square, and flip it where ``flip`` is true.

    Equivalent to ``torchvision.transforms.v2.functional.resized_crop(image, *box, [S, S],
    antialias=True)`` and ``horizontal_flip``, except that torchvision also rounds to integers after
    the first of its two passes: results differ by at most 1 of 255, with bicubic by at most 2.

    Args:
        images: images to crop.
        boxes: top, left, height and width, inside the images.
        flip: images to flip.
        image_size: side S of the output.
        taps: pixels of a row or column that contribute to an output pixel, at least
            ``taps_for(longest side of a box, image_size, interpolation)``.
        interpolation: ``bilinear`` or ``bicubic``.

    Shape:
        images of length N, boxes (N, 4), flip (N,) bool; output uint8 (N, 3, S, S), channels last.
    """
    top, left, height, width = boxes.unbind(1)
    place = torch.arange(image_size, device=boxes.device)[None]  # (1, S)
    columns = torch.where(flip[:, None], image_size - 1 - place, place)  # (N, S)
    rows, row_weights = _window(place, height, image_size, taps, interpolation)
    columns, column_weights = _window(columns, width, image_size, taps, interpolation)
    rows = (rows + top[:, None, None]) * images.size[:, 1, None, None] + images.offset[
        :, None, None
    ]
    columns = columns + left[:, None, None]
    total = torch.zeros((), device=boxes.device)
    for i in range(taps):
        part = torch.zeros((), device=boxes.device)
        for j in range(taps):
            pixels = images.pixels[rows[:, :, None, i] + columns[:, None, :, j]]  # (N, S, S, 3)
            part = part + pixels * column_weights[:, None, :, j, None]
        if interpolation == "bicubic":
            part = part.clamp(0, 255)  # negative weights
        total = total + part * row_weights[:, :, None, i, None]
    if interpolation == "bicubic":
        total = total.clamp(0, 255)
    return (total + 0.5).to(torch.uint8).permute(0, 3, 1, 2)


def taps_for(side: int, image_size: int, interpolation: str = "bilinear") -> int:
    """Number of pixels that contribute to an output pixel along a side of a box."""
    return math.ceil(2 * _RADIUS[interpolation] * max(1.0, side / image_size))


_RADIUS = {"bilinear": 1, "bicubic": 2}  # of the filters, in pixels


def longest_side(size: Tensor) -> int:
    """Longest side that a box of :func:`random_boxes` can have in images of these sizes."""
    short, long = size.min(1).values, size.max(1).values
    return int(torch.minimum(long, (short * _RATIO[1] + 2).long()).max())


def _resized_crop_one_by_one(
    images: PackedImages, boxes: Tensor, flip: Tensor, *, image_size: int, interpolation: str
) -> Tensor:
    """:func:`resized_crop` by torchvision, for a CPU."""
    from torchvision.transforms import InterpolationMode  # slow to import
    from torchvision.transforms.v2 import functional

    mode = InterpolationMode(interpolation)
    result = torch.empty(len(boxes), image_size, image_size, 3, dtype=torch.uint8)
    rows = torch.cat((images.offset[:, None], images.size, boxes, flip[:, None]), 1).tolist()
    for place, (offset, height, width, top, left, box_height, box_width, mirror) in enumerate(rows):
        image = images.pixels[offset : offset + height * width].view(height, width, 3)
        box = image[top : top + box_height, left : left + box_width].permute(2, 0, 1)
        crop = functional.resize(box, [image_size, image_size], mode, antialias=True)
        result[place] = (crop.flip(2) if mirror else crop).permute(1, 2, 0)
    return result.permute(0, 3, 1, 2)


def _window(
    place: Tensor, side: Tensor, image_size: int, taps: int, interpolation: str
) -> tuple[Tensor, Tensor]:
    """Positions in the box and weights of the pixels of an output place.

    Shape:
        place (1 or N, S), side (N,); outputs (N, S, taps).
    """
    scale = (side.float() / image_size)[:, None]  # (N, 1)
    support = scale.clamp(min=1)
    centre = scale * (place + 0.5)  # (N, S)
    first = (centre - _RADIUS[interpolation] * support + 0.5).clamp(min=0).floor()
    position = first[..., None] + torch.arange(taps, device=place.device)  # (N, S, taps)
    distance = ((position - centre[..., None] + 0.5) / support[..., None]).abs()
    weight = (1 - distance).clamp(min=0) if interpolation == "bilinear" else _cubic(distance)
    inside = position < side[:, None, None]
    weight = torch.where(inside, weight, 0.0)
    position = torch.minimum(position.long(), side[:, None, None] - 1)
    return position, weight / weight.sum(-1, keepdim=True)


def _cubic(x: Tensor) -> Tensor:
    """Cubic convolution filter with a = -½ (Keys, 1981), as in PIL, of distances >= 0."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
