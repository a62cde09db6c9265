"""The kernels on a GPU: switched off, in a CUDA graph, with more than 2³¹ elements."""

import pytest
import reference
import torch
from kernel_batches import draw, gpu
from torch import Tensor

from isda import FullCovariance, ISDALoss, ops


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
