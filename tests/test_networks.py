"""The networks: sizes against the paper, outputs against other packages, random layers."""

import math
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import timm
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

from isda.experiments.data import counter_rng
from isda.experiments.errors import InputError, as_input_error
from isda.experiments.networks import (
    NETWORKS,
    Network,
    bind_key,
    create_network,
    own_image_size,
    require_network,
)
from isda.experiments.networks.densenet import DenseLayer
from isda.experiments.networks.network import ConvNetwork, conv, stages
from isda.experiments.networks.resnet import BasicBlock
from isda.experiments.networks.shake_shake import ShakeBlock
from isda.experiments.networks.stochastic import Dropout, DropPath, ShakeShake
from isda.experiments.networks.wide_resnet import PreactivationBlock

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


# outputs against other packages


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


def test_timm_model_keeps_its_output(device: torch.device) -> None:
    network = create_network("timm:resnet10t", num_classes=7, in_channels=1, drop_rate=0.5)
    network.to(device)
    images = torch.randn(2, 1, 32, 32).to(device)
    network.eval()
    assert network.num_features == 512
    assert network.forward_features(images).shape == (2, 512)
    torch.testing.assert_close(network(images), network.model(images))
    network.train()
    assert bind_key(network, counter_rng.key(1, device=device)) == 1
    dropped = (network.forward_features(images) == 0).float().mean()
    assert dropped >= 0.4  # 5 σ below 0.5 for 1024 elements


def test_random_layers_of_timm_draw_from_the_key() -> None:
    """As in our networks, random numbers depend on the key of the step, on any rank."""
    network = create_network("timm:swin_tiny_patch4_window7_224", num_classes=3).train()
    key = torch.tensor(5)
    assert bind_key(network, key) > 10
    images = torch.randn(4, 3, 224, 224)
    with torch.no_grad():
        one, again = network(images), network(images)
        bind_key(network, key, offset=2)  # a rank with the last two images
        part = network(images[2:])
        key += 1
        other = network(images[2:])
    assert torch.equal(one, again)
    torch.testing.assert_close(part, one[2:])
    assert not torch.allclose(other, part, atol=1e-2)


def test_timm_model_that_adds_to_its_head() -> None:
    """An auxiliary head, or a layer between features and head, contributes to the output."""
    for name, adds in (
        ("timm:volo_d1_224", True),
        ("timm:efficientvit_m0", True),  # batch norm, which is still the identity
        ("timm:test_resnet", False),
        ("timm:deit_tiny_patch16_224", False),  # has parameters outside its layers
    ):
        network = create_network(name, num_classes=3).eval()
        images = torch.randn(1, 3, 224, 224)
        with torch.no_grad():
            logits = network(images)
            if not adds:
                network.check(images, logits)
                continue
            with pytest.raises(InputError, match=f"{name} must end in a linear layer: ISDA needs"):
                network.check(images, logits)


def test_timm_models_that_cannot_be_built() -> None:
    with pytest.raises(InputError, match=r"timm:gemma4_vit_167m_enc cannot be built: .*drop_rate"):
        create_network("timm:gemma4_vit_167m_enc", num_classes=3)


@pytest.mark.parametrize("name", ["resnetv2_18", "dla46_c", "dpn48b"])
def test_timm_head_that_is_a_convolution(name: str, device: torch.device) -> None:
    """The head becomes linear; weights, output and gradients are the same."""
    torch.manual_seed(0)
    network = create_network(f"timm:{name}", num_classes=7).to(device).eval()
    head = network.get_classifier()
    assert isinstance(head, nn.Linear)
    assert (network.num_features, network.num_classes) == (head.in_features, 7)
    oracle = timm.create_model(name, num_classes=7).to(device).eval()
    state = network.model.state_dict()
    shapes = {key: tensor.shape for key, tensor in oracle.state_dict().items()}
    oracle.load_state_dict({key: state[key].view(shape) for key, shape in shapes.items()})
    images = torch.randn(2, 3, 64, 64).to(device)
    logits, expected = network(images), oracle(images)
    assert network.forward_features(images).shape == (2, network.num_features)
    torch.testing.assert_close(logits, expected)
    network.check(images, logits)
    logits.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(head.weight.grad, oracle.get_classifier().weight.grad.flatten(1))


