"""Draws of Eq. 1 and the Monte-Carlo loss of Eq. 2, between cross entropy and the bound."""

import re

import pytest
import reference
import torch
from equations import close, leaf, library
from reference import draw
from torch import Tensor
from torch.nn import functional as F

from isda import functional


def test_smoothed_loss_bounds_the_monte_carlo_loss(device):
    """Expected smoothed cross entropy under draws with the covariance of the target."""
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("diagonal", [False, True])
def test_sample_has_the_dtype_of_the_features(diagonal, dtype, device):
    """The statistics are float32, whatever the dtype of the features."""
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


def test_sample_errors(device):
    x = draw(3, 4, 3, device=device)
    wrong = [
        (x.covariance, -0.5, "strength must be >= 0, got -0.5"),
        (x.covariance[:, :2], 0.5, "covariance must have shape (C, 3, 3) or (C, 3), got (4, 2, 3)"),
    ]
    if device.type == "cpu":  # no synchronisation with a GPU
        negative = x.covariance[0].abs()
        negative[2, 1] = -0.1
        wrong.append((negative, 0.5, "covariance must contain non-negative variances, got"))
    for covariance, strength, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            functional.sample(x.features, x.target, covariance, strength=strength)
    with pytest.raises(ValueError, match="covariance must have 4 classes, like weight, got 3"):
        functional.monte_carlo_loss(
            x.features, x.weight, x.target, x.covariance[0].abs(), strength=0.5, num_samples=1
        )
