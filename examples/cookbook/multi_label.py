r"""Several labels per sample: binary cross entropy under ISDA, with weights for rare labels.

This is the formula of ``isda.ISDABCEWithLogitsLoss``. Sample i has the labels P_i: y_ik is 1 for k
in P_i and 0 otherwise. Label k occurs n_k times in N training samples:

    u_k     = (N − n_k) / n_k
    q_ik    = mean over c ∈ P_i of w_kᵀ Σ_c w_k;  0 without labels
    loss_ik = u_k y_ik softplus(−z_ik + (λ/2) q_ik) + (1 − y_ik) softplus(z_ik + (λ/2) q_ik)
    loss    = mean over i and k of loss_ik

In words: a sample is augmented with the mean covariance of its own classes, and loss_ik is the
upper bound on the expected binary cross entropy of label k. Positive targets of a
rare label have a larger weight, as with ``pos_weight`` of ``nn.BCEWithLogitsLoss``.
"""

from typing import Any

import torch
from torch import Tensor, nn

import isda

__all__ = ["create_multi_label_loss"]


def create_multi_label_loss(
    num_features: int, target: Tensor, **options: Any
) -> isda.ISDABCEWithLogitsLoss:
    number, num_classes = target.shape  # of the training set
    positive = target.sum(0).clamp(min=1)
    pos_weight = (number - positive) / positive
    return isda.ISDABCEWithLogitsLoss(num_features, num_classes, pos_weight=pos_weight, **options)


def main() -> None:
    torch.manual_seed(0)
    frequency = torch.tensor([0.5, 0.4, 0.2, 0.1, 0.05])
    target = (torch.rand(400, 5) < frequency).float()
    x = target @ (2 * torch.randn(5, 10)) + torch.randn(400, 10)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 5))
    criterion = create_multi_label_loss(16, target, lambda_0=0.5, total_steps=60)
    attached = isda.attach(model, criterion)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(60):
        batch = torch.randint(400, (64,))
        loss = attached(model(x[batch]), target[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == 59:
            print(f"step {step + 1:2d}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
