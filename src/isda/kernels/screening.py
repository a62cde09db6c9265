"""Check which samples are valid, count steps, and check that the loss is finite."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isda.checks import FEATURE_LIMIT, OVERFLOW
from isda.kernels.sizes import power_of_2

__all__ = ["count_step", "flag_overflow", "screen"]


def screen(features: Tensor, target: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    """See ``isda.kernels.plain.screen``."""
    features, target = features.contiguous(), target.contiguous()
    index = torch.empty_like(target)
    if len(target):
        width = features.shape[1]
        _screen[(len(target),)](
            features,
            target,
            index,
            num_classes,
            width,
            ignore_index,
            FEATURE_LIMIT,
            block=min(power_of_2(width), 1024),
        )
    return index


def count_step(
    step: Tensor,
    problem: Tensor,
    index: Tensor,
    lambda_0: float,
    total_steps: int,
    world_size: int,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``isda.kernels.plain.count_step``."""
    valid = torch.empty_like(index)
    scale = torch.empty((), dtype=torch.float64, device=index.device)
    strength = torch.empty((), dtype=torch.float32, device=index.device)
    _count_step[(1,)](
        step,
        problem,
        index.contiguous(),
        valid,
        scale,
        strength,
        len(index),
        float(lambda_0),
        float(total_steps),
        float(world_size),
        mean=mean,
        block=min(power_of_2(max(len(index), 1)), 1024),
    )
    return valid, scale, strength


def flag_overflow(
    problem: Tensor, overflow: Tensor, loss: Tensor, quadratic: Tensor, strength: Tensor
) -> None:
    """See ``isda.kernels.plain.flag_overflow``."""
    if quadratic.numel():
        _flag_overflow[(1,)](
            problem,
            overflow,
            loss.contiguous(),
            quadratic.contiguous(),
            strength,
            loss.numel(),
            quadratic.numel(),
            OVERFLOW,
            block=1024,
        )


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
        bad += tl.where(tl.abs(value.to(tl.float32)) < largest, 0, 1)  # 1 for NaN
    label = tl.load(target + sample)
    valid = (label >= 0) & (label < num_classes)
    result = tl.where(tl.sum(bad) > 0, -2, label)  # BAD_FEATURES
    result = tl.where(valid, result, -3)  # BAD_TARGET
    tl.store(index + sample, tl.where(label == ignore_index, -1, result))  # SKIP


@triton.jit
def _count_step(  # type: ignore[no-untyped-def]
    step,
    problem,
    index,
    valid,
    scale,
    strength,
    num_samples,
    lambda_0,
    total_steps,
    world_size,
    mean: tl.constexpr,
    block: tl.constexpr,
):
    counts = tl.zeros((block,), dtype=tl.int32)
    least = tl.zeros((block,), dtype=tl.int64)
    for first in range(0, num_samples, block):
        position = first + tl.arange(0, block)
        value = tl.load(index + position, mask=position < num_samples, other=-1)
        counts += (value >= 0).to(tl.int32)
        least = tl.minimum(least, value)
    number = tl.sum(counts)
    found = tl.maximum(-1 - tl.min(least), 0)  # 1: bad features, 2: bad target
    for first in range(0, num_samples, block):
        position = first + tl.arange(0, block)
        value = tl.load(index + position, mask=position < num_samples, other=-1)
        value = tl.where(found > 0, -1, value)
        tl.store(valid + position, value, mask=position < num_samples)
    factor = 1.0
    if mean:
        factor = world_size / tl.maximum(number, 1).to(tl.float32)
    done = tl.load(step)
    tl.store(strength, lambda_0 * tl.minimum(done.to(tl.float32) / total_steps, 1.0))
    tl.store(scale, tl.where(found > 0, 0.0, factor))
    tl.store(step, done + (found == 0).to(tl.int64))
    tl.store(problem, tl.maximum(tl.load(problem), found))


@triton.jit
def _flag_overflow(  # type: ignore[no-untyped-def]
    problem,
    overflow,
    loss,
    quadratic,
    strength,
    num_losses,
    num_terms,
    code,
    block: tl.constexpr,
):
    bad = tl.zeros((block,), dtype=tl.int32)
    for first in range(0, num_losses, block):
        position = first + tl.arange(0, block)
        value = tl.load(loss + position, mask=position < num_losses, other=0.0)
        bad += tl.where(tl.abs(value.to(tl.float32)) < float("inf"), 0, 1)  # 1 for NaN
    value = tl.load(strength).to(tl.float32)
    if (tl.sum(bad) > 0) & (value > 0.0) & (tl.load(problem) == 0):
        largest = tl.zeros((block,), dtype=tl.float32)
        for first in range(0, num_terms, block):
            position = (first + tl.arange(0, block)).to(tl.int64)
            term = tl.load(quadratic + position, mask=position < num_terms, other=0.0)
            term = tl.where(term == term, term.to(tl.float32), float("inf"))
            largest = tl.maximum(largest, term)
        tl.store(overflow, value)
        tl.store(overflow + 1, tl.max(largest))
        tl.store(problem, code)
