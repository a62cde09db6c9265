"""Trainings on several GPUs or machines with Ray: ``isda queue FILE --engine ray``.

Each worker, one per GPU or CPU process, takes one job after another. All workers read and write
the same folders, so a job whose worker was lost continues elsewhere from the checkpoints of its
runs. Ray is imported only here, when the engine is used.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm import tqdm

from isda.experiments.errors import InputError, RunLocked, TimeUp, reason

__all__ = ["Job", "Workers"]

_ATTEMPTS = 3  # how often a job may lose its worker, or find a run locked when no other job works
_SECONDS = 0.5  # between two looks at the records


@dataclass(frozen=True, eq=False)
class Job:
    """A part of the work, for one worker."""

    label: str
    """Description, for messages."""

    prepare: Callable[[], Callable[[], None]]
    """Called when a worker is free; returns the function to send to it, which can be pickled."""

    runs: tuple[tuple[Path, int], ...] = ()
    """Folders of its runs, and their number of epochs."""


class Workers:
    """Ray workers, one per GPU or CPU process.

    Args:
        address: address of a Ray cluster; None starts an instance on this machine.
        device: auto, cpu or cuda.
        processes: number of workers on CPUs; 1: one per CPU of the cluster.
    """

    def __init__(self, address: str | None, device: str, processes: int) -> None:
        if device not in ("auto", "cpu", "cuda"):
            raise InputError(f"device must be auto, cpu or cuda with --engine ray, got {device!r}")
        try:
            ray = import_module("ray")
        except ImportError as error:
            raise InputError(
                "--engine ray needs the package ray: pip install -e '.[cluster]'"
            ) from error
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # sends nothing to anyone
        own: dict[str, Any] = {}  # settings of an instance that is started here
        if address is None:
            own = {"include_dashboard": False} | ({"num_cpus": processes} if processes > 1 else {})
        try:
            ray.init(address or "local", logging_level="ERROR", **own)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(f"no Ray cluster at address {address!r}: {reason(error)}") from error
        self._ray = ray
        resources = ray.cluster_resources()
        gpus = 0 if device == "cpu" else int(resources.get("GPU", 0))
        if device == "cuda" and not gpus:
            ray.shutdown()
            raise InputError("the Ray cluster has no GPU: use --device cpu")
        self.device = "cuda" if gpus else "cpu"
        self.number = gpus or (processes if processes > 1 else int(resources.get("CPU", 1)))
        options = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}  # by what is done when they are ready
        self._create = ray.remote(**options)(_Worker).remote

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def run(self, jobs: Sequence[Job]) -> list[str]:
        """Run all jobs; prints why some have failed, and returns their labels.

        A job whose worker is lost is run again, up to three times. A job that needs a run of
        another job waits for it.

        Raises:
            TimeUp: the time limit of a job was reached; its runs have written checkpoints.
            InputError: no worker can be started.
        """
        if not jobs:
            return []
        missing = min(self.number, len(jobs)) - len(self._idle) - len(self._starting)
        self._starting.update(self._start() for _ in range(missing))
        work = _Work(jobs)
        with _View(jobs, self.number) as view:
            while work.busy or work.can_begin:
                while self._idle and work.can_begin:
                    work.begin(self._idle.pop())
                done, _ = self._ray.wait([*work.busy, *self._starting], timeout=_SECONDS)
                view.update(len(work.busy))
                for ref in done:
                    self._receive(ref, work, view)
        for job, why in work.failed:
            print(f"isda: {job.label}: {why}", file=sys.stderr)
        if work.time_up is not None:
            raise TimeUp(work.time_up)
        return [job.label for job, _ in work.failed]

    def _receive(self, ref: Any, work: "_Work", view: "_View") -> None:
        """Take the answer of a worker, or replace the worker if it was lost."""
        worker, job = work.busy.pop(ref) if ref in work.busy else (self._starting.pop(ref), None)
        try:
            kind, text = self._ray.get(ref)
        except self._ray.exceptions.RayActorError as error:
            if job is not None:
                self._starting.update([self._start()])
                if work.lost(job):
                    view.say(f"{job.label}: a worker was lost, another one continues")
            elif not (work.busy or self._starting or self._idle):
                reason = str(error).strip().splitlines()[-1]
                raise InputError(f"no worker can be started: {reason}") from error
            return
        self._idle.append(worker)
        if kind == "locked" and job is not None:
            work.put_off(job, text)
            return
        work.try_again()
        if kind == "time":
            work.time_up = text
        elif kind == "failed" and job is not None:
            work.failed.append((job, text))

    def _start(self) -> tuple[Any, Any]:
        """A reference that is done when the new worker is ready, and the worker."""
        worker = self._create(os.getcwd(), one_thread=self.device == "cpu")
        return worker.ready.remote(), worker


class _Work:
    """Jobs that wait, are being worked on, or have failed."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.busy: dict[Any, tuple[Any, Job]] = {}  # worker and job, by reference to the answer
        self.failed: list[tuple[Job, str]] = []
        self.time_up: str | None = None  # the message, when the time limit is reached
        self._waiting, self._losses = deque(jobs), dict.fromkeys(jobs, 0)
        self._put_off: list[Job] = []  # until another job ends

    @property
    def can_begin(self) -> bool:
        """Whether a job waits and there is time for it."""
        return bool(self._waiting) and self.time_up is None

    def begin(self, worker: Any) -> None:
        """Give the next job to a worker."""
        job = self._waiting.popleft()
        self.busy[worker.run.remote(job.prepare())] = worker, job

    def lost(self, job: Job) -> bool:
        """Note that a job has lost its worker; returns whether it is tried again."""
        self.try_again()
        self._losses[job] += 1
        again = self._losses[job] < _ATTEMPTS
        if again:
            self._waiting.appendleft(job)
        else:
            reason = f"lost {_ATTEMPTS} workers, perhaps for lack of memory"
            self.failed.append((job, reason))
        return again

    def put_off(self, job: Job, reason: str) -> None:
        """Try a job again when another one ends, which may be training a run that both need."""
        alone = not self.busy  # so a process outside this queue holds the run
        self._losses[job] += alone
        if self._losses[job] < _ATTEMPTS:
            self._put_off.append(job)
        else:
            self.failed.append((job, reason))
        if alone:
            self.try_again()

    def try_again(self) -> None:
        """Let the jobs that were put off wait for a worker."""
        self._waiting.extend(self._put_off)
        self._put_off.clear()


