"""The upper bound of Eq. 4 against naive loops, its gradients, and the erratum of Eq. 13."""

from collections.abc import Callable

import pytest
import reference
import torch
from equations import as_kind, close, dtypes, leaf, library, matrices, shapes, structures
from reference import draw
from torch import Tensor
from torch.nn import functional as F

from isda import functional

# Eq. 4: the loss


def test_isda_logits(device):
    x = draw(7, 4, 5, device=device)
    logits = x.features @ x.weight.T
    rows = reference.quadratic(x.weight, x.target, list(x.covariance))
    close(functional.isda_logits(logits, rows.to(device), 0.6), logits.cpu() + 0.3 * rows)


@shapes
@dtypes
@structures
@pytest.mark.parametrize("kind", ["index", "soft", "ignore"])
def test_isda_loss_and_its_gradients(shape, real, structure, kind, device):
    x = draw(*shape, dtype=real, device=device)
    target = as_kind(x.target, shape[1], kind, real)
    inputs = leaf(x.features, x.weight, x.bias)
    features, weight, bias = inputs
    loss = functional.isda_loss(
        features,
        weight,
        target,
        library(structure, x.covariance),
        strength=0.4,
        bias=bias,
        ignore_index=1,
    )
    doubles = [tensor.detach().double().cpu().requires_grad_() for tensor in inputs]
    losses = reference.isda_losses(
        doubles[0],
        doubles[1],
        target,
        matrices(structure, x.covariance),
        strength=0.4,
        bias=doubles[2],
        ignore_index=1,
    )
    expected = reference.mean_loss(losses)
    close(loss, expected)
    if expected.requires_grad:
        (2 * loss).backward()  # a scaled loss scales its gradient
        for tensor, gradient in zip(
            inputs, torch.autograd.grad(2 * expected, doubles), strict=True
        ):
            close(tensor.grad, gradient)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["index", "soft", "ignore"])
def test_dense_loss(reduction, kind, device):
    """(N, A, H, W) is the same as each position on its own, read row by row."""
    x = draw(2 * 3 * 4, 5, 3, device=device)
    target = as_kind(x.target, 5, kind, torch.float64)
    if kind == "ignore":
        target = torch.where(target == 1, -7, target)  # not a class

    def dense(rows: Tensor) -> Tensor:  # (24, A) to (2, A, 3, 4)
        return torch.stack(
            [torch.stack([rows[12 * n + p] for p in range(12)], 1).view(-1, 3, 4) for n in (0, 1)]
        )

    dense_target = dense(target) if kind == "soft" else target.view(2, 3, 4)
    found = functional.isda_loss(
        dense(x.features),
        x.weight,
        dense_target,
        library("full", x.covariance),
        strength=0.4,
        bias=x.bias,
        ignore_index=-7,
        reduction=reduction,
    )
    losses = reference.isda_losses(
        x.features,
        x.weight,
        target,
        list(x.covariance),
        strength=0.4,
        bias=x.bias,
        ignore_index=-7,
    )
    values = torch.stack([torch.zeros(()).double() if v is None else v for v in losses])
    if reduction == "mean":
        close(found, reference.mean_loss(losses))
    else:
        close(found, values.sum() if reduction == "sum" else values.view(2, 3, 4))


@structures
def test_isda_loss_gradcheck(structure, device):
    for kind in ("index", "soft", "ignore"):
        x = draw(5, 4, 3, device=device)
        target = as_kind(x.target, 4, kind, torch.float64)
        gradcheck_loss(x.features, x.weight, x.bias, target, library(structure, x.covariance))


def test_isda_loss_gradcheck_dense(device):
    x = draw(12, 4, 3, device=device)
    features = x.features.view(2, 2, 3, 3).movedim(-1, 1)  # (N, A, H, W)
    target = x.target.view(2, 2, 3)
    gradcheck_loss(features, x.weight, x.bias, target, library("full", x.covariance))


