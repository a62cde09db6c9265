"""Command-line arguments of the commands that train and use generators."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from isda.experiments.generators.gan_settings import GanSettings
from isda.experiments.generators.inversion_settings import InversionSettings
from isda.experiments.settings import Options

__all__ = [
    "GanArguments",
    "InvertArguments",
    "MeasureArguments",
    "NeighboursArguments",
    "options_of",
]


@dataclass(frozen=True)
class GanArguments:
    """Arguments of ``isda gan train``."""

    settings: Annotated[GanSettings, tyro.conf.arg(name="")]
    """What to train: a GAN, any setting of which can be changed."""

    seed: int = 0
    """Seed of the initial weights and of all draws."""

    sample_every: int = 0
    """Epochs between two grids of samples; 0: a twentieth of all epochs."""

    out: Path = Path("generators")
    """Folder for the GANs: OUT/<data>-<gan>/<seed>/."""

    resume: bool = False
    """Continue from the last checkpoint; the number of epochs may be another one."""

    device: str = "auto"
    """Device: auto (a GPU if there is one), cpu, cuda or cuda:N."""

    data_root: Path | None = None
    """Folder of CIFAR; None: data."""

    download: bool = False
    """Download CIFAR if it is missing."""

    capture: bool = True
    """Capture training steps in CUDA graphs on a GPU."""

    deterministic: bool = False
    """Use deterministic GPU kernels: bitwise reproducible, but slower."""

    checkpoint_seconds: float = 60.0
    """Minimum time between checkpoints; the last epoch always writes one."""

    minutes: float | None = None
    """Time limit, counted from the start of the command; as in isda train."""


@dataclass(frozen=True, kw_only=True)
class _ClassifierArguments:
    """Arguments of all commands that use a trained classifier."""

    seed: int = 0
    """Seed of the choice of images and of all draws."""

    device: str = "auto"
    """Device: auto (a GPU if there is one), cpu, cuda or cuda:N."""

    data_root: Path | None = None
    """Folder of CIFAR; None: data."""


@dataclass(frozen=True, kw_only=True)
class MeasureArguments(_ClassifierArguments):
    """Arguments of ``isda gan measure``."""

    generator: tyro.conf.Positional[Path]
    """Folder of a trained GAN: OUT/<data>-<gan>/<seed>."""

    classifier: Path
    """Folder of a finished run, with its checkpoint, whose features the distance is measured in."""

    epochs: int = 20
    """Epochs of the small classifier that is trained on synthetic images alone."""


@dataclass(frozen=True, kw_only=True)
class NeighboursArguments(_ClassifierArguments):
    """Arguments of ``isda neighbours``."""

    classifier: tyro.conf.Positional[Path]
    """Folder of a finished run with ISDA, with its checkpoint."""

    out: Path = Path("pictures")
    """Folder for neighbours.png and neighbours.json."""

    samples: int = 10
    """Training images to show, one row each."""

    measured: int = 1000
    """Training images that the shares are measured on."""

    draws: int = 5
    """Draws from N(0, λΣ) per image."""

    eigenvectors: int = 5
    """Leading eigenvectors of Σ per image."""

    strength: float | None = None
    """Strength λ of the moves; None: lambda_0 of the run."""


@dataclass(frozen=True, kw_only=True)
class InvertArguments(_ClassifierArguments):
    """Arguments of ``isda invert``."""

    classifier: tyro.conf.Positional[Path]
    """Folder of a finished run with ISDA, with its checkpoint."""

    generator: Path | None = None
    """Folder of a trained GAN: OUT/<data>-<gan>/<seed>. None: a generator that is trained with the
    decoder, with --start decoder."""

    judge: Path | None = None
    """Folder of another run, not used otherwise, which says whether pictures keep their class."""

    out: Path = Path("pictures")
    """Folder for inversion.png and inversion.json."""

    samples: int = 10
    """Training images to invert; the grid shows the first 20, one row each."""

    settings: Annotated[InversionSettings, tyro.conf.arg(name="")] = field(
        default_factory=InversionSettings
    )
    """How to invert."""

    strength: float | None = None
    """Strength λ of the draws; None: lambda_0 of the run."""

    capture: bool = True
    """Capture the iterations in CUDA graphs on a GPU."""


def options_of(arguments: Any) -> Options:
    """The options of a training that are among the arguments of a command."""
    names = {one.name for one in fields(Options)} & {one.name for one in fields(arguments)}
    return Options(**{name: getattr(arguments, name) for name in names})
