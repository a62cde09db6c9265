"""Search for λ₀ on images held out of training (Section 4.1).

Candidates train without the held-out images and are ranked by their validation error: in one round
with all epochs, as in the paper, or by successive halving, where a short round of all candidates is
followed by a longer one of the better half. The chosen λ₀ is then trained on all images and
evaluated on the test set. The runs are the same as those of ``isda train`` with the same settings,
so a search that was killed can be resumed.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isda import distributed
from isda.experiments.errors import InputError, RunsFailed, StoppedElsewhere
from isda.experiments.files import write_text
from isda.experiments.recipe_checks import require_seeds
from isda.experiments.recipes import RECIPES, pair_name
from isda.experiments.records import Run
from isda.experiments.report.intervals import RESOLUTION
from isda.experiments.report.sides import Side, create_side
from isda.experiments.report.text import text_table
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.device import join_processes
from isda.experiments.training.groups import Plan, load_images
from isda.experiments.training.images import kept_images
from isda.experiments.training.loop import train
from isda.experiments.training.run_folder import require_free
from isda.experiments.training.start import adopt_records

__all__ = [
    "Choice",
    "Round",
    "SearchResult",
    "checked_candidates",
    "choice_record",
    "choice_table",
    "choose",
    "default_hold_out",
    "halving",
    "search",
    "search_table",
]


@dataclass(frozen=True)
class Round:
    """A round of a search."""

    candidates: int
    """Number of candidates: those with the lowest error in the round before."""

    epochs: int
    """Number of epochs."""

    seeds: tuple[int, ...]
    """Seeds of every candidate."""

    @property
    def cost(self) -> int:
        """Epochs of all runs."""
        return self.candidates * self.epochs * len(self.seeds)


@dataclass(frozen=True)
class Choice:
    """The rounds of a search, and what they chose."""

    rounds: tuple[tuple[Side, ...], ...]
    """Validation runs by round; the first round begins with the baseline if it was requested."""

    chosen: Side
    """The candidate with the lowest validation error in the last round."""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    choice: Choice
    """Validation runs."""

    final: Side
    """Runs of the chosen λ₀ on all images, evaluated on the test set."""

    record: Path
    """File with the result."""

    @property
    def trials(self) -> tuple[Side, ...]:
        """Validation runs of the candidates, after those of the baseline if it was requested."""
        return self.choice.rounds[-1]

    @property
    def chosen(self) -> Side:
        """The candidate with the lowest validation error."""
        return self.choice.chosen


def halving(number: int, epochs: int, seeds: Sequence[int] = (0, 1)) -> list[Round]:
    """Rounds of successive halving over epochs and seeds.

    All candidates train for a quarter of the epochs with one seed, and the better half of them for
    half of the epochs with two. With five candidates and the paper's 160 epochs this takes 680
    epochs, where all candidates with two seeds and all epochs take 1600.

    >>> [(one.candidates, one.epochs, one.seeds) for one in halving(5, 160)]
    [(5, 40, (0,)), (3, 80, (0, 1))]

    Args:
        number: number of candidates.
        epochs: epochs of the recipe.
        seeds: two seeds.
    """
    short, long = (min(epochs, max(2, math.ceil(epochs / part))) for part in (4, 2))
    last = Round(math.ceil(number / 2) if number > 2 else number, long, tuple(seeds))
    return [Round(number, short, tuple(seeds[:1])), last] if number > 2 else [last]


def choose(
    recipe: Recipe,
    candidates: Sequence[float],
    rounds: Sequence[Round],
    named: Callable[[Recipe], str],
    options: Options,
    *,
    with_baseline: bool = False,
    records: Path | None = None,
) -> tuple[float, Choice | None]:
    """Choose λ₀ on held-out images; call it on all ranks, inside ``join_processes``.

    Args:
        recipe: recipe to train, with ``hold_out``.
        candidates: values of λ₀. Ties go to the smallest.
        rounds: rounds in order.
        named: name of the runs of a recipe.
        options: how to run the training.
        with_baseline: also train cross entropy in the first round, for comparison.
        records: folder of finished runs, which are not trained again.

    Returns:
        The chosen λ₀ on all ranks, and the runs on rank 0.
    """
    tried = [replace(recipe, lambda_0=float(lambda_0)) for lambda_0 in candidates]
    if not options.resume:
        require_free(
            options.out / named(one.shortened(part.epochs)) / str(seed)
            for part in rounds for one in tried for seed in part.seeds
        )  # fmt: skip
    order = list(range(len(tried)))
    shown: list[tuple[Side, ...]] = []
    for number, part in enumerate(rounds):
        recipes = [tried[n].shortened(part.epochs) for n in sorted(order[: part.candidates])]
        baseline = (
            [recipe.baseline().shortened(part.epochs)] if with_baseline and not number else []
        )
        # runs of the rounds before may be the same, if they have as few epochs
        own = options.changed(resume=True) if number else options
        trials = _trials([*baseline, *recipes], named, part.seeds, own, records)
        order = _ranked(trials, candidates)
        shown.append(tuple(trials))
    best = order[0]
    if not shown[-1]:
        return candidates[best], None
    chosen = next(t for t in shown[-1] if t.recipe.lambda_0 == tried[best].lambda_0
                  and t.recipe.method == "isda")  # fmt: skip
    return candidates[best], Choice(tuple(shown), chosen)


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
    records: Path | None = None,
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
        records: folder of finished runs, which are not trained again.

    Returns:
        The result; None on ranks other than 0.
    """
    options = options or Options()
    begun = start or RECIPES.get(name or "", recipe)
    if recipe.method != "isda":
        raise InputError(f"method must be isda to search for its lambda_0, got {recipe.method!r}")
    candidates = checked_candidates(candidates, recipe)
    require_seeds("seeds", seeds)
    require_seeds("final_seeds", final_seeds)
    if hold_out is None:
        hold_out = recipe.hold_out or default_hold_out(recipe, options)
    if hold_out < 1:
        raise InputError(f"hold_out must be >= 1, got {hold_out}")

    named = partial(pair_name, begun, name)
    recipe = replace(recipe, hold_out=hold_out)
    if not options.resume:  # find existing runs of the final training now, not after hours
        finals = [named(replace(recipe, lambda_0=float(one), hold_out=0)) for one in candidates]
        require_free(options.out / one / str(seed) for one in finals for seed in final_seeds)
    rounds = [Round(len(candidates), recipe.epochs, tuple(seeds))]
    # one process group for both trainings, and images that are decoded once
    with join_processes(options.device), kept_images():
        best, choice = choose(
            recipe,
            candidates,
            rounds,
            named,
            options,
            with_baseline=with_baseline,
            records=records,
        )
        chosen = replace(recipe, lambda_0=float(best), hold_out=0)
        final = _trials([chosen], named, final_seeds, options, records)
    if choice is None:
        return None
    whole = replace(recipe, lambda_0=begun.lambda_0, hold_out=0)
    path = options.out / f"{named(whole)}.search.json"
    result = SearchResult(choice, final[0], path)
    write_text(path, json.dumps(_record(result, options.out), indent=2) + "\n")
    return result


