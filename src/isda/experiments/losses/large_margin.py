"""The large-margin softmax (Liu et al., 2016), a baseline of Table 4."""

import math

import torch
from torch import Tensor

from isda import ops
from isda.experiments.losses.base import (
    IGNORED,
    Batch,
    Criterion,
    is_number,
    require,
    require_count,
)

__all__ = ["LargeMarginLoss", "annealed_beta", "large_margin_cosine", "large_margin_logits"]


def annealed_beta(
    progress: float | Tensor, *, beta_start: float = 1000.0, beta_min: float = 0.0
) -> float | Tensor:
    r"""Weight β = max(beta_min, beta_start · (1 + 0.3 t/T)⁻⁴⁵) of the ordinary logit.

    This is the schedule of Liu et al. for CIFAR-10 with augmentation, β = 1000 · (1 + 10⁻⁵ t)⁻⁴⁵
    over T = 30,000 steps, rescaled to any T. It starts close to cross entropy; β is 1.9 halfway and
    0.007 at the end.

    Args:
        progress: t/T in [0, 1].
        beta_start: β at the start.
        beta_min: smallest β.
    """
    beta = beta_start * (1 + 0.3 * progress) ** -45
    return beta.clamp(min=beta_min) if isinstance(beta, Tensor) else max(beta, beta_min)


def large_margin_cosine(cosine: Tensor, *, margin: int) -> Tensor:
    r"""ψ(θ) = (−1)ᵏ cos(mθ) − 2k for θ in [kπ/m, (k+1)π/m], from cos θ.

    Equivalent to the formula with θ = arccos(cosine). Here cos(mθ) is the Chebyshev polynomial of
    degree m, and k is the number of j in 1 … m−1 with cos θ ≤ cos(jπ/m), so the gradient is finite
    at cos θ = ±1, where that of arccos is not.

    Args:
        cosine: cos θ.
        margin: margin m.

    Shape:
        output has the shape of cosine.

    Example:
        >>> large_margin_cosine(torch.tensor([1.0, 0.0, -1.0]), margin=2)
        tensor([ 1., -1., -3.])
    """
    previous, multiple = torch.ones_like(cosine), cosine
    for _ in range(margin - 1):  # cos((n+1)θ) = 2 cos θ cos(nθ) − cos((n−1)θ)
        previous, multiple = multiple, 2 * cosine * multiple - previous
    k = torch.zeros_like(cosine)
    for j in range(1, margin):
        k = k + (cosine <= math.cos(j * math.pi / margin))
    return (1 - 2 * (k % 2)) * multiple - 2 * k


def large_margin_logits(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    logits: Tensor,
    *,
    margin: int,
    beta: float | Tensor = 0.0,
) -> Tensor:
    r"""Logits with |w_y| |a| (β cos θ + ψ(θ)) / (1 + β) in place of w_y · a for the target y.

    θ is the angle between the features a and the row w_y. The original has no bias; here a bias is
    added to the target's logit as to the others.

    Args:
        features: input of the final linear layer.
        weight: weight of the final linear layer.
        target: class indices in ``[0, C)``.
        logits: output of the final linear layer.
        margin: margin m; 1 changes nothing.
        beta: weight β of the ordinary logit.

    Shape:
        features (N, A), weight (C, A), target (N,), logits (N, C); output (N, C).
    """
    own = weight[torch.where(target == IGNORED, 0, target)]  # (N, A)
    inner = (features * own).sum(1)
    length = features.norm(dim=1) * own.norm(dim=1)
    cosine = inner / length.clamp(min=1e-12)  # features may be zero
    change = (length * large_margin_cosine(cosine, margin=margin) - inner) / (1 + beta)
    classes = torch.arange(logits.shape[1], device=logits.device)
    return logits + torch.where(classes == target[:, None], change[:, None], 0.0)


class LargeMarginLoss(Criterion):
    """Cross entropy of :func:`large_margin_logits` with annealed β (Liu et al., 2016).

    β depends on ``progress`` as in :func:`annealed_beta`, so every call in training mode needs
    ``progress``, unless ``beta_start <= beta_min``, where β is always ``beta_min``. The paper
    states neither margin nor annealing; both are those of Liu et al. for CIFAR-10 with
    augmentation.

    Args:
        margin: margin m; 1 is cross entropy.
        beta_start: β at the start.
        beta_min: smallest β.
    """

    def __init__(
        self, *, margin: int = 2, beta_start: float = 1000.0, beta_min: float = 0.0
    ) -> None:
        super().__init__()
        require_count("margin", margin)
        for name, beta in (("beta_start", beta_start), ("beta_min", beta_min)):
            holds = is_number(beta) and 0 <= beta < math.inf
            require(holds, name, beta, ">= 0 and finite")
        self.margin, self.beta_start, self.beta_min = margin, beta_start, beta_min

    def loss(self, batch: Batch) -> Tensor:
        logits = large_margin_logits(
            batch.features.to(batch.logits.dtype),
            batch.weight.to(batch.logits.dtype),
            batch.target,
            batch.logits,
            margin=self.margin,
            beta=self._beta(batch.progress),
        )
        return batch.mean(ops.cross_entropy(logits, batch.target, reduction="none"))

    def _beta(self, progress: float | Tensor | None) -> float | Tensor:
        if self.beta_start <= self.beta_min:
            return self.beta_min
        if progress is None:
            raise ValueError(
                "progress must be given in training, because β depends on it; got None"
            )
        return annealed_beta(progress, beta_start=self.beta_start, beta_min=self.beta_min)

    def extra_repr(self) -> str:
        return f"margin={self.margin}, beta_start={self.beta_start}, beta_min={self.beta_min}"
