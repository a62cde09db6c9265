"""Generator and critic of the GANs: strided convolutions that begin with about 4 × 4 pixels.

The critic of WGAN has a gradient penalty in place of clipped weights, which limit what it can
learn; the others have spectral norm, since the plain critics of their papers are easily trained
until the generator has no gradient. Neither uses statistics over the batch in the critic.
"""

import itertools

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from isda.experiments.errors import InputError
from isda.experiments.generators.gan_settings import GanSettings

__all__ = ["Critic", "Generator", "doublings"]

_LARGEST_START = 15  # side of the images that the generators begin with


def doublings(image_shape: tuple[int, ...]) -> tuple[int, int]:
    """The side of a small image, and how often it doubles to give an image of this shape.

    >>> doublings((3, 32, 32)), doublings((1, 8, 8)), doublings((3, 224, 224))
    ((4, 3), (4, 1), (7, 5))
    """
    _, height, width = image_shape
    side, number = height, 0
    while side % 2 == 0 and side >= 8:
        side, number = side // 2, number + 1
    if height != width or number < 1 or side > _LARGEST_START:
        raise InputError(
            f"images must be square for a generator, with a side of 4 to {_LARGEST_START} pixels "
            f"doubled once or more, such as 32, 96 or 224, got {height} x {width}"
        )
    return side, number


class Generator(nn.Module):
    """Maps a latent to an image: a linear layer to about 4 × 4, then transposed convolutions.

    Args:
        settings: settings of the GAN.
        num_classes: number of classes whose label is an input; 0: no label.
        image_shape: channels, height and width.

    Shape:
        latent (N, noise + codes), label (N,) class indices; output (N, *image_shape) in (-1, 1).
    """

    def __init__(
        self, settings: GanSettings, num_classes: int, image_shape: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        side, number = doublings(image_shape)
        channels = [settings.width * 2**power for power in reversed(range(number))]
        inputs = settings.noise + settings.codes + num_classes
        first = nn.Linear(inputs, channels[0] * side**2, bias=False)
        layers: list[nn.Module] = [first, nn.Unflatten(1, (channels[0], side, side))]
        for before, after in itertools.pairwise(channels):  # batch norm would remove a bias
            convolution = nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)
            layers += [nn.BatchNorm2d(before), nn.ReLU(), convolution]
        last = nn.ConvTranspose2d(channels[-1], image_shape[0], 4, 2, 1)
        layers += [nn.BatchNorm2d(channels[-1]), nn.ReLU(), last, nn.Tanh()]
        self.layers = nn.Sequential(*layers)
        _initialise(self)

    def forward(self, latent: Tensor, label: Tensor) -> Tensor:
        if self.num_classes:
            latent = torch.cat([latent, _one_hot(label, self.num_classes)], 1)
        return self.layers(latent)


class Critic(nn.Module):
    """Scores an image; has heads for its class and its codes if the GAN needs them.

    CGAN gives its critic the label: the score is w·h + e_y·h for features h and a vector e_y of
    each class. ACGAN and infoGAN have a linear head for the class, infoGAN one for its codes.

    Shape:
        images (N, *image_shape), label (N,); outputs (N,), (N, C) and (N, codes), where the last
        two have no columns if the GAN has no such head.
    """

    def __init__(
        self, settings: GanSettings, num_classes: int, image_shape: tuple[int, ...]
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = image_shape[0]
        side, number = doublings(image_shape)
        for power in range(number):
            after = settings.width * 2**power
            layers += [nn.Conv2d(before, after, 4, 2, 1), nn.LeakyReLU(0.2)]
            before = after
        self.layers = nn.Sequential(*layers, nn.Flatten())
        features = before * side**2
        self.score = nn.Linear(features, 1)
        self.classes = nn.Embedding(num_classes, features) if settings.gan == "cgan" else None
        has_head = settings.gan in ("acgan", "infogan")
        self.head = nn.Linear(features, num_classes) if has_head else None
        self.codes = nn.Linear(features, settings.codes) if settings.codes else None
        _initialise(self)
        if not settings.penalty:
            for layer in [*self.layers, self.score, self.classes]:
                if isinstance(layer, nn.Conv2d | nn.Linear | nn.Embedding):
                    spectral_norm(layer)

    def forward(self, images: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.layers(images)
        score = self.score(features)[:, 0]
        if self.classes is not None:
            score = score + (self.classes(label) * features).sum(1)
        empty = features[:, :0]
        logits = empty if self.head is None else self.head(features)
        codes = empty if self.codes is None else self.codes(features)
        return score, logits, codes


def _one_hot(label: Tensor, num_classes: int) -> Tensor:
    # nn.functional.one_hot checks the labels, which synchronises
    return (label[:, None] == torch.arange(num_classes, device=label.device)).float()


def _initialise(module: nn.Module) -> None:
    """N(0, 0.02²) for all weights, as in DCGAN."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d | nn.ConvTranspose2d | nn.Embedding):
            nn.init.normal_(part.weight, 0.0, 0.02)
            if getattr(part, "bias", None) is not None:
                nn.init.zeros_(part.bias)  # type: ignore[arg-type]