def search_table(result: SearchResult) -> str:
    """The candidates, the chosen one and its test error, as text."""
    final = result.final
    count = f"{len(final.runs)} seed{'s' if len(final.runs) > 1 else ''}"
    return "\n".join(
        [
            choice_table(result.choice),
            "",
            f"λ₀ = {final.recipe.lambda_0:g}, trained on all images: "
            f"test error {final.error.format()} % ({count}).",
        ]
    )


def choice_table(choice: Choice) -> str:
    """The candidates of all rounds and their errors, as text."""
    several = len(choice.rounds) > 1
    rows = []
    for trials in choice.rounds:
        for trial in trials:
            isda = trial.recipe.method == "isda"
            label = f"{trial.recipe.lambda_0:g}" if isda else "cross entropy"
            mark = "← chosen" if trial is choice.chosen else ""
            epochs = [str(trial.recipe.epochs)] * several
            rows.append([label, *epochs, trial.error.format(), str(len(trial.runs)), mark])
    header = ["λ₀", *["epochs"] * several, "validation error, %", "seeds", ""]
    return text_table(header, rows)


_CANDIDATES = (0.1, 0.25, 0.5, 0.75, 1.0)  # these and the next: Section 4.1
_IMAGENET_CANDIDATES = (1.0, 2.5, 5.0, 7.5, 10.0)
_HOLD_OUT = {"cifar10": 5_000, "cifar100": 5_000, "imagenet": 50_000}


