"""Checkpoints of a run: after a crash, with a full disk, damaged, or of another run."""

import dataclasses
import errno
import os
import resource
import shutil
import warnings

import numpy as np
import pytest
import run_folders
import torch
from run_folders import RECIPE, Crash, line, same, state

from isda.experiments.errors import InputError, RunError
from isda.experiments.training.run_folder import RunFolder

run = run_folders.run  # fixture


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 10**9}, "epoch must be from 0 to 12, got 1000000000"),
        ({"epoch": -1}, "epoch must be from 0 to 12, got -1"),
        ({"epoch": "3"}, "epoch must be from 0 to 12, got '3'"),
        ({"epoch": True}, "epoch must be from 0 to 12, got True"),
        ({"epoch": None}, "epoch must be from 0 to 12, got None"),
        ({"recipe": {"epochs": "12"}}, "epochs of the recipe is '12'"),
        ({"recipe": [1]}, r"recipe \[1\]"),
        ("seed", "it does not name its seed"),
        ("recipe", "it does not name its recipe"),
        ("epoch", "it does not name its epoch"),
    ],
)
def test_a_checkpoint_with_damaged_fields_is_not_used(run, change, message):
    run.save(state(0))
    run.save(state(1))
    path = run.folder / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    if isinstance(change, str):
        del content[change]
    else:
        content |= change
    torch.save(content, path)
    used = []
    with pytest.warns(
        UserWarning, match=rf"damaged \({message}.*resuming from checkpoint.previous"
    ):
        assert same(run.load(used.append), state(0))
    assert [one["epoch"] for one in used] == [0]


@pytest.mark.parametrize(
    ("recipe", "seed", "message"),
    [
        (RECIPE, 4, "seed 4 → 3"),
        (dataclasses.replace(RECIPE, lambda_0=0.25), 3, "lambda_0 0.25 → 0.5"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(run, tmp_path, recipe, seed, message):
    other = RunFolder.create(tmp_path / "other", run.name, recipe, seed)
    other.save(state(2))
    shutil.copyfile(other.folder / "checkpoint.pt", run.folder / "checkpoint.pt")
    used = []
    with pytest.raises(InputError, match=rf"the checkpoint of another run \({message}\): restore"):
        run.load(used.append)
    assert not used


def test_checkpoint_round_trip(run):
    assert run.load() is None
    for number in range(3):
        run.save(state(number))
        assert same(run.load(), state(number))
    assert run.load()["nested"] == {"step": [2]}
    assert sorted(path.name for path in run.folder.glob("checkpoint*")) == [
        "checkpoint.previous.pt",
        "checkpoint.pt",
    ]


@pytest.mark.parametrize("crash_at", range(4))
def test_a_crash_at_any_point_of_save_leaves_a_good_checkpoint(run, monkeypatch, crash_at):
    """Crash while the file is written, before fsync, and before each rename."""
    run.save(state(0))
    run.save(state(1))
    calls = 0

    def crashing(function, after):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls > after:
                raise Crash
            return function(*arguments, **options)

        return call

    def torn_save(value, file):
        file.write(b"half")
        raise Crash

    with monkeypatch.context() as patch:
        if crash_at == 0:
            patch.setattr(torch, "save", torn_save)
        elif crash_at == 1:
            patch.setattr(os, "fsync", crashing(os.fsync, 0))
        else:
            patch.setattr(os, "replace", crashing(os.replace, crash_at - 2))
        with pytest.raises(Crash):
            run.save(state(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(RunFolder(run.folder).load(), state(1))
    again = RunFolder(run.folder)
    again.load()
    again.save(state(5))  # continues
    assert same(RunFolder(run.folder).load(), state(5))


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip"])
def test_damaged_checkpoint_falls_back(run, damage):
    run.save(state(0))
    run.save(state(1))
    path = run.folder / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    where = content.index(torch.full((50,), 1.0).numpy().tobytes()) + 8
    content[where] ^= 1
    path.write_bytes({"truncate": content[:-50], "empty": b"", "flip": content}[damage])
    with pytest.warns(UserWarning, match=r"checkpoint\.pt is damaged.*checkpoint\.previous\.pt"):
        assert same(run.load(), state(0))


def test_damaged_checkpoint_does_not_replace_the_good_one(run, monkeypatch):
    run.save(state(0))
    run.save(state(1))
    (run.folder / "checkpoint.pt").write_bytes(b"damaged")
    again = RunFolder(run.folder)
    with pytest.warns(UserWarning, match="damaged"):
        again.load()

    replace = os.replace

    def crash(source, target):
        if source.name == "checkpoint.new.pt":
            raise Crash
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(Crash):
            again.save(state(2))
    with pytest.warns(UserWarning, match="damaged"):
        assert same(RunFolder(run.folder).load(), state(0))
    again.save(state(2))
    assert same(again.load(), state(2))


def test_every_flipped_byte_is_harmless_or_found(run):
    """All damage is detected: the state is unchanged, or the previous checkpoint is used."""
    run.save(state(0))
    run.save(state(1))
    path = run.folder / "checkpoint.pt"
    content = path.read_bytes()
    found = 0
    generator = np.random.default_rng(0)
    for where in generator.choice(len(content), 150, replace=False):
        flipped = bytearray(content)
        flipped[where] ^= 0xFF
        path.write_bytes(flipped)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = run.load()
        found += bool(caught)
        assert same(loaded, state(0) if caught else state(1))
    assert found > 0


def test_both_checkpoints_damaged(run):
    assert not run.has_checkpoint()
    run.save(state(0))
    run.save(state(1))
    assert run.has_checkpoint()
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (run.folder / name).write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"checkpoint\.pt is damaged.*checkpoint\.previous\.pt is"):
        run.load()
    assert not run.has_checkpoint()


def test_a_finished_run_needs_the_whole_checkpoint_of_its_last_epoch(run):
    with pytest.raises(InputError, match="has no checkpoint, like an exported record"):
        run.load_finished()
    parts = {"network": {}, "criterion": {}, "data": [1, 1, 2]}
    run.save({"epoch": run.recipe.epochs - 1, **parts})
    with pytest.raises(InputError, match="is not finished: 11 of 12 epochs"):
        run.load_finished()
    run.save({"epoch": run.recipe.epochs, **parts}, last=True)
    assert run.load_finished()["data"] == [1, 1, 2]
    del parts["network"]
    run.save({"epoch": run.recipe.epochs, **parts}, last=True)
    with pytest.raises(InputError, match=r"checkpoint.pt is damaged \(it has no network\)"):
        run.load_finished()


def test_full_disk_keeps_the_last_checkpoint(run, monkeypatch):
    run.save(state(0))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"No space left on device; earlier files"):
            run.save(state(1))
        run_metrics = run.metrics()
        with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl"):
            run.append(line(0))
    assert run.metrics() == run_metrics == []
    assert [path.name for path in run.folder.glob("checkpoint*")] == ["checkpoint.pt"]
    assert same(run.load(), state(0))


def test_write_that_fails_inside_torch(run):
    """torch.save reports a failed write as a RuntimeError; the file-size limit makes a real one."""
    run.save(state(0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(RunError, match="File too large"):
            run.save({"weight": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in run.folder.glob("checkpoint*")] == ["checkpoint.pt"]
    assert same(run.load(), state(0))


def test_other_errors_of_torch_save_are_not_hidden(run, monkeypatch):
    def broken(*_):
        raise RuntimeError("cannot be stored")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(RuntimeError, match="cannot be stored") as caught:
        run.save(state(0))
    assert not isinstance(caught.value, RunError)
