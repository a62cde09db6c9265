"""The time limit: what is left of it, and groups of runs that would not get through an epoch."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isda.experiments.errors import TimeUp
from isda.experiments.recipes import get_recipe
from isda.experiments.records import Run
from isda.experiments.settings import Options
from isda.experiments.training import deadline, groups, loop, run_folder
from isda.experiments.training.deadline import Deadline, StartUp
from isda.experiments.training.loop import Plan, train
from isda.experiments.training.side_by_side import SideBySide

RECIPE = replace(get_recipe("digits-resnet8-ce"), epochs=2, batch_size=128, hold_out=1200)


@pytest.fixture(autouse=True)
def _first_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StartUp, "longest", 0.0)


def test_seconds_left() -> None:
    assert Deadline(Options()).seconds_left == math.inf
    assert 50 < Deadline(Options(minutes=1)).seconds_left <= 60
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
    assert limit.number_that_finish(6, 7.0, 107) == 4  # 20 + 577
    assert limit.number_that_finish(6, 7.0, 107, together=2) == 4  # 14 + 20 + 566
    assert limit.number_that_finish(6, 7.0, 107, together=3) == 3  # 21 + 20 + 561 with four
    assert Deadline(Options()).number_that_finish(6, 7.0, 10**6) == 6


class Clock:
    """A clock that every epoch advances by ten seconds for each run side by side."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.slow = range(0)  # epochs that take 30 % longer
        self.lanes: list[int] = []  # number of runs, by epoch
        epoch = SideBySide.train_epoch

        def train_epoch(runner: SideBySide) -> None:
            self.now += (13 if len(self.lanes) in self.slow else 10) * len(runner.lanes)
            self.lanes.append(len(runner.lanes))
            epoch(runner)

        monkeypatch.setattr(SideBySide, "train_epoch", train_epoch)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def numbers(folder: Path) -> list[tuple[float, ...]]:
    """Results of every epoch of a run."""
    return [tuple(line[key] for key in ("epoch", "train_loss", "test_error", "test_loss"))
            for line in Run(folder).metrics()]  # fmt: skip


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """All runs side by side, as on a GPU."""
    monkeypatch.setattr(groups, "_side_by_side", lambda plans, *_: len(plans))
    return Clock(monkeypatch)


def four_plans(epochs: int) -> list[Plan]:
    recipe = replace(RECIPE, epochs=epochs)
    isda = replace(recipe, method="isda", lambda_0=0.5)
    return [Plan(name, one, seed) for seed in (0, 1)
            for name, one in (("ce", recipe), ("isda", isda))]  # fmt: skip


def epochs_of(plans: list[Plan], folder: Path) -> list[int]:
    return [len(numbers(folder / plan.name / str(plan.seed))) for plan in plans]


def test_some_runs_are_left_out_so_that_others_finish(side_by_side: Clock, tmp_path: Path) -> None:
    plans, folder = four_plans(6), tmp_path / "limited"
    options = Options(out=folder, device="cpu", minutes=3.1, whole_runs=True, resume=True)
    late = r"time limit of 3.1 min too short for the others, 2 of 4 runs finished"
    warned = pytest.warns(UserWarning, match="enough for 2 of 4 runs")
    with warned, pytest.raises(TimeUp, match=late):
        train(plans, options)
    # after two epochs, 106 s are left for four more, which take 160 s with four runs
    assert side_by_side.lanes == [4, 4, 2, 2, 2, 2]
    assert epochs_of(plans, folder) == [6, 6, 2, 2]
    train(plans, replace(options))  # repeated, it goes on with the others
    assert side_by_side.lanes[6:] == [2, 2, 2, 2]
    train(plans, Options(out=tmp_path / "whole", device="cpu"))
    for plan in plans:
        run = Path(plan.name) / str(plan.seed)
        assert numbers(folder / run) == numbers(tmp_path / "whole" / run)


def test_no_runs_are_left_out_because_the_first_epochs_are_slow(
    side_by_side: Clock, tmp_path: Path
) -> None:
    """Six ResNet-110 on an H200 once needed 8 to 12 s for each of the first 22 epochs, then 6.5."""
    side_by_side.slow = range(1, 4)
    plans = four_plans(20)
    # at the speed of the slow epochs, 14.5 min would not be enough
    train(plans, Options(out=tmp_path, device="cpu", minutes=14.5, whole_runs=True, resume=True))
    assert side_by_side.lanes == [4] * 20
    assert side_by_side.now == 17 * 40 + 3 * 52


