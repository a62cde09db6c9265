"""Which samples of a batch count, whether all are sound, and whether logits are theirs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isda.kernels.launch import early, enter, leave, power_of_2

__all__ = ["differs", "screen", "tally"]


def screen(
    features: Tensor, target: Tensor, num_classes: int, ignore_index: int, largest: float
) -> Tensor:
    """See ``isda.batch.screen``."""
    features, target = features.contiguous(), target.contiguous()
    index = torch.empty_like(target)
    if len(target):
        width = features.shape[1]
        block = min(power_of_2(width), 1024)
        _screen[(len(target),)](
            features, target, index, num_classes, width, ignore_index, largest, block=block
        )
    return index


def tally(
    step: Tensor,
    problem: Tensor,
    index: Tensor,
    lambda_0: float,
    total_steps: int,
    world: int,
    mean: bool,
    progress: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``isda.batch.tally``."""
    sound = torch.empty_like(index)
    scale = torch.empty((), dtype=torch.float64, device=index.device)
    strength = torch.empty((), dtype=torch.float32, device=index.device)
    block = min(power_of_2(max(len(index), 1)), 1024)
    _tally[(1,)](
        step,
        problem,
        index.contiguous(),
        step if progress is None else progress,
        sound,
        scale,
        strength,
        len(index),
        float(lambda_0),
        float(total_steps),
        float(world),
        mean=mean,
        counted=progress is None,
        block=block,
        **early(index.device),
    )
    return sound, scale, strength


def differs(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor, tolerance: float
) -> Tensor:
    """See ``isda.batch.differs``, for one sample."""
    num_classes, num_features = weight.shape
    wrong = torch.empty((), dtype=torch.bool, device=inputs.device)
    _differs[(1,)](
        inputs.contiguous(),
        weight.contiguous(),
        weight if bias is None else bias,
        logits.contiguous(),
        wrong,
        num_classes,
        num_features,
        float(tolerance),
        biased=bias is not None,
        classes_block=power_of_2(num_classes),
        features_block=min(power_of_2(num_features), 128),
        num_warps=8,
    )
    return wrong


@triton.jit
def _screen(  # type: ignore[no-untyped-def]
    features, target, index, num_classes, num_features, ignore_index, largest, block: tl.constexpr
):
    sample = tl.program_id(0).to(tl.int64)
    bad = tl.zeros((block,), dtype=tl.int32)
    for first in range(0, num_features, block):
        column = first + tl.arange(0, block)
        inside = column < num_features
        value = tl.load(features + sample * num_features + column, mask=inside, other=0.0)
        bad += tl.where(tl.abs(value.to(tl.float32)) < largest, 0, 1)  # 1 for NaN, too
    label = tl.load(target + sample)
    ignored = label == ignore_index
    outside = ((label < 0) | (label >= num_classes)) & (label != ignore_index)
    result = tl.where(ignored, -1, label)
    result = tl.where(tl.sum(bad) > 0, -2, result)
    tl.store(index + sample, tl.where(outside, -3, result))


@triton.jit
def _tally(  # type: ignore[no-untyped-def]
    step,
    problem,
    index,
    progress,
    sound,
    scale,
    strength,
    num_samples,
    lambda_0,
    total_steps,
    world,
    mean: tl.constexpr,
    counted: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):
    enter(early)
    sound_samples = tl.zeros((block,), dtype=tl.int32)
    least = tl.zeros((block,), dtype=tl.int64)
    for first in range(0, num_samples, block):
        position = first + tl.arange(0, block)
        value = tl.load(index + position, mask=position < num_samples, other=-1)
        sound_samples += (value >= 0).to(tl.int32)
        least = tl.minimum(least, value)
    number = tl.sum(sound_samples)
    found = tl.maximum(-1 - tl.min(least), 0)  # 1: bad features, 2: bad target
    for first in range(0, num_samples, block):
        position = first + tl.arange(0, block)
        value = tl.load(index + position, mask=position < num_samples, other=-1)
        value = tl.where(found > 0, -1, value)
        tl.store(sound + position, value, mask=position < num_samples)
    factor = 1.0
    if mean:
        factor = world / tl.maximum(number, 1).to(tl.float32)
    done = tl.load(step)
    if counted:
        ramp = tl.minimum(done.to(tl.float32) / total_steps, 1.0)
    else:
        ramp = tl.load(progress).to(tl.float32)
    leave(early)
    tl.store(strength, lambda_0 * ramp)
    tl.store(scale, tl.where(found > 0, 0.0, factor))
    tl.store(step, done + (found == 0).to(tl.int64))
    tl.store(problem, tl.maximum(tl.load(problem), found))


@triton.jit
def _differs(  # type: ignore[no-untyped-def]
    inputs,
    weight,
    bias,
    logits,
    wrong,
    num_classes,
    num_features,
    tolerance,
    biased: tl.constexpr,
    classes_block: tl.constexpr,
    features_block: tl.constexpr,
):
    label = tl.arange(0, classes_block)
    known = label < num_classes
    expected = tl.zeros((classes_block,), dtype=tl.float32)
    squares = tl.zeros((classes_block,), dtype=tl.float32)  # of the weights
    length = tl.zeros((features_block,), dtype=tl.float32)
    for first in range(0, num_features, features_block):
        column = first + tl.arange(0, features_block)
        inside = column < num_features
        value = tl.load(inputs + column, mask=inside, other=0.0).to(tl.float32)
        place = label[:, None].to(tl.int64) * num_features + column[None, :]
        tile = tl.load(weight + place, mask=known[:, None] & inside[None, :], other=0.0)
        tile = tile.to(tl.float32)
        expected += tl.sum(tile * value[None, :], 1)
        squares += tl.sum(tile * tile, 1)
        length += value * value
    if biased:
        expected += tl.load(bias + label, mask=known, other=0.0).to(tl.float32)
    found = tl.load(logits + label, mask=known, other=0.0).to(tl.float32)
    size = tl.sqrt(tl.sum(expected * expected)) + tl.sqrt(tl.sum(found * found))
    size += tl.sqrt(tl.sum(length) * tl.sum(squares) / num_features)
    distance = tl.sqrt(tl.sum((expected - found) * (expected - found)))
    tl.store(wrong, distance > tolerance * size + 1e-6)
