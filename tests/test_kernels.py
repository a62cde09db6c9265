"""The Triton kernels against the plain forms in float64.

They run on a GPU, or on a CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest
tests/test_kernels.py`` (Triton reads the variable when it is imported).
"""

import importlib.util
import os

import pytest
import reference
import torch
from torch import Tensor
from torch.nn import functional as F

from isda import FullCovariance, ISDALoss, checks, functional, ops
from isda.functional import Moments
from isda.kernels import plain

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from isda.kernels import class_statistics, cross_entropy, cuda, many_classes, products  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
gpu = pytest.mark.gpu

# (N, C, A): below, at and above the kernels' blocks of 64 features, 16 samples and slots of
# classes; few and many samples of a class
SHAPES = [
    (7, 13, 5), (23, 3, 70), (40, 4, 130), (1, 3, 64), (0, 3, 5), (20, 40, 17), (5, 2, 1),
    (24, 12, 70),
]  # fmt: skip
WIDE = [(12, 6, 390), (6, 3, 514), (6, 3, 1030)]  # the fused kernel uses other tiles for these
LARGE = [] if INTERPRETED else [(64, 100, 342), (30, 200, 530), (150, 300, 129)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
precisions = pytest.mark.parametrize("precision", ["high", "medium"])


def draw(
    shape: tuple[int, int, int], *, seed: int = 0, device: str = DEVICE
) -> tuple[Moments, Tensor, Tensor, Tensor]:
    """Statistics as if of earlier batches, and a batch: features far from 0, some skipped."""
    samples, classes, width = shape
    x = reference.draw(samples, classes, width, seed=seed, dtype=torch.float32, device=device)
    target = x.target.clone()
    target[::5] = -1
    count = torch.arange(classes, device=device)  # class 0 has none yet
    if classes > 2:
        count[2] = 0  # and class 2 gets none now
    mean = x.weight.double() * (count > 0)[:, None]
    covariance = x.covariance * (count > 0)[:, None, None]
    weight = reference.draw(samples, classes, width, seed=seed + 9, dtype=torch.float32).weight
    return Moments(count, mean, covariance), x.features * 3 + 5, target, weight.to(device) + 2


def padded(covariance: Tensor) -> Tensor:
    """The same matrices with rows that begin at multiples of 64 bytes, as on a GPU."""
    classes, width, _ = covariance.shape
    room = covariance.new_zeros(classes, width, -(-width // 16) * 16)
    room[..., :width] = covariance
    return room[..., :width]


def copy(moments: Moments) -> Moments:
    return Moments(*(tensor.clone() for tensor in moments))


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


def test_default_dtype():
    """Statistics and losses are float32, whatever new tensors are by default."""
    moments, features, target, weight = draw((12, 7, 20))
    logits = features @ weight.T
    results = []
    for dtype in (torch.float32, torch.float16):
        found = copy(moments)
        torch.set_default_dtype(dtype)
        try:
            result = cuda.update_and_multiply_(found, features, target, weight, 0.9, "high")
            rows = cuda.quadratic_rows(weight, target, *result)
            loss, *_ = cuda.cross_entropy(logits, None, target, None, None, -1, True)
        finally:
            torch.set_default_dtype(torch.float32)
        results.append((*found, rows, loss))
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(other, one)


@shapes
def test_screen(shape):
    samples, classes, width = shape
    x = reference.draw(*shape, dtype=torch.float32, device=DEVICE)
    features, target = x.features.clone(), x.target.clone()
    for ignore_index in (-100, 2):
        assert torch.equal(
            cuda.screen(features, target, classes, ignore_index),
            torch.where(target == ignore_index, -1, target),
        )
    if samples < 7:
        return
    features[0, 0], features[1, -1], features[2, width // 2] = torch.inf, torch.nan, -1e15
    features[6, 0] = 0.99e15
    target[3], target[4], target[5] = classes, -1, -100
    features[5, 0] = torch.nan  # of a sample that is ignored
    index = cuda.screen(features, target, classes, -100)
    assert index[:6].tolist() == [-2, -2, -2, -3, -3, -1]
    assert torch.equal(index[6:], target[6:])
    assert torch.equal(plain.screen(features.cpu(), target.cpu(), classes, -100), index.cpu())


@pytest.mark.parametrize("bad", [0, checks.BAD_FEATURES, checks.BAD_TARGET])
def test_count_step(bad):
    index = torch.tensor([3, -1, 0, 2] * 300 + [7], device=DEVICE)
    if bad:
        index[1100] = bad
    results = []
    for function, where in ((cuda.count_step, DEVICE), (plain.count_step, "cpu")):
        for world_size, mean, total_steps in ((1, True, 20), (3, True, 20), (1, False, 4)):
            step, problem = torch.tensor(5, device=where), torch.tensor(0, device=where)
            values = function(step, problem, index.to(where), 0.5, total_steps, world_size, mean)
            results.append([step, problem, *values])
    for left, right in zip(results[:3], results[3:], strict=True):
        for one, other in zip(left, right, strict=True):
            torch.testing.assert_close(one.cpu(), other, check_dtype=False)
    step, problem, index, scale, strength = results[1]
    assert (step, problem) == (5 + (not bad), max(-1 - bad, 0))
    assert strength == 0.125
    assert scale.item() == pytest.approx(0 if bad else 3 / 901)
    assert bool((index == -1).all()) == bool(bad)
    assert results[2][-1] == 0.5  # beyond the last step


@pytest.mark.parametrize("size", [1, 2500])
@pytest.mark.parametrize("value", [1.0, torch.inf, -torch.inf, torch.nan])
def test_flag_overflow(value, size):
    results = []
    for function, where in ((cuda.flag_overflow, DEVICE), (plain.flag_overflow, "cpu")):
        for strength, before in ((0.3, 0), (0.0, 0), (0.3, 2)):
            problem = torch.tensor(before, device=where)
            overflow = torch.zeros(2, device=where)
            loss = torch.ones(size, device=where)
            loss[-1] = value
            quadratic = torch.linspace(0, 8, 6000, device=where).view(3, 2000).flip(0)
            function(problem, overflow, loss, quadratic, torch.tensor(strength, device=where))
            results.append([problem.cpu(), overflow.cpu()])
    bad = value != 1.0
    for noted in results[0], results[3]:
        assert noted[0] == (checks.OVERFLOW if bad else 0)
        torch.testing.assert_close(noted[1], torch.tensor([0.3, 8.0]) * bad)
    for problem, overflow in results[1:3] + results[4:]:
        assert problem in (0, 2)
        assert not overflow.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (6, 70, 1), (9, 5000, 1)], ids=str)
def test_cross_entropy(shape, shifted, dtype, monkeypatch):
    """Loss and gradients against torch's cross entropy in float64."""
    samples, classes, _ = shape
    if not samples:
        pytest.skip("torch has no loss of an empty batch")
    if INTERPRETED and (dtype == torch.float16 or (dtype == torch.bfloat16 and classes != 70)):
        pytest.skip("one shape of each kind is enough for the interpreter")
    if classes == 70:
        monkeypatch.setattr(cross_entropy, "_CLASSES", 32)  # several blocks of classes
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(samples, classes, generator=generator)).to(dtype)
    quadratic = torch.rand(samples, classes, generator=generator) * 5
    target = torch.randint(classes, (samples,), generator=generator)
    target[: samples // 3] = -100
    scale, strength = torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.7)
    z, q = logits.double().requires_grad_(), quadratic.double().requires_grad_()
    losses = F.cross_entropy(z + 0.35 * q if shifted else z, target, reduction="none")
    counted = max(int((target >= 0).sum()), 1)
    there = [tensor.to(DEVICE) for tensor in (logits, quadratic, target, strength)]
    inputs = (there[0], there[1] if shifted else None, there[2], there[3] if shifted else None)
    # float32 of exp(x) − 1 with x up to 20: 20 · 2⁻²⁴; bfloat16 rounds the result
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for given, expected in ((None, losses.sum() / counted), (scale, 0.3 * losses.sum())):
        factor = None if given is None else given.to(DEVICE)
        loss, *saved = cuda.cross_entropy(*inputs, factor, -100, True)
        torch.testing.assert_close(loss.cpu(), expected.detach().float())
        upstream = torch.tensor(2.0, device=DEVICE)
        found = cuda.cross_entropy_backward(upstream, *inputs, *saved, -100)
        wanted = torch.autograd.grad(2 * expected, [z, q] if shifted else [z], retain_graph=True)
        assert found[0].dtype == dtype
        for one, other in zip(found, wanted, strict=False):
            torch.testing.assert_close(
                one.double().cpu(), other, rtol=tolerance, atol=tolerance / 10
            )
    rows, *saved = cuda.cross_entropy(*inputs, None, -100, False)
    torch.testing.assert_close(rows.cpu(), losses.detach().float())
    upstream = torch.randn(samples, generator=generator)
    gradient, _ = cuda.cross_entropy_backward(upstream.to(DEVICE), *inputs, *saved, -100)
    (wanted,) = torch.autograd.grad(losses, z, upstream.double())
    torch.testing.assert_close(gradient.double().cpu(), wanted, rtol=tolerance, atol=1e-6)


def test_cross_entropy_of_a_bad_batch():
    """NaN and no gradient; NaN for a class out of range; 0 · inf is no shift."""
    logits = torch.randn(3, 4, device=DEVICE)
    target = torch.tensor([0, 1, 2], device=DEVICE)
    zero = torch.zeros((), dtype=torch.float64, device=DEVICE)
    inputs = (logits, None, target, None)
    loss, *saved = cuda.cross_entropy(*inputs, zero, -100, True)
    assert loss.isnan()
    upstream = torch.ones((), device=DEVICE)
    gradient, _ = cuda.cross_entropy_backward(upstream, *inputs, *saved, -100)
    assert not gradient.any()
    infinite = torch.full_like(logits, torch.inf)
    loss, *_ = cuda.cross_entropy(logits, infinite, target, zero.float(), None, -100, True)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target))
    target[-1] = 4
    loss, *_ = cuda.cross_entropy(*inputs, None, -100, True)
    assert loss.isnan()


