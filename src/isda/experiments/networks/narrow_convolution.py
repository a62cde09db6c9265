"""3×3 convolutions with few channels, by Triton on NVIDIA GPUs.

ResNet-32 and ResNet-110 spend most of a training step in convolutions with 16 to 64 channels,
where cuDNN is several times slower than the memory traffic requires (``docs/speed.md``).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op

from isda.ops import uses_triton

__all__ = ["NarrowConv2d"]


class NarrowConv2d(nn.Conv2d):
    """``nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)``.

    The Triton kernels run on CUDA images of 16 bits in channels-last layout, such as under
    autocast; all other images are passed to ``nn.Conv2d``. They have no second derivative.

    Args:
        in_channels: 16, 32 or 64.
        out_channels: 16, 32 or 64.
    """

    CHANNELS = (16, 32, 64)
    """Numbers of channels for which networks use this layer."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 3, padding=1, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        images = input
        if images.is_cuda and torch.is_autocast_enabled("cuda"):
            images = images.to(torch.get_autocast_dtype("cuda"))
        fits = (
            uses_triton(images)
            and images.dtype in (torch.float16, torch.bfloat16)
            and images.is_contiguous(memory_format=torch.channels_last)
            and 0 < images.numel() < 2**29  # 32-bit offsets
        )
        result: Tensor = _convolve(images, self.weight, False) if fits else super().forward(input)
        return result


@custom_op("isda_experiments::narrow_convolution", mutates_args=())
def _convolve(images: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """The convolution, or its gradient with respect to the images."""
    from isda.experiments.networks import narrow_convolution_kernels  # imports Triton

    with torch.cuda.device_of(images):  # Triton launches on the current device
        return narrow_convolution_kernels.convolve(images, weight, transposed=transposed)


@_convolve.register_fake
def _(images: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    number, _, height, width = images.shape
    shape = (number, weight.shape[1 if transposed else 0], height, width)
    return torch.empty(
        shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last
    )


@custom_op("isda_experiments::narrow_weight_gradient", mutates_args=())
def _weight_gradient(grad: Tensor, images: Tensor) -> Tensor:
    """Gradient of the convolution with respect to the weight, in float32."""
    from isda.experiments.networks import narrow_convolution_kernels  # imports Triton

    with torch.cuda.device_of(images):
        return narrow_convolution_kernels.weight_gradient(grad, images)


@_weight_gradient.register_fake
def _(grad: Tensor, images: Tensor) -> Tensor:
    shape = (grad.shape[1], 3, 3, images.shape[1])
    return images.new_empty(shape, dtype=torch.float32).permute(0, 3, 1, 2)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    images, weight = ctx.saved_tensors
    grad = grad.contiguous(memory_format=torch.channels_last)
    images_needed, weight_needed, _ = ctx.needs_input_grad
    return (
        _convolve(grad, weight, True) if images_needed else None,
        _weight_gradient(grad, images).to(weight.dtype) if weight_needed else None,
        None,
    )


_convolve.register_autograd(_differentiate, setup_context=_save)
