"""Triton kernels of the statistics and the quadratic term against the plain forms in float64."""

import pytest
import torch
from kernel_batches import DEVICE, INTERPRETED, SHAPES, copy, draw, gpu, precisions, shapes
from torch import Tensor

from isda import functional, ops
from isda.functional import Moments
from isda.kernels import class_statistics, cuda, many_classes, products

WIDE = [(12, 6, 390), (6, 3, 514), (6, 3, 1030)]  # the fused kernel uses other tiles for these
LARGE = [] if INTERPRETED else [(64, 100, 342), (30, 200, 530), (150, 300, 129)]


def padded(covariance: Tensor) -> Tensor:
    """The same matrices with rows that begin at multiples of 64 bytes, as on a GPU."""
    classes, width, _ = covariance.shape
    room = covariance.new_zeros(classes, width, -(-width // 16) * 16)
    room[..., :width] = covariance
    return room[..., :width]


def doubles(moments: Moments) -> Moments:
    mean, covariance = moments.mean.cpu().clone(), moments.covariance.cpu().double()
    return Moments(moments.count.cpu().clone(), mean, covariance)


def check_moments(before: Moments, found: Moments, expected: Moments) -> None:
    absent = expected.count.to(before.count.device) == before.count
    assert torch.equal(found.covariance[absent], before.covariance[absent])
    assert torch.equal(found.mean[absent], before.mean[absent])
    assert torch.equal(found.count.cpu(), expected.count)
    # float32 of squares of values below 20, averaged: a few times 400 · 2⁻²⁴
    torch.testing.assert_close(found.mean.double().cpu(), expected.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        found.covariance.double().cpu(), expected.covariance, rtol=0, atol=2e-4
    )
    if (~absent).any():
        assert (found.covariance - before.covariance).abs().max() > 0.1


def check_update(shape: tuple[int, int, int], decay: float, *, diagonal: bool) -> None:
    moments, features, target, _ = draw(shape)
    if diagonal:
        variance = moments.covariance.diagonal(dim1=1, dim2=2).contiguous()
        moments = moments._replace(covariance=variance)
    found = copy(moments)
    cuda.update_(found, features, target, decay)
    expected = functional.update_moments(
        doubles(moments), features.double().cpu(), target.cpu(), decay=decay
    )
    check_moments(moments, found, expected)
    if diagonal:
        return
    torch.testing.assert_close(found.covariance, found.covariance.mT, rtol=0, atol=2e-4)
    # blocks above the diagonal are never read
    spoilt = copy(moments)
    present = expected.count.to(DEVICE) != moments.count
    spoilt.covariance[present] += torch.full_like(spoilt.covariance[0], torch.nan).triu(64)
    cuda.update_(spoilt, features, target, decay)
    assert torch.equal(spoilt.covariance, found.covariance)


def check_quadratic(shape: tuple[int, int, int], precision: str, *, fewer: int = 0) -> None:
    """Update, quadratic term and its gradient in one pass, against the loops in float64.

    ``fewer`` classes have no statistics here, as on one of several ranks.
    """
    moments, features, target, weight = draw(shape)
    classes = shape[1] - fewer
    moments = Moments(*(tensor[:classes].clone() for tensor in moments))
    target = torch.where(target < classes, target, -1)
    expected = doubles(moments)
    wide = weight.double().cpu().requires_grad_()
    value = ops.update_and_quadratic(
        expected, features.double().cpu(), target.cpu(), wide, 0.9, precision
    )
    found = copy(moments)._replace(covariance=padded(moments.covariance.clone()))
    result = cuda.update_and_multiply_(found, features, target, weight, 0.9, precision)
    check_moments(moments, found, expected)
    stride = found.covariance.stride(1)
    room = found.covariance.as_strided(
        (len(found.mean), shape[2], stride), (shape[2] * stride, stride, 1)
    )
    assert not room[..., shape[2] :].any()
    rows = cuda.quadratic_rows(weight, target, *result)
    # errors of 2⁻¹⁶ or 2⁻⁸ of both factors and of what is left out or kept of a product; a sum with
    # both signs is smaller than its terms; the interpreter truncates where a GPU rounds
    error = {"high": 2**-13, "medium": 2**-5}[precision]
    size = value.abs().max().item() if value.numel() else 0.0
    torch.testing.assert_close(rows.double().cpu(), value.detach(), rtol=0, atol=error * size)
    inside = (target >= 0).nonzero().flatten()
    assert not rows[inside, target[inside]].any()  # exactly 0 at the target
    assert not rows[target < 0].any()

    random = torch.Generator().manual_seed(0)
    upstream = torch.randn(value.shape, dtype=torch.float64, generator=random)
    (gradient,) = torch.autograd.grad(value, wide, upstream)
    weight_grad = cuda.weight_gradient(upstream.float().to(DEVICE), weight, target, *result[1:])
    largest = gradient.abs().max().item()
    torch.testing.assert_close(weight_grad.double().cpu(), gradient, rtol=0, atol=error * largest)

    # the quadratic term of covariances that are not updated
    result = cuda.multiply(found.covariance, weight, target, precision)
    again = cuda.quadratic_rows(weight, target, *result)
    torch.testing.assert_close(again, rows, rtol=1e-5, atol=1e-5 * size)


@shapes
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("decay", [1.0, 0.8])
def test_update(shape, decay, diagonal):
    check_update(shape, decay, diagonal=diagonal)


@precisions
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE], ids=str)
def test_update_and_quadratic(shape, precision):
    check_quadratic(shape, precision)


