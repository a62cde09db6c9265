"""Runs with made-up test errors, and what reports must make of them by numpy and scipy."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import scipy.stats

from isda.experiments.recipes import get_recipe
from isda.experiments.records import Run
from isda.experiments.settings import Recipe
from isda.experiments.training.run_folder import RunFolder

__all__ = [
    "CE",
    "FIRST",
    "ISDA",
    "expected_numbers",
    "make_cells",
    "make_digits_runs",
    "make_run",
    "naive_cell",
    "naive_row",
    "raw_errors",
    "strip_checks",
]

CE, ISDA = "digits-resnet8-ce", "digits-resnet8-isda"
FIRST = "cifar10-resnet110"


def make_run(
    out: Path,
    name: str,
    seed: int,
    error: float,
    *,
    epochs: int | None = None,
    start: str | None = None,
    metrics: Mapping[str, float] = MappingProxyType({}),
    **changes,
) -> Run:
    """A run whose test error falls from 90 to about ``error``; ``metrics`` replace others."""
    begun = get_recipe(start or name.partition("+")[0])
    recipe: Recipe = dataclasses.replace(begun, **changes)
    run = RunFolder.create(out, name, recipe, seed)
    (run.folder / "lock").touch()  # as in training
    noise = np.random.default_rng(seed)
    for epoch in range(recipe.epochs if epochs is None else epochs):
        late = epoch >= recipe.epochs - 10
        run.append(
            {
                "epoch": epoch,
                "learning_rate": recipe.learning_rate_at(epoch),
                "strength": recipe.lambda_0 * recipe.progress_at(epoch),
                "train_loss": 2.0 / (epoch + 1),
                "test_error": error + noise.normal(0, 0.1) if late else 90.0 - epoch / 4,
                "test_loss": 0.5 + 0.01 * seed,
                "test_ece": 0.03 + 0.001 * seed,
                "seconds": 1.5,
                "images_per_second": 1000.0,
                **metrics,
            }
        )
    return run


def make_digits_runs(tmp_path: Path) -> Path:
    """Three runs of cross entropy and of ISDA on digits, with the same seeds."""
    folder = tmp_path / "runs"
    for seed, (one, other) in enumerate([(31.0, 30.2), (30.6, 30.1), (30.9, 30.1)]):
        make_run(folder, CE, seed, one)
        make_run(folder, ISDA, seed, other)
    return folder


def make_cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cells and their baseline in Tables 2 and 4, a pair in no table, an unfinished run."""
    folder = tmp_path_factory.mktemp("records")
    errors = {"ce": (6.8, 6.7, 6.9), "isda": (6.3, 6.3, 6.4), "focal": (6.6, 6.9, 6.7)}
    for method, values in errors.items():
        for seed, error in enumerate(values):
            make_run(folder, f"{FIRST}-{method}", seed, error)
    for name, error in ((CE, 3.0), (ISDA, 2.0)):
        make_run(folder, name, 0, error)
    make_run(folder, f"{FIRST}-isda", 5, 1.0, epochs=3)
    return folder


def raw_errors(out: Path, name: str) -> dict[int, float]:
    """Mean test error of the last lines of every metrics file, straight from disk."""
    errors = {}
    for path in sorted((out / name).glob("*/metrics.jsonl")):
        records = [json.loads(text) for text in path.read_text().splitlines()]
        last = records[-max(1, min(10, len(records) // 4)) :]
        errors[int(path.parent.name)] = float(np.mean([r["test_error"] for r in last]))
    return errors


def strip_checks(path: Path) -> None:
    """Metrics as earlier versions wrote them."""
    path.write_text(re.sub(', "check": "[0-9a-f]{16}"', "", path.read_text()))


def expected_numbers(out: Path) -> list[str]:
    """Means, spreads, difference and interval, by numpy and scipy."""
    sides = [list(raw_errors(out, name).values()) for name in (CE, ISDA)]
    numbers = [f"{np.mean(side):.2f} ± {np.std(side, ddof=1):.2f}" for side in sides]
    interval = scipy.stats.ttest_rel(sides[1], sides[0]).confidence_interval(0.95)
    change = np.mean(sides[1]) - np.mean(sides[0])
    text = f"{change:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})"
    return [*numbers, text.replace("-", "−")]


def naive_row(folder: Path, method: str) -> list[str]:
    """Row of a comparison with cross entropy, from the files, by numpy and scipy."""
    names = [f"{FIRST}-ce", f"{FIRST}-{method}"]
    one, other = ([raw_errors(folder, name)[seed] for seed in range(3)] for name in names)
    interval = scipy.stats.ttest_rel(other, one).confidence_interval(0.95)
    change = np.mean(other) - np.mean(one)
    text = f"{change:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})".replace("-", "−")
    significant = scipy.stats.ttest_rel(other, one).pvalue < 0.05
    word = ("lower" if change < 0 else "higher") if significant else "not significant"
    errors = " → ".join(naive_cell(folder, name)[:-4] for name in ("ce", method))
    return [text, word, errors, "0.510 → 0.510", "3.10 → 3.10", "3"]


def naive_cell(folder: Path, method: str) -> str:
    values = [raw_errors(folder, f"{FIRST}-{method}")[seed] for seed in range(3)]
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f} (3)"
