"""Naive references: the paper's formulas in float64, one sample and one class at a time.

Nothing here is fast or clever, and nothing is shared with the library. Everything is
differentiable, so that autograd through these loops gives reference gradients, too. The inputs of
the tests, :func:`draw`, stand here as well.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Inputs",
    "class_moments",
    "corrected_weight_gradient",
    "decayed_moments",
    "draw",
    "identity_matrices",
    "isda_losses",
    "mean_loss",
    "monte_carlo_loss",
    "pooled_moments",
    "printed_weight_gradient",
    "quadratic",
    "stream_moments",
    "variance_matrices",
]

Batch = tuple[Tensor, Tensor]  # features (N, A), target (N,)


class Inputs(NamedTuple):
    """Random inputs of a loss."""

    features: Tensor  # (N, A)
    weight: Tensor  # (C, A)
    bias: Tensor  # (C,)
    target: Tensor  # (N,)
    covariance: Tensor  # (C, A, A), positive definite


def draw(
    samples: int,
    classes: int,
    width: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Random inputs; of three or more classes, class 1 has one sample and class 2 is absent."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    often = classes - 2 if classes > 2 else classes
    target = torch.randint(often, (samples,), generator=generator)
    if classes > 2 and samples:
        target[target > 0] += 2
        target[-2:] = 0  # so that the covariance of one class is not 0
        target[samples // 2] = 1
    root = normal(classes, width, width)
    return Inputs(
        normal(samples, width) + 1.5,
        normal(classes, width),
        normal(classes),
        target.to(device),
        root @ root.mT / width + 0.1 * torch.eye(width, dtype=dtype, device=device),
    )


def class_moments(
    features: Tensor, target: Tensor, num_classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Number, mean and biased covariance of each class, from all its samples at once."""
    features, target = features.double().cpu(), target.cpu()
    width = features.shape[1]
    counts, means, covariances = [], [], []
    for index in range(num_classes):
        own = [features[i] for i in range(len(target)) if target[i] == index]
        mean = torch.zeros(width, dtype=torch.float64)
        covariance = torch.zeros(width, width, dtype=torch.float64)
        for a in own:
            mean = mean + a / len(own)
        for a in own:
            covariance = covariance + torch.outer(a - mean, a - mean) / len(own)
        counts.append(len(own))
        means.append(mean)
        covariances.append(covariance)
    return torch.tensor(counts), torch.stack(means), torch.stack(covariances)


