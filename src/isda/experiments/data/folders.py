"""Images in one folder per class, decoded by worker processes: ImageNet and your own data.

The random crop of an image depends only on seed, epoch and the index of the image, not on the
number of workers or ranks.
"""

import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from isda.experiments.data import counter_rng
from isda.experiments.data.arrays import epoch_order, rank_slice, split, steps_per_epoch
from isda.experiments.errors import InputError

__all__ = ["FolderImages", "load_folder"]

_Item = tuple[str, int, int | None]  # file, target, seed of crop and flip (None: test)
_Batch = tuple[Tensor, Tensor]

_TRAIN, _TEST = ("train", "training"), ("val", "valid", "validation", "test")

_ORDER, _SAMPLE = 0xF0, 0xF1  # parts of the keys


@dataclass(frozen=True, eq=False)
class FolderImages:
    """Image files and their classes, read in batches with the usual preprocessing of ImageNet."""

    name: str
    train_files: tuple[str, ...]
    train_target: Tensor  # int64 (N,)
    test_files: tuple[str, ...]
    test_target: Tensor
    class_names: tuple[str, ...]
    image_size: int = 224  # S, pixels
    workers: int = 0  # processes that decode; 0: decode in this process
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    _idle: list["_Loader"] = field(default_factory=list, init=False, repr=False)

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return len(self.class_names)

    def hold_out(self, number: int = 5000, *, seed: int = 0) -> "FolderImages":
        """Validation split, as in :meth:`isda.experiments.data.arrays.ImageArrays.hold_out`."""
        kept, held = split(self.train_target, number, seed=seed)
        return replace(
            self,
            train_files=tuple(self.train_files[i] for i in kept.tolist()),
            train_target=self.train_target[kept],
            test_files=tuple(self.train_files[i] for i in held.tolist()),
            test_target=self.train_target[held],
        )

    def train_batches(
        self,
        *,
        batch_size: int,
        seed: int,
        epoch: int,
        rank: int = 0,
        world: int = 1,
    ) -> Iterator[_Batch]:
        """Batches of an epoch in random order, randomly cropped and flipped.

        Args:
            batch_size: batch size over all ranks; the last batch may be smaller.
            seed: seed of the run.
            epoch: epoch, counted from 0.
            rank: rank whose part of each batch is returned; it may be empty.
            world: number of ranks.

        Shape:
            yields images float32 (N, 3, S, S) and target int64 (N,), pinned if there is a GPU.
        """
        number = len(self.train_files)
        order = epoch_order(number, counter_rng.key(seed, _ORDER, epoch)).tolist()
        seeds = counter_rng.bits((number,), counter_rng.key(seed, _SAMPLE, epoch)).tolist()
        target = self.train_target.tolist()

        def batches() -> Iterator[list[_Item]]:
            for step in range(steps_per_epoch(number, batch_size)):
                batch = order[step * batch_size : (step + 1) * batch_size]
                part = batch[rank_slice(len(batch), rank=rank, world=world)]
                yield [(self.train_files[i], target[i], seeds[i]) for i in part]

        return self._read(batches())

    def test_batches(self, batch_size: int, *, rank: int = 0, world: int = 1) -> Iterator[_Batch]:
        """Batches of the test images in order, resized and center-cropped."""
        number, target = len(self.test_files), self.test_target.tolist()

        def batches() -> Iterator[list[_Item]]:
            for first in range(0, number, batch_size):
                batch = range(first, min(first + batch_size, number))
                part = batch[rank_slice(len(batch), rank=rank, world=world)]
                yield [(self.test_files[i], target[i], None) for i in part]

        return self._read(batches())

    def _read(self, batches: Iterator[list[_Item]]) -> Iterator[_Batch]:
        # workers are reused in the next epoch; concurrent iterators have separate workers
        loader = self._idle.pop() if self._idle else _Loader(self)
        usable = True
        try:
            yield from loader.read(batches)
        except Exception:
            usable = False  # a worker may have been killed
            raise
        finally:
            if usable:
                self._idle.append(loader)


