"""What the tests of run folders share: a recipe, folders of its runs, and a simulated crash."""

import json
from pathlib import Path

import pytest
import torch

from isda.experiments.metrics_lines import config_checksum
from isda.experiments.settings import Recipe
from isda.experiments.training.run_folder import RunFolder

__all__ = ["RECIPE", "Crash", "change_config", "finished", "line", "run", "same", "state"]

RECIPE = Recipe(
    data="digits", network="resnet8", augment=("crop",), epochs=12, batch_size=4,
    learning_rate=0.1, weight_decay=0.0, milestones=(3, 5), lambda_0=0.5,
)  # fmt: skip


class Crash(BaseException):
    """Simulated power failure, which no code may catch."""


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path, "digits-resnet8-isda", RECIPE, 3)


@pytest.fixture
def finished(run):
    for epoch in range(12):
        run.append(line(epoch))
    return run


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
