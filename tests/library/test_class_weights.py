"""Class weights and label smoothing of ISDALoss, against naive loops."""

import pytest
import torch
from bounds import STRENGTH, A, C, N, close, inputs, make, naive_bounds, structures
from torch import nn
from torch.nn import functional as F

from isda import functional


@structures
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weight_and_label_smoothing(structure, weighted, smoothing, reduction, device):
    x = inputs(device)
    weight = torch.linspace(0.5, 2, C, device=device) if weighted else None
    criterion = make(
        device, covariance=structure, weight=weight, label_smoothing=smoothing, reduction=reduction
    )
    target = x.target.clone()
    target[3] = -100
    loss = criterion(x.features, x.weight, target, bias=x.bias)
    scale = torch.ones(C).double() if weight is None else weight.double().cpu()
    bounds = naive_bounds(criterion, x)
    losses, total = [], 0.0
    for i, y in enumerate(target.tolist()):
        if y < 0:
            losses.append(torch.zeros(()).double())
            continue
        value = (1 - smoothing) * scale[y] * bounds[i, y]
        value = value + smoothing / C * sum(scale[k] * bounds[i, k] for k in range(C))
        losses.append(value)
        total += scale[y]
    each = torch.stack(losses)
    close(loss, {"none": each, "sum": each.sum(), "mean": each.sum() / total}[reduction])


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("train", [False, True])
def test_without_strength_it_is_torch_cross_entropy(train, reduction, soft, device):
    x = inputs(device)
    target = torch.randn(N, C, device=device).softmax(1) if soft else x.target.clone()
    if not soft:
        target[2] = -100
    weight = torch.rand(C, device=device)
    options = {"weight": weight, "label_smoothing": 0.1, "reduction": reduction}
    criterion = make(device, lambda_0=0.0, **options).train(train)
    found = criterion(x.features, x.weight, target, bias=x.bias)
    expected = nn.CrossEntropyLoss(**options)(F.linear(x.features, x.weight, x.bias), target)
    torch.testing.assert_close(found, expected)


def test_gradient_of_a_weighted_smoothed_loss(device):
    x = inputs(device)
    criterion = make(device, weight=torch.linspace(0.5, 2, C).to(device), label_smoothing=0.2)
    leaves = [t.clone().requires_grad_() for t in (x.features, x.weight)]
    criterion(leaves[0], leaves[1], x.target, bias=x.bias).backward()
    covariance = criterion.estimator.covariance.double().cpu()
    doubles = [t.detach().double().cpu().requires_grad_() for t in leaves]
    functional.isda_loss(
        doubles[0],
        doubles[1],
        x.target.cpu(),
        lambda weight, target: functional.full_quadratic(weight, target, covariance),
        strength=STRENGTH,
        bias=x.bias.double().cpu(),
        class_weight=criterion.weight.double().cpu(),
        label_smoothing=0.2,
    ).backward()
    for leaf, expected in zip(leaves, doubles, strict=True):
        close(leaf.grad, expected.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("train", [False, True])
def test_class_weights_of_another_dtype(dtype, train, device):
    """Summed in float64, because the sum of 70,000 weights overflows float16."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(70_000, A, generator=generator).to(device)
    target = torch.randint(C, (70_000,), generator=generator).to(device)
    weight, scale = inputs(device).weight, torch.linspace(0.5, 2, C, device=device)
    criterion = make(device, lambda_0=0.0, weight=scale.to(dtype)).train(train)
    expected = F.cross_entropy(features @ weight.T, target, weight=scale)
    # weights rounded to 8 bits
    torch.testing.assert_close(criterion(features, weight, target), expected, rtol=1e-2, atol=0)
