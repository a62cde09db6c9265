"""Helpers for the tests of the options of ISDALoss: criteria, inputs, and naive bounds."""

import pytest
import reference
import torch
from reference import draw
from torch import Tensor

from isda import ISDALoss

__all__ = [
    "STRENGTH",
    "A",
    "C",
    "N",
    "close",
    "inputs",
    "make",
    "naive_bounds",
    "structures",
]

STRUCTURES = ["full", "diagonal", "shared", "identity"]
structures = pytest.mark.parametrize("structure", STRUCTURES)
N, C, A = 7, 5, 4
STRENGTH = 0.7


def make(device: torch.device, **options) -> ISDALoss:
    return ISDALoss(A, C, **{"lambda_0": STRENGTH, "ramp": "constant", **options}).to(device)


def inputs(device: torch.device, *, seed: int = 0) -> reference.Inputs:
    x = draw(N, C, A, seed=seed, dtype=torch.float32, device=device)
    return reference.Inputs(0.5 * x.features, 0.5 * x.weight, *x[2:])


def close(found: Tensor, expected: Tensor) -> None:
    # float32 statistics and products: some dozen roundings of 2⁻²⁴, exponents up to about 10
    torch.testing.assert_close(found.detach().double().cpu(), expected, rtol=2e-5, atol=2e-5)


def naive_bounds(criterion: ISDALoss, x: reference.Inputs, chosen: Tensor | None = None) -> Tensor:
    """log Σ_j exp(z_j + (λ/2) (w_j − w_r)ᵀ Σ_c (w_j − w_r)) − z_k for each sample and label k.

    The reference class r is the target, and c is the target or the chosen class.
    """
    features, weight, bias = (t.double().cpu() for t in (x.features, x.weight, x.bias))
    target = x.target.cpu()
    index = target if chosen is None else chosen.cpu()
    rows = []
    for i in range(len(target)):
        covariance = criterion.estimator.class_covariance(int(index[i])).double().cpu()
        shifted, logits = [], []
        for j in range(C):
            z = weight[j] @ features[i] + bias[j]
            margin = weight[j] - weight[target[i]]
            logits.append(z)
            shifted.append(z + STRENGTH / 2 * (margin @ covariance @ margin))
        rows.append(torch.stack(shifted).logsumexp(0) - torch.stack(logits))
    return torch.stack(rows)  # (N, C)
