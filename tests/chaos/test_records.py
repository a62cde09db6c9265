"""Damaged records, damaged checkpoints and killed writers: nothing lost, nothing silently wrong.

The counts are for a few seconds. ``make chaos`` multiplies them and takes a new seed, which it
prints; ``make chaos SEED=N`` repeats a run of it.
"""

import itertools
import multiprocessing
import os
import random
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import damage_file

from isda.experiments.errors import InputError
from isda.experiments.records import Run, export, load_runs, summary
from isda.experiments.report.tables import report_markdown
from isda.experiments.settings import Recipe
from isda.experiments.training.locks import locked
from isda.experiments.training.run_folder import RunFolder

SEED = int(os.environ.get("ISDA_CHAOS_SEED", "0"))
SCALE = int(os.environ.get("ISDA_CHAOS_SCALE", "1"))
NAMES = ("digits-resnet8-ce", "digits-resnet8-isda")
RECIPES = {
    name: Recipe(
        data="digits", network="resnet8", method=method, augment=("crop",), epochs=15,
        batch_size=4, learning_rate=0.1, weight_decay=0.0, milestones=(3, 5),
        lambda_0=0.5 * (method == "isda"),
    )
    for name, method in zip(NAMES, ("ce", "isda"), strict=True)
}  # fmt: skip


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> random.Random:
    print(f"\n{request.node.name}: ISDA_CHAOS_SEED={SEED} ISDA_CHAOS_SCALE={SCALE}")
    return random.Random(f"{SEED} {request.node.name}")


def metrics(name: str, seed: int, epoch: int) -> dict[str, float]:
    numbers = random.Random(f"{name} {seed} {epoch}")
    return {
        "epoch": epoch,
        "train_loss": numbers.uniform(0, 2),
        "test_error": numbers.uniform(20, 40),
        "test_loss": numbers.uniform(0, 2),
        "test_ece": numbers.random(),
        "seconds": 1.5,
        "side_by_side": 2,
    }


def state(name: str, seed: int, epoch: int) -> dict[str, Any]:
    weight = torch.full((300,), 1000.0 * seed + epoch)
    return {"epoch": epoch, "network": {"weight": weight}, "name": name}


def train(out: Path, name: str, seed: int) -> RunFolder:
    """What a training run writes, in the same order, and then its export."""
    with locked(out / "runs", name, seed):
        run = RunFolder.create(out / "runs", name, RECIPES[name], seed, resume=True)
        found = run.load()
        done = 0 if found is None else found["epoch"]
        run.rewind(done)
        for epoch in range(done, run.recipe.epochs):
            run.append(metrics(name, seed, epoch))
            run.save(state(name, seed, epoch + 1))
    export(run, out / "kept")
    return run


@pytest.fixture
def records(tmp_path: Path) -> Path:
    for name in NAMES:
        for seed in range(2):
            train(tmp_path, name, seed)
    return tmp_path


def shown(run: Run) -> tuple[object, ...]:
    """What a report can show of a run."""
    return run.name, run.seed, run.recipe, run.environments, summary(run), run.metrics()


def test_damaged_records(records: Path, generator: random.Random) -> None:
    """A damaged record is refused by name, or shows what it did before; others do not change."""
    kept = records / "kept"
    good = {run.folder: shown(run) for run in load_runs(kept)}
    outcomes: Counter[str] = Counter()
    for number in range(400 * SCALE):
        folder = generator.choice(list(good))
        other = generator.choice([one for one in good if one != folder])
        file = generator.choice(["config.json", "metrics.jsonl", "metrics.jsonl"])
        backup = (folder / file).read_bytes()
        done = (
            f"file {number}: {folder / file}: {damage_file(folder / file, generator, other / file)}"
        )
        found = {run.folder: run for run in load_runs(kept)}
        for place, expected in good.items():
            assert place in found, done
            run = found[place]
            if run.damage is not None:
                assert place == folder, done
                assert str(place) in run.damage, done
                assert "\n" not in run.damage, done
                assert len(run.damage) < 1000, done
                assert not summary(run).finished, done
                with pytest.raises(InputError):
                    export(run, records / "again")
                outcomes["refused"] += 1
            else:
                assert shown(run) == expected, done
                assert run.verified, done
                outcomes["unchanged"] += place == folder
        if number % 10 == 0:
            report_markdown(found.values()).encode()
        assert not (records / "again").exists(), done
        assert {path.name for path in records.iterdir()} == {"runs", "kept"}, done
        if (folder / file).is_dir():
            (folder / file).rmdir()
        (folder / file).write_bytes(backup)
    print(f"{outcomes.total()} damaged files: {dict(outcomes)}")
    assert outcomes["refused"] > 0.5 * outcomes.total()


