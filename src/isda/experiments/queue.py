"""A queue: a text file with one command per line, trained in this order.

Every line starts with train, compare, search, calibrate or table; # starts a comment. Runs that
are finished, in the folder of the runs or in that of the records, are skipped, others are started
or resumed. So the command can be stopped or killed at any time and started again.
"""

import dataclasses
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from isda.experiments.arguments import QueueArguments
from isda.experiments.auto import choose_lambda_0
from isda.experiments.calibrate import calibrate
from isda.experiments.calibration import load_calibration
from isda.experiments.cluster import Task, Workers
from isda.experiments.errors import InputError, TimeUp
from isda.experiments.forecast import Speeds, expected_plans, forecast, forecast_text
from isda.experiments.generators.synthetic_images import require_generators
from isda.experiments.plans import (
    AutoComparison,
    Calibrations,
    Command,
    Planned,
    Search,
    plan_command,
)
from isda.experiments.records import load_runs, summary
from isda.experiments.report.text import show
from isda.experiments.search import search, search_table
from isda.experiments.settings import Options
from isda.experiments.training import loop
from isda.experiments.training.device import join_processes
from isda.experiments.training.failures import finished_first
from isda.experiments.training.groups import MOST_SIDE_BY_SIDE, Plan, same_steps
from isda.experiments.training.images import kept_images
from isda.experiments.training.start import records_of

__all__ = ["read_queue", "work_through"]


@dataclass(frozen=True)
class _Line:
    """A command of a queue."""

    place: str
    """File and number of the line, for messages."""

    text: str
    """The command."""

    task: Command
    """What to train."""


