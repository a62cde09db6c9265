"""Theoretical costs against the paper, torchvision and a manual count."""

import pytest
import torch
from costs import usual
from torch import nn
from torchvision import models

from isda.experiments.errors import InputError
from isda.experiments.published import COST
from isda.experiments.theoretical_cost import multiply_adds, theoretical_cost

WEIGHTS = {  # with torchvision's counts of parameters and multiply-adds
    "resnet50": models.ResNet50_Weights.IMAGENET1K_V1,
    "resnet101": models.ResNet101_Weights.IMAGENET1K_V1,
    "resnet152": models.ResNet152_Weights.IMAGENET1K_V1,
    "densenet121": models.DenseNet121_Weights.IMAGENET1K_V1,
    "resnext50_32x4d": models.ResNeXt50_32X4D_Weights.IMAGENET1K_V1,
    "resnext101_32x8d": models.ResNeXt101_32X8D_Weights.IMAGENET1K_V1,
}
NOT_THE_FORMULA = {"densenet121": 0.18, "densenet265": 0.23}  # the paper prints 0.20 and 0.24


@pytest.mark.parametrize("network", COST)
def test_theoretical_cost_is_the_papers(network: str) -> None:
    result = usual(network)
    expected = NOT_THE_FORMULA.get(network, COST[network].theoretical)
    assert round(result.theoretical_percent, 2) == expected
    assert result.paper == COST[network]


@pytest.mark.parametrize("network", WEIGHTS)
def test_size_is_torchvisions(network: str) -> None:
    result = usual(network)
    assert result.parameters == WEIGHTS[network].meta["num_params"]
    known = WEIGHTS[network].meta["_ops"]  # rounded to 0.001 G
    assert result.multiply_adds / 1e9 == pytest.approx(known, abs=1e-3)


def test_multiply_adds_by_hand() -> None:
    class Pooled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((2, 3))

    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False),
        Pooled(),
        nn.Linear(6, 5),
    )
    first = 4 * (3 * 9) * 8 * 10  # output channels × taps × output pixels
    second = 6 * (4 // 2 * 9) * 4 * 5
    head = 6 * 5
    assert multiply_adds(network, (3, 8, 10)) == first + second + head


@pytest.mark.parametrize(
    ("network", "num_classes", "image_size", "num_features"),
    [
        ("wide_resnet28_10", 100, 32, 640),
        ("shake_shake26_2x32d", 100, 32, 128),
        ("resnet8", 10, 8, 64),
        ("timm:resnet18", 1000, 224, 512),
        ("timm:swinv2_tiny_window8_256", 1000, 256, 768),  # accepts no other size
        ("timm:pit_ti_224", 1000, 224, 256),  # blocks with parameters as inputs
        ("timm:resnetv2_18", 1000, 224, 512),  # head is a convolution
    ],
)
def test_sizes_by_default(
    network: str, num_classes: int, image_size: int, num_features: int
) -> None:
    result = usual(network)
    assert (result.num_classes, result.image_size) == (num_classes, image_size)
    assert result.num_features == num_features
    assert result.paper is None
    share = 5 * num_classes * num_features / result.multiply_adds
    assert result.theoretical_percent == pytest.approx(100 * share)


def test_sizes_given() -> None:
    full, other = usual("resnet50"), theoretical_cost("resnet50", num_classes=13)
    assert full.parameters - other.parameters == (1000 - 13) * (2048 + 1)
    assert full.multiply_adds - other.multiply_adds == (1000 - 13) * 2048
    assert other.paper is None
    small = theoretical_cost("resnet50", image_size=112)
    body, head = full.multiply_adds - 1000 * 2048, 1000 * 2048
    # a quarter of the pixels in every stage but the last, where 7 becomes 4, not 3.5
    assert body / 4 < small.multiply_adds - head < 1.1 * body / 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"network": "resnet5"}, r"unknown network 'resnet5'; did you mean .*resnet50"),
        ({"network": "timm:nonsense"}, "unknown timm model 'nonsense'"),
        ({"network": "resnet32", "num_classes": 1}, "num_classes must be >= 2, got 1"),
        ({"network": "resnet32", "image_size": 0}, "image_size must be >= 1, got 0"),
        ({"network": "densenet121", "image_size": 8}, "densenet121 does not accept 8 x 8 images"),
        (
            {"network": "timm:botnet26t_256", "image_size": 224},
            "timm:botnet26t_256 does not accept 224 x 224 images: the model was designed for size",
        ),
    ],
)
def test_errors_of_sizes(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        theoretical_cost(**arguments)
