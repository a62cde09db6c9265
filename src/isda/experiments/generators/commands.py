"""What ``isda gan``, ``invert`` and ``neighbours`` do."""

from isda.experiments.arguments import parse
from isda.experiments.errors import InputError, unknown
from isda.experiments.generators.gan_settings import GANS, get_gan
from isda.experiments.generators.generator_arguments import (
    GanArguments,
    InvertArguments,
    MeasureArguments,
    NeighboursArguments,
    options_of,
)
from isda.experiments.recipe_checks import require_seeds
from isda.experiments.report.feature_tables import (
    inversion_table,
    neighbours_table,
    quality_table,
)
from isda.experiments.report.text import show
from isda.experiments.training.device import choose_kernels, join_processes
from isda_command import COMMANDS

__all__ = ["gan", "invert", "neighbours"]


def gan(words: list[str]) -> None:
    """Train a GAN of Table 4, or measure one."""
    action, name = [*words, "", ""][:2]
    if action in ("", "-h", "--help"):
        action, name, words = "train", "wgan", ["train", "wgan", "--help"]
    if action not in ("train", "measure"):
        raise unknown("action of isda gan", action, ["train", "measure"])
    if action == "measure":
        _measure(words[1:])
        return
    if not name or name.startswith("-"):
        raise InputError(f"isda gan train needs the name of a GAN: one of {', '.join(GANS)}")
    given = parse(
        GanArguments,
        f"gan train {name}",
        words[2:],
        description="Train a GAN of Table 4.",
        default=GanArguments(get_gan(name)),
    )
    if given.settings.gan != name:
        raise InputError(f"--gan {given.settings.gan} contradicts isda gan train {name}")
    require_seeds("seed", (given.seed,))
    from isda.experiments.generators.gan_training import train_gan

    options = options_of(given)
    print(train_gan(given.settings, given.seed, options, sample_every=given.sample_every).folder)


def _measure(words: list[str]) -> None:
    from isda.experiments.generators.gan_quality import measure_gan
    from isda.experiments.generators.trained_classifier import load_classifier
    from isda.experiments.generators.trained_generator import load_generator

    given = parse(MeasureArguments, "gan measure", words, description="Measure a trained GAN.")
    require_seeds("seed", (given.seed,))
    with join_processes(given.device) as (device, _, _):
        generator = load_generator(given.generator, device)
        options = options_of(given)
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

    given = parse(InvertArguments, "invert", words, description=COMMANDS["invert"])
    require_seeds("seed", (given.seed,))
    options = options_of(given)
    with join_processes(given.device) as (device, _, _), choose_kernels(options, device):
        folder = given.generator
        generator = None if folder is None else load_generator(folder, device)
        classifier = load_classifier(given.classifier, options, device)
        judge = None
        if given.judge is not None:
            judge = load_classifier(given.judge, options, device, statistics=False)
        result = show_inversion(
            classifier,
            generator,
            given.out,
            given.settings,
            judge=judge,
            samples=given.samples,
            strength=given.strength,
            seed=given.seed,
            capture=given.capture,
        )
    show(f"{inversion_table(result).text}\n{given.out / 'inversion.png'}")


def neighbours(words: list[str]) -> None:
    """Show the training images nearest to augmented features."""
    from isda.experiments.generators.neighbours import show_neighbours
    from isda.experiments.generators.trained_classifier import load_classifier

    given = parse(NeighboursArguments, "neighbours", words, description=COMMANDS["neighbours"])
    require_seeds("seed", (given.seed,))
    with join_processes(given.device) as (device, _, _):
        classifier = load_classifier(given.classifier, options_of(given), device)
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
