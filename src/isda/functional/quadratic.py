r"""The quadratic term (w_j − w_y)ᵀ Σ (w_j − w_y) in the exponent of Eq. 4.

It is the variance of the logit margin z_j − z_y when the features are drawn from N(a, Σ).
"""

import torch
from torch import Tensor

__all__ = [
    "diagonal_quadratic",
    "full_quadratic",
    "identity_quadratic",
    "shared_quadratic",
]


def full_quadratic(
    weight: Tensor,
    target: Tensor,
    covariance: Tensor,
    *,
    covariance_index: Tensor | None = None,
) -> Tensor:
    r"""Variance of every logit margin, (w_j − w_y)ᵀ Σ_y (w_j − w_y) (the exponent of Eq. 4).

    Equivalent to ``torch.einsum("nja,nab,njb->nj", d, covariance[target], d)`` with
    ``d = weight - weight[target][:, None]``, without the (N, C, A) intermediate.

    Args:
        weight: rows of the final linear layer.
        target: class indices in ``[0, C)``.
        covariance: feature covariance of each class.
        covariance_index: which covariance each sample uses, by default that of its target;
            ``torch.arange(N)`` for one covariance per sample.

    Shape:
        weight (C, A), target (N,), covariance (C, A, A), covariance_index (N,); output (N, C).
    """
    weight = weight - weight.mean(0)  # margins do not change; avoids cancellation in float32
    slot = target if covariance_index is None else covariance_index
    if len(covariance) > len(slot):  # one per sample is fewer than all of them
        covariance, slot = covariance[slot], torch.arange(len(slot), device=slot.device)
    # bmm: the broadcast matmul would copy every covariance
    product = torch.bmm(weight.expand(len(covariance), *weight.shape), covariance)  # (P, C, A)
    return _margin_variance(product @ weight.T, slot, target)


def diagonal_quadratic(
    weight: Tensor, target: Tensor, variance: Tensor, *, covariance_index: Tensor | None = None
) -> Tensor:
    r"""Variance of every logit margin under a diagonal covariance (the exponent of Eq. 4).

    Equivalent to ``((weight - weight[target][:, None]) ** 2 * variance[target][:, None]).sum(-1)``
    without the (N, C, A) intermediate.

    Args:
        weight: rows of the final linear layer.
        target: class indices in ``[0, C)``.
        variance: feature variances of each class.
        covariance_index: which variances each sample uses, by default those of its target.

    Shape:
        weight (C, A), target (N,), variance (C, A), covariance_index (N,); output (N, C).
    """
    weight = weight - weight.mean(0)  # margins do not change; avoids cancellation in float32
    # (N, A); index_select has a cheaper gradient than weight[target]
    target_weight = weight.index_select(0, target)
    scale = variance[target if covariance_index is None else covariance_index]  # (N, A)
    scaled = scale * target_weight
    offset = (scaled * target_weight).sum(1, keepdim=True)  # (N, 1)
    rows = scale @ weight.square().T - 2 * (scaled @ weight.T) + offset
    is_target = target[:, None] == torch.arange(len(weight), device=weight.device)
    return torch.where(is_target, 0.0, rows)  # exactly 0 in spite of rounding errors


def shared_quadratic(weight: Tensor, target: Tensor, covariance: Tensor) -> Tensor:
    r"""Variance of every logit margin under one covariance for all classes (Sec. 4.5, Table 5).

    Equivalent to ``full_quadratic(weight, target, covariance.expand(C, -1, -1))``.

    Args:
        weight: rows of the final linear layer.
        target: class indices in ``[0, C)``.
        covariance: feature covariance over all classes.

    Shape:
        weight (C, A), target (N,), covariance (A, A); output (N, C).
    """
    weight = weight - weight.mean(0)  # margins do not change; avoids cancellation in float32
    return _margin_variance(
        (weight @ covariance @ weight.T)[None], torch.zeros_like(target), target
    )


def identity_quadratic(weight: Tensor, target: Tensor) -> Tensor:
    r"""Squared distance |w_j − w_y|², the quadratic term for Σ = I (Sec. 4.5, Table 5).

    Equivalent to ``(weight - weight[target][:, None]).square().sum(-1)``.

    Args:
        weight: rows of the final linear layer.
        target: class indices in ``[0, C)``.

    Shape:
        weight (C, A), target (N,); output (N, C).
    """
    weight = weight - weight.mean(0)  # margins do not change; avoids cancellation in float32
    return _margin_variance((weight @ weight.T)[None], torch.zeros_like(target), target)


def _margin_variance(gram: Tensor, slot: Tensor, target: Tensor) -> Tensor:
    """Var(z_j − z_y) from the covariance of the logits; exactly 0 for j = y.

    Shape:
        gram (P, C, C), slot (N,), the matrix of each sample, target (N,); output (N, C).
    """
    variance = gram.diagonal(dim1=1, dim2=2)  # (P, C)
    cross, mirrored = gram[slot, target], gram.mT[slot, target]  # (N, C), equal if Σ is symmetric
    return (variance[slot] - cross) - (mirrored - variance[slot, target][:, None])
