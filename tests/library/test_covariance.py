"""The estimators: buffers, checkpoints, precision and errors (Appendix A, Table 5)."""

import copy
import io
import re

import pytest
import reference
import torch
from reference import draw
from torch import Tensor, nn

from isda import (
    Covariance,
    DiagonalCovariance,
    FullCovariance,
    IdentityCovariance,
    SharedCovariance,
    functional,
    ops,
)

WITH_STATE = [FullCovariance, DiagonalCovariance, SharedCovariance]
ALL = [*WITH_STATE, IdentityCovariance]

with_state = pytest.mark.parametrize("kind", WITH_STATE)
every = pytest.mark.parametrize("kind", ALL)


def stream(device: torch.device, *, batches: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Batches of 7 samples of 13 classes, the last one with skipped samples."""
    drawn = [draw(7, 13, 5, seed=s, dtype=torch.float32, device=device) for s in range(batches)]
    drawn[-1].target[:2] = -1
    return [(x.features, x.target) for x in drawn]


def trained(kind: type[Covariance], device: torch.device, **options: float) -> Covariance:
    estimator = kind(5, 13, **options).to(device)
    for features, target in stream(device):
        estimator.update(features, target)
    return estimator


def bits(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.named_buffers()}


def assert_bits(module: nn.Module, expected: dict[str, Tensor]) -> None:
    found = dict(module.named_buffers())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    """The same buffers, bitwise on a CPU; on a GPU the order of additions varies."""
    if next(found.buffers(), torch.empty(0)).device.type == "cpu":
        assert_bits(found, bits(expected))
    for left, right in zip(found.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(left, right)


def close(found: Tensor, expected: Tensor) -> None:
    # float32 statistics of four merges of values below 10: a few times 10 · 2⁻²⁴
    torch.testing.assert_close(found.double().cpu(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("decay", [1.0, 0.8])
@with_state
def test_statistics_of_a_stream(kind, decay, device):
    estimator = trained(kind, device, decay=decay)
    batches = stream(device)
    if kind is SharedCovariance:
        batches = [(features, torch.where(target < 0, -1, 0)) for features, target in batches]
        count, mean, covariance = (t[0] for t in reference.decayed_moments(batches, 1, decay))
    else:
        count, mean, covariance = reference.decayed_moments(batches, 13, decay)
    assert estimator.count.dtype == torch.int64
    assert estimator.count.tolist() == count.tolist()
    close(estimator.mean, mean)
    if kind is DiagonalCovariance:
        close(estimator.variance, covariance.diagonal(dim1=1, dim2=2))
    else:
        close(estimator.covariance, covariance)


@every
def test_quadratic_uses_the_statistics(kind, device):
    estimator = trained(kind, device)
    x = draw(7, 13, 5, seed=9, dtype=torch.float32, device=device)
    if kind is FullCovariance:
        matrices = list(estimator.covariance)
    elif kind is DiagonalCovariance:
        matrices = reference.variance_matrices(estimator.variance)
    elif kind is SharedCovariance:
        matrices = [estimator.covariance] * 13
    else:
        matrices = reference.identity_matrices(x.weight)
    expected = reference.quadratic(x.weight, x.target, matrices)
    found = estimator.quadratic(x.weight, x.target)
    # float32: a sum of 25 terms, each up to the largest value; the kernels' products have errors of
    # 2⁻¹⁶ in both factors
    error = 2**-15 if ops.uses_triton(found) and kind is FullCovariance else 2e-6
    torch.testing.assert_close(
        found.double().cpu(), expected, rtol=0, atol=error * expected.max().item()
    )


@every
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_features_and_weights_of_half_precision(kind, half, device):
    """Statistics and quadratic are float32: only the inputs are rounded."""
    low, single = kind(5, 13).to(device), kind(5, 13).to(device)
    for features, target in stream(device):
        low.update(features.to(half), target)
        single.update(features.to(half).float(), target)
    assert_same(low, single)
    x = draw(7, 13, 5, dtype=half, device=device)
    for index in (None, x.target.flip(0)):
        value = low.quadratic(x.weight, x.target, covariance_index=index)
        expected = single.quadratic(x.weight.float(), x.target, covariance_index=index)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected)


@with_state
def test_empty_batch_and_batch_of_nothing_that_counts(kind, device):
    estimator = trained(kind, device, decay=0.9)
    before = bits(estimator)
    estimator.update(torch.empty(0, 5, device=device), torch.empty(0, dtype=torch.int64).to(device))
    estimator.update(
        torch.full((3, 5), torch.nan).to(device), torch.tensor([-1, -2, -1]).to(device)
    )
    assert_bits(estimator, before)


def test_identity_has_no_state(device):
    assert not trained(IdentityCovariance, device).state_dict()


@with_state
def test_conversions_keep_dtype_and_bits(kind, device):
    estimator = trained(kind, device)
    before = bits(estimator)
    for convert in (
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.float(),
        lambda m: nn.Sequential(m).half()[0],
        lambda m: m.cpu().to(device, torch.float64),
        copy.deepcopy,
    ):
        estimator = convert(estimator)
        assert_bits(estimator, before)


@with_state
def test_dtypes_are_not_the_default(kind):
    expected = {name: buffer.dtype for name, buffer in kind(5, 13).named_buffers()}
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        found = {name: buffer.dtype for name, buffer in kind(5, 13).named_buffers()}
    finally:
        torch.set_default_dtype(default)
    assert found == expected


@with_state
def test_made_without_memory(kind, device):
    estimator = kind(5, 13).to("meta")
    assert all(buffer.is_meta for buffer in estimator.buffers())
    estimator.to_empty(device=device)
    estimator.load_state_dict(trained(kind, device).state_dict())
    assert_same(estimator, trained(kind, device))


@with_state
def test_checkpoint_in_the_middle(kind, device):
    """Saving, loading with weights_only and continuing gives bitwise the same result."""
    batches = stream(device)
    estimator = kind(5, 13, decay=0.9).to(device)
    for batch in batches[:2]:
        estimator.update(*batch)
    file = io.BytesIO()
    torch.save(estimator.state_dict(), file)
    file.seek(0)
    resumed = kind(5, 13, decay=0.9).to(device)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert_bits(resumed, bits(estimator))
    for batch in batches[2:]:
        estimator.update(*batch)
        resumed.update(*batch)
    assert_same(resumed, estimator)


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        (FullCovariance, (5, 12), "count must have shape (13,) for num_features=5 and "),
        (FullCovariance, (4, 13), "mean must have shape (13, 5) for num_features=5 and "),
        (DiagonalCovariance, (5, 12), "count must have shape (13,) for num_features=5 and "),
        (DiagonalCovariance, (4, 13), "mean must have shape (13, 5) for num_features=5 and "),
        (SharedCovariance, (4, 13), "mean must have shape (5,) for num_features=5 and "),
    ],
)
def test_checkpoint_of_another_shape(kind, shape, message, device):
    estimator = trained(kind, device)
    before = bits(estimator)
    with pytest.raises(ValueError, match=re.escape(message + "num_classes=13, got (")):
        estimator.load_state_dict(kind(*shape).state_dict())
    assert_bits(estimator, before)


@pytest.mark.parametrize(
    ("width", "classes", "decay", "message"),
    [
        (0, 3, 1.0, "num_features must be >= 1, got 0"),
        (4, 0, 1.0, "num_classes must be >= 1, got 0"),
        (4, 3, 0.0, "decay must be in (0, 1], got 0.0"),
        (4, 3, 1.5, "decay must be in (0, 1], got 1.5"),
        (4, 3, float("nan"), "decay must be in (0, 1], got nan"),
    ],
)
@every
def test_errors(kind, width, classes, decay, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(width, classes, decay=decay)


@with_state
def test_features_of_another_width(kind, device):
    estimator = trained(kind, device)
    before = bits(estimator)
    for width in (1, 4):
        message = re.escape(f"features must have shape (N, 5), got (7, {width})")
        with pytest.raises(ValueError, match=message):
            estimator.update(torch.randn(7, width, device=device), stream(device)[0][1])
    assert_bits(estimator, before)


@with_state
def test_checkpoint_of_another_dtype(kind, device):
    """Loaded covariances become float32, whether assigned or copied."""
    expected = trained(kind, device)
    state = {name: t.half() if t.is_floating_point() else t for name, t in bits(expected).items()}
    for assign in (False, True):
        estimator = kind(5, 13).to(device)
        estimator.load_state_dict(state, assign=assign)
        for name, buffer in estimator.named_buffers():
            assert torch.equal(buffer, state[name].to(getattr(expected, name).dtype))
            assert buffer.dtype == getattr(expected, name).dtype


@with_state
@pytest.mark.parametrize("fault", ["nan", "inf", "negative"])
def test_damaged_checkpoint(kind, fault, device):
    estimator = trained(kind, device)
    before, state = bits(estimator), bits(estimator)
    if fault == "negative":
        state["count"] -= 1000
    else:
        state["mean"].flatten()[-1] = float(fault)
    with pytest.raises(ValueError, match=r"must be .* got a damaged checkpoint"):
        estimator.load_state_dict(state)
    assert_bits(estimator, before)


@with_state
def test_millions_of_samples(kind, device):
    """As in dense prediction: a running float32 sum would stop growing."""
    generator = torch.Generator().manual_seed(0)
    features = 0.1 + 0.001 * torch.randn(1_000_000, 5, generator=generator).to(device)
    estimator = kind(5, 13).to(device)
    estimator.update(features, torch.zeros(len(features), dtype=torch.int64, device=device))
    exact = features.double().T.cov(correction=0)
    spread = estimator.variance if kind is DiagonalCovariance else estimator.covariance
    spread = spread if kind is SharedCovariance else spread[0]
    expected = exact.diagonal() if kind is DiagonalCovariance else exact
    torch.testing.assert_close(spread.double(), expected, rtol=0, atol=1e-3 * 1e-6)
    mean = estimator.mean if kind is SharedCovariance else estimator.mean[0]
    torch.testing.assert_close(mean.double(), features.double().mean(0), rtol=1e-5, atol=0)


def test_the_base_asks_for_both_methods(device):
    base = Covariance(5, 13)
    for method in (base.update, base.quadratic):
        with pytest.raises(TypeError, match="Covariance must define"):
            method(torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("diagonal", [False, True])
def test_estimator_and_function_agree(diagonal, device):
    estimator = trained(DiagonalCovariance if diagonal else FullCovariance, device, decay=0.9)
    batches = stream(device)
    empty = (batches[0][0][:0], batches[0][1][:0])
    moments = functional.batch_moments(*empty, 13, diagonal=diagonal)
    for features, target in batches:
        moments = functional.update_moments(moments, features, target, decay=0.9)
    for found, expected in zip(estimator.buffers(), moments, strict=True):
        torch.testing.assert_close(found, expected)


@with_state
def test_statistics_keep_no_graph(kind, device):
    """The statistics keep no autograd graph and give the features no gradient."""
    x = draw(7, 13, 5, dtype=torch.float32, device=device)
    features, weight = x.features.requires_grad_(), x.weight.requires_grad_()
    estimator = kind(5, 13).to(device)
    estimator.update(features, x.target)
    assert not any(buffer.requires_grad for buffer in estimator.buffers())
    estimator.quadratic(weight, x.target).sum().backward()
    assert weight.grad is not None
    assert features.grad is None


@every
def test_autocast_stays_outside(kind, device):
    estimator = trained(kind, device)
    x = draw(7, 13, 5, seed=9, dtype=torch.float32, device=device)
    for index in (None, x.target.flip(0)):
        expected = estimator.quadratic(x.weight, x.target, covariance_index=index)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            found = estimator.quadratic(x.weight, x.target, covariance_index=index)
        assert torch.equal(found, expected)
    plain = copy.deepcopy(estimator)
    plain.update(x.features, x.target)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        estimator.update(x.features, x.target)
    assert_same(estimator, plain)


@with_state
def test_long_streams_follow_a_drift(kind, device):
    """After a million samples, each of the next 2,000 moves the mean by less than 2⁻²⁴ of it."""
    seen, new = 10**6, 2000
    estimator = kind(2, 2).to(device)
    estimator.count.fill_(seen)
    estimator.mean.fill_(100.0)
    features, target = torch.full((1, 2), 101.0, device=device), torch.zeros(1, device=device)
    for _ in range(new):
        estimator.update(features, target.long())
    share = new / (seen + new)
    mean = estimator.mean if kind is SharedCovariance else estimator.mean[0]
    torch.testing.assert_close(mean.double() - 100, torch.full_like(mean, share).double())
    variance = estimator.class_covariance(0).diagonal()
    torch.testing.assert_close(variance, torch.full_like(variance, share * (1 - share)))


@with_state
@pytest.mark.parametrize(
    ("features", "target", "message"),
    [
        ([[1.0, torch.nan]], [0], "features must be finite"),
        ([[1.0, 2.0]], [3], r"target must be in \[0, 3\)"),
        ([[1.0, 2.0]], [0, 1], r"target of class indices must have shape \(1,\), got \(2,\)"),
        ([[1.0, 2.0, 3.0]], [0], r"features must have shape \(N, 2\), got \(1, 3\)"),
        ([[1.0, 2.0]], [[0.5, 0.5, 0.0]], r"target must be class indices \(N,\), got \(1, 3\)"),
    ],
)
def test_a_bad_batch_changes_nothing(kind, features, target, message):
    estimator = kind(2, 3)
    estimator.update(torch.tensor([[3.0, 4.0]]), torch.tensor([1]))
    before = bits(estimator)
    with pytest.raises(ValueError, match=message):
        estimator.update(torch.tensor(features), torch.tensor(target))
    assert_bits(estimator, before)
