"""Run folders after a crash, with a full disk and with damaged files; means and intervals."""

import builtins
import dataclasses
import errno
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from programs import PATIENCE

from isda.experiments.errors import InputError, RunError
from isda.experiments.metrics_lines import config_checksum
from isda.experiments.records import export, load_runs, summary
from isda.experiments.report.intervals import difference, estimate
from isda.experiments.settings import Recipe
from isda.experiments.training import environment as environment_module
from isda.experiments.training import run_folder
from isda.experiments.training.run_folder import RunFolder

RECIPE = Recipe(
    data="digits", network="resnet8", augment=("crop",), epochs=12, batch_size=4,
    learning_rate=0.1, weight_decay=0.0, milestones=(3, 5), lambda_0=0.5,
)  # fmt: skip


class Crash(BaseException):
    """Simulated power failure, which no code may catch."""


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path, "digits-resnet8-isda", RECIPE, 3)


def state(number: int) -> dict:
    return {
        "epoch": number,
        "weight": torch.full((50,), float(number)),
        "nested": {"step": [number]},
    }


def line(epoch: int, **more) -> dict:
    return {"epoch": epoch, "test_error": 20.0 - epoch, "seconds": 2.0, **more}


def same(one: dict | None, other: dict) -> bool:
    return one is not None and one["epoch"] == other["epoch"] and bool(
        (one["weight"] == other["weight"]).all()
    )  # fmt: skip


