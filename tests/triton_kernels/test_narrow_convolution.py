"""The Triton kernels of narrow convolutions against torch's convolution in float64.

They run on a GPU, or on a CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest
tests/test_narrow_convolution.py`` (Triton reads the variable when it is imported).
"""

import importlib.util
import os

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isda.experiments.networks import create_network, narrow_convolution
from isda.experiments.networks.narrow_convolution import NarrowConv2d
from isda.experiments.networks.network import conv

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not GPU
DEVICE = "cuda" if GPU else "cpu"
kernels = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (GPU or INTERPRETED),
    reason="needs a GPU, or TRITON_INTERPRET=1",
)
# the interpreter multiplies bfloat16 as integers
dtypes = pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * GPU, ids=str)
# (N, in, out, height, width): less than a block of pixels, several, a part of the last one; with
# 4200 pixels a program adds several blocks to the gradient of the weight
shapes = pytest.mark.parametrize(
    "shape",
    [
        (1, 16, 16, 1, 1),
        (3, 16, 32, 5, 7),
        (2, 32, 16, 9, 8),
        (2, 32, 32, 35, 60),
        (2, 64, 16, 9, 7),
    ]
    + [(128, 16, 16, 32, 32), (80, 32, 32, 16, 16), (128, 64, 64, 8, 8)] * GPU,
    ids=str,
)


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, *, layout: torch.memory_format
) -> tuple[Tensor, NarrowConv2d, Tensor]:
    """Images, a layer, and the gradient of its output."""
    number, channels, out_channels, height, width = shape
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(number, channels, height, width, generator=generator) + 0.5
    grad = torch.randn(number, out_channels, height, width, generator=generator)
    layer = NarrowConv2d(channels, out_channels).to(DEVICE).to(memory_format=layout)
    images, grad = (
        tensor.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)
        for tensor in (images, grad)
    )
    return images.requires_grad_(), layer, grad


def exact(images: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and both gradients in float64, with the weight rounded as by autocast."""
    images = images.detach().double().cpu().requires_grad_()
    weight = weight.detach().to(grad.dtype).double().cpu().requires_grad_()
    output = F.conv2d(images, weight, padding=1)
    return output, *torch.autograd.grad(output, (images, weight), grad.double().cpu())


def require_close(found: Tensor, expected: Tensor, relative: float) -> None:
    error = (found.cpu() - expected).abs().max() / expected.abs().max()
    assert found.shape == expected.shape
    assert error < relative


@kernels
@dtypes
@shapes
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_values_and_gradients(shape, dtype, layout, monkeypatch):
    monkeypatch.setattr(narrow_convolution, "uses_triton", lambda _: True)
    images, layer, grad = draw(shape, dtype, layout=layout)
    output = layer(images)
    assert output.grad_fn.name() != "ConvolutionBackward0"
    assert output.is_contiguous(memory_format=torch.channels_last)
    output.backward(grad)
    expected, images_grad, weight_grad = exact(images, layer.weight, grad)
    rounding = torch.finfo(dtype).eps / 2  # of the result; sums are float32
    require_close(output.detach(), expected.detach(), 1.1 * rounding)
    require_close(images.grad, images_grad, 1.1 * rounding)
    # float32 sums of up to 131,072 products whose signs vary
    require_close(layer.weight.grad, weight_grad, 1e-5)


@kernels
def test_only_needed_gradients(monkeypatch):
    monkeypatch.setattr(narrow_convolution, "uses_triton", lambda _: True)
    images, layer, grad = draw((2, 16, 16, 4, 4), torch.float16, layout=torch.channels_last)
    expected, *_ = exact(images, layer.weight, grad)
    for part in (images, layer.weight):
        images.requires_grad_(part is images)
        layer.weight.requires_grad_(part is layer.weight)
        (found,) = torch.autograd.grad(layer(images), part, grad)
        assert found.shape == part.shape
        assert found.dtype == part.dtype
    with torch.no_grad():
        require_close(layer(images), expected.detach(), 1e-3)


@kernels
def test_gradient_in_another_layout(monkeypatch):
    """Such as that of a sum, which is expanded."""
    monkeypatch.setattr(narrow_convolution, "uses_triton", lambda _: True)
    images, layer, _ = draw((2, 16, 32, 4, 5), torch.float16, layout=torch.channels_last)
    layer(images).sum().backward()
    _, images_grad, weight_grad = exact(images, layer.weight, torch.ones(2, 32, 4, 5).half())
    require_close(images.grad, images_grad, 1e-3)
    require_close(layer.weight.grad, weight_grad, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled):
    images, layer, grad = draw((80, 32, 16, 16, 16), torch.bfloat16, layout=torch.channels_last)
    call = torch.compile(layer, fullgraph=True) if compiled else layer
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = call(images.float())
    assert output.dtype == torch.bfloat16
    output.backward(grad)
    expected, images_grad, weight_grad = exact(images, layer.weight, grad)
    require_close(output.detach(), expected.detach(), 2**-8)
    require_close(images.grad, images_grad, 2**-8)
    require_close(layer.weight.grad, weight_grad, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_other_images_on_a_gpu():
    """Float32, another layout and an empty batch go to torch."""
    layer = NarrowConv2d(16, 16).cuda()
    for shape in ((2, 16, 8, 8), (0, 16, 8, 8)):
        images = torch.randn(shape, device="cuda").contiguous(memory_format=torch.channels_last)
        weight = layer.weight
        assert torch.equal(layer(images), F.conv2d(images, weight, padding=1))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            planar = layer(images.contiguous())
            assert torch.equal(planar, F.conv2d(images.contiguous(), weight, padding=1))
            assert layer(images).shape == shape


def test_layer_is_a_convolution():
    layer, plain = NarrowConv2d(16, 32), nn.Conv2d(16, 32, 3, padding=1, bias=False)
    plain.load_state_dict(layer.state_dict())
    images = torch.randn(2, 16, 5, 6)
    assert torch.equal(layer(images), plain(images))


def test_which_convolutions_are_narrow():
    narrow = [conv(16, 16), conv(32, 16), conv(32, 32), conv(64, 64)]
    others = [conv(3, 16), conv(128, 64), conv(16, 32, 1), conv(16, 32, stride=2)]
    assert all(isinstance(layer, NarrowConv2d) for layer in narrow)
    assert not any(isinstance(layer, NarrowConv2d) for layer in others)
    assert not isinstance(conv(16, 16, groups=2), NarrowConv2d)
    network = create_network("resnet110", num_classes=10)
    assert sum(isinstance(part, NarrowConv2d) for part in network.modules()) == 36 + 35 + 35
