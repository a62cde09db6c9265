"""What the tests of the training loop share: recipe, runs, and their comparison bit by bit."""

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import process_settings  # noqa: F401 - for the processes that are started here
import pytest
import torch
from forks import START_METHOD
from torch import Tensor

from isda.experiments.records import Run
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.loop import Plan, train
from isda.experiments.training.training_step import Lane

__all__ = [
    "FEW",
    "PLANS",
    "RECIPE",
    "TIMES",
    "Crash",
    "assert_same_bits",
    "assert_same_runs",
    "checkpoint",
    "exact",
    "options",
    "records",
    "start",
    "train_until",
    "uninterrupted",
]

RECIPE = Recipe(  # 238 images: batches of 64, 64, 64 and 46
    data="digits", network="resnet8", augment=("crop", "flip", "cutout"), epochs=4, batch_size=64,
    learning_rate=0.05, weight_decay=5e-4, lambda_0=1.0, ramp="step", drop_rate=0.2, ema=0.9,
    hold_out=1200,
)  # fmt: skip
FEW = replace(RECIPE, images_per_class=7, hold_out=0, batch_size=35, epochs=2)
PLANS = [Plan("one", RECIPE, 0), Plan("one", RECIPE, 1)]
TIMES = ("seconds", "images_per_second", "peak_mib")


@pytest.fixture(scope="module")
def exact(device: torch.device) -> Options:
    """Deterministic kernels, and one run at a time on a GPU, as on a CPU."""
    return Options(device=device.type, deterministic=True, side_by_side=1)


@pytest.fixture
def options(exact: Options, tmp_path: Path) -> Options:
    return replace(exact, out=tmp_path / "runs", checkpoint_seconds=0)


@pytest.fixture(scope="module")
def uninterrupted(exact: Options, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return train(PLANS, replace(exact, out=tmp_path_factory.mktemp("uninterrupted")))


def records(run: Run, *, without: tuple[str, ...] = TIMES) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in without} for line in run.metrics()]


def checkpoint(run: Run) -> dict[str, Any]:
    return torch.load(run.folder / "checkpoint.pt", weights_only=True, map_location="cpu")


def assert_same_bits(one: object, other: object) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_same_bits(a, b)
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def assert_same_runs(
    found: list[Run], expected: list[Run], *, without: tuple[str, ...] = TIMES
) -> None:
    for run, other in zip(found, expected, strict=True):
        assert records(run, without=without) == records(other, without=without)
        assert_same_bits(checkpoint(run), checkpoint(other))


class Crash(BaseException):
    """Kill this process in a way that no code can catch."""


def train_until(plans: list[Plan], options: Options, epochs: int) -> None:
    """Train and stop at the beginning of an epoch."""
    begin = Lane.begin_epoch

    def begin_epoch(lane: Lane) -> None:
        if lane.epoch == epochs:
            raise Crash
        begin(lane)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "begin_epoch", begin_epoch)
        with pytest.raises(Crash):
            train(plans, options)


def start(target: Callable[..., None], *arguments: object) -> Any:
    process = multiprocessing.get_context(START_METHOD).Process(target=target, args=arguments)
    process.start()
    return process
