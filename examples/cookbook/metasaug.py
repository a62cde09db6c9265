r"""MetaSAug: covariances improved by a meta-gradient on balanced data.

Li et al., "MetaSAug: Meta Semantic Augmentation for Long-Tailed Visual Recognition" (CVPR 2021),
with a plain SGD step as its virtual step. θ are all parameters of the network, the final layer
included, L_ISDA is Eq. 4 of ISDA with class weights, and η, γ are learning rates:

    θ'(Σ)  = θ − η ∂L_ISDA(θ; Σ)/∂θ            on a batch of the training data
    Σ'     = Σ − γ ∂L_CE(θ'(Σ))/∂Σ              on a batch of a small balanced set
    loss   = L_ISDA(θ; Σ')                      on the batch of the training data

In words: change the covariances such that a step with the augmented loss lowers the cross entropy
on balanced data, then train with them. The meta-gradient differentiates through the gradient of the
loss, so it uses the plain equations in ``isda.functional``. Σ' is symmetric but need
not be positive semi-definite.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import isda
from isda.functional import full_quadratic, isda_cross_entropy

__all__ = ["metasaug_loss"]


def metasaug_loss(
    model: nn.Module,
    head: nn.Linear,  # final layer of the model
    features: Tensor,  # (N, A), input of the head
    target: Tensor,  # (N,)
    balanced: tuple[Tensor, Tensor],
    covariance: Tensor,  # (C, A, A)
    *,
    strength: float,
    lr: float,
    meta_lr: float,
    class_weight: Tensor | None = None,
) -> Tensor:
    def loss(covariance: Tensor) -> Tensor:
        quadratic = full_quadratic(head.weight, target, covariance)
        return isda_cross_entropy(
            head(features), target, quadratic, strength=strength, class_weight=class_weight
        )

    covariance = covariance.clone().requires_grad_()
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss(covariance), parameters, create_graph=True)
    virtual = [p - lr * gradient for p, gradient in zip(parameters, gradients, strict=True)]
    logits = functional_call(model, dict(zip(names, virtual, strict=True)), balanced[0])
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, balanced[1]), covariance)
    return loss(covariance.detach() - meta_lr * gradient)


def main() -> None:
    torch.manual_seed(0)
    count = torch.tensor([300, 80, 20, 6])
    target = torch.repeat_interleave(torch.arange(4), count)
    centre = torch.randn(4, 10)
    x = centre[target] + torch.randn(len(target), 10)
    balanced_target = torch.arange(4).repeat(5)
    balanced = (centre[balanced_target] + torch.randn(20, 10), balanced_target)
    body, head = nn.Sequential(nn.Linear(10, 16), nn.ReLU()), nn.Linear(16, 4)
    model, estimator = nn.Sequential(body, head), isda.FullCovariance(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(60):
        batch = torch.randint(len(target), (64,))
        features = body(x[batch])
        loss = metasaug_loss(
            model,
            head,
            features,
            target[batch],
            balanced,
            estimator.moments.covariance,
            strength=0.5 * step / 60,
            lr=0.1,
            meta_lr=0.1,
            class_weight=1 / count,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        estimator.update(features.detach(), target[batch])
        if step % 20 == 0 or step == 59:
            print(f"step {step + 1:2d}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
