"""Run folders: config.json, resume with another recipe or environment, and the lock."""

import dataclasses
import json
import multiprocessing
import os
import warnings

import pytest
import run_folders
import torch
from programs import PATIENCE
from run_folders import RECIPE, Crash, change_config, line

from isda.experiments.errors import InputError
from isda.experiments.records import export, load_runs
from isda.experiments.training import environment as environment_module
from isda.experiments.training import locks, run_folder
from isda.experiments.training.run_folder import RunFolder

finished, run = run_folders.finished, run_folders.run  # fixtures


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
    with locks.locked(out, "name", 0):
        held.set()
        release.wait(PATIENCE)


def test_a_lock_that_is_released_is_not_held_twice(tmp_path, monkeypatch):
    """A process opens the lock file, another one deletes it with the folder, a third one locks."""
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    third = context.Process(target=take_lock, args=(tmp_path, held, release))
    real = locks.fcntl.lockf
    first = locks.locked(tmp_path, "name", 0)
    first.__enter__()

    def late(file, mode):
        monkeypatch.setattr(locks.fcntl, "lockf", real)
        first.__exit__(None, None, None)  # nothing was written: removes folder and lock
        assert not (tmp_path / "name").exists()
        third.start()
        assert held.wait(PATIENCE)
        real(file, mode)  # of the deleted file, which nobody else holds

    monkeypatch.setattr(locks.fcntl, "lockf", late)
    try:
        with (
            pytest.raises(InputError, match="name/0 is being trained by another process"),
            locks.locked(tmp_path, "name", 0),
        ):
            pass
    finally:
        release.set()
        third.join(PATIENCE)
    assert third.exitcode == 0
    with locks.locked(tmp_path, "name", 0):
        RunFolder.create(tmp_path, "name", RECIPE, 0)
    assert (tmp_path / "name" / "0" / "lock").exists()  # stays with the run


def test_a_folder_that_another_process_removes_before_it_is_locked(tmp_path, monkeypatch):
    create, times = locks.create_folder, []

    def removed(folder):
        create(folder)
        times.append(folder)
        if len(times) == 1:
            folder.rmdir()

    monkeypatch.setattr(locks, "create_folder", removed)
    with locks.locked(tmp_path, "name", 0):
        assert (tmp_path / "name" / "0" / "lock").exists()
    assert len(times) == 2


def test_lock_removes_what_a_killed_process_left(run, tmp_path, monkeypatch):
    run.append(line(0))

    def crash(*_):
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(Crash):
            run.rewind(0)
    assert list(run.folder.glob(".*.new"))
    with locks.locked(tmp_path, run.name, 3):
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
    ("content", "reason"),
    [
        ("{", "it is not valid JSON"),
        ("\xff", "it is not valid JSON"),
        ("[]", "it is not a JSON object"),
        ('{"name": "x"}', "it has no field 'seed'"),
        ('{"name": "x", "seed": 1, "recipe": {}}', "it is the record of 'x/1', but its folder is"),
    ],
)
def test_damaged_config_is_named(run, content, reason):
    (run.folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=rf"config\.json is not a run record: {reason}"):
        RunFolder(run.folder)
