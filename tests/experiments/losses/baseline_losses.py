"""What the tests of the losses of Table 4 share: criteria, inputs, comparisons."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import Inputs, draw
from torch import Tensor, nn

from isda.experiments.losses.baselines import (
    CenterLoss,
    CrossEntropyLoss,
    DisturbLabelLoss,
    FocalLoss,
    LabelSmoothingLoss,
    LargeMarginLoss,
    LqLoss,
)

__all__ = [
    "CRITERIA",
    "PROGRESS",
    "A",
    "C",
    "N",
    "call",
    "center",
    "close",
    "criteria",
    "inputs",
    "make_model",
    "probability",
]

N, C, A = 7, 13, 5
PROGRESS = 0.4

CRITERIA: dict[str, Callable[[], nn.Module]] = {
    "ce": CrossEntropyLoss,
    "focal": lambda: FocalLoss(alpha=0.7, gamma=1.5),
    "lq": LqLoss,
    "label_smoothing": lambda: LabelSmoothingLoss(smoothing=0.3),
    "disturb_label": lambda: DisturbLabelLoss(C, noise_rate=0.5, seed=3),
    "center": lambda: center(0.7),
    "large_margin": lambda: LargeMarginLoss(margin=3, beta_start=5.0),
}
criteria = pytest.mark.parametrize("name", CRITERIA)


def center(center_weight: float, **options) -> CenterLoss:
    """A center loss with arbitrary centers, as after some training."""
    criterion = CenterLoss(A, C, center_weight=center_weight, **options)
    with torch.no_grad():
        criterion.centers.copy_(draw(N, C, A, seed=9, dtype=torch.float32).weight)
    return criterion


def inputs(device: torch.device, *, dtype: torch.dtype = torch.float64, samples: int = N) -> Inputs:
    x = draw(samples, C, A, dtype=dtype, device=device)
    return Inputs(x.features.requires_grad_(), x.weight.requires_grad_(), x.bias, *x[3:])


def call(criterion: nn.Module, x: Inputs, **options) -> Tensor:
    options = {"bias": x.bias, "progress": PROGRESS, **options}
    return criterion(x.features, x.weight, x.target, **options)


def close(found: Any, expected: Any, *, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_device=False)


def probability(logits: Tensor, y: int) -> Tensor:
    scores = [torch.exp(logit) for logit in logits]
    return scores[y] / sum(scores)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, A), nn.Tanh(), nn.Linear(A, C))
