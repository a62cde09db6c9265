"""Two processes that train a run together give the result of one process.

Each has half of every batch, 240 or 241 images; the last batch of the 1438 digits is smaller. The
processes run on CPUs with gloo.
"""

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import PATIENCE, on_two

from isda.experiments.cli import main
from isda.experiments.recipes import RECIPES
from isda.experiments.records import load_runs
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.loop import Plan, train
from isda.experiments.training.run_folder import RunFolder
from isda.experiments.training.training_step import Lane

pytestmark = pytest.mark.ddp

WORLD = 2
RECIPE = Recipe(
    data="digits", network="resnet8", epochs=3, batch_size=481, learning_rate=0.02,
    weight_decay=5e-4, lambda_0=2.0,
)  # fmt: skip
# Two processes sum gradients and batch norm moments in a different order. The rounding error of
# float32, 1e-7 per step, becomes 1e-6 of the loss after nine steps. Without the images of the other
# process in batch norm, gradient or statistics, the difference is at least 1e-3.
CLOSE = 2e-5


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(out=tmp_path / "runs", device="cpu", checkpoint_seconds=0)


def train_as_rank(rank: int, plans: list[Plan], options: Options, until: int | None) -> None:
    begin = Lane.begin_epoch

    def begin_epoch(lane: Lane) -> None:
        if lane.epoch == until:
            sys.exit(0)
        begin(lane)

    Lane.begin_epoch = begin_epoch  # this process is used for nothing else
    runs = train(plans, options)
    assert len(runs) == (len(plans) if rank == 0 else 0)  # rank 0 writes


def command_as_rank(rank: int, words: list[str], folder: Path) -> None:
    with open(folder / f"stderr{rank}", "w") as file, contextlib.redirect_stderr(file):
        code = main(words)
    sys.exit(code)


def train_on_two(
    plans: list[Plan], options: Options, *, until: int | None = None
) -> list[RunFolder]:
    """Train on two processes, which stop at the beginning of epoch ``until``."""
    assert on_two(train_as_rank, plans, options, until) == [0] * WORLD
    return [RunFolder(options.out / plan.name / str(plan.seed)) for plan in plans]


def checkpoint(run: RunFolder) -> dict[str, Any]:
    state = run.load()
    assert state is not None
    return state


def assert_close_runs(one: RunFolder, other: RunFolder, *, close: float = CLOSE) -> None:
    assert len(one.metrics()) == len(other.metrics()) == one.recipe.epochs
    number = 359  # test images
    for line, expected in zip(one.metrics(), other.metrics(), strict=True):
        for key in ("epoch", "learning_rate", "strength"):
            assert line[key] == expected[key]
        assert line["train_loss"] == pytest.approx(expected["train_loss"], rel=close)
        assert line["test_loss"] == pytest.approx(expected["test_loss"], rel=10 * close)
        # one or two images at the boundary of classes or bins
        assert line["test_error"] == pytest.approx(expected["test_error"], abs=250 / number)
        assert line["test_ece"] == pytest.approx(expected["test_ece"], abs=10 * close + 2 / number)
    states = [checkpoint(run)["network"] for run in (one, other)]
    for key, value in states[1].items():
        # small weights have large relative errors
        torch.testing.assert_close(states[0][key], value, rtol=0, atol=10 * close, msg=key)


@pytest.mark.parametrize("method", ["ce", "isda"])
def test_two_processes_equal_one(method: str, options: Options) -> None:
    recipe = RECIPE if method == "isda" else RECIPE.baseline()
    # torch's batch norm is less accurate with channels_last on a CPU, ours for two processes is not
    (two,) = train_on_two([Plan("two", replace(recipe, channels_last=True), 0)], options)
    (one,) = train([Plan("one", recipe, 0)], options)
    assert_close_runs(two, one)
    assert two.metrics()[-1]["train_loss"] < two.metrics()[0]["train_loss"]
    if method == "isda":
        counts = [checkpoint(run)["criterion"]["estimator.count"] for run in (one, two)]
        assert torch.equal(*counts)  # every image once per epoch, on one of the processes
        assert int(counts[0].sum()) == 3 * 1438


