"""``isda train``: one recipe, one run per seed."""

from isda.experiments.commands.recipe_arguments import RecipeArguments, parse_recipe
from isda.experiments.commands.task import PlannedRuns, result_line
from isda.experiments.training import loop
from isda.experiments.training.failures import finished_first

__all__ = ["plan", "run"]


def plan(words: list[str]) -> PlannedRuns:
    """The task described by the arguments of the command."""
    given = parse_recipe(RecipeArguments, "train", words)
    name = given.start.run_name(given.recipe)
    return PlannedRuns({name: given.recipe}, given.seeds, given.options)


def run(words: list[str]) -> None:
    """Train, and print the error of every run."""
    task = plan(words)
    with finished_first(loop.train, task.plans(), task.options) as runs:
        for one in runs:
            print(result_line(one))
