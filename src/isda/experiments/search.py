"""Search for λ₀ on images held out of training (Section 4.1).

Every candidate trains without the held-out images. The λ₀ with the lowest validation error is then
trained on all images and evaluated on the test set. The runs are the same as those of ``isda
train`` with the same settings, so a search that was killed can be resumed.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isda import distributed
from isda.experiments.errors import InputError, RunsFailed, StoppedElsewhere
from isda.experiments.files import write_text
from isda.experiments.recipes import RECIPES, baseline_of, run_name
from isda.experiments.records import Run
from isda.experiments.report.comparison import Side, create_side
from isda.experiments.report.intervals import RESOLUTION
from isda.experiments.report.text import text_table
from isda.experiments.settings import Options, Recipe, require_seeds
from isda.experiments.training.device import join_processes
from isda.experiments.training.groups import Plan, load_images
from isda.experiments.training.loop import train
from isda.experiments.training.run_folder import require_free

__all__ = ["SearchResult", "search", "search_table"]


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    trials: tuple[Side, ...]
    """Validation runs of the candidates, after those of the baseline if it was requested."""

    chosen: Side
    """The candidate with the lowest validation error."""

    final: Side
    """Runs of the chosen λ₀ on all images, evaluated on the test set."""

    record: Path
    """File with the result."""


def search(
    recipe: Recipe,
    name: str | None = None,
    *,
    start: Recipe | None = None,
    candidates: Sequence[float] | None = None,
    seeds: Sequence[int] = (0,),
    final_seeds: Sequence[int] = (0, 1, 2),
    hold_out: int | None = None,
    with_baseline: bool = False,
    options: Options | None = None,
) -> SearchResult | None:
    """Choose λ₀ on held-out images, train on all images, and record the test error.

    Args:
        recipe: recipe to train; its ``lambda_0`` is ignored.
        name: name of the recipe that ``recipe`` was made from, if it has one.
        start: that recipe before fields were changed; by default the paper's recipe ``name``.
        candidates: values of λ₀; by default those of the paper for the data set. Ties go to the
            smallest value.
        seeds: seeds of every candidate.
        final_seeds: seeds of the final runs on all images.
        hold_out: number of held-out images; by default that of the recipe, else a tenth of the
            training images (CIFAR 5,000, ImageNet 50,000), and at least one per class.
        with_baseline: also train cross entropy on the same split, for comparison.
        options: how to run the training.

    Returns:
        The result; None on ranks other than 0.
    """
    options = options or Options()
    begun = start or RECIPES.get(name or "", recipe)
    if recipe.method != "isda":
        raise InputError(f"method must be isda to search for its lambda_0, got {recipe.method!r}")
    if candidates is None:
        candidates = _IMAGENET_CANDIDATES if recipe.data == "imagenet" else _CANDIDATES
    _require_candidates(candidates)
    replace(recipe, lambda_0=max(candidates)).require_ramp()
    require_seeds("seeds", seeds)
    require_seeds("final_seeds", final_seeds)
    if hold_out is None:
        hold_out = recipe.hold_out or _default_hold_out(recipe, options)
    if hold_out < 1:
        raise InputError(f"hold_out must be >= 1, got {hold_out}")

    def named(trial: Recipe) -> str:
        if trial.method == "isda":
            return run_name(trial, begun, name)
        return run_name(trial, begun.baseline(), baseline_of(name) if name else None)

    recipe = replace(recipe, hold_out=hold_out)
    tried = [replace(recipe, lambda_0=float(lambda_0)) for lambda_0 in candidates]
    if not options.resume:  # find existing runs of the final training now, not after hours
        final_names = [named(replace(one, hold_out=0)) for one in tried]
        require_free(options.out / one / str(seed) for one in final_names for seed in final_seeds)
    shown = [recipe.baseline()] if with_baseline else []
    with join_processes(options.device):  # one process group for both trainings
        trials = _trials([*shown, *tried], named, seeds, options)
        number = torch.tensor(_best(trials[len(shown) :]) if trials else 0)
        distributed.broadcast([number])  # only rank 0 has the records
        best = tried[int(number)]
        final = _trials([replace(best, hold_out=0)], named, final_seeds, options)
    if not trials:
        return None
    whole = replace(recipe, lambda_0=begun.lambda_0, hold_out=0)
    path = options.out / f"{named(whole)}.search.json"
    result = SearchResult(tuple(trials), trials[len(shown) + int(number)], final[0], path)
    write_text(path, json.dumps(_record(result, options.out), indent=2) + "\n")
    return result


def search_table(result: SearchResult) -> str:
    """The candidates, the chosen one and its test error, as text."""
    rows = []
    for trial in result.trials:
        isda = trial.recipe.method == "isda"
        label = f"{trial.recipe.lambda_0:g}" if isda else "cross entropy"
        mark = "← chosen" if trial is result.chosen else ""
        rows.append([label, trial.error.format(), str(len(trial.runs)), mark])
    final = result.final
    count = f"{len(final.runs)} seed{'s' if len(final.runs) > 1 else ''}"
    return "\n".join(
        [
            text_table(["λ₀", "validation error, %", "seeds", ""], rows),
            "",
            f"λ₀ = {final.recipe.lambda_0:g}, trained on all images: "
            f"test error {final.error.format()} % ({count}).",
        ]
    )


_CANDIDATES = (0.1, 0.25, 0.5, 0.75, 1.0)  # these and the next: Section 4.1
_IMAGENET_CANDIDATES = (1.0, 2.5, 5.0, 7.5, 10.0)
_HOLD_OUT = {"cifar10": 5_000, "cifar100": 5_000, "imagenet": 50_000}


def _trials(
    recipes: Sequence[Recipe],
    named: Callable[[Recipe], str],
    seeds: Sequence[int],
    options: Options,
) -> list[Side]:
    """Train every recipe with every seed in one go; empty on ranks other than 0."""
    plans = [Plan(named(recipe), recipe, seed) for recipe in recipes for seed in seeds]
    try:
        runs: Sequence[Run] = train(plans, options)
    except RunsFailed as error:  # of candidates with too large a λ₀, for example
        runs = error.runs
        complete = Counter(run.name for run in runs)
        recipes = [recipe for recipe in recipes if complete[named(recipe)] == len(seeds)]
        if not any(recipe.method == "isda" for recipe in recipes):
            raise
    except StoppedElsewhere as error:
        if error.fatal:
            raise
        runs = []
    return [create_side(runs, named(recipe)) for recipe in recipes] if runs else []


def _best(trials: Sequence[Side]) -> int:
    """Index of the trial with the lowest mean error; ties go to the smallest λ₀."""
    least = min(trial.error.mean for trial in trials)
    best = [n for n, trial in enumerate(trials) if trial.error.mean < least + RESOLUTION]
    return min(best, key=lambda n: trials[n].recipe.lambda_0)


def _record(result: SearchResult, out: Path) -> dict[str, Any]:
    def entry(trial: Side) -> dict[str, Any]:
        return {
            "name": trial.name,
            "method": trial.recipe.method,
            "lambda_0": trial.recipe.lambda_0,
            "mean": trial.error.mean,
            "std": trial.error.std,
            "seeds": list(trial.runs),
            "errors": list(trial.errors.values()),
            "runs": [run.folder.relative_to(out).as_posix() for run in trial.runs.values()],
        }

    return {
        "hold_out": result.chosen.recipe.hold_out,
        "candidates": [entry(trial) for trial in result.trials],
        "chosen": result.chosen.recipe.lambda_0,
        "final": entry(result.final),
    }


def _default_hold_out(recipe: Recipe, options: Options) -> int:
    if recipe.data in _HOLD_OUT:
        return _HOLD_OUT[recipe.data]
    data = load_images(recipe, options)
    return max(len(data.train_target) // 10, data.num_classes)


def _require_candidates(candidates: Sequence[float]) -> None:
    valid = all(0 <= lambda_0 < math.inf for lambda_0 in candidates)
    if not candidates or not valid or len({*candidates}) != len(candidates):
        listed = " ".join(f"{lambda_0:g}" for lambda_0 in candidates) or "none"
        raise InputError(f"candidates must be different numbers >= 0, got {listed}")
