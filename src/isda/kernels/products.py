"""Products (W − w_c) Σ_c of Eq. 4 for the classes of a batch, fused with the update of Σ_c.

For up to 256 classes, one kernel does both. A program holds a block of rows of one Σ_c and iterates
over the columns. Every tile is read once, merged with the batch (Eq. 10), written once, and
multiplied with the weights of all classes while it is in registers. (Classes with many samples are
first merged by the update kernel.) For more classes, see ``many_classes.py``.

Products run on tensor cores in bfloat16. With precision "high", each float32 is split into two
bfloat16 values (relative error of a product about 2⁻¹⁶); with "medium", it is rounded to one (2⁻⁸).
Products are accumulated in float32 and, with "medium", stored in bfloat16. Statistics are always
float32.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isda.kernels import Products
from isda.kernels.class_statistics import Classes, class_statistics
from isda.kernels.covariance_update import (
    has_regular_rows,
    launch_update,
    merge_rows,
    require_regular_rows,
    row_layout,
    row_pointers,
)
from isda.kernels.many_classes import multiply_copies
from isda.kernels.sizes import blocks, power_of_2, round_up
from isda.kernels.split_weight import COLUMNS, split_weight

__all__ = ["empty_products", "multiply", "update_and_multiply_"]

_CLASSES = 256  # maximum number of classes for the fused kernel
_BATCH_ROWS = 4  # rows of a class that the fused kernel merges in its main loop


def multiply(covariance: Tensor, weight: Tensor, target: Tensor, precision: str) -> Products:
    """See ``isda.kernels.plain.multiply``."""
    found = class_statistics(target, len(covariance))
    covariance = covariance if has_regular_rows(covariance) else covariance.contiguous()
    return _multiply(covariance, found, weight, precision, None)


def update_and_multiply_(
    moments: Sequence[Tensor],
    features: Tensor,
    target: Tensor,
    weight: Tensor,
    decay: float,
    precision: str,
) -> Products:
    """See ``isda.kernels.plain.update_and_multiply_``."""
    count, _, covariance = moments
    require_regular_rows(covariance)
    found = class_statistics(target, len(count), moments=moments, features=features, decay=decay)
    return _multiply(covariance, found, weight, precision, count)


def empty_products(weight: Tensor, slots: int, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised ``Products.partial``, ``Products.product`` and ``Products.target_product``."""
    num_classes, num_features = weight.shape
    fused = num_classes <= _CLASSES
    parts = blocks(num_features, _tiles(num_features, precision).rows) if fused else 1
    dtype = torch.float32 if precision == "high" else torch.bfloat16
    # rows that start at multiples of 32 bytes allow vector loads and stores
    width = round_up(num_features, 16) if fused else num_features
    product = weight.new_empty(slots, num_classes, width, dtype=dtype)[..., :num_features]
    return (
        weight.new_empty(slots, parts, num_classes),
        product,
        weight.new_empty(0 if fused else slots, num_features),
    )


class _Tiles(NamedTuple):
    """Tile sizes of the fused kernel.

    Fewer rows mean more programs, more rows mean fewer reads of the weights; more stages mean that
    fewer programs fit on a multiprocessor.
    """

    rows: int
    columns: int
    warps: int
    stages: int  # maximum number of tiles in flight


def _tiles(num_features: int, precision: str) -> _Tiles:
    """The fastest tiles on an H200."""
    if precision == "high":
        return _Tiles(64, 64, 8, 2) if num_features >= 512 else _Tiles(32, 32, 4, 3)
    if num_features > 1024:
        return _Tiles(64, 64, 8, 5)
    return _Tiles(32, 64, 4, 3 if num_features > 384 else 2)


