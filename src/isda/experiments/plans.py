"""The runs that a command trains: ``isda train``, ``compare`` and ``table --cell``."""

from dataclasses import dataclass

from isda.experiments.arguments import TableArguments, TrainArguments, parse, parse_recipe
from isda.experiments.errors import InputError
from isda.experiments.recipes import baseline_of, get_recipe, run_name
from isda.experiments.report.paper_tables import cell_recipes
from isda.experiments.settings import Options, Recipe, require_seeds
from isda.experiments.training.groups import Plan

__all__ = ["Planned", "plan_cell", "plan_command", "plan_compare", "plan_train"]


@dataclass(frozen=True)
class Planned:
    """Runs of a command and how to train them."""

    recipes: dict[str, Recipe]
    """Recipes by the name of their runs."""

    seeds: tuple[int, ...]
    """One run of every recipe per seed."""

    options: Options
    """How to run the training."""

    def __post_init__(self) -> None:
        for recipe in self.recipes.values():
            recipe.require_ramp()

    def plans(self) -> list[Plan]:
        """One plan per recipe and seed."""
        return [Plan(name, recipe, seed) for name, recipe in self.recipes.items()
                for seed in self.seeds]  # fmt: skip


def plan_command(words: list[str]) -> Planned:
    """Runs of a command line that starts with train, compare or table."""
    command, *rest = words
    if command == "table":
        return plan_cell(parse(TableArguments, command, rest, description=""))
    return {"train": plan_train, "compare": plan_compare}[command](rest)


def plan_train(words: list[str], *, description: str = "") -> Planned:
    """Runs of ``isda train``: one recipe."""
    given, start, name = parse_recipe(TrainArguments, "train", words, description=description)
    return Planned({run_name(given.recipe, start, name): given.recipe}, given.seeds, given.options)


def plan_compare(words: list[str], *, description: str = "") -> Planned:
    """Runs of ``isda compare``: cross entropy and ISDA, in this order."""
    given, start, name = parse_recipe(
        TrainArguments, "compare", words, description=description, seeds=(0, 1, 2)
    )
    recipe = given.recipe
    if recipe.method != "isda":
        raise InputError(f"method must be isda to compare it with ce, got {recipe.method!r}")
    baseline = recipe.baseline()
    sides = {
        run_name(baseline, start.baseline(), baseline_of(name) if name else None): baseline,
        run_name(recipe, start, name): recipe,
    }
    return Planned(sides, given.seeds, given.options)


def plan_cell(given: TableArguments) -> Planned:
    """Runs of ``isda table N --cell``: what the cell needs, with its baseline."""
    if given.cell is None:
        raise InputError("training needs a cell: isda table N --cell DATA/NETWORK")
    if given.results is not None:
        raise InputError("--results does not go with --cell; --out is the folder of its runs")
    require_seeds("seeds", given.seeds)
    changed = {name: given.change(get_recipe(name))
               for name in cell_recipes(given.table, given.cell)}  # fmt: skip
    recipes = {run_name(recipe, get_recipe(name), name): recipe for name, recipe in changed.items()}
    return Planned(recipes, given.seeds, given.options)
