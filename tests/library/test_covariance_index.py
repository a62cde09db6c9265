"""The covariance of a class that is not the target, against naive loops."""

import pytest
import torch
from bounds import C, N, close, inputs, make, naive_bounds, structures

from isda import ISDALoss


@structures
def test_covariance_index(structure, device):
    """The covariance of another class, the margins of the target."""
    x = inputs(device)
    criterion = make(device, covariance=structure, reduction="none")
    chosen = torch.tensor([4, 3, 0, 0, 3, 4, 3], device=device)
    found = criterion(x.features, x.weight, x.target, bias=x.bias, covariance_index=chosen)
    bounds = naive_bounds(criterion, x, chosen)
    close(found, bounds[torch.arange(N), x.target.cpu()])


@structures
def test_gradient_with_a_covariance_index(structure, device):
    x = inputs(device)
    criterion = make(device, covariance=structure)
    chosen = torch.tensor([4, 3, 2, 2, 3, 4, 1], device=device)
    weight = x.weight.clone().requires_grad_()
    criterion(x.features, weight, x.target, bias=x.bias, covariance_index=chosen).backward()
    wide = x.weight.double().cpu().requires_grad_()
    bounds = naive_bounds(criterion, x._replace(weight=wide), chosen)
    bounds[torch.arange(N), x.target.cpu()].mean().backward()
    close(weight.grad, wide.grad)


@structures
def test_two_losses_with_a_covariance_index(structure, device):
    """The second loss updates the statistics before the backward pass of the first."""
    x = inputs(device)
    criterion = ISDALoss(1, C, covariance=structure, ramp="constant").to(device)
    weight = x.weight[:, :1].clone().requires_grad_()
    loss = sum(
        criterion(x.features[:, :1], weight, x.target, covariance_index=x.target) for _ in range(2)
    )
    loss.backward()
    assert weight.grad.isfinite().all()


def test_covariance_index_of_ignored_and_dense_samples(device):
    x = inputs(device)
    target, chosen = x.target.clone(), torch.tensor([-5, 3, 2, 2, 3, 4, 1], device=device)
    target[0] = -100
    flat, dense = make(device, reduction="none"), make(device, reduction="none")
    expected = flat(x.features, x.weight, target, covariance_index=chosen)
    features = x.features.T[None]  # (1, A, N): seven positions
    found = dense(features, x.weight, target[None], covariance_index=chosen[None])
    torch.testing.assert_close(found[0], expected)
    assert found[0, 0] == 0


@structures
def test_covariance_index_with_class_probabilities(structure, device):
    """Σ_k p_k times the bound of label k, with margins relative to k and one Σ for all k."""
    x = inputs(device)
    criterion = make(device, covariance=structure, reduction="none")
    chosen = torch.tensor([4, 3, 2, 2, 3, 4, 1], device=device)
    target = torch.randn(N, C, device=device).softmax(1)
    found = criterion(x.features, x.weight, target, bias=x.bias, covariance_index=chosen)
    expected = sum(
        target[:, k].double().cpu()
        * naive_bounds(criterion, x._replace(target=torch.full((N,), k)), chosen)[:, k]
        for k in range(C)
    )
    close(found, expected)


def test_covariance_index_out_of_range(device):
    x = inputs(device)
    criterion = make(device)
    for wrong in (C, -1):
        chosen = x.target.clone()
        chosen[3] = wrong
        with pytest.raises(ValueError, match="found a class out of range"):  # noqa: PT012
            criterion(x.features, x.weight, x.target, covariance_index=chosen)
            criterion.check()  # a GPU reports it later
    for index, message in (
        (chosen[1:], r"covariance_index must have shape \(7,\), got \(6,\)"),
        (chosen.int(), "covariance_index must be int64 class indices"),
    ):
        with pytest.raises(ValueError, match=message):
            criterion(x.features, x.weight, x.target, covariance_index=index)
