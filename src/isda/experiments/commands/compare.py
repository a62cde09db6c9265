"""``isda compare``: cross entropy and ISDA with the same seeds, compared on the test set.

With ``--lambda-0 auto``, λ₀ is first chosen on held-out images, by successive halving.
"""

import contextlib
import re
import warnings
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from isda import distributed
from isda.experiments.commands.lambda_search import (
    Choice,
    Round,
    checked_candidates,
    choice_table,
    choose,
    halving,
    side_record,
    with_hold_out,
)
from isda.experiments.commands.recipe_arguments import RecipeArguments, parse_recipe
from isda.experiments.commands.task import PlannedRuns, Task
from isda.experiments.errors import InputError
from isda.experiments.files import write_json
from isda.experiments.report.comparison import comparison, comparison_table
from isda.experiments.report.intervals import RESOLUTION
from isda.experiments.report.text import show
from isda.experiments.settings import Options, Recipe
from isda.experiments.training import loop
from isda.experiments.training.device import join_processes
from isda.experiments.training.failures import finished_first
from isda.experiments.training.groups import Plan
from isda.experiments.training.images import kept_images
from isda.experiments.training.predicted_images import thumbnails
from isda.experiments.training.run_folder import require_free

__all__ = ["Compare", "plan", "run"]


@dataclass(frozen=True)
class Compare(RecipeArguments, Task):
    """Arguments of ``isda compare``; as a task, a comparison whose λ₀ is still to be chosen."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each method per seed."""

    candidates: tuple[float, ...] | None = None
    """Values to try with --lambda-0 auto; None: 0.1 0.25 0.5 0.75 1, or for imagenet 1 2.5 5 7.5
    10. Without --hold-out, a tenth of the training images is held out (imagenet: 50,000)."""

    def with_lambda_0(self, lambda_0: float, *, hold_out: int = 0) -> PlannedRuns:
        """Runs of cross entropy and of ISDA with this λ₀, in this order."""
        recipe = replace(self.recipe, lambda_0=lambda_0, hold_out=hold_out)
        recipes = {self.start.pair_name(one): one for one in (recipe.baseline(), recipe)}
        return PlannedRuns(recipes, self.seeds, self.options)

    def plans(self) -> list[Plan]:
        candidates = checked_candidates(self.candidates, self.recipe)
        held = with_hold_out(self.recipe, self.options)
        plans = []
        for part in halving(len(candidates), self.recipe.epochs):
            tried = [replace(held, lambda_0=lambda_0).shortened(part.epochs)
                     for lambda_0 in candidates[: part.candidates]]  # fmt: skip
            plans += [Plan(self.start.pair_name(recipe), recipe, seed)
                      for recipe, seed in product(tried, part.seeds)]  # fmt: skip
        return plans + self.with_lambda_0(self.start.recipe.lambda_0).plans()

    def train_missing(self, title: str, records: Path) -> None:
        with join_processes(self.options.device):  # for both trainings
            planned, _ = self.choose_lambda_0(records)
            planned.train_missing(title, records)

    def choose_lambda_0(self, records: Path | None = None) -> tuple[PlannedRuns, Choice | None]:
        """Choose λ₀ by successive halving; call it on all ranks, inside ``join_processes``.

        Prints the plan before it starts, and the errors of the candidates.

        Args:
            records: folder of finished runs, which are not trained again.

        Returns:
            The runs of the comparison on all images, and on rank 0 the runs of the search.
        """
        out = self.options.out
        candidates = checked_candidates(self.candidates, self.recipe)
        held = replace(self, recipe=with_hold_out(self.recipe, self.options))
        rounds = halving(len(candidates), self.recipe.epochs)
        if not self.options.resume:  # find existing runs of the comparison now, not after hours
            for lambda_0 in candidates:
                plans = self.with_lambda_0(lambda_0).plans()
                require_free(plan.folder(out) for plan in plans)
        if distributed.rank(None) == 0:
            show(held._plan_words(candidates, rounds))
        best, choice = choose(held, candidates, rounds, records=records)
        planned = self.with_lambda_0(best)
        if choice is not None:
            record = {
                "hold_out": held.recipe.hold_out,
                "rounds": [
                    {"epochs": sides[0].recipe.epochs,
                     "candidates": [side_record(side, out) for side in sides]}
                    for sides in choice.rounds
                ],
                "chosen": best,
            }  # fmt: skip
            path = out / f"{list(planned.recipes)[1]}.lambda_0.json"
            write_json(path, record)
            show(f"\n{choice_table(choice)}\n{_tie_words(choice)}")
        return planned, choice

    def _plan_words(self, candidates: tuple[float, ...], rounds: list[Round]) -> str:
        """What will be trained, and how many epochs it takes."""
        hold_out = self.recipe.hold_out
        few = f"; each is worth {100 / hold_out:.2g} points of error" if hold_out < 100 else ""
        lines = [f"λ₀ is chosen on {hold_out} held-out training images{few}:"]
        listed = " ".join(f"{lambda_0:g}" for lambda_0 in candidates)
        for number, part in enumerate(rounds, 1):
            which = listed if number == 1 else f"the best {part.candidates} of them"
            size = _size(part.epochs, part.seeds)
            lines.append(f"  round {number}: {which}, {size}, {part.cost} in all")
        search = sum(part.cost for part in rounds)
        compared = 2 * self.recipe.epochs * len(self.seeds)
        size = _size(self.recipe.epochs, self.seeds)
        lines.append(f"  then: cross entropy and ISDA, {size}, {compared} in all")
        share = 100 * search / compared
        lines.append(f"The search takes {search} epochs, {share:.0f} % as many as the comparison.")
        return "\n".join(lines)