def test_cross_entropy_of_masked_classes(monkeypatch):
    """Logits of −inf where a block of classes begins."""
    monkeypatch.setattr(cross_entropy, "_CLASSES", 32)
    logits, target = torch.randn(3, 70), torch.tensor([69, 40, 50])
    logits[:, :32] = -torch.inf
    loss, *_ = cuda.cross_entropy(logits.to(DEVICE), None, target.to(DEVICE), None, None, -1, True)
    torch.testing.assert_close(loss.cpu(), F.cross_entropy(logits, target))


@gpu
def test_can_be_turned_off(monkeypatch):
    tensor = torch.zeros(1, device="cuda")
    assert ops.uses_triton(tensor)
    assert not ops.uses_triton(tensor.double())
    monkeypatch.setattr(ops, "_ENABLED", False)
    assert not ops.uses_triton(tensor)


@gpu
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimator_on_a_gpu_and_on_a_cpu(dtype, enabled, monkeypatch):
    monkeypatch.setattr(ops, "_ENABLED", enabled)
    estimators = [FullCovariance(70, 5, decay=0.9).to(device) for device in ("cpu", "cuda")]
    for seed in range(3):
        _, features, target, _ = draw((23, 5, 70), seed=seed, device="cpu")
        for estimator, device in zip(estimators, ("cpu", "cuda"), strict=True):
            estimator.update(features.to(device, dtype), target.to(device))
    for left, right in zip(*(estimator.buffers() for estimator in estimators), strict=True):
        # float32 of squares of values below 20, averaged: a few times 400 · 2⁻²⁴
        torch.testing.assert_close(left, right.cpu(), rtol=0, atol=2e-4)


