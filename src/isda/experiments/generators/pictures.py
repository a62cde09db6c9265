"""Grids of images as PNG files."""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from isda.experiments.files import write_bytes

__all__ = ["write_grid"]

_SIDE = 64  # pixels that a small image is enlarged to
_GAP = 2


def write_grid(path: Path, images: Tensor, *, rules: tuple[int, ...] = ()) -> None:
    """Write rows of images as one PNG file; small images are enlarged.

    Args:
        path: file to write.
        images: uint8 images.
        rules: columns before which a wider gap is left.

    Shape:
        images (rows, columns, channels, height, width).
    """
    rows, columns, channels, height, width = images.shape
    factor = max(1, _SIDE // max(height, width))
    large = images.cpu().repeat_interleave(factor, 3).repeat_interleave(factor, 4)
    height, width = height * factor, width * factor
    place = [c * (width + _GAP) + 4 * _GAP * sum(c >= rule for rule in rules)
             for c in range(columns)]  # fmt: skip
    canvas = torch.full(
        (rows * (height + _GAP) - _GAP, place[-1] + width, channels), 255, dtype=torch.uint8
    )
    for row in range(rows):
        for column, left in enumerate(place):
            top = row * (height + _GAP)
            canvas[top : top + height, left : left + width] = large[row, column].permute(1, 2, 0)
    pixels: np.ndarray = canvas.numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(buffer, "PNG", optimize=True)
    write_bytes(path, buffer.getvalue())
