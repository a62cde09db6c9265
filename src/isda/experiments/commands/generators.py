"""``isda gan``, ``isda invert`` and ``isda neighbours``: train and use generators."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from isda.experiments.commands.arguments import parse, require_seeds
from isda.experiments.errors import InputError, unknown
from isda.experiments.generators.gan_settings import GANS, GanSettings, get_gan
from isda.experiments.generators.inversion_settings import InversionSettings
from isda.experiments.report.feature_tables import neighbours_table, quality_table, read_table
from isda.experiments.report.text import show
from isda.experiments.settings import Options
from isda.experiments.training.device import choose_kernels, join_processes

__all__ = ["Gan", "Invert", "Measure", "Neighbours", "gan", "invert", "neighbours"]


@dataclass(frozen=True)
class Gan:
    """Arguments of ``isda gan train``."""

    settings: Annotated[GanSettings, tyro.conf.arg(name="")]
    """What to train: a GAN, whose settings can be changed."""

    seed: int = 0
    """Seed of the initial weights and of all random draws."""

    sample_every: int = 0
    """Number of epochs between two grids of samples; 0: a twentieth of all epochs."""

    out: Path = Path("generators")
    """Folder for the GANs: OUT/<data>-<gan>/<seed>/."""

    resume: bool = False
    """Continue from the last checkpoint; the number of epochs may be changed."""

    device: str = "auto"
    """Device: auto (a GPU if there is one), cpu, cuda or cuda:N."""

    data_root: Path | None = None
    """Folder that contains CIFAR; None: data."""

    download: bool = False
    """Download CIFAR if it is missing."""

    capture: bool = True
    """Capture training steps in CUDA graphs on a GPU."""

    deterministic: bool = False
    """Use deterministic GPU kernels: bitwise reproducible, but slower."""

    checkpoint_seconds: float = 60.0
    """Minimum number of seconds between checkpoints; the last epoch always writes one."""

    minutes: float | None = None
    """Time limit in minutes from the start of the command, as in isda train."""


@dataclass(frozen=True, kw_only=True)
class _WithClassifier:
    """Arguments of all commands that use a trained classifier."""

    seed: int = 0
    """Seed of the choice of images and of all random draws."""

    device: str = "auto"
    """Device: auto (a GPU if there is one), cpu, cuda or cuda:N."""

    data_root: Path | None = None
    """Folder that contains ImageNet or CIFAR; None: data, for CIFAR."""

    skip_unreadable: bool = False
    """Skip image files that cannot be decoded, as in the training of the run."""


@dataclass(frozen=True, kw_only=True)
class Measure(_WithClassifier):
    """Arguments of ``isda gan measure``."""

    generator: tyro.conf.Positional[Path]
    """Folder of a trained GAN: OUT/<data>-<gan>/<seed>."""

    classifier: Path
    """Folder of a finished run with its checkpoint; distances are measured between its features."""

    epochs: int = 20
    """Epochs of the small classifier that is trained only on synthetic images."""


@dataclass(frozen=True, kw_only=True)
class Neighbours(_WithClassifier):
    """Arguments of ``isda neighbours``."""

    classifier: tyro.conf.Positional[Path]
    """Folder of a finished run with ISDA, with its checkpoint."""

    out: Path = Path("pictures")
    """Folder for neighbours.png and neighbours.json."""

    samples: int = 10
    """Number of training images to show, one per row."""

    measured: int = 1000
    """Number of training images on which to measure the percentages in the table."""

    draws: int = 5
    """Number of draws from N(0, λΣ) per image."""

    eigenvectors: int = 5
    """Number of leading eigenvectors of Σ per image."""

    strength: float | None = None
    """Strength λ of the moves; None: lambda_0 of the run."""


@dataclass(frozen=True, kw_only=True)
class Invert(_WithClassifier):
    """Arguments of ``isda invert``."""

    classifier: tyro.conf.Positional[Path]
    """Folder of a finished run with ISDA, with its checkpoint."""

    generator: Path | None = None
    """Folder of a trained GAN: OUT/<data>-<gan>/<seed>. None: train a generator together with the
    decoder, which requires --start decoder."""

    judge: Path | None = None
    """Folder of another run, an independent classifier that checks whether pictures keep their
    class."""

    out: Path = Path("pictures")
    """Folder for inversion.png and inversion.json."""

    samples: int = 10
    """Number of training images to invert; the grid shows the first 20, one per row."""

    settings: Annotated[InversionSettings, tyro.conf.arg(name="")] = field(
        default_factory=InversionSettings
    )
    """How to invert."""

    strength: float | None = None
    """Strength λ of the draws; None: lambda_0 of the run."""

    capture: bool = True
    """Capture the iterations in CUDA graphs on a GPU."""

    deterministic: bool = False
    """Use deterministic GPU kernels: bitwise reproducible, but slower."""

    resume: bool = False
    """Continue an unfinished inversion with the same arguments."""

    checkpoint_seconds: float = 60.0
    """Minimum number of seconds between writes of OUT/inversion.pt, the state to resume from."""

    minutes: float | None = None
    """Time limit in minutes from the start of the command, as in isda train."""


def _options_of(arguments: Any) -> Options:
    """The training options among the arguments of a command."""
    names = {one.name for one in fields(Options)} & {one.name for one in fields(arguments)}
    return Options(**{name: getattr(arguments, name) for name in names})


_FIRST = next(iter(GANS))
_GAN_USAGE = f"""\
usage: isda gan train {{{",".join(GANS)}}} [FLAGS]
       isda gan measure GENERATOR --classifier RUN [FLAGS]

  train    Train a GAN of Table 4.
  measure  Measure the quality of a trained GAN.

