"""Resume: damaged and missing checkpoints, runs that lag behind, runs of another process."""

import multiprocessing
import shutil
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs
from programs import PATIENCE
from training_runs import PLANS, TIMES, assert_same_runs, start, train_until

from isda.experiments.errors import InputError
from isda.experiments.recipes import get_recipe
from isda.experiments.records import Run, export, summary
from isda.experiments.settings import Options
from isda.experiments.training import groups, locks, run_folder
from isda.experiments.training.loop import train
from isda.experiments.training.run_folder import RunFolder
from isda.experiments.training.step_cost import random_images
from isda.experiments.training.training_step import Lane

# fixtures
exact = training_runs.exact
options = training_runs.options
uninterrupted = training_runs.uninterrupted


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
    with locks.locked(folder.parent.parent, folder.parent.name, int(folder.name)):
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
