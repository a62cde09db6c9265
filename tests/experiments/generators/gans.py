"""Small settings for the tests of GANs."""

from dataclasses import replace
from pathlib import Path

from isda.experiments.generators.gan_settings import get_gan
from isda.experiments.settings import Options

__all__ = ["options", "small"]


def small(name: str, **changes):
    size = 16 if name == "wgan" else 160  # two or nine steps in an epoch of digits
    fields = {"data": "digits", "epochs": 3, "width": 4, "batch_size": size, **changes}
    return replace(get_gan(name), **fields)


def options(out: Path, device, **changes) -> Options:
    return Options(out=out, device=str(device), deterministic=True, **changes)
