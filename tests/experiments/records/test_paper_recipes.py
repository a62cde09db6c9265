"""Every recipe of the paper: each network and each method trains, on tiny images."""

import math
from dataclasses import replace

import lanes
import pytest
import torch
from lanes import tiny_arrays, train
from torch import nn

from isda.experiments.data.folder_cache import DecodedImages, decode_folder
from isda.experiments.data.folders import FolderImages
from isda.experiments.recipe_checks import differing_fields
from isda.experiments.recipes import RECIPES
from isda.experiments.training.training_step import Lane

full_precision, image_files = lanes.full_precision, lanes.image_files  # fixtures

LIGHT = ("resnet8", "resnet32", "resnet110", "densenet_bc100_12", "shake_shake26_2x32d")


def test_cifar_recipes_differ_in_their_data_alone() -> None:
    names = [name for name in RECIPES if name.startswith("cifar10-")]
    assert len(names) >= 32
    for name in names:
        if name.endswith("-wgan"):
            continue  # on CIFAR-10 alone, as in the paper
        other = RECIPES["cifar100-" + name.removeprefix("cifar10-")]
        noise = {"noise_rate"} if name == "cifar10-resnet110-disturb_label" else set()
        assert differing_fields(RECIPES[name], other).keys() == {"data"} | noise


@pytest.fixture(scope="module")
def folder_images(image_files: FolderImages, device: torch.device) -> DecodedImages:
    return decode_folder(image_files, device=device)


def every_network_and_method() -> list[str]:
    """Recipes with each network of each kind of data, by ISDA, and one recipe of each method.

    The methods do not depend on the network, so they train a small one.
    """
    networks = {(recipe.data, recipe.network): name for name, recipe in RECIPES.items()
                if name.endswith("-isda") and recipe.data != "cifar100"}  # fmt: skip
    names = [name for name in reversed(RECIPES) if name.startswith("cifar10-")]
    methods = {name.rpartition("-")[2]: name for name in names}
    return sorted({*networks.values(), *methods.values()})


@pytest.mark.parametrize("name", every_network_and_method())
def test_recipes_train(name: str, folder_images: DecodedImages, device: torch.device) -> None:
    usual = RECIPES[name]
    folder = usual.data == "imagenet"
    network = usual.network if name.endswith("-isda") else "resnet8"
    recipe = replace(
        usual,
        network=network,
        batch_size=5 if folder else 2,
        learning_rate=usual.learning_rate / 100,  # made for larger batches
        epochs=3,  # of which the second is trained: the last may have a learning rate of 0
        compile=False,  # takes a minute each on a GPU, and has its own test
        precision=usual.precision if network in LIGHT else "fp32",
    )
    channels = 1 if usual.data == "digits" else 3
    tiny = folder_images if folder else tiny_arrays(channels, 8, device)
    lane = Lane(recipe, 0, tiny, device)
    lane.epoch = 1
    for module in lane.network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0  # two or three steps are too few for a running average
    start = [parameter.detach().clone() for parameter in lane.parameters]
    assert list(lane.images.batch_sizes()) == ([5, 4] if folder else [2, 2, 1])
    ((results,),) = train([lane], 1)  # with a third of λ₀
    assert all(map(math.isfinite, results))
    assert int(lane.steps) == (2 if folder else 3)
    for parameter, before in zip(lane.parameters, start, strict=True):
        assert parameter.isfinite().all()
        assert not torch.equal(parameter, before)
    if usual.method == "isda" and usual.covariance != "identity":
        assert int(lane.criterion.estimator.count.sum()) == lane.num_images
    assert recipe.precision == "fp32" or network in LIGHT
