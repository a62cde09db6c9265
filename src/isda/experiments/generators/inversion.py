"""Features back to pixels (Appendix C), and what an independent classifier sees in the pictures."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isda.experiments.data import counter_rng
from isda.experiments.errors import InputError
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
from isda.experiments.generators.stages import Stages
from isda.experiments.generators.trained_classifier import TrainedClassifier
from isda.experiments.generators.trained_generator import TrainedGenerator
from isda.experiments.recipe_checks import require
from isda.experiments.settings import Options
from isda.experiments.training.locks import locked_folder

__all__ = ["Inversion", "show_inversion"]

_MOST_ROWS = 20  # of the grid; all images are measured
_START, _DRAWS, _CONTROL = 1, 2, 3  # key parts


def show_inversion(
    classifier: TrainedClassifier,
    generator: TrainedGenerator | None,
    settings: InversionSettings,
    options: Options,
    *,
    judge: TrainedClassifier | None = None,
    samples: int = 10,
    strength: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Write ``inversion.png`` and ``inversion.json`` to a folder; return the JSON contents.

    A row of the grid shows the original, its reconstruction (step I), the picture of the decoder
    (only with ``start="decoder"``), the augmented pictures (step II), and the control pictures,
    whose features are moved equally far in random directions.

    Args:
        classifier: trained classifier with ISDA statistics.
        generator: trained generator of the same data set; None: train one together with the
            decoder, which requires ``start="decoder"``.
        settings: settings of the inversion.
        options: options, of which out, resume, capture, checkpoint_seconds and minutes are used.
        judge: another classifier, which is not used in the inversion.
        samples: training images to invert, of which the grid shows at most 20.
        strength: λ; by default λ₀ of the recipe.
        seed: seed of images, latents and draws.

    Raises:
        TimeUp: the time limit was reached before the end; the state is written.
        RunLocked: another process writes to the folder.
    """
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
    shown = {
        "classifier": str(classifier.folder),
        "judge": None if judge is None else str(judge.folder),
        "generator": generator.settings.name if trained else "trained with the decoder",
    }
    arguments = {
        "classifier_digest": classifier.digest,
        "judge_digest": None if judge is None else judge.digest,
        "generator_digest": generator.digest if trained else None,
        "data": data.name,
        "samples": samples,
        "strength": strength,
        "seed": seed,
        "settings": asdict(settings),
    }
    with locked_folder(options.out, use="written to"):
        stages = Stages(options.out, "inversion", arguments, options, shown=shown)
        if stages.record is not None:
            return stages.record
        classes = data.train_target[chosen].tolist()
        inversion = Inversion(classifier, generator, classes, settings, stages, options.capture)
        return _write_pictures(
            inversion, chosen, judge=judge, strength=strength, seed=seed, with_generator=not trained
        )


def _write_pictures(
    inversion: "Inversion",
    chosen: Tensor,
    *,
    judge: TrainedClassifier | None,
    strength: float,
    seed: int,
    with_generator: bool,
) -> dict[str, Any]:
    """Both steps of the inversion, then the picture and the record of all images.

    Args:
        inversion: what to invert with.
        chosen: indices of the training images to invert.
        judge: as in :func:`show_inversion`.
        strength: λ.
        seed: seed of latents and draws.
        with_generator: train the generator with the decoder.
    """
    classifier, generator = inversion.classifier, inversion.generator
    settings, stages, classes = inversion.settings, inversion.stages, inversion.classes
    pixels, target = classifier.training_images(chosen), classifier.data.train_target[chosen]
    features, samples = classifier.all_features(pixels), len(chosen)
    key = counter_rng.key(seed, device=features.device)
    starts = counter_rng.normal(
        (samples, settings.restarts, generator.settings.noise), counter_rng.fold(key, _START)
    )
    columns = {"original": pixels[:, None]}
    if settings.start == "decoder":
        decoder = train_decoder(
            classifier,
            generator,
            stages,
            eta=settings.eta,
            steps=settings.decoder_steps,
            seed=seed,
            with_generator=with_generator,
        )
        starts[:, 0] = decoder(features, target)
    latent, step_1 = inversion.reconstruct(pixels, features, starts)
    columns["reconstruction"] = to_bytes(inversion.images(latent[:, None]))
    if settings.start == "decoder":
        columns["decoder"] = to_bytes(inversion.images(starts[:, :1]))
    draws = settings.draws
    drawn = draw_moves(classifier, classes, draws, strength, counter_rng.fold(key, _DRAWS))
    moves = torch.cat([drawn, random_moves(drawn, counter_rng.fold(key, _CONTROL))], 1)
    wanted = features[:, None] + moves  # (samples, 2 draws, A)
    found = to_bytes(inversion.augment(latent, wanted))

    def measured(images: Tensor, wanted: Tensor, moves: Tensor | None = None) -> dict[str, Any]:
        return _measure(classifier, judge, images, classes, wanted, moves)

    pictures = {name: measured(images, features[:, None]) for name, images in columns.items()}
    start = columns["reconstruction"].expand(-1, draws, -1, -1, -1)
    for name, part in (("ISDA", slice(0, draws)), ("control", slice(draws, None))):
        columns[name] = found[:, part]
        before = measured(start, wanted[:, part], moves[:, part])["residual_of_move"]
        pictures[name] = measured(columns[name], wanted[:, part], moves[:, part])
        pictures[name]["residual_of_move_before"] = before
    rules = (1, len(columns) - 2, len(columns) - 2 + draws)
    grid = torch.cat([*columns.values()], 1)[:_MOST_ROWS]
    result = {"step_1_loss": float(step_1.median()), "pictures": pictures}
    return stages.end(result, partial(write_grid, images=grid, rules=rules))


