"""``torch.compile(fullgraph=True)``: the compiled step equals the eager one."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import isda

STRUCTURES = ["full", "diagonal", "shared", "identity"]
structures = pytest.mark.parametrize("structure", STRUCTURES)
N, C, A = 7, 13, 5

pytestmark = pytest.mark.compiled


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()


def make(device: torch.device, structure: str, **options) -> tuple[nn.Module, isda.AttachedLoss]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, A), nn.ReLU(), nn.Linear(A, C)).to(device)
    options = {"lambda_0": 2.0, "total_steps": 2, "covariance": structure, **options}
    return model, isda.attach(model, **options)


def batches(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    drawn = [(torch.randn(N, 4), torch.randint(C, (N,))) for _ in range(3)]
    drawn[1][1][2] = -100
    return [(x.to(device), target.to(device)) for x, target in drawn]


def assert_same_training(device, structure, compiled_step, **options) -> None:
    """Losses, gradients and buffers of three steps; ``compiled_step`` makes a step of (x, y)."""
    model, criterion = make(device, structure, **options)
    eager_model, eager_criterion = make(device, structure, **options)
    step = compiled_step(model, criterion)
    for x, target in batches(device):
        loss = step(x, target)
        expected = eager_criterion(eager_model(x), target)
        # the same operations in another order: a few float32 roundings
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        for each, parameters in ((loss, model), (expected, eager_model)):
            parameters.zero_grad()
            each.backward()
        for left, right in zip(model.parameters(), eager_model.parameters(), strict=True):
            torch.testing.assert_close(left.grad, right.grad, rtol=1e-5, atol=1e-6)
        for left, right in zip(criterion.buffers(), eager_criterion.buffers(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    assert criterion.criterion.step == 3


def whole_step(backend: str):
    def make_step(model: nn.Module, criterion: nn.Module):
        return torch.compile(
            lambda x, target: criterion(model(x), target), fullgraph=True, backend=backend
        )

    return make_step


@structures
def test_whole_step(structure, device):
    assert_same_training(device, structure, whole_step("aot_eager"), decay=0.9)


@structures
def test_model_alone(structure, device):
    """The hook runs inside the compiled model, the criterion outside."""

    def make_step(model: nn.Module, criterion: nn.Module):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        return lambda x, target: criterion(compiled(x), target)

    assert_same_training(device, structure, make_step)


def test_attached_to_a_compiled_model(device):
    """``attach`` finds the head of a compiled model."""
    model, _ = make(device, "full")
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    criterion = isda.attach(compiled, ramp="constant")
    expected = isda.attach(plain, ramp="constant")
    x, target = batches(device)[0]
    torch.testing.assert_close(criterion(compiled(x), target), expected(plain(x), target))


@structures
def test_soft_target_and_evaluation(structure, device):
    model, criterion = make(device, structure)
    eager_model, eager_criterion = make(device, structure)
    step = whole_step("aot_eager")(model, criterion)
    x, target = torch.randn(N, 4, device=device), torch.randn(N, C, device=device).softmax(1)
    for _ in range(3):  # λ = 0, λ₀ / 2, and evaluation
        warned = pytest.warns(UserWarning, match="in eval mode")
        with nullcontext() if eager_model.training else warned:
            expected = eager_criterion(eager_model(x), target)
        loss = step(x, target)
        torch.testing.assert_close(loss, expected)
        gradients = [
            torch.autograd.grad(each, parameters.parameters())
            for each, parameters in ((loss, model), (expected, eager_model))
        ]
        torch.testing.assert_close(*gradients)
        if criterion.criterion.step == 2:
            model.eval()
            eager_model.eval()


def test_bad_batch_is_told_later(device):
    model, criterion = make(device, "full")
    step = whole_step("aot_eager")(model, criterion)
    x, target = batches(device)[0]
    step(x, target)
    before = {name: tensor.clone() for name, tensor in criterion.named_buffers()}
    assert step(torch.full_like(x, torch.nan), target).isnan()
    assert step(x, torch.full_like(target, C)).isnan()
    with pytest.raises(ValueError, match="target must be in"):
        criterion.state_dict()
    for name, tensor in criterion.named_buffers():
        assert torch.equal(tensor, before[name]), name


def test_one_graph_for_all_steps(device):
    """A growing step count and λ cause no recompilation."""
    model, criterion = make(device, "full", total_steps=5)
    step = whole_step("aot_eager")(model, criterion)
    x, target = batches(device)[0]
    step(x, target)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            step(x, target)
    assert criterion.criterion.step == 5


@pytest.mark.slow
@structures
def test_inductor(structure, device):
    assert_same_training(device, structure, whole_step("inductor"), decay=0.9)
