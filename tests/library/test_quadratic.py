"""The quadratic term of Eq. 4 in every structure: values, derivatives, offsets."""

import functools

import pytest
import reference
import torch
from equations import close, dtypes, leaf, library, matrices, shapes, structures
from reference import draw
from torch import Tensor

from isda import functional


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
    """For learned covariances, or differentiating through a step."""
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
    """Margins relative to the target with the covariance of another class."""
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
    """Exactly 0, so the loss is never below cross entropy, however large the features are."""
    x = reference.draw(40, 5, 6, dtype=torch.float32, device=device)
    rows = library(structure, 1000 * x.covariance)(x.weight, x.target)
    assert rows.max() > 1
    assert rows.gather(1, x.target[:, None]).eq(0).all()


@structures
def test_quadratic_of_weights_with_a_common_offset(structure, device):
    """An offset of all rows does not change the margins, but would cause cancellation."""
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
    assert (
        naive.cpu() - exact
    ).abs().max() / exact.abs().max() > 1e-5  # the test is sensitive to it
