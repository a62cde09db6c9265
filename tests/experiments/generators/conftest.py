"""Fixtures of the tests of generators: the digits, and runs and GANs trained on them."""

from dataclasses import replace
from pathlib import Path

import pytest

from isda.experiments.data.arrays import load_data
from isda.experiments.generators.gan_settings import get_gan
from isda.experiments.generators.gan_training import train_gan
from isda.experiments.generators.stages import Stages
from isda.experiments.generators.trained_classifier import load_classifier
from isda.experiments.generators.trained_generator import load_generator
from isda.experiments.recipes import get_recipe
from isda.experiments.settings import Options
from isda.experiments.training.loop import Plan, train

ISDA = replace(get_recipe("digits-resnet8-isda"), epochs=3)


@pytest.fixture(scope="session")
def digits(device):
    return load_data("digits").to(device)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, device) -> Path:
    """Two runs with ISDA, one with cross entropy, and two GANs."""
    out = tmp_path_factory.mktemp("chain")
    plans = [Plan("isda", ISDA, 0), Plan("isda", ISDA, 1), Plan("ce", ISDA.baseline(), 0)]
    train(plans, Options(out=out / "runs", device=str(device)), progress=False)
    for name, epochs in (("acgan", 25), ("wgan", 8)):
        settings = replace(get_gan(name), data="digits", width=16, epochs=epochs, average=0.9)
        train_gan(settings, 0, Options(out=out / "gans", device=str(device)))
    return out


@pytest.fixture(scope="session")
def classifier(folder, device):
    return load_classifier(folder / "runs" / "isda" / "0", Options(), device)


@pytest.fixture(scope="session")
def generator(folder, device):
    return load_generator(folder / "gans" / "digits-acgan" / "0", device)


@pytest.fixture
def stages(tmp_path) -> Stages:
    """Stages that nothing stops."""
    return Stages(tmp_path, "stages", {"settings": {}}, Options())
