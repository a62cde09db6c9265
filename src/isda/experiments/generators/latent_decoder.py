"""Features to a picture in one pass: a network from features to latents, then the generator.

The network is trained with a pixel and a feature loss through the frozen generator and classifier.
Its latents are pictures on their own, and starting points of the inversion.
"""

import torch
from torch import Tensor, nn

from isda.experiments.data import counter_rng
from isda.experiments.generators.gan_lane import to_unit
from isda.experiments.generators.latent_search import normalized, with_codes
from isda.experiments.generators.trained_classifier import TrainedClassifier
from isda.experiments.generators.trained_generator import TrainedGenerator

__all__ = ["LatentDecoder", "train_decoder"]

_WIDTH, _BATCH = 512, 128


class LatentDecoder(nn.Module):
    """Features and class to the latent of a generator.

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


def train_decoder(
    classifier: TrainedClassifier,
    generator: TrainedGenerator,
    *,
    eta: float,
    epochs: int,
    seed: int = 0,
) -> LatentDecoder:
    """Train on the training images with ``‖f(G(z)) - a‖² + eta ‖G(z) - x‖²``, as in step I.

    Args:
        classifier: where the features come from.
        generator: what makes images of latents.
        eta: weight of the pixels.
        epochs: passes over the training images.
        seed: seed of weights and order.
    """
    data = classifier.data
    device = data.train_images.device
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        decoder = LatentDecoder(
            classifier.network.num_features, data.num_classes, generator.settings.noise
        ).to(device)
    features = classifier.all_features(data.train_images)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-3)
    key = counter_rng.key(seed, device=device)
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - epoch / epochs)
        order = counter_rng.permutation(len(features), counter_rng.fold(key, epoch))
        for index in order.split(_BATCH):
            label = data.train_target[index]
            latent = with_codes(decoder(features[index], label), generator)
            images = generator.for_classes(label.tolist())(latent)
            found = classifier.features(images)
            pixels = (images - to_unit(data.train_images[index])).square().flatten(1).sum(1)
            loss = ((found - features[index]).square().sum(1) + eta * pixels).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return decoder.eval().requires_grad_(False)