def test_weights_of_a_convolution_head_are_timm_s() -> None:
    seed = int(torch.randint(2**63 - 1, (), generator=torch.Generator().manual_seed(3)))
    torch.manual_seed(seed)
    weight = timm.create_model("dla46_c", num_classes=7).get_classifier().weight
    network = create_network(
        "timm:dla46_c", num_classes=7, generator=torch.Generator().manual_seed(3)
    )
    assert torch.equal(network.get_classifier().weight, weight.flatten(1))


def test_own_image_size() -> None:
    names = ("timm:swinv2_tiny_window8_256", "timm:resnet18", "timm:nonsense", "resnet50")
    assert [own_image_size(name) for name in names] == [256, 224, None, None]


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


# dropout

RATE = 0.3


@pytest.mark.parametrize("bound", [False, True])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(bound: bool, device: torch.device) -> None:
    layer = Dropout(RATE)
    if bound:
        bind_key(layer, counter_rng.key(7, device=device))
    x = torch.full((40, 25, 8, 5), 2.0, device=device, requires_grad=True)
    output = layer(x)
    output.sum().backward()
    dropped = output == 0
    sigma = math.sqrt(RATE * (1 - RATE) / x.numel())
    assert abs(dropped.double().mean().item() - RATE) < 5 * sigma
    torch.testing.assert_close(output[~dropped], torch.full_like(output[~dropped], 2 / (1 - RATE)))
    torch.testing.assert_close(x.grad, output.detach() / 2)
    for axis in range(4):  # the rate is the same for all images, channels, rows and columns
        others = [other for other in range(4) if other != axis]
        rates = dropped.double().mean(others)
        assert (rates - RATE).abs().max() < 5 * sigma * math.sqrt(x.shape[axis])
    assert layer.eval()(x) is x


def test_dropout_depends_on_key_and_layer(device: torch.device) -> None:
    layers = nn.ModuleList([Dropout(RATE), Dropout(RATE)])
    key = counter_rng.key(1, device=device)
    assert bind_key(layers, key) == 2
    x = torch.ones(64, 16, device=device)
    first, second = layers[0](x), layers[1](x)
    assert torch.equal(layers[0](x), first)
    assert not torch.equal(first, second)
    key.copy_(counter_rng.key(2, device=device))  # the next step
    later = layers[0](x)
    both = ((first == 0) & (later == 0)).double().mean().item()
    assert abs(both - RATE**2) < 5 * math.sqrt(RATE**2 / x.numel())
    key.copy_(counter_rng.key(1, device=device))
    assert torch.equal(layers[0](x), first)
    bind_key(layers, None)
    torch.manual_seed(0)
    free = layers[0](x)
    torch.manual_seed(0)
    assert torch.equal(layers[0](x), free)
    assert not torch.equal(layers[0](x), free)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("resnet32", 15),
        ("resnet110", 54),
        ("se_resnet110", 54),
        ("wide_resnet28_10", 12),
        ("densenet_bc100_12", 98),  # 48 dense layers of two convolutions, two transitions
        ("densenet121", 58),
    ],
)
def test_dropout_layers_are_counted_and_absent_at_rate_zero(name: str, layers: int) -> None:
    with torch.device("meta"):
        plain = create_network(name, num_classes=10)
        dropping = create_network(name, num_classes=10, drop_rate=RATE)
        key = counter_rng.key(0)
    assert bind_key(plain, key) == 0
    assert bind_key(dropping, key) == layers
    assert plain.state_dict().keys() == dropping.state_dict().keys()
    bound = [module for module in dropping.modules() if isinstance(module, Dropout)]
    assert all(module.drop_rate == RATE and module.key is key for module in bound)
    assert len({module.stream for module in bound}) == layers


