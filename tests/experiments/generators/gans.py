"""What the tests of GANs share: small settings and the digits."""

from dataclasses import replace
from pathlib import Path

import pytest

from isda.experiments.data.arrays import load_data
from isda.experiments.generators.gan_settings import get_gan
from isda.experiments.settings import Options

__all__ = ["digits", "options", "small"]


def small(name: str, **changes):
    size = 16 if name == "wgan" else 160  # two or nine steps in an epoch of digits
    fields = {"data": "digits", "epochs": 3, "width": 4, "batch_size": size, **changes}
    return replace(get_gan(name), **fields)


@pytest.fixture(scope="module")
def digits(device):
    return load_data("digits").to(device)


def options(out: Path, device, **changes) -> Options:
    return Options(out=out, device=str(device), deterministic=True, **changes)
