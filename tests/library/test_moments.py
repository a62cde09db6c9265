"""Moments of each class (Appendix A): of a batch, of a stream, merged, with decay."""

import pytest
import reference
import torch
from equations import close, dtypes, shapes
from reference import draw

from isda import functional
from isda.functional import Moments


@shapes
@dtypes
@pytest.mark.parametrize("diagonal", [False, True])
def test_batch_moments(shape, real, diagonal, device):
    x = draw(*shape, dtype=real, device=device)
    found = functional.batch_moments(x.features, x.target, shape[1], diagonal=diagonal)
    count, mean, covariance = reference.class_moments(x.features, x.target, shape[1])
    assert (found.count.dtype, found.mean.dtype) == (torch.int64, torch.float64)
    assert found.covariance.dtype == real
    assert found.count.tolist() == count.tolist()
    close(found.mean, mean)
    close(found.covariance, covariance.diagonal(dim1=1, dim2=2) if diagonal else covariance)


@pytest.mark.parametrize("diagonal", [False, True])
def test_moments_of_half_precision(diagonal, device):
    """They are at least float32: only the features are rounded."""
    x = draw(23, 4, 3, dtype=torch.bfloat16, device=device)
    found = functional.batch_moments(x.features, x.target, 4, diagonal=diagonal)
    _, mean, covariance = reference.class_moments(x.features, x.target, 4)
    assert (found.mean.dtype, found.covariance.dtype) == (torch.float64, torch.float32)
    close(found.mean, mean)
    close(found.covariance, covariance.diagonal(dim1=1, dim2=2) if diagonal else covariance)


@shapes
@dtypes
@pytest.mark.parametrize("diagonal", [False, True])
def test_update_moments_over_a_stream(shape, real, diagonal, device):
    samples, classes, width = shape
    batches = [
        draw(samples, classes, width, seed=seed, dtype=real, device=device) for seed in (0, 1)
    ]
    batches.append(draw(3, classes, width, seed=2, dtype=real, device=device))
    stream = [(batch.features * (1 + i) + i, batch.target) for i, batch in enumerate(batches)]
    found = functional.batch_moments(*stream[0], classes, diagonal=diagonal)
    for features, target in stream[1:]:
        found = functional.update_moments(found, features, target)
    printed = reference.stream_moments(stream, classes)
    together = [torch.cat(part) for part in zip(*stream, strict=True)]
    for count, mean, covariance in (printed, reference.class_moments(*together, classes)):
        assert found.count.tolist() == count.tolist()
        close(found.mean, mean)
        close(found.covariance, covariance.diagonal(dim1=1, dim2=2) if diagonal else covariance)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("decay", [1.0, 0.9, 0.5])
def test_merge_moments_is_update_moments(diagonal, decay, device):
    old, new = (draw(7, 4, 5, seed=seed, device=device) for seed in (0, 1))
    moments = functional.batch_moments(old.features, old.target, 4, diagonal=diagonal)
    other = functional.batch_moments(new.features, new.target, 4, diagonal=diagonal)
    merged = functional.merge_moments(moments, other, decay=decay)
    updated = functional.update_moments(moments, new.features, new.target, decay=decay)
    stream = [(old.features, old.target), (new.features, new.target)]
    count, mean, covariance = reference.decayed_moments(stream, 4, decay)
    for found in (merged, updated):
        assert found.count.tolist() == count.tolist()
        close(found.mean, mean)
        close(found.covariance, covariance.diagonal(dim1=1, dim2=2) if diagonal else covariance)


@pytest.mark.parametrize("diagonal", [False, True])
def test_slow_decay_in_float32(diagonal, device):
    """The share 1 − decay of a single sample is small, but accurate to float32 rounding."""
    shape = (2, 1) if diagonal else (2, 1, 1)
    count = torch.tensor([10**9, 0], device=device)
    moments = Moments(count, torch.zeros(2, 1, device=device), torch.zeros(shape, device=device))
    one, target = torch.ones(1, 1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    found = functional.update_moments(moments, one, target, decay=0.9999)
    assert found.mean[0].item() == pytest.approx(1e-4, rel=1e-6)
    assert found.covariance[0].item() == pytest.approx(1e-4 * 0.9999, rel=1e-6)


@pytest.mark.parametrize("diagonal", [False, True])
def test_negative_target_is_left_out(diagonal, device):
    x = draw(9, 4, 3, device=device)
    target = x.target.clone()
    target[[0, 3]] = -1
    target[5] = -100
    features = x.features.clone()
    features[target < 0] = torch.nan  # must not be read
    found = functional.batch_moments(features, target, 4, diagonal=diagonal)
    keep = (target >= 0).cpu()
    expected = reference.class_moments(x.features.cpu()[keep], target.cpu()[keep], 4)
    assert found.count.tolist() == expected[0].tolist()
    close(found.mean, expected[1])
    close(found.covariance, expected[2].diagonal(dim1=1, dim2=2) if diagonal else expected[2])


def test_update_moments_changes_nothing_in_place(device):
    x = draw(7, 4, 5, device=device)
    moments = functional.batch_moments(x.features, x.target, 4)
    before = [tensor.clone() for tensor in moments]
    functional.update_moments(moments, x.features, x.target)
    for tensor, old in zip(moments, before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("diagonal", [False, True])
def test_moments_far_from_zero_stay_accurate(diagonal, device):
    """At mean 30 and standard deviation 0.1, raw second moments would be inaccurate."""
    generator = torch.Generator().manual_seed(0)
    features = (30 + 0.1 * torch.randn(512, 4, generator=generator)).to(device)
    target = torch.zeros(512, dtype=torch.int64, device=device)
    found = functional.batch_moments(features[:64], target[:64], 2, diagonal=diagonal)
    for first in range(64, 512, 64):
        rows = slice(first, first + 64)
        found = functional.update_moments(found, features[rows], target[rows])
    exact = features.double().T.cov(correction=0).cpu()
    raw = features.T @ features / 512 - torch.outer(features.mean(0), features.mean(0))
    # 2⁻²⁴ · 30 is the spacing of the features and the error of a mean: 2e-6, against a deviation
    # of 0.1. It enters a variance to first order through the shift between batches, at most 8
    # times 2 · 2e-6 · 0.1 / 0.01.
    tolerance = 3e-4 * 0.01
    expected = exact.diagonal() if diagonal else exact
    assert (found.covariance[0].cpu() - expected).abs().max() < tolerance
    assert (raw.cpu() - exact).abs().max() > 3 * tolerance  # the test is sensitive to it
