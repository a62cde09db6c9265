"""Quality of a GAN, measured: classifier FID, and what a classifier learns from its images."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isda.experiments.data import counter_rng
from isda.experiments.data.arrays import ImageArrays
from isda.experiments.errors import InputError
from isda.experiments.files import write_json
from isda.experiments.generators.feature_moves import choose_samples
from isda.experiments.generators.trained_classifier import TrainedClassifier
from isda.experiments.generators.trained_generator import TrainedGenerator
from isda.experiments.settings import Recipe
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.training_step import Lane

__all__ = ["frechet_distance", "measure_gan"]

_DRAW, _TRAINING = 1, 2  # key parts


def frechet_distance(one: Tensor, other: Tensor) -> float:
    r"""Fréchet distance of the normal distributions with the moments of two sets of features.

    ‖μ₁ - μ₂‖² + tr(Σ₁ + Σ₂ - 2 (Σ₁ Σ₂)^½), in float64.

    Shape:
        one (N, A), other (M, A).
    """
    moments = []
    for features in (one.double(), other.double()):
        centred = features - features.mean(0)
        moments.append((features.mean(0), centred.T @ centred / (len(features) - 1)))
    (mean_1, covariance_1), (mean_2, covariance_2) = moments
    values, vectors = torch.linalg.eigh(covariance_1)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    # the eigenvalues of Σ₁Σ₂ are those of the symmetric Σ₁^½ Σ₂ Σ₁^½
    product = torch.linalg.eigvalsh(root @ covariance_2 @ root).clamp(min=0).sqrt().sum()
    traces = covariance_1.trace() + covariance_2.trace()
    return float((mean_1 - mean_2).square().sum() + traces - 2 * product)


def measure_gan(
    generator: TrainedGenerator,
    classifier: TrainedClassifier,
    folder: Path,
    *,
    epochs: int = 20,
    seed: int = 0,
) -> dict[str, Any]:
    """Write ``quality.json`` to the folder of a GAN and return its contents.

    - *Classifier FID*: Fréchet distance, over the features of a frozen classifier, of synthetic
      images from random training images. Its floor is the distance of other training images; the
      distance of test images is what real images reach that the classifier has not seen. All sets
      have the same size and class proportions, since the distance depends on both.
    - Test error on real images of a small network that is trained only on synthetic images, as many
      as there are training images, next to the same network trained on real images.

    Args:
        generator: generator to measure.
        classifier: finished run on the same data set.
        folder: folder of the GAN.
        epochs: epochs of the small network.
        seed: seed of all draws.
    """
    if epochs < 1:
        raise InputError(f"epochs must be >= 1, got {epochs}")
    data = classifier.data.to(classifier.device)
    generator.require_fit(
        num_classes=data.num_classes, image_shape=tuple(data.image_shape), other="the classifier"
    )
    key = counter_rng.key(seed, device=classifier.device)
    number = len(data.train_target)
    size = min(number // 2, len(data.test_target))
    chosen = choose_samples(classifier, 2 * size, seed)  # as many of each class
    classes = [index % data.num_classes for index in range(number)]
    sets = {
        "": generator.draw(classes[:size], counter_rng.fold(key, _DRAW)),
        "_floor": classifier.training_images(chosen[size:]),
        "_test": data.test_images[:size],
    }
    training = classifier.all_features(classifier.training_images(chosen[:size]))
    distances = {
        f"classifier_fid{name}": frechet_distance(training, classifier.all_features(images))
        for name, images in sets.items()
    }
    synthetic = replace(
        data,
        train_images=generator.draw(classes, counter_rng.fold(key, _TRAINING)),
        train_target=torch.tensor(classes, device=data.train_target.device),
    )
    result = {
        "generator": generator.settings.name,
        "generator_digest": generator.digest,
        "classifier": str(classifier.folder),
        "data": data.name,
        "seed": seed,
        "epochs": epochs,
        "images": size,
        **distances,
        "error_of_synthetic": _test_error(synthetic, epochs, seed),
        "error_of_real": _test_error(data, epochs, seed),
    }
    write_json(folder / "quality.json", result)
    return result


def _test_error(data: ImageArrays, epochs: int, seed: int) -> float:
    """Test error in percent of a small network after training on the training images."""
    recipe = Recipe(
        data=data.name,
        network="resnet8",
        method="ce",
        augment=() if data.name == "digits" else ("crop", "flip"),
        epochs=epochs,
        batch_size=128,
        learning_rate=0.1,
        weight_decay=5e-4,
        cosine_offset=1,
    )
    device = data.train_images.device
    lane = Lane(recipe, seed, data, device)
    runner = SideBySide([lane], capture=device.type == "cuda")
    for epoch in range(epochs):
        lane.epoch = epoch
        runner.train_epoch()
    return runner.evaluate()[0][1]
