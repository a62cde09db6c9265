"""The paper's recipes as data: Tables 1 to 5 with the settings of Appendix B.

Where the paper and the authors' code differ in a way that changes the results, the recipes follow
the code, and the choice is a field: ``milestones``, ``cosine_offset``, ``ramp``, ``nesterov``.
"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from isda.experiments.errors import InputError, unknown
from isda.experiments.recipe_checks import differing_fields
from isda.experiments.settings import GanName, Method, Recipe

__all__ = [
    "COMPANIONS",
    "DEFAULT",
    "RECIPES",
    "Start",
    "baseline_of",
    "flags",
    "get_recipe",
    "name_of",
    "train_command",
    "with_method",
]

_LONGEST = 241  # bytes of the name of a run, which with .lambda_0.json is that of a file


def get_recipe(name: str) -> Recipe:
    """Recipe of the paper by name."""
    try:
        return RECIPES[name]
    except KeyError:
        raise InputError(f"{unknown('recipe', name, RECIPES)} (isda list shows all)") from None


def name_of(recipe: Recipe) -> str:
    """Name of a recipe, ``<data>-<network>-<method>``, which is a valid folder name.

    Recipes for your own images also have a name. The name does not depend on the schedule.

    >>> name_of(Recipe(data="imagefolder:photos/birds", network="timm:resnet18", epochs=1,
    ...                batch_size=1, learning_rate=0.1, weight_decay=0.0))
    'birds-timm_resnet18-isda'
    """
    words: list[str] = []
    words += [name for name in ("autoaugment", "cutout") if name in recipe.augment][:1]
    if recipe.generator != "none":
        words.append(recipe.generator)
    if recipe.method == "isda" or not words:
        words.append(recipe.method)
    method = "_".join(words)
    network = recipe.network + "_pretrained" * recipe.pretrained + "_frozen" * recipe.freeze
    parts = (re.sub(r"[^A-Za-z0-9_.]+", "_", part) for part in (recipe.data_name, network, method))
    return "-".join(parts)


@dataclass(frozen=True)
class Start:
    """A recipe before its fields are changed, for example by flags; runs are named after it."""

    recipe: Recipe
    """The recipe."""

    name: str | None = None
    """Its name, if it is a recipe of the paper."""

    def run_name(self, recipe: Recipe) -> str:
        """Name of the runs of a recipe: the name of this one and every field that was changed.

        >>> start = Start(get_recipe("digits-resnet8-isda"), "digits-resnet8-isda")
        >>> start.run_name(replace(start.recipe, lambda_0=1.0))
        'digits-resnet8-isda+lambda_0=1.0'
        """
        moved = replace(self.recipe, data=recipe.data, network=recipe.network)
        name = self.name or name_of(moved)
        changes = [
            f"+{field}={'_'.join(map(str, new)) if isinstance(new, tuple) else new}"
            for field, (_, new) in differing_fields(RECIPES.get(name, moved), recipe).items()
        ]
        full = name + re.sub(r"[^A-Za-z0-9_.+=-]+", "_", "".join(changes))  # a valid folder name
        if len(os.fsencode(full)) > _LONGEST:
            raise InputError(
                f"the name of the run must have at most {_LONGEST} bytes, because files are named "
                f"after it, got {len(os.fsencode(full))}: rename the data folder: {full}"
            )
        return full

    def baseline(self) -> "Start":
        """The baseline of a recipe of ISDA."""
        return Start(self.recipe.baseline(), baseline_of(self.name) if self.name else None)

    def pair_name(self, recipe: Recipe) -> str:
        """Name of the runs of ISDA or of its baseline, both made from this recipe of ISDA."""
        return (self if recipe.method == "isda" else self.baseline()).run_name(recipe)


def with_method(recipe: Recipe, method: Any, *, noise_rate: float = 0.05) -> Recipe:
    """The baseline of a recipe with another loss; disturb_label has this noise rate."""
    noise_rate = noise_rate if method == "disturb_label" else 0.0
    return replace(recipe.baseline(), method=method, noise_rate=noise_rate)


def train_command(name: str, recipe: Recipe, seeds: Iterable[int]) -> str:
    """The command that trains the runs with this name.

    >>> start = get_recipe("digits-resnet8-isda")
    >>> train_command("digits-resnet8-isda+lambda_0=1.0", replace(start, lambda_0=1.0), [0, 1])
    'isda train digits-resnet8-isda --lambda-0 1.0 --seeds 0 1'

    Args:
        name: name of the runs: the name of a recipe and the changed fields.
        recipe: recipe of the runs.
        seeds: their seeds.
    """
    start = name.partition("+")[0]
    changes = differing_fields(get_recipe(start), recipe)
    changed = {field: value for field, (_, value) in changes.items()}
    return shlex.join(["isda", "train", start, *flags({**changed, "seeds": tuple(seeds)})])


def flags(values: Mapping[str, Any]) -> list[str]:
    """Fields of a recipe or of options as flags of a command.

    >>> flags({"batch_size": 8, "nesterov": False, "milestones": (1, 2)})
    ['--batch-size', '8', '--no-nesterov', '--milestones', '1', '2']
    """
    words = []
    for field, value in values.items():
        flag = field.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else [value])]
    return words


def baseline_of(name: str) -> str:
    """Name of the baseline that an ISDA recipe is compared with.

    >>> baseline_of("cifar10-resnet32-isda"), baseline_of("cifar10-wide_resnet28_10-cutout_isda")
    ('cifar10-resnet32-ce', 'cifar10-wide_resnet28_10-cutout')
    """
    training, _, method = name.rpartition("-")
    if method.partition("_")[2] not in ("", "isda") or not method.endswith("isda"):
        raise InputError(f"recipe must end in isda to have a baseline, got {name!r}")
    extra = method.removesuffix("isda").removesuffix("_")
    return f"{training}-{extra if extra in COMPANIONS else 'ce'}"


COMPANIONS = ("cutout", "autoaugment", "dropout")
"""Techniques that ISDA is combined with in Tables 3 and 4."""


# Appendix B, "Training configurations on CIFAR", row by row.
def _steps(*row: Any) -> dict[str, Any]:
    names = ("epochs", "batch_size", "weight_decay", "learning_rate", "gamma", "milestones")
    return {"schedule": "step", **dict(zip(names, row, strict=True))}


_RESNET = _steps(160, 128, 1e-4, 0.1, 0.1, (80, 120))
_SE_RESNET = _steps(200, 128, 1e-4, 0.1, 0.1, (80, 120, 160))
_WIDE_RESNET = _steps(240, 128, 5e-4, 0.1, 0.2, (60, 120, 160, 200))
_DENSENET = _steps(300, 64, 1e-4, 0.1, 0.1, (150, 200, 250))
_RESNEXT = _steps(350, 128, 5e-4, 0.05, 0.1, (150, 225, 300))
_SHAKE_SHAKE = {
    "epochs": 1800,
    "batch_size": 64,
    "weight_decay": 1e-4,
    "learning_rate": 0.1,
    "cosine_offset": 1,
}

_CIFAR: dict[str, dict[str, Any]] = {
    "resnet32": _RESNET,
    "resnet110": _RESNET,
    "se_resnet110": _SE_RESNET,
    "wide_resnet16_8": _WIDE_RESNET,
    "wide_resnet28_10": {**_WIDE_RESNET, "drop_rate": 0.3},
    "resnext29_8x64d": _RESNEXT,
    "densenet_bc100_12": _DENSENET,
    "densenet_bc190_40": _DENSENET,
    "shake_shake26_2x32d": _SHAKE_SHAKE,
    "shake_shake26_2x112d": _SHAKE_SHAKE,
}
_TABLE_4 = ("resnet110", "wide_resnet28_10")
_TABLE_4_METHODS: tuple[Method, ...] = ("large_margin", "disturb_label", "focal", "center", "lq")
_TABLE_3 = ("wide_resnet28_10", "shake_shake26_2x32d", "shake_shake26_2x112d")

_IMAGENET: dict[str, Any] = {
    "data": "imagenet",
    "epochs": 300,
    "batch_size": 512,
    "weight_decay": 1e-4,
    "learning_rate": 0.2,
    "nesterov": False,
    "covariance": "diagonal",
}
_IMAGENET_LAMBDA_0 = {
    "resnet50": 7.5,
    "resnet101": 5.0,
    "resnet152": 7.5,
    "densenet121": 1.0,
    "densenet265": 1.0,
    "resnext50_32x4d": 7.5,
    "resnext101_32x8d": 7.5,
}
_DIGITS: dict[str, Any] = {
    "data": "digits",
    "network": "resnet8",
    "epochs": 20,
    "batch_size": 64,
    "weight_decay": 5e-4,
    "learning_rate": 0.1,
}
_GPU: dict[str, Any] = {"precision": "bf16", "channels_last": True, "compile": True}

_WITH_ISDA = [
    Recipe(**_DIGITS, lambda_0=0.5),
    *(
        Recipe(data=data, network=network, augment=augment, lambda_0=0.5, **training, **_GPU)
        for data in ("cifar10", "cifar100")
        for network, training in _CIFAR.items()
        for augment in (
            ("crop", "flip"),
            ("crop", "flip", "cutout"),
            ("crop", "flip", "autoaugment", "cutout"),
        )
        if network in _TABLE_3 or augment == ("crop", "flip")
    ),
    *(
        Recipe(network=network, lambda_0=lambda_0, **_IMAGENET, **_GPU)
        for network, lambda_0 in _IMAGENET_LAMBDA_0.items()
    ),
]

# Table 5: changes of the ISDA recipe.
_ABLATIONS: dict[str, dict[str, Any]] = {
    "identity_isda": {"covariance": "identity"},
    "diagonal_isda": {"covariance": "diagonal"},
    "shared_isda": {"covariance": "shared"},
    "constant_isda": {"ramp": "constant"},
}


def _named() -> Iterator[tuple[str, Recipe]]:
    """All recipes with their names."""
    for recipe in _WITH_ISDA:
        yield name_of(recipe.baseline()), recipe.baseline()
        yield name_of(recipe), recipe
        training = f"{recipe.data}-{recipe.network}"
        if recipe.data != "imagenet" and recipe.augment in ((), ("crop", "flip")):
            yield f"{training}-label_smoothing", with_method(recipe, "label_smoothing")
        if recipe.augment == ("crop", "flip"):
            for method, changed in _variants(recipe, training):
                yield f"{training}-{method}", changed


def _variants(recipe: Recipe, training: str) -> Iterator[tuple[str, Recipe]]:
    """Variants of an ISDA recipe on CIFAR in Tables 4 and 5, with the names of their methods."""
    baseline = recipe.baseline()
    if recipe.network in _TABLE_4:
        for loss in _TABLE_4_METHODS:
            noise = 0.1 if training == "cifar100-resnet110" else 0.05
            yield loss, with_method(recipe, loss, noise_rate=noise)
        for gan in get_args(GanName):
            if gan != "wgan" or recipe.data == "cifar10":  # as in the paper
                yield gan, replace(baseline, generator=gan, synthetic=1 / 6)
    if recipe.network == "resnet110":
        yield "dropout", replace(baseline, drop_rate=0.3)
        yield "dropout_isda", replace(recipe, drop_rate=0.3)
    if recipe.network == "wide_resnet28_10":
        for ablation, changes in _ABLATIONS.items():
            yield ablation, replace(recipe, **changes)


RECIPES: dict[str, Recipe] = dict(_named())
"""All recipes of Tables 1 to 5 by name; two on scikit-learn's digits, and label smoothing on digits
and CIFAR, which the paper does not have."""

DEFAULT = "digits-resnet8-isda"
"""Default recipe, which needs no download and no GPU."""
