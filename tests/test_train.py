"""The training loop: exact resume after a kill, and error messages."""

import contextlib
import errno
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import conftest  # noqa: F401 - its settings also hold in the processes that are started here
import pytest
import torch
from forks import START_METHOD
from programs import PATIENCE
from torch import Tensor
from torch.nn import functional as F

from isda.experiments.data.arrays import ImageArrays, load_data, normalize
from isda.experiments.errors import InputError, RunError, TimeUp
from isda.experiments.networks import create_network
from isda.experiments.recipes import get_recipe
from isda.experiments.records import Run, export, summary
from isda.experiments.settings import Options, Recipe
from isda.experiments.training import groups, loop, run_folder
from isda.experiments.training.loop import Plan, train
from isda.experiments.training.run_folder import RunFolder, locked
from isda.experiments.training.run_images import RunImages
from isda.experiments.training.step_cost import random_images
from isda.experiments.training.training_step import Lane

RECIPE = Recipe(  # 238 images: batches of 64, 64, 64 and 46
    data="digits", network="resnet8", augment=("crop", "flip", "cutout"), epochs=4, batch_size=64,
    learning_rate=0.05, weight_decay=5e-4, lambda_0=1.0, ramp="step", drop_rate=0.2, ema=0.9,
    hold_out=1200,
)  # fmt: skip
STEPS = 4  # in an epoch
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


# Killed at any time


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


def start(target: Callable[..., None], *arguments: object) -> Any:
    process = multiprocessing.get_context(START_METHOD).Process(target=target, args=arguments)
    process.start()
    return process


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


@pytest.mark.parametrize("method", ["ce", "isda"])
def test_a_checkpoint_is_no_larger_than_the_state(method: str, tmp_path: Path) -> None:
    """ResNet-110: weights and momentum, 4 bytes each, running means and variances, statistics."""
    recipe = get_recipe(f"cifar100-resnet110-{method}")
    cpu = torch.device("cpu")
    data = random_images(2, num_classes=100, shape=(3, 32, 32), device=cpu)
    lane = Lane(recipe, 0, data, cpu)
    run = RunFolder.create(tmp_path, "size", recipe, 0)
    run.save(lane.state_dict(), last=True)
    parameters = sum(parameter.numel() for parameter in lane.parameters)
    statistics = 4 * 100 * 64 * (64 + 1) if method == "isda" else 0
    size = (run.folder / "checkpoint.pt").stat().st_size
    assert size == pytest.approx(2 * 4 * parameters + statistics, rel=0.025)


FEW = replace(RECIPE, images_per_class=7, hold_out=0, batch_size=35, epochs=2)


def test_runs_in_processes_equal_runs_in_one(options: Options) -> None:
    """Every seed draws its own images; stopped by the time limit at first."""
    plans = [Plan("few", FEW, seed) for seed in (3, 4, 5)]
    expected = train(plans, replace(options, device="cpu", out=options.out / "one"))
    options = replace(options, device="cpu", processes=2, out=options.out / "many")
    with pytest.raises(TimeUp, match=r"time limit of .* min reached, 0 of \d runs? finished"):
        train(plans, replace(options, minutes=1e-6))
    found = train(plans, replace(options, resume=True))
    assert_same_runs(found, expected)
    assert [run.seed for run in found] == [3, 4, 5]
    assert checkpoint(found[0])["data"] == [70, 1797 - 70, 10]
    with pytest.raises(InputError, match="already holds a run"):
        train(plans, options)
    wrong = [replace(plan, name="wrong", recipe=replace(FEW, network="resnet9")) for plan in plans]
    with pytest.raises(InputError, match="unknown network 'resnet9'"):
        train(wrong, options)


def leave_processes(options: Options) -> None:
    train([Plan("long", replace(FEW, epochs=10_000), seed) for seed in (0, 1)], options)


def test_processes_end_with_the_command(options: Options) -> None:
    options = replace(options, device="cpu", processes=2)
    process = multiprocessing.get_context("spawn").Process(target=leave_processes, args=(options,))
    process.start()
    folders = [options.out / "long" / str(seed) for seed in (0, 1)]
    deadline = time.monotonic() + PATIENCE
    while not all((folder / "checkpoint.pt").exists() for folder in folders):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.join()
    for seed in (0, 1):
        while True:  # until the lock is free
            with contextlib.suppress(InputError), locked(options.out, "long", seed):
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_images_drawn_by_the_seed_are_held_out_first(options: Options) -> None:
    (run,) = train([Plan("held", replace(FEW, hold_out=100, epochs=1), 0)], options)
    assert checkpoint(run)["data"] == [70, 100, 10]


