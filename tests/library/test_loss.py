"""ISDALoss: Algorithm 1 against naive loops, its ramp, and cross entropy in eval mode."""

import pytest
import reference
import torch
from criteria import (
    TOLERANCE,
    A,
    C,
    N,
    assert_bits,
    batch,
    bits,
    call,
    close,
    make,
    matrices,
    structures,
)
from reference import draw
from torch.nn import functional as F

# Algorithm 1


@structures
def test_training_steps_against_the_reference(structure, device, dtype):
    """Update with the current batch, then the loss with λ = λ₀ t / T and its gradients."""
    criterion = make(device, covariance=structure, lambda_0=2.0, total_steps=4)
    stream = []
    for step in range(6):  # beyond total_steps, too
        x = batch(device, seed=step, dtype=dtype)
        stream.append((x.features, x.target))
        leaves = [t.clone().requires_grad_() for t in (x.features, x.weight, x.bias)]
        logits = F.linear(*leaves)
        loss = criterion(leaves[0], leaves[1], x.target, bias=leaves[2], logits=logits)
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        doubles = [t.detach().double().cpu().requires_grad_() for t in leaves]
        losses = reference.isda_losses(
            *doubles[:2],
            x.target,
            matrices(structure, stream),
            strength=2.0 * min(step / 4, 1),
            bias=doubles[2],
        )
        expected = reference.mean_loss(losses)
        tolerance = max(TOLERANCE, 8 * torch.finfo(dtype).eps)  # logits and gradients in dtype
        close(loss, expected, tolerance=tolerance)
        loss.backward()
        gradients = torch.autograd.grad(expected, doubles)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            close(leaf.grad, gradient, tolerance=tolerance)
    assert criterion.step == 6


@structures
def test_logits_are_computed_if_not_given(structure, device):
    x = batch(device)
    given, computed = make(device, covariance=structure), make(device, covariance=structure)
    logits = F.linear(x.features, x.weight, x.bias)
    close(call(given, x, logits=logits, progress=0.7), call(computed, x, progress=0.7))


@structures
@pytest.mark.parametrize("kind", ["soft", "ignore"])
def test_other_targets(structure, kind, device):
    x = batch(device)
    criterion = make(device, covariance=structure, ramp="constant", ignore_index=255)
    if kind == "soft":
        target = torch.randn(N, C).softmax(1).to(device)
        index = target.argmax(1)  # the statistics take the most probable class
    else:
        target = x.target.clone()
        target[[0, 4]] = 255
        index = torch.where(target == 255, -1, target)
    loss = call(criterion, x, target)
    stream = [(x.features, index)]
    losses = reference.isda_losses(
        x.features,
        x.weight,
        target,
        matrices(structure, stream),
        strength=0.5,
        bias=x.bias,
        ignore_index=255,
    )
    close(loss, reference.mean_loss(losses))
    if structure == "full":
        assert criterion.estimator.count.tolist() == [int((index == c).sum()) for c in range(C)]


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@structures
def test_dense(structure, reduction, soft, device):
    """(N, A, H, W): every position is a sample."""
    x = draw(2 * 3 * 2, C, A, dtype=torch.float32, device=device)
    dense = x.features.view(2, 3, 2, A).permute(0, 3, 1, 2)
    options = {"covariance": structure, "ramp": "constant", "reduction": reduction}
    rows, image = make(device, **options), make(device, **options)
    target = torch.randn(12, C).softmax(1).to(device) if soft else x.target
    dense_target = target.view(2, 3, 2, C).permute(0, 3, 1, 2) if soft else target.view(2, 3, 2)
    expected = call(rows, x, target)
    found = image(dense, x.weight, dense_target, bias=x.bias)
    assert found.shape == ((2, 3, 2) if reduction == "none" else ())
    torch.testing.assert_close(found.flatten(), expected.flatten())
    for left, right in zip(rows.buffers(), image.buffers(), strict=True):
        torch.testing.assert_close(left, right)


def test_reductions(device):
    x = batch(device)
    target = x.target.clone()
    target[0] = -100
    mean, total, each = (
        call(make(device, ramp="constant", reduction=reduction), x, target)
        for reduction in ("mean", "sum", "none")
    )
    assert each.shape == (N,)
    assert each[0] == 0
    torch.testing.assert_close(total, each.sum())
    torch.testing.assert_close(mean, each.sum() / (N - 1))


def test_scaled_loss_scales_the_gradient(device):
    x = batch(device)
    gradients = []
    for scale in (1, 2):
        weight = x.weight.clone().requires_grad_()
        criterion = make(device, ramp="constant")
        (scale * criterion(x.features, weight, x.target, bias=x.bias)).backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(gradients[1], 2 * gradients[0], rtol=1e-6, atol=1e-7)


@structures
@pytest.mark.parametrize("samples", [0, 1])
def test_small_batches(structure, samples, device):
    criterion = make(device, covariance=structure, ramp="constant")
    call(criterion, batch(device))
    before = bits(criterion)
    x = draw(samples, C, A, dtype=torch.float32, device=device)
    weight = x.weight.requires_grad_()
    loss = criterion(x.features, weight, x.target, bias=x.bias)
    loss.backward()
    assert weight.grad.isfinite().all()
    assert criterion.step == 2
    if samples == 0:
        assert loss == 0
        assert not weight.grad.any()
        del before["step"]
        for name, tensor in before.items():
            assert torch.equal(dict(criterion.named_buffers())[name], tensor)
    else:
        assert loss > 0


