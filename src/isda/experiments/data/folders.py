"""Images in one folder per class: ImageNet and your own data.

This module finds the files; :mod:`isda.experiments.data.folder_cache` decodes them.
"""

import hashlib
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from isda.experiments.data.arrays import split
from isda.experiments.errors import InputError, few, one_line

__all__ = ["FolderImages", "load_folder", "require_folder"]

_TRAIN = ("train", "training")
_TEST = ("val", "valid", "validation", "test", "testing")
_IMAGES = (
    ".apng", ".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg",
    ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class FolderImages:
    """Image files and their classes."""

    name: str
    path: Path
    train_files: tuple[str, ...]
    train_target: Tensor  # int64 (N,)
    test_files: tuple[str, ...]
    test_target: Tensor
    class_names: tuple[str, ...]
    image_size: int = 224  # side of the crops, in pixels
    workers: int = 0  # threads that decode; 0: decode in the calling thread
    interpolation: str = "bilinear"  # or bicubic
    test_crop: float = 0.875  # side of the test crops as a share of the shorter side
    test_source: str = "held out"  # where the test images come from

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return len(self.class_names)

    def digest(self, *settings: object, times: bool = False) -> str:
        """Hash of settings, and of names and sizes of all files.

        Args:
            settings: settings to include.
            times: also hash mtime and ctime, which a copy of the folder does not keep.
        """
        key = hashlib.sha256(repr(settings).encode())
        for files in (self.train_files, self.test_files):
            for file in files:
                name = os.fsencode(os.path.relpath(file, self.path))
                try:
                    found = os.stat(file)
                    state = (found.st_size, found.st_mtime_ns, found.st_ctime_ns)
                except OSError:  # reported when it is decoded
                    state = (-1, -1, -1)
                key.update(repr((name, *state) if times else (name, state[0])).encode())
            key.update(b"|")
        return key.hexdigest()[:32]

    def hold_out(self, number: int) -> "FolderImages":
        """Validation split, as in :meth:`isda.experiments.data.arrays.ImageArrays.hold_out`."""
        kept, held = split(self.train_target, number)
        return replace(
            self,
            train_files=tuple(self.train_files[i] for i in kept.tolist()),
            train_target=self.train_target[kept],
            test_files=tuple(self.train_files[i] for i in held.tolist()),
            test_target=self.train_target[held],
            test_source="held out",
        )


@contextmanager
def _reading() -> Iterator[None]:
    """Turn errors of the file system into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{one_line(error.filename)} cannot be read: {error.strerror}") from error


def require_folder(path: Path) -> None:
    """Raise InputError unless a path is a folder."""
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        raise InputError(f"{one_line(path)} {problem}")


@_reading()
def load_folder(
    path: Path,
    *,
    name: str,
    image_size: int = 224,
    workers: int = 0,
    skip: Collection[str] = (),
    interpolation: str = "bilinear",
    test_crop: float = 0.875,
) -> FolderImages:
    """Find the images of a folder in the layout that ``load_data`` describes.

    Args:
        path: folder of the data set.
        name: name of the data set.
        image_size: side of the crops in pixels.
        workers: number of threads that decode.
        skip: files to leave out.
        interpolation: interpolation for resizing, bilinear or bicubic.
        test_crop: side of the test crops as a fraction of the shorter side.
    """
    if image_size < 1:
        raise InputError(f"image_size must be >= 1, got {image_size}")
    if workers < 0:
        raise InputError(f"workers must be >= 0, got {workers}")
    require_folder(path)
    parts = {part.lower(): path / part for part in _class_names(path)}  # Train counts as train
    tests = [parts[part] for part in _TEST if part in parts]
    enough = 1 if tests else 2  # otherwise it is a class that contains folders
    trains = [
        parts[part] for part in _TRAIN if part in parts and len(_class_names(parts[part])) >= enough
    ]
    train, test = (trains[0], next(iter(tests), None)) if trains else (path, None)
    misplaced = train == path and parts and {*parts} <= {*_TRAIN, *_TEST}
    if misplaced or (name == "imagenet" and test is None):
        raise InputError(f"{one_line(path)} must have train/ and val/ with one folder per class")
    if test and not _class_names(test):
        raise InputError(f"{one_line(test)} must have one folder per class, like {one_line(train)}")

    class_names = _class_names(train)
    if len(class_names) < 2:
        raise InputError(
            f"{one_line(train)} must have folders of two or more classes, got {len(class_names)}"
            + "".join(f": {one_line(name)}" for name in class_names)
        )
    if trains and not test:
        _require_no_other_part(path, train, class_names)
    strange = sorted({*_class_names(test)} - {*class_names}) if test else []
    if strange:
        raise InputError(
            f"{one_line(test)} has classes that {one_line(train)} lacks: {few(strange)}"
        )

    left_out = set(skip)
    samples = _samples(train, class_names, left_out)
    test_samples = _samples(test, class_names, left_out) if test else []
    if test and not test_samples:
        raise InputError(f"{one_line(test)} has no images")
    filled = {number for _, number in samples}
    empty = [name for number, name in enumerate(class_names) if number not in filled]
    if empty:
        raise InputError(
            f"{one_line(train)} has classes without images that PIL can read: {few(empty)}"
        )
    found = FolderImages(
        name=name,
        path=path,
        train_files=tuple(file for file, _ in samples),
        train_target=torch.tensor([c for _, c in samples], dtype=torch.int64),
        test_files=tuple(file for file, _ in test_samples),
        test_target=torch.tensor([c for _, c in test_samples], dtype=torch.int64),
        class_names=tuple(class_names),
        image_size=image_size,
        workers=workers,
        interpolation=interpolation,
        test_crop=test_crop,
        test_source=one_line(test) if test else "",
    )
    if test:
        return found
    try:
        held_out = found.hold_out(max(1, round(len(samples) / 5)))
        return replace(held_out, test_source="one in five of each class")
    except InputError as error:
        raise InputError(
            f"{one_line(train)} has too few images to hold out one in five: {len(samples)} images "
            f"of {len(class_names)} classes"
        ) from error


def _class_names(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    above = _above(path)
    return sorted(
        p.name
        for p in path.iterdir()
        if p.is_dir()
        and not p.name.startswith(".")
        and not (p.is_symlink() and _identity(p) in above)
    )


def _require_no_other_part(path: Path, train: Path, class_names: list[str]) -> None:
    """Raise InputError if a folder beside ``train`` may hold the test images."""
    others = [
        name
        for name in _class_names(path)
        if path / name != train and {*_class_names(path / name)} & {*class_names}
    ]
    if others:
        raise InputError(
            f"{one_line(path)} has folders of the same classes in {train.name} and {few(others)}: "
            "rename the one with the test images to test, or move the others elsewhere"
        )


def _samples(path: Path, class_names: list[str], left_out: set[str]) -> list[tuple[str, int]]:
    """Files and classes, sorted; a link to a folder that contains it is not followed."""
    above = _above(path)
    return [
        (file, number)
        for number, name in enumerate(class_names)
        if (path / name).is_dir()  # the test part may lack classes
        for file in _files(str(path / name), above)
        if file.lower().endswith(_IMAGES) and file not in left_out
    ]


def _files(folder: str, above: set[tuple[int, int]]) -> list[str]:
    """Files in a folder and the folders in it, sorted, without hidden ones, pipes and devices."""
    inside = above | {_identity(folder)}
    found = []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith("."):  # such as ._0.jpg, which macOS puts into archives
                continue
            # of a link to itself, entry.is_dir() fails
            is_file = entry.is_file(follow_symlinks=False)
            if is_file or not os.path.isdir(entry.path):
                if is_file or os.path.isfile(entry.path) or not os.path.exists(entry.path):
                    found.append(entry.path)  # a broken link is reported when it is decoded
            elif not entry.is_symlink() or _identity(entry.path) not in inside:
                found += _files(entry.path, inside)
    return found


def _above(path: Path) -> set[tuple[int, int]]:
    """A folder and those that contain it."""
    return {_identity(folder) for folder in (path, *path.resolve().parents)}


def _identity(path: str | Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino
