"""Quality of a GAN: the Fréchet distance and its floor."""

import pytest
import scipy.linalg
import torch

from isda.experiments.data import counter_rng
from isda.experiments.generators.gan_quality import frechet_distance, measure_gan


def test_frechet_distance_against_scipy() -> None:
    one, other = torch.randn(50, 4).double(), torch.randn(70, 4).double() * 2 + 1
    moments = [(x.mean(0).numpy(), x.T.cov().numpy()) for x in (one, other)]
    (mean_1, cov_1), (mean_2, cov_2) = moments
    root = scipy.linalg.sqrtm(cov_1 @ cov_2).real
    expected = ((mean_1 - mean_2) ** 2).sum() + (cov_1 + cov_2 - 2 * root).trace()
    assert frechet_distance(one, other) == pytest.approx(expected)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-6)


def test_the_floor_does_not_depend_on_the_classes_drawn(classifier, generator, tmp_path) -> None:
    """Sets of as many images of each class are nearer to each other than random ones."""
    result = measure_gan(generator, classifier, tmp_path, epochs=1)
    images, number = classifier.data.train_images, result["images"]
    assert number == len(classifier.data.test_target)
    random = []
    for seed in range(5):
        order = counter_rng.permutation(len(images), counter_rng.key(seed, device=images.device))
        one, other = (classifier.all_features(images[part]) for part in order.split(number)[:2])
        random.append(frechet_distance(one, other))
    assert result["classifier_fid_floor"] < 0.8 * min(random)