def _multiply(
    covariance: Tensor,
    found: Classes,
    weight: Tensor,
    precision: str,
    count: Tensor | None,
) -> Products:
    """Products for the classes of the batch; if a count is passed, the batch is merged first."""
    weight = weight.contiguous()
    empty = empty_products(weight, len(found.classes), precision)
    result = Products(*empty, found.slot, found.classes)
    if not len(found.classes):
        return result
    if len(weight) > _CLASSES:
        multiply_copies(covariance, found, weight, result, precision, count)
        return result
    if count is not None and len(found.rows) > (_BATCH_ROWS - 1) * len(weight):
        launch_update(covariance, found, found.classes, count)
        count = None
    num_classes, num_features = weight.shape
    precise, tiles = precision == "high", _tiles(num_features, precision)
    classes_block = max(16, power_of_2(num_classes))
    centred, high, low = split_weight(weight, classes_block)
    stride, width = row_layout(covariance)
    room = _shared_memory(covariance.device)
    column = 4 * tiles.rows + (4 if precise else 2) * classes_block  # bytes
    # unaligned rows cannot be copied asynchronously, and a single tile needs no pipeline
    if width % 16 or num_features <= COLUMNS:
        tiles = tiles._replace(columns=COLUMNS, stages=1)
    elif 2 * column * tiles.columns > room:  # narrower tiles, so that two fit
        tiles = tiles._replace(columns=32)
    stages = min(tiles.stages, room // (column * tiles.columns))
    _update_and_multiply[(blocks(num_features, tiles.rows), len(found.classes))](
        covariance,
        found.share if count is None else count,
        found.rows,
        found.start,
        found.batch_count,
        found.share,
        found.classes,
        found.slot,
        centred,
        high,
        low,
        result.partial,
        result.product,
        num_features,
        stride,
        width,
        found.rows.shape[1],
        num_classes,
        high.shape[1],
        result.product.stride(1),
        merge=count is not None,
        padded=width != num_features,
        precise=precise,
        interpreted=not covariance.is_cuda,
        batch_rows=_BATCH_ROWS,
        rows_block=tiles.rows,
        columns_block=tiles.columns,
        classes_block=classes_block,
        num_warps=8 if classes_block > 128 else tiles.warps,
        num_stages=max(stages, 1),
    )
    return result


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes for tiles in flight; the rest is for the tiles that are being multiplied."""
    if device.type != "cuda":  # Triton's interpreter
        return 2**20
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 32 * 1024


@triton.jit
def _update_and_multiply(  # type: ignore[no-untyped-def]
    covariance,
    count,
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
    stride,
    width,
    rows_stride,
    num_classes,
    padded_features,
    product_stride,
    merge: tl.constexpr,
    padded: tl.constexpr,
    precise: tl.constexpr,
    interpreted: tl.constexpr,
    batch_rows: tl.constexpr,
    rows_block: tl.constexpr,
    columns_block: tl.constexpr,
    classes_block: tl.constexpr,
):
    label = tl.load(classes + tl.program_id(1))
    if label < 0:
        return
    row = tl.program_id(0) * rows_block + tl.arange(0, rows_block)
    row_inside = row < num_features
    other = tl.arange(0, classes_block)
    tile_row = row_pointers(covariance, label, row, num_features, stride)
    if merge:
        number = tl.load(batch_count + label)
        if tl.program_id(0) == 0:
            tl.store(count + label, tl.load(count + label) + number)  # Eq. 11
        keep = 1.0 - tl.load(share + label)
        line = rows + tl.load(start + label).to(tl.int64) * rows_stride
        if number + 1 > batch_rows:  # rare: merge the surplus first, the main loop unrolls the rest
            for first in range(0, num_features, columns_block):
                column = first + tl.arange(0, columns_block)
                mask = row_inside[:, None] & (column < width)[None, :]
                tile = tl.load(tile_row + column[None, :], mask=mask, other=0.0) * keep
                tile = merge_rows(
                    tile, line, batch_rows, number + 1, row, column, rows_stride, False
                )
                tl.store(tile_row + column[None, :], tile, mask=mask)
            keep = 1.0
            tl.debug_barrier()
        left = ()
        for sample in tl.static_range(batch_rows):
            left += (_batch_row(line, sample, number, row, rows_stride),)  # type: ignore[assignment]
    total = tl.zeros((classes_block, rows_block), dtype=tl.float32)
    for first in range(0, num_features, columns_block):
        column = first + tl.arange(0, columns_block)
        mask = row_inside[:, None] & (column < width)[None, :]
        tile = tl.load(tile_row + column[None, :], mask=mask, other=0.0)
        if merge:
            tile *= keep
            for sample in tl.static_range(batch_rows):
                right = _batch_row(line, sample, number, column, rows_stride)
                tile += left[sample][:, None] * right[None, :]
            tl.store(tile_row + column[None, :], tile, mask=mask)  # Eq. 10
        if padded:  # the padding may hold NaN
            tile = tl.where((column < num_features)[None, :], tile, 0.0)
        place = other[:, None] * padded_features + column[None, :]
        upper = tile.to(tl.bfloat16)
        weight_upper = tl.load(high + place)
        total = _dot(weight_upper, tl.trans(upper), total, interpreted)
        if precise:
            lower = (tile - upper.to(tl.float32)).to(tl.bfloat16)
            total = _dot(weight_upper, tl.trans(lower), total, interpreted)
            total = _dot(tl.load(low + place), tl.trans(upper), total, interpreted)
    place = tl.load(slot + label).to(tl.int64)
    if place >= 0:
        at_target = other[:, None] == label
        target_row = tl.sum(tl.where(at_target, total, 0.0), 0)
        total = total - target_row[None, :]  # (W − w_c) Σ_c, exactly 0 for c
        # including the padding of the rows, whose products are 0
        mask = (other < num_classes)[:, None] & (row < product_stride)[None, :]
        element = other[:, None] * product_stride + row[None, :]
        tl.store(product + place * num_classes * product_stride + element, total, mask=mask)
        margin = tl.load(
            centred + other[:, None] * padded_features + row[None, :], mask=mask, other=0.0
        )
        own_weight = tl.load(centred + label * padded_features + row)
        part = tl.sum(tl.where(mask, total * (margin - own_weight[None, :]), 0.0), 1)
        piece = place * tl.cdiv(num_features, rows_block) + tl.program_id(0)
        tl.store(partial + piece * num_classes + other, part, mask=other < num_classes)


@triton.jit
def _batch_row(line, sample, number, element, rows_stride):  # type: ignore[no-untyped-def]
    """Elements of a batch row of a class, 0 if the class has fewer rows."""
    inside = element < tl.where(number >= sample, rows_stride, 0)
    return tl.load(line + sample * rows_stride + element, mask=inside, other=0.0)


@triton.jit
def _dot(left, right, total, interpreted: tl.constexpr):  # type: ignore[no-untyped-def]
    if interpreted:  # Triton's interpreter treats bfloat16 as integers
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    else:
        total = tl.dot(left, right, total)
    return total
