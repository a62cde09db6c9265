"""Runs in processes of their own equal runs in one, and end with the command."""

import contextlib
import multiprocessing
import time
from dataclasses import replace

import pytest
import training_runs
from programs import PATIENCE
from training_runs import FEW, assert_same_runs, checkpoint

from isda.experiments.errors import InputError, TimeUp
from isda.experiments.settings import Options
from isda.experiments.training.locks import locked
from isda.experiments.training.loop import Plan, train

# fixtures
exact, options = training_runs.exact, training_runs.options


def test_runs_in_processes_equal_runs_in_one(
    options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every seed draws its own images; stopped by the time limit at first."""
    plans = [Plan("few", FEW, seed) for seed in (3, 4, 5)]
    expected = train(plans, replace(options, device="cpu", out=options.out / "one"))
    options = replace(options, device="cpu", processes=2, out=options.out / "many")
    with pytest.raises(TimeUp, match=r"time limit of .* min reached, 0 of \d runs? finished"):
        train(plans, replace(options, minutes=1e-6))
    capsys.readouterr()
    found = train(plans, replace(options, resume=True), progress=False)
    assert capsys.readouterr().err == ""
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
