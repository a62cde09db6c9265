r"""Class-incremental learning: replay of class means with their covariances (IL2A).

The semantic augmentation and the distillation of Zhu et al., "Class-Incremental Learning via Dual
Augmentation" (NeurIPS 2021), without its class augmentation and temperature. After a task, only the
mean μ_c and the covariance Σ_c of its classes are kept, but no samples. To learn a new task, each
batch is paired with as many old classes c, drawn at random:

    replay_c = log Σ_j exp(w_j·μ_c + b_j + (λ/2) (w_j − w_c)ᵀ Σ_c (w_j − w_c)) − w_c·μ_c − b_c
    loss     = CE(new samples) + γ mean_c replay_c + η (Σ_i |a_i − a_i^old|²)^(1/2)

In words: the final layer must still classify infinitely many features drawn from N(μ_c, λ Σ_c) for
each old class, and the features of the new samples must stay near those of the old network.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isda

__all__ = ["grow_head", "il2a_loss"]


def grow_head(head: nn.Linear, num_classes: int) -> nn.Linear:
    grown = nn.Linear(head.in_features, num_classes).to(head.weight.device)
    with torch.no_grad():
        grown.weight[: head.out_features] = head.weight
        grown.bias[: head.out_features] = head.bias
    return grown


def il2a_loss(
    criterion: isda.ISDALoss,  # frozen, ramp="constant"
    head: nn.Linear,
    features: Tensor,  # (N, A)
    old_features: Tensor,  # (N, A)
    target: Tensor,  # (N,)
    old_target: Tensor,  # (M,), drawn from the old classes
    prototype: Tensor,  # (C, A), mean of each class
    gamma: float = 10.0,
    eta: float = 10.0,
) -> Tensor:
    loss = F.cross_entropy(head(features), target)
    replay = criterion(prototype[old_target], head.weight, old_target, bias=head.bias)
    return loss + gamma * replay + eta * (features - old_features).norm()


def main() -> None:
    torch.manual_seed(0)
    target = torch.arange(6).repeat(100)
    x = 2 * torch.randn(6, 10)[target] + torch.randn(600, 10)
    body, head = nn.Sequential(nn.Linear(10, 16), nn.ReLU()), nn.Linear(16, 2)
    estimator = isda.FullCovariance(16, 2)
    criterion = isda.ISDALoss(
        16, 2, lambda_0=2.5, covariance=estimator, ramp="constant", frozen=True
    )
    old_body = copy.deepcopy(body)
    for task, num_classes in enumerate((2, 4, 6)):
        num_old = num_classes - 2 if task else 0
        if task:
            head = grow_head(head, num_classes)
            criterion.grow(num_classes)
        new = ((target >= num_old) & (target < num_classes)).nonzero().flatten()
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.02)
        for step in range(60):
            batch = new[torch.randint(len(new), (32,))]
            features = body(x[batch])
            if task:
                loss = il2a_loss(
                    criterion,
                    head,
                    features,
                    old_body(x[batch]).detach(),
                    target[batch],
                    torch.randint(num_old, (32,)),
                    estimator.moments.mean.float(),
                    gamma=1.0,
                    eta=0.1,
                )
            else:
                loss = F.cross_entropy(head(features), target[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step in (0, 59):
                print(f"task {task + 1}, step {step + 1:2d}: loss {loss.item():.3f}")
        old_body = copy.deepcopy(body)
        with torch.no_grad():
            estimator.update(body(x[new]), target[new])
            seen = target < num_classes
            error = (head(body(x[seen])).argmax(1) != target[seen]).float().mean().item()
        print(f"task {task + 1}: error {100 * error:.1f} % of {num_classes} classes")


if __name__ == "__main__":
    main()
