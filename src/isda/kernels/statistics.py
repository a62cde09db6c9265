"""The classes of a batch and their statistics (Eq. 9, 11, and 10 for variances)."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isda.kernels.launch import blocks, early, enter, leave, power_of_2, round_up

__all__ = ["Classes", "class_statistics", "update_variances"]

_TILE = 8192  # numbers that a program holds at a time
_MANY = 2048  # samples, as of dense predictions, that are sorted: each class then reads its own


class Classes(NamedTuple):
    """The classes of a batch, in slots, and what the update of their covariances needs.

    A class has the slot of its own number if there are no more classes than samples, else the place
    of its first sample among those sorted by class: either way there are P = min(N, C) slots.
    """

    classes: Tensor  # (P,) class in each slot, −1 in unused ones
    slot: Tensor  # (C,) slot of each class of the own samples, −1 for the others
    own_classes: Tensor  # (P',) the same slots, seen from the other side
    batch_count: Tensor  # (C,)
    start: Tensor  # (C,) first row of each class
    share: Tensor  # (C,) weight of the batch in the merged moments
    rows: Tensor  # (N + P, A') those of class c from start on: Σ_new = (1 − share) Σ + rowsᵀ rows


def class_statistics(
    index: Tensor,
    target: Tensor,
    num_classes: int,
    first_class: int = 0,
    *,
    features: Tensor | None = None,
    count: Tensor | None = None,
    mean: Tensor | None = None,
    variance: Tensor | None = None,
    decay: float = 1.0,
) -> Classes:
    """Find the classes of a batch and, given features, merge it into the means in place.

    Args:
        index: class indices of the batch; negative for samples to be left out.
        target: class indices of the samples whose slots are wanted, the same or some of these.
        num_classes: number of classes that have statistics here.
        first_class: the first class that has statistics here.
        features: of the batch; without them, nothing is merged.
        count: of each class.
        mean: of each class.
        variance: of each class, merged too (Eq. 10, diagonal), and so is the count; without it,
            the rows for full covariances are written, padded to A', a multiple of 16.
        decay: see ``isda.functional.merge_moments``.

    Shape:
        index (N,), target (N',), features (N, A), count (C,), mean (C, A), variance (C, A).
    """
    samples, device = len(index), index.device
    whole = index.data_ptr() == target.data_ptr() and samples == len(target)
    slots, own_slots = min(samples, num_classes), min(len(target), num_classes)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    classes = integers(slots)
    merge = features is not None
    width = features.shape[1] if features is not None else 1
    keep_rows = merge and variance is None
    result = Classes(
        classes,
        integers(num_classes),
        classes if whole else integers(own_slots),
        integers(num_classes),
        integers(num_classes),
        numbers(num_classes),
        numbers(samples + slots if keep_rows else 0, round_up(width, 16)),
    )
    if not samples:
        result.slot.fill_(-1)
        result.batch_count.zero_()
        return result
    nothing = result.share
    ordered = merge and samples > _MANY
    # many narrow programs, each of which reads many samples at once, but not too many
    features_block = 64 if width <= 128 else 128 if num_classes * width <= 2**18 else 512
    _class_statistics[(num_classes, blocks(width, features_block))](
        index.contiguous(),
        index.argsort(stable=True) if ordered else nothing,
        target.contiguous(),
        features.contiguous() if features is not None else nothing,
        count if count is not None else nothing,
        mean if mean is not None else nothing,
        variance if variance is not None else nothing,
        *result,
        samples,
        len(target),
        num_classes,
        width,
        result.rows.shape[1],
        first_class,
        slots,
        own_slots,
        math.log(decay),
        merge=merge,
        diagonal=variance is not None,
        fade=decay != 1.0,
        whole=whole,
        ordered=ordered,
        scan_block=min(power_of_2(samples), 1024),
        samples_block=min(_TILE // features_block, max(power_of_2(samples), 16)),
        features_block=features_block,
        **early(index.device),
    )
    if count is not None and variance is not None:
        count += result.batch_count
    return result


def update_variances(
    count: Tensor, mean: Tensor, variance: Tensor, features: Tensor, index: Tensor, decay: float
) -> None:
    """Merge a batch into count, mean and variance of each class in place (Eq. 9, 10 and 11)."""
    class_statistics(
        index,
        index,
        len(count),
        features=features,
        count=count,
        mean=mean,
        variance=variance,
        decay=decay,
    )


@triton.jit
def _class_statistics(  # type: ignore[no-untyped-def]
    index,
    order,
    target,
    features,
    count,
    mean,
    variance,
    classes,
    slot,
    own_classes,
    batch_count,
    start,
    share,
    rows,
    num_samples,
    num_targets,
    num_classes,
    num_features,
    padded_features,
    first_class,
    slots,
    own_slots,
    log_decay,
    merge: tl.constexpr,
    diagonal: tl.constexpr,
    fade: tl.constexpr,
    whole: tl.constexpr,
    ordered: tl.constexpr,
    scan_block: tl.constexpr,
    samples_block: tl.constexpr,
    features_block: tl.constexpr,
    early: tl.constexpr,
):
    enter(early)
    label = tl.program_id(0)
    number = 0  # samples of this class
    before = 0  # of the classes before
    total = 0  # of all classes here
    begin = 0  # of what is to be read for this class
    end = num_samples
    for first in range(0, num_samples, scan_block):
        position = first + tl.arange(0, scan_block)
        inside = position < num_samples
        value = tl.load(index + position, mask=inside, other=-1)
        if ordered:
            begin += tl.sum((inside & (value < label + first_class)).to(tl.int32))
        value = tl.where(value < 0, -1, value - first_class)
        number += tl.sum((value == label).to(tl.int32))
        before += tl.sum(((value >= 0) & (value < label)).to(tl.int32))
        total += tl.sum(((value >= 0) & (value < num_classes)).to(tl.int32))
    own = number
    own_before = before
    own_total = total
    if not whole:
        own = 0
        own_before = 0
        own_total = 0
        for first in range(0, num_targets, scan_block):
            position = first + tl.arange(0, scan_block)
            value = tl.load(target + position, mask=position < num_targets, other=-1)
            value = tl.where(value < 0, -1, value - first_class)
            own += tl.sum((value == label).to(tl.int32))
            own_before += tl.sum(((value >= 0) & (value < label)).to(tl.int32))
            own_total += tl.sum(((value >= 0) & (value < num_classes)).to(tl.int32))
    if ordered:
        end = begin + number
    first_row = before + (label if slots == num_classes else before)
    if tl.program_id(1) == 0:
        tl.store(batch_count + label, number)
        tl.store(start + label, first_row)
        place = own_before
        if own_slots == num_classes:
            place = label
        tl.store(slot + label, tl.where((own > 0) & (number > 0), place, -1))
        _fill_slots(classes, label, number, before, total, num_classes, slots, scan_block)
        if not whole:
            _fill_slots(
                own_classes, label, own, own_before, own_total, num_classes, own_slots, scan_block
            )
    if not merge:
        return
    if number == 0:
        return
    column = tl.program_id(1) * features_block + tl.arange(0, features_block)
    inside = column < num_features
    line = label.to(tl.int64) * num_features + column
    # ahead of the loop, so that their ways from memory overlap
    seen = tl.load(count + label) + number
    old_mean = tl.load(mean + line, mask=inside, other=0.0)
    summed = tl.zeros((features_block,), dtype=tl.float32)
    for first in range(begin, end, samples_block):
        position = first + tl.arange(0, samples_block)
        sample = _sample(order, position, end, ordered)
        value = tl.load(index + sample, mask=position < end, other=-1)
        match = value == label + first_class
        if tl.sum(match.to(tl.int32)) > 0:
            tile = tl.load(
                features + sample[:, None].to(tl.int64) * num_features + column[None, :],
                mask=match[:, None] & inside[None, :],
                other=0.0,
            )
            summed += tl.sum(tile.to(tl.float32), 0)
    amount = tl.cast(number, tl.float32)
    weight = amount / seen.to(tl.float32)
    if fade:  # in float64: the difference to 1 may be small
        least = 1.0 - tl.exp(tl.cast(number, tl.float64) * log_decay)
        weight = tl.maximum(weight, least.to(tl.float32))
    if tl.program_id(1) == 0:
        tl.store(share + label, weight)
    batch_mean = summed / amount
    shift = batch_mean - old_mean
    leave(early)
    tl.store(mean + line, old_mean + weight * shift, mask=inside)  # Eq. 9
    spread = tl.zeros((features_block,), dtype=tl.float32)
    done = 0
    row = rows + tl.cast(first_row, tl.int64) * padded_features
    for first in range(begin, end, samples_block):
        position = first + tl.arange(0, samples_block)
        sample = _sample(order, position, end, ordered)
        value = tl.load(index + sample, mask=position < end, other=-1)
        match = value == label + first_class
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
    """Write the slots that belong to a class: its first sample's place, −1 into the others'."""
    if slots == num_classes:
        tl.store(classes + label, tl.where(number > 0, label, -1))
    else:
        for first in range(0, number, block):
            place = first + tl.arange(0, block)
            value = tl.where(place == 0, label, -1)
            tl.store(classes + before + place, value, mask=place < number)
        if label == 0:  # behind the last class
            for first in range(0, slots - total, block):
                place = total + first + tl.arange(0, block)
                tl.store(classes + place, place * 0 - 1, mask=place < slots)
