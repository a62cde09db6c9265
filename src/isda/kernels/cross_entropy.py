"""Shifted logits and cross entropy (Eq. 4): one kernel per direction, and one for the mean."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isda.kernels.sizes import power_of_2

__all__ = ["cross_entropy", "cross_entropy_backward"]

_CLASSES = 4096  # logits that a program reads at a time


def cross_entropy(
    logits: Tensor,
    quadratic: Tensor | None,
    target: Tensor,
    strength: Tensor | None,
    scale: Tensor | None,
    ignore_index: int,
    reduce: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``isda.ops._fused_cross_entropy``."""
    logits, target = logits.contiguous(), target.contiguous()
    number, num_classes = logits.shape
    if quadratic is not None:
        quadratic = quadratic.contiguous()
    losses, total = (logits.new_empty(number, dtype=torch.float32) for _ in range(2))
    if number:
        _cross_entropy[(number,)](
            logits,
            logits if quadratic is None else quadratic,
            target,
            losses if strength is None else strength,
            losses if scale is None else scale,
            losses,
            total,
            num_classes,
            ignore_index,
            shifted=quadratic is not None,
            scaled=scale is not None,
            block=min(power_of_2(num_classes), _CLASSES),
        )
    if not reduce:
        ones = torch.ones((), dtype=torch.float64, device=logits.device)
        return losses, total, ones if scale is None else scale.clone()
    loss = logits.new_empty((), dtype=torch.float32)
    factor = torch.empty((), dtype=torch.float64, device=logits.device)
    _reduce[(1,)](
        losses,
        target,
        losses if scale is None else scale,
        loss,
        factor,
        number,
        ignore_index,
        scaled=scale is not None,
        block=min(power_of_2(max(number, 1)), 1024),
    )
    return loss, total, factor


def cross_entropy_backward(
    grad: Tensor,
    logits: Tensor,
    quadratic: Tensor | None,
    target: Tensor,
    strength: Tensor | None,
    total: Tensor,
    scale: Tensor,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of the logits and the quadratic term (empty if there is none)."""
    logits, target = logits.contiguous(), target.contiguous()
    number, num_classes = logits.shape
    if quadratic is not None:
        quadratic = quadratic.contiguous()
    logits_grad = torch.empty_like(logits)
    quadratic_grad = logits.new_empty(0) if quadratic is None else torch.empty_like(quadratic)
    if number:
        _cross_entropy_backward[(number,)](
            grad.contiguous(),
            logits,
            logits if quadratic is None else quadratic,
            target,
            total if strength is None else strength,
            total,
            scale,
            logits_grad,
            quadratic_grad,
            num_classes,
            ignore_index,
            shifted=quadratic is not None,
            by_row=grad.dim(),
            block=min(power_of_2(num_classes), _CLASSES),
        )
    return logits_grad, quadratic_grad


@triton.jit
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits,
    quadratic,
    target,
    strength,
    scale,
    losses,
    total,
    num_classes,
    ignore_index,
    shifted: tl.constexpr,
    scaled: tl.constexpr,
    block: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    label = tl.load(target + sample)
    if shifted:
        half = 0.5 * tl.load(strength)
    largest = -float("inf")
    summed = 0.0
    at_target = 0.0
    for first in range(0, num_classes, block):
        column = first + tl.arange(0, block)
        inside = column < num_classes
        place = sample * num_classes + column
        value = tl.load(logits + place, mask=inside, other=-float("inf")).to(tl.float32)
        at_target += tl.sum(tl.where(column == label, value, 0.0))  # its shift is 0
        if shifted:
            value += _shift(half, quadratic + place, inside)
        new = tl.maximum(largest, tl.max(value))
        shift = tl.where(new == -float("inf"), 0.0, new)  # −inf − −inf is NaN
        summed = summed * tl.exp(largest - shift) + tl.sum(tl.exp(value - shift))
        largest = new
    result = largest + tl.log(summed)
    tl.store(total + sample, result)
    loss = tl.where((label < 0) | (label >= num_classes), float("nan"), result - at_target)
    loss = tl.where(label == ignore_index, 0.0, loss)
    if scaled:
        loss = tl.where(tl.load(scale) == 0.0, float("nan"), loss)
    tl.store(losses + sample, loss)


@triton.jit
def _reduce(  # type: ignore[no-untyped-def]
    losses,
    target,
    scale,
    loss,
    factor,
    number,
    ignore_index,
    scaled: tl.constexpr,
    block: tl.constexpr,
):
    total = tl.zeros((block,), dtype=tl.float32)
    counted = tl.zeros((block,), dtype=tl.int32)
    for first in range(0, number, block):
        position = first + tl.arange(0, block)
        inside = position < number
        label = tl.load(target + position, mask=inside, other=ignore_index)
        counted += (label != ignore_index).to(tl.int32)
        total += tl.load(losses + position, mask=inside, other=0.0)
    if scaled:
        value = tl.load(scale).to(tl.float32)
    else:
        value = 1.0 / tl.maximum(tl.sum(counted), 1).to(tl.float32)
    tl.store(factor, value)
    tl.store(loss, tl.sum(total) * value)


@triton.jit
def _cross_entropy_backward(  # type: ignore[no-untyped-def]
    grad,
    logits,
    quadratic,
    target,
    strength,
    total,
    scale,
    logits_grad,
    quadratic_grad,
    num_classes,
    ignore_index,
    shifted: tl.constexpr,
    by_row: tl.constexpr,
    block: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    label = tl.load(target + sample)
    factor = tl.load(scale).to(tl.float32)
    upstream = tl.load(grad + sample * by_row)
    counts = (label >= 0) & (label < num_classes) & (label != ignore_index) & (factor != 0.0)
    if shifted:
        half = 0.5 * tl.load(strength)
    summed = tl.load(total + sample)
    for first in range(0, num_classes, block):
        column = first + tl.arange(0, block)
        inside = column < num_classes
        place = sample * num_classes + column
        value = tl.load(logits + place, mask=inside, other=0.0).to(tl.float32)
        if shifted:
            value += _shift(half, quadratic + place, inside)
        share = tl.exp(value - summed)
        result = share - tl.where(column == label, 1.0, 0.0)
        result = tl.where(counts, result * (upstream * factor), 0.0)
        tl.store(logits_grad + place, result.to(logits_grad.dtype.element_ty), mask=inside)
        if shifted:
            result = tl.where(counts, half * share * (upstream * factor), 0.0)
            tl.store(quadratic_grad + place, result, mask=inside)


@triton.jit
def _shift(half, quadratic, inside):  # type: ignore[no-untyped-def]
    """(λ/2) q, and 0 for λ = 0 even if q has overflowed."""
    value = half * tl.load(quadratic, mask=inside, other=0.0)
    return tl.where(half == 0.0, 0.0, value)
