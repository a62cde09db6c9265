"""Decoding of image files in threads, to the sizes that crops need.

JPEG files are decoded by torchvision, others by PIL. Both release the GIL while they decode,
and both give the same pixels of a JPEG. Photos are turned upright, as their EXIF data says.
"""

import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor
from tqdm import tqdm

from isda.experiments.errors import InputError, few, one_line, reason

__all__ = [
    "ImageFiles",
    "UnreadableFiles",
    "decode_center_crop",
    "decode_image",
    "decode_resized",
    "image_bar",
    "in_threads",
    "resize_side",
    "stored_sizes",
    "unreadable",
]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_LARGEST_RATIO = 100  # of the sides of an image
_CHUNK = 8192  # items that wait for a thread


class UnreadableFiles(InputError):
    """Files that cannot be decoded, with the reason for each."""

    def __init__(self, reasons: dict[str, str], total: int) -> None:
        super().__init__(reasons, total)  # as pickle needs them, for errors of other processes
        self.reasons, self.total = reasons, total

    def __str__(self) -> str:
        shown = [f"{file} ({reason})" for file, reason in self.reasons.items()]
        return (
            f"{len(shown)} of {self.total} images cannot be decoded (use --skip-unreadable to skip "
            f"them): {few(shown)}"
        )


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Images that are decoded every time they are used."""

    files: tuple[str, ...]
    size: Tensor  # int64 (N, 2): height and width after decoding
    decode: Callable[[str], Tensor]  # uint8 (H, W, 3) of a file
    threads: int  # 0: decode in the calling thread

    def __post_init__(self) -> None:
        # slow, but threads that import different parts of torchvision at once get ImportErrors
        import_module("torchvision.transforms.v2")

    def __getitem__(self, part: slice) -> Tensor:
        """Images of equal size, uint8 (N, 3, H, W)."""
        height, width = self.size[0].tolist()
        numbers = range(len(self.files))[part]
        pixels = torch.empty(len(numbers) * height * width, 3, dtype=torch.uint8)
        for number, problem in zip(numbers, self.try_to_read(numbers, pixels), strict=True):
            self._require_read(number, problem)
        return pixels.view(-1, height, width, 3).permute(0, 3, 1, 2)

    def read(self, number: int, pixels: Tensor) -> None:
        """Decode an image into ``pixels`` (H · W, 3)."""
        self._require_read(number, self._try_to_read(number, pixels))

    def try_to_read(self, numbers: range, pixels: Tensor) -> Iterator[str]:
        """Decode images into ``pixels``, one behind the other.

        Yields why each image cannot be decoded; "" if it can.
        """
        parts = pixels.split(self.size[numbers].prod(1).tolist())
        tasks = [*zip(numbers, parts, strict=True)]
        return in_threads(lambda task: self._try_to_read(*task), tasks, threads=self.threads)

    def _try_to_read(self, number: int, pixels: Tensor) -> str:
        try:
            image = self.decode(self.files[number])
        except Exception as error:  # decoders raise all kinds of errors
            return _reason(error)
        if list(image.shape[:2]) != self.size[number].tolist():
            return "the size of the image has changed"
        # not by torch, which would start threads of its own in every thread
        np.copyto(pixels.numpy().reshape(image.shape), image.numpy())
        return ""

    def _require_read(self, number: int, problem: str) -> None:
        if problem:
            raise InputError(f"{one_line(self.files[number])} cannot be read: {problem}")


def decode_image(file: str) -> Tensor:
    """Pixels of a file in 8-bit RGB; of an animated image, the first frame.

    Shape:
        output uint8 (H, W, 3).
    """
    with open(file, "rb") as opened:
        content = opened.read()
    image = _decode_jpeg(content) if content.startswith(b"\xff\xd8") else None
    orientation = 1
    if image is None or b"Exif\0\0" in content:  # otherwise spare PIL
        with Image.open(io.BytesIO(content)) as picture:
            orientation = _orientation(picture)
            if image is None:
                image = torch.from_numpy(np.array(_to_rgb(picture)))
    _require_ratio(*image.shape[:2])
    return _upright(image, orientation)


def resize_side(image_size: int) -> int:
    """Shorter side of a resized image, 256 pixels for crops of 224."""
    return round(image_size * 256 / 224)


def decode_resized(file: str, *, image_size: int, interpolation: str = "bilinear") -> Tensor:
    """Decode a training image and resize it, unless it is smaller, to ``resize_side``.

    Shape:
        output uint8 (H, W, 3).
    """
    image = decode_image(file)
    side = resize_side(image_size)
    return image if min(image.shape[:2]) <= side else _resize(image, side, interpolation)


def decode_center_crop(
    file: str, *, image_size: int, interpolation: str = "bilinear", test_crop: float = 0.875
) -> Tensor:
    """Decode a test image: ``Resize(image_size / test_crop)`` and ``CenterCrop(image_size)``.

    Shape:
        output uint8 (image_size, image_size, 3).
    """
    from torchvision.transforms.v2 import functional  # slow to import

    side = round(image_size / test_crop)
    image = _resize(decode_image(file), side, interpolation).permute(2, 0, 1)
    return functional.center_crop(image, [image_size, image_size]).permute(1, 2, 0)


def stored_sizes(
    files: Sequence[str], *, image_size: int, threads: int
) -> list[tuple[int, int] | None]:
    """Height and width of each file after :func:`decode_resized`, from the headers of the files.

    None takes the place of the size of a file that is not an image.
    """
    side = resize_side(image_size)

    def size(file: str) -> tuple[int, int] | None:
        try:
            with Image.open(file) as image:
                width, height = image.size
                if _orientation(image) in _TRANSPOSED:
                    width, height = height, width
            _require_ratio(height, width)
        except Exception:  # decoders raise all kinds of errors
            return None
        short = min(height, width)
        if short <= side:
            return height, width
        return _resized(height, side, short), _resized(width, side, short)

    return list(in_threads(size, files, threads=threads))


def unreadable(files: Sequence[str], *, threads: int) -> dict[str, str]:
    """Files that cannot be decoded, with the reasons."""

    def reason(file: str) -> str:
        try:
            with Image.open(file) as image:
                _require_ratio(*image.size)
                image.draft("RGB", (1, 1))  # decode a JPEG at 1/8 size: reads the whole file
                image.load()
                if image.mode[0] in "IF":  # only some decoders return these
                    _to_rgb(image)
        except Exception as error:  # decoders raise all kinds of errors
            return _reason(error)
        return ""

    reasons = in_threads(reason, files, threads=threads)
    return {file: reason for file, reason in zip(files, reasons, strict=True) if reason}


def image_bar(label: str, total: int) -> Any:
    """Progress bar of images on the first rank, which is not shown for a few images."""
    other = int(os.environ.get("RANK", 0)) > 0
    return tqdm(desc=label, total=total, unit="image", delay=1, disable=other)


def in_threads(
    function: Callable[[_Item], _Result], items: Sequence[_Item], *, threads: int
) -> Iterator[_Result]:
    """Results in the order of the items; without threads they are computed one by one.

    A thread takes several items at a time: handing over one costs as much as decoding a small
    image.
    """
    if threads < 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(items), _CHUNK):
            chunk = items[start : start + _CHUNK]
            size = min(16, math.ceil(len(chunk) / (4 * threads)))
            tasks = [chunk[first : first + size] for first in range(0, len(chunk), size)]
            for results in pool.map(lambda task: [function(item) for item in task], tasks):
                yield from results


def _decode_jpeg(content: bytes) -> Tensor | None:
    """Pixels of a JPEG file; None: leave it to PIL."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg  # slow to import
    except ImportError:  # announced for a later version of torchvision
        return None
    try:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return decode_jpeg(data, mode=ImageReadMode.RGB).permute(1, 2, 0)
    except RuntimeError:  # PIL says in fewer words what is wrong
        return None


