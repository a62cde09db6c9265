"""``isda queue``: train what a text file with one command per line needs, in this order.

Every line starts with train, compare, search, calibrate or table; # starts a comment. Runs that
are finished, in the folder of the runs or in that of the records, are skipped, others are started
or resumed. So the command can be stopped or killed at any time and started again.
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from isda.experiments.commands import calibrate, compare, search, table, train
from isda.experiments.commands.arguments import parse
from isda.experiments.commands.queue_forecast import Speeds, forecast, forecast_text
from isda.experiments.commands.queue_workers import Job, Workers
from isda.experiments.commands.task import PlannedRuns, Task
from isda.experiments.errors import InputError, TimeUp, unknown
from isda.experiments.generators.synthetic_images import require_generators
from isda.experiments.records import load_runs, summary
from isda.experiments.settings import Options
from isda.experiments.training import loop
from isda.experiments.training.groups import MOST_SIDE_BY_SIDE, Plan, same_steps
from isda.experiments.training.images import kept_images
from isda.experiments.training.start import records_of

__all__ = ["Queue", "read_queue", "run"]


@dataclass(frozen=True)
class Queue:
    """Arguments of ``isda queue``."""

    file: tyro.conf.Positional[Path]
    """Text file with one command per line: train, compare, search, calibrate or table."""

    results: Path = Path("results")
    """Folder of run records: runs that it has finished are skipped."""

    dry_run: bool = False
    """Print what is left to train and about how long it takes, and exit; with --minutes also what
    fits into them."""

    engine: Literal["local", "ray"] = "local"
    """local: in this process, line by line. ray: on all GPUs of a Ray cluster, one worker each, or
    in --processes workers on CPUs."""

    address: str | None = None
    """Address of a Ray cluster, such as auto or HOST:6379; None: an instance on this machine, with
    all its GPUs."""

    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)
    """How to run the training; options in a line take precedence. Runs are always resumed."""


@dataclass(frozen=True)
class _Line:
    """A command of a queue."""

    place: str
    """File and number of the line, for messages."""

    text: str
    """The command."""

    task: Task
    """What to train."""

    @property
    def title(self) -> str:
        """Place and command."""
        return f"{self.place}: {self.text}"


_TASKS: dict[str, Callable[[list[str]], Task]] = {
    "train": train.plan,
    "compare": compare.plan,
    "search": search.plan,
    "calibrate": calibrate.plan,
    "table": table.plan,
}
"""What a line trains, by its command."""


def run(words: list[str]) -> None:
    """Train what is missing, line by line; an error in a line does not stop the others.

    Raises:
        TimeUp: the time limit ended before the queue.
        InputError: lines that failed.
    """
    given = parse(Queue, "queue", words)
    if given.address is not None and given.engine != "ray":
        raise InputError("--address is that of a Ray cluster: use it with --engine ray")
    lines = read_queue(given.file, given.options)
    if given.dry_run:
        print(_forecast(lines, given))
        return
    if given.engine == "ray":
        with Workers(given.address, given.options.device, given.options.processes) as workers:
            failed = _spread(lines, given.results, workers)
    else:
        failed = _work_through(lines, given.results)
    if failed:
        places = list(dict.fromkeys(failed))
        raise InputError(f"{len(places)} of {len(lines)} lines failed: {', '.join(places)}")


def read_queue(path: Path, options: Options) -> list[_Line]:
    """Commands of a file.

    Args:
        path: text file.
        options: how to run the training; options in a line take precedence.

    Raises:
        InputError: a line is not a valid command; names the line.
    """
    lines = []
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} must be text in UTF-8: {error}") from error
    for number, text in enumerate(content.splitlines(), 1):
        place = f"{path}:{number}"
        try:
            words = shlex.split(text, comments=True)
            words = words[1:] if words[:1] == ["isda"] else words
            if words:
                lines.append(_Line(place, shlex.join(words), _task(words, options)))
        except ValueError as error:  # InputError, or a quote that is not closed
            raise InputError(f"{place}: {error}") from error
    return lines


def _task(words: list[str], options: Options) -> Task:
    """What a line trains; always resumes, in the time of the command."""
    command, *rest = words
    if command not in _TASKS:
        raise unknown("command of a queue", command, _TASKS)
    try:
        task = _TASKS[command](rest)
    except SystemExit:
        raise InputError("--help does not go into a queue") from None
    own = {
        option.name: getattr(task.options, option.name)
        for option in fields(Options)
        if getattr(task.options, option.name) != option.default
    }
    own |= {"resume": True, "minutes": options.minutes}
    return task.with_options(options.changed(**own))


def _work_through(lines: list[_Line], records: Path) -> list[str]:
    """Train in this process; returns the places of lines that failed."""
    failed = []
    with kept_images():  # lines with the same images load them once
        for line in lines:
            try:
                line.task.train_missing(line.title, records)
            except TimeUp as error:
                raise TimeUp(f"{line.place} ({line.text}): {error}") from error
            except InputError as error:
                print(f"isda: {line.place}: {error}", file=sys.stderr)
                failed.append(line.place)
    return failed


def _forecast(lines: list[_Line], given: Queue) -> str:
    """What is left to train, and which lines would fail, as text."""
    found, problems, seen = [], [], set[tuple[str, int]]()
    speeds = Speeds([given.results, given.options.out])
    for line in lines:
        options, plans = line.task.options, line.task.plans()
        folders = options.out, given.results
        found.append(forecast(line.place, line.text, plans, folders, speeds, seen))
        missing = [plan.recipe for plan in plans if not records_of(plan, *folders)]
        try:
            require_generators(missing, options)
        except InputError as error:
            problems.append(f"{line.place} will fail: {error}")
    return "\n".join([forecast_text(found, speeds.devices, given.options.minutes), *problems])


def _spread(lines: list[_Line], records: Path, workers: Workers) -> list[str]:
    """Train on all workers; returns the places of lines that failed.

    First the runs of all lines, a run that two lines need once; then the lines that choose or fit
    something with their runs, each on one worker.
    """
    runs, whole, seen = [], [], set[tuple[str, int]]()
    for line in lines:
        if isinstance(line.task, PlannedRuns):
            left = [plan for plan in line.task.missing(line.title, records)
                    if (plan.name, plan.seed) not in seen]  # fmt: skip
            seen |= {(plan.name, plan.seed) for plan in left}
            runs += [_job_of_runs(line, part, workers)
                     for part in _worker_groups(left, line.task.options, workers)]  # fmt: skip
        else:
            whole.append(_job_of_line(line, records, workers))
    failed = [*workers.run(runs), *workers.run(whole)]
    for folder in (folder for job in runs for folder, _ in job.runs):
        for one in load_runs(folder) if (folder / "config.json").exists() else ():
            if summary(one).finished:
                print(f"{one.folder}: error {summary(one).error:.2f} %")
    for job, reason in failed:
        print(f"isda: {job.label}: {reason}", file=sys.stderr)
    return [job.label for job, _ in failed]


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


def _job_of_runs(line: _Line, plans: Sequence[Plan], workers: Workers) -> Job:
    """The job to train runs of a line."""
    options = line.task.options
    folders = [options.out / plan.name / str(plan.seed) for plan in plans]
    epochs = [plan.recipe.epochs for plan in plans]
    return Job(
        line.place,
        lambda: partial(_train_here, plans, _worker_options(options, workers)),
        tuple(zip(folders, epochs, strict=True)),
    )


def _job_of_line(line: _Line, records: Path, workers: Workers) -> Job:
    """The job to train what is missing of a line."""
    options = partial(_worker_options, line.task.options, workers)
    return Job(
        line.place,
        lambda: partial(_work_here, line.task.with_options(options()), line.title, records),
    )


def _worker_options(options: Options, workers: Workers) -> Options:
    """Options on a worker, with the time that is left now."""
    return replace(options.with_minutes_left(), device=workers.device, processes=1)


def _train_here(plans: Sequence[Plan], options: Options) -> None:
    """Train runs side by side on a worker, whose clock is not that of the command."""
    loop.train(plans, replace(options), progress=False)


def _work_here(task: Task, title: str, records: Path) -> None:
    """Train what is missing of a line on a worker, whose clock is not that of the command."""
    task.with_options(replace(task.options)).train_missing(title, records)