def plan(words: list[str]) -> PlannedRuns | Compare:
    """The task described by the arguments of the command."""
    words, auto = _take_auto(words)
    given = parse_recipe(Compare, "compare", words)
    recipe = given.recipe
    if recipe.method != "isda":
        raise InputError(f"method must be isda to compare it with ce, got {recipe.method!r}")
    if given.candidates is not None and not auto:
        raise InputError("--candidates requires --lambda-0 auto: add it, or remove --candidates")
    if auto:
        checked_candidates(given.candidates, recipe)
    return given if auto else given.with_lambda_0(recipe.lambda_0, hold_out=recipe.hold_out)


def run(words: list[str]) -> None:
    """Train, print the comparison, and write its page."""
    planned = plan(words)
    options, choice = planned.options, None
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_images())  # for all trainings, and for the pictures
        if isinstance(planned, Compare):
            stack.enter_context(join_processes(options.device))  # for both trainings
            planned, choice = planned.choose_lambda_0()
        runs = stack.enter_context(finished_first(loop.train, planned.plans(), options))
        if not {one.name for one in runs} >= planned.recipes.keys():
            return  # only rank 0 has the records; or all runs of a side have failed
        from isda.experiments.report.pages import write_comparison_page  # imports matplotlib

        result = comparison(runs, *planned.recipes)
        page = options.out / f"{result.method.name}.html"
        pictures = partial(_pictures, result.method.recipe, options)
        write_comparison_page(page, result, choice=choice, pictures=pictures)
        show(f"{comparison_table(result)}\n{page}")


def _pictures(recipe: Recipe, options: Options, seed: int, indices: list[int]) -> dict[int, bytes]:
    """Pictures of test images; none if they cannot be read."""
    try:
        return thumbnails(recipe, seed, indices, options)
    except (OSError, ValueError, IndexError) as error:  # images that were moved or changed
        warnings.warn(f"no pictures on the page: {error}", stacklevel=2)
        return {}


def _take_auto(words: list[str]) -> tuple[list[str], bool]:
    """The words without ``--lambda-0 auto``, and whether they contained it."""
    text = "\0".join(["", *words, ""])
    rest = re.sub("\0--lambda[-_]0[=\0]auto(?=\0)", "", text)
    return rest.split("\0")[1:-1], rest != text


def _tie_words(choice: Choice) -> str:
    """Line about candidates with the same error as the chosen one; empty if there are none."""
    error = choice.chosen.error.mean
    equal = [side for side in choice.rounds[-1] if abs(side.error.mean - error) < RESOLUTION]
    if len(equal) < 2:
        return ""
    *most, last = (f"{value:g}" for value in sorted(side.recipe.lambda_0 for side in equal))
    return f"{', '.join(most)} and {last} have the lowest error: the smallest is chosen.\n"


def _size(epochs: int, seeds: tuple[int, ...]) -> str:
    many = f"seeds {' '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    return f"{epochs} epochs, {many}"