def gradcheck_loss(
    features: Tensor, weight: Tensor, bias: Tensor, target: Tensor, quadratic: Callable
) -> None:
    def loss(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.isda_loss(
            features, weight, target, quadratic, strength=0.4, bias=bias, ignore_index=1
        )

    # index_add adds in any order on a GPU: a repeated pass differs in the last bits
    assert torch.autograd.gradcheck(loss, leaf(features, weight, bias), nondet_tol=1e-10)


@structures
@pytest.mark.parametrize("kind", ["index", "soft"])
def test_isda_loss_under_torch_func(structure, kind, device):
    """Per-sample gradients by vmap, against a loop."""
    x = draw(5, 4, 3, device=device)
    target = as_kind(x.target, 4, kind, torch.float64)
    quadratic = library(structure, x.covariance)

    def loss(weight: Tensor, feature: Tensor, target: Tensor) -> Tensor:
        return functional.isda_loss(feature[None], weight, target[None], quadratic, strength=0.4)

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(x.weight, x.features, target)
    for i in range(5):
        (weight,) = leaf(x.weight)
        (expected,) = torch.autograd.grad(loss(weight, x.features[i], target[i]), weight)
        close(found[i], expected.cpu())


def test_soft_loss_in_several_blocks(device):
    """More classes than one block of the blocked logsumexp, and large logits."""
    x = draw(3, 37, 4, device=device)
    target = as_kind(x.target, 37, "soft", torch.float64)
    inputs = leaf(200 * x.features, x.weight)
    loss = functional.isda_loss(*inputs, target, library("full", x.covariance), strength=0.4)
    classes = torch.arange(37, device=device)
    doubles = leaf(*inputs)
    rows = functional.full_quadratic(doubles[1], classes, x.covariance)  # checked above
    logits = doubles[0] @ doubles[1].T
    bound = torch.logsumexp(logits[:, None] + 0.2 * rows, -1) - logits
    expected = (target * bound).sum(1).mean()
    close(loss, expected.cpu())
    for found, gradient in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, doubles), strict=True
    ):
        close(found, gradient.cpu())


def test_logits_given_or_computed(device):
    x = draw(7, 4, 5, device=device)
    options = {"quadratic": library("full", x.covariance), "strength": 0.4}
    given = functional.isda_loss(
        x.features, x.weight, x.target, logits=F.linear(x.features, x.weight, x.bias), **options
    )
    computed = functional.isda_loss(x.features, x.weight, x.target, bias=x.bias, **options)
    assert torch.equal(given, computed)


def test_no_strength_with_an_overflowing_quadratic_is_cross_entropy(device):
    logits = torch.randn(3, 4, device=device)
    target = torch.tensor([0, 1, 2], device=device)
    quadratic = torch.full((3, 4), torch.inf, device=device)
    found = functional.isda_cross_entropy(logits, target, quadratic, strength=0.0)
    torch.testing.assert_close(found, F.cross_entropy(logits, target))


# Appendix A, Eq. 13: the gradient of the weight and the paper's erratum


@structures
def test_rows_of_the_weight_gradient_sum_to_zero(structure, device):
    x = draw(7, 13, 5, device=device)
    (weight,) = leaf(x.weight)
    quadratic = library(structure, x.covariance)
    upstream = torch.randn(7, 13, dtype=torch.float64, device=device)
    (gradient,) = torch.autograd.grad(quadratic(weight, x.target), weight, upstream)
    assert gradient.abs().max() > 0.1
    assert gradient.sum(0).abs().max() < 1e-12 * gradient.abs().sum()
    loss = functional.isda_loss(x.features, weight, x.target, quadratic, strength=0.4)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.abs().max() > 0.01
    assert gradient.sum(0).abs().max() < 1e-12 * gradient.abs().sum()


@pytest.mark.parametrize("classes", [2, 5])
def test_erratum_of_equation_13(classes, device):
    """The printed row j = y_i is correct only for two classes; the corrected one always is."""
    x = draw(1, classes, 3, device=device)
    (weight,) = leaf(x.weight)
    quadratic = library("full", x.covariance)
    loss = functional.isda_loss(x.features, weight, x.target, quadratic, strength=0.4)
    (gradient,) = torch.autograd.grad(loss, weight)
    y = int(x.target)
    sample = (x.features[0].cpu(), x.weight.cpu(), y, x.covariance[y].cpu())
    close(gradient, reference.corrected_weight_gradient(*sample, strength=0.4))
    printed = reference.printed_weight_gradient(*sample, strength=0.4)
    if classes == 2:
        close(gradient, printed)
    else:
        assert printed.sum(0).abs().max() > 0.01
        assert (gradient.cpu() - printed)[y].abs().max() > 0.01


# Precision


def test_soft_loss_of_bfloat16_logits(device):
    """Computed in the dtype of the quadratic term."""
    x = draw(64, 5, 4, dtype=torch.float32, device=device)
    target = torch.randn(64, 5, device=device).softmax(1)
    logits = (x.features @ x.weight.T).bfloat16()
    losses = [
        functional.isda_loss(
            x.features, x.weight, target, functional.identity_quadratic, strength=0.5,
            logits=each, reduction="none",
        )
        for each in (logits, logits.float())
    ]  # fmt: skip
    assert torch.equal(*losses)


def test_soft_loss_of_logits_with_an_offset(device):
    """An offset changes nothing; in float32, the margins must not cancel."""
    x = draw(6, 5, 4, dtype=torch.float32, device=device)
    target = torch.randn(6, 5, device=device).softmax(1)
    gradients = []
    for offset in (0.0, 4096.0):  # a power of 2, so that adding it is nearly exact
        (logits,) = leaf((8 * x.features @ x.weight.T).round() / 8 + offset)
        functional.isda_loss(
            x.features, x.weight, target, functional.identity_quadratic, strength=0.5,
            logits=logits,
        ).backward()  # fmt: skip
        gradients.append(logits.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-6)
