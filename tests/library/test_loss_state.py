"""The state of ISDALoss: checkpoints, buffers, conversions, autocast."""

import copy
import io
import itertools

import pytest
import torch
from criteria import (
    STRUCTURES,
    A,
    C,
    assert_bits,
    assert_same,
    batch,
    bits,
    call,
    close,
    make,
    structures,
)
from torch import Tensor, nn
from torch.nn import functional as F

from isda import ISDALoss, functional


@structures
def test_checkpoint_in_the_middle(structure, device):
    """Saving, loading with weights_only and continuing gives bitwise the same result."""
    options = {"covariance": structure, "decay": 0.9}
    whole, first, second = (make(device, **options) for _ in range(3))
    losses = [call(whole, batch(device, seed=seed)) for seed in range(4)]
    for seed in (0, 1):
        call(first, batch(device, seed=seed))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert_bits(second, bits(first))
    resumed = [call(second, batch(device, seed=seed)) for seed in (2, 3)]
    assert_same(second, whole)
    if device.type == "cpu":
        assert torch.equal(torch.stack(resumed), torch.stack(losses[2:]))
    close(torch.stack(resumed), torch.stack(losses[2:]))


def test_state_is_buffers(device):
    criterion = make(device, weight=torch.ones(C))
    assert not list(criterion.parameters())
    state = criterion.state_dict()
    assert set(state) == {"step", "estimator.count", "estimator.mean", "estimator.covariance"}
    kinds = {name: tensor.dtype for name, tensor in state.items()}
    assert kinds["step"] == kinds["estimator.count"] == torch.int64
    assert kinds["estimator.mean"] == torch.float64
    assert kinds["estimator.covariance"] == torch.float32


@structures
def test_conversions_lose_no_bits(structure, device):
    criterion = make(device, covariance=structure)
    call(criterion, batch(device))
    before = bits(criterion)
    del before["overflow"]  # values for an error message
    for convert in (
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
        lambda m: nn.Sequential(m).half()[0],
        copy.deepcopy,
    ):
        criterion = convert(criterion)
        assert_bits(criterion, before)


@pytest.mark.parametrize("structure", ["full", "diagonal", "shared"])
def test_checkpoint_of_another_shape(structure, device):
    criterion = make(device, covariance=structure)
    call(criterion, batch(device))
    before = bits(criterion)
    other = ISDALoss(A + 1, C, covariance=structure, total_steps=10).state_dict()
    with pytest.raises(ValueError, match=r"estimator\.mean must have shape .* got "):
        criterion.load_state_dict(other)
    assert_bits(criterion, before)
    with pytest.raises(ValueError, match=r"estimator\.mean must have shape .* got "):
        nn.Sequential(nn.ReLU(), criterion).load_state_dict({f"1.{k}": other[k] for k in other})
    assert_bits(criterion, before)


@pytest.mark.parametrize(("structure", "other"), list(itertools.permutations(STRUCTURES, 2)))
def test_checkpoint_of_another_structure(structure, other, device):
    criterion, source = make(device, covariance=structure), make(device, covariance=other)
    for each in (criterion, source):
        call(each, batch(device))
    call(source, batch(device))  # another step
    before = bits(criterion)
    with pytest.raises(ValueError, match=r"must (contain|have shape)"):
        criterion.load_state_dict(source.state_dict())
    assert_bits(criterion, before)
    # a checkpoint of something else can still be loaded into a model that holds the criterion
    nn.Sequential(nn.Linear(2, 2), criterion).load_state_dict(
        {"0.weight": torch.zeros(2, 2)}, strict=False
    )
    assert_bits(criterion, before)


class Product:
    """An estimator that autocast would change."""

    def update(self, features: Tensor, target: Tensor) -> None: ...

    def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        return (weight @ weight.T).diagonal().expand(len(target), -1)


@structures
def test_autocast(structure, device):
    """Statistics and loss are float32 inside autocast, for bfloat16 features and logits."""
    x = batch(device)
    features = x.features.bfloat16()
    inside, outside = (make(device, covariance=structure, ramp="constant") for _ in range(2))
    weight = x.weight.requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = F.linear(features, weight, x.bias)
        assert logits.dtype == torch.bfloat16
        loss = inside(features, weight, x.target, bias=x.bias, logits=logits)
    expected = outside(features.float(), weight, x.target, logits=logits.float())
    assert loss.dtype == torch.float32
    close(loss, expected, tolerance=1e-6)
    assert_same(inside, outside)
    assert not {b.dtype for b in inside.buffers()} & {torch.float16, torch.bfloat16}
    loss.backward()
    assert weight.grad.dtype == torch.float32
    own = make(device, covariance=Product(), ramp="constant")
    quadratic = Product().quadratic(weight, x.target)
    expected = functional.isda_cross_entropy(logits, x.target, quadratic, strength=0.5)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = own(features, weight, x.target, logits=logits)
        close(found, expected, tolerance=1e-6)
        assert inside.eval()(features, weight, x.target, logits=logits).dtype == torch.float32


@pytest.mark.parametrize("step", [-1, -9, 3.5])
def test_a_step_that_cannot_be_is_not_loaded(step):
    criterion = ISDALoss(A, C, lambda_0=1.0, total_steps=10)
    state = criterion.state_dict() | {"step": torch.tensor(step)}
    with pytest.raises(ValueError, match=r"step must be a whole number >= 0, got "):
        criterion.load_state_dict(state)
    assert criterion.step == 0
