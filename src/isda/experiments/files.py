"""Writing files so that a crash or a full disk leaves either the old file or the new one."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from isda.experiments.errors import InputError, RunError

__all__ = ["sync_folder", "write_text", "writing"]


def write_text(path: Path, text: str) -> None:
    """Write a small file to a temporary name and rename it into place."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: give the path of a file")
    new = path.with_name(path.name + ".new")
    with writing(new, undo=True):
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        sync_folder(path.parent)


@contextlib.contextmanager
def writing(path: Path, *, undo: bool = False) -> Iterator[None]:
    """Turn a failed write into a RunError; with ``undo``, delete the partly written ``path``."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__  # torch.save hides the OSError of a full disk
        if undo:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        if cause is None:
            raise
        raise RunError(
            f"cannot write {path}: {cause.strerror or cause}; earlier files are intact"
        ) from error


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, so that a rename survives a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