class _Worker:
    """A process that trains in the folder of the command, which all machines must have."""

    def __init__(self, folder: str, *, one_thread: bool) -> None:
        import torch

        os.chdir(folder)
        if one_thread:  # as in the processes of isda train --processes
            torch.set_num_threads(1)

    def ready(self) -> tuple[str, str]:
        return "ready", ""

    def run(self, work: Callable[[], None]) -> tuple[str, str]:
        """Do the work; returns errors as text, because not all of them can be pickled."""
        from isda.experiments.training.failures import reason_of

        try:
            work()
        except TimeUp as error:
            return "time", str(error)
        except RunLocked as error:
            return "locked", str(error)
        except InputError as error:
            return "failed", str(error)
        except Exception as error:
            return "failed", reason_of(error)
        return "done", ""


class _View:
    """Progress of all runs in one bar, from their records."""

    def __init__(self, jobs: Sequence[Job], workers: int) -> None:
        self._runs = dict.fromkeys(run for job in jobs for run in job.runs)
        self._open = dict.fromkeys(self._runs, 0)  # epochs so far of runs that are not finished
        self._done, self._workers = 0, workers
        interactive = sys.stderr.isatty()
        self._every, self._last = (0.0 if interactive else 30.0), -float("inf")
        self._bar = tqdm(
            total=sum(epochs for _, epochs in self._runs), unit="epoch", dynamic_ncols=interactive,
            mininterval=0.5 if interactive else 30,
        )  # fmt: skip

    def __enter__(self) -> "_View":
        return self

    def __exit__(self, *_: object) -> None:
        self.update(0, force=True)
        self._bar.close()

    def say(self, text: str) -> None:
        self._bar.write(f"isda: {text}", file=sys.stderr)

    def update(self, busy: int, *, force: bool = False) -> None:
        """Read the new lines of the metrics."""
        if not force and time.monotonic() - self._last < self._every:
            return
        self._last = time.monotonic()
        for folder, epochs in list(self._open):
            path = folder / "metrics.jsonl"
            lines = path.read_bytes().count(b"\n") if path.exists() else 0
            self._done += lines - self._open[folder, epochs]
            self._open[folder, epochs] = lines
            if lines >= epochs:
                del self._open[folder, epochs]
        words = f"{busy} of {self._workers} workers busy"
        if self._runs:
            finished = len(self._runs) - len(self._open)
            words += f", {finished} of {len(self._runs)} runs finished"
        self._bar.set_description(words)
        self._bar.update(self._done - self._bar.n)
