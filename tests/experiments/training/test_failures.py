"""Runs that fail while others go on, and commands that are interrupted."""

import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import PATIENCE, on_two
from test_train_distributed import command_as_rank

from isda.experiments.cli import main
from isda.experiments.errors import RunsFailed, WriteError
from isda.experiments.records import Run, load_runs, summary
from isda.experiments.settings import Options, Recipe
from isda.experiments.training import groups, loop, run_folder
from isda.experiments.training.loop import Plan, train
from isda.experiments.training.progress import show_epochs
from isda.experiments.training.training_step import Lane

RECIPE = Recipe(
    data="digits", network="resnet8", epochs=3, batch_size=128, learning_rate=0.05,
    weight_decay=5e-4, hold_out=1200, method="ce",
)  # fmt: skip
WILD = replace(RECIPE, learning_rate=1e12)
TIMES = ("seconds", "images_per_second", "side_by_side", "peak_mib")


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(out=tmp_path / "runs", device="cpu", checkpoint_seconds=0)


def plans(*recipes: Recipe) -> list[Plan]:
    return [Plan("run", recipe, seed) for seed, recipe in enumerate(recipes)]


def records(run: Run) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in run.metrics()]


def failure(plans: Sequence[Plan], options: Options) -> RunsFailed:
    with pytest.raises(RunsFailed) as caught:
        train(plans, options)
    return caught.value


# One of several runs


