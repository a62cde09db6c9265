"""``isda queue``: train the runs that the commands in a text file need, line by line.

Runs that are finished, in the folder of the runs or of the records, are skipped; others are started
or resumed. The command can therefore be stopped or killed at any time and started again.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from isda.experiments.commands.arguments import parse
from isda.experiments.commands.queue_forecast import forecast_text
from isda.experiments.commands.queue_lines import Line, read_queue
from isda.experiments.commands.queue_workers import Job, Workers
from isda.experiments.commands.task import PlannedRuns, Task, result_line
from isda.experiments.errors import InputError, TimeUp
from isda.experiments.records import load_runs, summary
from isda.experiments.settings import Options
from isda.experiments.training import loop
from isda.experiments.training.device import join_processes
from isda.experiments.training.failures import reason_of
from isda.experiments.training.groups import MOST_SIDE_BY_SIDE, Plan, same_steps
from isda.experiments.training.images import kept_images

__all__ = ["Queue", "run"]


@dataclass(frozen=True)
class Queue:
    """Arguments of ``isda queue``."""

    file: tyro.conf.Positional[Path]
    """Text file with one command per line: train, compare, search, calibrate or table."""

    results: Path = Path("results")
    """Folder of run records; runs that are finished there are skipped."""

    dry_run: bool = False
    """Print what is left to train and an estimate of the time, then exit; with --minutes, also
    print what fits into the limit."""

    engine: Literal["local", "ray"] = "local"
    """local: train in this process, line by line. ray: train on all GPUs of a Ray cluster, with one
    worker per GPU, or with --processes workers on CPUs."""

    address: str | None = None
    """Address of a Ray cluster, such as auto or HOST:6379; None: start Ray on this machine, with
    all its GPUs."""

    options: Annotated[Options, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Options(resume=True)
    )
    """How to run the training; options in a line take precedence."""


def run(words: list[str]) -> None:
    """Train what is missing, line by line; an error in a line does not stop the others.

    Raises:
        TimeUp: the time limit was reached before the end of the queue.
        InputError: some lines failed.
    """
    given = parse(Queue, "queue", words)
    if not given.options.resume:
        raise InputError("a queue always resumes its runs: remove --no-resume, or change --out")
    if given.address is not None and given.engine != "ray":
        raise InputError("--address is the address of a Ray cluster: add --engine ray")
    lines = read_queue(given.file, given.options)
    if given.dry_run:
        print(forecast_text(lines, given.results, given.options))
        return
    if given.engine == "ray":
        with Workers(given.address, given.options.device, given.options.processes) as workers:
            failed = _spread(lines, given.results, workers)
    else:
        failed = _work_through(lines, given.results, given.options.device)
    if failed:
        places = list(dict.fromkeys(failed))
        raise InputError(f"{len(places)} of {len(lines)} lines failed: {', '.join(places)}")


def _work_through(lines: list[Line], records: Path, device: str) -> list[str]:
    """Train in this process; returns the places of lines that failed."""
    failed = []
    # lines with the same images load them once; under torchrun, all lines share a process group,
    # because ranks may not find each other in a second one
    with kept_images(), join_processes(device) as (_, _, world):
        for line in lines:
            try:
                line.task.train_missing(line.title, records)
            except TimeUp as error:
                raise TimeUp(f"{line.place} ({line.text}): {error}") from error
            except InputError as error:
                reason = str(error)
            except BrokenPipeError:  # nobody reads the output any more
                raise
            except Exception as error:  # of this line, such as an error in a network of your own
                if world > 1:
                    raise  # the other ranks wait for this one
                reason = reason_of(error)
            else:
                continue
            print(f"isda: {line.place}: {reason}", file=sys.stderr)
            failed.append(line.place)
    return failed


def _spread(lines: list[Line], records: Path, workers: Workers) -> list[str]:
    """Train on all workers; returns the places of lines that failed.

    The runs of all lines are trained first, each only once even if several lines need it. Then the
    lines that choose or fit something with their runs are executed, each on one worker.
    """
    runs, whole, seen = [], [], set[tuple[Path, Plan]]()
    for line in lines:
        if isinstance(line.task, PlannedRuns):
            options, out = line.task.options, line.task.options.out.resolve()
            missing = line.task.missing(line.title, records)
            left = [plan for plan in missing if (out, plan) not in seen]
            seen |= {(out, plan) for plan in left}
            runs += [_job_of_runs(line, part, workers)
                     for part in _worker_groups(left, options, workers)]  # fmt: skip
        else:
            whole.append(_job_of_line(line, records, workers))
    failed = [*workers.run(runs), *workers.run(whole)]
    folders = [folder for job in runs for folder, _ in job.runs if folder.is_dir()]
    for one in (run for folder in folders for run in load_runs(folder)):
        if summary(one).finished:
            print(result_line(one))
    return failed


def _worker_groups(
    plans: list[Plan], options: Options, workers: Workers
) -> Iterator[Sequence[Plan]]:
    """Runs that a worker trains together: equal shares, on a GPU not more than fit side by side."""
    while plans:
        same = [plan for plan in plans if same_steps(plan.recipe, plans[0].recipe)]
        plans = [plan for plan in plans if plan not in same]
        width = 1
        if workers.device == "cuda":
            share = -(-len(same) // workers.number)
            width = min(share, options.side_by_side or MOST_SIDE_BY_SIDE)
        yield from (same[start : start + width] for start in range(0, len(same), width))


def _job_of_runs(line: Line, plans: Sequence[Plan], workers: Workers) -> Job:
    """The job to train some runs of a line."""
    options = line.task.options
    folders = [plan.folder(options.out) for plan in plans]
    epochs = [plan.recipe.epochs for plan in plans]
    return Job(
        line.place,
        lambda: partial(_train_here, plans, _worker_options(options, workers)),
        tuple(zip(folders, epochs, strict=True)),
    )


def _job_of_line(line: Line, records: Path, workers: Workers) -> Job:
    """The job to train what a line still needs."""
    options = partial(_worker_options, line.task.options, workers)
    return Job(
        line.place,
        lambda: partial(_work_here, line.task.with_options(options()), line.title, records),
    )


def _worker_options(options: Options, workers: Workers) -> Options:
    """Options for a worker, limited to the time that is left now."""
    return replace(options.with_minutes_left(), device=workers.device, processes=1)


def _train_here(plans: Sequence[Plan], options: Options) -> None:
    """Train runs side by side on a worker, whose clock may differ from that of the command."""
    loop.train(plans, replace(options), progress=False)


def _work_here(task: Task, title: str, records: Path) -> None:
    """Train what a line still needs on a worker, whose clock may differ from the command's."""
    task.with_options(replace(task.options)).train_missing(title, records)