def stream_moments(batches: Sequence[Batch], num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 9, 10 and 11 as printed, batch by batch and class by class."""
    width = batches[0][0].shape[1]
    count = torch.zeros(num_classes, dtype=torch.int64)
    mean = torch.zeros(num_classes, width, dtype=torch.float64)
    covariance = torch.zeros(num_classes, width, width, dtype=torch.float64)
    for features, target in batches:
        batch_count, batch_mean, batch_covariance = class_moments(features, target, num_classes)
        for j in range(num_classes):
            n, m = int(count[j]), int(batch_count[j])
            if m == 0:
                continue
            shift = mean[j] - batch_mean[j]
            covariance[j] = (n * covariance[j] + m * batch_covariance[j]) / (n + m) + n * m * (
                torch.outer(shift, shift)
            ) / (n + m) ** 2
            mean[j] = (n * mean[j] + m * batch_mean[j]) / (n + m)
            count[j] = n + m
    return count, mean, covariance


def decayed_moments(
    batches: Sequence[Batch], num_classes: int, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted moments, from a list with the weight of every sample.

    A batch with m samples of a class, which has n already, gets the share max(m / (n + m), 1 -
    decay^m), in equal parts for its samples; the weights of older samples shrink to make room.
    """
    width = batches[0][0].shape[1]
    counts, means, covariances = [], [], []
    for index in range(num_classes):
        rows: list[Tensor] = []
        weights: list[float] = []
        for features, target in batches:
            own = [features[i].double().cpu() for i in range(len(target)) if target[i] == index]
            n, m = len(rows), len(own)
            if m == 0:
                continue
            share = max(m / (n + m), 1 - decay**m)
            weights = [weight * (1 - share) for weight in weights] + [share / m] * m
            rows = rows + own
        mean = torch.zeros(width, dtype=torch.float64)
        covariance = torch.zeros(width, width, dtype=torch.float64)
        for weight, a in zip(weights, rows, strict=True):
            mean = mean + weight * a
        for weight, a in zip(weights, rows, strict=True):
            covariance = covariance + weight * torch.outer(a - mean, a - mean)
        counts.append(len(rows))
        means.append(mean)
        covariances.append(covariance)
    return torch.tensor(counts), torch.stack(means), torch.stack(covariances)


def pooled_moments(features: Tensor, target: Tensor) -> tuple[int, Tensor, Tensor]:
    """Number, mean and biased covariance over all classes; negative targets are skipped."""
    one_class = torch.where(target < 0, -1, 0)
    count, mean, covariance = class_moments(features, one_class, 1)
    return int(count[0]), mean[0], covariance[0]


def variance_matrices(variance: Tensor) -> list[Tensor]:
    """Diagonal matrices of the variances of each class."""
    return [torch.diag(row.double().cpu()) for row in variance]


def identity_matrices(weight: Tensor) -> list[Tensor]:
    """An identity matrix for each class."""
    return [torch.eye(weight.shape[1], dtype=torch.float64) for _ in range(len(weight))]


def quadratic(weight: Tensor, target: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """(w_j − w_y)ᵀ Σ_y (w_j − w_y), one pair (i, j) at a time; ``matrices[c]`` is Σ_c."""
    weight = weight.double().cpu()
    values = weight.new_zeros(len(target), len(weight))
    for i in range(len(target)):
        y = int(target[i])
        for j in range(len(weight)):
            margin = weight[j] - weight[y]
            values[i, j] = margin @ matrices[y].double().cpu() @ margin
    return values


def isda_losses(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    matrices: Sequence[Tensor],
    *,
    strength: float,
    bias: Tensor | None = None,
    ignore_index: int = -100,
) -> list[Tensor | None]:
    """Eq. 4 for every sample, None where its class index is ignored.

    For class probabilities p: the sum over k of p_k times Eq. 4 with y = k.
    """
    features, weight, target = features.double().cpu(), weight.double().cpu(), target.cpu()
    bias = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.double().cpu()
    matrices = [matrix.double().cpu() for matrix in matrices]
    losses: list[Tensor | None] = []
    for i in range(len(features)):
        if target.is_floating_point():
            parts = [
                target[i, k].double()
                * _bound(features[i], weight, bias, k, matrices[k], strength=strength)
                for k in range(len(weight))
            ]
            losses.append(torch.stack(parts).sum())
        elif target[i] == ignore_index:
            losses.append(None)
        else:
            y = int(target[i])
            losses.append(_bound(features[i], weight, bias, y, matrices[y], strength=strength))
    return losses


def mean_loss(losses: Sequence[Tensor | None]) -> Tensor:
    """Mean over the samples that count; 0 if there are none."""
    counted = [loss for loss in losses if loss is not None]
    return torch.stack(counted).mean() if counted else torch.zeros((), dtype=torch.float64)


def monte_carlo_loss(weight: Tensor, target: Tensor, augmented: Tensor, *, bias: Tensor) -> Tensor:
    """Eq. 2 for given draws ã of shape (M, N, A)."""
    total = torch.zeros((), dtype=torch.float64)
    weight, bias, augmented = weight.double().cpu(), bias.double().cpu(), augmented.double().cpu()
    for m in range(augmented.shape[0]):
        for i in range(augmented.shape[1]):
            scores = [torch.exp(weight[j] @ augmented[m, i] + bias[j]) for j in range(len(weight))]
            total = total - torch.log(scores[int(target[i])] / sum(scores))
    return total / (augmented.shape[0] * augmented.shape[1])


def printed_weight_gradient(
    feature: Tensor, weight: Tensor, y: int, matrix: Tensor, *, strength: float
) -> Tensor:
    """Eq. 13 for one sample exactly as the paper prints it, its row j = y included (no bias)."""
    slope = _slope(feature, weight, y, matrix, strength=strength)
    rows = []
    for j in range(len(weight)):
        if j == y:
            pull = sum(strength * (weight[n] - weight[y]) @ matrix for n in range(len(weight)))
        else:
            pull = strength * (weight[j] - weight[y]) @ matrix
        rows.append((feature + pull) * slope[j])
    return torch.stack(rows)


def corrected_weight_gradient(
    feature: Tensor, weight: Tensor, y: int, matrix: Tensor, *, strength: float
) -> Tensor:
    """Eq. 13 with its row j = y corrected: (p_y − 1) a − λ Σ_y Σ_n p_n (w_n − w_y)."""
    slope = _slope(feature, weight, y, matrix, strength=strength)
    rows = []
    for j in range(len(weight)):
        if j == y:
            pull = sum(
                slope[n] * matrix @ (weight[n] - weight[y]) for n in range(len(weight)) if n != y
            )
            rows.append(slope[y] * feature - strength * pull)
        else:
            rows.append((feature + strength * matrix @ (weight[j] - weight[y])) * slope[j])
    return torch.stack(rows)


def _bound(
    feature: Tensor, weight: Tensor, bias: Tensor, y: int, matrix: Tensor, *, strength: float
) -> Tensor:
    """Eq. 4 for one sample of class y: −log of e^(w_y a + b_y) over the sum of the shifted ones."""
    shifted = []
    for j in range(len(weight)):
        margin = weight[j] - weight[y]
        shift = strength / 2 * (margin @ matrix @ margin)
        shifted.append(torch.exp(weight[j] @ feature + bias[j] + shift))
    return -torch.log(torch.exp(weight[y] @ feature + bias[y]) / sum(shifted))


def _slope(feature: Tensor, weight: Tensor, y: int, matrix: Tensor, *, strength: float) -> Tensor:
    """∂L/∂z_j of Eq. 12."""
    shifted = []
    for j in range(len(weight)):
        margin = weight[j] - weight[y]
        shifted.append(torch.exp(weight[j] @ feature + strength / 2 * (margin @ matrix @ margin)))
    return torch.stack([shifted[j] / sum(shifted) - int(j == y) for j in range(len(weight))])
