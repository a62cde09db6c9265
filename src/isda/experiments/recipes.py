"""What is trained and how: Tables 1 to 5 and Appendix B of the paper as data.

A recipe is a frozen record of data set, network, method and schedule. Where the paper and the
authors' code differ in something that changes the numbers, the recipe follows the code, and the
choice is a named field: ``milestones``, ``cosine_offset``, ``ramp``, ``nesterov``.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal, get_args

from isda.experiments.data.augmentation import AUGMENTATIONS
from isda.experiments.errors import InputError, unknown

__all__ = [
    "COMPANIONS",
    "DEFAULT",
    "OWN_IMAGES",
    "RECIPES",
    "Recipe",
    "baseline_of",
    "differing_fields",
    "get_recipe",
    "name_of",
    "run_name",
]

Method = Literal["ce", "isda", "large_margin", "disturb_label", "focal", "center", "lq"]
Schedule = Literal["step", "cosine"]
Covariance = Literal["full", "diagonal", "shared", "identity"]
Ramp = Literal["epoch", "step", "constant"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to train one network on one data set."""

    data: str
    """Data set: digits, cifar10, cifar100, imagenet or imagefolder:PATH."""

    network: str
    """Network by name."""

    method: Method = "isda"
    """Loss: plain cross entropy, ISDA, or a baseline of Table 4."""

    augment: tuple[str, ...] = ()
    """Image augmentations, out of crop, flip, autoaugment and cutout, which is also their order;
    data read from image files have crop and flip of their own."""

    epochs: int
    """Passes over the training images."""

    batch_size: int
    """Images per step, over all processes."""

    learning_rate: float
    """Learning rate of the first epoch."""

    momentum: float = 0.9
    """Momentum of SGD."""

    nesterov: bool = True
    """Nesterov momentum. The authors' ImageNet code has plain momentum."""

    weight_decay: float
    """L2 penalty on every parameter, biases and batch norm included."""

    schedule: Schedule = "cosine"
    """Learning rate over the epochs: falling in steps, or along a cosine."""

    milestones: tuple[int, ...] = ()
    """Epochs, counted from 1, from which on the step schedule is lower by another gamma."""

    gamma: float = 0.1
    """Factor of each step of the step schedule."""

    cosine_offset: int = 0
    """Epochs by which the cosine runs ahead; 1 ends at a learning rate of zero."""

    lambda_0: float = 0.0
    """Strength of ISDA at the end of the ramp; 0 is plain cross entropy."""

    covariance: Covariance = "full"
    """Covariance of the features: full or diagonal per class, one shared by all, or identity."""

    ramp: Ramp = "epoch"
    """Growth of the strength to lambda_0: once per epoch, at every step, or none (constant)."""

    decay: float = 1.0
    """Weight that a sample keeps in the statistics with each later one of its class; 1: all."""

    noise_rate: float = 0.0
    """Share of labels that disturb_label draws anew in every step."""

    drop_rate: float = 0.0
    """Dropout rate inside the network."""

    precision: Precision = "fp32"
    """Arithmetic of the network: float32, or bfloat16 autocast."""

    channels_last: bool = False
    """Channels-last memory layout."""

    compile: bool = False
    """Compile the network; used on GPUs only."""

    ema: float = 0.0
    """Decay of an average of the weights, evaluated in their place; 0 turns it off."""

    hold_out: int = 0
    """Training images held out and evaluated in place of the test set."""

    image_size: int = 224
    """Side of the square images made from image files."""

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            _require(value in choices, field, value, f"one of {', '.join(choices)}")
        for field in ("data", "network"):
            _require(bool(getattr(self, field)), field, getattr(self, field), "a name")
        kind, _, path = self.data.partition(":")
        if path:  # of the ways to write it, one
            object.__setattr__(self, "data", f"{kind}:{PurePath(path)}")
        for field in ("epochs", "batch_size", "image_size"):
            _require(getattr(self, field) >= 1, field, getattr(self, field), ">= 1")
        for field in ("weight_decay", "cosine_offset", "lambda_0", "hold_out"):
            value = getattr(self, field)
            _require(0 <= value < math.inf, field, value, ">= 0")
        for field in ("momentum", "noise_rate", "drop_rate", "ema"):
            value = getattr(self, field)
            _require(0 <= value < 1, field, value, ">= 0 and < 1")
        for field in ("gamma", "decay"):
            value = getattr(self, field)
            _require(0 < value <= 1, field, value, "> 0 and <= 1")
        rate = self.learning_rate
        _require(0 < rate < math.inf, "learning_rate", rate, "> 0")
        _require(
            self.momentum > 0 or not self.nesterov, "momentum", self.momentum, "> 0 with nesterov"
        )
        _require(
            all(name in AUGMENTATIONS for name in self.augment)
            and len(set(self.augment)) == len(self.augment),
            "augment",
            self.augment,
            f"drawn from {', '.join(AUGMENTATIONS)}, each once",
        )
        _require(
            all(a < b for a, b in zip((0, *self.milestones), self.milestones, strict=False)),
            "milestones",
            self.milestones,
            ">= 1 and increasing",
        )
        _require(
            self.method == "isda" or self.lambda_0 == 0,
            "lambda_0",
            self.lambda_0,
            f"0 with method {self.method}, where it has no effect",
        )
        _require(
            (self.method == "disturb_label") == (self.noise_rate > 0),
            "noise_rate",
            self.noise_rate,
            "> 0 with method disturb_label and 0 with any other",
        )

    def learning_rate_at(self, epoch: int) -> float:
        """Learning rate in force during an epoch, counted from 0.

        ``step``: learning_rate · gamma^k with k milestones reached, where milestone m is reached by
        the m-th epoch. ``cosine``: ½ · learning_rate · (1 + cos(π (epoch + cosine_offset) / T)).
        """
        if self.schedule == "step":
            reached = sum(epoch + 1 >= milestone for milestone in self.milestones)
            return self.learning_rate * self.gamma**reached
        phase = min((epoch + self.cosine_offset) / self.epochs, 1.0)
        return 0.5 * self.learning_rate * (1 + math.cos(math.pi * phase))

    def progress_at(self, epoch: int, *, step: int = 0, steps: int = 1) -> float:
        """Progress t/T of the ramp in step ``step`` of the ``steps`` of an epoch, all from 0.

        The strength in force is ``lambda_0 * progress``; with the ramp per epoch the first epoch
        is plain cross entropy.
        """
        if self.ramp == "constant":
            return 1.0
        if self.ramp == "epoch":
            return epoch / self.epochs
        return (epoch * steps + step) / (self.epochs * steps)

    def baseline(self) -> "Recipe":
        """The same training with plain cross entropy."""
        return replace(
            self,
            method="ce",
            lambda_0=0.0,
            noise_rate=0.0,
            covariance="full",
            ramp="epoch",
            decay=1.0,
        )

    def as_dict(self) -> dict[str, Any]:
        """Fields as JSON knows them; ``from_dict`` reads them back."""
        return {
            field: list(value) if isinstance(value, tuple) else value
            for field, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Recipe":
        """The recipe of a run record."""
        known = {field.name for field in dataclasses.fields(cls)}
        for field in fields:
            if field not in known:
                raise unknown("field of a recipe", field, known)
        values: dict[str, Any] = {
            field: tuple(value) if isinstance(value, list) else value
            for field, value in fields.items()
        }
        try:
            return cls(**values)
        except TypeError as error:  # a field is missing or has another type
            raise InputError(f"not a recipe: {error}") from error


def get_recipe(name: str) -> Recipe:
    """A recipe of the paper by name."""
    try:
        return RECIPES[name]
    except KeyError:
        raise unknown("recipe", name, RECIPES) from None


def name_of(recipe: Recipe) -> str:
    """Name of a recipe, ``<data>-<network>-<method>``, fit for a folder.

    Any recipe has one, those for a user's own images too; it does not tell the schedule.

    >>> name_of(Recipe(data="imagefolder:photos/birds", network="timm:resnet18", epochs=1,
    ...                batch_size=1, learning_rate=0.1, weight_decay=0.0))
    'birds-timm_resnet18-isda'
    """
    kind, _, path = recipe.data.partition(":")
    data = PurePath(path).name or kind
    extra = [name for name in ("autoaugment", "cutout") if name in recipe.augment][:1]
    method = "_".join(extra + [recipe.method] * (recipe.method == "isda" or not extra))
    parts = (re.sub(r"[^A-Za-z0-9_.]+", "_", part) for part in (data, recipe.network, method))
    return "-".join(parts)


def run_name(recipe: Recipe, start: Recipe, start_name: str | None = None) -> str:
    """Name of a run: that of the recipe it started from, and every field that was changed.

    >>> start = get_recipe("digits-resnet8-isda")
    >>> run_name(replace(start, lambda_0=1.0), start, "digits-resnet8-isda")
    'digits-resnet8-isda+lambda_0=1.0'

    Args:
        recipe: what is trained.
        start: the recipe before any field was changed.
        start_name: its name, if it is not the one that its fields give.
    """
    moved = replace(start, data=recipe.data, network=recipe.network)
    name = start_name or name_of(moved)
    changes = [
        f"+{field}={'_'.join(map(str, new)) if isinstance(new, tuple) else new}"
        for field, (_, new) in differing_fields(RECIPES.get(name, moved), recipe).items()
    ]
    return name + re.sub(r"[^A-Za-z0-9_.+=-]+", "_", "".join(changes))  # fit for a folder


def baseline_of(name: str) -> str:
    """Name of the recipe without ISDA that an ISDA recipe is compared with.

    >>> baseline_of("cifar10-resnet32-isda"), baseline_of("cifar10-wide_resnet28_10-cutout_isda")
    ('cifar10-resnet32-ce', 'cifar10-wide_resnet28_10-cutout')
    """
    training, _, method = name.rpartition("-")
    if method.partition("_")[2] not in ("", "isda") or not method.endswith("isda"):
        raise InputError(f"recipe must end in isda to have a baseline, got {name!r}")
    extra = method.removesuffix("isda").removesuffix("_")
    return f"{training}-{extra if extra in COMPANIONS else 'ce'}"


def differing_fields(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Fields in which two recipes differ, with both values."""
    pairs = {
        field.name: (getattr(one, field.name), getattr(other, field.name))
        for field in dataclasses.fields(Recipe)
    }
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}


COMPANIONS = ("cutout", "autoaugment", "dropout")
"""What ISDA is combined with in Tables 3 and 4."""

_CHOICES = {
    "method": get_args(Method),
    "schedule": get_args(Schedule),
    "covariance": get_args(Covariance),
    "ramp": get_args(Ramp),
    "precision": get_args(Precision),
}


def _require(holds: bool, field: str, value: object, expectation: str) -> None:
    if not holds:
        raise InputError(f"{field} must be {expectation}, got {value!r}")


def _steps(
    epochs: int,
    batch_size: int,
    weight_decay: float,
    learning_rate: float,
    gamma: float,
    *milestones: int,
) -> dict[str, Any]:
    return {
        "epochs": epochs,
        "batch_size": batch_size,
        "weight_decay": weight_decay,
        "learning_rate": learning_rate,
        "schedule": "step",
        "gamma": gamma,
        "milestones": milestones,
    }


# Appendix B, "Training configurations on CIFAR", row by row.
_RESNET = _steps(160, 128, 1e-4, 0.1, 0.1, 80, 120)
_SE_RESNET = _steps(200, 128, 1e-4, 0.1, 0.1, 80, 120, 160)
_WIDE_RESNET = _steps(240, 128, 5e-4, 0.1, 0.2, 60, 120, 160, 200)
_DENSENET = _steps(300, 64, 1e-4, 0.1, 0.1, 150, 200, 250)
_RESNEXT = _steps(350, 128, 5e-4, 0.05, 0.1, 150, 225, 300)
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

# Table 5: what an ablation changes in the ISDA recipe.
_ABLATIONS: dict[str, dict[str, Any]] = {
    "identity_isda": {"covariance": "identity"},
    "diagonal_isda": {"covariance": "diagonal"},
    "shared_isda": {"covariance": "shared"},
    "constant_isda": {"ramp": "constant"},
}


def _named() -> Iterator[tuple[str, Recipe]]:
    """Every training of Tables 1 to 5 with its name."""
    for recipe in _WITH_ISDA:
        yield name_of(recipe.baseline()), recipe.baseline()
        yield name_of(recipe), recipe
        training = f"{recipe.data}-{recipe.network}"
        if recipe.augment != ("crop", "flip"):
            continue
        if recipe.network in _TABLE_4:
            for method in _TABLE_4_METHODS:
                noise = 0.1 if training == "cifar100-resnet110" else 0.05
                noise_rate = noise if method == "disturb_label" else 0.0
                changed = replace(recipe.baseline(), method=method, noise_rate=noise_rate)
                yield f"{training}-{method}", changed
        if recipe.network == "resnet110":
            yield f"{training}-dropout", replace(recipe.baseline(), drop_rate=0.3)
            yield f"{training}-dropout_isda", replace(recipe, drop_rate=0.3)
        if recipe.network == "wide_resnet28_10":
            for ablation, changes in _ABLATIONS.items():
                yield f"{training}-{ablation}", replace(recipe, **changes)


RECIPES: dict[str, Recipe] = dict(_named())
"""Every training of Tables 1 to 5 but the GANs', and two on the bundled digits, by name."""

DEFAULT = "digits-resnet8-isda"
"""The recipe that needs no download and no GPU."""

OWN_IMAGES = Recipe(
    data="imagefolder:PATH",
    network="timm:resnet18",
    epochs=90,
    batch_size=64,
    learning_rate=0.025,
    weight_decay=1e-4,
    lambda_0=0.5,
    channels_last=True,
)
"""A start for images that no recipe is made for."""
