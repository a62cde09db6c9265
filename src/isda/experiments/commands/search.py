"""``isda search``: choose λ₀ on held-out images, train on all images, and test."""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from isda.experiments.commands.arguments import require_seeds
from isda.experiments.commands.lambda_search import (
    Choice,
    Round,
    checked_candidates,
    choice_table,
    choose,
    side_record,
    train_sides,
    with_hold_out,
)
from isda.experiments.commands.recipe_arguments import RecipeArguments, parse_recipe
from isda.experiments.commands.task import Task
from isda.experiments.errors import InputError
from isda.experiments.files import write_json
from isda.experiments.report.sides import Side
from isda.experiments.report.text import show
from isda.experiments.settings import Recipe
from isda.experiments.training.device import join_processes
from isda.experiments.training.groups import Plan
from isda.experiments.training.images import kept_images
from isda.experiments.training.run_folder import require_free

__all__ = ["Search", "SearchResult", "plan", "run"]


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    choice: Choice
    """Validation runs."""

    final: Side
    """Runs of the chosen λ₀ on all images, evaluated on the test set."""

    record: Path
    """File with the result."""


@dataclass(frozen=True)
class Search(RecipeArguments, Task):
    """Arguments of ``isda search``; the λ₀ of the recipe is ignored."""

    candidates: tuple[float, ...] | None = None
    """Values of lambda_0 to try; None: 0.1 0.25 0.5 0.75 1, or for imagenet 1 2.5 5 7.5 10.
    Without --hold-out, a tenth of the training images is held out (imagenet: 50,000)."""

    final_seeds: tuple[int, ...] = (0, 1, 2)
    """One final run on all training images per seed."""

    with_baseline: bool = False
    """Also train plain cross entropy on the same split, for comparison."""

    def plans(self) -> list[Plan]:
        candidates = checked_candidates(self.candidates, self.recipe)
        held = with_hold_out(self.recipe, self.options)
        tried = [replace(held, lambda_0=lambda_0) for lambda_0 in candidates]
        tried += [held.baseline()] * self.with_baseline
        usual = self._final(self.start.recipe.lambda_0)
        runs = [*product(tried, self.seeds), *product([usual], self.final_seeds)]
        return [Plan(self.start.pair_name(recipe), recipe, seed) for recipe, seed in runs]

    def train_missing(self, title: str, records: Path) -> None:
        print(title, flush=True)
        _show(self.search(records))

    def search(self, records: Path | None = None) -> SearchResult | None:
        """Choose λ₀, train on all images, and record the test error.

        Args:
            records: folder of finished runs, which are not trained again.

        Returns:
            The result; None on ranks other than 0.
        """
        candidates = checked_candidates(self.candidates, self.recipe)
        held = replace(self, recipe=with_hold_out(self.recipe, self.options))
        out = self.options.out
        if not self.options.resume:  # find existing runs of the final training now, not after hours
            finals = [self.start.pair_name(self._final(lambda_0)) for lambda_0 in candidates]
            require_free(out / name / str(seed) for name in finals for seed in self.final_seeds)
        rounds = [Round(len(candidates), self.recipe.epochs, self.seeds)]
        # one process group for both trainings, and images that are decoded once
        with join_processes(self.options.device), kept_images():
            best, choice = choose(
                held, candidates, rounds, with_baseline=self.with_baseline, records=records
            )
            final = train_sides([self._final(best)], self.final_seeds, self, records)
        if choice is None:
            return None
        name = self.start.pair_name(self._final(self.start.recipe.lambda_0))
        result = SearchResult(choice, final[0], out / f"{name}.search.json")
        record = {
            "hold_out": held.recipe.hold_out,
            "candidates": [side_record(side, out) for side in choice.rounds[-1]],
            "chosen": best,
            "final": side_record(result.final, out),
        }
        write_json(result.record, record)
        return result

    def _final(self, lambda_0: float) -> Recipe:
        """The recipe of the final runs, on all images."""
        return replace(self.recipe, lambda_0=lambda_0, hold_out=0)


def plan(words: list[str]) -> Search:
    """The task described by the arguments of the command."""
    task = parse_recipe(Search, "search", words)
    if task.recipe.method != "isda":
        raise InputError(
            f"method must be isda to search for its lambda_0, got {task.recipe.method!r}"
        )
    if task.recipe.lambda_0 != task.start.recipe.lambda_0:
        raise InputError("isda search chooses lambda_0: give its values with --candidates")
    checked_candidates(task.candidates, task.recipe)
    require_seeds("final_seeds", task.final_seeds)
    return task


def run(words: list[str]) -> None:
    """Search, and show the result."""
    _show(plan(words).search())


def _show(result: SearchResult | None) -> None:
    """Print the candidates, the chosen one and its test error."""
    if result is None:
        return
    final = result.final
    count = f"{len(final.runs)} seed{'s' if len(final.runs) > 1 else ''}"
    words = f"λ₀ = {final.recipe.lambda_0:g}, trained on all images: test error"
    show(f"{choice_table(result.choice)}\n\n{words} {final.error.format()} % ({count}).\n"
         f"{result.record}")  # fmt: skip
