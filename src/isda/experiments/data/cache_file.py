"""The file beside a folder of images that holds their decoded bytes.

Its name contains the settings and a hash of name, size, mtime and ctime of every image file, so a
file for other images or settings is never used. It is written under a temporary name, renamed
when complete, and replaces files with the same settings for images that have changed since.
"""

import fcntl
import os
import secrets
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import PIL
import torch
from torch import Tensor

from isda.experiments.data.folders import FolderImages
from isda.experiments.errors import InputError
from isda.experiments.files import sync_folder, writing

__all__ = ["CACHE_FOLDER", "CacheFile"]

CACHE_FOLDER = ".isda-cache"
"""Name of the folder of these files, beside the images."""

_FORMAT = 2  # to be changed with the contents of the file


@dataclass(frozen=True)
class CacheFile:
    """Decoded bytes of training and test images, and the sizes of the training images."""

    data: FolderImages
    path: Path

    @classmethod
    def of(cls, data: FolderImages) -> "CacheFile":
        """The file for these images, which need not exist."""
        settings = f"{data.image_size}-{data.interpolation}-{data.test_crop:g}"
        if not data.train_files:  # all are test images; must not replace the file of the training
            settings = f"tested-{settings}"
        return cls(data, data.path / CACHE_FOLDER / f"{settings}-{_contents_key(data)}.bytes")

    def read(self) -> tuple[Tensor, Tensor] | None:
        """Sizes int64 (N, 2) and bytes, mapped into memory; None if there is no complete file."""
        try:
            length = self.path.stat().st_size
        except OSError:
            return None
        number = len(self.data.train_files)
        table = 8 * number  # two int32 per image
        if length < table:
            return None
        content = torch.from_file(str(self.path), shared=False, size=length, dtype=torch.uint8)
        size = content[length - table :].clone().view(torch.int32).view(number, 2).long()
        test = len(self.data.test_files) * 3 * self.data.image_size**2
        if length != 3 * int(size.prod(1).sum()) + test + table:
            return None
        return size, content[: length - table]

    def write(self, size: Tensor, parts: Generator[Tensor, None, None]) -> Tensor:
        """Create the file, unless another process has done so meanwhile, and map its bytes.

        Args:
            size: sizes of the training images.
            parts: the bytes of all images, in order; not used if the file exists.
        """
        with _locked(self.path.parent):
            found = self.read()
            if found is not None:
                return found[1]
            for left in self.path.parent.glob("*.new"):  # by a process that was killed
                left.unlink(missing_ok=True)
            settings = self.path.name.rpartition("-")[0]
            of_version_0_2 = "?" * 32 + ".bytes"  # without settings in the name
            for pattern in (f"{settings}-*.bytes", of_version_0_2):
                for stale in self.path.parent.glob(pattern):
                    stale.unlink(missing_ok=True)  # a process that has mapped it can go on
            new = self.path.with_suffix(f".{secrets.token_hex(4)}.new")
            try:
                with writing(self.path, keep=()), closing(parts), new.open("xb") as file:
                    for part in parts:
                        part.numpy().tofile(file)
                    file.write(size.to(torch.int32).numpy().tobytes())
                    file.flush()
                    os.fsync(file.fileno())
                    if CacheFile.of(self.data) != self:
                        raise InputError(
                            f"images under {self.data.path} changed while they were decoded: "
                            "try again"
                        )
                    os.replace(new, self.path)
                    sync_folder(self.path.parent)
            finally:
                new.unlink(missing_ok=True)
        found = self.read()
        assert found is not None
        return found[1]


def _contents_key(data: FolderImages) -> str:
    """Hash of the settings and of name, size, mtime and ctime of every image file."""
    import torchvision  # slow to import

    settings = (data.image_size, data.interpolation, data.test_crop)
    versions = (PIL.__version__, torchvision.__version__)
    return data.digest(_FORMAT, *settings, *versions, times=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create a folder, and wait until no other process is in this context."""
    path = folder / "lock"
    with writing(path, keep=()):
        folder.mkdir(exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        with suppress(OSError):  # a file system without locks: both processes write the same file
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
