"""Every function of ``isda.functional`` against naive loops, and its gradient against differences.

The tolerances: float64 runs are held to 1e-10, far above its rounding and far below anything else;
float32 runs to 2e-5 of the largest value, that is 2⁻²⁴ ≈ 6e-8 for each of the up to 13·13 terms of
either sign that are added to a value of that size.
"""

import functools
import re
from collections.abc import Callable

import pytest
import reference
import torch
from reference import draw
from torch import Tensor
from torch.nn import functional as F

from isda import functional
from isda.functional import Moments

SHAPES = [(7, 13, 5), (1, 3, 4), (0, 3, 4), (23, 3, 6), (5, 2, 1)]  # (N, C, A)
SINGLE = 2e-5
DTYPES = [torch.float64, torch.float32]
STRUCTURES = ["full", "diagonal", "shared", "identity"]

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("real", DTYPES, ids=str)
structures = pytest.mark.parametrize("structure", STRUCTURES)


def close(found: Tensor, expected: Tensor, *, tolerance: float | None = None) -> None:
    """Equal up to a tolerance times the largest expected value."""
    if tolerance is None:
        tolerance = 1e-10 if found.dtype == torch.float64 else SINGLE
    size = expected.abs().max().item() if expected.numel() else 0.0
    found = found.detach().cpu().double()
    torch.testing.assert_close(
        found, expected.detach().double(), rtol=0, atol=tolerance * max(size, 1.0)
    )


