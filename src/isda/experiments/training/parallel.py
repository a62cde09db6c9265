"""Runs in parallel processes on a CPU, each with one thread.

A small network is too small for several threads, but its seeds are independent. A run gives the
same numbers as in a single process with one thread.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any

import torch
from tqdm import tqdm

from isda.experiments.errors import InputError, RunError, RunsFailed, TimeUp
from isda.experiments.settings import Options
from isda.experiments.training.deadline import time_up
from isda.experiments.training.failures import Failures, reason_of
from isda.experiments.training.groups import Plan
from isda.experiments.training.images import kept_images
from isda.experiments.training.run_folder import RunFolder, require_free

__all__ = ["train_in_processes"]


def train_in_processes(
    plans: Sequence[Plan], options: Options, *, progress: bool
) -> list[RunFolder]:
    """Train every plan in one of ``options.processes`` processes; runs in the order of the plans.

    A run that fails does not stop the others. After an input error or on a full disk, however, only
    the runs that have already started are finished.
    """
    folders = [plan.folder(options.out) for plan in plans]
    if not options.resume:
        require_free(folders)
    failures = Failures(len(plans))
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
    workers, first = min(options.processes, len(plans)), context.Semaphore(1)
    with ProcessPoolExecutor(workers, context, _begin, (first,)) as pool:
        recipe = plans[0].recipe
        label = f"{recipe.data_name} {recipe.network}, {options.processes} processes"
        try:
            with _no_interrupts():
                numbers = {pool.submit(_train, plan, options): number
                           for number, plan in enumerate(plans)}  # fmt: skip
            for future in tqdm(
                as_completed(numbers), label, len(numbers), unit="run", disable=not progress
            ):
                try:
                    future.result()
                except RunError as error:
                    if error.fatal:
                        raise
                    failures.add(numbers[future], str(error))
        except BrokenProcessPool as error:
            raise RunError(
                "a process that trained runs was killed, perhaps for lack of memory: use fewer "
                "--processes; --resume continues"
            ) from error
        except KeyboardInterrupt:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
        except BaseException as error:
            pool.shutdown(cancel_futures=True)
            if isinstance(error, TimeUp):
                begun = [folder for folder in folders if (folder / "config.json").exists()]
                raise time_up([*map(RunFolder, begun)], options) from None
            raise
    done = [RunFolder(folder) for n, folder in enumerate(folders) if n not in failures]
    failures.raise_if_any(done)
    return done


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Block SIGINT, also in processes that are started here, until they have imported torch."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_images = contextlib.ExitStack()  # of a process


def _begin(first: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it; checkpoints are intact
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    _images.enter_context(kept_images()).first = first  # all runs of this process load them once
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)  # the parent was killed; checkpoints are intact


def _train(plan: Plan, options: Options) -> None:
    """Train a run in a process; its time limit starts with the command."""
    from isda.experiments.training.loop import train  # which imports this module

    try:
        train([plan], options.changed(processes=1, device="cpu"), progress=False)
    except RunsFailed as error:
        raise RunError(str(error)) from None  # can be sent to the parent
    except (InputError, TimeUp):
        raise
    except Exception as error:  # of this run
        raise RunError(f"{plan.folder(options.out)}: {reason_of(error)}") from error
