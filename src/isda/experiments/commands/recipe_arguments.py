"""Arguments of commands that train: the name of a recipe, and a flag for each of its fields."""

import argparse
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import tyro

from isda.experiments.commands.arguments import parse, require_seeds
from isda.experiments.errors import InputError
from isda.experiments.own_images import own_images_recipe
from isda.experiments.recipes import DEFAULT, Start, get_recipe, with_method
from isda.experiments.settings import METHODS, Options, Recipe

__all__ = ["RecipeArguments", "parse_recipe"]


@dataclass(frozen=True)
class RecipeArguments:
    """Arguments of ``isda train``, and of the commands that train several variants of a recipe."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    """What to train: a recipe, whose fields can be changed."""

    start: Annotated[Start, tyro.conf.Fixed, tyro.conf.Suppress]
    """The recipe before its fields were changed; not a flag."""

    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)
    """How to run the training."""

    seeds: tuple[int, ...] = (0,)
    """One run per seed."""


_RecipeArguments = TypeVar("_RecipeArguments", bound=RecipeArguments)


def parse_recipe(kind: type[_RecipeArguments], command: str, words: list[str]) -> _RecipeArguments:
    """Parse the arguments of a command that trains; the name of a recipe may come first."""
    name = None
    if words and not words[0].startswith("-"):
        name, *words = words
    start, default = _start(name, words)
    given = parse(
        kind, f"{command} {name or '[RECIPE]'}", words, default=kind(default, Start(start, name))
    )
    require_seeds("seeds", given.seeds)
    switched = given.recipe.method == "isda" != start.method
    if switched and not given.recipe.lambda_0 and command != "search":
        raise InputError(
            f"lambda_0 must be > 0 to change the method from {start.method} to isda: set --lambda-0"
        )
    return given


def _start(name: str | None, words: list[str]) -> tuple[Recipe, Recipe]:
    """The recipe to start from, and the same recipe with ``--method``: the flags' defaults."""
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--data", "--network", "--method", "--weights", "--device"):
        scan.add_argument(flag, nargs="?", default="")
    for flag in ("--pretrained", "--freeze"):
        scan.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
    found, _ = scan.parse_known_args(words)
    if name is None and (found.data or "").startswith("imagefolder:"):
        wanted = bool(found.weights or found.freeze)
        start = own_images_recipe(
            found.network or "",
            found.weights or "",
            pretrained=wanted if found.pretrained is None else found.pretrained,
            freeze=bool(found.freeze),
            device=found.device or "auto",
        )
    else:
        start = get_recipe(DEFAULT if name is None else name)
    if found.method not in METHODS or found.method == "isda":
        return start, start
    changed = with_method(start, found.method)
    return (start if name else changed), changed