@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_wide_features(shape):
    check_quadratic(shape, "medium" if shape[-1] > 1024 else "high")


@pytest.mark.parametrize("shape", [(23, 13, 5), (12, 40, 17)], ids=str)
def test_statistics_of_some_classes(shape):
    check_quadratic(shape, "high", fewer=4)


@precisions
@pytest.mark.parametrize("shape", [(12, 40, 70), (23, 40, 17)], ids=str)
@pytest.mark.parametrize("fewer", [0, 4])
def test_many_classes(shape, fewer, precision, monkeypatch):
    """Copies in bfloat16 of some classes at a time, multiplied by cuBLAS."""
    monkeypatch.setattr(products, "_CLASSES", 16)
    monkeypatch.setattr(many_classes, "_COPIED", 5 * 70**2)
    check_quadratic(shape, precision, fewer=fewer)


@pytest.mark.parametrize("shape", [(150, 3, 17), (40, 60, 5)], ids=str)
def test_many_samples(shape, monkeypatch):
    """As of dense predictions: sorted by class first."""
    monkeypatch.setattr(class_statistics, "_MANY", 16)
    check_update(shape, 0.8, diagonal=False)
    check_update(shape, 1.0, diagonal=True)
    check_quadratic(shape, "high", fewer=1)


@gpu
@pytest.mark.parametrize("shape", [(5000, 7, 33), (3000, 4000, 5)], ids=str)
def test_very_many_samples(shape):
    check_update(shape, 0.999, diagonal=False)
    check_update(shape, 1.0, diagonal=True)
    check_quadratic(shape, "high")


@pytest.mark.parametrize("first", [1, pytest.param(14_000, marks=gpu)])
def test_first_batch_of_any_size(first):
    """Its weight is 1 for every number of samples: the division may not round it to more."""
    sizes = torch.arange(first, first + 40)
    target = torch.arange(40).repeat_interleave(sizes).to(DEVICE)
    features = torch.ones(len(target), 2, device=DEVICE)
    features[::2] = -1
    start = Moments(
        torch.zeros(40, dtype=torch.int64, device=DEVICE),
        torch.zeros(40, 2, dtype=torch.float64, device=DEVICE),
        torch.zeros(40, 2, 2, device=DEVICE),
    )
    expected = functional.update_moments(start, features, target)
    cuda.update_(list(start), features, target, 1.0)
    # the terms are equal, so that the rounding errors of their float32 sum add up
    torch.testing.assert_close(start, expected, rtol=5e-4, atol=1e-5)


@pytest.mark.parametrize("many", [False, True])
def test_covariances_of_any_strides(many, monkeypatch):
    if many:
        monkeypatch.setattr(products, "_CLASSES", 4)
    moments, _, target, weight = draw((20, 6, 17))
    target = target.clamp(min=0)
    room = torch.randn(12, 40, 40, device=DEVICE)
    room[::2, :17, :17] = moments.covariance
    layouts = [room[::2, :17, :17], moments.covariance.mT, moments.covariance[:1].expand(6, -1, -1)]
    for covariance in layouts:
        expected = functional.full_quadratic(
            weight.double().cpu(), target.cpu(), covariance.double().cpu()
        )
        result = cuda.multiply(covariance, weight, target, "high")
        rows = cuda.quadratic_rows(weight, target, *result)
        error = 2**-13 * expected.max().item()  # see check_quadratic
        torch.testing.assert_close(rows.double().cpu(), expected, rtol=0, atol=error)


@precisions
def test_padding_may_hold_nan(precision):
    moments, _, target, weight = draw((12, 7, 20))
    room = torch.full((7, 20, 32), torch.nan, device=DEVICE)
    room[..., :20] = moments.covariance
    results = (
        cuda.multiply(covariance, weight, target, precision)
        for covariance in (moments.covariance, room[..., :20])
    )
    expected, found = (cuda.quadratic_rows(weight, target, *x) for x in results)
    torch.testing.assert_close(found, expected)