@pytest.mark.parametrize("block", [BasicBlock, PreactivationBlock])
def test_dropout_stands_between_the_convolutions(
    block: Callable[..., nn.Module], device: torch.device
) -> None:
    module = block(4, 6, 2, drop_rate=0.999).to(device)
    bind_key(module, counter_rng.key(0, device=device))
    seen = {}
    module.dropout.register_forward_hook(lambda m, inputs, output: seen.update(a=inputs, b=output))
    module.conv2.register_forward_pre_hook(lambda m, inputs: seen.update(c=inputs[0]))
    module(torch.randn(2, 4, 8, 8).to(device))
    assert (seen["a"][0] >= 0).all()  # behind the ReLU
    assert seen["b"] is seen["c"]


def test_dropout_follows_both_convolutions_of_a_dense_layer(device: torch.device) -> None:
    layer = DenseLayer(5, 3, drop_rate=RATE).to(device)
    seen = {}
    for name in ("conv1", "dropout1", "conv2", "dropout2"):
        layer.get_submodule(name).register_forward_hook(
            lambda m, inputs, output, name=name: seen.update({name: (inputs[0], output)})
        )
    x = torch.randn(2, 5, 8, 8).to(device)
    output = layer(x)
    assert seen["dropout1"][0] is seen["conv1"][1]
    assert seen["dropout2"][0] is seen["conv2"][1]
    assert torch.equal(output, torch.cat((x, seen["dropout2"][1]), 1))


def test_imagenet_densenet_drops_by_key(device: torch.device) -> None:
    network = create_network("densenet121", num_classes=3, drop_rate=RATE).to(device)
    key = counter_rng.key(0, device=device)
    bind_key(network, key)
    images = torch.randn(2, 3, 32, 32).to(device)
    with torch.no_grad():
        first, again = network(images), network(images)
        key.add_(1)
        other = network(images)
        torch.testing.assert_close(again, first)
        assert not torch.allclose(other, first)


# Shake-Shake


@pytest.mark.parametrize("bound", [False, True])
def test_shake_mixes_forward_and_backward_by_separate_weights(
    bound: bool, device: torch.device
) -> None:
    images = 500
    layer = ShakeShake()
    if bound:
        bind_key(layer, counter_rng.key(3, device=device))
    shape = (images, 3, 2, 4)
    x1, x2 = (torch.randn(shape, device=device, dtype=torch.float64) for _ in range(2))
    x1.requires_grad_()
    x2.requires_grad_()
    gradient = torch.randn_like(x1)
    output = layer(x1, x2)
    output.backward(gradient)

    # one weight per image, found by least squares from its own elements
    difference = (x1 - x2).detach()
    rest = (output - x2).detach()
    alpha = (rest * difference).sum((1, 2, 3)) / difference.square().sum((1, 2, 3))
    beta = (x1.grad * gradient).sum((1, 2, 3)) / gradient.square().sum((1, 2, 3))
    for image in range(images):
        a, b = alpha[image], beta[image]
        torch.testing.assert_close(output[image], a * x1[image] + (1 - a) * x2[image])
        torch.testing.assert_close(x1.grad[image], b * gradient[image])
        torch.testing.assert_close(x2.grad[image], (1 - b) * gradient[image])
    for weights in (alpha, beta):
        assert 0 <= weights.min() < 0.05
        assert 0.95 < weights.max() < 1
        assert abs(weights.mean().item() - 0.5) < 5 * math.sqrt(1 / 12 / images)
    correlation = torch.corrcoef(torch.stack((alpha, beta)))[0, 1]
    assert abs(correlation) < 5 / math.sqrt(images)

    layer.eval()
    torch.testing.assert_close(layer(x1, x2), (x1 + x2) / 2)


# a rank's slice, compilation, precision


def _small_shake() -> ConvNetwork:
    body = nn.Sequential(conv(3, 8), stages(ShakeBlock, 8, (8, 16), 1))
    return ConvNetwork(body, 16, 5)


