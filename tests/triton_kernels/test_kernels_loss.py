"""Triton kernels of the loss: screening of a batch, the step count, cross entropy, overflow."""

import pytest
import reference
import torch
from kernel_batches import DEVICE, INTERPRETED, SHAPES, copy, draw, shapes
from torch.nn import functional as F

from isda import checks
from isda.kernels import cross_entropy, cuda, plain


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
    total = (z + 0.35 * q if shifted else z).logsumexp(1)
    at_target = z.gather(1, target.clamp(min=0)[:, None])[:, 0]
    losses = torch.where(target < 0, 0.0, total - at_target)  # the target's own shift is not used
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
    for bad in (torch.nan, torch.inf):
        there = (torch.full_like(logits, bad), logits, target, torch.ones((), device=DEVICE))
        _, *saved = cuda.cross_entropy(*there, zero, -100, True)
        for gradient in cuda.cross_entropy_backward(upstream, *there, *saved, -100):
            assert torch.equal(gradient, torch.zeros_like(logits))
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
