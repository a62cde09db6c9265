r"""A cosine classifier with a learned scale.

ISDA with a normalised classifier as in Wang et al., "NormFace" (ACM Multimedia 2017). Let
â = a / |a|, ŵ_j = w_j / |w_j| and y = y_i; the scale s > 0 is learned as its logarithm:

    z_ij   = s ŵ_j·â_i
    loss_i = log Σ_j exp(z_ij + (λ s²/2) (ŵ_j − ŵ_y)ᵀ Σ_y (ŵ_j − ŵ_y)) − z_iy

In words: this is Eq. 4 for a linear layer with weight s ŵ and features â, where Σ_y is the
covariance of â in class y. The gradient reaches s and w through the logits and the quadratic term.
The layer is an ``nn.Linear`` with a parametrised weight, so ``isda.attach`` finds it.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import isda

__all__ = ["CosineWeight", "Normalize", "create_cosine_head"]


class CosineWeight(nn.Module):
    """Weight of a linear layer: rows of length s."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(scale).log())

    def forward(self, weight: Tensor) -> Tensor:
        return self.log_scale.exp() * F.normalize(weight)


class Normalize(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(features)


def create_cosine_head(num_features: int, num_classes: int, scale: float = 16.0) -> nn.Sequential:
    linear = nn.Linear(num_features, num_classes, bias=False)
    parametrize.register_parametrization(linear, "weight", CosineWeight(scale))
    return nn.Sequential(Normalize(), linear)


def main() -> None:
    torch.manual_seed(0)
    target = torch.arange(4).repeat(100)
    x = torch.randn(4, 10)[target] + torch.randn(400, 10)
    head = create_cosine_head(16, 4, scale=4.0)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), head)
    criterion = isda.attach(model, lambda_0=0.5, total_steps=60)  # as for any model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(60):
        batch = torch.randint(400, (64,))
        loss = criterion(model(x[batch]), target[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == 59:
            scale = head.get_parameter("1.parametrizations.weight.0.log_scale").exp().item()
            print(f"step {step + 1:2d}: scale {scale:.2f}, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
