"""The time limit: what is left of it, and groups of runs that would not get through an epoch."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from isda.experiments.errors import InputError, TimeUp
from isda.experiments.recipes import get_recipe
from isda.experiments.records import Run
from isda.experiments.settings import Options
from isda.experiments.training import deadline, groups
from isda.experiments.training.deadline import Deadline, StartUp
from isda.experiments.training.loop import Plan, train
from isda.experiments.training.side_by_side import SideBySide

RECIPE = replace(get_recipe("digits-resnet8-ce"), epochs=2, batch_size=128, hold_out=1200)


@pytest.fixture(autouse=True)
def _first_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StartUp, "longest", 0.0)


def test_seconds_left() -> None:
    assert Deadline(Options()).seconds_left == math.inf
    assert 59 < Deadline(Options(minutes=1)).seconds_left <= 60
    limit = Deadline(Options(minutes=1))
    assert not limit.is_up(50)
    assert limit.is_up(61)


def test_number_that_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer runs start again, and their epochs take a little more than their share."""
    monkeypatch.setattr(deadline.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(StartUp, "longest", 20.0)
    limit = Deadline(Options(minutes=10))
    assert limit.number_that_finish(6, 7.0, 81) == 6  # 567 s and 5 % more
    assert limit.number_that_finish(6, 7.0, 82) == 5  # 603 s with six, 20 + 522 with five
    assert limit.number_that_finish(6, 7.0, 95) == 4  # 20 + 512
    assert limit.number_that_finish(6, 7.0, 236) == 1  # 20 + 578
    assert limit.number_that_finish(6, 7.0, 237) == 0
    assert Deadline(Options()).number_that_finish(6, 7.0, 10**6) == 6


class Clock:
    """A clock that every epoch advances by ten seconds for each run side by side."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.lanes: list[int] = []  # number of runs, by epoch
        epoch = SideBySide.train_epoch

        def train_epoch(runner: SideBySide) -> None:
            self.lanes.append(len(runner.lanes))
            self.now += 10 * len(runner.lanes)
            epoch(runner)

        monkeypatch.setattr(SideBySide, "train_epoch", train_epoch)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def numbers(folder: Path) -> list[tuple[float, ...]]:
    """Results of every epoch of a run."""
    return [tuple(line[key] for key in ("epoch", "train_loss", "test_error", "test_loss"))
            for line in Run(folder).metrics()]  # fmt: skip


def test_runs_that_cannot_finish_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(groups, "_side_by_side", lambda plans, *_: len(plans))
    clock = Clock(monkeypatch)
    recipe = replace(RECIPE, epochs=6)
    isda = replace(recipe, method="isda", lambda_0=0.5)
    plans = [Plan(name, one, seed) for seed in (0, 1) for name, one in (("ce", recipe),
             ("isda", isda))]  # fmt: skip
    options = Options(
        out=tmp_path / "limited", device="cpu", minutes=3.1, whole_runs=True, resume=True
    )
    late = r"time limit of 3.1 min too short for the others, 2 of 4 runs finished"
    with (
        pytest.warns(UserWarning, match="enough for 2 of 4 runs"),
        pytest.raises(TimeUp, match=late),
    ):
        train(plans, options)
    # after two epochs, 106 s are left for four more, which take 160 s with four runs
    assert clock.lanes == [4, 4, 2, 2, 2, 2]
    assert [len(numbers(tmp_path / "limited" / plan.name / str(plan.seed))) for plan in plans] == [
        6, 6, 2, 2
    ]  # fmt: skip
    train(plans, Options(out=tmp_path / "limited", device="cpu", resume=True))
    assert clock.lanes[6:] == [2, 2, 2, 2]
    train(plans, Options(out=tmp_path / "whole", device="cpu"))
    for plan in plans:
        run = Path(plan.name) / str(plan.seed)
        assert numbers(tmp_path / "limited" / run) == numbers(tmp_path / "whole" / run)


def test_other_runs_may_finish(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that cannot finish stops after its second epoch; what is like it does not start."""
    clock = Clock(monkeypatch)
    long = replace(RECIPE, epochs=50)
    plans = [Plan("long", long, 0), Plan("long", long, 1), Plan("short", RECIPE, 0)]
    options = Options(out=tmp_path, device="cpu", minutes=2, whole_runs=True)
    with (
        pytest.warns(UserWarning, match="enough for 0 of 1 runs"),
        pytest.raises(TimeUp, match="1 of 3 runs"),
    ):
        train(plans, options)
    assert clock.now == 40
    assert [len(numbers(tmp_path / plan.name / str(plan.seed))) for plan in plans] == [2, 0, 2]


def test_whole_runs_need_a_limit() -> None:
    with pytest.raises(InputError, match="whole_runs must be used with minutes, got True"):
        Options(whole_runs=True)


def test_start_up_is_what_the_first_epoch_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(deadline.time, "monotonic", lambda: now[0])
    for ends in ([70.0, 80.0, 120.0], [20.0, 30.0], [5.0]):  # 60 s more, 10 s more, unknown
        now[0] = 0.0
        start_up = StartUp()
        for now[0] in ends:
            start_up.epoch_done()
    assert StartUp.longest == 60


def test_no_group_is_started_that_would_end_after_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first group took 100 s to compile, and less than that is left for the second."""
    epochs: list[int] = []
    epoch = SideBySide.train_epoch
    offset = [0.0]
    clock = time.monotonic

    def slow_start(runner: SideBySide) -> None:
        offset[0] += 100 if not runner.lanes[0].epoch else 0
        epochs.append(runner.lanes[0].seed)
        epoch(runner)

    monkeypatch.setattr(SideBySide, "train_epoch", slow_start)
    plans = [Plan("any", RECIPE, seed) for seed in (0, 1)]
    options = Options(out=tmp_path, device="cpu", minutes=3, resume=True)
    monkeypatch.setattr(deadline.time, "monotonic", lambda: clock() + offset[0])
    with pytest.raises(TimeUp, match="1 of 2 runs finished"):
        train(plans, options)
    assert epochs == [0, 0]
    train(plans, replace(options))  # a new command
    assert epochs == [0, 0, 1, 1]
