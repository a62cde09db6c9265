"""Quadratic terms of the samples from the products of the classes, and the weight gradient.

The products are those of ``products.py``; each class of the batch has a slot.
"""

import triton
import triton.language as tl
from torch import Tensor

from isda.kernels.covariance_update import row_layout
from isda.kernels.many_classes import gradient_of_copies
from isda.kernels.sizes import blocks, power_of_2

__all__ = ["quadratic_rows", "weight_gradient"]


def quadratic_rows(
    weight: Tensor,
    target: Tensor,
    partial: Tensor,
    product: Tensor,
    target_product: Tensor,
    slot: Tensor,
    classes: Tensor,
) -> Tensor:
    """See ``isda.kernels.plain.quadratic_rows``."""
    num_classes = partial.shape[2]
    rows = partial.new_empty(len(target), num_classes)
    if len(target):
        _quadratic_rows[(len(target),)](
            partial,
            slot,
            target.contiguous(),
            rows,
            partial.shape[1],
            num_classes,
            len(slot),
            block=power_of_2(num_classes),
        )
    return rows


def weight_gradient(
    grad: Tensor,
    weight: Tensor,
    target: Tensor,
    product: Tensor,
    target_product: Tensor,
    slot: Tensor,
    classes: Tensor,
) -> Tensor:
    """See ``isda.kernels.plain.weight_gradient``."""
    slots, num_classes, num_features = product.shape
    if not slots:
        return grad.new_zeros(num_classes, num_features)
    factors = grad.new_empty(slots, num_classes)  # 2 G_cj, and 0 for j = c
    block = power_of_2(num_classes)
    _sum_gradients[(slots,)](
        grad.contiguous(),
        target.contiguous(),
        classes,
        factors,
        len(target),
        num_classes,
        samples_block=min(max(8192 // block, 1), power_of_2(len(target))),
        block=block,
    )
    if len(target_product):
        return gradient_of_copies(factors, product, target_product, classes)
    result = grad.new_empty(num_classes, num_features)
    _weight_gradient[(num_classes, blocks(num_features, 64))](
        factors,
        product,
        slot,
        result,
        slots,
        len(slot),
        num_classes,
        num_features,
        *row_layout(product),
        rows_block=min(max(power_of_2(num_classes), 16), 128),
        features_block=64,
    )
    return result


@triton.jit
def _quadratic_rows(  # type: ignore[no-untyped-def]
    partial,
    slot,
    target,
    rows,
    parts,
    num_classes,
    num_slots,
    block: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    label = tl.load(target + sample)
    here = (label >= 0) & (label < num_slots)
    place = tl.load(slot + tl.where(here, label, 0)).to(tl.int64)
    column = tl.arange(0, block)
    total = tl.zeros((block,), dtype=tl.float32)
    if here & (place >= 0):
        for part in range(parts):
            total += tl.load(
                partial + (place * parts + part) * num_classes + column,
                mask=column < num_classes,
                other=0.0,
            )
    tl.store(rows + sample * num_classes + column, total, mask=column < num_classes)


@triton.jit
def _sum_gradients(  # type: ignore[no-untyped-def]
    grad,
    target,
    classes,
    factors,
    num_samples,
    num_classes,
    samples_block: tl.constexpr,
    block: tl.constexpr,
):
    """Twice the sum of the gradients over the samples of a class, 0 at the class itself."""
    label = tl.load(classes + tl.program_id(0))
    wanted = tl.where(label < 0, -(2**30), label)  # a label that no sample has
    column = tl.arange(0, block)
    total = tl.zeros((block,), dtype=tl.float32)
    for first in range(0, num_samples, samples_block):
        position = first + tl.arange(0, samples_block)
        value = tl.load(target + position, mask=position < num_samples, other=-1)
        match = value == wanted
        if tl.sum(match.to(tl.int32)) > 0:
            tile = tl.load(
                grad + position[:, None].to(tl.int64) * num_classes + column[None, :],
                mask=match[:, None] & (column < num_classes)[None, :],
                other=0.0,
            )
            total += tl.sum(tile, 0)
    place = tl.program_id(0).to(tl.int64) * num_classes + column
    total = tl.where(column == wanted, 0.0, 2.0 * total)
    tl.store(factors + place, total, mask=column < num_classes)


@triton.jit
def _weight_gradient(  # type: ignore[no-untyped-def]
    factors,
    product,
    slot,
    result,
    slots,
    num_slots,
    num_classes,
    num_features,
    stride,
    width,
    rows_block: tl.constexpr,
    features_block: tl.constexpr,
):
    other = tl.program_id(0)
    column = tl.program_id(1) * features_block + tl.arange(0, features_block)
    inside = column < num_features
    total = tl.zeros((features_block,), dtype=tl.float32)
    for first in range(0, slots, rows_block):  # row j of the gradient: from the slots of all c
        place = first + tl.arange(0, rows_block)
        line = place.to(tl.int64) * num_classes + other
        total += _weighted_sum(factors, product, line, place < slots, column, stride, width)
    if other < num_slots:
        other_slot = tl.load(slot + other).to(tl.int64)
        if other_slot >= 0:  # and row c: from all j of its slot
            for first in range(0, num_classes, rows_block):
                row = first + tl.arange(0, rows_block)
                line = other_slot * num_classes + row
                total -= _weighted_sum(
                    factors, product, line, row < num_classes, column, stride, width
                )
    tl.store(result + other.to(tl.int64) * num_features + column, total, mask=inside)


@triton.jit
def _weighted_sum(  # type: ignore[no-untyped-def]
    factors, product, line, used, column, stride, width
):
    """Sum of lines times their factors; lines with factor 0 may be uninitialised."""
    factor = tl.load(factors + line, mask=used, other=0.0)
    tile = tl.load(
        product + line[:, None] * stride + column[None, :],
        mask=used[:, None] & (column < width)[None, :],
        other=0.0,
    )
    tile = tl.where(factor[:, None] == 0.0, 0.0, tile.to(tl.float32) * factor[:, None])
    return tl.sum(tile, 0)
