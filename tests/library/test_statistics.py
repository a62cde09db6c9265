"""The statistics of ISDALoss: frozen, updated separately, shared, grown, per class, learned."""

import pytest
import reference
import torch
from bounds import STRENGTH, A, C, N, close, inputs, make, structures
from reference import draw
from torch import Tensor, nn
from torch.nn import functional as F

import isda
from isda import FullCovariance, ISDALoss, functional


@structures
def test_a_call_without_update_changes_nothing(structure, device):
    criterion = make(device, covariance=structure, ramp="linear", total_steps=10)
    x, other = inputs(device), inputs(device, seed=1)
    loss = criterion(x.features, x.weight, x.target, update=False)  # before the first step
    torch.testing.assert_close(loss, F.cross_entropy(x.features @ x.weight.T, x.target))
    criterion(x.features, x.weight, x.target)
    before = {name: tensor.clone() for name, tensor in criterion.named_buffers()}
    first = criterion(other.features, other.weight, other.target, update=False)
    for name, tensor in criterion.named_buffers():
        assert torch.equal(tensor, before[name]), name
    again = criterion(other.features, other.weight, other.target, update=False)
    torch.testing.assert_close(first, again)
    criterion(other.features, other.weight, other.target)
    assert criterion.step == 2


def test_frozen_statistics_are_used_while_the_ramp_goes_on(device):
    criterion = make(device, ramp="linear", total_steps=2)
    x, other = inputs(device), inputs(device, seed=1)
    criterion(x.features, x.weight, x.target)
    criterion.frozen = True
    covariance = criterion.estimator.covariance.clone()
    losses = [criterion(other.features, other.weight, other.target) for _ in range(2)]
    assert torch.equal(criterion.estimator.covariance, covariance)
    assert criterion.step == 3
    quadratic = functional.full_quadratic(other.weight, other.target, covariance)
    logits = F.linear(other.features, other.weight)
    for loss, progress in zip(losses, (0.5, 1.0), strict=True):
        expected = functional.isda_cross_entropy(
            logits, other.target, quadratic, strength=STRENGTH * progress
        )
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


def test_statistics_fed_on_their_own(device):
    x = inputs(device)
    fed, called = make(device), make(device)
    fed.estimator.update(x.features, x.target)
    called(x.features, x.weight, x.target)
    torch.testing.assert_close(fed.estimator.covariance, called.estimator.covariance)
    assert fed.step == 0


def test_statistics_fed_through_the_criterion(device):
    """Checked, gathered and flattened as in forward(), but no step is counted."""
    fed, called = make(device, ignore_index=1), make(device, ignore_index=1)
    x = inputs(device)
    fed.update(x.features.T[None], x.target[None])  # (1, A, N): seven positions
    called(x.features, x.weight, x.target)
    torch.testing.assert_close(fed.estimator.covariance, called.estimator.covariance)
    assert fed.step == 0
    assert fed.estimator.count[1] == 0
    with pytest.raises(ValueError, match="target must be in"):  # noqa: PT012
        fed.update(x.features, torch.full_like(x.target, C))
        fed.check()  # a GPU reports it later
    assert fed.estimator.count.sum() == called.estimator.count.sum()


def test_a_second_loss_of_a_step_has_the_same_strength(device):
    criterion = make(device, covariance="identity", ramp="linear", total_steps=4)
    x = inputs(device)
    for _ in range(3):
        first, second = (
            criterion(x.features, x.weight, x.target, update=update) for update in (True, False)
        )
        torch.testing.assert_close(first, second)
    assert criterion.step == 3


def test_the_statistics_of_an_attached_criterion(device):
    model = nn.Linear(A, C).to(device)
    criterion = isda.attach(model, ramp="constant")
    x = inputs(device)
    criterion(model(x.features), x.target)
    assert criterion.estimator is criterion.criterion.estimator
    assert criterion.estimator.count.sum() == N


