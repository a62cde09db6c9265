"""Helpers for the tests of the integrations: sizes, and two ranks as torchrun starts them."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from forks import START_METHOD
from programs import environment_of_rank, forget_world, held_port

__all__ = ["A", "C", "on_two_ranks"]

C, A = 4, 8


def on_two_ranks(work, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    with held_port() as port:
        arguments = (work, port, str(folder))
        mp.start_processes(_on_rank, arguments, nprocs=2, start_method=START_METHOD)
    return [torch.load(folder / f"result{rank}.pt") for rank in range(2)]


def _on_rank(rank: int, work, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment_of_rank(rank, 2, port), ACCELERATE_USE_CPU="true")
    forget_world()
    torch.save(work(Path(folder)), f"{folder}/result{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
