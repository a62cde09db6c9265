"""Records of finished runs: their summary, and their export, complete or absent."""

import errno
import itertools
import os
import re

import numpy as np
import pytest
import run_folders
from run_folders import RECIPE, Crash, line, state

from isda.experiments.errors import InputError, RunError
from isda.experiments.records import export, load_runs, summary
from isda.experiments.training.run_folder import RunFolder

finished, run = run_folders.finished, run_folders.run  # fixtures


def test_summary(run):
    assert summary(run).error is None
    errors = [50.0, 40.0, *np.linspace(9.0, 8.0, 10)]
    for epoch, error in enumerate(errors[:5]):
        run.append(line(epoch, test_error=error, test_loss=0.5, test_ece=0.1))
    assert summary(run).error == pytest.approx(np.mean(errors[2:5]))  # a quarter of 12 epochs
    assert not summary(run).finished
    for epoch, error in enumerate(errors[5:], 5):
        run.append(line(epoch, test_error=error, test_loss=0.5, test_ece=0.1))
    result = summary(run)
    assert result.error == pytest.approx(np.mean(errors[9:]))
    assert (result.finished, result.epochs, result.seconds) == (True, 12, 24.0)
    assert (result.loss, result.ece) == pytest.approx((0.5, 0.1))


def test_export_and_load_runs(run, tmp_path):
    with pytest.raises(InputError, match="0 of 12 epochs"):
        export(run, tmp_path / "results")
    for epoch in range(12):
        run.append(line(epoch))
    run.save(state(12))
    folder = export(run, tmp_path / "results")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "metrics.jsonl"]
    for seed in (11, 2):
        RunFolder.create(tmp_path / "more", "digits-resnet8-ce", RECIPE, seed)
    (tmp_path / "more" / "config.json").write_text("{}")  # of another program
    found = load_runs(tmp_path)
    assert [(one.name, one.seed) for one in found] == [
        ("digits-resnet8-ce", 2),
        ("digits-resnet8-ce", 11),
        ("digits-resnet8-isda", 3),
        ("digits-resnet8-isda", 3),
    ]
    assert found[-1].metrics() == run.metrics()
    with pytest.raises(InputError, match="nowhere"):
        load_runs(tmp_path / "nowhere")


def contents(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_export_keeps_a_different_record(finished, tmp_path):
    """The same record again changes nothing; a different one is refused, as is a part of one."""
    kept = tmp_path / "kept"
    folder = export(finished, kept)
    before = contents(kept)
    assert export(finished, kept) == folder
    other = RunFolder.create(tmp_path / "other", finished.name, RECIPE, 3)
    for epoch in range(12):
        other.append(line(epoch, test_error=1.0))
    with pytest.raises(InputError, match=r"kept/.* holds a different or damaged record"):
        export(other, kept)
    assert contents(kept) == before
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match=r"holds a different or damaged record .*: move it away"):
        export(finished, kept)


@pytest.mark.parametrize("failure", ["fsync", "rename"])
@pytest.mark.parametrize("error", [Crash(), OSError(errno.ENOSPC, "No space left on device")])
def test_export_is_complete_or_absent(finished, tmp_path, monkeypatch, failure, error):
    """After a crash or with a full disk, at every point of the copy."""
    for number in range(4 if failure == "fsync" else 1):
        kept = tmp_path / f"kept{number}"
        real, calls = getattr(os, failure), itertools.count()

        def fail(*arguments, real=real, calls=calls, number=number):
            if next(calls) == number:
                raise error
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, failure, fail)
            with pytest.raises((Crash, RunError)):
                export(finished, kept)
        assert not load_runs(kept) or summary(load_runs(kept)[0]).finished
        if isinstance(error, OSError):
            assert not list(kept.rglob("*.new"))
        export(finished, kept)
        (run,) = load_runs(kept)
        assert summary(run) == summary(finished)


def test_a_short_copy_is_damaged(finished, tmp_path):
    """A run in training has a lock or a checkpoint; a copy of a finished run has neither."""
    folder = export(finished, tmp_path / "kept")
    path = folder / "metrics.jsonl"
    content = path.read_bytes()
    config = (folder / "config.json").read_bytes()
    (folder / "config.json").unlink()
    assert (
        "config.json is not a run record: it is missing" in load_runs(tmp_path / "kept")[0].damage
    )
    (folder / "config.json").write_bytes(config)
    for rest in (content[:-1], content[:-40], b"", None):
        path.unlink() if rest is None else path.write_bytes(rest)
        (run,) = load_runs(tmp_path / "kept")
        assert re.search(r"kept/.*/3 is damaged: it has (0|11) of 12 epochs", run.damage)
        assert not summary(run).finished
        with pytest.raises(InputError, match="is damaged"):
            export(run, tmp_path / "again")
    (folder / "lock").touch()
    assert load_runs(tmp_path / "kept")[0].damage is None
