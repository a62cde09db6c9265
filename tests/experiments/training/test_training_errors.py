"""Errors of a training: losses that are not finite, a full disk, wrong input."""

import errno
import itertools
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import training_runs
from training_runs import PLANS, RECIPE, assert_same_runs

from isda.experiments.errors import InputError, RunError
from isda.experiments.records import Run
from isda.experiments.settings import Options
from isda.experiments.training import run_folder
from isda.experiments.training.loop import Plan, train
from isda.experiments.training.run_folder import RunFolder

# fixtures
exact = training_runs.exact
options = training_runs.options
uninterrupted = training_runs.uninterrupted


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
        ({}, {"device": "cuda:256"}, "GPU 256 not found"),  # torch.device counts modulo 256
    ],
)
def test_an_input_error_leaves_no_folders(
    recipe: dict[str, Any], changes: dict[str, Any], message: str, options: Options
) -> None:
    """The corrected command then needs no --resume."""
    with pytest.raises(InputError, match=message):
        train([Plan("one", replace(RECIPE, **recipe), 0)], replace(options, **changes))
    assert not options.out.exists()
