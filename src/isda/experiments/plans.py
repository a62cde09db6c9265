"""What commands train: ``train``, ``compare``, ``search``, ``calibrate``, ``table --cell``."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from isda.experiments.arguments import (
    CalibrateArguments,
    CompareArguments,
    SearchArguments,
    TableArguments,
    TrainArguments,
    parse,
    parse_recipe,
)
from isda.experiments.errors import InputError, unknown
from isda.experiments.published import cell_recipes
from isda.experiments.recipe_checks import require_seeds
from isda.experiments.recipes import baseline_of, get_recipe, pair_name, run_name, with_method
from isda.experiments.settings import METHODS, Options, Recipe
from isda.experiments.training.groups import Plan

__all__ = [
    "AutoComparison",
    "Calibrations",
    "Command",
    "Planned",
    "Search",
    "plan_calibrate",
    "plan_cell",
    "plan_command",
    "plan_compare",
    "plan_search",
    "plan_train",
]


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
        """One plan per recipe and seed; all recipes of a seed, which are compared, come first."""
        return [Plan(name, recipe, seed) for seed in self.seeds
                for name, recipe in self.recipes.items()]  # fmt: skip


@dataclass(frozen=True)
class _WithHeldOut:
    """Runs that need held-out images, whose number may depend on the data set."""

    recipe: Recipe
    """Recipe of ISDA; without ``hold_out``, the usual number of images is held out."""

    start: Recipe
    """Recipe before fields were changed."""

    name: str | None
    """Name of ``start``, if one was given."""

    seeds: tuple[int, ...]
    """One run of every method per seed."""

    options: Options
    """How to run the training."""


@dataclass(frozen=True)
class AutoComparison(_WithHeldOut):
    """A comparison whose λ₀ is still to be chosen on held-out images."""

    candidates: tuple[float, ...] | None
    """Values of λ₀; None: those of the paper. The λ₀ of the recipe is ignored."""

    def named(self, recipe: Recipe) -> str:
        """Name of the runs of a recipe of this comparison."""
        return pair_name(self.start, self.name, recipe)

    def planned(self, lambda_0: float, *, hold_out: int = 0) -> Planned:
        """Runs of the comparison with this λ₀."""
        recipe = replace(self.recipe, lambda_0=float(lambda_0), hold_out=hold_out)
        recipes = {self.named(one): one for one in (recipe.baseline(), recipe)}
        return Planned(recipes, self.seeds, self.options)


@dataclass(frozen=True)
class Calibrations(_WithHeldOut):
    """Methods that are trained without some images, on which a temperature is fitted."""

    methods: tuple[str, ...]
    """Losses to train."""

    def planned(self, hold_out: int) -> Planned:
        """Runs of all methods."""
        recipes = {}
        for method in self.methods:
            start, recipe = self.start, replace(self.recipe, hold_out=hold_out)
            name = self.name
            if method != "isda":
                start, recipe = (with_method(one, method) for one in (start, recipe))
                name = baseline_of(name) if name and method == "ce" else None
            recipes[run_name(recipe, start, name)] = recipe
        return Planned(recipes, self.seeds, self.options)


@dataclass(frozen=True)
class Search:
    """A search for λ₀ and how to run it."""

    given: SearchArguments
    """Recipe, candidates and seeds."""

    start: Recipe
    """Recipe before fields were changed."""

    name: str | None
    """Name of ``start``, if one was given."""

    @property
    def options(self) -> Options:
        """How to run the training."""
        return self.given.options

    def arguments(self) -> dict[str, Any]:
        """Arguments of :func:`isda.experiments.search.search`, without the options."""
        names = ("recipe", "candidates", "seeds", "final_seeds", "with_baseline")
        given = {name: getattr(self.given, name) for name in names}
        return {**given, "name": self.name, "start": self.start}


Command = Planned | AutoComparison | Calibrations | Search
"""What a command trains."""


def plan_calibrate(words: list[str], *, description: str = "") -> Calibrations:
    """Runs of ``isda calibrate``: several methods, without the held-out images."""
    given, start, name = parse_recipe(
        CalibrateArguments, "calibrate", words, description=description, seeds=(0, 1, 2)
    )
    recipe, methods = given.recipe, given.methods
    if recipe.method != "isda":
        raise InputError(
            f"recipe must be one of ISDA, got the method {recipe.method!r}: choose the losses with "
            "--methods"
        )
    for method in methods:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
    if not methods or len({*methods}) != len(methods):
        raise InputError(f"methods must be different names, got {' '.join(methods) or 'none'}")
    return Calibrations(recipe, start, name, given.seeds, given.options, methods)


def plan_search(words: list[str], *, description: str = "") -> Search:
    """What ``isda search`` trains: candidates for λ₀, and the chosen one on all images."""
    given, start, name = parse_recipe(SearchArguments, "search", words, description=description)
    if given.recipe.method == "isda" and given.recipe.lambda_0 != start.lambda_0:
        raise InputError("isda search chooses lambda_0: give its values with --candidates")
    return Search(given, start, name)


def _plan_table(words: list[str]) -> Planned:
    """Runs of ``isda table N --cell``."""
    return plan_cell(parse(TableArguments, "table", words, description=""))


def plan_command(words: list[str]) -> Command:
    """What a line of a queue trains: train, compare, search, calibrate or table."""
    command, *rest = words
    if command not in _PLANNERS:
        raise unknown("command of a queue", command, _PLANNERS)
    return _PLANNERS[command](rest)


def plan_train(words: list[str], *, description: str = "") -> Planned:
    """Runs of ``isda train``: one recipe."""
    given, start, name = parse_recipe(TrainArguments, "train", words, description=description)
    return Planned({run_name(given.recipe, start, name): given.recipe}, given.seeds, given.options)


def plan_compare(words: list[str], *, description: str = "") -> Planned | AutoComparison:
    """Runs of ``isda compare``: cross entropy and ISDA, in this order."""
    words, auto = _take_auto(words)
    given, start, name = parse_recipe(
        CompareArguments, "compare", words, description=description, seeds=(0, 1, 2)
    )
    recipe = given.recipe
    if recipe.method != "isda":
        raise InputError(f"method must be isda to compare it with ce, got {recipe.method!r}")
    if given.candidates is not None and not auto:
        raise InputError("--candidates are the values to try with --lambda-0 auto")
    task = AutoComparison(recipe, start, name, given.seeds, given.options, given.candidates)
    return task if auto else task.planned(recipe.lambda_0, hold_out=recipe.hold_out)


def _take_auto(words: list[str]) -> tuple[list[str], bool]:
    """The words without ``--lambda-0 auto``, and whether that was among them."""
    text = "\0".join(["", *words, ""])
    rest = re.sub("\0--lambda[-_]0[=\0]auto(?=\0)", "", text)
    return rest.split("\0")[1:-1], rest != text


def plan_cell(given: TableArguments) -> Planned:
    """Runs of ``isda table N --cell``: what the cell needs, with its baseline."""
    if not given.cell:
        raise InputError("training needs a cell: isda table N --cell DATA/NETWORK")
    if given.results is not None:
        raise InputError("--results does not go with --cell; --out is the folder of its runs")
    require_seeds("seeds", given.seeds)
    changed = {name: given.change(get_recipe(name))
               for name in cell_recipes(given.table, *given.cell)}  # fmt: skip
    recipes = {run_name(recipe, get_recipe(name), name): recipe for name, recipe in changed.items()}
    return Planned(recipes, given.seeds, given.options)


_PLANNERS: dict[str, Callable[[list[str]], Command]] = {
    "train": plan_train,
    "compare": plan_compare,
    "search": plan_search,
    "calibrate": plan_calibrate,
    "table": _plan_table,
}  # by command, of the words behind it