`isda gan train {_FIRST} --help` and `isda gan measure --help` list the flags."""


def gan(words: list[str]) -> None:
    """Train a GAN of Table 4, or measure one."""
    action, name = [*words, "", ""][:2]
    if action in ("", "-h", "--help"):
        print(_GAN_USAGE)
        return
    if action not in ("train", "measure"):
        raise unknown("action of isda gan", action, ["train", "measure"])
    if action == "measure":
        _measure(words[1:])
        return
    if name in ("-h", "--help"):
        name, words = _FIRST, [action, _FIRST, "--help"]
    if not name or name.startswith("-"):
        raise InputError(f"isda gan train needs the name of a GAN: one of {', '.join(GANS)}")
    given = parse(
        Gan,
        f"gan train {name}",
        words[2:],
        description="Train a GAN of Table 4.",
        default=Gan(get_gan(name)),
    )
    if given.settings.gan != name:
        raise InputError(f"--gan {given.settings.gan} contradicts isda gan train {name}")
    require_seeds("seed", (given.seed,))
    from isda.experiments.generators.gan_training import train_gan

    options = _options_of(given)
    print(train_gan(given.settings, given.seed, options, sample_every=given.sample_every).folder)


def _measure(words: list[str]) -> None:
    from isda.experiments.generators.gan_quality import measure_gan
    from isda.experiments.generators.trained_classifier import load_classifier
    from isda.experiments.generators.trained_generator import load_generator

    given = parse(Measure, "gan measure", words, description="Measure a trained GAN.")
    require_seeds("seed", (given.seed,))
    with join_processes(given.device) as (device, _, _):
        generator = load_generator(given.generator, device)
        options = _options_of(given)
        classifier = load_classifier(given.classifier, options, device, statistics=False)
        result = measure_gan(
            generator, classifier, given.generator, epochs=given.epochs, seed=given.seed
        )
    show(quality_table(result).text)


def invert(words: list[str]) -> None:
    """Show augmented features as pictures of a generator (Appendix C)."""
    from isda.experiments.generators.inversion import show_inversion
    from isda.experiments.generators.trained_classifier import load_classifier
    from isda.experiments.generators.trained_generator import load_generator

    given = parse(Invert, "invert", words)
    require_seeds("seed", (given.seed,))
    options = _options_of(given)
    with join_processes(given.device) as (device, _, world), choose_kernels(options, device):
        if world > 1:
            raise InputError("an inversion runs in one process: start isda invert without torchrun")
        folder = given.generator
        generator = None if folder is None else load_generator(folder, device)
        classifier = load_classifier(given.classifier, options, device)
        judge = None
        if given.judge is not None:
            judge = load_classifier(given.judge, options, device, statistics=False)
        show_inversion(
            classifier,
            generator,
            given.settings,
            options,
            judge=judge,
            samples=given.samples,
            strength=given.strength,
            seed=given.seed,
        )
    # from the file: the record of an earlier command may be damaged
    show(f"{read_table(given.out, 'inversion').text}\n{given.out / 'inversion.png'}")


def neighbours(words: list[str]) -> None:
    """Show the training images nearest to augmented features."""
    from isda.experiments.generators.neighbours import show_neighbours
    from isda.experiments.generators.trained_classifier import load_classifier

    given = parse(Neighbours, "neighbours", words)
    require_seeds("seed", (given.seed,))
    with join_processes(given.device) as (device, _, _):
        classifier = load_classifier(given.classifier, _options_of(given), device)
        result = show_neighbours(
            classifier,
            given.out,
            samples=given.samples,
            measured=given.measured,
            draws=given.draws,
            eigenvectors=given.eigenvectors,
            strength=given.strength,
            seed=given.seed,
        )
    show(f"{neighbours_table(result).text}\n{given.out / 'neighbours.png'}")
