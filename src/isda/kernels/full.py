"""Full covariances: update and products in one pass over the classes of a batch, and the gradient.

A program holds a block of rows of one Σ_c. It walks along the columns; every tile is read once,
merged with the batch (Eq. 10), written once, and multiplied with the weights of all classes while
it is at hand. The products run on tensor cores in bfloat16: with precision "high" each number is
the sum of two (relative error of a product about 2⁻¹⁶), with "medium" it is one (2⁻⁸); they are
summed in float32, and the statistics are float32 throughout.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isda.kernels.statistics import Classes, class_statistics

__all__ = [
    "Products",
    "empty_products",
    "gather_rows",
    "multiply",
    "update",
    "update_and_multiply",
    "weight_gradient",
]

_ROWS = 64  # of a covariance, in a program
_COLUMNS = 64  # of a tile
_CLASSES = 256  # most products that a program holds; with more classes the update goes ahead


class Products(NamedTuple):
    """What is left of the covariances of a batch: all that the loss and its gradient need."""

    partial: Tensor  # (P, B, C) quadratic term of each slot, in parts that are to be summed
    product: Tensor  # (P, C, A) = (W − w_c) Σ_c of each slot
    slot: Tensor  # (C,) slot of each class of the samples, −1 for the others
    classes: Tensor  # (P,) class in each slot, −1 in unused ones


def update(
    count: Tensor,
    mean: Tensor,
    covariance: Tensor,
    features: Tensor,
    index: Tensor,
    decay: float,
    first_class: int = 0,
) -> None:
    """Merge a batch into count, mean and covariance in place (Eq. 9, 10 and 11)."""
    found = class_statistics(
        index,
        index,
        len(count),
        first_class,
        features=features,
        count=count,
        mean=mean,
        decay=decay,
    )
    _launch(covariance, found, None, None, first_class, merge=True)


def multiply(
    weight: Tensor, index: Tensor, covariance: Tensor, precision: str, first_class: int = 0
) -> Products:
    """Products of Eq. 4 for the classes of a batch."""
    found = class_statistics(index, index, len(covariance), first_class)
    result = Products(
        *empty_products(weight, len(found.own_classes), precision), found.slot, found.own_classes
    )
    _launch(covariance, found, weight.contiguous(), result, first_class, merge=False)
    return result


def update_and_multiply(
    count: Tensor,
    mean: Tensor,
    covariance: Tensor,
    features: Tensor,
    index: Tensor,
    weight: Tensor,
    target: Tensor,
    decay: float,
    precision: str,
    first_class: int = 0,
) -> Products:
    """Merge a batch, then products of Eq. 4 for the classes of ``target``.

    Equivalent to :func:`update` and :func:`multiply`, with each touched covariance read once and
    written once if there are at most 256 classes.
    """
    found = class_statistics(
        index,
        target,
        len(count),
        first_class,
        features=features,
        count=count,
        mean=mean,
        decay=decay,
    )
    result = Products(
        *empty_products(weight, len(found.own_classes), precision), found.slot, found.own_classes
    )
    weight = weight.contiguous()
    if len(weight) > _CLASSES:
        _launch(covariance, found, None, None, first_class, merge=True)
        _launch(covariance, found, weight, result, first_class, merge=False)
    else:
        _launch(covariance, found, weight, result, first_class, merge=True)
    return result


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
            block=triton.next_power_of_2(num_classes),
        )
    return rows


def weight_gradient(
    grad: Tensor,
    index: Tensor,
    product: Tensor,
    slot: Tensor,
    classes: Tensor,
    first_class: int = 0,
) -> Tensor:
    """Gradient of the weight from that of the quadratic term (see ``isda.per_class``)."""
    slots, num_classes, num_features = product.shape
    table = grad.new_empty(slots, num_classes)  # gradients of the classes' rows
    result = grad.new_empty(num_classes, num_features)
    if not slots:
        return result.zero_()
    block = triton.next_power_of_2(num_classes)
    _sum_rows[(slots,)](
        grad.contiguous(),
        index.contiguous(),
        classes,
        table,
        len(index),
        num_classes,
        first_class,
        samples_block=min(16, max(1, 4096 // block)),
        block=block,
    )
    features_block = min(triton.next_power_of_2(num_features), 128)
    _weight_gradient[(num_classes, triton.cdiv(num_features, features_block))](
        table,
        product,
        slot,
        classes,
        result,
        slots,
        len(slot),
        num_classes,
        num_features,
        first_class,
        rows_block=16,
        features_block=features_block,
    )
    return result


def empty_products(weight: Tensor, slots: int, precision: str) -> tuple[Tensor, Tensor]:
    """Room for ``Products.partial`` and ``Products.product``."""
    partial = weight.new_empty(slots, triton.cdiv(weight.shape[1], _ROWS), weight.shape[0])
    dtype = torch.float32 if precision == "high" else torch.bfloat16
    return partial, weight.new_empty(slots, *weight.shape, dtype=dtype)


def _launch(
    covariance: Tensor,
    found: Classes,
    weight: Tensor | None,
    result: Products | None,
    first_class: int,
    *,
    merge: bool,
) -> None:
    """One pass over the covariances of the classes found."""
    slots, num_features = len(found.classes), covariance.shape[1]
    if not slots:
        return
    nothing = found.share
    high = low = centred = nothing
    num_classes, classes_block, class_blocks = 0, 16, 1
    precise = False
    if weight is not None:
        assert result is not None
        num_classes = len(weight)
        precise = result.product.dtype == torch.float32
        classes_block = max(16, min(triton.next_power_of_2(num_classes), _CLASSES))
        class_blocks = triton.cdiv(num_classes, classes_block)
        centred, high, low = _split_weight(weight, classes_block)
    _update_and_multiply[(triton.cdiv(num_features, _ROWS) * class_blocks, slots)](
        covariance,
        found.rows,
        found.start,
        found.batch_count,
        found.share,
        found.classes,
        found.slot,
        centred,
        high,
        low,
        result.partial if result is not None else nothing,
        result.product if result is not None else nothing,
        num_features,
        num_classes,
        class_blocks,
        high.shape[-1],
        first_class,
        merge=merge,
        multiply=weight is not None,
        precise=precise,
        several=class_blocks > 1,
        interpreted=not covariance.is_cuda,
        rows_block=_ROWS,
        columns_block=_COLUMNS,
        classes_block=classes_block,
        num_warps=8 if classes_block > 128 else 4,
        num_stages=3,
    )


def _split_weight(weight: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight less its mean over the classes, and the same as a sum of two bfloat16, padded."""
    num_classes, num_features = weight.shape
    padded_classes = triton.cdiv(num_classes, block) * block
    padded = triton.cdiv(num_features, _COLUMNS) * _COLUMNS
    high, low = (weight.new_empty(padded_classes, padded, dtype=torch.bfloat16) for _ in range(2))
    centred = torch.empty_like(weight)
    _split[(padded // 32,)](
        weight,
        centred,
        high,
        low,
        num_classes,
        num_features,
        padded_classes,
        padded,
        rows_block=min(block, 128),
        columns_block=32,
    )
    return centred, high, low


@triton.jit
def _split(  # type: ignore[no-untyped-def]
    weight,
    centred,
    high,
    low,
    num_classes,
    num_features,
    padded_classes,
    padded_features,
    rows_block: tl.constexpr,
    columns_block: tl.constexpr,
):
    column = tl.program_id(0) * columns_block + tl.arange(0, columns_block)
    total = tl.zeros((columns_block,), dtype=tl.float32)
    for first in range(0, num_classes, rows_block):
        row = first + tl.arange(0, rows_block)
        mask = (row < num_classes)[:, None] & (column < num_features)[None, :]
        place = row[:, None] * num_features + column[None, :]
        total += tl.sum(tl.load(weight + place, mask=mask, other=0.0), 0)
    mean = total / num_classes
    for first in range(0, padded_classes, rows_block):
        row = first + tl.arange(0, rows_block)
        mask = (row < num_classes)[:, None] & (column < num_features)[None, :]
        place = row[:, None] * num_features + column[None, :]
        value = tl.load(weight + place, mask=mask, other=0.0)
        value = tl.where(mask, value - mean[None, :], 0.0)
        tl.store(centred + place, value, mask=mask)
        upper = value.to(tl.bfloat16)
        place = row[:, None] * padded_features + column[None, :]
        tl.store(high + place, upper)
        tl.store(low + place, (value - upper.to(tl.float32)).to(tl.bfloat16))


@triton.jit
def _update_and_multiply(  # type: ignore[no-untyped-def]
    covariance,
    rows,
    start,
    batch_count,
    share,
    classes,
    slot,
    centred,
    high,
    low,
    partial,
    product,
    num_features,
    num_classes,
    class_blocks,
    padded_features,
    first_class,
    merge: tl.constexpr,
    multiply: tl.constexpr,
    precise: tl.constexpr,
    several: tl.constexpr,
    interpreted: tl.constexpr,
    rows_block: tl.constexpr,
    columns_block: tl.constexpr,
    classes_block: tl.constexpr,
):
    label = tl.load(classes + tl.program_id(1))
    if label < 0:
        return
    row_block = tl.program_id(0) // class_blocks  # neighbours share their rows of Σ
    row = row_block * rows_block + tl.arange(0, rows_block)
    row_inside = row < num_features
    other = (tl.program_id(0) % class_blocks) * classes_block + tl.arange(0, classes_block)
    tile_row = covariance + label.to(tl.int64) * num_features * num_features
    tile_row += row[:, None].to(tl.int64) * num_features
    if merge:
        number = tl.load(batch_count + label)
        keep = 1.0 - tl.load(share + label)
        line = rows + tl.load(start + label).to(tl.int64) * 2 * num_features
    own_class = label + first_class
    total = tl.zeros((rows_block, classes_block), dtype=tl.float32)
    own_tile = tl.zeros((rows_block, columns_block), dtype=tl.float32)  # its sum is Σ_c w_c
    for first in range(0, num_features, columns_block):
        column = first + tl.arange(0, columns_block)
        column_inside = column < num_features
        mask = row_inside[:, None] & column_inside[None, :]
        tile = tl.load(tile_row + column[None, :], mask=mask, other=0.0)
        if merge:  # Eq. 10
            tile *= keep
            for sample in range(number + 1):
                left = tl.load(line + sample * num_features + row, mask=row_inside, other=0.0)
                right = tl.load(
                    line + sample * num_features + column, mask=column_inside, other=0.0
                )
                tile += left[:, None] * right[None, :]
            tl.store(tile_row + column[None, :], tile, mask=mask)
        if multiply:
            place = other[None, :] * padded_features + column[:, None]
            upper = tile.to(tl.bfloat16)
            weight_upper = tl.load(high + place)
            total = _dot(upper, weight_upper, total, interpreted)
            if precise:
                lower = (tile - upper.to(tl.float32)).to(tl.bfloat16)
                total = _dot(lower, weight_upper, total, interpreted)
                total = _dot(upper, tl.load(low + place), total, interpreted)
            if several:
                own_weight = tl.load(
                    centred + own_class * num_features + column, mask=column_inside, other=0.0
                )
                own_tile += tile * own_weight[None, :]
    if multiply:
        place = tl.load(slot + label).to(tl.int64)
        if place >= 0:
            at_target = other[None, :] == own_class
            own = tl.sum(own_tile, 1) if several else tl.sum(tl.where(at_target, total, 0.0), 1)
            total = tl.where(at_target, 0.0, total - own[:, None])  # ((W − w_c) Σ_c)ᵀ
            mask = row_inside[:, None] & (other < num_classes)[None, :]
            element = other[None, :] * num_features + row[:, None]
            tl.store(
                product + place * num_classes * num_features + element,
                total.to(product.dtype.element_ty),
                mask=mask,
            )
            margin = tl.load(centred + element, mask=mask, other=0.0)
            own_weight = tl.load(
                centred + own_class * num_features + row, mask=row_inside, other=0.0
            )
            part = tl.sum(tl.where(mask, total * (margin - own_weight[:, None]), 0.0), 0)
            blocks = tl.cdiv(num_features, rows_block)
            tl.store(
                partial + (place * blocks + row_block) * num_classes + other,
                part,
                mask=other < num_classes,
            )


@triton.jit
def _dot(left, right, total, interpreted: tl.constexpr):  # type: ignore[no-untyped-def]
    if interpreted:  # Triton's interpreter takes bfloat16 for integers
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    else:
        total = tl.dot(left, right, total)
    return total


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
):
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
    tl.store(rows + sample * num_classes + column, total, mask=column < num_classes)


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]
    grad,
    index,
    classes,
    table,
    num_samples,
    num_classes,
    first_class,
    samples_block: tl.constexpr,
    block: tl.constexpr,
):
    label = tl.load(classes + tl.program_id(0))
    if label < 0:
        return
    column = tl.arange(0, block)
    total = tl.zeros((block,), dtype=tl.float32)
    for first in range(0, num_samples, samples_block):
        position = first + tl.arange(0, samples_block)
        value = tl.load(index + position, mask=position < num_samples, other=-1)
        match = value == label + first_class
        if tl.sum(match.to(tl.int32)) > 0:
            tile = tl.load(
                grad + position[:, None].to(tl.int64) * num_classes + column[None, :],
                mask=match[:, None] & (column < num_classes)[None, :],
                other=0.0,
            )
            total += tl.sum(tile, 0)
    place = tl.program_id(0).to(tl.int64) * num_classes + column
    tl.store(table + place, 2.0 * total, mask=column < num_classes)


