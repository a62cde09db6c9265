"""Recipes of pretrained networks: preparation of images, optimizer, schedule, names."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pretrained_runs
import pytest
import timm
import timm.data
import torch
import torchvision
from PIL import Image
from pretrained_runs import RESNET, VIT, planned

from isda.experiments.commands import compare, train
from isda.experiments.commands.task import PlannedRuns
from isda.experiments.data.arrays import normalize
from isda.experiments.data.decoding import decode_center_crop
from isda.experiments.errors import InputError
from isda.experiments.networks import own_preprocessing
from isda.experiments.settings import Recipe

no_network = pretrained_runs.no_network  # fixture


def test_preparation_is_the_model_s() -> None:
    vit = own_preprocessing(VIT)
    assert vit is not None
    assert (vit.image_size, vit.mean, vit.std) == (160, (0.5,) * 3, (0.5,) * 3)
    assert (vit.interpolation, vit.test_crop) == ("bicubic", 160 / 168)  # crop_pct 0.95
    resnet = own_preprocessing("torchvision:resnet18")
    assert resnet is not None
    assert (resnet.image_size, resnet.interpolation) == (224, "bilinear")
    assert resnet.test_crop == pytest.approx(224 / 256)
    assert resnet.mean == (0.485, 0.456, 0.406)
    assert own_preprocessing("mine:model") is None


@pytest.mark.parametrize("shape", [(375, 500), (131, 97), (500, 21), (224, 224), (7, 5)])
@pytest.mark.parametrize(
    "network",
    ["timm:resnet18", "timm:vit_tiny_patch16_224", "timm:efficientnet_b3", "timm:test_vit",
     "torchvision:resnet50", "torchvision:swin_v2_t"],
)  # fmt: skip
def test_test_images_are_those_of_the_model_s_own_transform(
    network: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    """Size, crop, interpolation, mean and standard deviation, against timm and torchvision."""
    coarse = np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    photo = Image.fromarray(coarse).resize(shape[::-1], Image.Resampling.BILINEAR)
    photo.save(tmp_path / "photo.png")
    kind, _, name = network.partition(":")
    if kind == "timm":
        configuration = timm.data.resolve_data_config({}, model=timm.create_model(name))
        transform = timm.data.create_transform(**configuration)
    else:
        transform = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    own = own_preprocessing(network)
    assert own is not None
    image = decode_center_crop(
        str(tmp_path / "photo.png"),
        image_size=own.image_size,
        interpolation=own.interpolation,
        test_crop=own.test_crop,
    )
    found = normalize(image.permute(2, 0, 1)[None], own.mean, own.std)[0]
    expected = transform(photo)
    assert found.shape == expected.shape
    difference = (found - expected).abs() * torch.tensor(own.std).view(3, 1, 1) * 255
    # PIL and torchvision round the weights of their filters differently
    assert difference.max() < (2.01 if own.interpolation == "bicubic" else 1.01)
    assert difference.mean() < 0.05


def test_recipe_of_a_network_with_batch_norm() -> None:
    name, recipe = planned("--network", RESNET, "--pretrained")
    assert name == "photos-timm_test_resnet_pretrained-isda"
    assert (recipe.optimizer, recipe.learning_rate, recipe.head_rate) == ("sgd", 0.01, 1)
    assert (recipe.warmup, recipe.weight_decay, recipe.decay_all) == (1, 1e-4, True)
    assert (recipe.image_size, recipe.interpolation) == (160, "bilinear")
    assert recipe.test_crop == 160 / 168  # 0.95 in timm, which rounds the side of 168.4 down
    assert Recipe.from_dict(recipe.as_dict()) == recipe


def test_recipe_of_a_transformer() -> None:
    _, recipe = planned("--network", VIT, "--pretrained")
    assert (recipe.optimizer, recipe.learning_rate, recipe.head_rate) == ("adamw", 5e-5, 10)
    assert (recipe.nesterov, recipe.decay_all, recipe.mean) == (False, False, (0.5,) * 3)
    name, changed = planned("--network", VIT, "--pretrained", "--epochs", "3", "--warmup", "0")
    assert changed == replace(recipe, epochs=3, warmup=0)
    assert name == "photos-timm_test_vit_pretrained-isda+epochs=3+warmup=0"


def test_which_networks_use_adamw() -> None:
    kinds = {"test_resnet": "sgd", "test_nfnet": "sgd", "test_convnext": "adamw",
             "test_vit3": "adamw"}  # fmt: skip
    for name, optimizer in kinds.items():
        assert planned("--network", f"timm:{name}", "--pretrained")[1].optimizer == optimizer
    for name, optimizer in (("resnet18", "sgd"), ("vit_b_16", "adamw")):
        _, recipe = planned("--network", f"torchvision:{name}", "--pretrained")
        assert recipe.optimizer == optimizer


def test_weights_and_freeze_imply_pretrained() -> None:
    _, recipe = planned("--network", RESNET, "--weights", "a.pth")
    assert (recipe.pretrained, recipe.weights, recipe.freeze) == (True, "a.pth", False)
    name, recipe = planned("--network", RESNET, "--freeze")
    assert name == "photos-timm_test_resnet_pretrained_frozen-isda"
    assert (recipe.pretrained, recipe.freeze, recipe.optimizer) == (True, True, "adamw")
    assert (recipe.head_rate, recipe.warmup, recipe.decay_all) == (1, 0, False)
    name, recipe = planned("--network", RESNET)
    assert name == "photos-timm_test_resnet-isda"
    assert (recipe.pretrained, recipe.interpolation, recipe.mean) == (False, "bilinear", ())
    with pytest.raises(InputError, match="weights must be empty without pretrained"):
        planned("--network", RESNET, "--weights", "a.pth", "--no-pretrained")


def test_a_comparison_has_the_same_training_on_both_sides() -> None:
    words = ["--data", "imagefolder:photos", "--network", VIT, "--pretrained", "--device", "cpu"]
    found = compare.plan(words)
    assert isinstance(found, PlannedRuns)
    baseline, isda = found.recipes.values()
    assert isda.baseline() == baseline
    assert list(found.recipes) == [f"photos-timm_test_vit_pretrained-{m}" for m in ("ce", "isda")]


def test_precision_of_own_images_on_a_gpu() -> None:
    on_gpu = train.plan(["--data", "imagefolder:photos", "--device", "cuda"]).recipes.values()
    assert [recipe.precision for recipe in on_gpu] == ["bf16"]
    assert planned()[1].precision == "fp32"
