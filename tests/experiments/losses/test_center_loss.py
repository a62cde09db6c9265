"""Center loss: centers move as in the original, and the term reaches the features."""

import pytest
import torch
from baseline_losses import A, C, N, call, center, close, inputs, make_model

import isda
from isda.experiments.losses.baselines import CenterLoss, center_loss, center_update


@pytest.mark.parametrize("center_weight", [0.0, 0.003, 2.0])
@pytest.mark.parametrize("samples", [7, 60])
def test_centers_move_as_in_the_original(center_weight, samples, device):
    """c_j moves by α Σ (a_i − c_j) / (1 + n_j), whatever the weight of the term."""
    criterion, x = center(center_weight).double().to(device), inputs(device, samples=samples)
    x.target[-1] = -100  # ignored
    before = criterion.centers.clone()
    expected = before.clone()
    for j in range(C):
        total, count = torch.zeros(A, dtype=torch.float64, device=device), 0
        for a, y in zip(x.features.detach(), x.target, strict=True):
            if y == j:
                total, count = total + before[j] - a, count + 1
        expected[j] -= 0.5 * total / (1 + count)
    update = center_update(x.features.detach(), before, x.target)
    call(criterion, x)
    close(criterion.centers, expected)
    close(before - 0.5 * update, expected)
    assert torch.equal(criterion.centers[2], before[2])  # the absent class


def test_centers_reach_the_class_means(device):
    """With N = 128 and C = 100, an epoch of CIFAR (390 steps) is enough."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(100, A, generator=generator)
    criterion = CenterLoss(A, 100).to(device)
    for _ in range(390):
        target = torch.randint(100, (128,), generator=generator)
        features = means[target].to(device)
        criterion(features, torch.zeros(100, A, device=device), target.to(device))
    # a step with one sample covers a quarter of the distance: (3/4)^390 remains
    close(criterion.centers.cpu(), means, tolerance=1e-6)


def test_center_term_reaches_the_features(device):
    model = make_model().to(device)
    x, target = torch.randn(N, 4, device=device), torch.arange(N, device=device)
    gradients = []
    for weight in (0.0, 1.0):
        attached = isda.attach(model, center(weight).to(device))
        loss = attached(model(x), target)
        gradients.append(torch.autograd.grad(loss, model.parameters()))
        attached.remove()
    term = center_loss(model[:2](x), center(1.0).to(device).centers, target).mean()
    expected = torch.autograd.grad(term, [model[0].weight, model[0].bias])
    found = [with_term - without for without, with_term in zip(*gradients, strict=True)]
    close(found[:2], list(expected), tolerance=1e-5)
    assert all(gradient.abs().max() > 1e-3 for gradient in found[:2])
    close(found[2:], [torch.zeros_like(gradient) for gradient in found[2:]], tolerance=1e-6)