def _small_dropout() -> Network:
    return create_network("resnet8", num_classes=5, drop_rate=RATE)


@pytest.mark.parametrize("build", [_small_dropout, _small_shake])
def test_a_rank_draws_its_slice_of_the_global_batch(
    build: Callable[[], Network], device: torch.device
) -> None:
    network = build().to(device)
    for (
        module
    ) in network.modules():  # the batch norm statistics of a slice differ from those of the batch
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    key = counter_rng.key(4, device=device)
    images = torch.randn(7, 3, 8, 8).to(device)
    bind_key(network, key)
    with torch.no_grad():
        whole = network(images)
        for start, end in ((0, 3), (3, 4), (4, 7)):
            bind_key(network, key, offset=start)
            torch.testing.assert_close(network(images[start:end]), whole[start:end])
        bind_key(network, key)
        assert not torch.allclose(network(images[3:]), whole[3:])


@pytest.mark.parametrize("build", [_small_dropout, _small_shake])
def test_compiles_whole_and_follows_the_key(
    build: Callable[[], Network], device: torch.device
) -> None:
    network = build().to(device)
    key = counter_rng.key(0, device=device)
    bind_key(network, key)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    images = torch.randn(4, 3, 8, 8).to(device)
    outputs = []
    for step in range(2):
        key.copy_(counter_rng.key(step, device=device))
        results = []
        for function in (network, compiled):
            network.zero_grad()
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                output = function(images)
            output.square().sum().backward()
            results.append((output, network.body[0].weight.grad))
        torch.testing.assert_close(results[1], results[0])
        outputs.append(output)
    assert not torch.allclose(outputs[0], outputs[1])


@pytest.mark.parametrize("build", [_small_dropout, _small_shake])
def test_half_precision_channels_last(build: Callable[[], Network], device: torch.device) -> None:
    network = build().to(device, memory_format=torch.channels_last)
    bind_key(network, counter_rng.key(0, device=device))
    images = torch.randn(4, 3, 16, 16).to(device, memory_format=torch.channels_last)
    layouts = []
    for module in network.modules():
        if isinstance(module, (Dropout, ShakeShake)):
            module.register_forward_hook(lambda m, i, output: layouts.append((i[0], output)))
    full = network(images)
    layouts.clear()
    with torch.autocast(device.type, torch.bfloat16):
        half = network(images)
    half.float().square().sum().backward()
    assert layouts
    for before, after in layouts:
        assert before.dtype == after.dtype == torch.bfloat16
        assert after.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(half.float(), full, rtol=0.1, atol=0.1)  # bfloat16 has 8 bits
    assert all(value.grad.dtype == torch.float32 for value in network.parameters())


# input errors


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown network 'resnet33'; did you mean resnet32"):
        create_network("resnet33", num_classes=10)
    with pytest.raises(InputError, match="unknown timm model 'resnet10x'; did you mean resnet10"):
        create_network("timm:resnet10x", num_classes=10)


def test_timm_model_without_a_linear_head_is_refused() -> None:
    name = "timm:deit_tiny_distilled_patch16_224"
    with pytest.raises(InputError, match=f"{name} must end in an nn.Linear .* ends in a tuple"):
        create_network(name, num_classes=10)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("botnet26t_256", "designed for size 256"), ("vit_tiny_patch16_224", "doesn't match model")],
)
def test_timm_model_tells_which_size_it_takes(name: str, reason: str) -> None:
    with torch.device("meta"):
        network = create_network(f"timm:{name}", num_classes=10)
        with pytest.raises(ValueError, match=reason):
            network(torch.zeros(2, 3, 192, 192))


@pytest.mark.parametrize("name", ["resnext29_8x64d", "shake_shake26_2x32d", "resnet50"])
def test_dropout_without_a_place_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"drop_rate of {name} must be 0, got 0.3"):
        create_network(name, num_classes=10, drop_rate=RATE)


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


# torchvision:NAME and MODULE:FUNCTION


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


