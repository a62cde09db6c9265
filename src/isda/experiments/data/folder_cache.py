"""Images of a folder, decoded once and kept as bytes: on the GPU, in memory, or in a file.

Training images are stored with a shorter side of at most 256/224 of the side of the crops, test
images after resizing and centre-cropping. All places hold the same bytes, so that the
choice does not change the results.
"""

import os
import shutil
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from isda.experiments.data.arrays import draw, split
from isda.experiments.data.cache_file import CACHE_FOLDER, CacheFile
from isda.experiments.data.decoding import (
    ImageFiles,
    UnreadableFiles,
    decode_center_crop,
    decode_resized,
    image_bar,
    stored_sizes,
    unreadable,
)
from isda.experiments.data.folders import FolderImages
from isda.experiments.data.resized_crop import PackedImages
from isda.experiments.errors import InputError, one_line

__all__ = ["DecodedImages", "center_crops", "decode_folder"]

_CHUNK = 2**26  # bytes that are decoded before they are stored
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


@dataclass(frozen=True, eq=False)
class DecodedImages:
    """Images of a folder, ready to be cropped."""

    name: str
    train_images: PackedImages | ImageFiles  # on the device, on the CPU, or in their files
    train_target: Tensor  # int64 (N,), on the device
    test_images: Tensor | ImageFiles  # uint8 (N, 3, S, S)
    test_target: Tensor
    class_names: tuple[str, ...]
    image_size: int  # side S of the crops, in pixels
    place: str  # where the images are, and how many bytes they take
    digest: str  # of the files, see FolderImages.digest
    interpolation: str = "bilinear"  # or bicubic
    mean: tuple[float, ...] = _MEAN
    std: tuple[float, ...] = _STD

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return len(self.class_names)

    @property
    def image_shape(self) -> torch.Size:
        """Shape (C, H, W) of a crop."""
        return torch.Size((3, self.image_size, self.image_size))

    def hold_out(self, number: int, files: FolderImages) -> "DecodedImages":
        """The split of ``files.hold_out(number)``; decodes only the images that are held out.

        Args:
            number: number of training images to hold out.
            files: the files of all images.
        """
        kept, held = split(files.train_target, number)
        crops: Tensor | ImageFiles = center_crops(
            files, tuple(files.train_files[i] for i in held.tolist())
        )
        if isinstance(self.train_images, PackedImages):
            crops = crops[:].to(self.train_images.pixels.device)
        held = held.to(self.train_target.device)
        return replace(self._keep(kept), test_images=crops, test_target=self.train_target[held])

    def draw(self, images_per_class: int, *, seed: int) -> "DecodedImages":
        """Random training images, the same number of each class; see ``ImageArrays.draw``."""
        classes, name = self.num_classes, self.name
        kept, _ = draw(self.train_target, classes, images_per_class, seed=seed, name=name)
        return self._keep(kept)

    def _keep(self, kept: Tensor) -> "DecodedImages":
        """Some of the training images; those in memory are not copied."""
        images = self.train_images
        if isinstance(images, ImageFiles):
            chosen = tuple(images.files[i] for i in kept.tolist())
            images = replace(images, files=chosen, size=images.size[kept.cpu()])
        else:
            images = images.take(kept.to(images.size.device))
        target = self.train_target[kept.to(self.train_target.device)]
        return replace(self, train_images=images, train_target=target)


def decode_folder(
    data: FolderImages, *, cache: str = "auto", device: torch.device, check: bool = True
) -> DecodedImages:
    """Decode the images of a folder, unless a file holds them already.

    Args:
        data: image files.
        cache: where to keep the images: ``device``, ``memory``, ``disk``, ``off`` (nowhere: they
            are decoded in every epoch), or ``auto``, the first of these that has room for twice as
            many bytes.
        device: device of the training.
        check: if the images are kept nowhere, decode each of them once to find unreadable files.

    Raises:
        UnreadableFiles: some files cannot be decoded.
    """
    file = CacheFile.of(data) if cache in ("auto", "disk") else None
    stored = None if file is None else file.read()
    size = _sizes(data) if stored is None else stored[0]
    train_bytes = 3 * int(size.prod(1).sum())
    total = train_bytes + len(data.test_files) * 3 * data.image_size**2
    place = _choose(cache, total, device, data.path, on_disk=stored is not None)
    with_settings = partial(
        DecodedImages,
        name=data.name,
        train_target=data.train_target.to(device),
        test_target=data.test_target.to(device),
        class_names=data.class_names,
        image_size=data.image_size,
        place=f"{_gibibytes(total)} {_PLACES[place]}",
        digest=data.digest(),
        interpolation=data.interpolation,
    )
    if place == "off":
        _require_readable(data, check=check)
        return with_settings(
            train_images=_files(data, size), test_images=center_crops(data, data.test_files)
        )
    if stored is not None:
        content = stored[1].to(device) if place == "device" else stored[1]
    elif file is not None and place == "disk":
        content = file.write(size, _decode(data, size))
    else:
        content = torch.empty(
            total, dtype=torch.uint8, device=device if place == "device" else "cpu"
        )
        filled = 0
        for part in _decode(data, size):
            content[filled : filled + len(part)].copy_(part)
            filled += len(part)
    area = size.prod(1)
    pixels = content[:train_bytes].view(-1, 3)
    side = data.image_size
    return with_settings(
        train_images=PackedImages(
            pixels, (area.cumsum(0) - area).to(pixels.device), size.to(pixels.device)
        ),
        test_images=content[train_bytes:].view(-1, side, side, 3).permute(0, 3, 1, 2),
    )