@gpu
def test_update_in_a_cuda_graph():
    """Captured once and replayed with other batches: other classes, other numbers of them."""
    shape = (23, 5, 70)
    eager, captured = (FullCovariance(70, 5, decay=0.9).cuda() for _ in range(2))
    _, features, target, _ = draw(shape)
    captured.update(features, target)  # compiles the kernel
    for buffer in captured.buffers():
        buffer.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.update(features, target)
    for seed in range(4):
        _, new_features, new_target, _ = draw(shape, seed=seed)
        if seed == 2:
            new_target[:] = 3  # one class only
        features.copy_(new_features)
        target.copy_(new_target)
        graph.replay()
        eager.update(new_features, new_target)
    for left, right in zip(captured.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-5)


@gpu
@pytest.mark.parametrize("structure", ["full", "diagonal", "shared", "identity"])
@pytest.mark.parametrize("shape", [(7, 13, 5), (23, 5, 70)], ids=str)
def test_step_in_a_cuda_graph(structure, shape):
    """Update, loss and gradient, captured whole; the step count and λ grow with the replays."""
    _, classes, width = shape

    def make() -> tuple[ISDALoss, Tensor]:
        criterion = ISDALoss(width, classes, lambda_0=0.1, total_steps=3, covariance=structure)
        weight = reference.draw(*shape, dtype=torch.float32).weight.cuda() / width
        return criterion.cuda(), weight.requires_grad_()

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        x = reference.draw(*shape, seed=seed, dtype=torch.float32, device="cuda")
        return x.features, x.target

    def step(criterion: ISDALoss, weight: Tensor, features: Tensor, target: Tensor) -> Tensor:
        loss = criterion(features, weight, target)
        (gradient,) = torch.autograd.grad(loss, weight)
        return torch.cat([loss.detach().view(1), gradient.flatten()])

    criterion, weight = make()
    features, target = (tensor.clone() for tensor in batch(0))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(criterion, weight, features, target)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step(criterion, weight, features, target)
    for buffer in criterion.buffers():
        buffer.zero_()
    eager, eager_weight = make()
    for seed in range(4):
        new_features, new_target = batch(seed)
        features.copy_(new_features)
        target.copy_(new_target)
        graph.replay()
        expected = step(eager, eager_weight, new_features, new_target)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert criterion.step == 4
    criterion.check()


@gpu
@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    """Offsets into the covariances must not overflow 32 bits."""
    classes, width = 40, 8192
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GiB of GPU memory")
    estimator = FullCovariance(width, classes).cuda()
    features = torch.randn(16, width, device="cuda")
    target = torch.full((16,), classes - 1, device="cuda")
    estimator.update(features, target)
    expected = features.T.cov(correction=0)
    # float32: a mean of 16 products of values below 5
    torch.testing.assert_close(estimator.covariance[-1], expected, rtol=0, atol=1e-5)
    assert not estimator.covariance[:-1].any()
