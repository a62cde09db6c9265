"""Grids of images as PNG files."""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from isda.experiments.files import write_bytes

__all__ = ["write_grid"]

_SIDE, _LARGEST = 64, 128  # pixels that small images are enlarged to, and large ones reduced to
_GAP = 2


def write_grid(path: Path, images: Tensor, *, rules: tuple[int, ...] = ()) -> None:
    """Write rows of images as one PNG file; small images are enlarged, large ones reduced.

    Args:
        path: file to write.
        images: uint8 images.
        rules: columns before which a wider gap is left.

    Shape:
        images (rows, columns, channels, height, width).
    """
    rows, columns, channels, height, width = images.shape
    factor = max(1, _SIDE // max(height, width))
    shown = images.cpu().repeat_interleave(factor, 3).repeat_interleave(factor, 4)
    if max(height, width) > _LARGEST:
        smaller = _LARGEST / max(height, width)
        flat = interpolate(
            shown.flatten(0, 1), scale_factor=smaller, mode="bilinear", antialias=True
        )
        shown = flat.unflatten(0, (rows, columns))
    height, width = shown.shape[3:]
    place = [c * (width + _GAP) + 4 * _GAP * sum(c >= rule for rule in rules)
             for c in range(columns)]  # fmt: skip
    canvas = torch.full(
        (rows * (height + _GAP) - _GAP, place[-1] + width, channels), 255, dtype=torch.uint8
    )
    for row in range(rows):
        for column, left in enumerate(place):
            top = row * (height + _GAP)
            canvas[top : top + height, left : left + width] = shown[row, column].permute(1, 2, 0)
    pixels: np.ndarray = canvas.numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(buffer, "PNG", optimize=True)
    write_bytes(path, buffer.getvalue())
