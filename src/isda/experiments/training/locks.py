"""Locks of run folders and output folders: one command at a time writes to a folder."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from isda.experiments.errors import InputError, RunLocked
from isda.experiments.files import create_folder, writing
from isda.experiments.records import require_name
from isda.experiments.training.run_folder import FILES

__all__ = ["locked", "locked_folder"]


@contextlib.contextmanager
def locked(out: Path | str, name: str, seed: int) -> Iterator[None]:
    """Hold the lock of a run; see :func:`locked_folder`.

    Raises:
        RunLocked: another process is training the run; nothing has been written.
    """
    require_name(name)
    folder = Path(out) / name / str(seed)
    try:
        with locked_folder(folder):
            for left in FILES:  # by a process that was killed while it wrote
                for path in folder.glob(f".{left}.*.new"):
                    path.unlink(missing_ok=True)
            yield
    finally:
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # if it is empty


@contextlib.contextmanager
def locked_folder(folder: Path, *, use: str = "trained") -> Iterator[None]:
    """Hold the lock of a folder, which the system also releases if this process dies.

    Creates the folder if it does not exist, and removes it again if nothing was written to it.
    Otherwise the lock file stays: if it were deleted, a process that has opened it before could
    lock a file that no later process sees.

    Args:
        folder: folder of the lock file.
        use: what the holder of the lock does with the folder, for the message.

    Raises:
        RunLocked: another process holds the lock; nothing has been written.
    """
    with _lock_file(folder, use):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if [path.name for path in folder.iterdir()] == ["lock"]:
                    (folder / "lock").unlink()
                    folder.rmdir()


def _lock_file(folder: Path, use: str) -> IO[str]:
    """The lock file of a folder, open and locked."""
    path = folder / "lock"
    for _ in range(100):
        create_folder(folder)
        with writing(path, keep=()):
            try:
                file = open(path, "a")  # noqa: SIM115 - returned
            except FileNotFoundError:  # another process has removed the folder
                continue
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.close()
            raise RunLocked(f"{folder} is being {use} by another process") from error
        except OSError:  # a file system without locks
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # deleted before it was locked
    raise InputError(f"cannot lock {path}: other processes keep deleting it")