def _resize(image: Tensor, side: int, interpolation: str) -> Tensor:
    """Resize an image (H, W, 3) so that its shorter side is ``side``."""
    from torchvision.transforms import InterpolationMode  # slow to import
    from torchvision.transforms.v2 import functional

    mode = InterpolationMode(interpolation)
    resized = functional.resize(image.permute(2, 0, 1), [side], mode, antialias=True)
    return resized.permute(1, 2, 0)


def _resized(length: int, side: int, short: int) -> int:
    return side if length == short else int(side * length / short)


def _orientation(image: Image.Image) -> int:
    """Orientation from the EXIF data in the header of a file; 1: the image is upright."""
    if image.format == "TIFF" or "exif" not in image.info:  # PIL itself turns TIFF images
        return 1
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged EXIF data are ignored
        return 1


_TRANSPOSED = (5, 6, 7, 8)  # orientations whose rows are columns of the file
_FLIPS = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}  # axes, after transposing


def _upright(image: Tensor, orientation: int) -> Tensor:
    """Undo the orientation of an image (H, W, 3)."""
    if orientation not in range(2, 9):
        return image
    pixels = image.numpy()
    if orientation in _TRANSPOSED:
        pixels = pixels.swapaxes(0, 1)
    return torch.from_numpy(np.flip(pixels, _FLIPS.get(orientation, ())).copy())


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB; 16-bit images keep their upper 8 bits, where PIL would clip."""
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError("more than 16 bits per pixel: convert it to 8 bits first")
        if 0 < values.max() < 256:
            raise ValueError("16-bit image whose values fit in 8 bits: convert it to 8 bits first")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point image: convert it to 8 bits first")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # PIL warns without this step
    return image.convert("RGB")


def _require_ratio(one: int, other: int) -> None:
    if max(one, other) > _LARGEST_RATIO * min(one, other):
        raise ValueError(f"one side is more than {_LARGEST_RATIO} times as long as the other")


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image that PIL can read"
    return one_line(reason(error))
