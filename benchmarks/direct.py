"""A literal implementation of the equations of the paper.

Slow and memory-hungry on purpose: the baseline of ``benchmarks/loss.py`` and a reference for tests.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["DirectLoss"]


class DirectLoss(nn.Module):
    """ISDA as written in the paper: every class for every sample, and statistics of all classes.

    Shape:
        features (N, A), weight (C, A), target (N,), bias (C,); output ().
    """

    count: Tensor
    mean: Tensor
    covariance: Tensor

    def __init__(
        self, num_features: int, num_classes: int, *, lambda_0: float, covariance: str
    ) -> None:
        super().__init__()
        self.lambda_0, self.structure = lambda_0, covariance
        groups = 1 if covariance == "shared" else num_classes  # that have statistics of their own
        shape = [groups, num_features] + [num_features] * (covariance != "diagonal")
        if covariance != "identity":
            self.register_buffer("count", torch.zeros(groups))
            self.register_buffer("mean", torch.zeros(groups, num_features))
            self.register_buffer("covariance", torch.zeros(shape))

    def forward(
        self, features: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor, progress: float
    ) -> Tensor:
        """Algorithm 1, lines 5 to 7."""
        group = torch.zeros_like(target) if self.structure == "shared" else target
        if self.structure != "identity":
            self._update(features.detach(), group)
        difference = weight - weight[target][:, None]  # w_j − w_y, (N, C, A)
        if self.structure == "identity":
            quadratic = difference.square().sum(-1)
        elif self.structure == "diagonal":
            quadratic = (difference.square() * self.covariance[group][:, None]).sum(-1)
        else:
            product = difference @ self.covariance[group]  # of (N, A, A)
            quadratic = (product * difference).sum(-1)  # (N, C)
        logits = F.linear(features, weight, bias)
        return F.cross_entropy(logits + 0.5 * self.lambda_0 * progress * quadratic, target)

    def _update(self, features: Tensor, group: Tensor) -> None:
        """Eq. 9, 10 and 11."""
        member = F.one_hot(group, len(self.count)).to(features.dtype)  # (N, C)
        count = member.sum(0)
        divisor = count.clamp(min=1)[:, None]
        by_class = features[:, None] * member[:, :, None]  # (N, C, A)
        mean = by_class.sum(0) / divisor  # μ'
        centred = by_class - mean * member[:, :, None]  # (N, C, A)
        share = (count / (count + self.count).clamp(min=1))[:, None]
        shift = self.mean - mean
        self.mean = (1 - share) * self.mean + share * mean
        self.count = self.count + count
        if self.structure == "diagonal":
            spread = centred.square().sum(0) / divisor  # Σ'
            between = shift.square()
        else:
            share, divisor = share[:, :, None], divisor[:, :, None]
            spread = centred.permute(1, 2, 0) @ centred.permute(1, 0, 2) / divisor  # Σ', (C, A, A)
            between = shift[:, :, None] * shift[:, None]
        self.covariance = (
            (1 - share) * self.covariance + share * spread + share * (1 - share) * between
        )