def test_runs_that_lag_behind_catch_up(
    options: Options, uninterrupted: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between the checkpoints of runs side by side."""
    monkeypatch.setattr(groups, "_side_by_side", lambda *_: 3)
    train_until(PLANS[:1], options, 3)
    train_until(PLANS[1:], options, 1)
    resumed = train(PLANS, replace(options, resume=True))
    assert_same_runs(resumed, uninterrupted, without=(*TIMES, "side_by_side"))
    together = [[line["side_by_side"] for line in run.metrics()] for run in resumed]
    assert together == [[1, 1, 1, 2], [1, 1, 1, 2]]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    options: Options, uninterrupted: list[Run]
) -> None:
    train_until(PLANS[:1], options, 3)
    path = options.out / "one" / "0" / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="checkpoint.pt is damaged.*checkpoint.previous.pt"):
        resumed = train(PLANS[:1], replace(options, resume=True))
    assert_same_runs(resumed, uninterrupted[:1])


@pytest.mark.parametrize("content", [{"a": 1}, [1], "another shape"])
def test_a_checkpoint_of_another_kind_is_damaged_too(
    content: object, options: Options, uninterrupted: list[Run]
) -> None:
    train_until(PLANS[:1], options, 3)
    path = options.out / "one" / "0" / "checkpoint.pt"
    if isinstance(content, str):
        content = torch.load(path, weights_only=True)
        assert isinstance(content, dict)
        name = next(reversed(content["network"]))
        content["network"][name] = torch.zeros(3, 3, 3)
    torch.save(content, path)
    with pytest.warns(UserWarning, match="checkpoint.pt is damaged.*checkpoint.previous.pt"):
        resumed = train(PLANS[:1], replace(options, resume=True))
    assert_same_runs(resumed, uninterrupted[:1])


def hold(folder: Path, ready: Any) -> None:
    with run_folder.locked(folder.parent.parent, folder.parent.name, int(folder.name)):
        ready.set()
        time.sleep(PATIENCE)


def test_a_run_that_another_process_trains(options: Options, uninterrupted: list[Run]) -> None:
    train_until(PLANS[:1], options, 2)
    folder = options.out / "one" / "0"
    files = {path: path.read_bytes() for path in folder.iterdir()}
    ready = multiprocessing.get_context("spawn").Event()  # that any process can take
    process = start(hold, folder, ready)
    assert ready.wait(PATIENCE)
    everything = sorted(options.out.rglob("*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "environment", lambda device: {"commit": "another"})
        for plans in (PLANS[:1], PLANS[::-1]):  # of the second, only the later run is locked
            with pytest.raises(InputError, match="one/0 is being trained by another process"):
                train(plans, replace(options, resume=True))
    process.kill()
    process.join()
    assert {path: path.read_bytes() for path in files} == files
    assert sorted(options.out.rglob("*")) == everything
    assert_same_runs(train(PLANS[:1], replace(options, resume=True)), uninterrupted[:1])


def test_resume_of_a_finished_run_changes_nothing(
    options: Options, uninterrupted: list[Run]
) -> None:
    shutil.copytree(uninterrupted[0].folder.parent, options.out / "one")
    files = sorted(path for path in options.out.rglob("*") if path.is_file())
    before = [path.read_bytes() for path in files]
    runs = train(PLANS, replace(options, resume=True))
    assert [path.read_bytes() for path in files] == before
    assert sorted(path for path in options.out.rglob("*") if path.is_file()) == files
    assert all(summary(run).finished for run in runs)


def test_resume_without_a_checkpoint(
    options: Options, uninterrupted: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exported record is finished; an unfinished run starts again with a warning."""
    for run in uninterrupted:
        export(run, options.out)
    files = sorted(path for path in options.out.rglob("*") if path.is_file())
    before = [path.read_bytes() for path in files]
    monkeypatch.setattr(run_folder, "environment", lambda device: {"commit": "another"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs = train(PLANS, replace(options, resume=True))
    assert [path.read_bytes() for path in files] == before
    monkeypatch.undo()
    cut = runs[1].folder / "metrics.jsonl"
    cut.write_text("".join(cut.read_text().splitlines(keepends=True)[:2]))
    with pytest.warns(UserWarning, match="one/1 has no checkpoint: the run starts again"):
        runs = train(PLANS, replace(options, resume=True))
    assert_same_runs(runs[1:], uninterrupted[1:])


def test_the_epochs_of_a_run(uninterrupted: list[Run]) -> None:
    """The metrics contain learning rate and strength of the epoch."""
    for run in uninterrupted:
        lines = run.metrics()
        assert [line["epoch"] for line in lines] == [0, 1, 2, 3]
        rates = [0.5 * 0.05 * (1 + math.cos(math.pi * epoch / 4)) for epoch in range(4)]
        assert [line["learning_rate"] for line in lines] == pytest.approx(rates)
        assert [line["strength"] for line in lines] == pytest.approx([0, 0.25, 0.5, 0.75])
        for line in lines:
            assert line["images_per_second"] == pytest.approx(238 / line["seconds"])
            assert 0 < line["seconds"] < 60
    one, other = (records(run) for run in uninterrupted)
    assert one != other
    assert (uninterrupted[0].seed, uninterrupted[1].seed) == (0, 1)


def test_runs_come_back_in_the_order_of_the_plans(options: Options) -> None:
    brief = replace(RECIPE, epochs=1)
    plans = [
        Plan("a", brief, 1),
        Plan("b", replace(brief, hold_out=1300), 0),  # other data in between
        Plan("a", brief, 0),
    ]
    runs = train(plans, options)
    assert [(run.name, run.seed) for run in runs] == [("a", 1), ("b", 0), ("a", 0)]
    # a run is the same alone and side by side
    (alone,) = train(plans[2:], replace(options, out=options.out / "alone"))
    assert_same_runs([runs[2]], [alone], without=(*TIMES, "side_by_side"))


def test_hold_out_trains_on_the_rest_and_evaluates_what_is_held_out(options: Options) -> None:
    recipe = replace(RECIPE, epochs=2, hold_out=1100, augment=(), ema=0.0, drop_rate=0.0)
    (run,) = train([Plan("held", recipe, 0)], options)
    state = checkpoint(run)
    digits = load_data("digits")
    assert isinstance(digits, ImageArrays)
    network = create_network("resnet8", num_classes=10, in_channels=1)
    network.load_state_dict(state["network"])
    network.eval()

    def error_and_loss(images: Tensor, target: Tensor) -> tuple[float, float]:
        with torch.no_grad():
            logits = network(normalize(images, digits.mean, digits.std))
        wrong = (logits.argmax(1) != target).double().mean().item()
        return 100 * wrong, F.cross_entropy(logits, target).item()

    held = digits.hold_out(1100)
    everything = {image.numpy().tobytes() for image in digits.train_images}
    assert all(image.numpy().tobytes() in everything for image in held.test_images)
    line = run.metrics()[-1]
    error, loss = error_and_loss(held.test_images, held.test_target)
    # the same sums with another batch size
    assert line["test_loss"] == pytest.approx(loss, rel=1e-3)
    assert line["test_error"] == pytest.approx(error, abs=100 / 1100 * 1.01)
    assert line["test_loss"] != pytest.approx(
        error_and_loss(digits.test_images, digits.test_target)[1], rel=1e-3
    )
    count = held.train_target.bincount(minlength=10)
    assert torch.equal(state["criterion"]["estimator.count"], 2 * count)


# Errors


def test_a_loss_that_is_not_finite_ends_the_run(options: Options) -> None:
    """The strength is 0 in the first epoch and far too large later."""
    recipe = replace(RECIPE, lambda_0=1e38, ramp="epoch")
    with pytest.raises(RunError) as caught:
        train([Plan("wild", recipe, 0)], options)
    message = str(caught.value)
    assert message.startswith(f"{options.out / 'wild' / '0'}, epoch 2: ")
    assert "lambda_0 1e+38" in message
    assert message.endswith("the last checkpoint is intact")
    assert "\n" not in message
    run = RunFolder(options.out / "wild" / "0")
    assert [line["epoch"] for line in run.metrics()] == [0]
    state = run.load()
    assert state is not None
    assert state["epoch"] == 1
    assert all(value.isfinite().all() for value in state["network"].values())


def test_no_checkpoint_is_promised_that_was_not_written(options: Options) -> None:
    """The first checkpoint is due after a while, later than the first epoch."""
    recipe = replace(RECIPE, lambda_0=1e38, ramp="epoch")
    with pytest.raises(RunError, match=r"epoch 2: .*; there is no checkpoint$"):
        train([Plan("wild", recipe, 0)], replace(options, checkpoint_seconds=600))


@pytest.mark.parametrize("method", ["ce", "isda"])
def test_a_learning_rate_that_is_too_large_is_named(method: str, options: Options) -> None:
    recipe = replace(RECIPE, learning_rate=1e12)
    recipe = recipe if method == "isda" else recipe.baseline()
    with pytest.raises(RunError, match=r"epoch 1: .*learning rate 1e\+12"):
        train([Plan("wild", recipe, 0)], options)
    run = RunFolder(options.out / "wild" / "0")
    assert run.load() is None
    assert run.metrics() == []


def test_a_network_that_the_last_step_of_an_epoch_spoils(options: Options) -> None:
    """The training loss is still finite, because it is computed before the step."""
    recipe = replace(RECIPE, batch_size=2000, learning_rate=1e30, epochs=1, ema=0.0).baseline()
    with pytest.raises(
        RunError, match=r"epoch 1: the test loss is (nan|inf).*there is no checkpoint"
    ):
        train([Plan("spoilt", recipe, 0)], options)
    run = RunFolder(options.out / "spoilt" / "0")
    assert run.metrics() == []
    assert run.load() is None


@pytest.mark.parametrize("writes", [4, 5])
def test_a_full_disk(
    writes: int, options: Options, uninterrupted: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full after the configuration, or after the metrics or checkpoint of an epoch."""
    calls = itertools.count()

    def fsync(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode) and next(calls) == writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.os, "fsync", fsync)
        with pytest.raises(RunError, match="No space left on device; earlier files are intact"):
            train(PLANS[:1], options)
    resumed = train(PLANS[:1], replace(options, resume=True))
    assert_same_runs(resumed, uninterrupted[:1])


def test_an_existing_run_is_not_overwritten(options: Options, uninterrupted: list[Run]) -> None:
    shutil.copytree(uninterrupted[0].folder.parent, options.out / "one")
    with pytest.raises(InputError, match="already holds a run: use --resume"):
        train(PLANS, options)
    other = Plan("one", replace(RECIPE, lambda_0=0.25), 0)
    with pytest.raises(
        InputError, match=r"started with a different recipe \(lambda_0 1.0 → 0.25\)"
    ):
        train([other], replace(options, resume=True))
    assert_same_runs([RunFolder(options.out / "one" / "0")], uninterrupted[:1], without=())


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ({"data": "digitz"}, {}, "unknown data set 'digitz'; did you mean digits"),
        ({"data": "cifar10"}, {"data_root": Path("nowhere")}, "cifar10 not found: neither nowhere"),
        ({"network": "resnet33"}, {}, "unknown network 'resnet33'; did you mean resnet32"),
        ({"hold_out": 1438}, {}, "must be between 1 and 1437, got 1438"),
        ({"network": "resnet50", "drop_rate": 0.0}, {}, "in_channels of resnet50 must be 3"),
        ({}, {"side_by_side": -1}, "side_by_side must be >= 0, got -1"),
        ({}, {"device": "tpu"}, "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ({}, {"device": "meta"}, "device must be auto, cpu, cuda or cuda:N, got 'meta'"),
        ({}, {"device": "cuda:99"}, "GPU 99 not found"),
    ],
)
def test_an_input_error_leaves_no_folders(
    recipe: dict[str, Any], changes: dict[str, Any], message: str, options: Options
) -> None:
    """The corrected command then needs no --resume."""
    with pytest.raises(InputError, match=message):
        train([Plan("one", replace(RECIPE, **recipe), 0)], replace(options, **changes))
    assert not options.out.exists()


def test_auto_is_a_gpu_if_there_is_one(options: Options) -> None:
    recipe = replace(RECIPE, epochs=1)
    (run,) = train([Plan("one", recipe, 0)], replace(options, device="auto"))
    assert (run.environments[0]["cuda"] is not None) == torch.cuda.is_available()


def test_tensorboard(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(options, tensorboard=True)
    plans = [Plan("one", replace(RECIPE, epochs=2), 0)]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match="--tensorboard needs the package tensorboard"):
        train(plans, options)
    assert not options.out.exists()

    written: list[tuple[object, ...]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            written.append((folder, purge_step))

        def add_scalar(self, *scalar: object) -> None:
            written.append(scalar)

        def close(self) -> None:
            written.append(("closed",))

    module = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    (run,) = train(plans, options)
    assert written[0] == (str(run.folder), 0)
    assert written[-1] == ("closed",)
    expected = [(k, v, line["epoch"]) for line in run.metrics() for k, v in line.items()]
    assert written[1:-1] == expected
    written.clear()
    again = replace(options, out=options.out / "again")
    train_until(plans, again, 1)
    train(plans, replace(again, resume=True))
    assert [entry[1] for entry in written if len(entry) == 2] == [0, 1]