@pytest.mark.parametrize("width", [1, 3])
def test_a_run_that_diverges_leaves_the_others_alone(
    width: int, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, and side by side."""
    monkeypatch.setattr(groups, "_side_by_side", lambda *_: width)
    with pytest.warns(UserWarning, match=r"run/1, epoch 1.*; the other runs continue"):
        failed = failure(plans(RECIPE, WILD, RECIPE), options)
    first, second = str(failed).splitlines()
    assert first == "1 of 3 runs failed:"
    assert second.startswith(f"  {options.out / 'run' / '1'}, epoch 1: the training loss is ")
    assert "(learning rate 1e+12, lambda_0 0)" in second
    assert [run.seed for run in failed.runs] == [0, 2]
    for run in failed.runs:
        assert summary(run).finished
        (alone,) = train([Plan("alone", RECIPE, run.seed)], options)
        assert records(run) == records(alone)


def test_a_run_that_diverges_later_keeps_its_last_good_checkpoint(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The strength is 0 in the first epoch and far too large later."""
    isda = replace(RECIPE, method="isda", lambda_0=1.0)
    monkeypatch.setattr(groups, "_side_by_side", lambda *_: 1)
    with pytest.warns(UserWarning, match="the other runs continue"):
        failed = failure(plans(replace(isda, lambda_0=1e38), isda), options)
    assert re.search(
        r"run/0, epoch 2: .*lambda_0 1e\+38\); the last checkpoint is intact", str(failed)
    )
    assert [run.seed for run in failed.runs] == [1]
    state = loop.RunFolder(options.out / "run" / "0").load()
    assert state is not None
    assert state["epoch"] == 1


def test_the_progress_bar_names_the_methods(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(groups, "_side_by_side", lambda *_: 3)
    isda = replace(RECIPE, method="isda", lambda_0=1.0)
    train([Plan("ce", RECIPE, 0), Plan("ce", RECIPE, 1), Plan("isda", isda, 0)], options)
    assert "digits resnet8, ce seed 0 1, isda seed 0:" in capsys.readouterr().err


def test_the_progress_bar_has_a_note_until_the_first_epoch_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    epochs = show_epochs(0, 2, "label", note="compiling")
    assert next(epochs) == 0
    assert "0/2" in capsys.readouterr().err.split("compiling")[0]
    assert list(epochs) == [1]
    after = capsys.readouterr().err
    assert "2/2" in after
    assert "compiling" not in after


def test_the_remaining_time_does_not_include_the_first_epoch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    epochs = show_epochs(10, 20, "label", note="compiling")
    for seconds in (1000, 60, 60, 60):  # the first one compiles
        next(epochs)
        now += seconds
    next(epochs)
    assert "14/20 [03:00<06:00" in capsys.readouterr().err


def test_an_error_of_another_kind(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = Lane.begin_epoch

    def begin_epoch(lane: Lane) -> None:
        if lane.seed == 0:
            raise TypeError("no such thing\nas this")
        begin(lane)

    monkeypatch.setattr(Lane, "begin_epoch", begin_epoch)
    with pytest.warns(
        UserWarning, match="run/0: TypeError: no such thing; the other runs continue"
    ):
        failed = failure(plans(RECIPE, RECIPE), options)
    assert [run.seed for run in failed.runs] == [1]
    assert "begin_epoch" in capsys.readouterr().err  # the traceback
    with pytest.raises(TypeError):  # alone: nothing else to go on with
        train([Plan("alone", RECIPE, 0)], options)


def test_a_damaged_checkpoint_leaves_the_others_alone(options: Options) -> None:
    for run in train(plans(RECIPE, RECIPE), options):
        if run.seed == 0:
            (run.folder / "checkpoint.pt").write_bytes(b"no checkpoint")
            for path in run.folder.glob("metrics.jsonl"):
                path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.warns(UserWarning, match="checkpoint.pt is damaged"):
        failed = failure(plans(RECIPE, RECIPE), replace(options, resume=True))
    assert [run.seed for run in failed.runs] == [1]


def test_a_full_disk_stops_all_runs(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_folder.torch, "save", full)
    with pytest.raises(WriteError, match="No space left on device"):
        train(plans(RECIPE, RECIPE), options)
    assert not (options.out / "run" / "1" / "metrics.jsonl").exists()


def test_in_processes(options: Options) -> None:
    with pytest.warns(UserWarning, match="run/1, epoch 1"):
        failed = failure(plans(RECIPE, WILD, RECIPE), replace(options, processes=2))
    assert [run.seed for run in failed.runs] == [0, 2]
    assert "1 of 3 runs failed" in str(failed)


def test_interrupted_while_the_processes_start(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run does not know: it is ended and not waited for."""
    submit, calls = ProcessPoolExecutor.submit, itertools.count()

    def interrupted(pool: ProcessPoolExecutor, *work: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return submit(pool, *work)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", interrupted)
    long = replace(RECIPE, epochs=200)
    with pytest.raises(KeyboardInterrupt):
        train(plans(long, long), replace(options, processes=2))
    lines = [line for file in options.out.rglob("metrics.jsonl") for line in file.open()]
    assert len(lines) < 200


# Out of memory


def memory_for(number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU with memory for some runs; returns how many were tried at a time."""
    monkeypatch.setattr(groups, "_side_by_side", lambda *_: 5)
    train_epoch, tried = loop.SideBySide.train_epoch, []

    def limited(runner: loop.SideBySide) -> None:
        tried.append(len(runner.lanes))
        if len(runner.lanes) > number and runner.lanes[0].epoch == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        train_epoch(runner)

    monkeypatch.setattr(loop.SideBySide, "train_epoch", limited)
    return tried


def test_out_of_memory_halves_the_runs_side_by_side(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = memory_for(2, monkeypatch)
    with pytest.warns(UserWarning, match="side by side") as warned:
        runs = train(plans(*[RECIPE] * 5), options)
    assert [str(one.message) for one in warned] == [
        "out of memory with 5 runs side by side: continuing with 2; --side-by-side 2 does so from "
        "the start"
    ]
    assert tried == [5, 5, 2, 2, 2, 2, 1, 1]  # from the checkpoint of the first epoch
    assert [run.seed for run in runs] == [0, 1, 2, 3, 4]
    (alone,) = train([Plan("alone", RECIPE, 3)], options)
    assert records(runs[3]) == records(alone)


def test_out_of_memory_again_is_a_failure(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_for(1, monkeypatch)
    with pytest.warns(UserWarning, match="side by side|side-by-side"):
        failed = failure(plans(*[RECIPE] * 5), options)
    assert str(failed).count("out of memory: use --side-by-side 1") == 4
    assert [run.seed for run in failed.runs] == [4]
    memory_for(0, monkeypatch)
    message = str(failure([Plan("alone", RECIPE, 0)], options))
    assert message.endswith("out of memory: use a smaller --batch-size, or --precision bf16")


# The command


def test_compare_shows_the_finished_pairs_and_fails(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finite = loop.why_diverged

    def not_finite(lane: Lane, result: list[float]) -> str | None:
        broken = lane.recipe.method == "isda" and lane.seed == 1 and lane.epoch == 1
        return "the test loss is nan" if broken else finite(lane, result)

    monkeypatch.setattr(loop, "why_diverged", not_finite)
    words = ["compare", "--epochs", "2", "--batch-size", "128", "--hold-out", "1200"]
    words += ["--seeds", "0", "1", "2", "--out", str(options.out), "--device", "cpu"]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "2 paired seeds; without 1, missing on one side" in printed.out
    assert "isda: 1 of 6 runs failed:\n" in printed.err
    assert re.search(r"isda\S+/1, epoch 2: the test loss is nan \(.*lambda_0 0.5\)", printed.err)
    assert "Traceback" not in printed.err
    assert list(options.out.glob("*.html"))


@pytest.mark.ddp
@pytest.mark.parametrize("damage", ["checkpoint", "disk"])
def test_errors_of_rank_0_stop_both_ranks(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "--epochs", "2", "--batch-size", "481", "--device", "cpu"]
    words += ["--out", str(tmp_path / "runs")]
    if damage == "checkpoint":
        assert main(words) == 0
        (run,) = load_runs(tmp_path / "runs")
        (run.folder / "checkpoint.pt").write_bytes(b"no checkpoint")
        words.append("--resume")
        expected = "checkpoint.pt is damaged"
    else:

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(run_folder.torch, "save", full)  # inherited by a fork
        expected = "No space left on device"
    # torchrun kills all ranks when one fails: rank 1 must not fail before rank 0 has said why
    assert on_two(command_as_rank, words, tmp_path) == [2, 0]
    first, second = ((tmp_path / f"stderr{rank}").read_text() for rank in range(2))
    assert [expected in line for line in first.splitlines() if line.startswith("isda: ")] == [True]
    assert "Traceback" not in first
    assert second == ""


TELLING = """
import runpy
import signal

handle = signal.signal

def handle_and_tell(*arguments):
    signal.signal = handle
    handle(*arguments)
    print(flush=True)

signal.signal = handle_and_tell
runpy.run_module("isda_command", {}, "__main__", True)
"""
"""Prints an empty line when the command has set its first signal handler, that of Ctrl-C."""


def start(words: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """What ``python -m isda_command`` does, from when it handles Ctrl-C."""
    command = subprocess.Popen(
        [sys.executable, "-c", TELLING, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert command.stdout is not None
    command.stdout.readline()
    return command


@pytest.mark.parametrize(
    ("processes", "seconds"),
    [("1", 0.2), ("1", 0.7), ("1", 1.5), ("1", 4.0), ("2", 3.0), ("2", 5.0)],
)
def test_interrupted_at_any_time(processes: str, seconds: float, tmp_path: Path) -> None:
    """Ctrl-C goes to all processes of the terminal: no traceback, whatever is being imported."""
    words = ["compare", "--device", "cpu", "--processes", processes, "--epochs", "1000"]
    command = start(words, tmp_path)
    time.sleep(seconds)
    os.killpg(command.pid, signal.SIGINT)
    _, printed = command.communicate(timeout=PATIENCE)
    assert command.returncode == 130
    assert "Traceback" not in printed
    assert "isda: interrupted" in printed


def test_help_into_a_closed_pipe() -> None:
    """As by ``isda --help | true``."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "isda_command", "--help"]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=PATIENCE
    )
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""
