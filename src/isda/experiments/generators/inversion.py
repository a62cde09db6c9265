"""Features back to pixels (Appendix C), and what an independent classifier sees in the pictures."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isda.experiments.data import counter_rng
from isda.experiments.errors import InputError
from isda.experiments.files import write_json, writing
from isda.experiments.generators.feature_moves import (
    choose_samples,
    draw_moves,
    random_moves,
    strength_of,
)
from isda.experiments.generators.gan_step import to_bytes, to_unit
from isda.experiments.generators.inversion_settings import InversionSettings
from isda.experiments.generators.latent_decoder import create_generator, train_decoder
from isda.experiments.generators.latent_search import LatentSearch, normalized, with_codes
from isda.experiments.generators.pictures import write_grid
from isda.experiments.generators.trained_classifier import TrainedClassifier
from isda.experiments.generators.trained_generator import TrainedGenerator
from isda.experiments.recipe_checks import require

__all__ = ["show_inversion"]

_MOST_ROWS = 20  # of the grid; all images are measured
_START, _DRAWS, _CONTROL = 1, 2, 3  # key parts


def show_inversion(
    classifier: TrainedClassifier,
    generator: TrainedGenerator | None,
    out: Path,
    settings: InversionSettings | None = None,
    *,
    judge: TrainedClassifier | None = None,
    samples: int = 10,
    strength: float | None = None,
    seed: int = 0,
    capture: bool = True,
) -> dict[str, Any]:
    """Write ``inversion.png`` and ``inversion.json`` to a folder and return what the latter has.

    A row of the grid is the original, its reconstruction (step I), with ``start="decoder"`` the
    picture of the decoder, then the augmented pictures (step II), then those of the control:
    features moved as far in random directions.

    Args:
        classifier: trained classifier with ISDA statistics.
        generator: trained generator of the same data set; None: one that is trained with the
            decoder, which ``start`` must then be.
        out: folder to write to.
        settings: settings of the inversion.
        judge: another classifier, which has no part in the inversion.
        samples: training images to invert, of which the grid shows at most 20.
        strength: λ; by default λ₀ of the recipe.
        seed: seed of images, latents and draws.
        capture: capture the iterations in CUDA graphs on a GPU.
    """
    settings = settings or InversionSettings()
    strength = strength_of(classifier, strength)
    data = classifier.data
    trained = generator is not None
    require(
        settings, "start", trained or settings.start == "decoder", "decoder without a generator"
    )
    if generator is None:
        generator = create_generator(classifier, seed)
    generator.require_fit(
        num_classes=data.num_classes, image_shape=tuple(data.image_shape), other="the classifier"
    )
    if judge is not None:
        _require_independent(judge, classifier)
    chosen = choose_samples(classifier, samples, seed)
    with writing(out, keep=()):
        out.mkdir(parents=True, exist_ok=True)
    pixels, classes = classifier.training_images(chosen), data.train_target[chosen].tolist()
    features = classifier.all_features(pixels)
    key = counter_rng.key(seed, device=features.device)

    starts = counter_rng.normal(
        (samples, settings.restarts, generator.settings.noise), counter_rng.fold(key, _START)
    )
    one_pass = None
    if settings.start == "decoder":
        decoder = train_decoder(
            classifier,
            generator,
            eta=settings.eta,
            steps=settings.decoder_steps,
            seed=seed,
            with_generator=not trained,
            progress=True,
        )
        latent = decoder(features, data.train_target[chosen])
        one_pass = _images(generator, latent, classes)
        starts[:, 0] = latent
    latent, step_1 = _reconstruct(
        classifier, generator, pixels, features, classes, starts, settings, capture=capture
    )
    drawn = draw_moves(classifier, classes, settings.draws, strength, counter_rng.fold(key, _DRAWS))
    moves = torch.cat([drawn, random_moves(drawn, counter_rng.fold(key, _CONTROL))], 1)
    wanted = features[:, None] + moves  # (samples, 2 draws, A)
    found = _augment(classifier, generator, wanted, classes, latent, settings, capture=capture)

    def measure(images: Tensor, wanted: Tensor, moves: Tensor | None = None) -> dict[str, Any]:
        return _measure(classifier, judge, images, classes, wanted, moves)

    draws, wanted_first = settings.draws, features[:, None]
    rebuilt = to_bytes(_images(generator, latent, classes))[:, None]
    columns = {"original": pixels[:, None], "reconstruction": rebuilt}
    if one_pass is not None:
        columns["decoder"] = to_bytes(one_pass)[:, None]
    pictures = {name: measure(images, wanted_first) for name, images in columns.items()}
    for name, part in (("ISDA", slice(0, draws)), ("control", slice(draws, None))):
        columns[name] = to_bytes(found[:, part])
        start = rebuilt.expand(-1, draws, -1, -1, -1)
        before = measure(start, wanted[:, part], moves[:, part])["residual_of_move"]
        pictures[name] = measure(columns[name], wanted[:, part], moves[:, part])
        pictures[name]["residual_of_move_before"] = before
    rules = (1, len(columns) - 2, len(columns) - 2 + draws)
    grid = torch.cat([*columns.values()], 1)[:_MOST_ROWS]
    write_grid(out / "inversion.png", grid, rules=rules)

    result = {
        "classifier": str(classifier.folder),
        "judge": None if judge is None else str(judge.folder),
        "generator": generator.settings.name if trained else "trained with the decoder",
        "generator_digest": generator.digest,
        "data": data.name,
        "samples": samples,
        "strength": strength,
        "seed": seed,
        "settings": asdict(settings),
        "step_1_loss": float(step_1.median()),
        "pictures": pictures,
    }
    write_json(out / "inversion.json", result)
    return result


def _reconstruct(
    classifier: TrainedClassifier,
    generator: TrainedGenerator,
    pixels: Tensor,
    features: Tensor,
    classes: list[int],
    starts: Tensor,
    settings: InversionSettings,
    *,
    capture: bool,
) -> tuple[Tensor, Tensor]:
    """Step I: the best latent of each image (S, noise), and its loss (S,)."""
    samples, restarts, noise = starts.shape
    images_of = generator.for_classes([one for one in classes for _ in range(restarts)])
    target = to_unit(pixels).repeat_interleave(restarts, 0)
    wanted = features.repeat_interleave(restarts, 0)

    def loss(latent: Tensor) -> Tensor:
        images = images_of(with_codes(latent, generator))
        distance = (classifier.features(images) - wanted).square().sum(1)
        return distance + settings.eta * (images - target).square().flatten(1).sum(1)

    search = LatentSearch(
        loss,
        starts.reshape(-1, noise),
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    before = search.evaluate()
    losses = search.run(
        settings.iterations, settings.learning_rates[0], capture=capture, label="step I"
    )
    # few iterations at the high learning rate may end above a good start, such as the decoder's
    found = torch.where((losses < before)[:, None], search.latent.detach(), starts.flatten(0, 1))
    best = torch.minimum(losses, before).view(samples, restarts).min(1)
    found = found.view(samples, restarts, noise)
    rows = torch.arange(samples, device=found.device)
    return normalized(found[rows, best.indices]), best.values


def _augment(
    classifier: TrainedClassifier,
    generator: TrainedGenerator,
    wanted: Tensor,
    classes: list[int],
    latent: Tensor,
    settings: InversionSettings,
    *,
    capture: bool,
) -> Tensor:
    """Step II: images (S, M, ...) whose features are as near to ``wanted`` (S, M, A) as found."""
    samples, number, _ = wanted.shape
    repeated = [one for one in classes for _ in range(number)]
    images_of, flat = generator.for_classes(repeated), wanted.flatten(0, 1)

    def loss(latent: Tensor) -> Tensor:
        images = images_of(with_codes(latent, generator))
        return (classifier.features(images) - flat).square().sum(1)

    search = LatentSearch(
        loss,
        latent.repeat_interleave(number, 0),
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    search.run(settings.iterations, settings.learning_rates[1], capture=capture, label="step II")
    found = _images(generator, normalized(search.latent.detach()), repeated)
    return found.unflatten(0, (samples, number))


@torch.no_grad()
def _images(generator: TrainedGenerator, latent: Tensor, classes: list[int]) -> Tensor:
    return generator.for_classes(classes)(with_codes(latent, generator))


@torch.no_grad()
def _measure(
    classifier: TrainedClassifier,
    judge: TrainedClassifier | None,
    images: Tensor,
    classes: list[int],
    wanted: Tensor,
    moves: Tensor | None,
) -> dict[str, float | None]:
    """How well uint8 pictures (S, M, ...) match their features, and which class they show."""
    flat = images.flatten(0, 1)
    features = classifier.all_features(flat).view_as(wanted)
    residual = (features - wanted).norm(dim=-1)
    of_move = None
    if moves is not None and moves.any():
        of_move = float((residual / moves.norm(dim=-1).clamp(min=1e-12)).median())
    label = torch.tensor(classes, device=flat.device).repeat_interleave(images.shape[1])

    def kept(network: TrainedClassifier) -> float:
        return float((network.predictions(flat) == label).double().mean())

    return {
        "residual": float((residual / wanted.norm(dim=-1).clamp(min=1e-12)).median()),
        "residual_of_move": of_move,
        "own_class": kept(classifier),
        "judge_class": None if judge is None else kept(judge),
    }


def _require_independent(judge: TrainedClassifier, classifier: TrainedClassifier) -> None:
    if judge.folder.resolve() == classifier.folder.resolve():
        raise InputError(f"judge must be another run than the classifier, got {judge.folder}")
    if judge.recipe.data != classifier.recipe.data:
        raise InputError(
            f"judge must be trained on {classifier.recipe.data}, as the classifier, got "
            f"{judge.recipe.data}"
        )
    own, wanted = ((" x ".join(map(str, one.data.image_shape))) for one in (judge, classifier))
    if own != wanted:
        raise InputError(f"judge must take images of {wanted}, as the classifier, got {own}")
