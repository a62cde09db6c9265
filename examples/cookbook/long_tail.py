r"""ISDA for the long tail: LDAM margins and class-balanced weights.

Margins of Cao et al., "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss"
(NeurIPS 2019), without its normalised classifier; weights of Cui et al., "Class-Balanced Loss Based
on Effective Number of Samples" (CVPR 2019). With n_c samples of class c and y = y_i:

    m_c    = max_margin · (min_k n_k / n_c)^(1/4)
    v_c    ∝ (1 − β) / (1 − β^(n_c)),  mean over the classes 1
    z'_ij  = w_j·a_i + b_j − m_y [j = y]
    loss_i = log Σ_j exp(z'_ij + (λ/2) (w_j − w_y)ᵀ Σ_y (w_j − w_y)) − z'_iy
    loss   = Σ_i v_y loss_i / Σ_i v_y

In words: the logit of the target is lowered by a margin that is larger for rare classes, and the
mean over the samples is weighted by class. The quadratic term is 0 at the target, so the margin
needs no argument of its own: it only changes the logits that are passed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isda

__all__ = ["MarginLoss", "balanced_weight", "ldam_margin"]


def ldam_margin(count: Tensor, max_margin: float = 0.5) -> Tensor:
    return max_margin * (count.min() / count) ** 0.25


def balanced_weight(count: Tensor, beta: float = 0.9999) -> Tensor:
    weight = (1 - beta) / (1 - beta ** count.double())
    return (weight / weight.mean()).float()


class MarginLoss(nn.Module):
    """An ISDA criterion that lowers the logit of the target by the margin of its class."""

    margin: Tensor

    def __init__(self, criterion: isda.ISDALoss, margin: Tensor) -> None:
        super().__init__()
        self.criterion = criterion
        self.register_buffer("margin", margin, persistent=False)

    def forward(
        self, features: Tensor, weight: Tensor, target: Tensor, *, logits: Tensor, **options: Any
    ) -> Tensor:
        if self.training:
            logits = logits - self.margin * F.one_hot(target, len(self.margin))
        return self.criterion(features, weight, target, logits=logits, **options)

    def evaluate(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.criterion.evaluate(logits, target)


def main() -> None:
    torch.manual_seed(0)
    count = torch.tensor([400, 100, 25, 6])
    target = torch.repeat_interleave(torch.arange(4), count)
    x = 2 * torch.randn(4, 10)[target] + torch.randn(len(target), 10)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))
    criterion = isda.ISDALoss(16, 4, total_steps=60, weight=balanced_weight(count))
    attached = isda.attach(model, MarginLoss(criterion, ldam_margin(count)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(60):
        batch = torch.randint(len(target), (64,))
        loss = attached(model(x[batch]), target[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == 59:
            print(f"step {step + 1:2d}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
