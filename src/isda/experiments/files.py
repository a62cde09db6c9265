"""Small files: written so that a crash or a full disk leaves either the old file or the new one."""

import contextlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isda.experiments.errors import InputError, WriteError, reason

__all__ = [
    "create_folder",
    "read_bytes",
    "sync_folder",
    "write_bytes",
    "write_folder",
    "write_json",
    "write_text",
    "writing",
]


def read_bytes(path: Path, *, most: int) -> bytes:
    """Read a small file.

    Args:
        path: file to read.
        most: largest size allowed, in bytes.

    Raises:
        InputError: the file is missing, larger, not a regular file (reading a pipe would block
            for ever), or cannot be read.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"{path} is not a file")
        if found.st_size > most:
            raise InputError(f"{path} has {found.st_size} bytes, more than the maximum of {most}")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason(error)}") from error


def create_folder(folder: Path) -> None:
    """Create a folder, and those that contain it, unless they exist."""
    with writing(folder):
        found = next((place for place in (folder, *folder.parents) if place.exists()), folder)
        if found.exists() and not found.is_dir():
            raise InputError(f"{found} is a file: give the path of a folder")
        folder.mkdir(parents=True, exist_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small text file; see :func:`write_bytes`.

    Bytes of a path that are not UTF-8 are written as escape sequences.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, value: Any) -> None:
    """Write a small JSON file, indented; see :func:`write_bytes`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file under a temporary name and rename it into place.

    A symbolic link is kept: the file that it points to is replaced, with the same permissions.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder: give the path of a file")
    target = Path(os.path.realpath(path))
    new = _beside(target)
    with writing(path, temporary=new):
        _write_new(new, content)
        with contextlib.suppress(FileNotFoundError):
            new.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(new, target)
        sync_folder(target.parent)


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a new folder of small files under a temporary name and rename it into place.

    Args:
        folder: folder to create; it must be missing or empty.
        files: contents by file name.
    """
    new = _beside(folder)
    with writing(folder, temporary=new, keep=()):
        new.mkdir(parents=True)
        for name, content in files.items():
            _write_new(new / name, content)
        sync_folder(new)
        os.rename(new, folder)  # fails if the folder holds files
        sync_folder(folder.parent)


@contextlib.contextmanager
def writing(
    path: Path, *, temporary: Path | None = None, keep: Sequence[Path] | None = None
) -> Iterator[None]:
    """Turn a failed write into a WriteError, which says whether the earlier file is intact.

    Args:
        path: file or folder that is written.
        temporary: file or folder to delete after a failure.
        keep: names of earlier files; the first that exists must survive a failure under one of
            these names. By default ``path``.
    """
    keep = (path,) if keep is None else keep
    before = next(filter(None, map(_identity, keep)), None)
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__  # torch.save hides the OSError of a full disk
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
            shutil.rmtree(temporary, ignore_errors=True)
        if cause is None:
            raise
        message = f"cannot write {path}: {cause.strerror or cause}"
        if before is not None:
            intact = before in map(_identity, keep)
            message += "; earlier files are intact" if intact else "; the file may be incomplete"
        raise WriteError(message) from error


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, so that a rename survives a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _beside(path: Path) -> Path:
    """An unused temporary name in the same folder, not too long for a file if that is not."""
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}.new")


def _write_new(path: Path, content: bytes) -> None:
    """Write a file that must not exist, and flush it to disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _identity(path: Path) -> tuple[int, int] | None:
    """Inode and size of a file; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_size) if stat.S_ISREG(found.st_mode) else None
