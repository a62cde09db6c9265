"""Runs in parallel processes on a CPU, each with one thread.

A small network is too small for several threads, but its seeds are independent. A run gives the
same numbers as in a single process with one thread.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import torch
from tqdm import tqdm

from isda.experiments.errors import TimeUp
from isda.experiments.settings import Options
from isda.experiments.training.deadline import time_up
from isda.experiments.training.groups import Plan
from isda.experiments.training.run_folder import RunFolder, require_free

__all__ = ["train_in_processes"]


def train_in_processes(plans: Sequence[Plan], options: Options) -> list[RunFolder]:
    """Train every plan in one of ``options.processes`` processes; runs in the order of the plans.

    After an error in a run, the runs that have started are finished, and no others are started.
    """
    folders = [options.out / plan.name / str(plan.seed) for plan in plans]
    if not options.resume:
        require_free(folders)
    context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
    with ProcessPoolExecutor(min(options.processes, len(plans)), context, _begin) as pool:
        futures = [pool.submit(_train, plan, options, options.started_at) for plan in plans]
        label = f"{plans[0].recipe.data} {plans[0].recipe.network}, {options.processes} processes"
        try:
            for future in tqdm(as_completed(futures), label, len(futures), unit="run"):
                future.result()
        except BaseException as error:
            pool.shutdown(cancel_futures=True)
            if isinstance(error, TimeUp):
                raise time_up([*map(RunFolder, filter(_exists, folders))], options) from None
            raise
    return [RunFolder(folder) for folder in folders]


def _exists(folder: Path) -> bool:
    return (folder / "config.json").exists()


def _begin() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)  # the parent was killed; checkpoints are intact


def _train(plan: Plan, options: Options, started_at: float) -> None:
    from isda.experiments.training.loop import train  # which imports this module

    if options.minutes is not None:  # the clock is that of the whole machine
        left = options.minutes - (time.monotonic() - started_at) / 60
        options = replace(options, minutes=max(left, 1e-9))
    train([plan], replace(options, processes=1, device="cpu"), progress=False)
