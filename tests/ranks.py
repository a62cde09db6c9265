"""Processes that play the ranks of a world, and the comparison of what they return."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from forks import START_METHOD

__all__ = ["close", "results_of"]


def results_of(
    work: Callable[[int, int, str], None], world: int, folder: Path
) -> list[dict[Any, Any]]:
    """What every rank has saved: ``work(rank, world, folder)`` writes ``rank<rank>.pt``."""
    mp.start_processes(work, args=(world, str(folder)), nprocs=world, start_method=START_METHOD)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]


def close(found: Any, expected: Any) -> None:
    # float32: the parts of a sum are added in another order
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
