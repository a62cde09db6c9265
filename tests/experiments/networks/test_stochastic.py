"""Random layers: dropout and Shake-Shake, on a rank's slice, compiled and in half precision."""

import math
from collections.abc import Callable

import pytest
import torch
from random_keys import bind, keys_of
from torch import nn

from isda.experiments.errors import InputError
from isda.experiments.networks import Network, bind_keys, count_random_layers, create_network
from isda.experiments.networks.densenet import DenseLayer
from isda.experiments.networks.network import ConvNetwork, conv, stages
from isda.experiments.networks.resnet import BasicBlock
from isda.experiments.networks.shake_shake import ShakeBlock
from isda.experiments.networks.stochastic import Dropout, ShakeShake, replace_random_layers
from isda.experiments.networks.wide_resnet import PreactivationBlock

RATE = 0.3


# dropout


@pytest.mark.parametrize("bound", [False, True])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(bound: bool, device: torch.device) -> None:
    layer = Dropout(RATE)
    if bound:
        bind(layer, 7, device)
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
    keys = bind(layers, 1, device)
    assert len(keys) == 2
    x = torch.ones(64, 16, device=device)
    first, second = layers[0](x), layers[1](x)
    assert torch.equal(layers[0](x), first)
    assert not torch.equal(first, second)
    keys.copy_(keys_of(layers, 2, device))  # the next step
    later = layers[0](x)
    both = ((first == 0) & (later == 0)).double().mean().item()
    assert abs(both - RATE**2) < 5 * math.sqrt(RATE**2 / x.numel())
    keys.copy_(keys_of(layers, 1, device))
    assert torch.equal(layers[0](x), first)
    unbound = Dropout(RATE)
    torch.manual_seed(0)
    free = unbound(x)
    torch.manual_seed(0)
    assert torch.equal(unbound(x), free)
    assert not torch.equal(unbound(x), free)


def test_a_dropout_layer_that_stands_at_two_places_is_replaced_at_both() -> None:
    layer = nn.Dropout(RATE)
    model = nn.Sequential(layer, nn.Linear(3, 3), nn.Sequential(layer))
    replace_random_layers(model)
    assert not any(isinstance(part, nn.Dropout) for part in model.modules())
    assert count_random_layers(model) == 2


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
        keys = bind(dropping, 0)
    assert count_random_layers(plain) == 0
    assert len(keys) == layers
    assert plain.state_dict().keys() == dropping.state_dict().keys()
    bound = [module for module in dropping.modules() if isinstance(module, Dropout)]
    assert all(module.drop_rate == RATE and module.keys is keys for module in bound)
    assert len({module.place for module in bound}) == layers


@pytest.mark.parametrize("block", [BasicBlock, PreactivationBlock])
def test_dropout_stands_between_the_convolutions(
    block: Callable[..., nn.Module], device: torch.device
) -> None:
    module = block(4, 6, 2, drop_rate=0.999).to(device)
    bind(module, 0, device)
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
    keys = bind(network, 0, device)
    images = torch.randn(2, 3, 32, 32).to(device)
    with torch.no_grad():
        first, again = network(images), network(images)
        keys.add_(1)
        other = network(images)
        torch.testing.assert_close(again, first)
        assert not torch.allclose(other, first)


@pytest.mark.parametrize("name", ["resnext29_8x64d", "shake_shake26_2x32d", "resnet50"])
def test_dropout_without_a_place_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"drop_rate of {name} must be 0, got 0.3"):
        create_network(name, num_classes=10, drop_rate=RATE)


# Shake-Shake


@pytest.mark.parametrize("bound", [False, True])
def test_shake_mixes_forward_and_backward_by_separate_weights(
    bound: bool, device: torch.device
) -> None:
    images = 500
    layer = ShakeShake()
    if bound:
        bind(layer, 3, device)
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
    keys = bind(network, 4, device)
    images = torch.randn(7, 3, 8, 8).to(device)
    with torch.no_grad():
        whole = network(images)
        for start, end in ((0, 3), (3, 4), (4, 7)):
            bind_keys(network, keys, offset=start)
            torch.testing.assert_close(network(images[start:end]), whole[start:end])
        bind_keys(network, keys)
        assert not torch.allclose(network(images[3:]), whole[3:])


@pytest.mark.parametrize("build", [_small_dropout, _small_shake])
def test_compiles_whole_and_follows_the_key(
    build: Callable[[], Network], device: torch.device
) -> None:
    network = build().to(device)
    keys = bind(network, 0, device)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    images = torch.randn(4, 3, 8, 8).to(device)
    outputs = []
    for step in range(2):
        keys.copy_(keys_of(network, step, device))
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
    bind(network, 0, device)
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