def read_queue(path: Path) -> list[_Line]:
    """Commands of a file.

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
                lines.append(_Line(place, shlex.join(words), _task(words)))
        except ValueError as error:  # InputError, or a quote that is not closed
            raise InputError(f"{place}: {error}") from error
    return lines


def work_through(given: QueueArguments) -> None:
    """Train what is missing, line by line; an error in a line does not stop the others.

    Raises:
        TimeUp: the time limit ended before the queue.
        InputError: lines that failed.
    """
    if given.address is not None and given.engine != "ray":
        raise InputError("--address is that of a Ray cluster: use it with --engine ray")
    lines = read_queue(given.file)
    if given.dry_run:
        print(_forecast(lines, given))
        return
    if given.engine == "ray":
        with Workers(given.address, given.options.device, given.options.processes) as workers:
            _spread(lines, given, workers)
        return
    failed = []
    with kept_images():  # lines with the same images load them once
        for line in lines:
            options = _merged(given.options, line.task.options)
            try:
                _work(line, options, given.results)
            except TimeUp as error:
                raise TimeUp(f"{line.place} ({line.text}): {error}") from error
            except InputError as error:
                print(f"isda: {line.place}: {error}", file=sys.stderr)
                failed.append(line.place)
    _raise_failed(failed, lines)


def _raise_failed(places: list[str], lines: list[_Line]) -> None:
    """Raise InputError if lines have failed."""
    places = list(dict.fromkeys(places))
    if places:
        raise InputError(f"{len(places)} of {len(lines)} lines failed: {', '.join(places)}")


def _work(line: _Line, options: Options, results: Path) -> None:
    """Train what is missing of a line."""
    if isinstance(line.task, Search):
        _search(line, line.task, options, results)
    elif isinstance(line.task, Calibrations):
        _calibrate(line, line.task, options, results)
    elif isinstance(line.task, AutoComparison):
        with join_processes(options.device):  # for both trainings
            task = replace(line.task, options=options)
            planned, _ = choose_lambda_0(task, records=results)
            _train(line, planned, options, results)
    else:
        _train(line, line.task, options, results)


def _forecast(lines: list[_Line], given: QueueArguments) -> str:
    """What is left to train, and which lines would fail, as text."""
    found, problems, seen = [], [], set[tuple[str, int]]()
    speeds = Speeds([given.results, given.options.out])
    for line in lines:
        options = _merged(given.options, line.task.options)
        folders = options.out, given.results
        plans = expected_plans(line.task, options)
        found.append(forecast(line.place, line.text, plans, folders, speeds, seen))
        missing = [plan.recipe for plan in plans if not records_of(plan, *folders)]
        try:
            require_generators(missing, options)
        except InputError as error:
            problems.append(f"{line.place} will fail: {error}")
    return "\n".join([forecast_text(found, speeds.devices, given.options.minutes), *problems])


def _spread(lines: list[_Line], given: QueueArguments, workers: Workers) -> None:
    """Train what is missing on all workers.

    First the runs of all lines, a run that two lines need once; then the lines that choose or fit
    something with their runs, each on one worker.
    """
    runs, seen = [], set[tuple[str, int]]()
    for line in lines:
        if isinstance(line.task, Planned):
            options = _worker_options(line, given, workers)
            left = _left(line, line.task, options.out, given.results)
            left = [plan for plan in left if (plan.name, plan.seed) not in seen]
            seen |= {(plan.name, plan.seed) for plan in left}
            runs += [_group_task(line, part, given, workers)
                     for part in _worker_groups(left, options, workers)]  # fmt: skip
    whole = [_line_task(line, given, workers) for line in lines
             if not isinstance(line.task, Planned)]  # fmt: skip
    failed = [*workers.run(runs), *workers.run(whole)]
    for folder in (folder for task in runs for folder, _ in task.runs):
        for run in load_runs(folder) if (folder / "config.json").exists() else ():
            if summary(run).finished:
                print(f"{run.folder}: error {summary(run).error:.2f} %")
    for task, reason in failed:
        print(f"isda: {task.label}: {reason}", file=sys.stderr)
    _raise_failed([task.label for task, _ in failed], lines)


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


def _group_task(
    line: _Line, plans: Sequence[Plan], given: QueueArguments, workers: Workers
) -> Task:
    """The task to train runs of a line."""
    options = partial(_worker_options, line, given, workers)
    folders = [options().out / plan.name / str(plan.seed) for plan in plans]
    epochs = [plan.recipe.epochs for plan in plans]
    return Task(
        line.place,
        lambda: partial(_train_here, plans, options()),
        tuple(zip(folders, epochs, strict=True)),
    )


def _line_task(line: _Line, given: QueueArguments, workers: Workers) -> Task:
    """The task to train what is missing of a line."""
    options = partial(_worker_options, line, given, workers)
    return Task(line.place, lambda: partial(_work_here, line, options(), given.results))


def _worker_options(line: _Line, given: QueueArguments, workers: Workers) -> Options:
    """Options of a line on a worker, with the time that is left now."""
    options = _merged(given.options, line.task.options).with_minutes_left()
    return replace(options, device=workers.device, processes=1)


def _train_here(plans: Sequence[Plan], options: Options) -> None:
    """Train runs side by side on a worker, whose clock is not that of the command."""
    loop.train(plans, replace(options), progress=False)


def _work_here(line: _Line, options: Options, results: Path) -> None:
    """Train what is missing of a line on a worker, whose clock is not that of the command."""
    _work(line, replace(options), results)


def _task(words: list[str]) -> Command:
    try:
        return plan_command(words)
    except SystemExit:
        raise InputError("--help does not go into a queue") from None


def _train(line: _Line, planned: Planned, options: Options, results: Path) -> None:
    waiting = _left(line, planned, options.out, results)
    if not waiting:
        return
    with finished_first(loop.train, waiting, options) as runs:
        for run in runs:
            result = summary(run)
            print(f"{run.folder}: error {result.error:.2f} %, {result.seconds:.0f} s", flush=True)


def _left(line: _Line, planned: Planned, *folders: Path) -> list[Plan]:
    """The runs of a line that are not finished; prints how many are."""
    plans = planned.plans()
    left = [plan for plan in plans if not records_of(plan, *folders)]
    done = len(plans) - len(left)
    print(f"{line.place}: {line.text}: {done} of {len(plans)} runs finished", flush=True)
    return left


def _search(line: _Line, task: Search, options: Options, results: Path) -> None:
    print(f"{line.place}: {line.text}", flush=True)
    result = search(**task.arguments(), options=options, records=results)
    if result is not None:
        show(f"{search_table(result)}\n{result.record}")


def _calibrate(line: _Line, task: Calibrations, options: Options, results: Path) -> None:
    folders = options.out, results

    def waiting(plan: Plan) -> bool:
        return not any(map(load_calibration, records_of(plan, *folders)))

    print(f"{line.place}: {line.text}", flush=True)
    for run in calibrate(task, options, waiting=waiting):
        found = load_calibration(run)
        assert found is not None
        print(f"{run.folder}: temperature {found.temperature:.3f}", flush=True)


def _merged(given: Options, line: Options) -> Options:
    """Options of a line, else those of the command; always resumes, in the time of the command."""
    changed = {
        field.name: getattr(line, field.name)
        for field in dataclasses.fields(Options)
        if getattr(line, field.name) != field.default
    }
    return given.changed(**{**changed, "resume": True, "minutes": given.minutes})
