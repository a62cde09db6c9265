"""A queue: a text file with one command per line, trained in this order.

Every line starts with train, compare, search, calibrate or table; # starts a comment. Runs that
are finished, in the folder of the runs or in that of the records, are skipped, others are started
or resumed. So the command can be stopped or killed at any time and started again.
"""

import dataclasses
import shlex
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from isda.experiments.arguments import QueueArguments, SearchArguments, parse_recipe
from isda.experiments.auto import choose_lambda_0
from isda.experiments.calibrate import calibrate
from isda.experiments.calibration import load_calibration
from isda.experiments.cluster import Task, Workers
from isda.experiments.errors import InputError, TimeUp, unknown
from isda.experiments.plans import (
    AutoComparison,
    Calibrations,
    Planned,
    plan_calibrate,
    plan_command,
)
from isda.experiments.records import Run, load_runs, summary
from isda.experiments.search import search, search_table
from isda.experiments.settings import Options, Recipe
from isda.experiments.training import loop
from isda.experiments.training.device import join_processes
from isda.experiments.training.failures import finished_first
from isda.experiments.training.groups import MOST_SIDE_BY_SIDE, Plan, same_steps

__all__ = ["read_queue", "work_through"]

_COMMANDS = ("train", "compare", "search", "calibrate", "table")


@dataclass(frozen=True)
class _Search:
    """A search for λ₀ and how to run it."""

    given: SearchArguments
    start: Recipe
    name: str | None

    @property
    def options(self) -> Options:
        return self.given.options


@dataclass(frozen=True)
class _Line:
    """A command of a queue."""

    place: str
    """File and number of the line, for messages."""

    text: str
    """The command."""

    task: Planned | AutoComparison | Calibrations | _Search
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
    if given.engine == "ray":
        with Workers(given.address, given.options.device, given.options.processes) as workers:
            _spread(lines, given, workers)
        return
    failed = []
    for line in lines:
        options = _merged(given.options, line.task.options)
        try:
            _work(line, options, given.results)
        except TimeUp as error:
            limit = f"time limit of {given.options.minutes:g} min reached"
            raise TimeUp(f"{limit} in {line.place} ({line.text})") from error
        except InputError as error:
            print(f"isda: {line.place}: {error}", file=sys.stderr)
            failed.append(line.place)
    if failed:
        raise InputError(f"{len(failed)} of {len(lines)} lines failed: {', '.join(failed)}")


def _work(line: _Line, options: Options, results: Path) -> None:
    """Train what is missing of a line."""
    if isinstance(line.task, _Search):
        _search(line, line.task, options)
    elif isinstance(line.task, Calibrations):
        _calibrate(line, line.task, options, results)
    elif isinstance(line.task, AutoComparison):
        with join_processes(options.device):  # for both trainings
            planned, _ = choose_lambda_0(replace(line.task, options=options))
            _train(line, planned, options, results)
    else:
        _train(line, line.task, options, results)


