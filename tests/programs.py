"""Programs run in forked processes, which need not import torch again.

Unlike in a process of their own, the modules that the tests have imported are there already.
"""

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import runpy
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from types import ModuleType
from typing import Any

from forks import START_METHOD

__all__ = ["PATIENCE", "environment_of_rank", "forget_world", "held_port", "on_two", "run_program"]

PATIENCE = 600
"""Seconds to wait for other processes; even on a busy machine only those that hang take as long."""


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port for the first rank, which no other process is given meanwhile.

    It is bound by a socket that does not listen. With SO_REUSEADDR, which torch sets as well, the
    first rank can still listen there.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def environment_of_rank(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets for a process."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0}
    values |= {"TORCHELASTIC_RUN_ID": "test"}
    return {name: str(value) for name, value in values.items()}


def _as_rank(rank: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= environment_of_rank(rank, 2, port)
    work(rank, *arguments)


def on_two(work: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Exit codes of two processes, started like those of torchrun, but without the imports."""
    context = multiprocessing.get_context(START_METHOD)
    with held_port() as port:
        ranks = [
            context.Process(target=_as_rank, args=(rank, port, work, arguments))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        multiprocessing.connection.wait([process.sentinel for process in ranks], timeout=PATIENCE)
        for process in ranks:
            process.join(60)  # if one fails, the other waits for it
            process.kill()
            process.join()
    return [process.exitcode for process in ranks]


def forget_world() -> None:
    """Call it in a forked process, which inherits the world of one rank that Accelerate knows."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def run_program(
    target: str | Path,
    *arguments: object,
    folder: Path | None = None,
    ranks: int = 0,
) -> CompletedProcess[str]:
    """What ``python target arguments`` returns and prints; a string is a module, as after ``-m``.

    With ranks, as many processes as ``torchrun`` starts; returned is the first code that is not 0.
    """
    words = list(map(str, arguments))
    context = multiprocessing.get_context(START_METHOD)
    with held_port() as port, tempfile.TemporaryDirectory() as printed:
        paths = [f"{printed}/stdout", f"{printed}/stderr"]
        processes = []
        for rank in range(ranks or 1):
            environment = environment_of_rank(rank, ranks, port) if ranks else {}
            processes.append(
                context.Process(target=_program, args=(target, words, folder, environment, paths))
            )
            processes[-1].start()
        end = time.monotonic() + PATIENCE
        for process in processes:
            process.join(max(end - time.monotonic(), 0))
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        out, err = (Path(path).read_text() for path in paths)
    if late:
        raise TimeoutExpired([str(target), *words], PATIENCE, out, err)
    codes = [process.exitcode or 0 for process in processes]
    return CompletedProcess([str(target), *words], next(filter(None, codes), 0), out, err)


def _program(
    target: str | Path,
    arguments: list[str],
    folder: Path | None,
    environment: dict[str, str],
    printed: Sequence[str],
) -> None:
    os.environ.update(environment)
    forget_world()
    for number, path in enumerate(printed, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    logging.getLogger().handlers.clear()  # those of pytest
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)
    if folder is not None:
        os.chdir(folder)
    sys.argv = [str(target), *arguments]
    if isinstance(target, str):
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(target.parent))
        module = ModuleType("__main__")
        module.__file__ = str(target)
        # processes that the program starts call its module __mp_main__
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        exec(compile(target.read_bytes(), target, "exec"), vars(module))
