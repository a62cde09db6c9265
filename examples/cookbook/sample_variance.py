r"""Variances of each sample from a small network, as an example of your own estimator.

In the spirit of methods that predict the augmentation of each sample. The network g is a linear
layer that starts at 0; there, the method is ISDA with the class variances v_c. With y = y_i:

    r_i    = g(a_i),  v'_ia = v_ya exp(r_ia)
    loss_i = log Σ_j exp(z_ij + (λ/2) Σ_a v'_ia (w_ja − w_ya)²) − z_iy
    loss   = mean_i loss_i + ρ mean_i ½ Σ_a (exp(r_ia) − 1 − r_ia)

In words: each sample scales the variances of its class. The second term is the KL divergence
between normal distributions with variances v'_i and v_y; without it, the network would learn
variances of 0. The gradient reaches g through the tensor that ``quadratic`` returns, and the
features only through the logits, as in ISDA.
"""

import torch
from torch import Tensor, nn

import isda

__all__ = ["SampleVariance"]


class SampleVariance(isda.DiagonalCovariance):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__(num_features, num_classes)
        self.network = nn.Linear(num_features, num_features)
        nn.init.zeros_(self.network.weight)
        nn.init.zeros_(self.network.bias)

    def update(self, features: Tensor, target: Tensor) -> None:
        super().update(features, target)
        self.log_ratio = self.network(features.float())  # (N, A)

    def quadratic(
        self, weight: Tensor, target: Tensor, covariance_index: Tensor | None = None
    ) -> Tensor:
        variance = self.variance[target] * self.log_ratio.exp()  # (N, A)
        index = torch.arange(len(target), device=target.device)
        return isda.functional.diagonal_quadratic(
            weight.float(), target, variance, covariance_index=index
        )

    def divergence(self) -> Tensor:
        return 0.5 * (self.log_ratio.exp() - 1 - self.log_ratio).sum(1).mean()


def main() -> None:
    torch.manual_seed(0)
    target = torch.arange(4).repeat(100)
    x = torch.randn(4, 10)[target] + torch.randn(400, 10)
    body, head = nn.Sequential(nn.Linear(10, 16), nn.ReLU()), nn.Linear(16, 4)
    estimator = SampleVariance(16, 4)
    # quadratic uses the samples of the last update, which must not include those of other ranks
    criterion = isda.ISDALoss(
        16, 4, lambda_0=1.0, total_steps=60, covariance=estimator, synchronize=False
    )
    parameters = [*body.parameters(), *head.parameters(), *criterion.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(60):
        batch = torch.randint(400, (64,))
        loss = criterion(body(x[batch]), head.weight, target[batch], bias=head.bias)
        divergence = estimator.divergence()
        optimizer.zero_grad()
        (loss + 0.1 * divergence).backward()
        optimizer.step()
        if step % 20 == 0 or step == 59:
            print(f"step {step + 1:2d}: divergence {divergence.item():.4f}, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
