"""Outputs of the networks against pytorchcv and torchvision with the same weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from pytorchcv.models.densenet_cifar import get_densenet_cifar
from pytorchcv.models.resnet_cifar import get_resnet_cifar
from pytorchcv.models.resnext_cifar import get_resnext_cifar
from pytorchcv.models.seresnet_cifar import get_seresnet_cifar
from pytorchcv.models.shakeshakeresnet_cifar import get_shakeshakeresnet_cifar
from pytorchcv.models.wrn_cifar import get_wrn_cifar
from torch import Tensor, nn
from torch.nn import functional as F

from isda.experiments.networks import create_network


def _scatter_statistics(network: nn.Module) -> None:
    """Give every batch norm different weights and statistics, so that the test detects a mix-up."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.running_var):
                tensor.uniform_(0.5, 1.5)
            for tensor in (module.bias.data, module.running_mean):
                tensor.normal_(0, 0.1)


def _copy_in_order(source: nn.Module, target: nn.Module) -> None:
    pairs = zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    for new, old in pairs:
        old.copy_(new.view_as(old))


def _resnet(depth: int) -> nn.Module:
    return get_resnet_cifar(num_classes=10, blocks=depth, bottleneck=False)


def _se_resnet110() -> nn.Module:
    network = get_seresnet_cifar(num_classes=10, blocks=110, bottleneck=False)
    for name, module in network.named_modules():
        if name.endswith(("se.conv1", "se.conv2")):  # ours have no bias, like the authors'
            module.bias = None
    return network


def _shake_shake() -> nn.Module:
    """pytorchcv's network with each ReLU moved from the end of a block to the start of branches."""
    network = get_shakeshakeresnet_cifar(10, blocks=26, bottleneck=False, first_stage_channels=32)

    def activate(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        return F.relu(inputs[0])

    network.features.init_block.activ = nn.Identity()
    network.features.final_pool.register_forward_pre_hook(activate)
    for module in network.modules():
        if hasattr(module, "branch1"):
            module.activ = nn.Identity()
            for branch in ("branch1", "branch2", "identity_branch"):
                if hasattr(module, branch):
                    getattr(module, branch).register_forward_pre_hook(activate)
    return network


ORACLES: dict[str, Callable[[], nn.Module]] = {
    "resnet8": lambda: _resnet(8),
    "resnet32": lambda: _resnet(32),
    "resnet110": lambda: _resnet(110),
    "se_resnet110": _se_resnet110,
    "wide_resnet16_8": lambda: get_wrn_cifar(num_classes=10, blocks=16, width_factor=8),
    "resnext29_8x64d": lambda: get_resnext_cifar(
        num_classes=10, blocks=29, cardinality=8, bottleneck_width=64
    ),
    "densenet_bc100_12": lambda: get_densenet_cifar(
        num_classes=10, blocks=100, growth_rate=12, bottleneck=True
    ),
    "shake_shake26_2x32d": _shake_shake,
}


@pytest.mark.parametrize("name", ORACLES)
def test_output_is_pytorchcv_s(name: str, device: torch.device) -> None:
    oracle = ORACLES[name]().to(device, torch.float64).eval()
    network = create_network(name, num_classes=10).to(device, torch.float64).eval()
    _scatter_statistics(oracle)
    _copy_in_order(oracle, network)
    images = torch.randn(1, 3, 32, 32, dtype=torch.float64).to(device)
    with torch.no_grad():
        torch.testing.assert_close(network(images), oracle(images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "head"), [("resnet50", "fc."), ("densenet121", "classifier.")])
def test_output_and_names_are_torchvision_s(name: str, head: str, device: torch.device) -> None:
    oracle = torchvision.models.get_model(name, num_classes=7).to(device).eval()
    network = create_network(name, num_classes=7).to(device).eval()
    _scatter_statistics(oracle)
    state = oracle.state_dict()
    network.load_state_dict({key.replace(head, "head."): state[key] for key in state})
    images = torch.randn(2, 3, 64, 64).to(device)
    with torch.no_grad():
        torch.testing.assert_close(network(images), oracle(images))


def test_torchvision_model_keeps_its_output(tmp_path: Path) -> None:
    """Also with the weights of a file, which has torchvision's names."""
    torch.manual_seed(0)
    expected = torchvision.models.mobilenet_v3_small(num_classes=7).eval()
    _scatter_statistics(expected)
    path = tmp_path / "weights.pth"
    torch.save(expected.state_dict(), path)
    network = create_network("torchvision:mobilenet_v3_small", num_classes=7, weights=path).eval()
    images = torch.randn(3, 3, 64, 64)
    logits = network(images)
    torch.testing.assert_close(logits, expected(images))
    network.check(images, logits)
    torch.testing.assert_close(network(images), logits)  # the check leaves it as it was
    assert network.num_features == 1024
    assert network.weights is not None
    assert network.weights.new == ()
    other = create_network("torchvision:mobilenet_v3_small", num_classes=5, weights=path)
    assert other.weights is not None
    assert other.weights.new == ("classifier.3.weight", "classifier.3.bias")