@pytest.mark.parametrize("method", ["ce", "isda"])
def test_a_process_without_images(method: str, options: Options) -> None:
    """With batches of 479 the last one has a single image."""
    recipe = replace(RECIPE, batch_size=479, learning_rate=0.005, epochs=2)
    plans = [Plan("two", recipe if method == "isda" else recipe.baseline(), 0)]
    (two,) = train_on_two(plans, options)
    (one,) = train([replace(plans[0], name="one")], options)
    assert_close_runs(two, one)


def test_random_numbers_are_those_of_one_process(options: Options) -> None:
    """Crop, flip and dropout of an image do not depend on the process it is on."""
    recipe = replace(
        RECIPE, augment=("crop", "flip"), drop_rate=0.2, ema=0.5, ramp="step", epochs=2
    )
    plans = [Plan("two", recipe, 3)]
    (two,) = train_on_two(plans, options)
    (one,) = train([replace(plans[0], name="one")], options)
    assert_close_runs(two, one)


@pytest.mark.parametrize(
    ("network", "precision", "close"),
    [
        ("resnet8", "bf16", 0.02),  # bfloat16 has 8 bits: a rounding error is 4e-3
        ("timm:test_efficientnet", "fp32", CLOSE),  # batch norm with an activation
    ],
)
def test_batch_norm_of_other_kinds(
    network: str, precision: str, close: float, options: Options
) -> None:
    recipe = replace(RECIPE, network=network, precision=precision, epochs=1, learning_rate=1e-3)
    plans = [Plan("two", recipe, 0)]
    (two,) = train_on_two(plans, options)
    (one,) = train([replace(plans[0], name="one")], options)
    assert_close_runs(two, one, close=close)


def test_resume_on_two_processes(options: Options) -> None:
    """Stopped after an epoch, two processes resume to the same numbers."""
    plans = [Plan("resumed", RECIPE, 0)]
    (begun,) = train_on_two(plans, options, until=1)
    assert len(begun.metrics()) == 1
    (resumed,) = train_on_two(plans, replace(options, resume=True))
    (whole,) = train_on_two([replace(plans[0], name="whole")], options)
    for line, expected in zip(resumed.metrics(), whole.metrics(), strict=True):
        for key in ("train_loss", "test_error", "test_loss", "test_ece"):
            assert line[key] == expected[key]
    for key, value in checkpoint(whole)["network"].items():
        assert torch.equal(checkpoint(resumed)["network"][key], value), key


PROGRAM = """
import os, sys
from pathlib import Path
from isda.experiments.cli import main

code = main(sys.argv[2:])
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
Path(sys.argv[1], "threads" + os.environ["RANK"]).write_text("".join(names))
sys.exit(code)
"""


def test_torchrun(tmp_path: Path) -> None:
    """The command line under torchrun, both methods: one table, and the runs of one process."""
    words = ["compare", "--epochs", "2", "--batch-size", "481", "--learning-rate", "0.02"]
    words += ["--seeds", "0", "--device", "cpu", "--out", str(tmp_path / "two")]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # the address, because the name of the machine may not be known to itself
    command += ["--standalone", "--local-addr", "127.0.0.1", str(program), str(tmp_path), *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    # threads of a process group that was not freed can abort a process at its exit
    names = [(tmp_path / f"threads{rank}").read_text() for rank in range(WORLD)]
    assert all("python" in text and "gloo" not in text for text in names)
    warned = [line for line in result.stderr.splitlines() if "Warning" in line]
    assert not [line for line in warned if "resolve hostname" not in line]  # gloo, in a container
    assert result.stdout.count("test error, %") == 1
    recipe = replace(RECIPES["digits-resnet8-isda"], epochs=2, batch_size=481, learning_rate=0.02)
    two = [RunFolder(run.folder) for run in load_runs(tmp_path / "two")]
    plans = [Plan(recipe.method, recipe, 0) for recipe in (recipe.baseline(), recipe)]
    one = train(plans, Options(out=tmp_path / "one", device="cpu"))
    assert [run.recipe.method for run in two] == ["ce", "isda"]
    for run, other in zip(two, one, strict=True):
        assert run.recipe == other.recipe
        assert_close_runs(run, other)

    # once more, both processes stop because of the run that only rank 0 sees; rank 0 says so and
    # fails, and torchrun with it
    assert on_two(command_as_rank, words, tmp_path) == [2, 0]
    first, second = ((tmp_path / f"stderr{rank}").read_text() for rank in range(WORLD))
    assert "already holds a run: use --resume" in first
    assert second == ""
