r"""Semi-supervised ISDA: a consistency loss for samples without a label.

In the spirit of Wang et al., "Regularizing Deep Networks with Semantic Data Augmentation" (TPAMI
2021), the journal version of ISDA. An unlabelled sample is augmented with the covariance of the
class that it is predicted as, its pseudo-class ŷ_i. The prediction for the augmented features is
trained to match the prediction p_i for the original features, which gets no gradient:

    p_i    = softmax(z_i),  ŷ_i = argmax_k p_ik,  z_ij = w_j·a_i + b_j
    loss_i = Σ_k p_ik [ log Σ_j exp(z_ij + (λ/2) (w_j − w_k)ᵀ Σ_ŷ (w_j − w_k)) − z_ik ]
    loss   = L_ISDA(labelled) + ρ mean_i loss_i

In words: loss_i is the upper bound on the expected cross entropy between p_i and the prediction for
ã ~ N(a_i, λ Σ_ŷ). Minus the entropy of p_i, which is a constant, it bounds the KL divergence. Only
labelled samples enter the statistics.
"""

import torch
from torch import Tensor, nn

import isda

__all__ = ["semi_supervised_loss"]


def semi_supervised_loss(
    criterion: isda.ISDALoss,
    head: nn.Linear,
    features: Tensor,  # (N, A)
    target: Tensor,  # (N,)
    unlabelled: Tensor,  # (M, A), features
    *,
    progress: float,
    consistency: float = 1.0,
) -> Tensor:
    loss = criterion(features, head.weight, target, bias=head.bias, progress=progress)
    logits = head(unlabelled)
    probabilities = logits.detach().softmax(1)
    consistency_loss = criterion(
        unlabelled,
        head.weight,
        probabilities,
        logits=logits,
        progress=progress,
        covariance_index=probabilities.argmax(1),
        update=False,
    )
    return loss + consistency * consistency_loss


def main() -> None:
    torch.manual_seed(0)
    target = torch.arange(4).repeat(100)
    x = torch.randn(4, 10)[target] + torch.randn(400, 10)
    body, head = nn.Sequential(nn.Linear(10, 16), nn.ReLU()), nn.Linear(16, 4)
    criterion = isda.ISDALoss(16, 4, lambda_0=0.5)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for step in range(60):
        batch = torch.randint(40, (16,))  # the first 40 samples have a label
        features, unlabelled = body(x[batch]), body(x[torch.randint(40, 400, (48,))])
        loss = semi_supervised_loss(
            criterion,
            head,
            features,
            target[batch],
            unlabelled,
            progress=step / 60,
            consistency=min(1, step / 20),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == 59:
            error = (head(body(x)).argmax(1) != target).float().mean().item()
            print(f"step {step + 1:2d}: error {100 * error:.1f} %, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
