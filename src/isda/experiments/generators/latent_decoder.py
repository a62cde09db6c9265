"""Pictures of features in one pass: a network maps features to latents, and a generator follows.

The network is trained with a pixel and a feature loss through the frozen classifier. The generator
is either that of a GAN, also frozen, or a new one that is trained with the network, so that no GAN
is needed. The latents give pictures by themselves, and are starting points of the inversion.
"""

import functools
from dataclasses import replace

import torch
from torch import Tensor, nn

from isda.experiments.data import counter_rng
from isda.experiments.generators.gan_networks import Generator
from isda.experiments.generators.gan_settings import get_gan
from isda.experiments.generators.gan_step import to_unit
from isda.experiments.generators.latent_search import normalized, with_codes
from isda.experiments.generators.stages import Stages
from isda.experiments.generators.trained_classifier import TrainedClassifier
from isda.experiments.generators.trained_generator import TrainedGenerator
from isda.experiments.networks.network import seeded

__all__ = ["LatentDecoder", "create_generator", "train_decoder"]

_WIDTH, _BATCH = 512, 128


class LatentDecoder(nn.Module):
    """Maps features and class to the latent of a generator.

    Shape:
        features (N, A), label (N,); output (N, noise), normalised.
    """

    def __init__(self, num_features: int, num_classes: int, noise: int) -> None:
        super().__init__()
        self.label = nn.Embedding(num_classes, _WIDTH)
        self.first = nn.Linear(num_features, _WIDTH)
        self.rest = nn.Sequential(
            nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, noise)
        )

    def forward(self, features: Tensor, label: Tensor) -> Tensor:
        return normalized(self.rest(self.first(features) + self.label(label)))


def create_generator(classifier: TrainedClassifier, seed: int = 0) -> TrainedGenerator:
    """A generator with the architecture of CGAN and initial weights, for :func:`train_decoder`."""
    data, shape = classifier.data, tuple(classifier.data.image_shape)
    settings = replace(get_gan("cgan"), data=data.name)
    with seeded(seed):
        network = Generator(settings, data.num_classes, shape)
    return TrainedGenerator(settings, data.num_classes, shape, [network.to(classifier.device)])


def train_decoder(
    classifier: TrainedClassifier,
    generator: TrainedGenerator,
    stages: Stages,
    *,
    eta: float,
    steps: int,
    seed: int = 0,
    with_generator: bool = False,
) -> LatentDecoder:
    """Train on the training images with ``‖f(G(z)) - a‖² + eta ‖G(z) - x‖²``, as in step I.

    Args:
        classifier: where the features come from.
        generator: maps latents to images.
        stages: the computation that the training is a stage of.
        eta: weight of the pixels.
        steps: number of training steps.
        seed: seed of weights and order.
        with_generator: also train the generator.
    """
    data, device = classifier.data, classifier.device
    with seeded(seed):
        decoder = LatentDecoder(
            classifier.network.num_features, data.num_classes, generator.settings.noise
        ).to(device)
    networks: dict[str, nn.Module] = {"decoder": decoder}
    if with_generator:
        networks["generator"] = generator.train().requires_grad_(True)
    optimizer = torch.optim.Adam(nn.ModuleDict(networks).parameters(), lr=1e-3)
    key, number = counter_rng.key(seed, device=device), len(data.train_target)
    features = torch.empty(0)  # slow to compute, so only if there is a step to do
    if not stages.is_finished("decoder", steps):
        features = classifier.all_features(data.train_images)

    @functools.lru_cache(maxsize=1)
    def order(epoch: int) -> Tensor:
        return counter_rng.permutation(number, counter_rng.fold(key, epoch))

    def step(done: int, _: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - done / steps)
        epoch, place = divmod(done, -(-number // _BATCH))
        index = order(epoch)[place * _BATCH : (place + 1) * _BATCH]
        label = data.train_target[index]
        latent = with_codes(decoder(features[index], label), generator)
        images = generator.for_classes(label.tolist())(latent)
        found = classifier.features(images)
        pixels = (images - to_unit(classifier.training_images(index))).square()
        distance = (found - features[index]).square().sum(1)
        loss = (distance + eta * pixels.flatten(1).sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    stages.run("decoder", steps, step, networks, helpers={"optimizer": optimizer})
    generator.eval().requires_grad_(False)
    return decoder.eval().requires_grad_(False)
