"""Arguments of the commands that train: a recipe by name, any field of it changed by a flag."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_args

import tyro

from isda.experiments.errors import InputError
from isda.experiments.flags import parse_flags
from isda.experiments.networks import own_image_size
from isda.experiments.recipes import DEFAULT, OWN_IMAGES, Method, Recipe, get_recipe
from isda.experiments.training.loop import Options

__all__ = ["Arguments", "parse", "require_seeds"]


@dataclass(frozen=True)
class Arguments:
    """What every command that trains takes."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    """What is trained: the recipe, any field of which can be changed."""

    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)
    """How it is trained."""

    seeds: tuple[int, ...] = (0,)
    """One run for each seed."""


_Given = TypeVar("_Given", bound=Arguments)


def parse(
    kind: type[_Given], command: str, arguments: list[str], *, description: str, **defaults: Any
) -> tuple[_Given, Recipe, str | None]:
    """What was asked for, the recipe it started from, and that recipe's name if one was given.

    Args:
        kind: the command's arguments.
        command: its name.
        arguments: words of the command line behind the command; a recipe's name comes first.
        description: what the command does, for its help.
        defaults: of fields of ``kind`` beside the recipe.
    """
    name = None
    if arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
        start = get_recipe(name)
    else:
        own = any("imagefolder:" in word for word in arguments)
        start = _with_own_size(OWN_IMAGES, arguments) if own else get_recipe(DEFAULT)
        start = _with_method(start, arguments)
    given = parse_flags(
        kind,
        arguments,
        default=kind(_with_method(start, arguments), **defaults),
        prog=f"isda {command} {name or '[RECIPE]'}",
        description=description,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    require_seeds("seeds", given.seeds)
    made = given.recipe.method == "isda" != start.method
    if made and not given.recipe.lambda_0 and command != "search":
        raise InputError(f"lambda_0 must be > 0 to make isda of {start.method}: give --lambda-0")
    return given, start, name


def require_seeds(argument: str, seeds: Sequence[int]) -> None:
    """Seeds must be there, differ, and fit into 32 bits."""
    if not seeds or len({*seeds}) != len(seeds) or not 0 <= min(seeds) <= max(seeds) < 2**32:
        listed = " ".join(map(str, seeds)) or "none"
        raise InputError(f"{argument} must be different numbers from 0 to 2³² - 1, got {listed}")


def _with_own_size(start: Recipe, arguments: list[str]) -> Recipe:
    """The recipe with images of the size that the ``--network`` of the arguments is made for."""
    size = own_image_size(_value_of("--network", arguments))
    return start if size is None else replace(start, image_size=size)


def _with_method(start: Recipe, arguments: list[str]) -> Recipe:
    """The recipe with the ``--method`` of the arguments, and the settings that go with it."""
    method: Any = _value_of("--method", arguments)
    if method not in get_args(Method) or method == "isda":
        return start
    noise_rate = 0.05 if method == "disturb_label" else 0.0
    return replace(start.baseline(), method=method, noise_rate=noise_rate)


def _value_of(flag: str, arguments: list[str]) -> str:
    """Value of a flag before tyro reads the arguments; empty if it is not there."""
    words = [part for word in arguments for part in word.split("=")]
    return next((value for name, value in pairwise(words) if name == flag), "")