def _trials(
    recipes: Sequence[Recipe],
    named: Callable[[Recipe], str],
    seeds: Sequence[int],
    options: Options,
    records: Path | None,
) -> list[Side]:
    """Train every recipe with every seed in one go; empty on ranks other than 0."""
    plans = [Plan(named(recipe), recipe, seed) for recipe in recipes for seed in seeds]
    if records is not None and distributed.rank(None) == 0:
        adopt_records(plans, records, options.out)
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


def _ranked(trials: Sequence[Side], candidates: Sequence[float]) -> list[int]:
    """Indices of the candidates in the order of their errors, the same on all ranks.

    Errors that are equal up to rounding are ordered by λ₀. Candidates that failed are left out.
    """
    left = [trial for trial in trials if trial.recipe.method == "isda"]
    order = torch.full((len(candidates),), -1)
    for place in range(len(left)):
        least = min(trial.error.mean for trial in left)
        equal = [trial for trial in left if trial.error.mean < least + RESOLUTION]
        best = min(equal, key=lambda trial: trial.recipe.lambda_0)
        left.remove(best)
        order[place] = list(map(float, candidates)).index(best.recipe.lambda_0)
    distributed.broadcast([order])  # only rank 0 has the records
    return [number for number in order.tolist() if number >= 0]


def _record(result: SearchResult, out: Path) -> dict[str, Any]:
    return {
        "hold_out": result.chosen.recipe.hold_out,
        "candidates": [_entry(trial, out) for trial in result.trials],
        "chosen": result.chosen.recipe.lambda_0,
        "final": _entry(result.final, out),
    }


def choice_record(choice: Choice, out: Path) -> dict[str, Any]:
    """The rounds of a search as JSON values."""
    return {
        "hold_out": choice.chosen.recipe.hold_out,
        "rounds": [
            {"epochs": trials[0].recipe.epochs, "candidates": [_entry(t, out) for t in trials]}
            for trials in choice.rounds
        ],
        "chosen": choice.chosen.recipe.lambda_0,
    }


def _entry(trial: Side, out: Path) -> dict[str, Any]:
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


def default_hold_out(recipe: Recipe, options: Options) -> int:
    """Number of images to hold out: as in the paper, else a tenth, and at least one per class."""
    if recipe.data in _HOLD_OUT:
        return _HOLD_OUT[recipe.data]
    data = load_images(recipe, options)
    return max(len(data.train_target) // 10, data.num_classes)


def checked_candidates(candidates: Sequence[float] | None, recipe: Recipe) -> tuple[float, ...]:
    """The candidates, by default those of the paper; raises InputError if they are not valid."""
    if candidates is None:
        candidates = _IMAGENET_CANDIDATES if recipe.data == "imagenet" else _CANDIDATES
    valid = all(0 <= lambda_0 < math.inf for lambda_0 in candidates)
    if not candidates or not valid or len({*candidates}) != len(candidates):
        listed = " ".join(f"{lambda_0:g}" for lambda_0 in candidates) or "none"
        raise InputError(f"candidates must be different numbers >= 0, got {listed}")
    replace(recipe, lambda_0=max(candidates)).require_ramp()
    return tuple(candidates)
