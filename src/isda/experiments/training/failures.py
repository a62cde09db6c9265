"""Runs that fail while others continue: what failed and why, on all ranks."""

import contextlib
import gc
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from isda import distributed
from isda.experiments.errors import InputError, RunsFailed, StoppedElsewhere
from isda.experiments.records import Run
from isda.experiments.training.memory import is_out_of_memory

__all__ = [
    "Failures",
    "finished_first",
    "free_memory",
    "reason_of",
    "together",
]


class Failures:
    """Failed runs by the index of their plan.

    Args:
        total: number of runs of the training.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.messages: dict[int, str] = {}

    def __contains__(self, number: int) -> bool:
        return number in self.messages

    def add(self, number: int, message: str) -> None:
        """Record a failed run; if there are other runs, warn at once."""
        self.messages[number] = message
        if self.total > 1 and distributed.rank(None) == 0:
            warnings.warn(f"{message}; the other runs continue", stacklevel=2)

    def raise_if_any(self, runs: Sequence[Run]) -> None:
        """Raise RunsFailed with the finished runs if there are failures."""
        if self.messages and distributed.rank(None):
            raise StoppedElsewhere(fatal=False)
        if self.messages:
            raise RunsFailed(list(self.messages.values()), runs, self.total)


@contextlib.contextmanager
def finished_first(train: Callable[..., list[Any]], *arguments: Any) -> Iterator[list[Any]]:
    """Train; yields the finished runs, and raises RunsFailed only at the end of the context."""
    failed = None
    try:
        runs = train(*arguments)
    except RunsFailed as error:
        runs, failed = error.runs, error
    yield runs
    if failed is not None:
        sys.stdout.flush()
        raise failed


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raise an error of one rank on all ranks, so that the others do not wait for it for ever.

    The first rank with an InputError raises it, the others raise StoppedElsewhere. Collectives
    inside the context must come after whatever may fail.
    """
    failure = None
    try:
        yield
    except InputError as error:
        failure = error
    rank, world = distributed.rank(None), distributed.world_size(None)
    problem = 0 if failure is None else 2 if failure.fatal else 1
    speaker, problem = distributed.agree(world - rank if failure else 0, problem, None)
    if failure is not None and speaker == world - rank:
        raise failure
    if problem:
        raise StoppedElsewhere(fatal=problem == 2) from failure


def reason_of(error: Exception, *, side_by_side: int = 1) -> str:
    """Why a run failed, in one line; prints the traceback of an unexpected error."""
    if is_out_of_memory(error):
        if side_by_side > 1:
            return f"out of memory: use --side-by-side {side_by_side // 2}"
        return "out of memory: use a smaller --batch-size, or --precision bf16"
    traceback.print_exception(error, file=sys.stderr)
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def free_memory() -> None:
    """Release the memory of failed runs; call it outside of ``except``."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