_PLACES = {
    "device": "on the device",
    "memory": "in memory",
    "disk": "on disk",
    "off": "decoded in every epoch",
}


def _choose(cache: str, total: int, device: torch.device, path: Path, *, on_disk: bool) -> str:
    """Where to keep ``total`` bytes; an explicit choice must have room for them once."""
    room = {"device": _free_memory(device), "memory": _free_memory(torch.device("cpu"))}
    room["disk"] = 2 * total if on_disk else _free_disk(path)
    if cache == "auto":
        on_cpu = device.type == "cpu"
        places = ["memory", "disk"] if on_cpu else ["device", "memory", "disk"]
        if on_disk:
            places.remove("memory")  # the system keeps what is used of the file in memory
        return next((place for place in places if 2 * total <= room[place]), "off")
    if cache == "disk" and not on_disk and not _is_writable(path):
        raise InputError(
            f"cache must not be disk, because {one_line(path)} is read-only: use --cache auto"
        )
    if cache != "off" and total > room[cache]:
        raise InputError(
            f"cache must be a place with room for {_gibibytes(total)} of images, got {cache} with "
            f"{_gibibytes(room[cache])} free: use --cache auto"
        )
    return cache


def _sizes(data: FolderImages) -> Tensor:
    """Height and width of the stored training images (N, 2)."""
    found = stored_sizes(data.train_files, image_size=data.image_size, threads=data.workers)
    if None in found:
        _require_readable(data)
        raise InputError(f"images under {data.path} changed while they were read: try again")
    return torch.tensor(found, dtype=torch.int64).view(-1, 2)


def _require_readable(data: FolderImages, *, check: bool = True) -> None:
    files = (*data.train_files, *data.test_files)
    bad = unreadable(files, threads=data.workers) if check else {}
    if bad:
        raise UnreadableFiles(bad, len(files))


def _files(data: FolderImages, size: Tensor) -> ImageFiles:
    decode = partial(decode_resized, image_size=data.image_size, interpolation=data.interpolation)
    return ImageFiles(data.train_files, size, decode, data.workers)


def center_crops(data: FolderImages, files: tuple[str, ...]) -> ImageFiles:
    """Files of a folder as used for testing, resized and centre-cropped."""
    size = torch.full((len(files), 2), data.image_size)
    decode = partial(
        decode_center_crop,
        image_size=data.image_size,
        interpolation=data.interpolation,
        test_crop=data.test_crop,
    )
    return ImageFiles(files, size, decode, data.workers)


def _decode(data: FolderImages, size: Tensor) -> Generator[Tensor, None, None]:
    """Bytes of all training and test images, decoded, in order and in parts.

    Raises:
        UnreadableFiles: some files cannot be decoded; after all of them have been tried.
    """
    bad: dict[str, str] = {}
    total = len(data.train_files) + len(data.test_files)
    label = f"decoding {data.name}"
    with image_bar(label, total) as bar:
        for images in (_files(data, size), center_crops(data, data.test_files)):
            for numbers in _chunks(images.size):
                pixels = torch.empty(int(images.size[numbers].prod(1).sum()), 3, dtype=torch.uint8)
                reasons = images.try_to_read(numbers, pixels)
                for number, reason in zip(numbers, reasons, strict=True):
                    bar.update()
                    if reason:
                        bad[images.files[number]] = reason
                if not bad:
                    yield pixels.view(-1)
    if bad:
        raise UnreadableFiles(bad, total)


def _chunks(size: Tensor) -> Iterator[range]:
    """Consecutive images of about ``_CHUNK`` bytes."""
    chunk = (3 * size.prod(1).cumsum(0)) // _CHUNK
    start = 0
    for count in torch.unique_consecutive(chunk, return_counts=True)[1].tolist():
        yield range(start, start + count)
        start += count


def _free_memory(device: torch.device) -> int:
    """Bytes of free memory; on the host, within the limits of this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    pages = os.sysconf("SC_AVPHYS_PAGES")
    free = pages * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
    return min([free, *_memory_limits()]) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _memory_limits() -> Iterator[int]:
    """Limits in bytes of the control groups of this process, such as a container or a job."""
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, group = line.split(":", 2)
        if controllers == "":  # version 2
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        path = root / group.lstrip("/")
        for folder in (path, *path.parents):  # in a container the group is the root itself
            yield from (int(limit) for limit in _lines(folder / name) if limit.isdecimal())


def _free_disk(path: Path) -> int:
    """Bytes that can be written beside the images; 0 in a folder that is read-only."""
    return shutil.disk_usage(path).free if _is_writable(path) else 0


def _is_writable(path: Path) -> bool:
    own = path / CACHE_FOLDER  # perhaps of another user
    return os.access(own if own.is_dir() else path, os.W_OK)


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text().splitlines()
    except OSError:
        return


def _gibibytes(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
