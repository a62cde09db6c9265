"""Update of full covariances (Eq. 10).

Covariances are symmetric: one half is read, both are written. Optionally, the update also writes
copies in bfloat16, which ``many_classes.py`` multiplies.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from isda.kernels.class_statistics import Classes, class_statistics
from isda.kernels.sizes import blocks, round_up

__all__ = [
    "has_regular_rows",
    "launch_update",
    "merge_rows",
    "require_regular_rows",
    "row_layout",
    "row_pointers",
    "update_",
]

_TILE = 64  # rows and columns of a covariance that a program holds


def update_(moments: Sequence[Tensor], features: Tensor, target: Tensor, decay: float) -> None:
    """See ``isda.kernels.plain.update_``."""
    count, _, covariance = moments
    full = covariance.dim() == 3
    if full:
        require_regular_rows(covariance)
    found = class_statistics(target, len(count), moments=moments, features=features, decay=decay)
    if full:
        launch_update(covariance, found, found.classes, count)


def launch_update(
    covariance: Tensor,
    found: Classes,
    classes: Tensor,
    count: Tensor | None,
    *,
    copies: Tensor | None = None,
) -> None:
    """Merge the batch into some covariances, copy them to bfloat16, or both.

    Args:
        covariance: covariances of all classes.
        found: statistics of the batch.
        classes: classes to update; negative ones are skipped.
        count: counts of all classes, also updated; None for no merge.
        copies: where to write the copies; None for no copies.
    """
    num_features = covariance.shape[1]
    if not len(classes):
        return
    side = blocks(num_features, _TILE)
    tiles = side * (side + 1) // 2
    _update[(tiles * len(classes),)](
        covariance,
        found.share if count is None else count,
        found.rows,
        found.start,
        found.batch_count,
        found.share,
        classes,
        found.rows if copies is None else copies,
        tiles,
        num_features,
        *row_layout(covariance),
        found.rows.shape[1],
        merge=count is not None,
        many=len(found.rows) > 32 * len(found.classes),  # enough for tl.dot to pay off
        parts=0 if copies is None else copies.shape[1] // num_features,
        block=_TILE,
    )


def has_regular_rows(covariance: Tensor) -> bool:
    """Whether all rows of all matrices are the same distance apart."""
    _, num_features, _ = covariance.shape
    return covariance.stride(2) == 1 and covariance.stride(0) == num_features * covariance.stride(1)


def require_regular_rows(covariance: Tensor) -> None:
    if not has_regular_rows(covariance):
        raise ValueError(
            "covariance must be contiguous, or padded along its last dimension only, got strides "
            f"{covariance.stride()}"
        )


def row_layout(matrices: Tensor) -> tuple[int, int]:
    """Distance from one row to the next, and how many elements of a row may be accessed.

    Padded rows, such as those of ``isda.FullCovariance``, can be accessed including their padding,
    unless that of the last row is missing, for example in a copy made by torch.compile.
    """
    number, rows, num_features = matrices.shape
    stride = matrices.stride(1)
    size = matrices.untyped_storage().nbytes() // matrices.element_size()
    padded = (
        stride == round_up(num_features, 16)
        and size >= matrices.storage_offset() + number * rows * stride
    )
    return stride, stride if padded else num_features


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    covariance,
    count,
    rows,
    start,
    batch_count,
    share,
    classes,
    copies,
    tiles,
    num_features,
    stride,
    width,
    rows_stride,
    merge: tl.constexpr,
    many: tl.constexpr,
    parts: tl.constexpr,
    block: tl.constexpr,
):
    """Read a tile on or below the diagonal; write it and its mirror above."""
    place = tl.program_id(0) // tiles
    label = tl.load(classes + place)
    if label < 0:
        return
    # tiles are numbered row by row: 0; 1, 2; 3, 4, 5; …
    tile_number = tl.program_id(0) % tiles
    below = ((tl.sqrt(8.0 * tile_number + 1.0) - 1.0) / 2.0).to(tl.int32)
    below = tl.where(
        below * (below + 1) // 2 > tile_number, below - 1, below
    )  # in case of rounding
    below = tl.where((below + 1) * (below + 2) // 2 <= tile_number, below + 1, below)
    beside = tile_number - below * (below + 1) // 2
    row = below * block + tl.arange(0, block)
    column = beside * block + tl.arange(0, block)
    tile_row = row_pointers(covariance, label, row, num_features, stride)
    mask = (row < num_features)[:, None] & (column < width)[None, :]
    tile = tl.load(tile_row + column[None, :], mask=mask, other=0.0)
    if merge:
        number = tl.load(batch_count + label)
        if tile_number == 0:
            tl.store(count + label, tl.load(count + label) + number)  # Eq. 11
        keep = 1.0 - tl.load(share + label)
        line = rows + tl.load(start + label).to(tl.int64) * rows_stride
        tile = merge_rows(tile * keep, line, 0, number + 1, row, column, rows_stride, many)
        tl.store(tile_row + column[None, :], tile, mask=mask)  # Eq. 10
    part = tl.cast(num_features, tl.int64) * num_features
    copy = copies + place * parts * part
    if parts > 0:
        mask = (row < num_features)[:, None] & (column < num_features)[None, :]
        copy_row = copy + row[:, None].to(tl.int64) * num_features
        _store_parts(copy_row + column[None, :], tile, mask, part, parts)
    if beside < below:
        mirror = tl.trans(tile)
        if merge:
            mask = (column < num_features)[:, None] & (row < width)[None, :]
            mirror_row = row_pointers(covariance, label, column, num_features, stride)
            tl.store(mirror_row + row[None, :], mirror, mask=mask)
        if parts > 0:
            mask = (column < num_features)[:, None] & (row < num_features)[None, :]
            mirror_row = copy + column[:, None].to(tl.int64) * num_features
            _store_parts(mirror_row + row[None, :], mirror, mask, part, parts)


@triton.jit
def _store_parts(  # type: ignore[no-untyped-def]
    place, tile, mask, part, parts: tl.constexpr
):
    """Store a tile in bfloat16 and, with three parts, the remainder and the tile again."""
    upper = tile.to(tl.bfloat16)
    tl.store(place, upper, mask=mask)
    if parts == 3:
        lower = (tile - upper.to(tl.float32)).to(tl.bfloat16)
        tl.store(place + part, lower, mask=mask)
        tl.store(place + 2 * part, upper, mask=mask)


@triton.jit
def row_pointers(covariance, label, row, num_features, stride):  # type: ignore[no-untyped-def]
    return covariance + (label.to(tl.int64) * num_features + row[:, None]) * stride


@triton.jit
def merge_rows(  # type: ignore[no-untyped-def]
    tile, line, first, last, row, column, stride, many: tl.constexpr
):
    """Add the outer products of the batch rows ``[first, last)`` to a tile."""
    if many:  # sixteen at a time
        for chunk in range(first, last, 16):
            sample = chunk + tl.arange(0, 16)
            place = line + sample.to(tl.int64) * stride
            left_mask = (row < stride)[:, None] & (sample < last)[None, :]
            left = tl.load(place[None, :] + row[:, None], mask=left_mask, other=0.0)
            right_mask = (sample < last)[:, None] & (column < stride)[None, :]
            right = tl.load(place[:, None] + column[None, :], mask=right_mask, other=0.0)
            tile = tl.dot(left, right, tile, input_precision="ieee")
    else:
        for sample in range(first, last):
            place = line + tl.cast(sample, tl.int64) * stride
            left = tl.load(place + row, mask=row < stride, other=0.0)
            right = tl.load(place + column, mask=column < stride, other=0.0)
            tile += left[:, None] * right[None, :]
    return tile