def test_damaged_records_without_checksums(records: Path, generator: random.Random) -> None:
    """A damaged record is refused by name, or shows possible values and is called unverified."""
    kept = records / "kept"
    for path in (*kept.rglob("metrics.jsonl"), *kept.rglob("config.json")):
        path.write_text(re.sub(r',\s+"check": "[0-9a-f]{16}"', "", path.read_text()))
    folders = sorted(run.folder for run in load_runs(kept))
    outcomes: Counter[str] = Counter()
    for number in range(100 * SCALE):
        folder, other = generator.sample(folders, 2)
        path = folder / generator.choice(["config.json", "metrics.jsonl"])
        backup = path.read_bytes()
        done = f"file {number}: {path}: {damage_file(path, generator, other / path.name)}"
        (run,) = [run for run in load_runs(kept) if run.folder == folder]
        result = summary(run)
        if run.damage is None:
            assert not run.verified, done
            assert result.finished, done
            assert result.error is not None, done
            assert 0 <= result.error <= 100, done
        else:
            assert "\n" not in run.damage, done
            assert str(folder) in run.damage, done
        outcomes["accepted" if run.damage is None else "refused"] += 1
        report_markdown(load_runs(kept)).encode()
        if path.is_dir():
            path.rmdir()
        path.write_bytes(backup)
    print(f"{outcomes.total()} damaged files without checksums: {dict(outcomes)}")


def test_damaged_checkpoints(records: Path, generator: random.Random) -> None:
    """A damaged checkpoint is unchanged in effect, or named and the one before it is used."""
    name, epochs = NAMES[1], RECIPES[NAMES[1]].epochs
    folder = records / "runs" / name / "0"
    backups = {path: path.read_bytes() for path in folder.glob("checkpoint*.pt")}
    outcomes: Counter[str] = Counter()
    for number in range(100 * SCALE):
        path = folder / "checkpoint.pt"
        done = f"file {number}: {damage_file(path, generator, path)}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = RunFolder(folder).load()
        expected = state(name, 0, epochs - bool(caught))
        assert found is not None, done
        assert found["epoch"] == expected["epoch"], done
        assert found["network"]["weight"].equal(expected["network"]["weight"]), done
        outcomes["named" if caught else "unchanged"] += 1
        path.write_bytes(backups[path])
    print(f"{outcomes.total()} damaged checkpoints: {dict(outcomes)}")


def die_at(call: int, out: Path) -> None:
    """Train, and be killed before one of the calls that make files permanent or rename them."""
    calls = itertools.count()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return run

    for name in ("fsync", "replace", "rename"):
        setattr(os, name, counted(getattr(os, name)))
    train(out, NAMES[1], 3)


def is_killed(out: Path, generator: random.Random) -> bool:
    """Train in another process that is killed at a random call or time, if it still runs then."""
    by_call = generator.random() < 0.7
    call = generator.randrange(100) if by_call else -1
    process = multiprocessing.get_context("fork").Process(target=die_at, args=(call, out))
    process.start()
    if not by_call:
        time.sleep(generator.uniform(0, 0.3))
        process.kill()
    process.join()
    assert process.exitcode in (-signal.SIGKILL, 0)
    return process.exitcode != 0


def test_killed_writers(tmp_path: Path, generator: random.Random) -> None:
    """After every kill all records can be read; at the end, they are those of one run."""
    name, seed, kills = NAMES[1], 3, 0
    reference = train(tmp_path / "reference", name, seed)
    expected = (reference.folder / "metrics.jsonl").read_bytes()
    while kills < 4 * SCALE:
        out = tmp_path / f"out{kills}"
        while is_killed(out, generator):
            kills += 1
            for run in load_runs(out) if out.exists() else []:
                assert run.damage is None, f"kill {kills}"
                in_kept = run.folder.is_relative_to(out / "kept")
                assert summary(run).finished or not in_kept, f"kill {kills}"
                lines = [metrics(name, seed, epoch) for epoch in range(len(run.metrics()))]
                assert run.metrics() == lines, f"kill {kills}"
        run = train(out, name, seed)
        for folder in (run.folder, out / "kept" / name / str(seed)):
            assert (folder / "metrics.jsonl").read_bytes() == expected
            assert load_runs(folder.parent)[0].verified
        assert not list(run.folder.glob(".*.new"))
    print(f"{kills} kills")
