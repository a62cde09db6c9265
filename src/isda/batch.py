"""What is asked of a batch: which samples count, whether all are sound, and the logits theirs.

Bad values would spoil the statistics for good. The host must not wait for the device to find them,
so they travel as class indices that no class has.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from isda import functional, kernels
from isda.distributed import SKIP
from isda.operators import operator

__all__ = [
    "LARGEST",
    "MISMATCH",
    "NOT_FINITE",
    "OUT_OF_RANGE",
    "TOLERANCE",
    "differs",
    "problem_in",
    "require_origin",
    "screen",
    "tally",
]

LARGEST = 1e15
"""Size of features from which on they are bad: sums of their squares need not fit into float32."""

TOLERANCE = 0.02
"""Share of their size that logits may be off by: as in bfloat16 (2⁻⁸ a product), not by mistake."""

MISMATCH = (
    "logits must come from the captured features: got logits of another batch, or changed after "
    "the final linear layer; pass head= if that is another layer"
)
"""Message of the error of logits that are not those of their features."""

NOT_FINITE, OUT_OF_RANGE = SKIP - 1, SKIP - 2
"""Class indices of samples with bad features, and with a bad target; any of them spoils a batch."""


def _screen(features: Tensor, target: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    """Class indices of the samples that count, SKIP for ignored ones, else what is bad about them.

    Shape:
        features (N, A), target (N,); output (N,).
    """
    if kernels.usable(features):
        return kernels.screen(features, target, num_classes, ignore_index, LARGEST)
    ignored = target == ignore_index
    outside = ((target < 0) | (target >= num_classes)) & ~ignored
    index = torch.where(ignored, SKIP, target)
    index = torch.where((features.abs() < LARGEST).all(1), index, NOT_FINITE)  # not so for NaN
    return torch.where(outside, OUT_OF_RANGE, index)


screen = operator(
    "isda::screen", _screen, lambda features, target, *_options: torch.empty_like(target)
)


def problem_in(index: Tensor) -> Tensor:
    """0 for a sound batch, 1 for features NaN or too large, 2 for a target out of range."""
    least = torch.cat([index, index.new_full((1,), SKIP)]).amin()  # of no sample at all: sound
    return (SKIP - least).clamp(min=0)


def _tally(
    step: Tensor,
    problem: Tensor,
    index: Tensor,
    lambda_0: float,
    total_steps: int,
    world: int,
    mean: bool,
    progress: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Count a step, unless its batch is bad: then note what is bad and leave all samples out.

    An operator, because torch.compile may compute plain arithmetic once more for the backward pass,
    when the step has been counted already (pytorch/pytorch#197039).

    Args:
        step: number of steps so far.
        problem: largest problem so far.
        index: class indices of all ranks, see ``screen``.
        lambda_0: final strength.
        total_steps: number of steps of the whole training.
        world: number of ranks.
        mean: whether the loss is a mean.
        progress: t/T, in place of the number of steps so far.

    Returns:
        the class indices, all SKIP for a bad batch; the factor of the sum over the samples of this
        rank (for a mean, over the samples of all ranks, whose gradients will be averaged), 0 for a
        bad batch; and the strength λ = λ₀ t/T before this step.
    """
    if kernels.usable(index):
        return kernels.tally(step, problem, index, lambda_0, total_steps, world, mean, progress)
    found = problem_in(index)
    scale = torch.ones((), dtype=torch.float64, device=index.device)
    if mean:
        scale = world * scale / (index >= 0).sum().clamp(min=1)
    if progress is None:
        progress = (step.to(torch.float32) / total_steps).clamp(max=1)
    strength = lambda_0 * progress.to(torch.float32).reshape(())
    step += (found == 0).long()
    problem.copy_(torch.maximum(problem, found))
    index = torch.where(found > 0, SKIP, index)
    return index, torch.where(found > 0, 0.0, scale), strength


def _fake_tally(
    step: Tensor, problem: Tensor, index: Tensor, *_options: float | Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    scale = step.new_empty((), dtype=torch.float64)
    return torch.empty_like(index), scale, step.new_empty((), dtype=torch.float32)


tally = operator("isda::tally", _tally, _fake_tally, mutates_args=("step", "problem"))


def _differs(inputs: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> Tensor:
    """Whether logits of any sample are not those that a linear layer gives its inputs.

    Shape:
        inputs (N, A), weight (C, A), bias (C,), logits (N, C); output ().
    """
    if len(inputs) == 1 and kernels.usable(inputs):
        return kernels.differs(inputs, weight, bias, logits, TOLERANCE)
    inputs, weight, logits = inputs.float(), weight.float(), logits.float()
    expected = F.linear(inputs, weight, None if bias is None else bias.float())
    size = expected.norm(dim=1) + logits.norm(dim=1)
    # of logits that cancel out, too: what they may be off by in bfloat16
    size = size + inputs.norm(dim=1) * weight.norm() / weight.shape[1] ** 0.5
    wrong = (expected - logits).norm(dim=1) > TOLERANCE * size + 1e-6  # not so for NaN
    return wrong.any()


differs = operator(
    "isda::differs",
    _differs,
    lambda inputs, *_others: inputs.new_empty((), dtype=torch.bool),
)


def require_origin(
    features: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor, mismatch: Tensor
) -> Tensor:
    """Features, if the logits come from them; else an error.

    On a GPU, and compiled, the first sample and classes are looked at, and the error comes later:
    it is noted in ``mismatch``, and features of NaN keep the batch out of all statistics.
    """
    at_once = functional.at_hand(features)
    samples, step, classes = (None, len(features) // 1024 + 1, None) if at_once else (1, 1, 64)
    with torch.no_grad(), torch.autocast(features.device.type, enabled=False):
        found = differs(
            functional.flatten(features[:samples:step])[:samples],
            weight[:classes],
            None if bias is None else bias[:classes],
            functional.flatten(logits[:samples:step])[:samples, :classes],
        )
    if at_once:
        if found:
            raise ValueError(MISMATCH)
        return features
    mismatch.logical_or_(found)
    return torch.where(found, torch.nan, features)
