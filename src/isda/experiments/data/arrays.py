"""Data sets (Section 4.1): digits and CIFAR as arrays on the device, or folders of images."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from isda.experiments.data import counter_rng
from isda.experiments.errors import InputError, reason, unknown

if TYPE_CHECKING:
    from isda.experiments.data.folders import FolderImages  # which imports this module

__all__ = [
    "DATA",
    "ImageArrays",
    "by_class",
    "draw",
    "load_data",
    "normalize",
    "rank_slice",
    "split",
]

DATA = ("digits", "cifar10", "cifar100", "imagenet", "imagefolder:PATH")

CIFAR_MEAN = (125.3 / 255, 123.0 / 255, 113.9 / 255)
CIFAR_STD = (63.0 / 255, 62.1 / 255, 66.7 / 255)
_CIFAR_CLASSES = {
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck",
    "cifar100": """
        apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
        butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
        crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house
        kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
        mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
        plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
        shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table
        tank telephone television tiger tractor train trout tulip turtle wardrobe whale
        willow_tree wolf woman worm
    """,
}


@dataclass(frozen=True, eq=False)
class ImageArrays:
    """A data set that is completely in the memory of one device."""

    name: str
    train_images: Tensor  # uint8 (N, C, H, W)
    train_target: Tensor  # int64 (N,)
    test_images: Tensor
    test_target: Tensor
    mean: tuple[float, ...]  # per channel, of images scaled to [0, 1]
    std: tuple[float, ...]
    class_names: tuple[str, ...]
    digest: str = ""  # of the image files, if it was made from a folder

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return len(self.class_names)

    @property
    def image_shape(self) -> torch.Size:
        """Shape (C, H, W) of an image."""
        return self.train_images.shape[1:]

    def to(self, device: torch.device | str) -> "ImageArrays":
        """Copy of the data set on another device."""
        return replace(
            self,
            train_images=self.train_images.to(device),
            train_target=self.train_target.to(device),
            test_images=self.test_images.to(device),
            test_target=self.test_target.to(device),
        )

    def hold_out(self, number: int) -> "ImageArrays":
        """Validation split: hold out ``number`` training images and use them as test images.

        The split is stratified by class, and the same in all runs.
        """
        device = self.train_target.device
        kept, held = (part.to(device) for part in split(self.train_target, number))
        return replace(
            self,
            train_images=self.train_images[kept],
            train_target=self.train_target[kept],
            test_images=self.train_images[held],
            test_target=self.train_target[held],
        )

    def draw(self, images_per_class: int, *, seed: int, test_on_rest: bool) -> "ImageArrays":
        """Random training images, the same number of each class; they depend only on ``seed``.

        Args:
            images_per_class: number of training images of each class.
            seed: seed of the draw.
            test_on_rest: draw from all images, and use all others as test images; otherwise draw
                from the training images and keep the test images.
        """
        images, target = self.train_images, self.train_target
        if test_on_rest:
            images = torch.cat((images, self.test_images))
            target = torch.cat((target, self.test_target))
        classes, name = self.num_classes, self.name
        kept, rest = draw(
            target, classes, images_per_class, seed=seed, leave_one=test_on_rest, name=name
        )
        return replace(
            self,
            train_images=images[kept],
            train_target=target[kept],
            test_images=images[rest] if test_on_rest else self.test_images,
            test_target=target[rest] if test_on_rest else self.test_target,
        )


def load_data(
    spec: str,
    *,
    root: str | Path | None = None,
    download: bool = False,
    skip: Collection[str] = (),
    image_size: int = 224,
    workers: int | None = None,
    interpolation: str = "bilinear",
    test_crop: float = 0.875,
) -> "ImageArrays | FolderImages":
    """Load a data set by name.

    - ``digits`` comes with scikit-learn; one image in five is used for testing.
    - ``cifar10`` and ``cifar100`` are read from ``root/cifar100.npz`` (``train_images`` of shape
      (N, 32, 32, 3), ``train_labels``, ``test_images``, ``test_labels``) or from the folder that
      torchvision makes in ``root``.
    - ``imagenet`` is ``root`` with ``train/`` and ``val/``.
    - ``imagefolder:PATH`` has one folder per class in ``PATH/train`` (or ``training``) and in the
      first of ``PATH/val``, ``valid``, ``validation``, ``test``, ``testing``, in upper or lower
      case. If there is no such folder, or if the classes are in ``PATH`` itself, one image in five
      of each class is used for testing. Hidden files and folders are ignored.

    Args:
        spec: one of ``DATA``.
        root: folder of CIFAR (default ``data``) or ImageNet.
        download: download CIFAR to ``root`` with torchvision if it is missing.
        skip: image files to leave out.
        image_size: side of the crops of image files.
        workers: threads that decode image files; by default one per CPU core, at most 16.
        interpolation: interpolation for resizing image files, bilinear or bicubic.
        test_crop: side of the crops of test files as a fraction of the shorter side.
    """
    kind, _, path = spec.partition(":")
    if kind == "digits" and not path:
        return _load_digits()
    if kind in _CIFAR_CLASSES and not path:
        return _load_cifar(kind, Path("data" if root is None else root), download=download)
    if spec != "imagenet" and kind != "imagefolder":
        if Path(spec).is_dir():
            raise InputError(f"unknown data set {spec!r}; did you mean imagefolder:{spec}?")
        raise unknown("data set", spec, DATA)
    if spec == "imagenet" and root is None:
        raise InputError("imagenet needs --data-root, the folder with train/ and val/")
    if kind == "imagefolder" and not path:
        raise InputError("imagefolder needs a path, such as imagefolder:photos")

    from isda.experiments.data.folders import load_folder

    return load_folder(
        Path(path or root or "").expanduser(),
        name=spec,
        image_size=image_size,
        workers=_processors() if workers is None else workers,
        skip=skip,
        interpolation=interpolation,
        test_crop=test_crop,
    )


def normalize(
    images: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
) -> Tensor:
    """``(images / 255 - mean) / std`` of uint8 images, in float32; can be captured.

    Shape:
        images (N, C, H, W), mean and std of length C; output (N, C, H, W) of ``dtype``.
    """
    scale = [1 / (255 * s) for s in std]
    shift = [-m / s for m, s in zip(mean, std, strict=True)]
    return (images * _channels(scale, images) + _channels(shift, images)).to(dtype)


def rank_slice(number: int, *, rank: int, world: int) -> slice:
    """Contiguous part of a batch for a rank; the sizes differ by at most one."""
    return slice(number * rank // world, number * (rank + 1) // world)


def split(target: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Indices to keep and ``number`` indices to hold out, stratified by class, always the same.

    Shape:
        target (N,); outputs (N - number,) and (number,), ascending, on the CPU.
    """
    if not 0 < number < len(target):
        raise InputError(
            f"number of images to hold out must be between 1 and {len(target) - 1}, got {number}"
        )
    target = target.cpu()
    order, place = by_class(target, counter_rng.key(0, _SPLIT))
    count = torch.bincount(target)
    share = (place.double() + 0.5) / count[target[order]]  # position within its class, in [0, 1]
    held = torch.zeros(len(target), dtype=torch.bool)
    held[order[share.argsort(stable=True)[:number]]] = True
    if len(target[~held].unique()) < len(target.unique()):
        raise InputError(
            f"hold_out must leave training images of every class, got {number} of {len(target)}"
        )
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def draw(
    target: Tensor,
    num_classes: int,
    images_per_class: int,
    *,
    seed: int,
    leave_one: bool = False,
    name: str,
) -> tuple[Tensor, Tensor]:
    """Indices of random images, the same number of each class, and the indices of all others.

    Args:
        target: class of every image.
        num_classes: number of classes.
        images_per_class: number of images of each class.
        seed: seed of the draw.
        leave_one: leave at least one image of each class for the others.
        name: name of the data set.

    Shape:
        target (N,); outputs ascending, on its device.
    """
    count = int(torch.bincount(target, minlength=num_classes).min())
    if not 0 < images_per_class <= count - leave_one:
        raise InputError(
            f"images_per_class must be between 1 and {count - leave_one} for {name}, "
            f"got {images_per_class}"
        )
    order, place = by_class(target, counter_rng.key(seed, _DRAW))
    drawn = place < images_per_class
    return order[drawn].sort().values, order[~drawn].sort().values