def test_names_in_torchvision_s_files_of_densenets(tmp_path: Path) -> None:
    tensors = torchvision.models.densenet121().state_dict()
    old = {re.sub(r"(denselayer\d+\.(?:norm|conv))(\d)", r"\1.\2", name): value
           for name, value in tensors.items()}  # fmt: skip
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    torch.save(old, tmp_path / "weights.pth")
    network = create_network(
        "torchvision:densenet121", num_classes=3, weights=tmp_path / "weights.pth"
    )
    assert network.weights is not None
    assert network.weights.new == ("classifier.weight", "classifier.bias")


def test_random_layers_of_torchvision_draw_from_the_key() -> None:
    network = create_network("torchvision:convnext_tiny", num_classes=3)
    depths = [part.drop_rate for part in network.modules() if isinstance(part, DropPath)]
    assert len(depths) == 17  # of 18 blocks, the first of which has rate 0
    assert max(depths) == pytest.approx(0.1)
    network = create_network("torchvision:mobilenet_v3_small", num_classes=3)
    assert [p.drop_rate for p in network.modules() if isinstance(p, Dropout)] == [0.2]


MODELS = """
from torch import nn

def small(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, num_classes))

def grey(num_classes, in_channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(16 * in_channels, 8), nn.Linear(8, num_classes))

def changed(num_classes):
    return nn.Sequential(small(num_classes), nn.Softmax(1))

def fixed(num_classes):
    return small(10)

def nothing(num_classes):
    return None

def broken(num_classes):
    raise KeyError("no such file")

def maps(num_classes):
    return nn.Sequential(nn.Conv2d(3, num_classes, 1), nn.Flatten())

def alone(num_classes):
    return nn.Linear(48, num_classes)

def lazy(num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

class Projected(nn.Module):  # a layer for another loss comes after the head
    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(48, num_classes)
        self.projection = nn.Linear(48, 4)

    def forward(self, images):
        return self.head(images.flatten(1))

def projected(num_classes):
    return Projected(num_classes)

def transformer(num_classes):
    import timm

    return timm.create_model(
        "test_vit", num_classes=num_classes, img_size=32, drop_path_rate=0.5, attn_drop_rate=0.5
    )
"""


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module in the current folder."""
    name = f"models_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    return name


def test_a_model_of_ones_own(own_models: str, tmp_path: Path) -> None:
    images = torch.randn(5, 3, 4, 4)
    network = create_network(f"{own_models}:small", num_classes=7)
    assert network(images).shape == (5, 7)
    network.check(images, network(images))
    assert (network.num_features, network.num_classes) == (8, 7)
    grey = create_network(f"{own_models}:grey", num_classes=3, in_channels=1)
    assert grey(images[:, :1]).shape == (5, 3)
    dropped = create_network(f"{own_models}:small", num_classes=7, drop_rate=0.5)
    assert (dropped.forward_features(images) == 0).float().mean() > 0.3
    path = tmp_path / "weights.pth"
    module = import_module(own_models)
    model = module.small(7)
    torch.save(model.state_dict(), path)
    loaded = create_network(f"{own_models}:small", num_classes=7, weights=path)
    torch.testing.assert_close(loaded(images), model(images))
    torch.save(network.state_dict(), path)  # as in our checkpoints
    again = create_network(f"{own_models}:small", num_classes=7, weights=path)
    assert again.weights is not None
    assert (again.weights.tensors, again.weights.new) == (4, ())
    assert torch.equal(again(images), network(images))
    fewer = create_network(f"{own_models}:small", num_classes=5, weights=path)
    assert fewer.weights is not None
    assert fewer.weights.new == ("3.weight", "3.bias")
    with pytest.raises(
        InputError, match=r"does not fit .*:projected: 2 of 4 tensors are missing: p"
    ):
        create_network(f"{own_models}:projected", num_classes=7, weights=path)


def test_a_head_that_is_not_the_last_layer(own_models: str) -> None:
    network = create_network(f"{own_models}:projected", num_classes=7)
    images = torch.randn(5, 3, 4, 4)
    network.check(images, network(images))
    assert network.get_classifier().out_features == 7


def test_random_layers_of_ones_own(own_models: str) -> None:
    """timm's attention reads the rate of the dropout layer and drops by itself."""
    network = create_network(f"{own_models}:transformer", num_classes=3).train()
    depths = [part.drop_rate for part in network.modules() if isinstance(part, DropPath)]
    assert max(depths) == pytest.approx(0.5)
    rates = [part.attn_drop.p for part in network.modules() if hasattr(part, "attn_drop")]
    assert rates == [0.5] * len(rates) != []
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 3)


