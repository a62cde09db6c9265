"""What the tests of the cookbook share: entries, naive bounds, and tolerances."""

import importlib.util
import math
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.testing import assert_close

__all__ = [
    "EXACT",
    "ROOT",
    "SINGLE",
    "assert_same",
    "bound",
    "create_head",
    "largest",
    "linear",
    "load",
    "softmax",
    "twins",
]

ROOT = Path(__file__).parents[2]

# functional entries in float64: sums of some hundred terms, in another order
EXACT = {"rtol": 1e-9, "atol": 1e-11}
# statistics and quadratic terms are float32, split into two bfloat16 (2⁻¹⁶) on a GPU; gradients sum
# up to a hundred of them
SINGLE = {"rtol": 2e-4, "atol": 2e-5}


@cache
def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"cookbook_{name}", ROOT / "examples" / "cookbook" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bound(
    logits: list[Tensor], weight: Tensor, label: int, matrix: Tensor, strength: float
) -> Tensor:
    """log Σ_j exp(z_j + (λ/2) (w_j − w_k)ᵀ Σ (w_j − w_k)) − z_k for one sample and label k."""
    total = torch.zeros((), dtype=torch.float64)
    for j in range(len(weight)):
        margin = weight[j] - weight[label]
        total = total + torch.exp(logits[j] + strength / 2 * (margin @ matrix @ margin))
    return torch.log(total) - logits[label]


def linear(feature: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
    """Logits of one sample."""
    return [weight[j] @ feature + (0.0 if bias is None else bias[j]) for j in range(len(weight))]


def softmax(logits: list[Tensor]) -> list[float]:
    total = sum(math.exp(z.item()) for z in logits)
    return [math.exp(z.item()) / total for z in logits]


def largest(values: list[float]) -> int:
    return max(range(len(values)), key=lambda k: values[k])


def twins(*tensors: Tensor, device: torch.device, dtype: torch.dtype) -> list[list[Tensor]]:
    """Leaves with the same values for the entry and for the naive loop."""
    rounded = [tensor.detach().to(dtype) for tensor in tensors]
    return [
        [tensor.to(device).clone().requires_grad_() for tensor in rounded],
        [tensor.double().cpu().clone().requires_grad_() for tensor in rounded],
    ]


def create_head(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with given leaves as its parameters."""
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    head.weight = nn.Parameter(weight)
    if bias is not None:
        head.bias = nn.Parameter(bias)
    return head


def assert_same(
    loss: Tensor,
    expected: Tensor,
    leaves: list[Tensor],
    expected_leaves: list[Tensor],
    tolerance: dict[str, float],
) -> None:
    """Equal values and equal gradients."""
    assert_close(loss.double().cpu(), expected, **tolerance)
    gradients = torch.autograd.grad(loss, leaves)
    expected_gradients = torch.autograd.grad(expected, expected_leaves)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert expected_gradient.abs().max() > 0
        assert_close(gradient.double().cpu(), expected_gradient, **tolerance)