@triton.jit
def _weight_gradient(  # type: ignore[no-untyped-def]
    table,
    product,
    slot,
    classes,
    result,
    slots,
    num_slots,
    num_classes,
    num_features,
    first_class,
    rows_block: tl.constexpr,
    features_block: tl.constexpr,
):
    other = tl.program_id(0)
    column = tl.program_id(1) * features_block + tl.arange(0, features_block)
    inside = column < num_features
    total = tl.zeros((features_block,), dtype=tl.float32)
    for first in range(0, slots, rows_block):  # row j of the gradient: from the slots of all c
        place = first + tl.arange(0, rows_block)
        used = tl.load(classes + place, mask=place < slots, other=-1) >= 0
        line = place.to(tl.int64) * num_classes + other
        factor = tl.load(table + line, mask=used, other=0.0)
        tile = tl.load(
            product + line[:, None] * num_features + column[None, :],
            mask=used[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.sum(tile.to(tl.float32) * factor[:, None], 0)
    label = other - first_class
    if (label >= 0) & (label < num_slots):
        own = tl.load(slot + label).to(tl.int64)
        if own >= 0:  # and row c: from all j of its slot
            for first in range(0, num_classes, rows_block):
                row = first + tl.arange(0, rows_block)
                line = own * num_classes + row
                factor = tl.load(table + line, mask=row < num_classes, other=0.0)
                tile = tl.load(
                    product + line[:, None] * num_features + column[None, :],
                    mask=(row < num_classes)[:, None] & inside[None, :],
                    other=0.0,
                )
                total -= tl.sum(tile.to(tl.float32) * factor[:, None], 0)
    tl.store(result + other.to(tl.int64) * num_features + column, total, mask=inside)