def test_models_of_ones_own_that_cannot_be_used(own_models: str) -> None:
    images = torch.randn(5, 3, 4, 4)
    for function, message in (
        ("fixed", "must end in an nn.Linear with 7 outputs, .* but ends in one with 10"),
        ("nothing", "must return an nn.Module, got NoneType"),
        ("broken", r"\(num_classes=7\) failed: KeyError: 'no such file'"),
        ("smal", "unknown function of .* 'smal'; did you mean small?"),
        ("maps", "must end in an nn.Linear, but ends in a Conv2d$"),
        ("alone", "must return a model that ends in an nn.Linear, got only that layer"),
        ("lazy", "must not have lazy layers: give their numbers of inputs"),
    ):
        with pytest.raises(InputError, match=message):
            create_network(f"{own_models}:{function}", num_classes=7)
    changed = create_network(f"{own_models}:changed", num_classes=7)
    with pytest.raises(InputError, match=r"must end in a linear layer: .* changes the logits"):
        changed.check(images, changed(images))
    with pytest.raises(InputError, match="must take in_channels for images with 1 channels"):
        create_network(f"{own_models}:small", num_classes=7, in_channels=1)
    with pytest.raises(InputError, match="network nowhere:model: cannot import nowhere"):
        create_network("nowhere:model", num_classes=7)
    with pytest.raises(InputError, match="network must be MODULE:FUNCTION, got 'module:'"):
        create_network("module:", num_classes=7)


def test_networks_are_refused_before_they_are_built(own_models: str) -> None:
    """A function of one's own is not called: it may depend on the number of classes."""
    for name in ("resnet32", "timm:test_vit", "torchvision:resnet18", f"{own_models}:broken"):
        require_network(name)
    for name in ("resnet33", "timm:test_vi", "torchvision:resnet19", f"{own_models}:smal"):
        with pytest.raises(InputError, match=f"unknown .*'{name.rpartition(':')[2]}'"):
            require_network(name)
    with pytest.raises(InputError, match=r"drop_rate of resnext29_8x64d must be 0, got 0\.3"):
        require_network("resnext29_8x64d", drop_rate=0.3)


def test_input_errors_stay_as_they_are() -> None:
    """A network that says what is wrong is not said to refuse the size of the images."""
    for error, message in (
        (InputError("it must return logits"), "it must return logits"),
        (ValueError("too small\nindeed"), "not accepted: too small"),
    ):
        with (
            pytest.raises(InputError, match=f"^{message}$"),
            as_input_error("not accepted"),
        ):
            raise error


@pytest.mark.filterwarnings("ignore:The default weight initialization of inception_v3")
def test_torchvision_models_that_cannot_be_used() -> None:
    with pytest.raises(InputError, match="unknown torchvision model 'resnet19'; did you mean"):
        create_network("torchvision:resnet19", num_classes=7)
    with pytest.raises(InputError, match=r"torchvision:inception_v3 cannot be used: .*AuxLogits"):
        create_network("torchvision:inception_v3", num_classes=7)
    with pytest.raises(InputError, match=r"squeezenet1_0 must end in an nn\.Linear"):
        create_network("torchvision:squeezenet1_0", num_classes=7)
    with pytest.raises(InputError, match="in_channels of torchvision:resnet18 must be 3, got 1"):
        create_network("torchvision:resnet18", num_classes=7, in_channels=1)
