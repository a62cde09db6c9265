"""The centred weights split into two bfloat16 terms, for products on tensor cores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isda.kernels.sizes import power_of_2, round_up

__all__ = ["COLUMNS", "split_weight"]

COLUMNS = 64  # maximum columns of a covariance in a tile; weights are padded to a multiple


def split_weight(weight: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight minus its mean over the classes, also split into two bfloat16 terms, padded."""
    num_classes, num_features = weight.shape
    padded_classes, padded = round_up(num_classes, block), round_up(num_features, COLUMNS)
    high, low = (weight.new_empty(padded_classes, padded, dtype=torch.bfloat16) for _ in range(2))
    centred = weight.new_empty(num_classes, padded)
    _split[(padded // 32,)](
        weight,
        centred,
        high,
        low,
        num_classes,
        num_features,
        padded_classes,
        padded,
        rows_block=min(max(power_of_2(num_classes), 16), 128),
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
        upper = value.to(tl.bfloat16)
        place = row[:, None] * padded_features + column[None, :]
        tl.store(centred + place, value, mask=(row < num_classes)[:, None])
        mask = (row < padded_classes)[:, None]
        tl.store(high + place, upper, mask=mask)
        tl.store(low + place, (value - upper.to(tl.float32)).to(tl.bfloat16), mask=mask)
