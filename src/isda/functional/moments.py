r"""Online statistics of the features of each class (Appendix A, Eq. 9, 10 and 11)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Moments", "batch_moments", "batch_share", "merge_moments", "update_moments"]


class Moments(NamedTuple):
    """Count, mean and biased covariance (or variance) of the features of each class."""

    count: Tensor  # type: ignore[assignment]  # (C,), int64; hides tuple.count
    mean: Tensor  # (C, A), float64: after many samples, updates are too small for float32
    covariance: Tensor  # (C, A, A), or variances (C, A)


def batch_moments(
    features: Tensor, target: Tensor, num_classes: int, *, diagonal: bool = False
) -> Moments:
    r"""Moments m, μ' and Σ' of every class in one batch (Appendix A).

    Equivalent to ``features[target == c].mean(0)`` and ``features[target ==
    c].T.cov(correction=0)`` for each class c, and zero for absent classes.

    Args:
        features: deep features.
        target: class indices in ``[0, C)``; samples with a negative target are skipped.
        num_classes: number of classes.
        diagonal: return variances instead of covariances.

    Shape:
        features (N, A), target (N,); see :class:`Moments`.

    Example:
        >>> features, target = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0])
        >>> batch_moments(features, target, 2, diagonal=True).covariance
        tensor([[1.],
                [0.]])
    """
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    row = torch.where(target < 0, num_classes, target)  # skipped samples go to an extra row
    count = torch.zeros(num_classes + 1, dtype=torch.int64, device=features.device)
    count = count.scatter_add(0, row, torch.ones_like(row))

    def average(values: Tensor) -> Tensor:
        # float64: a running float32 sum stops growing after a few million samples
        total = values.new_zeros(num_classes + 1, values.shape[1], dtype=torch.float64)
        total = total.index_add(0, row, values.double())
        return total / count.clamp(min=1)[:, None]

    mean = average(features)
    centred = features - mean[row].to(features.dtype)
    if diagonal:
        variance = average(centred.square()).to(features.dtype)
        return Moments(count[:-1], mean[:-1], variance[:-1])
    member = F.one_hot(row, num_classes + 1)[:, :-1].to(features.dtype)  # (N, C)
    centred = torch.where(target[:, None] < 0, 0.0, centred)
    scatter = torch.einsum("nc,na,nb->cab", member, centred, centred)
    covariance = scatter / count[:-1].clamp(min=1)[:, None, None]
    return Moments(count[:-1], mean[:-1], covariance)


def merge_moments(moments: Moments, other: Moments, *, decay: float = 1.0) -> Moments:
    r"""Merge the moments of two sets of samples (Eq. 9, 10 and 11).

    Args:
        moments: n, μ, Σ of the samples so far.
        other: m, μ', Σ' of the new samples.
        decay: if below 1, the weight of ``other``, ``m / (n + m)``, is at least ``1 - decay**m``,
            so that every new sample of a class reduces the weight of the earlier ones.

    Shape:
        see :class:`Moments`.
    """
    share = batch_share(moments.count, other.count, decay, moments.mean.dtype)[:, None]  # (C, 1)
    shift = other.mean - moments.mean  # (C, A)
    mean = moments.mean + share * shift
    share, shift = share.to(moments.covariance.dtype), shift.to(moments.covariance.dtype)
    if moments.covariance.dim() == 3:
        share, between = share[:, :, None], shift[:, :, None] * shift[:, None, :]
    else:
        between = shift.square()
    return Moments(
        moments.count + other.count,  # Eq. 11
        mean,  # Eq. 9
        (1 - share) * moments.covariance
        + share * other.covariance
        + share * (1 - share) * between,  # Eq. 10
    )


def update_moments(
    moments: Moments, features: Tensor, target: Tensor, *, decay: float = 1.0
) -> Moments:
    r"""Merge a batch into the moments (Appendix A).

    Args:
        moments: moments of the samples so far.
        features: deep features of the batch.
        target: class indices in ``[0, C)``; samples with a negative target are skipped.
        decay: see :func:`merge_moments`.

    Shape:
        features (N, A), target (N,); see :class:`Moments`.
    """
    diagonal = moments.covariance.dim() == 2
    batch = batch_moments(features, target, len(moments.count), diagonal=diagonal)
    return merge_moments(moments, batch, decay=decay)


def batch_share(count: Tensor, batch_count: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    """Weight of a batch in the merged moments: m / (n + m), but at least 1 − decayᵐ."""
    number = batch_count.to(dtype)
    share = number / (count + batch_count).clamp(min=1)
    if decay == 1.0:
        return share
    return torch.maximum(share, -torch.expm1(number * math.log(decay)))
