"""Products of Eq. 4 for more than 256 classes, and the gradient of the weights.

Here the products W Σ_c take most of the time. The update writes bfloat16 copies of the covariances,
some classes at a time, and cuBLAS multiplies them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isda.kernels import Products
from isda.kernels.class_statistics import Classes
from isda.kernels.covariance_update import launch_update
from isda.kernels.sizes import blocks, power_of_2
from isda.kernels.split_weight import split_weight

__all__ = ["gradient_of_copies", "multiply_copies"]

_COPIED = 2**28  # elements of covariances to copy at a time


def multiply_copies(
    covariance: Tensor,
    found: Classes,
    weight: Tensor,
    result: Products,
    precision: str,
    count: Tensor | None,
) -> None:
    """Products of many classes with cuBLAS; if a count is passed, the batch is merged first."""
    num_classes, num_features = weight.shape
    centred, high, low = split_weight(weight, 16)
    high, low = high[:num_classes, :num_features], low[:num_classes, :num_features]
    parts = 3 if precision == "high" else 1
    factor = high if parts == 1 else torch.cat([high, high, low], 1)  # to match Σ's high, low, high
    factor = factor.contiguous()
    chunk = max(_COPIED // (parts * num_features**2), 1)
    room = weight.new_empty(
        min(chunk, len(found.classes)),
        parts * num_features,
        num_features,
        dtype=torch.bfloat16,
    )
    chunks = (
        tensor.split(chunk)
        for tensor in (found.classes, result.product, result.target_product, result.partial)
    )
    for classes, product, target_product, partial in zip(*chunks, strict=True):
        copies = room[: len(classes)]
        launch_update(covariance, found, classes, count, copies=copies)
        _matmul(factor, copies, product)
        _launch_squares(product, centred, classes, target_product, partial)


def _launch_squares(
    product: Tensor,
    centred: Tensor,
    classes: Tensor,
    target_product: Tensor,
    partial: Tensor,
) -> None:
    """Quadratic term from the products W Σ_c, and the rows w_c Σ_c."""
    slots, num_classes, num_features = product.shape
    _squares[(slots, blocks(num_classes, 8))](
        product,
        centred,
        classes,
        target_product,
        partial,
        num_classes,
        num_features,
        centred.shape[1],
        classes_block=8,
        features_block=min(power_of_2(num_features), 256),
    )


def _matmul(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Products (C, K) by (P, K, A) of bfloat16 into (P, C, A), accumulated in float32."""
    if not left.is_cuda:  # Triton's interpreter
        out.copy_(left.float() @ right.float())
    elif out.dtype == torch.bfloat16:
        torch.matmul(left, right, out=out)
    else:
        torch.bmm(left.expand(len(right), *left.shape), right, torch.float32, out=out)


def gradient_of_copies(
    factors: Tensor, product: Tensor, target_product: Tensor, classes: Tensor
) -> Tensor:
    """Gradient of the weight in one pass over the products, which do not fit in the cache.

    Args:
        factors: 2 G_cj of each slot, and 0 for j = c.
        product: see ``kernels.Products``, also for the following arguments.
        target_product: (P, A).
        classes: (P,).

    Shape:
        factors (P, C), product (P, C, A); output (C, A).
    """
    result = factors.new_empty(product.shape[1:])
    slots, num_classes, num_features = product.shape
    # one warp holds whole columns of a tile, so that it sums over rows without the other warps
    classes_block, features_block = 8, 256
    parts = blocks(num_classes, classes_block)
    partial = result.new_empty(parts, slots, num_features)
    _both_sums[(parts, blocks(num_features, features_block))](
        factors,
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
    )
    _own_rows[(slots, blocks(num_features, 512))](
        factors,
        partial,
        target_product,
        classes,
        result,
        parts,
        num_classes,
        num_features,
        classes_block=power_of_2(num_classes),
        parts_block=16,
        features_block=512,
    )
    # (W − w_c) Σ_c = W Σ_c − w_c Σ_c
    return torch.addmm(result, factors.T, target_product, alpha=-1)


@triton.jit
def _squares(  # type: ignore[no-untyped-def]
    product,
    centred,
    classes,
    target_product,
    partial,
    num_classes,
    num_features,
    padded_features,
    classes_block: tl.constexpr,
    features_block: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    label = tl.load(classes + place)
    other = tl.program_id(1) * classes_block + tl.arange(0, classes_block)
    total = tl.zeros((classes_block, features_block), dtype=tl.float32)
    for first in range(0, num_features, features_block):
        column = first + tl.arange(0, features_block)
        inside = column < num_features
        if label < 0:
            target_row = tl.zeros((features_block,), dtype=tl.float32)
        else:
            line = (place * num_classes + label) * num_features
            target_row = tl.load(product + line + column, mask=inside, other=0.0).to(tl.float32)
            own_weight = tl.load(centred + label * padded_features + column, mask=inside, other=0.0)
            mask = (other < num_classes)[:, None] & inside[None, :]
            element = other[:, None] * num_features + column[None, :]
            tile = tl.load(
                product + place * num_classes * num_features + element, mask=mask, other=0.0
            )
            element = other[:, None] * padded_features + column[None, :]
            margin = tl.load(centred + element, mask=mask, other=0.0) - own_weight[None, :]
            tile = tile.to(tl.float32) - target_row[None, :]
            total += tl.where(mask, tile * margin, 0.0)
        if tl.program_id(1) == 0:
            tl.store(target_product + place * num_features + column, target_row, mask=inside)
    if label >= 0:
        part = tl.sum(total, 1)
        tl.store(partial + place * num_classes + other, part, mask=other < num_classes)


@triton.jit
def _both_sums(  # type: ignore[no-untyped-def]
    factors,
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
):
    """For some rows j of the gradient, sum over the slots; for all slots, sum over these j."""
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
        factor = tl.load(factors + line, mask=line_used, other=0.0)
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
    factors,
    partial,
    target_product,
    classes,
    result,
    parts,
    num_classes,
    num_features,
    classes_block: tl.constexpr,
    parts_block: tl.constexpr,
    features_block: tl.constexpr,
):
    """Subtract from row c of the gradient what its slot has added to the rows j."""
    place = tl.program_id(0).to(tl.int64)
    label = tl.load(classes + place)
    if label < 0:
        return
    column = tl.program_id(1) * features_block + tl.arange(0, features_block)
    inside = column < num_features
    other = tl.arange(0, classes_block)
    factor = tl.load(factors + place * num_classes + other, mask=other < num_classes, other=0.0)
    target_row = tl.load(target_product + place * num_features + column, mask=inside, other=0.0)
    total = -tl.sum(factor) * target_row
    for first in range(0, parts, parts_block):
        part = first + tl.arange(0, parts_block)
        piece = part * tl.num_programs(0) + place
        tile = tl.load(
            partial + piece[:, None] * num_features + column[None, :],
            mask=(part < parts)[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.sum(tile, 0)
    line = result + label.to(tl.int64) * num_features + column
    tl.store(line, tl.load(line, mask=inside, other=0.0) - total, mask=inside)
