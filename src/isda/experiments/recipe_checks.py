"""Checks of recipes, and how two recipes differ."""

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from isda.experiments.errors import InputError

if TYPE_CHECKING:
    from isda.experiments.settings import Recipe  # which imports this module

__all__ = [
    "differing_fields",
    "require",
    "require_fine_tuning",
    "require_method",
]


def require(settings: object, field: str, holds: bool, expectation: str) -> None:
    """Raise InputError with the value of a field unless ``holds`` is true."""
    if not holds:
        raise InputError(f"{field} must be {expectation}, got {getattr(settings, field)!r}")


def require_fine_tuning(recipe: "Recipe") -> None:
    """Raise InputError unless optimizer, pretrained weights and normalisation fit together."""
    check = partial(require, recipe)
    check("warmup", recipe.warmup <= recipe.epochs, f"<= epochs, {recipe.epochs}")
    momentum = recipe.optimizer == "sgd" or not recipe.nesterov
    check("nesterov", momentum, "False with optimizer adamw: use --no-nesterov")
    check(
        "network",
        not recipe.pretrained or ":" in recipe.network,
        "timm:NAME, torchvision:NAME or MODULE:FUNCTION with pretrained",
    )
    without = "without pretrained: use --pretrained"
    check("weights", recipe.pretrained or not recipe.weights, f"empty {without}")
    check("freeze", recipe.pretrained or not recipe.freeze, f"False {without}")
    if recipe.freeze:
        alone = "1 with freeze, which trains the head alone: set learning_rate"
        check("head_rate", recipe.head_rate == 1, alone)
        once = "empty with freeze, whose features are computed once"
        check("augment", not recipe.augment, once)
    mean, std = recipe.mean, recipe.std
    check("std", len(mean) == len(std), f"of the length of mean, {len(mean)}")
    check("mean", all(map(math.isfinite, mean)), "finite")
    check("std", all(0 < value < math.inf for value in std), "> 0")


def require_method(recipe: "Recipe") -> None:
    """Raise InputError for settings of a method or generator that the recipe does not use."""
    check = partial(require, recipe)
    unused = recipe.method == "isda" or recipe.lambda_0 == 0
    check("lambda_0", unused, f"0 with method {recipe.method}")
    check(
        "noise_rate",
        (recipe.method == "disturb_label") == (recipe.noise_rate > 0),
        "> 0 with method disturb_label and 0 with any other",
    )
    expected = "0" if recipe.generator == "none" else "> 0"
    check(
        "synthetic",
        (recipe.generator == "none") == (recipe.synthetic == 0),
        f"{expected} with generator {recipe.generator}",
    )


def differing_fields(one: "Recipe", other: "Recipe") -> dict[str, tuple[Any, Any]]:
    """Fields in which two recipes differ, with both values."""
    pairs = {
        field.name: (getattr(one, field.name), getattr(other, field.name))
        for field in dataclasses.fields(one)
    }
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}
