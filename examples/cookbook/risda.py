r"""RISDA: means and covariances that tail classes borrow from the classes they are confused with.

In the spirit of Chen et al., "Imagine by Reasoning: A Reasoning-Based Implicit Semantic Data
Augmentation for Long-Tailed Classification" (AAAI 2022). The first stage trains the network. The
second stage trains the final layer, with the statistics μ_c, Σ_c and the confusion matrix M of the
first stage (M_ck samples of class c are predicted as k). With y = y_i:

    K_ck   = M_ck / Σ_l M_cl
    δ_c    = Σ_k K_ck μ_k − μ_c
    Σ'_c   = Σ_k K_ck Σ_k
    z'_ij  = w_j·(a_i + α δ_y) + b_j
    loss_i = log Σ_j exp(z'_ij + (β/2) (w_j − w_y)ᵀ Σ'_y (w_j − w_y)) − z'_iy
    loss   = Σ_i v_y loss_i / Σ_i v_y,  v the class weights

In words: a sample is augmented with N(a + α δ_y, β Σ'_y). The shift points to the classes that the
sample's class is confused with, and the covariance is a weighted mean over them. A row of M that is
zero except for its diagonal leaves a class unchanged: use it for classes with many samples. The
shift of the mean needs no argument of its own: it only changes the logits that are passed.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isda
from isda.functional import Moments

__all__ = ["risda_loss"]


def risda_loss(
    features: Tensor,  # (N, A)
    head: nn.Linear,
    target: Tensor,  # (N,)
    moments: Moments,
    confusion: Tensor,  # (C, C), rows are the true classes
    *,
    alpha: float,
    beta: float,
    class_weight: Tensor | None = None,
) -> Tensor:
    classes, index = target.unique(return_inverse=True)
    share = confusion[classes] / confusion[classes].sum(1, keepdim=True)  # (P, C)
    mean = moments.mean.to(share.dtype)
    shift = share @ mean - mean[classes]  # (P, A)
    covariance = torch.einsum("pc,cab->pab", share, moments.covariance)
    quadratic = isda.functional.full_quadratic(
        head.weight, target, covariance, covariance_index=index
    )
    logits = head(features + alpha * shift[index])
    return isda.functional.isda_cross_entropy(
        logits, target, quadratic, strength=beta, class_weight=class_weight
    )


def main() -> None:
    torch.manual_seed(0)
    count = torch.tensor([300, 80, 20, 6])
    target = torch.repeat_interleave(torch.arange(4), count)
    x = torch.randn(4, 10)[target] + torch.randn(len(target), 10)
    body, head = nn.Sequential(nn.Linear(10, 16), nn.ReLU()), nn.Linear(16, 4)
    estimator = isda.FullCovariance(16, 4)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for _ in range(60):  # first stage: cross entropy
        batch = torch.randint(len(target), (64,))
        loss = F.cross_entropy(head(body(x[batch])), target[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        features = body(x)
        estimator.update(features, target)
        confusion = torch.zeros(4, 4)
        confusion.index_put_((target, head(features).argmax(1)), torch.ones(()), accumulate=True)
    confusion[:2] = torch.eye(4)[:2]  # the head classes
    print("confusion:", (confusion / confusion.sum(1, keepdim=True)).tolist())
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for step in range(60):  # second stage
        batch = torch.randint(len(target), (64,))
        loss = risda_loss(
            features[batch],
            head,
            target[batch],
            estimator.moments,
            confusion,
            alpha=0.5 * step / 60,
            beta=0.5 * step / 60,
            class_weight=1 / count,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == 59:
            print(f"step {step + 1:2d}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