def test_runs_are_left_out_before_it_is_too_late(side_by_side: Clock, tmp_path: Path) -> None:
    plans = four_plans(20)
    options = Options(out=tmp_path, device="cpu", minutes=11, whole_runs=True, resume=True)
    with pytest.warns(UserWarning, match="enough for 2 of 4"), pytest.raises(TimeUp):
        train(plans, options)
    # after nine epochs, 300 s are left, and two runs need 277 s; but after two more epochs of four
    # runs, 220 s would be left, and two runs would need 227 s
    assert side_by_side.lanes == [4] * 9 + [2] * 11
    assert epochs_of(plans, tmp_path) == [20, 20, 9, 9]


def test_runs_of_which_none_can_finish_go_on(side_by_side: Clock, tmp_path: Path) -> None:
    """They use the time and are continued by the next command, as without the option."""
    plans = four_plans(50)
    options = Options(out=tmp_path, device="cpu", minutes=3, whole_runs=True, resume=True)
    for done in (4, 8):
        with pytest.raises(TimeUp, match="time limit of 3 min reached, 0 of 4 runs finished"):
            train(plans, replace(options))
        assert epochs_of(plans, tmp_path) == [done] * 4


def test_runs_that_are_ahead_finish_first(side_by_side: Clock, tmp_path: Path) -> None:
    """Such as those that were left out at another epoch; otherwise they wait for the others."""
    plans = four_plans(6)
    for plan, minutes in zip(plans[:2], (0.8, 0.4), strict=True):
        with pytest.raises(TimeUp):
            train([plan], Options(out=tmp_path, device="cpu", minutes=minutes))
    assert epochs_of(plans[:2], tmp_path) == [4, 2]
    side_by_side.lanes.clear()
    options = Options(out=tmp_path, device="cpu", minutes=0.7, whole_runs=True, resume=True)
    with pytest.raises(TimeUp, match="1 of 4 runs finished"):
        train(plans, options)
    assert epochs_of(plans, tmp_path) == [6, 4, 0, 0]
    assert side_by_side.lanes == [1] * 4


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
    now = [0.0]

    def slow_start(runner: SideBySide) -> None:
        now[0] += 101 if not runner.lanes[0].epoch else 1
        epochs.append(runner.lanes[0].seed)
        epoch(runner)

    monkeypatch.setattr(SideBySide, "train_epoch", slow_start)
    monkeypatch.setattr(deadline.time, "monotonic", lambda: now[0])
    plans = [Plan("any", RECIPE, seed) for seed in (0, 1)]
    options = Options(out=tmp_path, device="cpu", minutes=3, resume=True)
    with pytest.raises(TimeUp, match="1 of 2 runs finished"):
        train(plans, options)
    assert epochs == [0, 0]
    train(plans, replace(options))  # a new command
    assert epochs == [0, 0, 1, 1]


def test_epochs_on_another_device_do_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first epoch took a thousand seconds elsewhere; it must not keep this command from it."""
    now, here = [0.0], ["slow"]
    epoch, described = SideBySide.train_epoch, loop.environment

    def slow(runner: SideBySide) -> None:
        now[0] += 1000 if here == ["slow"] else 1
        epoch(runner)

    def environment(device: torch.device | str) -> dict[str, object]:
        return described(device) | {"device": here[0]}

    monkeypatch.setattr(SideBySide, "train_epoch", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for module in (loop, run_folder):
        monkeypatch.setattr(module, "environment", environment)
    plans, options = [Plan("any", RECIPE, 0)], Options(out=tmp_path, device="cpu", resume=True)
    with pytest.raises(TimeUp, match="0 of 1 run finished"):
        train(plans, replace(options, minutes=15))
    assert epochs_of(plans, tmp_path) == [1]
    with pytest.raises(TimeUp, match="0 of 1 run finished"):
        train(plans, replace(options, minutes=15))  # not enough for such an epoch
    assert epochs_of(plans, tmp_path) == [1]
    here[0] = "fast"
    with pytest.warns(UserWarning, match="device"):
        train(plans, replace(options, minutes=15))
    assert epochs_of(plans, tmp_path) == [2]
