"""The operations in plain torch, for every device without Triton kernels.

Covariances are updated in place and multiplied class by class, only for the classes of the batch.
The results equal those of ``isda.functional``; the products are saved for the backward pass. The
docstrings here also describe the Triton kernels, which have the same names.
"""

# custom operators in torch 2.6 do not accept collections.abc.Sequence
from typing import Sequence  # noqa: UP035

import torch
from torch import Tensor
from torch.nn import functional as F

from isda.checks import BAD_FEATURES, BAD_TARGET, FEATURE_LIMIT, OVERFLOW, SKIP
from isda.functional.moments import Moments, batch_share, update_moments
from isda.kernels import Products, ProductTensors

__all__ = [
    "count_step",
    "empty_products",
    "flag_overflow",
    "multiply",
    "quadratic_rows",
    "screen",
    "update_",
    "update_and_multiply_",
    "weight_gradient",
]


def screen(features: Tensor, target: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    """Class index of every valid sample, else a negative code of ``isda.checks``.

    Shape:
        features (N, A), target (N,); output (N,).
    """
    valid = (target >= 0) & (target < num_classes)
    finite = (features.abs() < FEATURE_LIMIT).all(1)  # false for NaN
    index = torch.where(valid, torch.where(finite, target, BAD_FEATURES), BAD_TARGET)
    return torch.where(target == ignore_index, SKIP, index)


def count_step(
    step: Tensor,
    problem: Tensor,
    index: Tensor,
    lambda_0: float,
    total_steps: int,
    world_size: int,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Count a step; if its batch is bad, set the flag instead and skip all of its samples.

    This is an operator because torch.compile may recompute plain arithmetic in the backward pass,
    after the step has been counted (pytorch/pytorch#197039).

    Args:
        step: number of steps so far, updated in place.
        problem: the worst problem so far, updated in place.
        index: class indices of the samples of all ranks, from :func:`screen`.
        lambda_0: final strength λ₀.
        total_steps: total number of training steps T.
        world_size: number of ranks.
        mean: whether the loss is a mean.

    Returns:
        the class indices; the factor for the sum of this rank's losses, 0 for a bad batch; and the
        strength λ = λ₀ t/T before this step. For a mean the factor is ``world_size / number of
        samples of all ranks``, because DistributedDataParallel averages the gradients.
    """
    worst = F.pad(index, (0, 1), value=SKIP).amin()  # an empty batch is valid
    found = SKIP - worst  # 0: none, 1: bad features, 2: bad target
    scale = torch.ones((), dtype=torch.float64, device=index.device)
    if mean:
        scale = world_size * scale / (index >= 0).sum().clamp(min=1)
    strength = lambda_0 * (step.to(torch.float32) / total_steps).clamp(max=1)
    step += (found == 0).long()
    problem.copy_(torch.maximum(problem, found))
    index = torch.where(found > 0, SKIP, index)
    return index, torch.where(found > 0, 0.0, scale), strength


def flag_overflow(
    problem: Tensor, overflow: Tensor, loss: Tensor, quadratic: Tensor, strength: Tensor
) -> None:
    """Set the flag if the loss is not finite, and keep the values for the error message.

    Args:
        problem: flag, updated in place unless already set.
        overflow: λ and the largest quadratic term, updated in place together with the flag.
        loss: one or more losses.
        quadratic: variance of every logit margin.
        strength: λ. The flag is not set at λ = 0, where the loss is ordinary cross entropy.
    """
    if not quadratic.numel():
        return
    bad = (problem == 0) & (strength > 0).all() & ~loss.isfinite().all()
    largest = quadratic.nan_to_num(nan=torch.inf).max()  # NaN: the difference of infinite terms
    found = torch.stack([strength.reshape(()), largest]).to(overflow.dtype)
    overflow.copy_(torch.where(bad, found, overflow))
    problem.masked_fill_(bad, OVERFLOW)


def update_(moments: Sequence[Tensor], features: Tensor, target: Tensor, decay: float) -> None:
    """:func:`isda.functional.update_moments` in place.

    Args:
        moments: :class:`isda.functional.Moments` with covariances or variances.
        features: features of the batch.
        target: class indices; samples with a negative index are skipped.
        decay: see :func:`isda.functional.merge_moments`.
    """
    count, mean, covariance = moments
    if covariance.dim() == 2:
        updated = update_moments(
            Moments(*moments), features.to(covariance.dtype), target, decay=decay
        )
        for buffer, value in zip(moments, updated, strict=True):
            buffer.copy_(value)
        return
    order = target.argsort(stable=True)
    order = order[int((target < 0).sum()) :]  # (N',) sorted by class, skipped samples left out
    batch_count = torch.bincount(target[order], minlength=len(count))
    present = batch_count.nonzero().flatten()  # (P,)
    number = batch_count[present]
    slots = torch.arange(len(present), device=target.device)
    slot = slots.repeat_interleave(number)  # (N',)
    share = batch_share(count[present], number, decay, covariance.dtype)
    batch = features[order].to(covariance.dtype)
    # float64: a running float32 sum stops growing after a few million samples
    total = batch.new_zeros(len(present), batch.shape[1], dtype=torch.float64)
    batch_mean = total.index_add_(0, slot, batch.double()) / number[:, None]
    shift = (batch_mean - mean[present]).to(batch.dtype)  # (P, A)
    # per class: scaled centred samples, then the scaled shift; one product yields both summands
    rows = batch.new_empty(len(order) + len(present), batch.shape[1])
    scale = (share / number).sqrt()[slot]
    rows[torch.arange(len(order), device=target.device) + slot] = (
        batch - batch_mean[slot].to(batch.dtype)
    ) * scale[:, None]
    rows[number.cumsum(0) + slots] = shift * (share * (1 - share)).sqrt()[:, None]
    parts = rows.split((number + 1).tolist())
    for index, part, weight in zip(present.tolist(), parts, share.tolist(), strict=True):
        covariance[index].addmm_(part.T, part, beta=1 - weight)  # Eq. 10
    mean[present] += share[:, None] * shift  # Eq. 9
    count += batch_count  # Eq. 11


def empty_products(weight: Tensor, slots: int, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    """Storage for the first three fields of ``Products``; the first is zero."""
    num_classes, num_features = weight.shape
    return (
        weight.new_zeros(slots, 1, num_classes),
        weight.new_empty(slots, num_classes, num_features),  # unused slots are never touched
        weight.new_empty(0, num_features),
    )


def multiply(covariance: Tensor, weight: Tensor, target: Tensor, precision: str) -> ProductTensors:
    """The products (W − w_c) Σ_c for the classes of the batch, a ``kernels.Products``.

    Args:
        covariance: feature covariance of each class, symmetric.
        weight: rows of the final linear layer.
        target: class indices; negative ones are skipped.
        precision: precision of the products on CUDA, see :class:`isda.FullCovariance`.

    Shape:
        covariance (C', A, A) with C' <= C, weight (C, A), target (N,).
    """
    slots = min(len(target), len(covariance))
    partial, product, target_product = empty_products(weight, slots, precision)
    present = target[target >= 0].unique()
    slot = torch.full((len(covariance),), -1, dtype=torch.int32, device=target.device)
    slot[present] = torch.arange(len(present), dtype=torch.int32, device=target.device)
    for position, index in enumerate(present.tolist()):
        margin = weight - weight[index]  # (C, A)
        torch.mm(margin, covariance[index], out=product[position])
        torch.linalg.vecdot(product[position], margin, out=partial[position, 0])
    classes = F.pad(present, (0, slots - len(present)), value=-1).to(torch.int32)
    return Products(partial, product, target_product, slot, classes)


def update_and_multiply_(
    moments: Sequence[Tensor],
    features: Tensor,
    target: Tensor,
    weight: Tensor,
    decay: float,
    precision: str,
) -> ProductTensors:
    """:func:`update_`, then :func:`multiply`; on CUDA in one pass over the covariances."""
    update_(moments, features, target, decay)
    return multiply(moments[2], weight, target, precision)


def quadratic_rows(
    weight: Tensor,
    target: Tensor,
    partial: Tensor,
    product: Tensor,
    target_product: Tensor,
    slot: Tensor,
    classes: Tensor,
) -> Tensor:
    """Quadratic term of every sample (N, C), 0 for skipped ones, differentiable in the weight.

    Args:
        weight: rows of the final linear layer.
        target: class indices; negative ones are skipped.
        partial: see ``kernels.Products``, also for the following arguments.
    """
    table = F.pad(partial.sum(1), (0, 0, 0, 1))  # (P + 1, C), the last row for skipped samples
    return table[torch.where(target >= 0, slot[target.clamp(min=0)], len(partial))]


def weight_gradient(
    grad: Tensor,
    weight: Tensor,
    target: Tensor,
    product: Tensor,
    target_product: Tensor,
    slot: Tensor,
    classes: Tensor,
) -> Tensor:
    """Gradient of the weight from the gradient of the quadratic term (quadratic part of Eq. 13).

    The weight is not used. It is an argument so that second derivatives raise an error.

    With G_c the sum of the gradients over the samples of class c and T_c = (W − w_c) Σ_c, row j
    gets 2 G_cj T_cj and row c gets −2 Σ_j G_cj T_cj. (The paper's row j = y_i is wrong for C > 2:
    the rows must sum to 0.)
    """
    rows = grad.new_zeros(len(classes) + 1, grad.shape[1])  # (P + 1, C)
    rows.index_add_(0, torch.where(target >= 0, slot[target.clamp(min=0)], len(classes)), grad)
    result = grad.new_zeros(product.shape[1:])
    for position, index in enumerate(classes.tolist()):
        if index < 0:
            break
        result.addcmul_(product[position], rows[position][:, None], value=2)
        result[index].addmv_(product[position].T, rows[position], alpha=-2)
    return result
