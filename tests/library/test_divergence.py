"""Divergence through the quadratic term raises an error, and ``max_shift`` prevents it."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from ranks import results_of
from torch import Tensor, nn

import isda
from isda import ISDABCEWithLogitsLoss, ISDALoss, functional

C, A = 5, 4
MESSAGE = re.compile(
    r"the loss is no longer finite at λ = (\S+), with a quadratic term of (\S+): the weights of "
    r"the final layer diverge\. Reduce lambda_0 or the learning rate, or use weight decay or max"
)


def batch(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20, A, generator=generator)
    return features.to(device), (torch.arange(20) % C).to(device)


def weight(device: torch.device, size: float) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (size * torch.randn(C, A, generator=generator)).to(device)


def error_of(criterion: nn.Module, head: Tensor, device: torch.device) -> FloatingPointError:
    """A CPU raises in the same call, a GPU in the next check, after further steps."""
    features, target = batch(device)

    def steps() -> None:
        loss = criterion(features, head, target)
        assert not loss.isfinite().all()
        criterion(features, weight(device, 1.0), target)
        criterion.check()

    with pytest.raises(FloatingPointError, match=MESSAGE) as raised:
        steps()
    return raised.value


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("covariance", ["full", "diagonal", "shared", "identity"])
def test_a_loss_that_is_not_finite(covariance, reduction, device):
    criterion = ISDALoss(A, C, total_steps=10, covariance=covariance, reduction=reduction)
    criterion = criterion.to(device)
    features, target = batch(device)
    for _ in range(4):
        criterion(features, weight(device, 1.0), target)
    error = error_of(criterion, weight(device, 1e20), device)
    strength, quadratic = map(float, MESSAGE.match(str(error)).groups())
    assert strength == 0.2  # λ₀ · 4/10
    assert quadratic > 1e37
    criterion.check()  # reported only once
    criterion.state_dict()
    copy.deepcopy(criterion)  # keeps no graph


def test_options_that_have_no_kernel(device):
    criterion = ISDALoss(A, C, ramp="constant", lambda_0=0.3, weight=torch.ones(C)).to(device)
    criterion.half()  # as a part of a model in half precision
    assert "at λ = 0.3," in str(error_of(criterion, weight(device, 1e20), device))


def test_cross_entropy_may_be_infinite(device):
    """At λ = 0, the loss is torch's, so it may be infinite."""
    criterion = ISDALoss(A, C, total_steps=10).to(device)
    features, target = batch(device)
    logits = torch.zeros(20, C, device=device)
    logits[:, 1] = -torch.inf
    assert criterion(features, weight(device, 1.0), target, logits=logits) == torch.inf
    criterion.check()


def test_infinite_logits_are_not_blamed_on_the_weights(device):
    criterion = ISDALoss(A, C, ramp="constant").to(device)
    features, target = batch(device)
    logits = torch.zeros(20, C, device=device)
    logits[:, 1] = -torch.inf

    def step() -> None:
        criterion(features, weight(device, 1.0), target, logits=logits)
        criterion.check()

    with pytest.raises(FloatingPointError, match=r"at most .*: look for infinite logits"):
        step()


@pytest.mark.compiled
def test_compiled(device):
    criterion = ISDALoss(A, C, ramp="constant").to(device)
    compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    features, target = batch(device)
    assert not compiled(features, weight(device, 1e20), target).isfinite()
    assert compiled(features, weight(device, 1.0), target).isfinite()
    with pytest.raises(FloatingPointError, match=MESSAGE):
        criterion.check()


def test_multi_label(device):
    criterion = ISDABCEWithLogitsLoss(A, C, ramp="constant").to(device)
    features, target = batch(device)
    labels = nn.functional.one_hot(target, C).float()
    with pytest.raises(FloatingPointError, match=MESSAGE):
        criterion(features, weight(device, 1e20), labels)


