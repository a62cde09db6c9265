"""Helpers for the tests of multi-label targets: criteria and batches."""

from typing import Any

import reference
import torch
from reference import draw
from torch import Tensor

from isda import ISDABCEWithLogitsLoss

__all__ = ["STRENGTH", "A", "C", "N", "batch", "make"]

N, C, A = 7, 5, 4
STRENGTH = 0.8


def make(device: torch.device, *, classes: int = C, **options: Any) -> ISDABCEWithLogitsLoss:
    options = {"lambda_0": STRENGTH, "ramp": "constant", **options}
    return ISDABCEWithLogitsLoss(A, classes, **options).to(device)


def batch(
    device: torch.device, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[reference.Inputs, Tensor]:
    """Samples with no label, one label and several labels."""
    x = draw(N, C, A, seed=seed, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(N, C, generator=generator) < 0.4).to(device, dtype)
    labels[0], labels[1] = 0, 1
    return reference.Inputs(0.5 * x.features, 0.5 * x.weight, *x[2:]), labels
