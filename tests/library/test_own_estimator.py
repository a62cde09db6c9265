"""User-defined estimators: any object with update() and quadratic()."""

import pytest
import reference
import torch
from criteria import A, C, N, batch, call, close, make
from torch import Tensor

from isda import FullCovariance, ISDALoss


class Isotropic:
    """Neither an nn.Module nor a Covariance: two methods are enough."""

    def __init__(self) -> None:
        self.batches = []

    def update(self, features: Tensor, target: Tensor) -> None:
        self.batches.append((features, target))

    def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        return 2 * (weight - weight[target][:, None]).square().sum(-1)


def test_estimator_of_ones_own(device):
    x = batch(device)
    estimator = Isotropic()
    criterion = make(device, covariance=estimator, ramp="constant")
    target = x.target.clone()
    target[0] = -100
    losses = reference.isda_losses(
        x.features,
        x.weight,
        target,
        [2 * matrix for matrix in reference.identity_matrices(x.weight)],
        strength=0.5,
        bias=x.bias,
    )
    close(call(criterion, x, target), reference.mean_loss(losses))
    features, index = estimator.batches[0]
    assert torch.equal(features[1:], x.features[1:])
    assert not features[0].any()  # it is skipped
    assert index.tolist() == [-1, *x.target[1:].tolist()]
    assert set(criterion.state_dict()) == {"step"}
    criterion.load_state_dict(criterion.state_dict())


@pytest.mark.parametrize("method", ["__call__", "update"])
def test_a_bad_batch_does_not_reach_an_estimator_of_ones_own(method: str, device) -> None:
    """It may multiply the features of skipped samples by 0, but 0 · NaN is NaN."""
    x = batch(device)
    estimator = Isotropic()
    criterion = make(device, covariance=estimator, ramp="constant")
    features = x.features.clone()
    features[2, 1] = torch.nan
    weight = (x.weight,) if method == "__call__" else ()

    def step() -> None:
        getattr(criterion, method)(features, *weight, x.target)
        if device.type != "cpu":
            criterion.check()

    with pytest.raises(ValueError, match="features must be finite"):
        step()
    ((seen, index),) = estimator.batches
    assert not seen.any()
    assert (index == -1).all()


def test_estimator_object_is_used_as_it_is(device):
    estimator = FullCovariance(A, C, decay=0.5)
    criterion = make(device, covariance=estimator)
    assert criterion.estimator is estimator
    call(criterion, batch(device))
    assert estimator.count.sum() == N


@pytest.mark.parametrize("method", ["update", "quadratic"])
def test_subclass_of_an_estimator_with_a_method_of_its_own(method: str) -> None:
    """The fused update must not bypass methods that a subclass overrides."""
    called = []

    def own(self, *arguments):
        called.append(method)
        return getattr(FullCovariance, method)(self, *arguments)

    kind = type("Own", (FullCovariance,), {method: own})
    x = reference.draw(7, 13, 5, dtype=torch.float32)
    criterion = ISDALoss(5, 13, total_steps=9, covariance=kind(5, 13))
    expected = ISDALoss(5, 13, total_steps=9)
    for _ in range(2):
        losses = [each(x.features, x.weight, x.target) for each in (criterion, expected)]
        torch.testing.assert_close(*losses)
    assert called == [method] * 2
