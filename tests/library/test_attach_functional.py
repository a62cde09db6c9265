"""Forward passes with ``torch.func.functional_call``."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune

import isda

N, C, A = 7, 13, 5


class TwoHeads(nn.Module):
    """Logits are the sum of two layers; the second has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(A, C)
        self.second = nn.Linear(A, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x.tanh()) + self.second(x.cos())


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(A, A), nn.Tanh(), nn.Linear(A, C)), None),
    "no bias": (lambda: nn.Sequential(nn.Tanh(), nn.Linear(A, C, bias=False)), None),
    "two heads": (TwoHeads, ["first", "second"]),
}


def draw(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, A, generator=generator)
    return x.to(device), torch.randint(C, (N,), generator=generator).to(device)


def parametrize_by_tanh(layer: nn.Linear, name: str) -> None:
    parametrize.register_parametrization(layer, name, nn.Tanh())


def prune_half(layer: nn.Linear, name: str) -> None:
    prune.l1_unstructured(layer, name, amount=0.5)


def attached(model: nn.Module, head: list[str] | None) -> isda.AttachedLoss:
    return isda.attach(model, head=head, lambda_0=5.0, ramp="constant")


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradient_are_those_of_a_model_with_these_parameters(name, device):
    create, head = MODELS[name]
    torch.manual_seed(0)
    model, other = create().to(device), create().to(device)
    x, target = draw(device)
    parameters = {key: p.detach().clone().requires_grad_() for key, p in other.named_parameters()}
    loss = attached(model, head)(functional_call(model, parameters, (x,)), target)
    loss.backward()
    expected = attached(other, head)(other(x), target)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for key, parameter in other.named_parameters():
        torch.testing.assert_close(parameters[key].grad, parameter.grad)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_inner_step_is_differentiable(device):
    """As in MAML: the gradient of a loss with updated weights, against finite differences."""
    torch.manual_seed(0)
    model = nn.Linear(A, C).double().to(device)
    x, target = draw(device)

    def outer(weight: Tensor) -> Tensor:
        twin = copy.deepcopy(model)
        criterion = isda.attach(twin, lambda_0=5.0, ramp="constant", covariance="diagonal")
        parameters = {"weight": weight, "bias": twin.bias}
        inner = criterion(functional_call(twin, parameters, (x.double(),)), target)
        (step,) = torch.autograd.grad(inner, weight, create_graph=True)
        parameters["weight"] = weight - 0.1 * step
        return criterion(functional_call(twin, parameters, (x.double().flip(0),)), target)

    weight = model.weight.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(outer(weight), weight)
    direction = torch.randn_like(weight)
    small = 1e-3  # quadratic terms are computed in float32
    with torch.enable_grad():
        change = (outer(weight + small * direction) - outer(weight - small * direction)) / 2 / small
    assert change.item() == pytest.approx((grad * direction).sum().item(), rel=1e-3)


def test_the_parameters_of_a_pass_are_used_once(device):
    """The next pass uses the model's own parameters again."""
    torch.manual_seed(0)
    model, twin = (nn.Linear(A, C).to(device) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    x, target = draw(device)
    criterion, expected = (isda.attach(one, ramp="constant") for one in (model, twin))
    parameters = {key: p.detach() + 1 for key, p in model.named_parameters()}
    criterion(functional_call(model, parameters, (x,)), target)
    expected(twin(x), target)  # the same features
    criterion(model(x), target).backward()
    expected(twin(x), target).backward()
    torch.testing.assert_close(model.weight.grad, twin.weight.grad)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("change", [parametrize_by_tanh, prune_half])
def test_a_head_whose_weight_or_bias_is_computed(change, name, device):
    """It is not a parameter: the loss uses the value that the layer computes."""
    torch.manual_seed(0)
    model = nn.Linear(A, C).to(device)
    change(model, name)
    twin = nn.Linear(A, C).to(device)
    with torch.no_grad():
        twin.weight.copy_(model.weight)
        twin.bias.copy_(model.bias)
    x, target = draw(device)
    loss = isda.attach(model, lambda_0=5.0, ramp="constant")(model(x), target)
    loss.backward()
    expected = isda.attach(twin, lambda_0=5.0, ramp="constant")(twin(x), target)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert all(parameter.grad is not None for parameter in model.parameters())
