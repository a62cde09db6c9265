"""Which λ₀: chosen on images held out from training (Section 4.1), then tested.

Every candidate trains without the held-out images; the λ₀ with the lowest validation error trains
again on all images, and that is what is tested. The runs of a search are those that ``isda train``
makes with the same fields, so a search that was killed goes on as they do.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from isda import distributed
from isda.experiments.arguments import Arguments, parse, require_seeds
from isda.experiments.errors import InputError
from isda.experiments.files import write_text
from isda.experiments.recipes import RECIPES, Recipe, baseline_of, run_name
from isda.experiments.records import Run, summary
from isda.experiments.report.comparison import text_table
from isda.experiments.report.intervals import RESOLUTION, Estimate, estimate
from isda.experiments.training.loop import Options, Plan, join_processes, load_images, train
from isda.experiments.training.run_folder import require_free

__all__ = ["SearchResult", "Trial", "main", "search", "search_table"]


@dataclass(frozen=True)
class Trial:
    """The finished runs of one recipe, one for each seed."""

    name: str
    """Name of the runs."""

    recipe: Recipe
    """What was trained."""

    runs: tuple[Run, ...]
    """The runs, in the order of the seeds."""

    @property
    def errors(self) -> list[float]:
        """Error of each run, percent: on the held-out images, or on the test set without any."""
        results = {run.folder: summary(run) for run in self.runs}
        for folder, result in results.items():
            if not result.finished:
                raise InputError(
                    f"{folder} is not finished: {result.epochs} of {self.recipe.epochs} epochs"
                )
        return [result.error for result in results.values() if result.error is not None]

    @property
    def error(self) -> Estimate:
        """Mean and standard deviation of the error over seeds."""
        return estimate(self.errors)


@dataclass(frozen=True)
class SearchResult:
    """What a search came to."""

    trials: tuple[Trial, ...]
    """Every candidate on the held-out images; first the baseline, if it was asked for."""

    chosen: Trial
    """The candidate with the lowest validation error."""

    final: Trial
    """The chosen λ₀ trained on all images, on the test set."""

    record: Path
    """File that holds the result."""


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
    """Choose λ₀ on held-out images, train on all of them, and record the test error.

    Args:
        recipe: what is trained, apart from ``lambda_0`` and ``hold_out``.
        name: name of the recipe it was made from, if that is not the one that its fields give.
        start: that recipe before fields were changed; by default the one of the paper by ``name``.
        candidates: values of λ₀; by default those of the paper for the data set. Of two with the
            same error the smaller is chosen.
        seeds: seeds of every candidate.
        final_seeds: seeds of the training on all images.
        hold_out: number of images held out. By default that of the recipe; if it has none, a tenth
            of the training images (5,000 of CIFAR; 50,000 of ImageNet), but no fewer than classes.
        with_baseline: train plain cross entropy beside the candidates, to compare, not to choose.
        options: how to train.

    Returns:
        The result, or None in a process that does not write.
    """
    options = options or Options()
    begun = start or RECIPES.get(name or "", recipe)
    if recipe.method != "isda":
        raise InputError(f"method must be isda to search for its lambda_0, got {recipe.method!r}")
    if candidates is None:
        candidates = _IMAGENET_CANDIDATES if recipe.data == "imagenet" else _CANDIDATES
    _require_candidates(candidates)
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
    if not options.resume:  # a run in the way of the last training is found before the first
        final_names = [named(replace(one, hold_out=0)) for one in tried]
        require_free(options.out / one / str(seed) for one in final_names for seed in final_seeds)
    shown = [recipe.baseline()] if with_baseline else []
    with join_processes(options.device):  # one group for both trainings
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
    """The result as text: the candidates, which is chosen, and its test error."""
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


def main(arguments: list[str]) -> None:
    """Choose λ₀ on held-out training images, then train on all and tell the test error."""
    given, start, name = parse(_Arguments, "search", arguments, description=main.__doc__ or "")
    if given.recipe.method == "isda" and given.recipe.lambda_0 != start.lambda_0:
        raise InputError("lambda_0 is what is searched for: give its values as --candidates")
    result = search(
        given.recipe,
        name,
        start=start,
        candidates=given.candidates,
        seeds=given.seeds,
        final_seeds=given.final_seeds,
        with_baseline=given.with_baseline,
        options=given.options,
    )
    if result is not None:
        print(f"{search_table(result)}\n{result.record}")


@dataclass(frozen=True)
class _Arguments(Arguments):
    candidates: tuple[float, ...] | None = None
    """Values of lambda_0; if not given 0.1 0.25 0.5 0.75 1, for imagenet 1 2.5 5 7.5 10. Without
    --hold-out a tenth of the training images is held out (of ImageNet 50,000)."""

    final_seeds: tuple[int, ...] = (0, 1, 2)
    """One run on all images for each seed."""

    with_baseline: bool = False
    """Train plain cross entropy beside the candidates."""


_CANDIDATES = (0.1, 0.25, 0.5, 0.75, 1.0)  # these and the next: Section 4.1
_IMAGENET_CANDIDATES = (1.0, 2.5, 5.0, 7.5, 10.0)
_HOLD_OUT = {"cifar10": 5_000, "cifar100": 5_000, "imagenet": 50_000}


def _trials(
    recipes: Sequence[Recipe],
    named: Callable[[Recipe], str],
    seeds: Sequence[int],
    options: Options,
) -> list[Trial]:
    """Train every recipe with every seed, all at once; empty in a process that does not write."""
    plans = [Plan(named(recipe), recipe, seed) for recipe in recipes for seed in seeds]
    runs = iter(train(plans, options))
    trials = [Trial(named(recipe), recipe, tuple(islice(runs, len(seeds)))) for recipe in recipes]
    return [trial for trial in trials if trial.runs]


def _best(trials: Sequence[Trial]) -> int:
    """Number of the trial with the lowest mean error; of equal ones, that with the lowest λ₀."""
    least = min(trial.error.mean for trial in trials)
    best = [n for n, trial in enumerate(trials) if trial.error.mean < least + RESOLUTION]
    return min(best, key=lambda n: trials[n].recipe.lambda_0)


def _record(result: SearchResult, out: Path) -> dict[str, Any]:
    def entry(trial: Trial) -> dict[str, Any]:
        return {
            "name": trial.name,
            "method": trial.recipe.method,
            "lambda_0": trial.recipe.lambda_0,
            "mean": trial.error.mean,
            "std": trial.error.std,
            "seeds": [run.seed for run in trial.runs],
            "errors": trial.errors,
            "runs": [run.folder.relative_to(out).as_posix() for run in trial.runs],
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
