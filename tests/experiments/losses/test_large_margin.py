"""Large margin softmax: against metric learning, at every angle, and its β."""

import math

import pytest
import torch
from baseline_losses import A, C, call, close, inputs
from torch.nn import functional as F

from isda.experiments.losses.baselines import LargeMarginLoss
from isda.experiments.losses.large_margin import (
    annealed_beta,
    large_margin_cosine,
    large_margin_logits,
)


@pytest.mark.parametrize("margin", [1, 2, 3, 4])
def test_large_margin_against_metric_learning(margin, device):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    x = inputs(device)
    package = losses.LargeMarginSoftmaxLoss(num_classes=C, embedding_size=A, margin=margin, scale=1)
    package.W.data = x.weight.detach().T.clone()
    package.to(device)
    expected = package(x.features, x.target)
    criterion = LargeMarginLoss(margin=margin, beta_start=0.0)
    loss = call(criterion, x, bias=None, progress=None)
    close(loss, expected)
    found = torch.autograd.grad(loss, [x.features, x.weight])
    (features_grad, weight_grad) = torch.autograd.grad(expected, [x.features, package.W])
    close(found, (features_grad, weight_grad.T))


@pytest.mark.parametrize("margin", [1, 2, 3, 4, 5])
def test_large_margin_cosine_at_every_angle(margin):
    theta = torch.linspace(0, math.pi, 997, dtype=torch.float64)
    k = (theta * margin / math.pi).floor().clamp(max=margin - 1)
    expected = (-1) ** k * torch.cos(margin * theta) - 2 * k
    found = large_margin_cosine(theta.cos(), margin=margin)
    close(found, expected)
    assert (found.diff() < 0).all()  # ψ decreases monotonically from 1
    close(found[[0, -1]], torch.tensor([1.0, 1.0 - 2 * margin], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_margin_gradient_at_the_ends(dtype, device):
    """Features parallel, antiparallel and orthogonal to a row, and zero features."""
    weight = torch.tensor([[3.0, 4.0], [0.3, 0.1]], dtype=dtype, device=device).requires_grad_()
    features = torch.tensor([[6.0, 8.0], [-6.0, -8.0], [-8.0, 6.0], [0.0, 0.0]], dtype=dtype)
    features = features.to(device).requires_grad_()
    target = torch.zeros(4, dtype=torch.int64, device=device)
    logits = large_margin_logits(features, weight, target, features @ weight.T, margin=4)
    expected = torch.tensor([50.0, -350.0, -150.0, 0.0], dtype=dtype)  # |w| |a| = 50
    close(logits[:, 0].detach().cpu(), expected, tolerance=1e-6)
    for gradient in torch.autograd.grad(F.cross_entropy(logits, target), [features, weight]):
        assert gradient.isfinite().all()


def test_beta_falls_as_in_the_original(device):
    """The original: base · (1 + gamma · iteration)^−power with 1000, 1e-5, 45 and 30,000 steps."""
    for iteration in (0, 1, 15_000, 30_000):
        expected = 1000 * (1 + 1e-5 * iteration) ** -45
        progress = iteration / 30_000
        assert annealed_beta(progress) == pytest.approx(expected)
        found = annealed_beta(torch.tensor(progress, device=device))
        assert float(found) == pytest.approx(expected, rel=1e-4)  # float32 to the power of 45
        for each in (progress, torch.tensor(progress, device=device)):
            floored = annealed_beta(each, beta_min=2.0)
            assert float(floored) == pytest.approx(max(expected, 2.0), rel=1e-4)
