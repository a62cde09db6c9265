"""The paper's networks: their sizes, initial weights, gradients, and options they refuse."""

import math
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isda.experiments.errors import InputError
from isda.experiments.networks import NETWORKS, Network, create_network

PRINTED = 0.05  # the paper prints millions with one decimal
CIFAR = {  # millions of parameters with 10 classes, tolerance
    "resnet32": (0.5, PRINTED),
    "resnet110": (1.7, PRINTED),
    "se_resnet110": (1.7, PRINTED),
    "wide_resnet16_8": (11.0, PRINTED),
    "wide_resnet28_10": (36.5, PRINTED),
    "resnext29_8x64d": (34.4, PRINTED),
    "densenet_bc100_12": (0.8, PRINTED),
    "densenet_bc190_40": (25.6, PRINTED),
    "shake_shake26_2x32d": (2.92, 0.005),  # not in the paper; pytorchcv's
    "shake_shake26_2x112d": (35.64, 0.005),
}
IMAGENET = {  # with 1000 classes
    "resnet50": (25.6, PRINTED),
    "resnet101": (44.6, PRINTED + 0.01),  # 44.549: the paper rounds up
    "resnet152": (60.3, 0.12),  # 60.193: the paper's is not torchvision's 60.2
    "densenet121": (8.0, PRINTED),
    "densenet265": (33.3, PRINTED),
    "resnext50_32x4d": (25.0, PRINTED),
    "resnext101_32x8d": (88.8, PRINTED),
}


# sizes and names


def test_every_network_of_the_paper_has_its_name() -> None:
    assert set(NETWORKS) == {*CIFAR, *IMAGENET, "resnet8"}
    for name, module in NETWORKS.items():
        assert hasattr(import_module(f"isda.experiments.networks.{module}"), name)


@pytest.mark.parametrize("name", [*CIFAR, *IMAGENET])
def test_parameter_count_is_the_paper_s(name: str) -> None:
    millions, tolerance = (CIFAR | IMAGENET)[name]
    with torch.device("meta"):
        network = create_network(name, num_classes=10 if name in CIFAR else 1000)
        features = network.forward_features(torch.zeros(2, 3, 64, 64))
    assert abs(sum(p.numel() for p in network.parameters()) / 1e6 - millions) <= tolerance
    assert features.shape == (2, network.num_features)


# initial weights


@pytest.mark.parametrize("name", ["resnet8", "se_resnet110", "densenet121", "timm:resnet10t"])
def test_weights_are_a_function_of_the_generator(name: str) -> None:
    def state(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        network = create_network(name, num_classes=10, generator=generator)
        return list(network.state_dict().values())

    torch.manual_seed(1)
    first = state(5)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second, other = state(5), state(6)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[-1], other[-1])


def test_without_generator_torch_s_own_decides() -> None:
    weights = []
    for _ in range(2):
        torch.manual_seed(3)
        weights += [create_network("resnet8", num_classes=10).head.weight for _ in range(2)]
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])


@pytest.mark.parametrize(
    "name", ["resnet32", "wide_resnet16_8", "densenet_bc100_12", "densenet121", "resnet50"]
)
def test_convolutions_start_from_fan_out(name: str) -> None:
    _check_start(create_network(name, num_classes=100), fan_dimension=0)


def test_shake_shake_starts_from_fan_in() -> None:
    _check_start(create_network("shake_shake26_2x32d", num_classes=100), fan_dimension=1)


def _check_start(network: Network, fan_dimension: int) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight.detach()
            std = math.sqrt(2 / (weight.shape[fan_dimension] * weight.shape[2] * weight.shape[3]))
            error = 6 / math.sqrt(weight.numel())  # 6 σ of the mean, more of the deviation
            assert abs(weight.mean().item()) < error * std
            assert abs(weight.std().item() / std - 1) < error
            assert module.bias is None
        elif isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
    head = network.get_classifier()
    bound = 1 / math.sqrt(network.num_features)
    for tensor in (head.weight, head.bias):
        assert tensor.abs().max() <= bound
        # uniform: variance bound² / 3, whose relative error is below 1 / √n
        assert abs(tensor.square().mean().item() * 3 / bound**2 - 1) < 6 / math.sqrt(tensor.numel())


# forward and backward


@pytest.mark.parametrize("name", [*CIFAR, "resnet8", "resnet50", "densenet121"])
def test_every_parameter_learns(name: str, device: torch.device) -> None:
    network = create_network(name, num_classes=5).to(device)
    size = (33, 40) if name in IMAGENET else (8, 9)
    images = torch.randn(2, 3, *size).to(device)
    F.cross_entropy(network(images), torch.tensor([1, 3]).to(device)).backward()
    for parameter, value in network.named_parameters():
        assert value.grad is not None, parameter
        assert value.grad.isfinite().all(), parameter
    network.eval()
    with torch.no_grad():
        features = network.forward_features(images)
        logits = F.linear(features, network.head.weight, network.head.bias)
        torch.testing.assert_close(network(images), logits)
    assert network.get_classifier() is network.head
    assert network.num_classes == 5
    assert (features.shape, logits.shape) == ((2, network.num_features), (2, 5))


def test_grey_digits_fit_the_smallest_network(device: torch.device) -> None:
    network = create_network("resnet8", num_classes=10, in_channels=1).to(device)
    assert network(torch.randn(3, 1, 8, 8).to(device)).shape == (3, 10)


# input errors


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown network 'resnet33'; did you mean resnet32"):
        create_network("resnet33", num_classes=10)
    with pytest.raises(InputError, match="unknown timm model 'resnet10x'; did you mean resnet10"):
        create_network("timm:resnet10x", num_classes=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 0}, "num_classes must be >= 1, got 0"),
        ({"num_classes": 10, "in_channels": 0}, "in_channels must be >= 1, got 0"),
        ({"num_classes": 10, "drop_rate": 1.0}, r"drop_rate must be in \[0, 1\), got 1.0"),
        ({"num_classes": 10, "drop_rate": -0.1}, r"drop_rate must be in \[0, 1\), got -0.1"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        create_network("resnet8", **options)


def test_imagenet_networks_take_three_channels() -> None:
    with pytest.raises(InputError, match="in_channels of resnet50 must be 3, got 1"):
        create_network("resnet50", num_classes=10, in_channels=1)
