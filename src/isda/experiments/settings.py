"""What to train and how: a recipe decides the result, the options decide only the speed."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal, get_args, get_origin, get_type_hints

from isda.experiments.errors import InputError, unknown

__all__ = ["AUGMENTATIONS", "METHODS", "Options", "Recipe", "differing_fields", "require_seeds"]

AUGMENTATIONS = ("crop", "flip", "autoaugment", "cutout")
"""Image augmentations by name, in the order in which they are applied."""

Method = Literal["ce", "isda", "large_margin", "disturb_label", "focal", "center", "lq"]

METHODS: tuple[str, ...] = get_args(Method)
"""Losses by name: cross entropy, ISDA and the baselines of Table 4."""


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

    schedule: Literal["step", "cosine"] = "cosine"
    """Learning rate over the epochs: falling in steps, or along a cosine."""

    milestones: tuple[int, ...] = ()
    """Epochs, counted from 1, from which on the step schedule is lower by another gamma."""

    gamma: float = 0.1
    """Factor of each step of the step schedule."""

    cosine_offset: int = 0
    """Epochs by which the cosine runs ahead; 1 ends at a learning rate of zero."""

    lambda_0: float = 0.0
    """Strength of ISDA at the end of the ramp; 0 is plain cross entropy."""

    covariance: Literal["full", "diagonal", "shared", "identity"] = "full"
    """Covariance of the features: full or diagonal per class, one shared by all, or identity."""

    ramp: Literal["epoch", "step", "constant"] = "epoch"
    """Growth of the strength to lambda_0: once per epoch, at every step, or none (constant)."""

    decay: float = 1.0
    """Weight that a sample keeps in the statistics with each later one of its class; 1: all."""

    noise_rate: float = 0.0
    """Share of labels that disturb_label draws anew in every step."""

    drop_rate: float = 0.0
    """Dropout rate inside the network."""

    precision: Literal["fp32", "bf16"] = "fp32"
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


@dataclass(frozen=True)
class Options:
    """How to run the training; no option changes the result."""

    out: Path = Path("runs")
    """Folder for the runs: OUT/<recipe>/<seed>/."""

    resume: bool = False
    """Resume existing runs and skip finished ones."""

    device: str = "auto"
    """Device: auto (a GPU if there is one), cpu, cuda or cuda:N."""

    data_root: Path | None = None
    """Folder of CIFAR (default: data) or of ImageNet."""

    download: bool = False
    """Download CIFAR if it is missing."""

    skip_unreadable: bool = False
    """Skip image files that cannot be decoded."""

    workers: int | None = None
    """Processes that decode image files (default: one per CPU core, at most 16)."""

    side_by_side: int = 0
    """Runs to train at the same time on a GPU; 0 chooses 1 to 6 by the size of the network."""

    capture: bool = True
    """Capture training steps in CUDA graphs on a GPU."""

    deterministic: bool = False
    """Use deterministic GPU kernels: bitwise reproducible, but slower."""

    checkpoint_seconds: float = 60.0
    """Minimum time between checkpoints; the last epoch always writes one."""

    tensorboard: bool = False
    """Also write the metrics for TensorBoard."""

    def __post_init__(self) -> None:
        _require(self.side_by_side >= 0, "side_by_side", self.side_by_side, ">= 0")
        seconds = self.checkpoint_seconds
        _require(seconds >= 0, "checkpoint_seconds", seconds, ">= 0")
        _require(self.workers is None or self.workers >= 0, "workers", self.workers, ">= 0")


def differing_fields(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Fields in which two recipes differ, with both values."""
    pairs = {
        field.name: (getattr(one, field.name), getattr(other, field.name))
        for field in dataclasses.fields(Recipe)
    }
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}


def require_seeds(argument: str, seeds: Sequence[int]) -> None:
    """Raise InputError unless there are seeds, all different, that fit into 32 bits."""
    if not seeds or len({*seeds}) != len(seeds) or not 0 <= min(seeds) <= max(seeds) < 2**32:
        listed = " ".join(map(str, seeds)) or "none"
        raise InputError(f"{argument} must be different integers from 0 to 2³² - 1, got {listed}")


def _require(holds: bool, field: str, value: object, expectation: str) -> None:
    if not holds:
        raise InputError(f"{field} must be {expectation}, got {value!r}")


_CHOICES = {
    field: get_args(kind)
    for field, kind in get_type_hints(Recipe).items()
    if get_origin(kind) is Literal
}
