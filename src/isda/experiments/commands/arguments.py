"""The words behind a command, read by tyro: a dataclass per command, whose fields are its flags.

A recipe by name gives the defaults, and every field of it is a flag.
"""

import argparse
import contextlib
import io
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, TypeVar

import tyro

from isda.experiments.errors import InputError
from isda.experiments.recipes import (
    DEFAULT,
    OWN_IMAGES,
    Start,
    fine_tuning,
    get_recipe,
    with_method,
)
from isda.experiments.settings import METHODS, Options, Recipe
from isda_command import COMMANDS

__all__ = ["RecipeArguments", "parse", "parse_recipe", "require_seeds"]


@dataclass(frozen=True)
class RecipeArguments:
    """Arguments of ``isda train``, and of the commands that train several variants of a recipe."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    """What to train: a recipe, any field of which can be changed."""

    start: Annotated[Start, tyro.conf.Fixed, tyro.conf.Suppress]
    """The recipe before its fields were changed; not a flag."""

    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)
    """How to run the training."""

    seeds: tuple[int, ...] = (0,)
    """One run per seed."""


_Arguments = TypeVar("_Arguments")
_RecipeArguments = TypeVar("_RecipeArguments", bound=RecipeArguments)


def parse(kind: type[_Arguments], command: str, words: list[str], **options: Any) -> _Arguments:
    """Parse the words behind a command.

    Args:
        kind: dataclass of the command's arguments.
        command: the command, for its help.
        words: words of the command line behind the command.
        options: further options of ``tyro.cli``.

    Raises:
        InputError: unknown flag, with similar ones, or invalid value.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(
                kind,
                args=words,
                prog=f"isda {command}",
                config=(tyro.conf.OmitArgPrefixes,),
                **{"description": COMMANDS[command.split()[0]], **options},
            )
    except SystemExit as end:
        if end.code == 0:  # --help
            raise
        raise InputError(_one_line(printed.getvalue())) from None


def parse_recipe(kind: type[_RecipeArguments], command: str, words: list[str]) -> _RecipeArguments:
    """Parse the words behind a command that trains; the name of a recipe may come first."""
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


def require_seeds(argument: str, seeds: Sequence[int]) -> None:
    """Raise InputError unless there are seeds, all different, that fit into 32 bits."""
    if not seeds or len({*seeds}) != len(seeds) or not 0 <= min(seeds) <= max(seeds) < 2**32:
        listed = " ".join(map(str, seeds)) or "none"
        raise InputError(f"{argument} must be different integers from 0 to 2³² - 1, got {listed}")


def _start(name: str | None, words: list[str]) -> tuple[Recipe, Recipe]:
    """The recipe to start from, and the defaults of the flags: that recipe with ``--method``."""
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--data", "--network", "--method", "--weights", "--device"):
        scan.add_argument(flag, nargs="?", default="")
    for flag in ("--pretrained", "--freeze"):
        scan.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
    found, _ = scan.parse_known_args(words)
    if name is None and (found.data or "").startswith("imagefolder:"):
        start = _own_images(found)
    else:
        start = get_recipe(DEFAULT if name is None else name)
    if found.method not in METHODS or found.method == "isda":
        return start, start
    changed = with_method(start, found.method)
    return (start if name else changed), changed


def _own_images(found: argparse.Namespace) -> Recipe:
    """Default recipe for images of the user, with the network that the flags ask for."""
    start = OWN_IMAGES
    if found.pretrained or (found.pretrained is None and (found.weights or found.freeze)):
        network = found.network or start.network
        start = _fine_tuning(network, found.weights or "", freeze=bool(found.freeze))
    elif (found.network or "").startswith("timm:"):
        from isda.experiments.networks import own_image_size  # slow to import

        start = replace(start, image_size=own_image_size(found.network) or start.image_size)
    return replace(start, precision="bf16") if _on_gpu(found.device or "auto") else start


def _on_gpu(device: str) -> bool:
    import torch  # slow to import

    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _fine_tuning(network: str, weights: str, *, freeze: bool) -> Recipe:
    """Default recipe of a pretrained network, with the images as it knows them."""
    from isda.experiments.networks import has_layer_norm, own_preprocessing  # slow to import

    known = own_preprocessing(network)
    preparation = {} if known is None else asdict(known)
    recipe = fine_tuning(
        network, layer_norm=has_layer_norm(network), preparation=preparation, freeze=freeze
    )
    return replace(recipe, weights=weights)


def _one_line(box: str) -> str:
    """Condense tyro's boxed error message to one line, with the flags it suggests.

    On a terminal without box-drawing characters, the title is a part of its own.
    """
    framed = box.startswith("╭")
    text = re.sub(r"(?m)^[╭╰].*$", "", box).replace("│", " ")
    parts = [part.split() for part in re.split(r"(?m)^ *[─-]{3,} *$", text)]
    _, message, *others = [[], *parts] if framed else parts
    near = [word.strip(",") for part in others if part[:1] == ["Perhaps"]
            for word in part if word.startswith("--")]  # fmt: skip
    hint = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""
    words = " ".join(message).rstrip(".")
    return words[:1].lower() + words[1:] + hint
