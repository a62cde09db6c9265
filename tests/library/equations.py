"""Helpers for the tests of the functional forms: shapes, structures and tolerances.

The tolerances: float64 runs are held to 1e-10, far above its rounding and far below anything else;
float32 runs to 2e-5 of the largest value, that is 2⁻²⁴ ≈ 6e-8 for each of the up to 13·13 terms of
either sign that are added to a value of that size.
"""

import functools
from collections.abc import Callable

import pytest
import reference
import torch
from torch import Tensor

from isda import functional

__all__ = [
    "as_kind",
    "close",
    "dtypes",
    "leaf",
    "library",
    "matrices",
    "shapes",
    "structures",
]

SHAPES = [(7, 13, 5), (1, 3, 4), (0, 3, 4), (23, 3, 6), (5, 2, 1)]  # (N, C, A)
SINGLE = 2e-5
DTYPES = [torch.float64, torch.float32]
STRUCTURES = ["full", "diagonal", "shared", "identity"]

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("real", DTYPES, ids=str)
structures = pytest.mark.parametrize("structure", STRUCTURES)


def close(found: Tensor, expected: Tensor, *, tolerance: float | None = None) -> None:
    """Equal up to a tolerance times the largest expected value."""
    if tolerance is None:
        tolerance = 1e-10 if found.dtype == torch.float64 else SINGLE
    size = expected.abs().max().item() if expected.numel() else 0.0
    found = found.detach().cpu().double()
    torch.testing.assert_close(
        found, expected.detach().double(), rtol=0, atol=tolerance * max(size, 1.0)
    )


def library(structure: str, covariance: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The library's quadratic, as a function of (weight, target)."""
    if structure == "full":
        return functools.partial(functional.full_quadratic, covariance=covariance)
    if structure == "diagonal":
        variance = covariance.diagonal(dim1=1, dim2=2)
        return functools.partial(functional.diagonal_quadratic, variance=variance)
    if structure == "shared":
        return functools.partial(functional.shared_quadratic, covariance=covariance[0])
    return functional.identity_quadratic


def matrices(structure: str, covariance: Tensor) -> list[Tensor]:
    """The matrices Σ_c of a structure."""
    if structure == "diagonal":
        return reference.variance_matrices(covariance.diagonal(dim1=1, dim2=2))
    if structure == "shared":
        return [covariance[0]] * len(covariance)
    if structure == "identity":
        return reference.identity_matrices(covariance[:, 0])
    return list(covariance)


def leaf(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def as_kind(target: Tensor, classes: int, kind: str, real: torch.dtype) -> Tensor:
    """Class indices as they are, with class 1 ignored, or as probabilities."""
    if kind == "soft":
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn(len(target), classes, generator=generator, dtype=torch.float64)
        return logits.softmax(1).to(target.device, real)
    if kind == "index":
        return torch.where(target == 1, classes - 1, target)
    return target