@dataclass(frozen=True, eq=False)
class Inversion:
    """Both steps of Appendix C, for images of given classes."""

    classifier: TrainedClassifier
    generator: TrainedGenerator
    classes: list[int]
    settings: InversionSettings
    stages: Stages
    capture: bool

    def reconstruct(
        self, pixels: Tensor, features: Tensor, starts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Step I: the best latent of each image (S, noise), and its loss (S,)."""
        samples, restarts, noise = starts.shape
        images_of = self._images_of(restarts)
        target = to_unit(pixels).repeat_interleave(restarts, 0)
        wanted = features.repeat_interleave(restarts, 0)

        def loss(latent: Tensor) -> Tensor:
            images = images_of(latent)
            distance = (self.classifier.features(images) - wanted).square().sum(1)
            return distance + self.settings.eta * (images - target).square().flatten(1).sum(1)

        search = self._search(loss, starts.reshape(-1, noise))
        before = search.evaluate()
        losses = self._run(search, "step I", self.settings.learning_rates[0])
        # few iterations at the high learning rate may end above a good start, such as the decoder's
        found = torch.where(
            (losses < before)[:, None], search.latent.detach(), starts.flatten(0, 1)
        )
        best = torch.minimum(losses, before).view(samples, restarts).min(1)
        found = found.view(samples, restarts, noise)
        rows = torch.arange(samples, device=found.device)
        return normalized(found[rows, best.indices]), best.values

    def augment(self, latent: Tensor, wanted: Tensor) -> Tensor:
        """Step II: images (S, M, ...) with features as near as possible to ``wanted`` (S, M, A).

        The search starts from ``latent`` (S, noise).
        """
        samples, number, _ = wanted.shape
        images_of, flat = self._images_of(number), wanted.flatten(0, 1)

        def loss(latent: Tensor) -> Tensor:
            return (self.classifier.features(images_of(latent)) - flat).square().sum(1)

        search = self._search(loss, latent.repeat_interleave(number, 0))
        self._run(search, "step II", self.settings.learning_rates[1])
        return self.images(normalized(search.latent.detach()).unflatten(0, (samples, number)))

    @torch.no_grad()
    def images(self, latent: Tensor) -> Tensor:
        """Images (S, M, ...) of latents (S, M, noise)."""
        flat = self._images_of(latent.shape[1])(latent.flatten(0, 1))
        return flat.unflatten(0, latent.shape[:2])

    def _images_of(self, number: int) -> Callable[[Tensor], Tensor]:
        """Function from latents to images, ``number`` in a row of the class of each sample."""
        images_of = self.generator.for_classes([one for one in self.classes for _ in range(number)])
        return lambda latent: images_of(with_codes(latent, self.generator))

    def _search(self, loss: Callable[[Tensor], Tensor], start: Tensor) -> LatentSearch:
        momentum, weight_decay = self.settings.momentum, self.settings.weight_decay
        return LatentSearch(loss, start, momentum=momentum, weight_decay=weight_decay)

    def _run(self, search: LatentSearch, stage: str, learning_rate: float) -> Tensor:
        iterations = self.settings.iterations
        return search.run(self.stages, stage, iterations, learning_rate, capture=self.capture)


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
        raise InputError(f"judge must be a different run from the classifier, got {judge.folder}")
    if judge.recipe.data != classifier.recipe.data:
        raise InputError(
            f"judge must be trained on {classifier.recipe.data}, like the classifier, got "
            f"{judge.recipe.data}"
        )
    own, wanted = ((" x ".join(map(str, one.data.image_shape))) for one in (judge, classifier))
    if own != wanted:
        raise InputError(f"judge must take images of {wanted}, like the classifier, got {own}")
