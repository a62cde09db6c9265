"""Properties that hold for every input; hypothesis searches for counterexamples."""

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Inputs, draw
from torch import Tensor
from torch.nn import functional as F

from isda import SharedCovariance, functional
from isda.functional import Moments

STRUCTURES = ["full", "diagonal", "shared", "identity"]
EXACT = 1e-9  # float64, allows for another order of summation

modest = settings(deadline=None, derandomize=True, max_examples=50)
inputs = st.builds(
    draw,
    samples=st.integers(0, 11),
    classes=st.integers(2, 6),
    width=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
strengths = st.floats(0, 4)
structures = pytest.mark.parametrize("structure", STRUCTURES)
per_class = pytest.mark.parametrize("diagonal", [False, True], ids=["full", "diagonal"])


def move(x: Inputs, device: torch.device) -> Inputs:
    return Inputs(*(tensor.to(device) for tensor in x))


def quadratic(structure: str, weight: Tensor, target: Tensor, covariance: Tensor) -> Tensor:
    if structure == "full":
        return functional.full_quadratic(weight, target, covariance)
    if structure == "diagonal":
        variance = covariance.diagonal(dim1=1, dim2=2)
        return functional.diagonal_quadratic(weight, target, variance)
    if structure == "shared":
        return functional.shared_quadratic(weight, target, covariance[0])
    return functional.identity_quadratic(weight, target)


def same(found: Moments, expected: Moments, *, tolerance: float = EXACT) -> None:
    assert found.count.tolist() == expected.count.tolist()
    for left, right in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def cut(data: st.DataObject, samples: int) -> list[Tensor]:
    """Samples in any order and any number of batches, including empty ones."""
    order = torch.tensor(data.draw(st.permutations(range(samples))), dtype=torch.int64)
    ends = sorted(data.draw(st.lists(st.integers(0, samples), max_size=4)))
    return [order[a:b] for a, b in zip([0, *ends], [*ends, samples], strict=True)]


@per_class
@modest
@given(x=inputs, data=st.data())
def test_any_split_and_order_gives_the_same_moments(x, data, diagonal, device):
    x, classes = move(x, device), len(x.weight)
    whole = functional.batch_moments(x.features, x.target, classes, diagonal=diagonal)
    found = functional.batch_moments(x.features[:0], x.target[:0], classes, diagonal=diagonal)
    for rows in cut(data, len(x.target)):
        found = functional.update_moments(found, x.features[rows], x.target[rows])
    same(found, whole)


@modest
@given(x=inputs, data=st.data())
def test_any_split_and_order_gives_the_same_shared_covariance(x, data, device):
    x = move(x, device)
    estimator = SharedCovariance(x.weight.shape[1], len(x.weight)).to(device)
    for rows in cut(data, len(x.target)):
        estimator.update(x.features[rows], x.target[rows])
    count, mean, covariance = reference.pooled_moments(x.features, x.target)
    assert estimator.count == count
    # float32 statistics of at most 5 merges of values below 30: 5 · 30 · 2⁻²⁴
    torch.testing.assert_close(estimator.mean.double().cpu(), mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(estimator.covariance.double().cpu(), covariance, rtol=0, atol=1e-5)


@per_class
@modest
@given(x=inputs, data=st.data())
def test_merge_is_commutative_and_associative(x, data, diagonal, device):
    x, classes = move(x, device), len(x.weight)
    ends = sorted(data.draw(st.lists(st.integers(0, len(x.target)), min_size=2, max_size=2)))
    a, b, c = (
        functional.batch_moments(features, target, classes, diagonal=diagonal)
        for features, target in zip(
            x.features.tensor_split(ends), x.target.tensor_split(ends), strict=True
        )
    )
    merge = functional.merge_moments
    same(merge(a, b), merge(b, a))
    same(merge(merge(a, b), c), merge(a, merge(b, c)))


@per_class
@modest
@given(x=inputs, data=st.data(), decay=st.floats(0.01, 1))
def test_decay_weighs_every_sample_as_the_reference_does(x, data, decay, diagonal, device):
    x, classes = move(x, device), len(x.weight)
    found = functional.batch_moments(x.features[:0], x.target[:0], classes, diagonal=diagonal)
    stream = [(x.features[rows], x.target[rows]) for rows in cut(data, len(x.target))]
    for features, target in stream:
        found = functional.update_moments(found, features, target, decay=decay)
    count, mean, covariance = reference.decayed_moments(stream, classes, decay)
    spread = covariance.diagonal(dim1=1, dim2=2) if diagonal else covariance
    same(Moments(*(tensor.cpu() for tensor in found)), Moments(count, mean, spread))


@per_class
@modest
@given(x=inputs, data=st.data())
def test_decay_close_to_one_is_no_decay(x, data, diagonal, device):
    x, classes = move(x, device), len(x.weight)
    end = data.draw(st.integers(0, len(x.target)))
    old = functional.batch_moments(x.features[:end], x.target[:end], classes, diagonal=diagonal)
    plain = functional.update_moments(old, x.features[end:], x.target[end:])
    decayed = functional.update_moments(old, x.features[end:], x.target[end:], decay=1 - 1e-12)
    same(decayed, plain)


@modest
@given(x=inputs, data=st.data(), decay=st.floats(0.5, 1))
def test_covariance_is_symmetric_positive_semi_definite(x, data, decay, device):
    x, classes = move(x, device), len(x.weight)
    found = functional.batch_moments(x.features[:0], x.target[:0], classes)
    variances = functional.batch_moments(x.features[:0], x.target[:0], classes, diagonal=True)
    for rows in cut(data, len(x.target)):
        batch = (x.features[rows], x.target[rows])
        found = functional.update_moments(found, *batch, decay=decay)
        variances = functional.update_moments(variances, *batch, decay=decay)
    torch.testing.assert_close(found.covariance, found.covariance.mT, rtol=0, atol=EXACT)
    assert (torch.linalg.eigvalsh(found.covariance) >= -EXACT).all()
    assert (variances.covariance >= 0).all()
    torch.testing.assert_close(
        found.covariance.diagonal(dim1=1, dim2=2), variances.covariance, rtol=EXACT, atol=EXACT
    )


@structures
@modest
@given(x=inputs, data=st.data())
def test_quadratic_is_not_negative_and_zero_at_the_target(x, data, structure, device):
    x = move(x, device)
    count = data.draw(st.integers(1, 3))  # few samples: singular covariances
    moments = functional.batch_moments(x.features[:count], x.target[:count], len(x.weight))
    for covariance in (x.covariance, moments.covariance):
        values = quadratic(structure, x.weight, x.target, covariance)
        assert (values >= -EXACT).all()
        own = values.gather(1, x.target[:, None])
        torch.testing.assert_close(own, torch.zeros_like(own), rtol=0, atol=EXACT)


@structures
@modest
@given(x=inputs, soft=st.booleans())
def test_no_strength_is_cross_entropy(x, structure, soft, device):
    x = move(x, device)
    target = x.weight.new_ones(len(x.target), len(x.weight)).softmax(1) if soft else x.target
    logits = F.linear(x.features, x.weight, x.bias)
    loss = functional.isda_loss(
        x.features,
        x.weight,
        target,
        lambda weight, target: quadratic(structure, weight, target, x.covariance),
        strength=0.0,
        bias=x.bias,
        reduction="none",
    )
    expected = F.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)


@structures
@modest
@given(x=inputs, strength=strengths, stronger=strengths)
def test_the_bound_grows_with_the_strength(x, strength, stronger, structure, device):
    x = move(x, device)
    low, high = (
        functional.isda_loss(
            x.features,
            x.weight,
            x.target,
            lambda weight, target: quadratic(structure, weight, target, x.covariance),
            strength=value,
            reduction="none",
        )
        for value in sorted((strength, stronger))
    )
    assert (low <= high + EXACT).all()


@structures
@modest
@given(x=inputs, strength=strengths, soft=st.booleans())
def test_rows_of_the_weight_gradient_sum_to_zero(x, strength, soft, structure, device):
    x = move(x, device)
    weight = x.weight.clone().requires_grad_()
    target = x.weight.new_ones(len(x.target), len(x.weight)).softmax(1) if soft else x.target
    loss = functional.isda_loss(
        x.features,
        weight,
        target,
        lambda weight, target: quadratic(structure, weight, target, x.covariance),
        strength=strength,
        bias=x.bias,
    )
    loss.backward()
    size = weight.grad.abs().sum() + 1
    assert weight.grad.sum(0).abs().max() < EXACT * size


@structures
@modest
@given(x=inputs, strength=strengths)
def test_one_hot_probabilities_are_class_indices(x, strength, structure, device):
    x = move(x, device)
    one_hot = F.one_hot(x.target, len(x.weight)).double()
    losses, gradients = [], []
    for target in (x.target, one_hot):
        weight = x.weight.clone().requires_grad_()
        loss = functional.isda_loss(
            x.features,
            weight,
            target,
            lambda weight, target: quadratic(structure, weight, target, x.covariance),
            strength=strength,
            bias=x.bias,
        )
        loss.backward()
        losses.append(loss)
        gradients.append(weight.grad)
    torch.testing.assert_close(*losses, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(*gradients, rtol=EXACT, atol=EXACT)


@modest
@given(x=inputs, strength=strengths, seed=st.integers(0, 1000))
def test_explicit_augmentation_raises_the_cross_entropy(x, strength, seed, device):
    """CE ≤ L_M for any draws whose mean is the feature, since the cross entropy is convex."""
    x = move(x, device)
    generator = torch.Generator(device).manual_seed(seed)
    draws = functional.sample(
        x.features, x.target, x.covariance, strength=strength, num_samples=5, generator=generator
    )
    draws = torch.stack([draws, 2 * x.features - draws])  # (2, M, N, A): mirrored
    logits = F.linear(draws, x.weight, x.bias).flatten(0, 2)
    explicit = F.cross_entropy(logits, x.target.repeat(10), reduction="none").view(10, -1).mean(0)
    plain = F.cross_entropy(F.linear(x.features, x.weight, x.bias), x.target, reduction="none")
    assert (plain <= explicit + EXACT).all()