def _spread(lines: list[_Line], given: QueueArguments, workers: Workers) -> None:
    """Train what is missing on all workers.

    First the runs of all lines, a run that two lines need once; then the lines that choose or fit
    something with their runs, each on one worker.
    """

    def options_of(line: _Line) -> Options:  # when a worker is free, with the time that is left
        merged = _merged(given.options, line.task.options)
        return replace(merged, device=workers.device, processes=1)

    def task(line: _Line, plans: list[Plan]) -> Task:
        out = options_of(line).out
        folders = tuple((out / plan.name / str(plan.seed), plan.recipe.epochs) for plan in plans)
        return Task(line.place, lambda: partial(_train_here, plans, options_of(line)), folders)

    def whole(line: _Line) -> Task:
        return Task(line.place, lambda: partial(_work_here, line, options_of(line), given.results))

    first, seen = [], set()
    for line in lines:
        if not isinstance(line.task, Planned):
            continue
        plans = line.task.plans()
        left = [plan for plan in plans
                if not _finished(plan, options_of(line).out, given.results)]  # fmt: skip
        done = len(plans) - len(left)
        print(f"{line.place}: {line.text}: {done} of {len(plans)} runs finished", flush=True)
        left = [plan for plan in left if (plan.name, plan.seed) not in seen]
        seen |= {(plan.name, plan.seed) for plan in left}
        while left:
            same = [plan for plan in left if same_steps(plan.recipe, left[0].recipe)]
            left = [plan for plan in left if plan not in same]
            width = -(-len(same) // workers.number)
            if workers.device == "cuda":
                width = min(width, options_of(line).side_by_side or MOST_SIDE_BY_SIDE)
            else:
                width = 1
            first += [task(line, same[n : n + width]) for n in range(0, len(same), width)]
    then = [whole(line) for line in lines if not isinstance(line.task, Planned)]
    failed = workers.run(first) if first else []
    failed += workers.run(then) if then else []
    for one in first:
        for folder, _ in one.runs:
            for run in load_runs(folder) if (folder / "config.json").exists() else ():
                if summary(run).finished:
                    print(f"{run.folder}: error {summary(run).error:.2f} %")
    for one, reason in failed:
        print(f"isda: {one.label}: {reason}", file=sys.stderr)
    if failed:
        places = list(dict.fromkeys(one.label for one, _ in failed))
        raise InputError(f"{len(places)} of {len(lines)} lines failed: {', '.join(places)}")


def _train_here(plans: list[Plan], options: Options) -> None:
    """Train runs side by side on a worker, whose clock is not that of the command."""
    loop.train(plans, replace(options), progress=False)


def _work_here(line: _Line, options: Options, results: Path) -> None:
    """Train what is missing of a line on a worker, whose clock is not that of the command."""
    _work(line, replace(options), results)


def _task(words: list[str]) -> Planned | AutoComparison | Calibrations | _Search:
    if words[0] not in _COMMANDS:
        raise unknown("command of a queue", words[0], _COMMANDS)
    try:
        if words[0] == "calibrate":
            return plan_calibrate(words[1:])
        if words[0] != "search":
            return plan_command(words)
        return _Search(*parse_recipe(SearchArguments, "search", words[1:], description=""))
    except SystemExit:
        raise InputError("--help does not go into a queue") from None


def _train(line: _Line, planned: Planned, options: Options, results: Path) -> None:
    plans = planned.plans()
    waiting = [plan for plan in plans if not _finished(plan, options.out, results)]
    done = len(plans) - len(waiting)
    print(f"{line.place}: {line.text}: {done} of {len(plans)} runs finished", flush=True)
    if not waiting:
        return
    with finished_first(loop.train, waiting, options) as runs:
        for run in runs:
            result = summary(run)
            print(f"{run.folder}: error {result.error:.2f} %, {result.seconds:.0f} s", flush=True)


def _search(line: _Line, task: _Search, options: Options) -> None:
    print(f"{line.place}: {line.text}", flush=True)
    given = task.given
    result = search(
        given.recipe,
        task.name,
        start=task.start,
        candidates=given.candidates,
        seeds=given.seeds,
        final_seeds=given.final_seeds,
        with_baseline=given.with_baseline,
        options=options,
    )
    if result is not None:
        print(f"{search_table(result)}\n{result.record}", flush=True)


def _calibrate(line: _Line, task: Calibrations, options: Options, results: Path) -> None:
    folders = options.out, results

    def waiting(plan: Plan) -> bool:
        return not any(map(load_calibration, _finished(plan, *folders)))

    print(f"{line.place}: {line.text}", flush=True)
    for run in calibrate(task, options, waiting=waiting):
        found = load_calibration(run)
        assert found is not None
        print(f"{run.folder}: temperature {found.temperature:.3f}", flush=True)


def _finished(plan: Plan, *folders: Path) -> list[Run]:
    """Finished runs of a plan in the folders, with the same recipe."""
    found: list[Run] = []
    for folder in folders:
        path = folder / plan.name / str(plan.seed)
        if (path / "config.json").exists():
            found += load_runs(path.parent)
    return [run for run in found if run.seed == plan.seed and summary(run).finished
            and run.recipe == plan.recipe]  # fmt: skip


def _merged(given: Options, line: Options) -> Options:
    """Options of a line, else those of the command; always resumes, with the time that is left."""
    changed = {
        field.name: getattr(line, field.name)
        for field in dataclasses.fields(Options)
        if getattr(line, field.name) != field.default
    }
    if given.minutes is None:
        return replace(given, **{**changed, "resume": True, "minutes": None})
    left = given.minutes - (time.monotonic() - given.started_at) / 60
    return replace(given, **{**changed, "resume": True, "minutes": max(left, 1e-9)})