def load_folder(
    path: Path,
    *,
    name: str,
    image_size: int = 224,
    workers: int = 0,
    skip_unreadable: bool = False,
    check: bool = True,
) -> FolderImages:
    """Find the images of a folder in the layout that ``load_data`` describes.

    Args:
        path: folder of the data set.
        name: name of the data set.
        image_size: side of the crops in pixels.
        workers: number of processes that decode, and of threads that check.
        skip_unreadable: skip the files that ``check`` finds instead of raising an error.
        check: decode every file once to find unreadable ones.
    """
    if image_size < 1:
        raise InputError(f"image_size must be >= 1, got {image_size}")
    if workers < 0:
        raise InputError(f"workers must be >= 0, got {workers}")
    if not path.is_dir():
        raise InputError(f"{path} is not a folder" if path.exists() else f"{path} does not exist")
    parts = {part.lower(): path / part for part in _class_names(path)}  # Train counts as train
    tests = [parts[part] for part in _TEST if part in parts]
    enough = 1 if tests else 2  # otherwise it is a class that contains folders
    trains = [
        parts[part] for part in _TRAIN if part in parts and len(_class_names(parts[part])) >= enough
    ]
    train, test = (trains[0], next(iter(tests), None)) if trains else (path, None)
    misplaced = train == path and parts and {*parts} <= {*_TRAIN, *_TEST}
    if misplaced or (name == "imagenet" and test is None):
        raise InputError(f"{path} must have train/ and val/ with one folder per class")
    if test and not _class_names(test):
        raise InputError(f"{test} must have one folder per class, like {train}")

    class_names = _class_names(train)
    if len(class_names) < 2:
        raise InputError(
            f"{train} must have folders of two or more classes, got {len(class_names)}"
        )
    strange = [c for c in _class_names(test) if c not in class_names] if test else []
    if strange:
        raise InputError(f"{test} has classes that {train} lacks: {_few(strange)}")

    samples = _samples(train, class_names)
    test_samples = _samples(test, class_names) if test else []
    if check:
        bad = _unreadable([file for file, _ in samples + test_samples], threads=max(1, workers))
        if bad and not skip_unreadable:
            raise InputError(
                f"{len(bad)} of {len(samples) + len(test_samples)} images under {path} cannot be "
                f"decoded (use --skip-unreadable to skip them): {_few(bad)}"
            )
        if bad:
            warnings.warn(
                f"skipped {len(bad)} of {len(samples) + len(test_samples)} images under {path} "
                f"that cannot be decoded: {_few(bad)}",
                stacklevel=2,
            )
        skipped = set(bad)
        samples = [sample for sample in samples if sample[0] not in skipped]
        test_samples = [sample for sample in test_samples if sample[0] not in skipped]
    if test and not test_samples:
        raise InputError(f"{test} has no images")
    found = FolderImages(
        name=name,
        train_files=tuple(file for file, _ in samples),
        train_target=torch.tensor([c for _, c in samples], dtype=torch.int64),
        test_files=tuple(file for file, _ in test_samples),
        test_target=torch.tensor([c for _, c in test_samples], dtype=torch.int64),
        class_names=tuple(class_names),
        image_size=image_size,
        workers=workers,
    )
    empty = _absent(found)
    if empty:
        raise InputError(f"{train} has classes without images: {_few(empty)}")
    if test:
        return found
    try:
        return found.hold_out(max(1, round(len(samples) / 5)))
    except InputError as error:
        raise InputError(
            f"{train} has too few images to hold out one in five: {len(samples)} images of "
            f"{len(class_names)} classes"
        ) from error


class _Files(Dataset[tuple[Tensor, int]]):
    """Reads the files named by the items, so that workers do not copy the whole list."""

    def __init__(self, data: FolderImages) -> None:
        from torchvision.transforms import v2  # slow to import

        to_tensor = [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(data.mean, data.std),
        ]
        size = data.image_size
        self.train = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *to_tensor])
        self.test = v2.Compose(
            [v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size), *to_tensor]
        )

    def __getitem__(self, item: _Item) -> tuple[Tensor, int]:
        file, target, seed = item
        try:
            with Image.open(file) as opened:
                image = _to_rgb(opened)
        except Exception as error:  # decoders raise all kinds of errors
            raise InputError(f"{file} cannot be read: {error}") from error
        if seed is None:
            return self.test(image).as_subclass(Tensor), target
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPU
            return self.train(image).as_subclass(Tensor), target


class _Batches(Sampler[list[_Item]]):
    """Batches to read next."""

    def __init__(self) -> None:
        self.items: Iterable[list[_Item]] = ()

    def __iter__(self) -> Iterator[list[_Item]]:
        return iter(self.items)


class _Loader:
    """Worker processes that live for several epochs, until this object is deleted."""

    def __init__(self, data: FolderImages) -> None:
        self.batches = _Batches()
        self.loader: DataLoader[tuple[Tensor, int]] = DataLoader(
            _Files(data),
            batch_sampler=self.batches,
            num_workers=data.workers,
            persistent_workers=data.workers > 0,
            collate_fn=partial(_collate, size=data.image_size),
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # does not use torch's global one
        )

    def read(self, batches: Iterable[list[_Item]]) -> Iterator[_Batch]:
        self.batches.items = batches
        try:
            for batch in self.loader:  # pinning turns the pair into a list
                yield batch[0], batch[1]
        except InputError as error:  # workers wrap it in a traceback
            raise InputError(str(error).strip().rpartition("InputError: ")[2]) from None


def _collate(samples: list[tuple[Tensor, int]], *, size: int) -> _Batch:
    if not samples:  # a rank without images in the last batch
        return torch.empty(0, 3, size, size), torch.empty(0, dtype=torch.int64)
    images, target = default_collate(samples)
    return images, target


def _class_names(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    return sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _samples(path: Path, class_names: list[str]) -> list[tuple[str, int]]:
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset  # slow to import

    places = {name: index for index, name in enumerate(class_names)}
    return make_dataset(path, places, extensions=IMG_EXTENSIONS, allow_empty=True)


def _absent(data: FolderImages) -> list[str]:
    count = data.train_target.bincount(minlength=data.num_classes).tolist()
    return [name for name, number in zip(data.class_names, count, strict=True) if not number]


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
    return image.convert("RGB")


def _unreadable(files: list[str], *, threads: int) -> list[str]:
    def readable(file: str) -> bool:
        try:
            with Image.open(file) as image:
                image.draft("RGB", (1, 1))  # decode a JPEG at 1/8 size: reads the whole file
                image.load()
                if image.mode[0] in "IF":  # only some decoders return these
                    _to_rgb(image)
        except Exception:  # decoders raise all kinds of errors
            return False
        return True

    with ThreadPoolExecutor(threads) as pool:  # decoders release the GIL
        return [
            file for file, good in zip(files, pool.map(readable, files), strict=True) if not good
        ]


def _few(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