def by_class(target: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of all images by class, in random order within a class, and their places in it.

    Shape:
        target (N,); outputs (N,), on its device.
    """
    order = counter_rng.permutation(len(target), key).to(target.device)
    order = order[target[order].argsort(stable=True)]
    first = torch.searchsorted(target[order], target[order])  # place of the first of its class
    return order, torch.arange(len(target), device=target.device) - first


_SPLIT, _DRAW = 0x5D, 0xD7  # parts of the keys


def _channels(values: Sequence[float], images: Tensor) -> Tensor:
    # filled on the device, because a copy from the host cannot be captured
    filled = [torch.full((1, 1), v, dtype=torch.float32, device=images.device) for v in values]
    return torch.stack(filled)


def _processors() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(16, usable or 1)


def _load_digits() -> ImageArrays:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(np.rint(digits.images * (255 / 16)).astype(np.uint8))[:, None]
    target = torch.from_numpy(digits.target.astype(np.int64))
    kept, held = split(target, round(len(target) / 5))
    scaled = images[kept].double() / 255
    return ImageArrays(
        name="digits",
        train_images=images[kept],
        train_target=target[kept],
        test_images=images[held],
        test_target=target[held],
        mean=(scaled.mean().item(),),
        std=(scaled.std().item(),),
        class_names=tuple(str(name) for name in digits.target_names),
    )


def _load_cifar(name: str, root: Path, *, download: bool) -> ImageArrays:
    packed = root.expanduser() / f"{name}.npz"
    if packed.is_file():
        arrays = _read_arrays(packed, num_classes=len(_CIFAR_CLASSES[name].split()))
    else:
        arrays = _read_torchvision(name, packed, download=download)

    def images(part: str) -> Tensor:
        return torch.from_numpy(arrays[f"{part}_images"]).permute(0, 3, 1, 2).contiguous()

    return ImageArrays(
        name=name,
        train_images=images("train"),
        train_target=torch.from_numpy(arrays["train_labels"].astype(np.int64)),
        test_images=images("test"),
        test_target=torch.from_numpy(arrays["test_labels"].astype(np.int64)),
        mean=CIFAR_MEAN,
        std=CIFAR_STD,
        class_names=tuple(_CIFAR_CLASSES[name].split()),
    )


def _read_torchvision(name: str, packed: Path, *, download: bool) -> dict[str, np.ndarray]:
    """Arrays of the files that torchvision downloads to the folder of ``packed``."""
    from torchvision.datasets import CIFAR10, CIFAR100  # slow to import

    source = CIFAR10 if name == "cifar10" else CIFAR100
    folder = packed.parent / source.base_folder
    if not (download or folder.is_dir()):
        raise InputError(f"{name} not found: neither {packed} nor {folder}{os.sep}; use --download")
    arrays = {}
    for part in ("train", "test"):
        try:
            data = source(str(packed.parent), train=part == "train", download=download)
        except (OSError, RuntimeError) as error:
            what = "cannot be downloaded" if download else f"in {folder} is damaged"
            raise InputError(f"{name} {what}: {reason(error)}") from error
        arrays[f"{part}_images"] = data.data
        arrays[f"{part}_labels"] = np.asarray(data.targets)
    return arrays


def _read_arrays(path: Path, *, num_classes: int) -> dict[str, np.ndarray]:
    wanted = [f"{part}_{what}" for part in ("train", "test") for what in ("images", "labels")]
    try:
        with np.load(path, allow_pickle=False) as stored:
            missing = [key for key in wanted if key not in stored]
            arrays = {} if missing else {key: stored[key] for key in wanted}
    except Exception as error:  # a damaged archive can fail in many ways
        raise InputError(f"{path} cannot be read: {error}") from error
    if missing:
        raise InputError(f"{path} lacks the arrays {', '.join(missing)}")
    for part in ("train", "test"):
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        if not np.issubdtype(labels.dtype, np.integer) or labels.ndim != 1 or not labels.size:
            raise InputError(
                f"{part}_labels of {path} must be integers (N,), got {labels.dtype} {labels.shape}"
            )
        if images.dtype != np.uint8 or images.shape != (len(labels), 32, 32, 3):
            raise InputError(
                f"{part}_images of {path} must be uint8 ({len(labels)}, 32, 32, 3), as its labels, "
                f"got {images.dtype} {images.shape}"
            )
        if part == "train" and labels.min() == labels.max():
            raise InputError(f"train_labels of {path} must have two or more classes, got one")
        if labels.min() < 0 or labels.max() >= num_classes:
            raise InputError(
                f"{part}_labels of {path} must be in [0, {num_classes}), "
                f"got {labels.min()} to {labels.max()}"
            )
    return arrays
