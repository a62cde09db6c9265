"""Checks of recipes, and how two recipes differ."""

import dataclasses
import math
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


def require(holds: bool, field: str, value: object, expectation: str) -> None:
    """Raise InputError unless a condition on a field holds."""
    if not holds:
        raise InputError(f"{field} must be {expectation}, got {value!r}")


def require_fine_tuning(recipe: "Recipe") -> None:
    """Raise InputError unless optimizer, pretrained weights and normalisation fit together."""
    require(recipe.warmup <= recipe.epochs, "warmup", recipe.warmup, f"<= epochs, {recipe.epochs}")
    require(
        recipe.optimizer == "sgd" or not recipe.nesterov,
        "nesterov",
        recipe.nesterov,
        "False with optimizer adamw: use --no-nesterov",
    )
    require(
        not recipe.pretrained or ":" in recipe.network,
        "network",
        recipe.network,
        "timm:NAME, torchvision:NAME or MODULE:FUNCTION with pretrained",
    )
    require(recipe.pretrained or not recipe.weights, "weights", recipe.weights,
            "empty without pretrained: use --pretrained")  # fmt: skip
    require(recipe.pretrained or not recipe.freeze, "freeze", recipe.freeze,
            "False without pretrained: use --pretrained")  # fmt: skip
    require(
        not recipe.freeze or recipe.head_rate == 1,
        "head_rate",
        recipe.head_rate,
        "1 with freeze, which trains the head alone: set learning_rate",
    )
    require(
        not (recipe.freeze and recipe.augment),
        "augment",
        recipe.augment,
        "empty with freeze, whose features are computed once",
    )
    mean, std = recipe.mean, recipe.std
    require(len(mean) == len(std), "std", std, f"of the length of mean, {len(mean)}")
    require(all(map(math.isfinite, mean)), "mean", mean, "finite")
    require(all(0 < value < math.inf for value in std), "std", std, "> 0")


def require_method(recipe: "Recipe") -> None:
    """Raise InputError for settings of a method or generator that the recipe does not use."""
    require(
        recipe.method == "isda" or recipe.lambda_0 == 0,
        "lambda_0",
        recipe.lambda_0,
        f"0 with method {recipe.method}",
    )
    require(
        (recipe.method == "disturb_label") == (recipe.noise_rate > 0),
        "noise_rate",
        recipe.noise_rate,
        "> 0 with method disturb_label and 0 with any other",
    )
    require(
        (recipe.generator == "none") == (recipe.synthetic == 0),
        "synthetic",
        recipe.synthetic,
        f"{'0' if recipe.generator == 'none' else '> 0'} with generator {recipe.generator}",
    )


def differing_fields(one: "Recipe", other: "Recipe") -> dict[str, tuple[Any, Any]]:
    """Fields in which two recipes differ, with both values."""
    pairs = {
        field.name: (getattr(one, field.name), getattr(other, field.name))
        for field in dataclasses.fields(one)
    }
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}
