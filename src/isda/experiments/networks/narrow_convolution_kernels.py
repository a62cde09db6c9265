"""Triton kernels of 3×3 convolutions with few channels, for images in channels-last layout.

A convolution is nine matrix products, one per tap of the 3×3 kernel: the images, shifted by the
tap, times its weights. The gradient with respect to the images is the same with a mirrored kernel,
and that of the weights is the product of shifted images and gradient, summed over all pixels.

Sums are float32, nothing is added atomically: results are deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["convolve", "weight_gradient"]

# sizes of the blocks, the fastest on an H200
_OUTPUTS = 4096  # pixels × input channels of a program that computes outputs
_INPUTS = 2048  # pixels × input channels that the gradient of the weight reads at a time
_COLUMNS = 16  # weights whose gradient a program sums up


def convolve(images: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
    """``F.conv2d(images, weight, padding=1)``, or its gradient with respect to the images.

    Args:
        images: input of the convolution; if ``transposed``, the gradient of its output.
        weight: weight of the convolution, rounded to the dtype of the images.
        transposed: compute ``F.conv_transpose2d(images, weight, padding=1)``.

    Shape:
        images (N, in, height, width) in channels-last layout, weight (out, in, 3, 3);
        output (N, out, height, width). In and out are exchanged if ``transposed``.
    """
    number, channels, height, width = images.shape
    source, target = (0, 1) if transposed else (1, 0)  # dimensions of the weight
    output = torch.empty(
        (number, weight.shape[target], height, width),
        dtype=images.dtype,
        device=images.device,
        memory_format=torch.channels_last,
    )
    pixels = number * height * width
    block = _OUTPUTS // channels
    _convolve[(triton.cdiv(pixels, block),)](
        images,
        weight,
        output,
        pixels,
        weight.stride(source),
        weight.stride(target),
        weight.stride(2),
        weight.stride(3),
        height=height,
        width=width,
        channels=channels,
        out_channels=output.shape[1],
        transposed=transposed,
        block=block,
        num_warps=4,
        num_stages=3,
    )
    return output


def weight_gradient(grad: Tensor, images: Tensor) -> Tensor:
    """Gradient of ``F.conv2d(images, weight, padding=1)`` with respect to the weight, in float32.

    Args:
        grad: gradient of the output.
        images: input of the convolution.

    Shape:
        grad (N, out, height, width) and images (N, in, height, width) in channels-last layout;
        output (out, in, 3, 3) in channels-last layout.
    """
    number, channels, height, width = images.shape
    out_channels = grad.shape[1]
    pixels = number * height * width
    block = parts = _INPUTS // channels
    span = triton.cdiv(triton.cdiv(pixels, parts), block) * block
    parts = triton.cdiv(pixels, span)
    shape = (out_channels, 3, 3, channels)
    partial, total = (
        torch.empty(size, dtype=torch.float32, device=images.device)
        for size in ((parts, *shape), shape)
    )
    _weight_gradient[(parts, 3)](
        grad,
        images,
        partial,
        pixels,
        span,
        height=height,
        width=width,
        channels=channels,
        out_channels=out_channels,
        block=block,
        num_warps=4,
        num_stages=3,
    )
    _sum_parts[(triton.cdiv(total.numel(), _COLUMNS),)](
        partial,
        total,
        parts,
        total.numel(),
        most_parts=triton.next_power_of_2(parts),
        block=_COLUMNS,
    )
    return total.permute(0, 3, 1, 2)


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    images,
    weight,
    output,
    pixels,
    stride_in,
    stride_out,
    stride_down,
    stride_right,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    out_channels: tl.constexpr,
    transposed: tl.constexpr,
    block: tl.constexpr,
):
    """All channels of a block of output pixels."""
    pixel = tl.program_id(0) * block + tl.arange(0, block)
    row = pixel // width % height
    column = pixel % width
    channel = tl.arange(0, channels)
    out = tl.arange(0, out_channels)
    total = tl.zeros((block, out_channels), tl.float32)
    for tap in range(9):
        down = tap // 3 - 1
        right = tap % 3 - 1
        inside = (row + down >= 0) & (row + down < height) & (pixel < pixels)
        inside = inside & (column + right >= 0) & (column + right < width)
        neighbour = pixel + down * width + right
        values = tl.load(
            images + neighbour[:, None] * channels + channel[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        used = 8 - tap if transposed else tap  # the gradient uses the mirrored kernel
        weights = tl.load(
            weight
            + used // 3 * stride_down
            + used % 3 * stride_right
            + channel[:, None] * stride_in
            + out[None, :] * stride_out
        )
        total = tl.dot(values, weights.to(values.dtype), total)
    tl.store(
        output + pixel[:, None] * out_channels + out[None, :],
        total.to(output.dtype.element_ty),
        mask=(pixel < pixels)[:, None],
    )


@triton.jit
def _weight_gradient(  # type: ignore[no-untyped-def]
    grad,
    images,
    partial,
    pixels,
    span,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    out_channels: tl.constexpr,
    block: tl.constexpr,
):
    """One row of the 3×3 kernel, summed over ``span`` pixels.

    The pixels left of, at and right of a pixel are ``3 * channels`` consecutive numbers. Tensor
    cores need a power of 2, so that there is a fourth pixel, which is 0.
    """
    part = tl.program_id(0)
    down = tl.program_id(1) - 1
    place = tl.arange(0, 4 * channels)  # pixel and channel
    right = place // channels - 1
    out = tl.arange(0, out_channels)
    total = tl.zeros((4 * channels, out_channels), tl.float32)
    for first in range(part * span, part * span + span, block):
        pixel = first + tl.arange(0, block)
        row = pixel // width % height + down
        column = (pixel % width)[:, None] + right[None, :]
        inside = ((row >= 0) & (row < height) & (pixel < pixels))[:, None]
        inside = inside & (column >= 0) & (column < width) & (right < 2)[None, :]
        left = (pixel + down * width - 1) * channels
        values = tl.load(images + left[:, None] + place[None, :], mask=inside, other=0.0)
        error = tl.load(
            grad + pixel[:, None] * out_channels + out[None, :],
            mask=(pixel < pixels)[:, None],
            other=0.0,
        )
        total = tl.dot(tl.trans(values), error, total)
    line = ((part * out_channels + out) * 3 + down + 1) * 3 * channels
    tl.store(partial + line[None, :] + place[:, None], total, mask=(place < 3 * channels)[:, None])


@triton.jit
def _sum_parts(  # type: ignore[no-untyped-def]
    partial, total, parts, columns, most_parts: tl.constexpr, block: tl.constexpr
):
    """Sum over the parts of the images."""
    column = tl.program_id(0) * block + tl.arange(0, block)
    part = tl.arange(0, most_parts)
    inside = (part < parts)[:, None] & (column < columns)[None, :]
    place = part[:, None] * columns + column[None, :]
    values = tl.load(partial + place, mask=inside, other=0.0)
    tl.store(total + column, tl.sum(values, 0), mask=column < columns)