def two_ranks(rank: int, world: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
    cpu, found = torch.device("cpu"), {}
    labels = nn.functional.one_hot(batch(cpu)[1], C).float()
    for name, criterion, target in (
        ("one label", ISDALoss(A, C, ramp="constant"), batch(cpu)[1]),
        ("labels", ISDABCEWithLogitsLoss(A, C, ramp="constant"), labels),
    ):
        found[name] = []
        for bad in (1, 0):
            try:
                for size in (1.0, 1e20 if rank == bad else 1.0, 1.0):
                    criterion(batch(cpu)[0], weight(cpu, size), target)
            except (ValueError, FloatingPointError) as error:
                found[name].append(f"{type(error).__name__}: {error}")
            dist.barrier()
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.ddp
def test_all_ranks_raise(tmp_path):
    """First caused by the second rank, then by the first."""
    other = "ValueError: the loss on another rank is no longer finite"
    own = "FloatingPointError: the loss is no longer finite"
    first, second = results_of(two_ranks, 2, tmp_path)
    for name in ("one label", "labels"):
        for messages, starts in ((first[name], (other, own)), (second[name], (own, other))):
            for message, start in zip(messages, starts, strict=True):
                assert message.startswith(start), name


# max_shift


def test_limited_shift():
    quadratic = torch.tensor([[0.0, 1.0, 7.9, 8.1, torch.inf]], dtype=torch.float64)
    limited = functional.limit_shift(quadratic, 0.5, 2.0)
    torch.testing.assert_close(limited, quadratic.clamp(max=8.0))
    by_tensor = functional.limit_shift(quadratic, torch.tensor(0.5), 2.0)
    torch.testing.assert_close(by_tensor, limited)
    for zero in (0.0, torch.tensor(0.0)):
        assert torch.equal(functional.limit_shift(quadratic, zero, 2.0), quadratic)
    inner = quadratic[:, 1:4].clone().requires_grad_()
    functional.limit_shift(inner, 0.5, 2.0).sum().backward()
    assert inner.grad.tolist() == [[1, 1, 0]]
    for value, expected in ((0.0, 0.0), (0.5, -16.0)):  # 2 · 2 / λ has the slope −4 / λ²
        strength = torch.tensor(value, requires_grad=True)
        functional.limit_shift(inner, strength, 2.0).sum().backward()
        assert strength.grad == expected


@pytest.mark.parametrize("kind", [ISDALoss, ISDABCEWithLogitsLoss])
def test_the_loss_is_exact_below_the_limit(kind, device):
    features, target = batch(device)
    if kind is ISDABCEWithLogitsLoss:
        target = nn.functional.one_hot(target, C).float()
    head, losses = weight(device, 1.0), {}
    for limit in (None, 1e6, 0.1):
        criterion = kind(A, C, ramp="constant", max_shift=limit).to(device)
        losses[limit] = criterion(features, head, target)
    assert losses[None] == losses[1e6]
    assert criterion.evaluate(features @ head.T, target) < losses[0.1] < losses[None]
    assert "max_shift=0.1" in repr(criterion)


@pytest.mark.parametrize("max_shift", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_not_positive(max_shift):
    with pytest.raises(ValueError, match="max_shift must be > 0 or None, got"):
        isda.attach(nn.Linear(A, C), max_shift=max_shift)


def test_a_training_that_would_diverge(device):
    """With features of about 30, the curvature λ Σ is too large for a learning rate of 0.1."""
    generator = torch.Generator().manual_seed(0)
    centres = 18 * torch.randn(C, 16, generator=generator)
    losses = {}
    for max_shift in (None, 20.0):
        torch.manual_seed(0)
        head = nn.Linear(16, C).to(device)
        criterion = isda.attach(head, total_steps=400, max_shift=max_shift).to(device)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
        try:
            for _ in range(400):
                target = torch.randint(C, (32,), generator=generator)
                features = centres[target] + 30 * torch.randn(32, 16, generator=generator)
                loss = criterion(head(features.to(device)), target.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            criterion.state_dict()
            losses[max_shift] = loss.item()
        except FloatingPointError as error:
            losses[max_shift] = str(error)
    assert MESSAGE.match(losses[None])
    assert losses[20.0] < 1e4
