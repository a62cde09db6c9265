"""A user's project, typed: it must train, and pass mypy --strict with the types of isda."""

import torch
from torch import Tensor, nn

import isda


def train(model: nn.Module, images: Tensor, target: Tensor, steps: int) -> float:
    criterion: isda.AttachedLoss = isda.attach(model, lambda_0=0.5, total_steps=steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.zeros(())
    for _ in range(steps):
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    strength: float = criterion.strength
    assert strength > 0, strength
    return loss.item()


torch.manual_seed(0)
network = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
first, last = (train(network, torch.ones(9, 5), torch.arange(9) % 3, steps) for steps in (1, 20))
assert last < first, (first, last)
print(f"torch-isda {isda.__version__}: loss {first:.3f} -> {last:.3f}")
