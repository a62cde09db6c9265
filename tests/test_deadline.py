"""The time limit: what is left of it, and groups of runs that would not get through an epoch."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from isda.experiments.errors import TimeUp
from isda.experiments.recipes import get_recipe
from isda.experiments.settings import Options
from isda.experiments.training import deadline
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
