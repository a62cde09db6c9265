"""Helpers for the tests of ISDALoss: batches, criteria, comparisons of their state."""

import pytest
import reference
import torch
from reference import Inputs, draw
from torch import Tensor, nn

from isda import ISDALoss

__all__ = [
    "STRUCTURES",
    "TOLERANCE",
    "A",
    "C",
    "N",
    "assert_bits",
    "assert_same",
    "batch",
    "bits",
    "call",
    "close",
    "make",
    "matrices",
    "structures",
]

STRUCTURES = ["full", "diagonal", "shared", "identity"]
structures = pytest.mark.parametrize("structure", STRUCTURES)
TOLERANCE = 1e-5  # statistics and quadratic are float32: 2⁻²⁴ for each of some hundred terms

N, C, A = 7, 13, 5


def batch(device: torch.device, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Inputs:
    x = draw(N, C, A, seed=seed, dtype=dtype, device=device)
    return Inputs(0.3 * x.features, 0.3 * x.weight, *x[2:])


def make(device: torch.device, **options) -> ISDALoss:
    return ISDALoss(A, C, **{"lambda_0": 0.5, "total_steps": 10, **options}).to(device)


def call(criterion: ISDALoss, x: Inputs, target: Tensor | None = None, **options) -> Tensor:
    target = x.target if target is None else target
    return criterion(x.features, x.weight, target, bias=x.bias, **options)


def matrices(structure: str, stream: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Σ_c of all batches so far, class indices only."""
    features, target = (torch.cat(part) for part in zip(*stream, strict=True))
    if structure == "shared":
        return [reference.pooled_moments(features, target)[2]] * C
    if structure == "identity":
        return reference.identity_matrices(features.new_empty(C, A))
    covariance = reference.class_moments(features, target, C)[2]
    if structure == "diagonal":
        return reference.variance_matrices(covariance.diagonal(dim1=1, dim2=2))
    return list(covariance)


def bits(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.named_buffers()}


def assert_bits(module: nn.Module, expected: dict[str, Tensor]) -> None:
    found = dict(module.named_buffers())
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def close(found: Tensor, expected: Tensor, *, tolerance: float = TOLERANCE) -> None:
    found, expected = (tensor.detach().double().cpu() for tensor in (found, expected))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    """The same buffers, bitwise on a CPU; on a GPU the order of additions varies."""
    if next(found.buffers()).device.type == "cpu":
        assert_bits(found, bits(expected))
    for left, right in zip(found.buffers(), expected.buffers(), strict=True):
        close(left, right)