def library(structure: str, covariance: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The library's quadratic, as a function of (weight, target)."""
    if structure == "full":
        return functools.partial(functional.full_quadratic, covariance=covariance)
    if structure == "diagonal":
        variance = covariance.diagonal(dim1=1, dim2=2)
        return functools.partial(functional.diagonal_quadratic, variance=variance)
    if structure == "shared":
        return functools.partial(functional.shared_quadratic, covariance=covariance[0])
    return functional.identity_quadratic


def matrices(structure: str, covariance: Tensor) -> list[Tensor]:
    """The Σ_c that the structure stands for."""
    if structure == "diagonal":
        return reference.variance_matrices(covariance.diagonal(dim1=1, dim2=2))
    if structure == "shared":
        return [covariance[0]] * len(covariance)
    if structure == "identity":
        return reference.identity_matrices(covariance[:, 0])
    return list(covariance)


def leaf(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


# Appendix A: moments


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
    """They are float32 or more: of rounded features, with no rounding of their own."""
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
    """The share 1 − decay of one sample after many is small, and right to float32's rounding."""
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
    features[target < 0] = torch.nan  # must not be looked at
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
    """At mean 30 and standard deviation 0.1 raw second moments lose the covariance in float32."""
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
    assert (raw.cpu() - exact).abs().max() > 3 * tolerance  # the data can tell


# Sec. 3.1 and Eq. 4: the quadratic term


def test_ramped_strength():
    assert functional.ramped_strength(0.5, 0.25) == 0.125
    progress = torch.tensor(0.5)
    assert functional.ramped_strength(3.0, progress) == 1.5


@shapes
@dtypes
@structures
def test_quadratic(shape, real, structure, device):
    x = draw(*shape, dtype=real, device=device)
    found = library(structure, x.covariance)(x.weight, x.target)
    assert found.shape == (shape[0], shape[1])
    assert found.dtype == real
    close(found, reference.quadratic(x.weight, x.target, matrices(structure, x.covariance)))


@shapes
@structures
def test_quadratic_gradient(shape, structure, device):
    x = draw(*shape, device=device)
    quadratic = functools.partial(library(structure, x.covariance), target=x.target)
    # index_add adds in any order on a GPU: a repeated pass differs in the last bits
    assert torch.autograd.gradcheck(quadratic, leaf(x.weight), nondet_tol=1e-10)


@pytest.mark.parametrize("structure", ["full", "diagonal", "shared"])
def test_covariance_has_first_and_second_derivatives(structure, device):
    """As for one who learns the covariance, or differentiates through a step."""
    x = draw(4, 3, 2, device=device)
    covariance = {
        "full": x.covariance,
        "diagonal": x.covariance[:, 0].abs(),
        "shared": x.covariance[0],
    }[structure]
    function = getattr(functional, f"{structure}_quadratic")
    inputs = leaf(x.weight, covariance)

    def quadratic(weight: Tensor, covariance: Tensor) -> Tensor:
        return function(weight, x.target, covariance)

    assert torch.autograd.gradcheck(quadratic, inputs)
    assert torch.autograd.gradgradcheck(quadratic, inputs)


@shapes
@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_covariance_index(shape, structure, device):
    """Margins relative to the target, covariance of another class."""
    x = draw(*shape, device=device)
    samples, classes, _ = shape
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randint(classes, (samples,), generator=generator).to(device)
    found = library(structure, x.covariance)(x.weight, x.target, covariance_index=chosen)
    each = torch.stack(matrices(structure, x.covariance)).double().cpu()
    margin = (x.weight - x.weight[x.target][:, None]).double().cpu()
    expected = torch.einsum("nja,nab,njb->nj", margin, each[chosen.cpu()], margin)
    close(found, expected)


def test_one_covariance_for_each_sample(device):
    x, other = draw(7, 4, 3, device=device), draw(3, 7, 3, device=device)
    (covariance,) = leaf(other.covariance)  # (7, 3, 3)
    index = torch.arange(7, device=device)
    found = functional.full_quadratic(x.weight, x.target, covariance, covariance_index=index)
    margin = x.weight - x.weight[x.target][:, None]
    close(found, torch.einsum("nja,nab,njb->nj", margin, covariance, margin).cpu())
    found.sum().backward()
    assert covariance.grad.abs().sum() > 0


@structures
def test_no_variance_at_the_target(structure, device):
    """Exactly 0, so that the loss is never below cross entropy, however large the features are."""
    x = reference.draw(40, 5, 6, dtype=torch.float32, device=device)
    rows = library(structure, 1000 * x.covariance)(x.weight, x.target)
    assert rows.max() > 1
    assert rows.gather(1, x.target[:, None]).eq(0).all()


@structures
def test_quadratic_of_weights_with_a_common_offset(structure, device):
    """The margins do not see an offset of all rows; products of rows do, if it is left in."""
    x = draw(7, 13, 64, dtype=torch.float32, device=device)
    covariance = (
        x.covariance if structure != "diagonal" else torch.diag_embed(x.covariance[:, 0] ** 2)
    )
    weight = x.weight + 30
    found = library(structure, covariance)(weight, x.target)
    expected = reference.quadratic(weight, x.target, matrices(structure, covariance))
    error = (found.cpu() - expected).abs().max() / expected.abs().max()
    assert error < 2e-6  # 64 terms at 2⁻²⁴, of the size of the result itself
    own = weight[x.target]
    scale = torch.ones_like(own)
    naive = scale @ weight.square().T - 2 * own @ weight.T + own.square().sum(-1, keepdim=True)
    exact = reference.quadratic(weight, x.target, reference.identity_matrices(weight))
    assert (naive.cpu() - exact).abs().max() / exact.abs().max() > 1e-5  # the data can tell


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


def as_kind(target: Tensor, classes: int, kind: str, real: torch.dtype) -> Tensor:
    """Class indices as they are, with the samples of class 1 ignored, or as probabilities."""
    if kind == "soft":
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn(len(target), classes, generator=generator, dtype=torch.float64)
        return logits.softmax(1).to(target.device, real)
    if kind == "index":
        return torch.where(target == 1, classes - 1, target)
    return target


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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["index", "soft", "ignore"])
def test_cross_entropy_is_that_of_torch(reduction, kind, device):
    x = draw(7, 4, 5, device=device)
    target = as_kind(x.target, 4, kind, torch.float64)
    logits = F.linear(x.features, x.weight, x.bias)
    options = {"ignore_index": 1, "reduction": reduction}
    found = functional.cross_entropy(logits, target, **options)
    if kind == "soft":
        del options["ignore_index"]  # torch refuses it
    close(found, F.cross_entropy(logits, target, **options).cpu(), tolerance=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["index", "soft", "ignore"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_class_weights_and_smoothing_are_those_of_torch(
    weighted, smoothing, kind, reduction, device
):
    """At λ = 0 the ISDA loss is torch's cross entropy with the same options."""
    x = draw(7, 13, 5, device=device)
    target = as_kind(x.target, 13, kind, torch.float64)
    class_weight = torch.rand(13, dtype=torch.float64, device=device) if weighted else None
    options = {"label_smoothing": smoothing, "reduction": reduction}
    if kind == "ignore":
        options["ignore_index"] = -100
    logits = F.linear(x.features, x.weight, x.bias)
    expected = F.cross_entropy(logits, target, weight=class_weight, **options)
    for found in (
        functional.cross_entropy(logits, target, class_weight=class_weight, **options),
        functional.isda_loss(
            x.features, x.weight, target, library("full", x.covariance), strength=0.0,
            bias=x.bias, class_weight=class_weight, **options,
        ),
    ):  # fmt: skip
        torch.testing.assert_close(found, expected)


def test_smoothed_loss_bounds_the_monte_carlo_loss(device):
    """E of the smoothed cross entropy under draws with the covariance of the target."""
    x = draw(5, 4, 3, device=device)
    generator = torch.Generator(device).manual_seed(0)
    draws = functional.sample(
        x.features, x.target, x.covariance, strength=0.5, num_samples=20_000, generator=generator
    )
    logits = F.linear(draws, x.weight, x.bias)  # (M, N, C)
    explicit = torch.stack(
        [F.cross_entropy(z, x.target, reduction="none", label_smoothing=0.2) for z in logits[:4000]]
    ).mean(0)
    bound, plain = (
        functional.isda_loss(
            x.features, x.weight, x.target, library("full", x.covariance), strength=strength,
            bias=x.bias, label_smoothing=0.2, reduction="none",
        )
        for strength in (0.5, 0.0)
    )  # fmt: skip
    error = 4 * logits.std() / 4000**0.5  # four standard errors
    assert (plain <= explicit + error).all()
    assert (explicit <= bound + error).all()


def test_no_strength_with_an_overflowing_quadratic_is_cross_entropy(device):
    logits = torch.randn(3, 4, device=device)
    target = torch.tensor([0, 1, 2], device=device)
    quadratic = torch.full((3, 4), torch.inf, device=device)
    found = functional.isda_cross_entropy(logits, target, quadratic, strength=0.0)
    torch.testing.assert_close(found, F.cross_entropy(logits, target))


def test_mean_over_no_sample_is_zero(device):
    logits = torch.randn(3, 4, device=device, requires_grad=True)
    for rows, target in ((logits[:0], []), (logits, [-100, -100, -100])):
        loss = functional.cross_entropy(
            rows, torch.tensor(target, dtype=torch.int64, device=device)
        )
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss == 0
        assert not gradient.any()


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
    """The printed row j = y_i holds for two classes and no more; ours is the corrected one."""
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


# Eq. 1 and 2: explicit augmentation


@pytest.mark.parametrize("diagonal", [False, True])
def test_draws_have_the_moments_of_equation_1(diagonal, device):
    x = draw(3, 4, 3, device=device)
    covariance = x.covariance.diagonal(dim1=1, dim2=2) if diagonal else x.covariance
    generator = torch.Generator(device).manual_seed(0)
    draws = functional.sample(
        x.features, x.target, covariance, strength=0.3, num_samples=40_000, generator=generator
    )
    assert draws.shape == (40_000, 3, 3)
    for i in range(3):
        sigma = 0.3 * x.covariance[x.target[i]]
        sigma = torch.diag(sigma.diagonal()) if diagonal else sigma
        noise = draws[:, i] - x.features[i]
        spread = sigma.diagonal()
        # standard errors of a mean and a covariance over M draws; 5 of them
        mean_error = (spread / 40_000).sqrt()
        error = ((sigma.square() + torch.outer(spread, spread)) / 40_000).sqrt()
        assert (noise.mean(0).abs() < 5 * mean_error).all()
        assert ((noise.T.cov() - sigma).abs() < 5 * error).all()


def test_sample_of_a_singular_covariance(device):
    direction = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, device=device)
    covariance = torch.stack([torch.outer(direction, direction), torch.zeros(3, 3).to(direction)])
    features = torch.zeros(2, 3, dtype=torch.float64, device=device)
    target = torch.tensor([0, 1], device=device)
    draws = functional.sample(features, target, covariance, strength=2.0, num_samples=500)
    along = draws[:, 0] @ direction / direction.square().sum()
    # eigh gives the zero eigenvalues as ±1e-16, whose roots are 1e-8
    close(draws[:, 0], (along[:, None] * direction).cpu(), tolerance=1e-6)
    assert 1.0 < along.var() < 3.0  # 2, ± 5 standard errors of 2 · √(2/500)
    assert not draws[:, 1].any()
    variance = torch.stack([direction.square(), torch.zeros(3).to(direction)])
    draws = functional.sample(features, target, variance, strength=2.0)
    assert draws[:, 0].all()
    assert not draws[:, 1].any()


def test_sample_repeats_with_its_generator(device):
    x = draw(3, 4, 3, device=device)
    options = {"covariance": x.covariance, "strength": 0.3, "num_samples": 2}
    first, again, other = (
        functional.sample(
            x.features, x.target, generator=torch.Generator(device).manual_seed(seed), **options
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("diagonal", [False, True])
def test_monte_carlo_loss_and_its_gradient(diagonal, device):
    x = draw(4, 3, 2, device=device)
    covariance = x.covariance.diagonal(dim1=1, dim2=2) if diagonal else x.covariance

    def generator() -> torch.Generator:
        return torch.Generator(device).manual_seed(5)

    def loss(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.monte_carlo_loss(
            features,
            weight,
            x.target,
            covariance,
            strength=0.3,
            num_samples=3,
            bias=bias,
            generator=generator(),
        )

    draws = functional.sample(
        x.features, x.target, covariance, strength=0.3, num_samples=3, generator=generator()
    )
    expected = reference.monte_carlo_loss(x.weight, x.target, draws, bias=x.bias)
    close(loss(x.features, x.weight, x.bias), expected)
    assert torch.autograd.gradcheck(loss, leaf(x.features, x.weight, x.bias))


@pytest.mark.parametrize("diagonal", [False, True])
def test_cross_entropy_below_monte_carlo_below_bound(diagonal, device):
    """Jensen's inequality twice: CE ≤ L_∞ ≤ bound (Eq. 3 and 4)."""
    x = draw(6, 5, 4, device=device)
    covariance = x.covariance.diagonal(dim1=1, dim2=2) if diagonal else x.covariance
    quadratic = library("diagonal" if diagonal else "full", x.covariance)
    options = {"strength": 0.5, "bias": x.bias}
    lower = functional.cross_entropy(F.linear(x.features, x.weight, x.bias), x.target)
    upper = functional.isda_loss(x.features, x.weight, x.target, quadratic, **options)
    estimates = torch.stack(
        [
            functional.monte_carlo_loss(
                x.features,
                x.weight,
                x.target,
                covariance,
                num_samples=1000,
                generator=torch.Generator(device).manual_seed(seed),
                **options,
            )
            for seed in range(16)
        ]
    )
    error = estimates.std() / 4  # standard error of the mean of 16; 5 of them are beyond chance
    assert lower + 5 * error < estimates.mean() < upper - 5 * error


# Memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("diagonal", [False, True])
def test_sample_has_the_dtype_of_the_features(diagonal, dtype, device):
    """The statistics are float32, whatever the features are."""
    x = draw(3, 4, 3, dtype=torch.float32, device=device)
    covariance = x.covariance.diagonal(dim1=1, dim2=2) if diagonal else x.covariance
    draws = functional.sample(x.features.to(dtype), x.target, covariance, strength=0.3)
    assert draws.dtype == dtype
    assert draws.isfinite().all()


def test_sample_of_variances_is_compiled() -> None:
    x = draw(3, 4, 3, dtype=torch.float32)
    compiled = torch.compile(functional.sample, backend="eager", fullgraph=True)
    variance = x.covariance.diagonal(dim1=1, dim2=2)
    assert compiled(x.features, x.target, variance, strength=0.3).shape == (1, 3, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_probabilities_are_not_rounded_again(dtype, device):
    """1 − y and smoothed probabilities are computed in float32."""
    target = torch.tensor([[0.3, 0.7], [0.9, 0.1]], device=device).to(dtype)
    logits = torch.tensor([[1.0, -2.0], [0.5, 3.0]], device=device)
    losses = {
        "cross_entropy": lambda y: functional.cross_entropy(logits, y, label_smoothing=0.1),
        "isda_cross_entropy": lambda y: functional.isda_cross_entropy(
            logits, y, torch.ones_like(logits), strength=0.5, label_smoothing=0.1
        ),
        "isda_binary_cross_entropy": lambda y: functional.isda_binary_cross_entropy(
            logits, y, torch.ones_like(logits), strength=0.5
        ),
    }
    for name, loss in losses.items():
        assert loss(target) == loss(target.float()), name


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


def test_sample_errors(device):
    x = draw(3, 4, 3, device=device)
    wrong = [
        (x.covariance, -0.5, "strength must be >= 0, got -0.5"),
        (x.covariance[:, :2], 0.5, "covariance must have shape (C, 3, 3) or (C, 3), got (4, 2, 3)"),
    ]
    if device.type == "cpu":  # a GPU is not waited for
        negative = x.covariance[0].abs()
        negative[2, 1] = -0.1
        wrong.append((negative, 0.5, "covariance must hold variances, got negative ones"))
    for covariance, strength, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            functional.sample(x.features, x.target, covariance, strength=strength)
    with pytest.raises(ValueError, match="covariance must be of 4 classes, as weight, got 3"):
        functional.monte_carlo_loss(
            x.features, x.weight, x.target, x.covariance[0].abs(), strength=0.5, num_samples=1
        )


def test_unknown_reduction(device):
    x = draw(3, 4, 3, device=device)
    message = "reduction must be 'mean', 'sum' or 'none', got 'avg'"
    with pytest.raises(ValueError, match=message):
        functional.cross_entropy(x.features @ x.weight.T, x.target, reduction="avg")
    with pytest.raises(ValueError, match=message):
        functional.isda_loss(
            x.features, x.weight, x.target, functional.identity_quadratic, strength=0.5,
            reduction="avg",
        )  # fmt: skip


def test_soft_loss_of_logits_with_an_offset(device):
    """It changes nothing; in float32 the margins must not be lost in it."""
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
