"""The functional cross entropy equals torch's: reductions, targets, weights, smoothing."""

import pytest
import torch
from equations import as_kind, close, library
from reference import draw
from torch.nn import functional as F

from isda import functional


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["index", "soft", "ignore"])
def test_cross_entropy_is_that_of_torch(reduction, kind, device):
    x = draw(7, 4, 5, device=device)
    target = as_kind(x.target, 4, kind, torch.float64)
    logits = F.linear(x.features, x.weight, x.bias)
    options = {"ignore_index": 1, "reduction": reduction}
    found = functional.cross_entropy(logits, target, **options)
    if kind == "soft":
        del options["ignore_index"]  # torch rejects it
    close(found, F.cross_entropy(logits, target, **options).cpu(), tolerance=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["index", "soft", "ignore"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_class_weights_and_smoothing_are_those_of_torch(
    weighted, smoothing, kind, reduction, device
):
    """At λ = 0 the ISDA loss is torch's cross entropy with the same options."""
    x = draw(7, 13, 5, device=device)
    target = as_kind(x.target, 13, kind, torch.float64)
    class_weight = torch.rand(13, dtype=torch.float64, device=device) if weighted else None
    options = {"label_smoothing": smoothing, "reduction": reduction}
    if kind == "ignore":
        options["ignore_index"] = -100
    logits = F.linear(x.features, x.weight, x.bias)
    expected = F.cross_entropy(logits, target, weight=class_weight, **options)
    for found in (
        functional.cross_entropy(logits, target, class_weight=class_weight, **options),
        functional.isda_loss(
            x.features, x.weight, target, library("full", x.covariance), strength=0.0,
            bias=x.bias, class_weight=class_weight, **options,
        ),
    ):  # fmt: skip
        torch.testing.assert_close(found, expected)


def test_mean_over_no_sample_is_zero(device):
    logits = torch.randn(3, 4, device=device, requires_grad=True)
    for rows, target in ((logits[:0], []), (logits, [-100, -100, -100])):
        loss = functional.cross_entropy(
            rows, torch.tensor(target, dtype=torch.int64, device=device)
        )
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss == 0
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_probabilities_are_not_rounded_again(dtype, device):
    """1 − y and smoothed probabilities are computed in float32."""
    target = torch.tensor([[0.3, 0.7], [0.9, 0.1]], device=device).to(dtype)
    logits = torch.tensor([[1.0, -2.0], [0.5, 3.0]], device=device)
    losses = {
        "cross_entropy": lambda y: functional.cross_entropy(logits, y, label_smoothing=0.1),
        "isda_cross_entropy": lambda y: functional.isda_cross_entropy(
            logits, y, torch.ones_like(logits), strength=0.5, label_smoothing=0.1
        ),
        "isda_binary_cross_entropy": lambda y: functional.isda_binary_cross_entropy(
            logits, y, torch.ones_like(logits), strength=0.5
        ),
    }
    for name, loss in losses.items():
        assert loss(target) == loss(target.float()), name


def test_unknown_reduction(device):
    x = draw(3, 4, 3, device=device)
    message = "reduction must be 'mean', 'sum' or 'none', got 'avg'"
    with pytest.raises(ValueError, match=message):
        functional.cross_entropy(x.features @ x.weight.T, x.target, reduction="avg")
    with pytest.raises(ValueError, match=message):
        functional.isda_loss(
            x.features, x.weight, x.target, functional.identity_quadratic, strength=0.5,
            reduction="avg",
        )  # fmt: skip