@pytest.mark.parametrize("class_weight", [None, torch.ones(C)])
def test_batch_of_ignored_samples_alone(class_weight, device):
    criterion = make(device, ramp="constant", weight=class_weight)
    x = batch(device)
    weight = x.weight.requires_grad_()
    loss = criterion(x.features, weight, torch.full_like(x.target, -100), bias=x.bias)
    loss.backward()
    assert loss == 0
    assert not weight.grad.any()
    assert not criterion.estimator.count.any()
    assert not criterion.evaluate(F.linear(x.features, x.weight), torch.full_like(x.target, -100))


# Ramp


def test_ramp_per_step(device):
    """The strength of step t is λ₀ t/T: 0 at first and λ₀ from step T on."""
    criterion = make(device, covariance="identity", lambda_0=3.0, total_steps=4)
    x = batch(device)
    for step in range(7):
        losses = reference.isda_losses(
            x.features,
            x.weight,
            x.target,
            reference.identity_matrices(x.weight),
            strength=3.0 * [0, 0.25, 0.5, 0.75, 1, 1, 1][step],
            bias=x.bias,
        )
        close(call(criterion, x), reference.mean_loss(losses))


@pytest.mark.parametrize("progress", [0, 0.3, 1.0])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_progress_in_place_of_the_count(progress, as_tensor, device):
    criterion = make(device, covariance="identity", lambda_0=3.0, total_steps=None)
    x = batch(device)
    value = torch.tensor(progress, dtype=torch.float32, device=device) if as_tensor else progress
    losses = reference.isda_losses(
        x.features,
        x.weight,
        x.target,
        reference.identity_matrices(x.weight),
        strength=3.0 * progress,
        bias=x.bias,
    )
    close(call(criterion, x, progress=value), reference.mean_loss(losses))


def test_progress_may_have_a_gradient(device):
    """For a learned strength."""
    criterion = make(device, covariance="identity", lambda_0=3.0, total_steps=None)
    x, step = batch(device), 0.01
    progress = torch.tensor(0.4, dtype=x.features.dtype, device=device, requires_grad=True)
    call(criterion, x, progress=progress).backward()
    above, below = (call(criterion, x, progress=0.4 + h) for h in (step, -step))
    expected = (above - below) / (2 * step)
    torch.testing.assert_close(progress.grad, expected, rtol=1e-2, atol=0, check_dtype=False)


def test_constant_ramp_needs_no_total_steps(device):
    x = batch(device)
    constant = make(device, total_steps=None, ramp="constant")
    full = make(device)
    close(call(constant, x), call(full, x, progress=1.0))
    close(call(constant, x, progress=0.0), call(full, x, progress=1.0))


# Evaluation


@structures
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_eval_is_cross_entropy_and_changes_nothing(structure, reduction, device):
    criterion = make(device, covariance=structure, reduction=reduction, ignore_index=255)
    call(criterion, batch(device, seed=1))
    criterion.eval()
    before = bits(criterion)
    x = batch(device)
    logits = F.linear(x.features, x.weight, x.bias)
    target = x.target.clone()
    target[2] = 255
    expected = F.cross_entropy(logits, target, ignore_index=255, reduction=reduction)
    torch.testing.assert_close(call(criterion, x, target), expected)
    soft = torch.randn(N, C).softmax(1).to(device)
    expected = F.cross_entropy(logits, soft, reduction=reduction)
    torch.testing.assert_close(call(criterion, x, soft), expected)
    assert_bits(criterion, before)


def test_eval_needs_no_total_steps(device):
    x = batch(device)
    loss = call(make(device, total_steps=None).eval(), x)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(*x[:3]), x.target))


# Several losses of a step


@structures
@pytest.mark.parametrize("soft", [False, True])
def test_two_losses_and_one_backward(structure, soft, device):
    """Two views or two parts of a batch: the gradients add up."""
    batches = [batch(device, seed=seed) for seed in range(2)]
    weight = batches[0].weight.clone().requires_grad_()
    gradients = []
    for together in (True, False):
        criterion = make(device, covariance=structure, ramp="constant")
        total, weight.grad = 0.0, None
        for x in batches:
            target = F.one_hot(x.target, C).float() if soft else x.target
            loss = criterion(x.features, weight, target)
            total = total + loss
            if not together:
                loss.backward()
        if together:
            total.backward()
        gradients.append(weight.grad.clone())
    close(*gradients)


# λ = 0


@structures
@pytest.mark.parametrize("options", [{"lambda_0": 0.0}, {"progress": 0.0}])
def test_no_strength_is_cross_entropy_although_the_quadratic_term_overflows(
    structure, options, device
):
    x = batch(device)
    weight = (1e20 * x.weight).requires_grad_()
    criterion = make(device, covariance=structure, lambda_0=options.get("lambda_0", 0.5))
    loss = criterion(x.features, weight, x.target, progress=options.get("progress"))
    expected = F.cross_entropy(x.features @ weight.T, x.target)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(one, weight)[0] for one in (loss, expected)]
    torch.testing.assert_close(*gradients)
