"""The classes of a batch and their statistics (Eq. 9, 11, and 10 for variances)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isda.kernels.sizes import blocks, power_of_2, round_up

__all__ = ["Classes", "class_statistics"]

_TILE = 8192  # elements that a program holds at a time
_MANY = 2048  # more samples than this, such as pixels, are first sorted by class


class Classes(NamedTuple):
    """The classes of a batch in slots, and the inputs for updating their covariances.

    With N >= C, the slot of a class is its index; with N < C, it is the position of its first
    sample when sorted by class. In both cases, there are P = min(N, C) slots.
    """

    classes: Tensor  # (P,) class in each slot, −1 in unused ones
    slot: Tensor  # (C,) slot of each class, −1 for absent ones
    batch_count: Tensor  # (C,)
    start: Tensor  # (C,) first row of each class
    share: Tensor  # (C,) weight of the batch in the merged moments
    rows: Tensor  # (N + P, A') rows of class c from its start: Σ_new = (1 − share) Σ + rowsᵀ rows


def class_statistics(
    target: Tensor,
    num_classes: int,
    *,
    moments: Sequence[Tensor] | None = None,
    features: Tensor | None = None,
    decay: float = 1.0,
) -> Classes:
    """Find the classes of a batch and, with moments and features, merge it into the means.

    With variances, all moments are updated. With covariances, the covariance update also updates
    the count; the rows that it needs are written here, padded to A', a multiple of 16.

    Args:
        target: class indices of the batch; negative for skipped samples.
        num_classes: number of classes.
        moments: statistics so far, updated in place.
        features: features of the batch.
        decay: see ``isda.functional.merge_moments``.

    Shape:
        target (N,), features (N, A); moments: see ``isda.functional.Moments``.
    """
    samples, device = len(target), target.device
    slots = min(samples, num_classes)
    merge = moments is not None and features is not None
    diagonal = moments is not None and moments[2].dim() == 2
    width = features.shape[1] if features is not None else 1

    def integers(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    result = Classes(
        integers(slots),
        integers(num_classes),
        integers(num_classes),
        integers(num_classes),
        floats(num_classes),
        floats(samples + slots if merge and not diagonal else 0, round_up(width, 16)),
    )
    if not samples:
        result.slot.fill_(-1)
        result.batch_count.zero_()
        return result
    unused = result.share
    count, mean, variance = (unused, unused, unused) if moments is None else moments
    ordered = merge and samples > _MANY
    # narrow blocks, so that there are many programs that each read a moderate number of samples
    features_block = 64 if width <= 128 else 128 if num_classes * width <= 2**18 else 512
    _class_statistics[(num_classes, blocks(width, features_block))](
        target.contiguous(),
        target.argsort(stable=True) if ordered else unused,
        features.contiguous() if features is not None else unused,
        count,
        mean,
        variance,
        *result,
        samples,
        num_classes,
        width,
        result.rows.shape[1],
        slots,
        math.log(decay),
        merge=merge,
        diagonal=diagonal,
        fade=decay != 1.0,
        ordered=ordered,
        scan_block=min(power_of_2(samples), 1024),
        samples_block=min(_TILE // features_block, max(power_of_2(samples), 16)),
        features_block=features_block,
    )
    if diagonal:
        count += result.batch_count
    return result


@triton.jit
def _class_statistics(  # type: ignore[no-untyped-def]
    target,
    order,
    features,
    count,
    mean,
    variance,
    classes,
    slot,
    batch_count,
    start,
    share,
    rows,
    num_samples,
    num_classes,
    num_features,
    padded_features,
    slots,
    log_decay,
    merge: tl.constexpr,
    diagonal: tl.constexpr,
    fade: tl.constexpr,
    ordered: tl.constexpr,
    scan_block: tl.constexpr,
    samples_block: tl.constexpr,
    features_block: tl.constexpr,
):
    """One program for each class and each block of features."""
    label = tl.program_id(0)
    number = 0  # samples of this class
    before = 0  # samples of the classes before it
    total = 0  # samples of all classes
    begin = 0  # range of samples to be read for this class
    end = num_samples
    for first in range(0, num_samples, scan_block):
        position = first + tl.arange(0, scan_block)
        inside = position < num_samples
        value = tl.load(target + position, mask=inside, other=-1)
        if ordered:
            begin += tl.sum((inside & (value < label)).to(tl.int32))
        number += tl.sum((value == label).to(tl.int32))
        before += tl.sum(((value >= 0) & (value < label)).to(tl.int32))
        total += tl.sum(((value >= 0) & (value < num_classes)).to(tl.int32))
    if ordered:
        end = begin + number
    first_row = before + (label if slots == num_classes else before)
    if tl.program_id(1) == 0:
        tl.store(batch_count + label, number)
        tl.store(start + label, first_row)
        place = label if slots == num_classes else before
        tl.store(slot + label, tl.where(number > 0, place, -1))
        _fill_slots(classes, label, number, before, total, num_classes, slots, scan_block)
    if not merge:
        return
    if number == 0:
        return
    column = tl.program_id(1) * features_block + tl.arange(0, features_block)
    inside = column < num_features
    line = label.to(tl.int64) * num_features + column
    # loaded before the loop, so that the latencies overlap
    seen = tl.load(count + label) + number
    old_mean = tl.load(mean + line, mask=inside, other=0.0)
    summed = tl.zeros((features_block,), dtype=tl.float32)
    for first in range(begin, end, samples_block):
        position = first + tl.arange(0, samples_block)
        sample = _sample(order, position, end, ordered)
        value = tl.load(target + sample, mask=position < end, other=-1)
        match = value == label
        if tl.sum(match.to(tl.int32)) > 0:
            tile = tl.load(
                features + sample[:, None].to(tl.int64) * num_features + column[None, :],
                mask=match[:, None] & inside[None, :],
                other=0.0,
            )
            summed += tl.sum(tile.to(tl.float32), 0)
    amount = tl.cast(number, tl.float32)
    # a GPU may round x / x to more than 1, and 1 − weight must not be negative
    weight = tl.minimum(amount / seen.to(tl.float32), 1.0)
    if fade:  # in float64, because the difference from 1 may be small
        least = 1.0 - tl.exp(tl.cast(number, tl.float64) * log_decay)
        weight = tl.maximum(weight, least.to(tl.float32))
    if tl.program_id(1) == 0:
        tl.store(share + label, weight)
    batch_mean = summed / amount
    shift = (batch_mean - old_mean).to(tl.float32)  # the mean is float64
    tl.store(mean + line, old_mean + weight * shift, mask=inside)  # Eq. 9
    spread = tl.zeros((features_block,), dtype=tl.float32)
    done = 0
    row = rows + tl.cast(first_row, tl.int64) * padded_features
    for first in range(begin, end, samples_block):
        position = first + tl.arange(0, samples_block)
        sample = _sample(order, position, end, ordered)
        value = tl.load(target + sample, mask=position < end, other=-1)
        match = value == label
        matches = tl.sum(match.to(tl.int32))
        if matches > 0:
            mask = match[:, None] & inside[None, :]
            tile = tl.load(
                features + sample[:, None].to(tl.int64) * num_features + column[None, :],
                mask=mask,
                other=0.0,
            )
            centred = tl.where(mask, tile.to(tl.float32) - batch_mean[None, :], 0.0)
            if diagonal:
                spread += tl.sum(centred * centred, 0)
            else:
                rank = done + tl.cumsum(match.to(tl.int32), 0) - 1
                tl.store(
                    row + rank[:, None].to(tl.int64) * padded_features + column[None, :],
                    centred * tl.sqrt(weight / amount),
                    mask=match[:, None] & (column < padded_features)[None, :],
                )
            done += matches
    if diagonal:
        old = tl.load(variance + line, mask=inside, other=0.0)
        new = (1.0 - weight) * old + weight * (spread / amount)
        new += weight * (1.0 - weight) * shift * shift
        tl.store(variance + line, new, mask=inside)  # Eq. 10
    else:
        tl.store(
            row + tl.cast(number, tl.int64) * padded_features + column,
            shift * tl.sqrt(weight * (1.0 - weight)),
            mask=column < padded_features,
        )


@triton.jit
def _sample(order, position, end, ordered: tl.constexpr):  # type: ignore[no-untyped-def]
    if ordered:
        position = tl.load(order + position, mask=position < end, other=0)
    return position


@triton.jit
def _fill_slots(  # type: ignore[no-untyped-def]
    classes, label, number, before, total, num_classes, slots, block: tl.constexpr
):
    """Write the class into the slot of its first sample, and −1 into the slots of the others."""
    if slots == num_classes:
        tl.store(classes + label, tl.where(number > 0, label, -1))
    else:
        for first in range(0, number, block):
            place = first + tl.arange(0, block)
            value = tl.where(place == 0, label, -1)
            tl.store(classes + before + place, value, mask=place < number)
        if label == 0:  # the slots after the last class
            for first in range(0, slots - total, block):
                place = total + first + tl.arange(0, block)
                tl.store(classes + place, place * 0 - 1, mask=place < slots)
