"""Triton kernels for CUDA, chosen automatically, with the results of ``functional.py``.

``update_full`` merges a batch into the covariances of its classes: each touched Σ is read once and
written once, absent classes cost one exit, and nothing waits for the host, so that the step can be
captured in a CUDA graph. The environment variable ``ISDA_TRITON=0`` turns the kernels off.
"""

import os

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without Triton
    triton = None

__all__ = ["update_full", "usable"]

_FEATURES = 64  # features per side of a tile
_SAMPLES = 16  # samples per product, the least that tl.dot takes


def usable(tensor: Tensor) -> bool:
    """Whether the kernels can run on this tensor."""
    return (
        triton is not None
        and os.environ.get("ISDA_TRITON", "1") != "0"
        and tensor.is_cuda
        and tensor.dtype == torch.float32
        and torch.version.hip is None
    )


def update_full(
    mean: Tensor,
    covariance: Tensor,
    features: Tensor,
    target: Tensor,
    batch_count: Tensor,
    share: Tensor,
) -> None:
    """Merge a batch into means and covariances in place (Eq. 9 and 10).

    Args:
        mean: of each class.
        covariance: of each class.
        features: of the batch.
        target: class indices; samples with a negative target are left out.
        batch_count: number of samples of each class in the batch.
        share: weight of the batch in the merged moments of each class.

    Shape:
        mean (C, A), covariance (C, A, A), features (N, A), target (N,), batch_count (C,), share
        (C,).
    """
    if not len(target):
        return
    num_classes, num_features = mean.shape
    features = features.to(torch.float32).contiguous()
    order = target.argsort(stable=True)
    stop = (batch_count.cumsum(0) + (target < 0).sum()).contiguous()
    trash = torch.where(target < 0, num_classes, target)
    total = mean.new_zeros(num_classes + 1, num_features).index_add_(0, trash, features)[:-1]
    batch_mean = total / batch_count.clamp(min=1)[:, None]
    shift = torch.where(batch_count[:, None] > 0, batch_mean - mean, 0.0)
    slots = min(len(target), num_classes)
    present = (batch_count > 0).to(torch.uint8).argsort(descending=True, stable=True)[:slots]
    tiles = triton.cdiv(num_features, _FEATURES)
    _update_full[(tiles * tiles, slots)](
        covariance,
        features,
        order,
        batch_mean,
        shift,
        batch_count,
        stop,
        share,
        present,
        num_features,
        tiles,
        features_block=_FEATURES,
        samples_block=_SAMPLES,
    )
    mean.add_(shift * share[:, None])


if triton is not None:

    @triton.jit
    def _update_full(  # type: ignore[no-untyped-def]
        covariance,
        features,
        order,
        batch_mean,
        shift,
        batch_count,
        stop,
        share,
        present,
        num_features,
        tiles,
        features_block: tl.constexpr,
        samples_block: tl.constexpr,
    ):
        index = tl.load(present + tl.program_id(1)).to(tl.int64)
        number = tl.load(batch_count + index)
        if number == 0:
            return
        last = tl.load(stop + index)
        tile = tl.program_id(0)
        row = (tile // tiles) * features_block + tl.arange(0, features_block)
        column = (tile % tiles) * features_block + tl.arange(0, features_block)
        row_inside = row < num_features
        column_inside = column < num_features
        line = index * num_features
        row_mean = tl.load(batch_mean + line + row, mask=row_inside, other=0.0)
        column_mean = tl.load(batch_mean + line + column, mask=column_inside, other=0.0)
        total = tl.zeros((features_block, features_block), dtype=tl.float32)
        for first in range(last - number, last, samples_block):
            position = first + tl.arange(0, samples_block)
            inside = position < last
            sample = tl.load(order + position, mask=inside, other=0) * num_features
            left_mask = row_inside[:, None] & inside[None, :]
            left = tl.load(features + sample[None, :] + row[:, None], mask=left_mask, other=0.0)
            left = tl.where(left_mask, left - row_mean[:, None], 0.0)
            right_mask = inside[:, None] & column_inside[None, :]
            right = tl.load(
                features + sample[:, None] + column[None, :], mask=right_mask, other=0.0
            )
            right = tl.where(right_mask, right - column_mean[None, :], 0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        row_shift = tl.load(shift + line + row, mask=row_inside, other=0.0)
        column_shift = tl.load(shift + line + column, mask=column_inside, other=0.0)
        weight = tl.load(share + index)
        place = covariance + line * num_features + row[:, None] * num_features + column[None, :]
        mask = row_inside[:, None] & column_inside[None, :]
        old = tl.load(place, mask=mask, other=0.0)
        between = weight * (1.0 - weight) * row_shift[:, None] * column_shift[None, :]
        new = (1.0 - weight) * old + (weight / number.to(tl.float32)) * total + between
        tl.store(place, new, mask=mask)
