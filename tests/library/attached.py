"""Helpers for the tests of attach: a model, its batch, options, and another criterion."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["C", "LargestFeature", "N", "images", "model", "options", "sequential", "target"]

N, C = 6, 5


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, C))


@pytest.fixture
def model(device) -> nn.Sequential:
    return sequential().to(device)


@pytest.fixture
def images(device) -> Tensor:
    return torch.randn(N, 3, 2, 2, device=device)


@pytest.fixture
def target(device) -> Tensor:
    return torch.tensor([0, 4, 2, 2, 1, 2], device=device)


def options(**changes) -> dict:
    return {"lambda_0": 3.0, "ramp": "constant", **changes}


class LargestFeature(nn.Module):
    """Another loss with the same signature: cross entropy and a penalty on the features."""

    def forward(self, features, weight, target, *, bias=None, logits=None, scale=1.0) -> Tensor:
        return F.cross_entropy(logits, target) + scale * features.square().sum()