def change_config(folder: Path, change: dict) -> None:
    """Change fields of config.json and also its checksum, as an attacker would."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps(config | {"check": config_checksum(config)}))


def test_commit_of_a_copy_is_the_one_given(monkeypatch):
    monkeypatch.setenv("ISDA_COMMIT", "abc")
    environment_module._commit.cache_clear()
    assert environment_module.environment()["commit"] == "abc"
    monkeypatch.delenv("ISDA_COMMIT")
    environment_module._commit.cache_clear()
    assert environment_module.environment()["commit"] != "abc"


@pytest.mark.parametrize(
    "change",
    [{"name": 5}, {"recipe": []}, {"seed": "0"}, {"environments": ["x"]}, {"environments": []}],
)
def test_a_record_of_another_kind_is_refused(run, change):
    change_config(run.folder, change)
    with pytest.raises(InputError, match=r"config.json is not a run record: "):
        RunFolder(run.folder)


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([line(0), line(1), line(1)], 3),  # twice
        ([line(0), line(2)], 2),  # one is missing
        ([line(epoch) for epoch in range(13)], 13),  # more than the recipe has
        ([line(0), {"epoch": 1, "test_error": float("nan")}], 2),
        ([line(0), {"epoch": 1, "test_loss": 0.1}], 2),
    ],
)
def test_epochs_that_do_not_follow_one_another(run, lines, wrong):
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    with pytest.raises(InputError, match=f"damaged: line {wrong} is not the record of epoch"):
        summary(run)


def test_line_that_is_not_json(run):
    text = "".join(json.dumps(line(epoch)) + "\n" for epoch in range(3))
    (run.folder / "metrics.jsonl").write_text(text.replace('{"epoch": 1', '{"ep'))
    with pytest.raises(InputError, match="damaged: line 2 is not the record of epoch 1"):
        summary(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test_error": -5.57}, "has test_error -5.57, which must be from 0 to 100"),
        ({"test_error": 500}, "has test_error 500, which must be from 0 to 100"),
        ({"test_error": True}, "is not the record of epoch 1"),
        ({"test_error": 10**400}, "is not the record of epoch 1"),
        ({"test_top5_error": 101.0}, "has test_top5_error 101.0"),
        ({"test_ece": 1.5}, "has test_ece 1.5, which must be from 0 to 1"),
        ({"train_loss": -1.0}, "has train_loss -1.0, which must be >= 0"),
        ({"test_loss": float("inf")}, "is not the record of epoch 1"),
        ({"a\nb": 1.0}, "is not the record of epoch 1"),
        ({"epoch": 1.0}, "is not the record of epoch 1"),
        ({"epoch": True}, "is not the record of epoch 1"),
        ({"side_by_side": 1.5}, "has side_by_side 1.5, which must be an integer"),
    ],
)
def test_values_out_of_range_are_refused(run, change, message):
    """In reading and in writing."""
    with pytest.raises(RunError, match="the next line of the metrics "):
        run.append(line(0) | change | {"epoch": change.get("epoch", 0)})
    path = run.folder / "metrics.jsonl"
    assert not path.exists()
    path.write_text("".join(json.dumps(one) + "\n" for one in (line(0), line(1) | change)))
    with pytest.raises(InputError, match=f"metrics.jsonl is damaged: line 2 {message}") as caught:
        summary(run)
    assert len(str(caught.value)) < 600


def test_nested_metrics_are_refused(run):
    text = json.dumps(line(0))[:-1] + ', "deep": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
    (run.folder / "metrics.jsonl").write_text(text)
    with pytest.raises(InputError, match="damaged: line 1 is not the record of epoch 0"):
        run.metrics()


@pytest.mark.parametrize(
    "change", [{"epochs": 10**400}, {"epochs": True}, {"epochs": 12.0}, {"network": 5},
               {"augment": "crop"}, {"milestones": [1, 2.5]}, {"learning_rate": float("nan")}],
)  # fmt: skip
def test_recipe_with_values_of_a_wrong_type(run, change):
    recipe = json.loads((run.folder / "config.json").read_text())["recipe"]
    change_config(run.folder, {"recipe": recipe | change})
    with pytest.raises(
        InputError, match=rf"not a run record: .*{next(iter(change))} of the recipe"
    ):
        RunFolder(run.folder)


def test_every_flipped_bit_of_the_last_ten_epochs_is_found(finished):
    """None changes a result: the record is refused, or it lacks its last line."""
    assert finished.verified
    path, expected = finished.folder / "metrics.jsonl", finished.metrics()
    content = path.read_bytes()
    first = len(b"".join(content.splitlines(keepends=True)[:2]))
    for where in range(first, len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[where] ^= 1 << bit
            path.write_bytes(flipped)
            with pytest.raises(InputError, match=r"metrics\.jsonl is damaged: line \d+ "):
                RunFolder(finished.folder).metrics()
    path.write_bytes(content)
    assert RunFolder(finished.folder).metrics() == expected


def test_checksum_covers_recipe_and_order(finished, tmp_path):
    path = finished.folder / "config.json"
    text = path.read_text()
    change_config(finished.folder, {"recipe": json.loads(text)["recipe"] | {"lambda_0": 0.7}})
    with pytest.raises(InputError, match="line 1 does not match its checksum"):
        RunFolder(finished.folder).metrics()
    path.write_text(text)
    path = finished.folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    other = RunFolder.create(tmp_path / "other", finished.name, RECIPE, 3)
    for epoch in range(12):
        other.append(line(epoch, test_error=5.0))
    strange = (other.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:11], strange[11]]))
    with pytest.raises(InputError, match="line 12 does not match its checksum"):
        RunFolder(finished.folder).metrics()


def test_checksum_by_hand(finished):
    """The checksum is that of the documented bytes."""
    config = json.loads((finished.folder / "config.json").read_text())
    begin = json.dumps([config["name"], config["seed"], config["recipe"]], sort_keys=True)
    content = (finished.folder / "metrics.jsonl").read_text()
    last = content.rindex(', "check": ')
    digest = hashlib.sha256((begin + content[:last]).encode()).hexdigest()
    assert json.loads(content.splitlines()[-1])["check"] == digest[:16]


def test_a_run_without_checksums_goes_on(finished):
    """Lines of an earlier version stay as they are; later checksums cover them."""
    path = finished.folder / "metrics.jsonl"
    content = "".join(json.dumps(line(epoch)) + "\n" for epoch in range(3))
    path.write_text(content)
    run = RunFolder(finished.folder)
    assert not run.verified
    run.rewind(2)
    for epoch in range(2, 5):
        run.append(line(epoch))
    assert run.metrics() == [line(epoch) for epoch in range(5)]
    assert not run.verified
    path.write_text(path.read_text().replace("20.0", "10.0"))
    with pytest.raises(InputError, match="line 3 does not match its checksum"):
        RunFolder(finished.folder).metrics()


def test_metrics_that_cannot_be_read(run):
    (run.folder / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match=r"metrics.jsonl is not a file"):
        summary(run)


def test_config_round_trip(run, tmp_path):
    assert run.folder == tmp_path / "digits-resnet8-isda" / "3"
    again = RunFolder(run.folder)
    assert (again.name, again.seed, again.recipe) == (run.name, 3, RECIPE)
    config = json.loads((run.folder / "config.json").read_text())
    assert config["environments"][0]["torch"] == str(torch.__version__)
    assert set(config["environments"][0]) >= {"isda", "python", "device", "commit"}


def test_existing_run_needs_resume(run, tmp_path):
    with pytest.raises(InputError, match="use --resume or a different --out"):
        RunFolder.create(tmp_path, run.name, RECIPE, 3)
    assert RunFolder.create(tmp_path, run.name, RECIPE, 3, resume=True).recipe == RECIPE
    assert RunFolder.create(tmp_path, run.name, RECIPE, 4, resume=True).load() is None  # starts


def test_resume_with_another_recipe_names_the_fields(run, tmp_path):
    other = dataclasses.replace(RECIPE, lambda_0=0.25, milestones=(3,))
    with pytest.raises(InputError) as caught:
        RunFolder.create(tmp_path, run.name, other, 3, resume=True)
    assert "lambda_0 0.5 → 0.25" in str(caught.value)
    assert "milestones (3, 5) → (3,)" in str(caught.value)
    assert "epochs" not in str(caught.value)


def test_another_environment_is_recorded(run, tmp_path, monkeypatch):
    before = run.environments[0]
    monkeypatch.setattr(run_folder, "environment", lambda device: {**before, "torch": "9.9"})
    with pytest.warns(UserWarning, match=r"torch .* → 9\.9"):
        RunFolder.create(tmp_path, run.name, RECIPE, 3, resume=True)
    assert [record["torch"] for record in RunFolder(run.folder).environments] == [
        before["torch"],
        "9.9",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RunFolder.create(tmp_path, run.name, RECIPE, 3, resume=True)


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_name_must_be_a_folder_name(tmp_path, name):
    with pytest.raises(InputError, match="folder name"):
        RunFolder.create(tmp_path, name, RECIPE, 0)


def take_lock(out, held, release):
    with run_folder.locked(out, "name", 0):
        held.set()
        release.wait(PATIENCE)


def test_a_lock_that_is_released_is_not_held_twice(tmp_path, monkeypatch):
    """A process opens the lock file, another one deletes it with the folder, a third one locks."""
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    third = context.Process(target=take_lock, args=(tmp_path, held, release))
    real = run_folder.fcntl.lockf
    first = run_folder.locked(tmp_path, "name", 0)
    first.__enter__()

    def late(file, mode):
        monkeypatch.setattr(run_folder.fcntl, "lockf", real)
        first.__exit__(None, None, None)  # nothing was written: removes folder and lock
        assert not (tmp_path / "name").exists()
        third.start()
        assert held.wait(PATIENCE)
        real(file, mode)  # of the deleted file, which nobody else holds

    monkeypatch.setattr(run_folder.fcntl, "lockf", late)
    try:
        with (
            pytest.raises(InputError, match="name/0 is being trained by another process"),
            run_folder.locked(tmp_path, "name", 0),
        ):
            pass
    finally:
        release.set()
        third.join(PATIENCE)
    assert third.exitcode == 0
    with run_folder.locked(tmp_path, "name", 0):
        RunFolder.create(tmp_path, "name", RECIPE, 0)
    assert (tmp_path / "name" / "0" / "lock").exists()  # stays with the run


def test_lock_removes_what_a_killed_process_left(run, tmp_path, monkeypatch):
    run.append(line(0))

    def crash(*_):
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(Crash):
            run.rewind(0)
    assert list(run.folder.glob(".*.new"))
    with run_folder.locked(tmp_path, run.name, 3):
        assert sorted(path.name for path in run.folder.iterdir()) == [
            "config.json", "lock", "metrics.jsonl",
        ]  # fmt: skip


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("file", ["checkpoint.pt", "checkpoint.previous.pt", "metrics.jsonl"])
def test_files_without_a_config_are_refused(run, tmp_path, resume, file):
    (run.folder / "config.json").unlink()
    (run.folder / file).write_bytes(b"of an earlier run")
    with pytest.raises(InputError, match=f"has {file} but no config.json: restore config.json"):
        RunFolder.create(tmp_path, run.name, RECIPE, 3, resume=resume)
    assert [path.name for path in run.folder.iterdir()] == [file]


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


def test_metrics(run):
    assert run.metrics() == []
    for epoch in range(3):
        run.append(line(epoch))
    assert run.metrics() == [line(epoch) for epoch in range(3)]


def test_torn_last_line_is_dropped(run):
    run.append(line(0))
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 1, "test_er')
    assert run.metrics() == [line(0)]
    run.rewind(1)
    run.append(line(1))
    assert run.metrics() == [line(0), line(1)]


def test_damage_before_the_last_line_is_not_hidden(run):
    run.append(line(0))
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 1, "test_er\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl is damaged"):
        run.metrics()


def test_rewind(run, monkeypatch):
    for epoch in range(5):
        run.append(line(epoch))

    def crash(*_):
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(Crash):
            run.rewind(2)
    assert len(run.metrics()) == 5  # all or nothing
    run.rewind(2)
    assert run.metrics() == [line(0), line(1)]
    with pytest.raises(InputError, match="lacks epochs before 4"):
        run.rewind(4)
    run.rewind(0)
    assert run.metrics() == []


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


def test_intact_is_said_only_after_a_look(run, monkeypatch):
    """A file that could not be restored is not called intact, nor is one that did not exist."""
    real = builtins.open

    class Disk:
        def __init__(self, *arguments, **options):
            self.file = real(*arguments, **options)

        def write(self, data):
            self.file.write(data[:5])
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def truncate(self, end):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    def failing() -> str:
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "open", Disk)
            with pytest.raises(RunError) as caught:
                run.append(line(len(run.metrics())))
        return str(caught.value)

    assert failing().endswith("metrics.jsonl: Input/output error")
    run.rewind(0)
    run.append(line(0))
    assert failing().endswith("Input/output error; the file may be incomplete")
    run.rewind(1)
    assert run.metrics() == [line(0)]


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


def test_half_written_line_is_taken_back(run, monkeypatch):
    run.append(line(0))
    real = builtins.open

    def limited(*arguments, **options):
        file = real(*arguments, **options)
        writes = []

        class Disk:
            def write(self, data):
                if writes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                writes.append(data)
                return file.write(data[:5])

            def __getattr__(self, name):
                return getattr(file, name)

            def __enter__(self):
                return self

            def __exit__(self, *_):
                file.close()

        return Disk()

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", limited)
        with pytest.raises(RunError, match="No space left"):
            run.append(line(1))
    run.append(line(1))
    assert run.metrics() == [line(0), line(1)]


def test_other_errors_of_torch_save_are_not_hidden(run, monkeypatch):
    def broken(*_):
        raise RuntimeError("cannot be stored")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(RuntimeError, match="cannot be stored") as caught:
        run.save(state(0))
    assert not isinstance(caught.value, RunError)


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


@pytest.fixture
def finished(run):
    for epoch in range(12):
        run.append(line(epoch))
    return run


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


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../../evil"},
        {"name": "/evil"},
        {"name": ".."},
        {"name": "\n"},
        {"name": "digits-resnet8-ce"},
        {"seed": 4},
        {"seed": True},
    ],
)
def test_a_record_of_another_folder_is_refused(finished, tmp_path, change):
    change_config(finished.folder, change)
    with pytest.raises(InputError, match=r"config.json is not a run record: ") as caught:
        RunFolder(finished.folder)
    assert "\n" not in str(caught.value)
    (run,) = load_runs(tmp_path)
    with pytest.raises(InputError, match="not a run record"):
        export(run, tmp_path / "kept" / "deep")
    assert not (tmp_path / "kept").exists()


def test_folder_relative_to_the_current_one(finished, monkeypatch):
    monkeypatch.chdir(finished.folder)
    assert RunFolder(".").seed == 3
    assert len(RunFolder("../3").metrics()) == 12


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"name": "x"}', '{"name": "x", "seed": 1, "recipe": {}}']
)
def test_damaged_config_is_named(run, content):
    (run.folder / "config.json").write_text(content)
    with pytest.raises(InputError, match=r"config\.json is not a run record"):
        RunFolder(run.folder)


def test_estimate_against_numpy():
    values = [30.9, 30.2, 31.4, 30.0]
    result = estimate(values)
    assert (result.mean, result.std) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert estimate([4.0]) == (type(result))(4.0, None, 1)
    assert estimate([4.0]).format() == "4.00"
    with pytest.raises(ValueError, match="at least one"):
        estimate([])


def test_paired_interval_against_scipy():
    one = {0: 30.9, 1: 30.7, 5: 31.0, 7: 30.2}
    other = {7: 29.9, 5: 30.1, 0: 30.2, 1: 30.6}  # a different order: pairs are matched by seed
    test = scipy.stats.ttest_rel([other[seed] for seed in one], list(one.values()))
    interval = test.confidence_interval(0.95)
    result = difference(one, other)
    assert result.paired
    assert result.interval == pytest.approx((interval.low, interval.high))
    assert result.mean == pytest.approx(np.mean(list(other.values())) - np.mean(list(one.values())))
    assert result.significant == (test.pvalue < 0.05)


@pytest.mark.parametrize("shift", [0.0, 1.5])
def test_welch_interval_against_scipy(shift):
    one, other = {0: 30.9, 1: 30.7, 2: 31.3}, {0: 30.2, 1: 30.9, 3: 30.4, 4: 29.7}
    other = {seed: value - shift for seed, value in other.items()}
    test = scipy.stats.ttest_ind(list(other.values()), list(one.values()), equal_var=False)
    interval = test.confidence_interval(0.95)
    result = difference(one, other)
    assert not result.paired
    assert result.counts == (3, 4)
    assert result.interval == pytest.approx((interval.low, interval.high))
    assert result.significant == (test.pvalue < 0.05)


def test_single_seeds_have_no_interval():
    assert difference({0: 3.0}, {0: 2.0}).interval is None
    assert difference({0: 3.0}, {0: 2.0, 1: 1.0}).interval is None
    assert not difference({0: 3.0}, {0: 2.0}).significant
    assert difference({0: 3.0, 1: 3.0}, {4: 2.0, 5: 2.0}).interval == (-1.0, -1.0)
