"""Settings of a training run: the recipe determines the result, the options how to compute it."""

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from isda.experiments.errors import InputError, unknown
from isda.experiments.recipe_checks import require, require_fine_tuning, require_method

__all__ = ["AUGMENTATIONS", "METHODS", "Options", "Recipe"]

AUGMENTATIONS = ("crop", "flip", "autoaugment", "cutout")
"""Image augmentations by name, in the order in which they are applied."""

Method = Literal[
    "ce", "isda", "large_margin", "disturb_label", "focal", "center", "lq", "label_smoothing"
]  # fmt: skip

GanName = Literal["wgan", "cgan", "acgan", "infogan"]

METHODS: tuple[str, ...] = get_args(Method)
"""Losses by name: cross entropy, ISDA, the baselines of Table 4, and label smoothing."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train a network on a data set."""

    data: str
    """Data set: digits, cifar10, cifar100, imagenet or imagefolder:PATH."""

    network: str
    """Network: a built-in name, timm:NAME, torchvision:NAME, or MODULE:FUNCTION, your own function
    that takes num_classes and returns a model that ends in a linear layer."""

    pretrained: bool = False
    """Start from pretrained weights of timm or torchvision, or from the file given by --weights.
    The head is replaced by a new one if the number of classes differs."""

    weights: str = ""
    """File with the pretrained weights: safetensors, or a torch file that contains only tensors. If
    empty, the weights of timm or torchvision, which --download downloads if they are missing."""

    freeze: bool = False
    """Freeze the backbone and train only the head, on features that are computed once, without
    augmentation."""

    method: Method = "isda"
    """Loss: cross entropy, ISDA, a baseline of Table 4, or label smoothing."""

    augment: tuple[str, ...] = ()
    """Augmentations, applied in this order: crop, flip, autoaugment, cutout. Image files are always
    cropped and flipped, and support no others."""

    generator: Literal["none", GanName] = "none"
    """GAN whose images are mixed into every batch; train it first with isda gan train."""

    synthetic: float = 0.0
    """Fraction of synthetic images in every batch; 1/6 in the paper."""

    epochs: int
    """Number of epochs."""

    batch_size: int
    """Number of images per step, summed over all processes."""

    learning_rate: float
    """Initial learning rate of the schedule, not counting the warm-up."""

    head_rate: float = 1.0
    """Multiplier of the learning rate for the head, the final linear layer."""

    warmup: int = 0
    """Number of warm-up epochs, in which the learning rate grows linearly every step; 0: none."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer: SGD with momentum, or AdamW."""

    momentum: float = 0.9
    """Momentum of SGD, or β₁ of AdamW, whose β₂ is 0.999."""

    nesterov: bool = True
    """Use Nesterov momentum; off for ImageNet, as in the authors' code."""

    weight_decay: float
    """Weight decay; see --decay-all for the parameters it applies to."""

    decay_all: bool = True
    """Apply weight decay to all parameters. If off, apply it only to those with two or more
    dimensions, that is, not to biases and normalisation layers."""

    schedule: Literal["step", "cosine"] = "cosine"
    """Learning rate schedule."""

    milestones: tuple[int, ...] = ()
    """Epochs, counted from 1, at which the step schedule multiplies the learning rate by gamma."""

    gamma: float = 0.1
    """Multiplier of the learning rate at each milestone."""

    cosine_offset: int = 0
    """Number of epochs to shift the cosine schedule; with 1, the last epoch has learning rate 0."""

    lambda_0: float = 0.0
    """Strength λ₀ of ISDA at the end of the ramp; 0 is cross entropy. isda compare also accepts
    auto, which chooses λ₀ on held-out training images."""

    covariance: Literal["full", "diagonal", "shared", "identity"] = "full"
    """Covariance: full or diagonal per class, one shared by all classes, or the identity."""

    ramp: Literal["epoch", "step", "constant"] = "epoch"
    """How the strength grows to lambda_0: every epoch, every step, or not at all (constant)."""

    decay: float = 1.0
    """Factor by which each new sample of a class reduces the weight of its earlier samples in the
    statistics; 1: no decay."""

    noise_rate: float = 0.0
    """Fraction of labels that disturb_label draws at random in every step."""

    drop_rate: float = 0.0
    """Dropout rate inside the network."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the network: float32, or bfloat16 autocast."""

    channels_last: bool = False
    """Use the channels-last memory format."""

    compile: bool = False
    """Compile the network with torch.compile; GPU only."""

    ema: float = 0.0
    """Decay of an exponential moving average of the weights, which is evaluated in their place;
    0: off."""

    images_per_class: int = 0
    """Number of training images per class, drawn at random with the seed of the run; 0: all. For
    digits, which has no separate test set, all other images are test images."""

    hold_out: int = 0
    """Number of training images to hold out and evaluate on instead of the test set."""

    image_size: int = 224
    """Side of the square crops of image files, in pixels."""

    test_crop: float = 0.875
    """Side of the centre crop of test images, as a fraction of the shorter side of the resized
    image; image files only."""

    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation for resizing image files, with antialiasing."""

    mean: tuple[float, ...] = ()
    """Mean of each channel for normalisation, with images scaled to [0, 1]. If empty, the mean of
    the data set, or of ImageNet for image files."""

    std: tuple[float, ...] = ()
    """Standard deviation of each channel for normalisation; the default is chosen as for mean."""

    def __post_init__(self) -> None:
        check = partial(require, self)
        for field, choices in _CHOICES.items():
            check(field, getattr(self, field) in choices, f"one of {', '.join(choices)}")
        for field in ("data", "network"):
            check(field, bool(getattr(self, field)), "non-empty")
        kind, _, path = self.data.partition(":")
        if path:  # normalise, since runs are named after it
            object.__setattr__(self, "data", f"{kind}:{PurePath(path)}")
        for field in ("epochs", "batch_size", "image_size"):
            check(field, getattr(self, field) >= 1, ">= 1")
        for field in ("weight_decay", "cosine_offset", "lambda_0", "images_per_class", "hold_out",
                      "warmup"):  # fmt: skip
            check(field, 0 <= getattr(self, field) < math.inf, ">= 0")
        for field in ("momentum", "noise_rate", "drop_rate", "ema", "synthetic"):
            check(field, 0 <= getattr(self, field) < 1, ">= 0 and < 1")
        for field in ("gamma", "decay", "test_crop"):
            check(field, 0 < getattr(self, field) <= 1, "> 0 and <= 1")
        for field in ("learning_rate", "head_rate"):
            check(field, 0 < getattr(self, field) < math.inf, "> 0")
        check("momentum", self.momentum > 0 or not self.nesterov, "> 0 with nesterov")
        require_fine_tuning(self)
        known = len({*self.augment} & {*AUGMENTATIONS}) == len(self.augment)
        check("augment", known, f"distinct names out of {', '.join(AUGMENTATIONS)}")
        increasing = list(self.milestones) == sorted({*self.milestones})
        positive = min(self.milestones, default=1) >= 1
        check("milestones", increasing and positive, ">= 1 and increasing")
        require_method(self)

    def learning_rate_at(self, epoch: int) -> float:
        """Learning rate of an epoch, counted from 0, without the warm-up.

        ``step``: learning_rate · gamma^k after k milestones, where milestone m is the m-th epoch.
        ``cosine``: ½ · learning_rate · (1 + cos(π (epoch + cosine_offset) / T)).
        """
        if self.schedule == "step":
            reached = sum(epoch + 1 >= milestone for milestone in self.milestones)
            return self.learning_rate * self.gamma**reached
        phase = min((epoch + self.cosine_offset) / self.epochs, 1.0)
        return 0.5 * self.learning_rate * (1 + math.cos(math.pi * phase))

    def warmup_at(self, epochs: float) -> float:
        """Warm-up factor of the learning rate after a number of epochs, which may be fractional."""
        return min(1.0, epochs / self.warmup) if self.warmup else 1.0

    def progress_at(self, epoch: int) -> float:
        """Progress t/T of the ramp at the start of an epoch, counted from 0.

        The strength is ``lambda_0 * progress``. With ``ramp="epoch"`` the first epoch is plain
        cross entropy.
        """
        return 1.0 if self.ramp == "constant" else epoch / self.epochs

    def shortened(self, epochs: int) -> "Recipe":
        """The same recipe with fewer epochs; milestones are scaled in proportion."""
        scaled = {max(1, round(m * epochs / self.epochs)) for m in self.milestones}
        warmup = min(epochs, math.ceil(self.warmup * epochs / self.epochs))
        return replace(self, epochs=epochs, milestones=tuple(sorted(scaled)), warmup=warmup)

    def require_ramp(self) -> None:
        """Raise InputError if the strength is 0 in every epoch although lambda_0 is not."""
        if self.lambda_0 > 0 and self.ramp == "epoch" and self.epochs == 1:
            raise InputError(
                f"epochs must be >= 2 for lambda_0 {self.lambda_0:g} to have an effect: with ramp "
                "epoch, the first epoch is cross entropy; use more epochs, or --ramp step"
            )

    @property
    def has_image_files(self) -> bool:
        """Whether the data set consists of image files."""
        return self.data == "imagenet" or self.data.startswith("imagefolder:")

    @property
    def data_name(self) -> str:
        """Name of the data set, or of the folder of the images."""
        kind, _, path = self.data.partition(":")
        return PurePath(path).name or kind

    @property
    def augmentation(self) -> str:
        """The augmentations in words; image files have fixed ones."""
        if self.freeze:
            return "none"
        if self.has_image_files:
            return "random crop, flip"
        return ", ".join(self.augment) or "none"

    def baseline(self) -> "Recipe":
        """The same recipe with cross entropy."""
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
        """Fields as JSON values; the inverse of ``from_dict``."""
        return {
            field: list(value) if isinstance(value, tuple) else value
            for field, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Recipe":
        """Recipe from the fields of a run record."""
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
        except TypeError as error:  # a missing field or a wrong type
            raise InputError(f"not a valid recipe: {error}") from error


@dataclass(frozen=True)
class Options:
    """How to run the training; the options do not change the result."""

    out: Path = Path("runs")
    """Folder for the runs: OUT/<recipe>/<seed>/."""

    resume: bool = False
    """Resume existing runs and skip finished ones."""

    device: str = "auto"
    """Device: auto (a GPU if there is one), cpu, cuda or cuda:N."""

    data_root: Path | None = None
    """Folder that contains ImageNet or CIFAR; None: data, for CIFAR."""

    download: bool = False
    """Download CIFAR, or pretrained weights, if they are missing."""

    generators: Path = Path("generators")
    """Folder of trained GANs, for recipes with a generator: GENERATORS/<data>-<gan>/0/."""

    skip_unreadable: bool = False
    """Skip image files that cannot be decoded."""

    workers: int | None = None
    """Number of threads that decode image files; None: one per CPU core, at most 16."""

    cache: Literal["auto", "device", "memory", "disk", "off"] = "auto"
    """Where to keep decoded image files: on the device, in memory, or on disk, in a file in their
    folder that later commands reuse; off: decode them in every epoch. auto: the first of these
    places with room for twice their size."""

    side_by_side: int = 0
    """Number of runs to train at the same time on a GPU; 0: measure which number is fastest."""

    processes: int = 1
    """Number of processes that train runs in parallel on a CPU, each with one thread."""

    capture: bool = True
    """Capture training steps in CUDA graphs on a GPU."""

    compile_cache: Path | None = None
    """Folder for compiled code, which later commands can reuse, even on another machine; None: the
    default temporary folder of torch.compile."""

    deterministic: bool = False
    """Use deterministic GPU kernels: bitwise reproducible, but slower."""

    checkpoint_seconds: float = 60.0
    """Minimum number of seconds between checkpoints; the last epoch always writes one."""

    minutes: float | None = None
    """Time limit in minutes from the start of the command. At the limit, write checkpoints and exit
    with code 75. No epoch is started that would exceed the limit."""

    whole_runs: bool = False
    """With --minutes on a GPU: if not all runs side by side can finish in time, stop some of them
    so that the others can. Useful if the machine's disk is deleted at shutdown."""

    tensorboard: bool = False
    """Also write the metrics for TensorBoard."""

    started_at: ClassVar[float]  # set per object; not a field, which would be a flag
    """Start of the time limit: when the options were created, by ``time.monotonic``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "started_at", time.monotonic())
        check = partial(require, self)
        for field in ("side_by_side", "checkpoint_seconds"):
            check(field, getattr(self, field) >= 0, ">= 0")
        check("processes", self.processes >= 1, ">= 1")
        check("minutes", self.minutes is None or 0 < self.minutes < math.inf, "> 0")
        check("cache", self.cache in _CACHES, f"one of {', '.join(_CACHES)}")
        check("workers", self.workers is None or self.workers >= 0, ">= 0")

    def changed(self, **changes: Any) -> "Options":
        """A copy with other values, and with the same start of the time limit."""
        copy = replace(self, **changes)
        object.__setattr__(copy, "started_at", self.started_at)
        return copy

    def with_minutes_left(self) -> "Options":
        """A copy limited to the time that is left now, for a machine with a different clock."""
        if self.minutes is None:
            return self
        left = self.minutes - (time.monotonic() - self.started_at) / 60
        return replace(self, minutes=max(left, 1e-9))


_CACHES = get_args(get_type_hints(Options)["cache"])
_CHOICES = {
    field: get_args(kind)
    for field, kind in get_type_hints(Recipe).items()
    if get_origin(kind) is Literal
}
