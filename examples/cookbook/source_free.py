r"""Source-free adaptation: statistics of the source classes replace the source data.

In the spirit of Hwang et al., "SF(DA)²: Source-free Domain Adaptation Through the Lens of Data
Augmentation" (ICLR 2024). A network comes with the covariance Σ_c of every source class, and the
target data have no labels. A sample is augmented with the covariance of its pseudo-label ŷ_i, and
its prediction is trained to match the mean prediction of its K nearest neighbours N(i) in the
batch, which gets no gradient:

    p_i    = softmax(z_i),  ŷ_i = argmax_k p_ik,  z_ij = w_j·a_i + b_j
    t_i    = (1/K) Σ_{n ∈ N(i)} p_n,  neighbours by the cosine of their features
    loss_i = Σ_k t_ik [ log Σ_j exp(z_ij + (λ/2) (w_j − w_k)ᵀ Σ_ŷ (w_j − w_k)) − z_ik ]
    loss   = mean_i loss_i

In words: this is the upper bound on the expected cross entropy between t_i and the prediction for
ã ~ N(a_i, λ Σ_ŷ). The statistics are frozen: no sample of the target domain changes them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isda

__all__ = ["adaptation_loss"]


def adaptation_loss(
    criterion: isda.ISDALoss, head: nn.Linear, features: Tensor, *, neighbours: int = 3
) -> Tensor:
    logits = head(features)  # (N, C)
    with torch.no_grad():
        probabilities = logits.softmax(1)
        direction = F.normalize(features)
        similarity = (direction @ direction.T).fill_diagonal_(-torch.inf)  # (N, N)
        nearest = similarity.topk(neighbours).indices  # (N, K)
    return criterion(
        features,
        head.weight,
        probabilities[nearest].mean(1),
        logits=logits,
        covariance_index=probabilities.argmax(1),
    )


def main() -> None:
    torch.manual_seed(0)
    target = torch.arange(4).repeat(100)
    source = 2 * torch.randn(4, 10)[target] + torch.randn(400, 10)
    x = source.roll(4, 0) + 1.5 * torch.randn(10)  # the target domain: the same classes, shifted
    body, head = nn.Sequential(nn.Linear(10, 16), nn.ReLU()), nn.Linear(16, 4)
    criterion = isda.ISDALoss(16, 4, lambda_0=0.5, total_steps=60)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for _ in range(60):  # on the source data
        batch = torch.randint(400, (64,))
        loss = criterion(body(source[batch]), head.weight, target[batch], bias=head.bias)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    estimator = criterion.estimator  # only this and the network leave the source domain
    criterion = isda.ISDALoss(16, 4, covariance=estimator, total_steps=60, frozen=True)
    optimizer = torch.optim.SGD(body.parameters(), lr=0.05)  # the head stays as it is
    for step in range(60):
        loss = adaptation_loss(criterion, head, body(x[torch.randint(400, (64,))]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == 59:
            error = (head(body(x)).argmax(1) != target).float().mean().item()
            print(f"step {step + 1:2d}: error {100 * error:.1f} %, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
