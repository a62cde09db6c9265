"""From the products of the classes to the samples, and from the samples' gradients to the weights.

The products are those of ``products.py``, in slots of classes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isda.kernels.covariances import layout
from isda.kernels.launch import blocks, early, enter, leave, power_of_2

__all__ = ["gather_rows", "weight_gradient"]


def gather_rows(partial: Tensor, slot: Tensor, index: Tensor, first_class: int = 0) -> Tensor:
    """Quadratic term of every sample (N, C), 0 for those whose class has no slot."""
    num_classes = partial.shape[2]
    rows = partial.new_empty(len(index), num_classes)
    if len(index):
        _gather_rows[(len(index),)](
            partial,
            slot,
            index.contiguous(),
            rows,
            partial.shape[1],
            num_classes,
            len(slot),
            first_class,
            block=power_of_2(num_classes),
            **early(partial.device),
        )
    return rows


def weight_gradient(
    grad: Tensor,
    index: Tensor,
    product: Tensor,
    own: Tensor,
    slot: Tensor,
    classes: Tensor,
    first_class: int = 0,
) -> Tensor:
    """Gradient of the weight from that of the quadratic term (see ``isda.per_class``)."""
    slots, num_classes, num_features = product.shape
    if not slots:
        return grad.new_zeros(num_classes, num_features)
    others = grad.new_empty(slots, num_classes)  # gradients of the classes' rows, 0 at the class
    block = power_of_2(num_classes)
    _sum_rows[(slots,)](
        grad.contiguous(),
        index.contiguous(),
        classes,
        others,
        len(index),
        num_classes,
        first_class,
        samples_block=min(max(8192 // block, 1), power_of_2(len(index))),
        block=block,
        **early(grad.device),
    )
    result = grad.new_empty(num_classes, num_features)
    if len(own):
        _launch_both_sums(others, product, own, classes, result, first_class)
        return torch.addmm(result, others.T, own, alpha=-1)  # W Σ_c less w_c Σ_c
    _weight_gradient[(num_classes, blocks(num_features, 64))](
        others,
        product,
        slot,
        result,
        slots,
        len(slot),
        num_classes,
        num_features,
        *layout(product),
        first_class,
        rows_block=min(max(power_of_2(num_classes), 16), 128),
        features_block=64,
        **early(grad.device),
    )
    return result


def _launch_both_sums(
    others: Tensor, product: Tensor, own: Tensor, classes: Tensor, result: Tensor, first_class: int
) -> None:
    """Both sums of the gradient in one pass over products that are too many for a cache."""
    slots, num_classes, num_features = product.shape
    # one warp holds whole columns of a tile, so that it sums over rows without the others
    classes_block, features_block = 8, 256
    parts = blocks(num_classes, classes_block)
    partial = result.new_empty(parts, slots, num_features)
    _both_sums[(parts, blocks(num_features, features_block))](
        others,
        product,
        classes,
        partial,
        result,
        slots,
        num_classes,
        num_features,
        slots_block=4,
        classes_block=classes_block,
        features_block=features_block,
        num_warps=1,
        **early(product.device),
    )
    _own_rows[(slots, blocks(num_features, 512))](
        others,
        partial,
        own,
        classes,
        result,
        parts,
        num_classes,
        num_features,
        first_class,
        classes_block=power_of_2(num_classes),
        parts_block=16,
        features_block=512,
        **early(product.device),
    )


@triton.jit
def _gather_rows(  # type: ignore[no-untyped-def]
    partial,
    slot,
    index,
    rows,
    parts,
    num_classes,
    num_slots,
    first_class,
    block: tl.constexpr,
    early: tl.constexpr,
):
    enter(early)
    sample = tl.program_id(0).to(tl.int64)
    label = tl.load(index + sample) - first_class
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
    leave(early)
    tl.store(rows + sample * num_classes + column, total, mask=column < num_classes)


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]
    grad,
    index,
    classes,
    others,
    num_samples,
    num_classes,
    first_class,
    samples_block: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):
    """Twice the sums over the samples of a class, and at the class itself 0."""
    enter(early)
    label = tl.load(classes + tl.program_id(0))
    wanted = tl.where(label < 0, -(2**30), label + first_class)  # which no sample has
    column = tl.arange(0, block)
    total = tl.zeros((block,), dtype=tl.float32)
    for first in range(0, num_samples, samples_block):
        position = first + tl.arange(0, samples_block)
        value = tl.load(index + position, mask=position < num_samples, other=-1)
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
    leave(early)
    tl.store(others + place, total, mask=column < num_classes)


@triton.jit
def _weight_gradient(  # type: ignore[no-untyped-def]
    others,
    product,
    slot,
    result,
    slots,
    num_slots,
    num_classes,
    num_features,
    stride,
    width,
    first_class,
    rows_block: tl.constexpr,
    features_block: tl.constexpr,
    early: tl.constexpr,
):
    enter(early)
    other = tl.program_id(0)
    column = tl.program_id(1) * features_block + tl.arange(0, features_block)
    inside = column < num_features
    total = tl.zeros((features_block,), dtype=tl.float32)
    for first in range(0, slots, rows_block):  # row j of the gradient: from the slots of all c
        place = first + tl.arange(0, rows_block)
        line = place.to(tl.int64) * num_classes + other
        total += _weighted_sum(others, product, line, place < slots, column, stride, width)
    label = other - first_class
    if (label >= 0) & (label < num_slots):
        own = tl.load(slot + label).to(tl.int64)
        if own >= 0:  # and row c: from all j of its slot
            for first in range(0, num_classes, rows_block):
                row = first + tl.arange(0, rows_block)
                line = own * num_classes + row
                total -= _weighted_sum(
                    others, product, line, row < num_classes, column, stride, width
                )
    leave(early)
    tl.store(result + other.to(tl.int64) * num_features + column, total, mask=inside)


@triton.jit
def _weighted_sum(  # type: ignore[no-untyped-def]
    factors, product, line, used, column, stride, width
):
    """Sum of lines times their factors; lines of unused slots, with factor 0, hold anything."""
    factor = tl.load(factors + line, mask=used, other=0.0)
    tile = tl.load(
        product + line[:, None] * stride + column[None, :],
        mask=used[:, None] & (column < width)[None, :],
        other=0.0,
    )
    tile = tl.where(factor[:, None] == 0.0, 0.0, tile.to(tl.float32) * factor[:, None])
    return tl.sum(tile, 0)


@triton.jit
def _both_sums(  # type: ignore[no-untyped-def]
    others,
    product,
    classes,
    partial,
    result,
    slots,
    num_classes,
    num_features,
    slots_block: tl.constexpr,
    classes_block: tl.constexpr,
    features_block: tl.constexpr,
    early: tl.constexpr,
):
    """Sums over the slots for some rows j of the gradient, and over these j for all slots."""
    enter(early)
    row = tl.program_id(0) * classes_block + tl.arange(0, classes_block)
    column = tl.program_id(1) * features_block + tl.arange(0, features_block)
    row_inside = row < num_classes
    inside = column < num_features
    total = tl.zeros((classes_block, features_block), dtype=tl.float32)
    for first in range(0, slots, slots_block):
        place = first + tl.arange(0, slots_block)
        used = tl.load(classes + place, mask=place < slots, other=-1) >= 0
        line = place.to(tl.int64)[:, None] * num_classes + row[None, :]
        line_used = used[:, None] & row_inside[None, :]
        factor = tl.load(others + line, mask=line_used, other=0.0)
        tile = tl.load(
            product + line[:, :, None] * num_features + column[None, None, :],
            mask=line_used[:, :, None] & inside[None, None, :],
            other=0.0,
        )
        tile = tile.to(tl.float32) * factor[:, :, None]
        total += tl.sum(tile, 0)
        piece = (tl.program_id(0) * slots + place).to(tl.int64)
        tl.store(
            partial + piece[:, None] * num_features + column[None, :],
            tl.sum(tile, 1),
            mask=used[:, None] & inside[None, :],
        )
    tl.store(
        result + row[:, None].to(tl.int64) * num_features + column[None, :],
        total,
        mask=row_inside[:, None] & inside[None, :],
    )


@triton.jit
def _own_rows(  # type: ignore[no-untyped-def]
    others,
    partial,
    own,
    classes,
    result,
    parts,
    num_classes,
    num_features,
    first_class,
    classes_block: tl.constexpr,
    parts_block: tl.constexpr,
    features_block: tl.constexpr,
    early: tl.constexpr,
):
    """Take from row c of the gradient what all j of its slot have got."""
    enter(early)
    place = tl.program_id(0).to(tl.int64)
    label = tl.load(classes + place)
    if label < 0:
        return
    column = tl.program_id(1) * features_block + tl.arange(0, features_block)
    inside = column < num_features
    other = tl.arange(0, classes_block)
    factor = tl.load(others + place * num_classes + other, mask=other < num_classes, other=0.0)
    own_product = tl.load(own + place * num_features + column, mask=inside, other=0.0)
    total = -tl.sum(factor) * own_product
    for first in range(0, parts, parts_block):
        part = first + tl.arange(0, parts_block)
        piece = part * tl.num_programs(0) + place
        tile = tl.load(
            partial + piece[:, None] * num_features + column[None, :],
            mask=(part < parts)[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.sum(tile, 0)
    line = result + (label.to(tl.int64) + first_class) * num_features + column
    tl.store(line, tl.load(line, mask=inside, other=0.0) - total, mask=inside)
