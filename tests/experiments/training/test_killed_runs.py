"""Killed at any time, stopped by the time limit: the resumed run ends with the same bits."""

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs
from programs import PATIENCE
from training_runs import PLANS, TIMES, assert_same_runs, start

from isda.experiments.errors import TimeUp
from isda.experiments.records import Run, summary
from isda.experiments.settings import Options
from isda.experiments.training import groups, loop
from isda.experiments.training.loop import train
from isda.experiments.training.run_folder import RunFolder
from isda.experiments.training.run_images import RunImages

# fixtures
exact = training_runs.exact
options = training_runs.options
uninterrupted = training_runs.uninterrupted

STEPS = 4  # in an epoch


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_step(number: int) -> None:
    """In the middle of an epoch, before the next step."""
    calls, batch_sizes = itertools.count(), RunImages.batch_sizes

    def counted(images: RunImages) -> Iterator[int]:
        for size in batch_sizes(images):
            if next(calls) == number:
                die()
            yield size

    RunImages.batch_sizes = counted


def die_before_saving(number: int) -> None:
    """The metrics of an epoch are written, but not its checkpoint."""
    calls, save = itertools.count(), RunFolder.save

    def counted(run: RunFolder, state: dict[str, Any], **options: bool) -> None:
        if next(calls) == number:
            die()
        save(run, state, **options)

    RunFolder.save = counted


def die_in_a_line(number: int) -> None:
    calls, append = itertools.count(), RunFolder.append

    def counted(run: RunFolder, metrics: dict[str, Any]) -> None:
        if next(calls) == number:
            with open(run.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(metrics)[:40])
                file.flush()
                die()
        append(run, metrics)

    RunFolder.append = counted


def die_in_a_checkpoint(number: int) -> None:
    """After half of the file is written."""
    calls, save = itertools.count(), torch.save

    def counted(state: dict[str, Any], file: Any) -> None:
        if next(calls) == number:
            file.write(b"PK\x03\x04" + bytes(1000))
            file.flush()
            die()
        save(state, file)

    torch.save = counted


def die_between_renames(number: int) -> None:
    """After the old checkpoint is moved, before the new one is in place."""
    calls, replace = itertools.count(), os.replace

    def counted(source: Path, to: Path) -> None:
        replace(source, to)
        if Path(to).name == "checkpoint.previous.pt" and next(calls) == number:
            die()

    os.replace = counted


def live_on(number: int) -> None:
    """Until killed from outside."""


def train_and_die(prepare: Callable[[int], None], number: int, options: Options) -> None:
    prepare(number)
    train(PLANS, options)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (die_in_step, 0),
        (die_in_step, STEPS + 2),
        (die_in_step, 4 * STEPS + 1),  # in the first epoch of the second seed
        (die_before_saving, 0),
        (die_before_saving, 5),
        (die_in_a_line, 2),
        (die_in_a_checkpoint, 1),
        (die_between_renames, 0),
    ],
)
def test_killed_and_resumed(
    moment: Callable[[int], None], number: int, options: Options, uninterrupted: list[Run]
) -> None:
    process = start(train_and_die, moment, number, options)
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    lost = (moment, number) == (die_before_saving, 0)
    warned = pytest.warns(UserWarning, match="one/0 has no checkpoint: the run starts again")
    with warned if lost else contextlib.nullcontext():
        resumed = train(PLANS, replace(options, resume=True))
    assert_same_runs(resumed, uninterrupted)


def test_killed_again_and_again_from_outside(options: Options, uninterrupted: list[Run]) -> None:
    """After every new line of metrics, a little later each time."""
    resuming = replace(options, resume=True)

    def lines() -> int:
        return sum(len(file.read_bytes()) for file in options.out.rglob("metrics.jsonl"))

    for number in range(4):
        before = lines()
        process = start(train_and_die, live_on, 0, resuming)
        deadline = time.monotonic() + PATIENCE
        while lines() <= before and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.013 * number)
        process.kill()
        process.join()
        assert process.exitcode in (-signal.SIGKILL, 0)
    assert_same_runs(train(PLANS, resuming), uninterrupted)


class Clock:
    """A clock that an epoch moves on by ten seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        train_epoch = loop.SideBySide.train_epoch

        def slow(runner: loop.SideBySide) -> None:
            train_epoch(runner)
            self.now += 10

        monkeypatch.setattr(loop.SideBySide, "train_epoch", slow)
        for name in ("monotonic", "perf_counter"):
            monkeypatch.setattr(time, name, lambda: self.now)


@pytest.mark.parametrize("width", [1, 2])
def test_stopped_by_the_time_limit_and_resumed(
    width: int, options: Options, uninterrupted: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """29 s are enough for two epochs of 10 s; the checkpoints are written although none is due."""
    monkeypatch.setattr(groups, "_side_by_side", lambda *_: width)
    clock = Clock(monkeypatch)

    def limited(seconds: float) -> Options:  # created at the call, so the time counts from now
        return replace(options, checkpoint_seconds=1e9, minutes=seconds / 60, resume=True)

    for done in ([2, 0], [4, 0]) if width == 1 else ([2, 2],):
        began = clock.now
        with pytest.raises(TimeUp, match=r"time limit of .* min reached, \d of 2 runs finished"):
            train(PLANS, limited(29))
        assert clock.now - began == 20
        runs = [RunFolder(options.out / "one" / str(seed)) for seed in (0, 1)]
        assert [summary(run).epochs for run in runs] == done
        assert [(run.load() or {"epoch": 0})["epoch"] for run in runs] == done
    with pytest.raises(TimeUp, match=r"\d of 2 runs"):  # less time than an epoch takes
        train(PLANS, limited(9.9))
    assert [summary(run).epochs for run in runs] == done
    options = replace(options, out=options.out.rename(options.out.with_name("moved")))
    assert {path.name for path in options.out.rglob("*.pt")} == {"checkpoint.pt"}  # one state
    resumed = train(PLANS, limited(40))  # exactly enough, and nothing is left to do
    assert_same_runs(resumed, uninterrupted, without=(*TIMES, "side_by_side"))
    assert train(PLANS, limited(1e-6))
