"""The Triton kernels against the class-by-class loop: on a GPU, and interpreted on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import reference
import torch
from torch import Tensor

from isda import FullCovariance, ISDALoss, functional, kernels, per_class
from isda.functional import Moments
from isda.per_class import sample_share

# (N, C, A): below, at and above the kernel's blocks of 64 features and 16 samples
SHAPES = [(7, 13, 5), (23, 3, 70), (40, 4, 130), (1, 3, 64), (0, 3, 5)]
gpu = pytest.mark.gpu


def draw(
    shape: tuple[int, int, int], device: str, *, seed: int = 0
) -> tuple[Moments, Tensor, Tensor]:
    """Statistics as if of earlier batches, and a batch: features far from 0, some left out."""
    samples, classes, width = shape
    x = reference.draw(samples, classes, width, seed=seed, dtype=torch.float32, device=device)
    target = x.target.clone()
    target[::5] = -1
    target[1:2] = -2
    count = torch.arange(classes, device=device)  # class 0 has none yet
    mean = x.weight * (count > 0)[:, None]
    covariance = x.covariance * (count > 0)[:, None, None]
    return Moments(count, mean, covariance), x.features * 3 + 5, target


def compare(shape: tuple[int, int, int], decay: float, device: str) -> None:
    """``kernels.update_full`` against the pure function in float64 on a CPU, which is a loop."""
    moments, features, target = draw(shape, device)
    count, mean, covariance = (tensor.clone() for tensor in moments)
    batch_count = torch.bincount(target[target >= 0], minlength=len(count))
    share = sample_share(count, batch_count, decay, torch.float32)
    kernels.update_full(mean, covariance, features, target, batch_count, share)
    doubles = Moments(
        moments.count.cpu(), moments.mean.double().cpu(), moments.covariance.double().cpu()
    )
    expected = functional.update_moments(
        doubles, features.double().cpu(), target.cpu(), decay=decay
    )
    absent = batch_count == 0
    assert torch.equal(covariance[absent], moments.covariance[absent])
    assert torch.equal(mean[absent], moments.mean[absent])
    # float32 of squares of values below 20, averaged: a few times 400 · 2⁻²⁴
    torch.testing.assert_close(mean.double().cpu(), expected.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(covariance.double().cpu(), expected.covariance, rtol=0, atol=2e-4)
    if (~absent).any():
        assert (covariance - moments.covariance).abs().max() > 0.1
    # both sides of the diagonal come from other tiles, with the same products in the same order
    torch.testing.assert_close(covariance, covariance.mT, rtol=0, atol=2e-4)


def interpret() -> None:
    """What the subprocess of the next test runs."""
    for shape in SHAPES:
        for decay in (1.0, 0.8):
            compare(shape, decay, "cpu")


def test_interpreted_on_a_cpu():
    """Triton decides when it is imported whether to interpret: a process of its own."""
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-c", "import test_kernels; test_kernels.interpret()"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if "only 0-dimensional arrays can be converted" in result.stderr:
        pytest.skip("this Triton's interpreter does not work with this NumPy")
    assert result.returncode == 0, result.stderr


def test_not_used_on_a_cpu():
    assert not kernels.usable(torch.zeros(1))


@pytest.mark.parametrize("shape", [(7, 13, 5), (23, 5, 6), (13, 13, 4), (1, 3, 4)], ids=str)
def test_quadratic_for_gpus_on_a_cpu(shape):
    """The form without loops over classes is plain torch: its values and gradient hold anywhere."""
    x = reference.draw(*shape)
    forward = per_class.full_quadratic_op._backend_fns["cuda"]
    backward = per_class._full_quadratic_backward_op._backend_fns["cuda"]
    value, *saved = forward(x.weight, x.target, x.covariance)
    weight = x.weight.clone().requires_grad_()
    expected = reference.quadratic(weight, x.target, list(x.covariance))
    torch.testing.assert_close(value, expected.detach())
    assert not value.gather(1, x.target[:, None]).any()  # exactly 0 at the target
    upstream = torch.randn(value.shape, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(expected, weight, upstream)
    torch.testing.assert_close(backward(upstream, *saved), gradient)


@gpu
def test_can_be_turned_off(monkeypatch):
    tensor = torch.zeros(1, device="cuda")
    assert kernels.usable(tensor)
    assert not kernels.usable(tensor.double())
    monkeypatch.setenv("ISDA_TRITON", "0")
    assert not kernels.usable(tensor)


@gpu
@pytest.mark.parametrize("decay", [1.0, 0.8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_update_full(shape, decay):
    compare(shape, decay, "cuda")


@gpu
@pytest.mark.parametrize("triton", ["1", "0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimator_on_a_gpu_and_on_a_cpu(dtype, triton, monkeypatch):
    monkeypatch.setenv("ISDA_TRITON", triton)
    estimators = [FullCovariance(70, 5, decay=0.9).to(device) for device in ("cpu", "cuda")]
    for seed in range(3):
        _, features, target = draw((23, 5, 70), "cpu", seed=seed)
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
    _, features, target = draw(shape, "cuda")
    captured.update(features, target)  # compiles the kernel
    for buffer in captured.buffers():
        buffer.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.update(features, target)
    for seed in range(4):
        _, new_features, new_target = draw(shape, "cuda", seed=seed)
        if seed == 2:
            new_target[:] = 3  # one class alone
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