@structures
def test_grow_keeps_the_statistics(structure, device):
    criterion = make(device, covariance=structure)
    x = inputs(device)
    criterion(x.features, x.weight, x.target)
    before = [criterion.estimator.class_covariance(c) for c in range(C)]
    buffers = {name: tensor.clone() for name, tensor in criterion.estimator.named_buffers()}
    criterion.grow(C + 2)
    for name, tensor in criterion.estimator.named_buffers():
        if structure in ("full", "diagonal"):
            assert torch.equal(tensor[:C], buffers[name]), name
            assert not tensor[C:].any(), name
        else:
            assert torch.equal(tensor, buffers[name]), name
    for index, covariance in enumerate(before):
        assert torch.equal(criterion.estimator.class_covariance(index), covariance)
    wide = draw(N, C + 2, A, dtype=torch.float32, device=device)
    loss = criterion(wide.features, wide.weight, wide.target)
    assert loss.isfinite()
    assert criterion.estimator.num_classes == criterion.num_classes == C + 2
    for number in (6, 7.0):
        message = f"num_classes must be >= 7, the current number, got {number}"
        with pytest.raises(ValueError, match=message):
            criterion.grow(number)
    criterion.weight = torch.ones(C + 2, device=device)
    criterion.grow(C + 2)  # nothing changes
    with pytest.raises(ValueError, match="grow needs a criterion without class weights"):
        criterion.grow(C + 3)
    assert criterion.estimator.num_classes == criterion.num_classes == C + 2
    again = ISDALoss(A, C + 2, covariance=structure)
    again.load_state_dict(criterion.state_dict())


def test_statistics_of_a_class_in_every_structure(device):
    x = inputs(device)
    count, mean, covariance = reference.class_moments(x.features, x.target, C)
    pooled = reference.pooled_moments(x.features, x.target)[2]
    expected = {
        "full": covariance[3],
        "diagonal": torch.diag(covariance[3].diagonal()),
        "shared": pooled,
        "identity": torch.eye(A, dtype=torch.float64),
    }
    for structure, matrix in expected.items():
        estimator = make(device, covariance=structure).estimator
        estimator.update(x.features, x.target)
        found = estimator.class_covariance(3)
        if structure in ("full", "diagonal"):
            close(estimator.class_mean(3), mean[3])
            assert estimator.class_mean(3).dtype == torch.float32
            assert estimator.moments.count.tolist() == count.tolist()
        else:
            with pytest.raises(TypeError, match="does not track per-class means"):
                estimator.class_mean(3)
        estimator.update(1 + x.features, x.target)
        close(found, matrix)  # not a view of the statistics


class LearnedVariance(nn.Module):
    """A variance for each class that is learned with the network."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(C, A))

    def update(self, features: Tensor, target: Tensor) -> None:
        pass

    def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        return functional.diagonal_quadratic(weight, target, self.log_variance.exp())


def test_an_estimator_of_ones_own_is_learned(device):
    """Learned variances receive a gradient, and second derivatives are correct."""
    x = draw(N, C, A, device=device)
    estimator = LearnedVariance().double()
    criterion = ISDALoss(A, C, lambda_0=STRENGTH, ramp="constant", covariance=estimator).to(device)
    assert isinstance(estimator, isda.Estimator)
    weight = (0.5 * x.weight).requires_grad_()

    def loss(log_variance: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            estimator.log_variance.copy_(log_variance)
        del estimator._parameters["log_variance"]
        estimator.log_variance = log_variance
        try:
            return criterion(0.5 * x.features, weight, x.target)
        finally:
            del estimator.log_variance
            estimator.register_parameter("log_variance", nn.Parameter(log_variance.detach()))

    learned = torch.zeros(C, A, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (learned, weight))
    assert torch.autograd.gradgradcheck(loss, (learned, weight))


def test_an_estimator_without_covariance_index_changes_nothing(device):
    x = inputs(device)
    criterion = ISDALoss(A, C, ramp="constant", covariance=LearnedVariance()).to(device)
    with pytest.raises(ValueError, match=r"whose quadratic\(\) accepts covariance_index"):
        criterion(x.features, x.weight, x.target, covariance_index=x.target)
    assert criterion.step == 0


def test_sharing_an_estimator(device):
    """Two criteria can share statistics, for example for two views of a batch."""
    estimator = FullCovariance(A, C).to(device)
    first = ISDALoss(A, C, ramp="constant", covariance=estimator).to(device)
    second = ISDALoss(A, C, ramp="constant", covariance=estimator, frozen=True).to(device)
    x = inputs(device)
    losses = [criterion(x.features, x.weight, x.target) for criterion in (first, second)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
