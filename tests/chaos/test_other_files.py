"""Damage to the other files that are read again: each is refused by name, or gives the same values.

See ``test_records.py`` for the seed and the scale.
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import damage_bytes, damage_file

from isda.experiments.calibration import Calibration, load_calibration, save_calibration
from isda.experiments.cost_records import (
    CASES,
    MeasuredCost,
    TheoreticalCost,
    cost_lines,
    measured_lines,
    write_costs,
)
from isda.experiments.errors import InputError
from isda.experiments.generators.gan_folder import GanFolder
from isda.experiments.generators.gan_settings import get_gan
from isda.experiments.predictions import Predictions, load_predictions, save_predictions
from isda.experiments.recipes import get_recipe
from isda.experiments.records import Run
from isda.experiments.training.run_folder import RunFolder

SEED = int(os.environ.get("ISDA_CHAOS_SEED", "0"))
SCALE = int(os.environ.get("ISDA_CHAOS_SCALE", "1"))
RECIPE = replace(get_recipe("digits-resnet8-isda"), epochs=1, milestones=())
CLASSES = ("cat", "dog", "owl")


def create_run(out: Path) -> RunFolder:
    run = RunFolder.create(out, "run", RECIPE, 0)
    run.append({"epoch": 0, "test_error": 25.0, "seconds": 1.0})
    return run


def predictions_of(out: Path) -> tuple[Path, Callable[[], Any]]:
    run = create_run(out)
    target = np.arange(200, dtype=np.int32) % 3
    wrong = np.arange(200) % 4 == 0
    confidence = np.linspace(0.5, 1, 200, dtype=np.float32)
    target_probability = np.where(wrong, 1 - confidence, confidence)
    prediction = (target + wrong) % 3
    save_predictions(run, Predictions(target, prediction, confidence, target_probability, CLASSES))

    def read() -> Any:
        found = load_predictions(Run(run.folder))
        return found and {name: np.asarray(value).tolist() for name, value in vars(found).items()}

    return run.folder / "predictions.npz", read


def calibration_of(out: Path) -> tuple[Path, Callable[[], Any]]:
    run = create_run(out)
    save_calibration(run, Calibration(1.3, 100, 0.9, 0.8, 200, 25.0, 0.9, 0.1, 0.8, 0.05))
    return run.folder / "calibration.json", lambda: load_calibration(Run(run.folder))


def gan_of(out: Path) -> GanFolder:
    settings = replace(get_gan("cgan"), data="digits", epochs=1)
    folder = GanFolder.create(
        out / "digits-cgan" / "0", settings, 0, torch.device("cpu"), resume=False
    )
    folder.save("checkpoint.pt", {"history": [{"loss": 0.5}], "lanes": [torch.arange(500)]})
    return folder


def read_gan(folder: Path) -> Any:
    found = GanFolder(folder)
    state = found.load("checkpoint.pt")
    if state is None:
        return None
    assert state["lanes"][0].equal(torch.arange(500))
    return found.settings, found.seed, state["history"]


def gan_config_of(out: Path) -> tuple[Path, Callable[[], Any]]:
    folder = gan_of(out).folder
    return folder / "gan.json", lambda: read_gan(folder)


def gan_checkpoint_of(out: Path) -> tuple[Path, Callable[[], Any]]:
    folder = gan_of(out).folder
    return folder / "checkpoint.pt", lambda: read_gan(folder)


KINDS = {
    "predictions": predictions_of,
    "calibration": calibration_of,
    "gan config": gan_config_of,
    "gan checkpoint": gan_checkpoint_of,
}


def result_of(read: Callable[[], Any]) -> tuple[Any, str]:
    """What a function returns, or the message of its InputError."""
    try:
        return read(), ""
    except InputError as error:
        return None, str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files(kind: str, tmp_path: Path) -> None:
    print(f"\n{kind}: ISDA_CHAOS_SEED={SEED} ISDA_CHAOS_SCALE={SCALE}")
    generator = random.Random(f"{SEED} {kind}")
    path, read = KINDS[kind](tmp_path / "one")
    other, _ = KINDS[kind](tmp_path / "two")
    backup, expected = path.read_bytes(), read()
    outcomes: Counter[str] = Counter()
    for number in range(50 * SCALE):
        if path.suffix == ".npz":
            changed, done = damage_bytes(backup, generator)
            path.write_bytes(changed)
        else:
            done = damage_file(path, generator, other)
        where = f"file {number}: {path}: {done}"
        found, refusal = result_of(read)
        if refusal:
            assert str(path.parent) in refusal, where
            assert "\n" not in refusal, where
        else:
            assert found in (expected, None), where
            assert found is not None or not path.exists(), where
        outcomes["refused" if refusal else "unchanged" if found else "absent"] += 1
        if path.is_dir():
            path.rmdir()
        path.write_bytes(backup)
    print(f"{outcomes.total()} damaged files: {dict(outcomes)}")
    assert outcomes["refused"]


def test_damaged_costs(tmp_path: Path) -> None:
    """A file without checksums, which people edit: refused by name, or all numbers are finite."""
    print(f"\ncosts: ISDA_CHAOS_SEED={SEED} ISDA_CHAOS_SCALE={SCALE}")
    generator = random.Random(f"{SEED} costs")
    theory = [TheoreticalCost("resnet8", 10, 8, 64, 80_000, 10**6, 0.5)]
    measured = {
        "resnet8": [MeasuredCost(case, 4, "fp32", 1.5, 0.1, 2.0, 3.0, 4.0) for case in CASES]
    }
    path = tmp_path / "cost.csv"
    write_costs(path, cost_lines(theory, measured, {"device": "cpu"}))
    backup, outcomes = path.read_bytes(), Counter[str]()
    for number in range(50 * SCALE):
        changed, done = damage_bytes(backup, generator)
        path.write_bytes(changed)
        lines, refusal = result_of(lambda: measured_lines(path))
        assert not refusal or str(path) in refusal, (number, done)
        numbers = [float(line["added_percent"] or 0) for line in lines or ()]
        assert np.isfinite(numbers).all(), (number, done)
        outcomes["refused" if refusal else "accepted"] += 1
    print(f"{outcomes.total()} damaged cost files: {dict(outcomes)}")
