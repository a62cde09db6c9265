"""Search for λ₀ on images held out of training (Section 4.1): ``isda search`` and ``compare``.

Candidates train without the held-out images and are ranked by their validation error: in one round
with all epochs, as in the paper, or by successive halving, where a short round of all candidates is
followed by a longer one of the better half. The runs are the same as those of ``isda train`` with
the same settings, so a search that was killed can be resumed.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isda import distributed
from isda.experiments.commands.recipe_arguments import RecipeArguments
from isda.experiments.errors import InputError, RunsFailed, StoppedElsewhere
from isda.experiments.records import Run
from isda.experiments.report.intervals import RESOLUTION
from isda.experiments.report.sides import Side, create_side
from isda.experiments.report.text import text_table
from isda.experiments.settings import Options, Recipe
from isda.experiments.training import loop
from isda.experiments.training.groups import Plan, load_images
from isda.experiments.training.run_folder import require_free
from isda.experiments.training.start import adopt_records

__all__ = [
    "Choice",
    "Round",
    "checked_candidates",
    "choice_table",
    "choose",
    "halving",
    "side_record",
    "train_sides",
    "with_hold_out",
]

_CANDIDATES = (0.1, 0.25, 0.5, 0.75, 1.0)  # these and the next: Section 4.1
_IMAGENET_CANDIDATES = (1.0, 2.5, 5.0, 7.5, 10.0)
_HOLD_OUT = {"cifar10": 5_000, "cifar100": 5_000, "imagenet": 50_000}


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


def halving(number: int, epochs: int) -> list[Round]:
    """Rounds of successive halving over epochs and seeds.

    All candidates train for a quarter of the epochs with one seed, and the better half of them for
    half of the epochs with two. With five candidates and the paper's 160 epochs this takes 680
    epochs, where all candidates with two seeds and all epochs take 1600.

    >>> [(one.candidates, one.epochs, one.seeds) for one in halving(5, 160)]
    [(5, 40, (0,)), (3, 80, (0, 1))]

    Args:
        number: number of candidates.
        epochs: epochs of the recipe.
    """
    short, long = (min(epochs, max(2, math.ceil(epochs / part))) for part in (4, 2))
    last = Round(math.ceil(number / 2) if number > 2 else number, long, (0, 1))
    return [Round(number, short, (0,)), last] if number > 2 else [last]


def checked_candidates(candidates: Sequence[float] | None, recipe: Recipe) -> tuple[float, ...]:
    """The candidates, by default those of the paper; raises InputError if they are not valid."""
    if candidates is None:
        candidates = _IMAGENET_CANDIDATES if recipe.data == "imagenet" else _CANDIDATES
    valid = all(0 <= lambda_0 < math.inf for lambda_0 in candidates)
    if not candidates or not valid or len({*candidates}) != len(candidates):
        listed = " ".join(f"{lambda_0:g}" for lambda_0 in candidates) or "none"
        raise InputError(f"candidates must be different numbers >= 0, got {listed}")
    replace(recipe, lambda_0=max(candidates)).require_ramp()
    return tuple(map(float, candidates))


def with_hold_out(recipe: Recipe, options: Options) -> Recipe:
    """The recipe with its ``hold_out``; if that is 0, with the number of images in the paper.

    For data sets that the paper does not use, hold out a tenth of the training images, but at least
    as many as there are classes.
    """
    number = recipe.hold_out or _HOLD_OUT.get(recipe.data, 0)
    if not number:
        data = load_images(recipe, options)
        images, classes = len(data.train_target), data.num_classes
        if images < 2 * classes:
            raise InputError(
                f"{recipe.data} must have two or more training images of each class, so that one "
                f"can be held out, got {images} images of {classes} classes"
            )
        number = max(images // 10, classes)
    return replace(recipe, hold_out=number)


def choose(
    given: RecipeArguments,
    candidates: Sequence[float],
    rounds: Sequence[Round],
    *,
    with_baseline: bool = False,
    records: Path | None = None,
) -> tuple[float, Choice | None]:
    """Choose λ₀ on held-out images; call it on all ranks, inside ``join_processes``.

    Args:
        given: recipe to train, with ``hold_out``, and how to train it.
        candidates: values of λ₀. Ties go to the smallest.
        rounds: rounds in order.
        with_baseline: also train cross entropy in the first round, for comparison.
        records: folder of finished runs, which are not trained again.

    Returns:
        The chosen λ₀ on all ranks, and the runs on rank 0.
    """
    tried = [replace(given.recipe, lambda_0=lambda_0) for lambda_0 in candidates]
    if not given.options.resume:
        require_free(
            given.options.out / given.start.pair_name(one.shortened(part.epochs)) / str(seed)
            for part in rounds for one in tried for seed in part.seeds
        )  # fmt: skip
    order = list(range(len(tried)))
    shown: list[tuple[Side, ...]] = []
    for number, part in enumerate(rounds):
        recipes = [tried[n] for n in sorted(order[: part.candidates])]
        if with_baseline and not number:
            recipes.insert(0, given.recipe.baseline())
        recipes = [recipe.shortened(part.epochs) for recipe in recipes]
        if number:  # runs of the rounds before may be the same, if they have as few epochs
            given = replace(given, options=given.options.changed(resume=True))
        sides = train_sides(recipes, part.seeds, given, records)
        order = _ranked(sides, candidates)
        shown.append(tuple(sides))
    best = candidates[order[0]]
    chosen = [side for side in shown[-1]
              if side.recipe.method == "isda" and side.recipe.lambda_0 == best]  # fmt: skip
    return best, Choice(tuple(shown), chosen[0]) if chosen else None


def train_sides(
    recipes: Sequence[Recipe],
    seeds: Sequence[int],
    given: RecipeArguments,
    records: Path | None,
) -> list[Side]:
    """Train every recipe with every seed at once; returns an empty list on ranks other than 0."""
    named = {given.start.pair_name(recipe): recipe for recipe in recipes}
    plans = [Plan(name, recipe, seed) for name, recipe in named.items() for seed in seeds]
    if records is not None and distributed.rank(None) == 0:
        adopt_records(plans, records, given.options.out)
    try:
        runs: Sequence[Run] = loop.train(plans, given.options)
    except RunsFailed as error:  # of candidates with too large a λ₀, for example
        runs = error.runs
        complete = Counter(run.name for run in runs)
        named = {name: one for name, one in named.items() if complete[name] == len(seeds)}
        if not any(recipe.method == "isda" for recipe in named.values()):
            raise
    except StoppedElsewhere as error:
        if error.fatal:
            raise
        runs = []
    return [create_side(runs, name) for name in named] if runs else []


def choice_table(choice: Choice) -> str:
    """The candidates of all rounds and their errors, as text."""
    several = len(choice.rounds) > 1
    rows = []
    for side in (side for sides in choice.rounds for side in sides):
        isda = side.recipe.method == "isda"
        label = f"{side.recipe.lambda_0:g}" if isda else "cross entropy"
        mark = "← chosen" if side is choice.chosen else ""
        epochs = [str(side.recipe.epochs)] * several
        rows.append([label, *epochs, side.error.format(), str(len(side.runs)), mark])
    header = ["λ₀", *["epochs"] * several, "validation error, %", "seeds", ""]
    return text_table(header, rows)


def side_record(side: Side, out: Path) -> dict[str, Any]:
    """Runs of a recipe as JSON values, with their folders relative to ``out``."""
    return {
        "name": side.name,
        "method": side.recipe.method,
        "lambda_0": side.recipe.lambda_0,
        "mean": side.error.mean,
        "std": side.error.std,
        "seeds": list(side.runs),
        "errors": list(side.errors.values()),
        "runs": [run.folder.relative_to(out).as_posix() for run in side.runs.values()],
    }


def _ranked(sides: Sequence[Side], candidates: Sequence[float]) -> list[int]:
    """Indices of the candidates in the order of their errors, the same on all ranks.

    Errors that are equal up to rounding are ordered by λ₀. Candidates that failed are left out.
    """
    left = [side for side in sides if side.recipe.method == "isda"]
    order = torch.full((len(candidates),), -1)
    for place in range(len(left)):
        least = min(side.error.mean for side in left)
        equal = [side for side in left if side.error.mean < least + RESOLUTION]
        best = min(equal, key=lambda side: side.recipe.lambda_0)
        left.remove(best)
        order[place] = candidates.index(best.recipe.lambda_0)
    distributed.broadcast([order])  # only rank 0 has the records
    return [number for number in order.tolist() if number >= 0]
