"""Settings of the four GANs of Table 4 (Appendix B)."""

import math
from dataclasses import dataclass
from functools import partial
from typing import get_args

from isda.experiments.errors import unknown
from isda.experiments.recipe_checks import require
from isda.experiments.settings import GanName

__all__ = ["CODES", "GANS", "GanSettings", "get_gan"]

CODES = 2
"""Number of further latent inputs of infoGAN, uniform in [-1, 1)."""


@dataclass(frozen=True, kw_only=True)
class GanSettings:
    """How to train a GAN on a data set."""

    gan: GanName
    """Which GAN: wgan has one generator per class, the others have one for all classes."""

    data: str = "cifar10"
    """Data set: digits, cifar10 or cifar100."""

    epochs: int
    """Number of epochs; in an epoch the critic sees as many images as the data set has."""

    batch_size: int = 64
    """Real images per step of the critic."""

    critic_steps: int
    """Steps of the critic per step of the generator."""

    learning_rate: float
    """Learning rate of Adam for both networks."""

    beta_1: float
    """Decay β₁ of the mean gradient in Adam."""

    beta_2: float
    """Decay β₂ of the mean squared gradient in Adam."""

    penalty: float = 0.0
    """Weight of the gradient penalty; 0: use spectral norm in the critic instead."""

    noise: int = 100
    """Dimension of the Gaussian noise."""

    width: int = 64
    """Channels at the highest resolution inside the networks; each halving doubles them."""

    average: float = 0.999
    """Decay of the moving average of the generator's weights, which makes the images; lower in the
    first steps. 0: no average."""

    hold_out: int = 0
    """Number of training images to hold out, as for isda train."""

    def __post_init__(self) -> None:
        if self.gan not in get_args(GanName):
            raise unknown("GAN", self.gan, get_args(GanName))
        check = partial(require, self)
        least = {
            "epochs": 1,
            "batch_size": 1,
            "critic_steps": 1,
            "width": 1,
            "noise": 2,
            "hold_out": 0,
        }
        for field, number in least.items():
            value = getattr(self, field)
            whole = isinstance(value, int) and not isinstance(value, bool)
            check(field, whole and value >= number, f"a whole number >= {number}")
        for field in ("beta_1", "beta_2", "average"):
            check(field, 0 <= getattr(self, field) < 1, ">= 0 and < 1")
        check("penalty", 0 <= self.penalty < math.inf, ">= 0")
        check("learning_rate", 0 < self.learning_rate < math.inf, "> 0")

    @property
    def per_class(self) -> bool:
        """Whether there is one generator per class."""
        return self.gan == "wgan"

    @property
    def codes(self) -> int:
        """Number of latent inputs besides the noise."""
        return CODES if self.gan == "infogan" else 0

    @property
    def flips(self) -> bool:
        """Whether real images are flipped at random, as for the classifiers of the data set."""
        return self.data != "digits"

    @property
    def name(self) -> str:
        """Name of the folder of its runs: ``<data>-<gan>``."""
        return f"{self.data}-{self.gan}"


def get_gan(name: str) -> GanSettings:
    """Default settings of a GAN by name."""
    if name not in GANS:
        raise unknown("GAN", name, GANS)
    return GANS[name]


GANS: dict[str, GanSettings] = {
    "wgan": GanSettings(
        gan="wgan",
        epochs=1000,
        critic_steps=5,
        learning_rate=2e-4,
        beta_1=0.0,
        beta_2=0.9,
        penalty=10.0,
    ),
    **{
        name: GanSettings(
            gan=name,
            epochs=200,
            critic_steps=1,
            learning_rate=2e-4,
            beta_1=0.5,
            beta_2=0.999,
        )
        for name in ("cgan", "acgan", "infogan")
    },
}
"""Default settings by name. Adam is as in WGAN-GP (Gulrajani et al., 2017, for CIFAR-10) and, where
the critic has spectral norm, as in DCGAN; both at a constant rate."""
