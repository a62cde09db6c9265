"""At λ = 0 the criterion is cross entropy, and a loaded state cannot make λ negative."""

import pytest
import torch
from torch.nn import functional as F

import isda

A, C = 4, 5


@pytest.mark.xfail(strict=True, reason="inf - inf in the quadratic term is NaN, and 0 * NaN too")
@pytest.mark.parametrize("covariance", ["full", "diagonal", "shared", "identity"])
@pytest.mark.parametrize("options", [{"lambda_0": 0.0}, {"progress": 0.0}])
def test_an_overflowing_quadratic_term_does_not_count(
    covariance: str, options: dict[str, float]
) -> None:
    torch.manual_seed(0)
    features = torch.randn(6, A)
    weight = (1e20 * torch.randn(C, A)).requires_grad_()
    target = torch.randint(C, (6,))
    strength = options.get("lambda_0", 0.5)
    criterion = isda.ISDALoss(A, C, lambda_0=strength, total_steps=10, covariance=covariance)
    loss = criterion(features, weight, target, progress=options.get("progress"))
    expected = F.cross_entropy(features @ weight.T, target)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(one, weight)[0] for one in (loss, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.xfail(strict=True, reason="step is loaded without a look, and -9 makes λ negative")
@pytest.mark.parametrize("step", [-1, -9])
def test_a_negative_step_is_not_loaded(step: int) -> None:
    criterion = isda.ISDALoss(A, C, lambda_0=1.0, total_steps=10)
    state = criterion.state_dict() | {"step": torch.tensor(step)}
    with pytest.raises(ValueError, match="step"):
        criterion.load_state_dict(state)
    assert criterion.step == 0
