"""ISDABCEWithLogitsLoss against naive loops: values, gradients, options, precision, two ranks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from label_batches import STRENGTH, A, C, N, batch, make
from ranks import close as close_ranks
from ranks import results_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import isda
from isda import ISDABCEWithLogitsLoss, functional

structures = pytest.mark.parametrize("structure", ["full", "diagonal", "shared", "identity"])


def naive(
    x: reference.Inputs, labels: Tensor, matrices: list[Tensor], strength: float
) -> list[list[Tensor]]:
    """The loss of each label of each sample, one at a time."""
    losses = []
    for i in range(len(labels)):
        own = [c for c in range(C) if labels[i, c] > 0.5]
        covariance = sum((matrices[c] for c in own), torch.zeros(A, A).double()) / max(len(own), 1)
        row = []
        for k in range(C):
            z = x.weight[k] @ x.features[i] + x.bias[k]
            shift = strength / 2 * (x.weight[k] @ covariance @ x.weight[k])
            y = labels[i, k]
            row.append(y * (1 + (shift - z).exp()).log() + (1 - y) * (1 + (shift + z).exp()).log())
        losses.append(row)
    return losses


def statistics(structure: str, x: reference.Inputs, labels: Tensor) -> list[Tensor]:
    """Σ_c from every sample that has the label c."""
    rows, classes = labels.nonzero(as_tuple=True)
    if structure == "identity":
        return reference.identity_matrices(x.weight)
    if structure == "shared":
        return [reference.pooled_moments(x.features[rows], classes)[2]] * C
    covariance = reference.class_moments(x.features[rows], classes, C)[2]
    if structure == "diagonal":
        return reference.variance_matrices(covariance.diagonal(dim1=1, dim2=2))
    return list(covariance)


@structures
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradients_against_loops(structure, reduction, device):
    x, labels = batch(device)
    criterion = make(device, covariance=structure, reduction=reduction)
    leaves = [t.clone().requires_grad_() for t in (x.features, x.weight, x.bias)]
    loss = criterion(leaves[0], leaves[1], labels, bias=leaves[2])
    doubles = [t.detach().double().cpu().requires_grad_() for t in leaves]
    there = reference.Inputs(*doubles, *(t.cpu() for t in x[3:]))
    matrices = [m.detach() for m in statistics(structure, there, labels.cpu())]
    each = torch.stack([torch.stack(row) for row in naive(there, labels.cpu(), matrices, STRENGTH)])
    expected = {"none": each, "sum": each.sum(), "mean": each.mean()}[reduction]
    # float32 statistics: some dozen roundings of 2⁻²⁴
    torch.testing.assert_close(loss.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(expected.sum(), doubles)
    loss.sum().backward()
    for leaf, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(leaf.grad.double().cpu(), gradient, rtol=1e-4, atol=1e-5)


def test_loss_bounds_the_monte_carlo_loss(device):
    """BCE ≤ E[BCE over draws with the mean covariance of the labels] ≤ loss."""
    x, labels = batch(device, dtype=torch.float64)
    covariance = x.covariance
    share = labels / labels.sum(1, keepdim=True).clamp(min=1)
    own = torch.einsum("nc,cab->nab", share, covariance)
    generator = torch.Generator(device).manual_seed(0)
    draws = functional.sample(
        x.features,
        torch.arange(N, device=device),
        own,
        strength=STRENGTH,
        num_samples=20_000,
        generator=generator,
    )
    logits = F.linear(draws, x.weight, x.bias)  # (M, N, C)
    losses = F.binary_cross_entropy_with_logits(logits, labels.expand_as(logits), reduction="none")
    explicit, error = losses.mean(0), 4 * losses.std(0) / 20_000**0.5 + 1e-9  # four standard errors
    quadratic = torch.einsum("ka,nab,kb->nk", x.weight, own, x.weight)
    plain, bound = (
        functional.isda_binary_cross_entropy(
            F.linear(x.features, x.weight, x.bias), labels, quadratic, strength=strength,
            reduction="none",
        )
        for strength in (0.0, STRENGTH)
    )  # fmt: skip
    assert (plain <= explicit + error).all()
    assert (explicit <= bound + error).all()
    assert (bound[1] > plain[1]).all()  # with all labels, the bound is larger


@structures
def test_one_class(structure, device):
    """A network with one logit has the loss of a class that is the only one with labels."""
    x, labels = batch(device)
    labels[:, 1:] = 0
    options = {"covariance": structure, "reduction": "none"}
    expected = make(device, **options)(x.features, x.weight, labels, bias=x.bias)
    criterion = make(device, classes=1, **options)
    found = criterion(x.features, x.weight[:1], labels[:, :1], bias=x.bias[:1])
    torch.testing.assert_close(found, expected[:, :1])
    plain = F.binary_cross_entropy_with_logits(
        F.linear(x.features, x.weight[:1], x.bias[:1]), labels[:, :1], reduction="none"
    )
    assert ((found > plain + 1e-4) == (labels[:, :1] > 0)).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("train", [False, True])
def test_without_strength_it_is_torch_binary_cross_entropy(reduction, train, device):
    x, labels = batch(device)
    options = {
        "weight": torch.rand(C, device=device),
        "pos_weight": 3 * torch.rand(C, device=device),
        "reduction": reduction,
    }
    criterion = make(device, lambda_0=0.0, **options).train(train)
    found = criterion(x.features, x.weight, labels, bias=x.bias)
    logits = F.linear(x.features, x.weight, x.bias)
    torch.testing.assert_close(found, nn.BCEWithLogitsLoss(**options)(logits, labels))


def test_ramp_state_and_update(device):
    criterion = make(device, ramp="linear", total_steps=2)
    x, labels = batch(device)
    plain = F.binary_cross_entropy_with_logits(F.linear(x.features, x.weight, x.bias), labels)
    for update in (False, True):  # λ is 0 before the first step
        identity = make(device, ramp="linear", total_steps=2, covariance="identity")
        found = identity(x.features, x.weight, labels, bias=x.bias, update=update)
        torch.testing.assert_close(found, plain)
    torch.testing.assert_close(criterion(x.features, x.weight, labels, bias=x.bias), plain)
    assert criterion.step == 1
    assert criterion.estimator.count.tolist() == labels.sum(0).long().tolist()
    before = copy.deepcopy(criterion.state_dict())
    again = criterion(x.features, x.weight, labels, bias=x.bias, update=False)
    torch.testing.assert_close(again, plain)  # λ of the counted step
    criterion.frozen = True
    ramped = [criterion(x.features, x.weight, labels, bias=x.bias) for _ in range(4)]
    assert plain < ramped[0] < ramped[1]
    assert ramped[1] == ramped[2] == ramped[3]  # λ₀ from T on
    assert criterion.step == 5
    full = criterion(x.features, x.weight, labels, bias=x.bias, progress=1.0)
    half = criterion(x.features, x.weight, labels, bias=x.bias, progress=0.5)
    torch.testing.assert_close(torch.stack([half, full]), torch.stack(ramped[:2]))
    for name, tensor in criterion.state_dict().items():
        assert name == "step" or torch.equal(tensor, before[name])
    again = make(device, ramp="linear", total_steps=2)
    again.load_state_dict(criterion.state_dict())
    values = [c(x.features, x.weight, labels, update=False) for c in (criterion, again)]
    assert torch.equal(*values)


def test_options_reach_the_statistics(device):
    """Probabilities above 0.5 count as labels; decay weights recent samples."""
    x, labels = batch(device)
    plain, decayed, soft = (make(device, decay=decay) for decay in (1.0, 0.5, 1.0))
    for criterion in (plain, decayed):
        for shift in (0, 1):
            criterion(x.features + shift, x.weight, labels)
    assert not torch.allclose(plain.estimator.covariance, decayed.estimator.covariance)
    found = soft(x.features, x.weight, 0.6 * labels + 0.2, bias=x.bias)
    assert soft.estimator.count.tolist() == labels.sum(0).long().tolist()
    there = reference.Inputs(*(t.cpu().double() for t in x[:3]), *(t.cpu() for t in x[3:]))
    matrices = statistics("full", there, labels.cpu())
    losses = naive(there, 0.6 * labels.cpu() + 0.2, matrices, STRENGTH)
    expected = torch.stack([torch.stack(row) for row in losses]).mean()
    # float32 statistics: some dozen roundings of 2⁻²⁴
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-5)


def test_positive_weight_with_augmentation(device):
    x, labels = batch(device, dtype=torch.float64)
    weight = torch.linspace(0.5, 3, C, dtype=torch.float64, device=device)
    logits, quadratic = x.features @ x.weight.T, torch.rand(N, C, device=device).double()
    found, positive, negative = (
        functional.isda_binary_cross_entropy(
            logits, target, quadratic, strength=STRENGTH, pos_weight=pos_weight, reduction="none"
        )
        for target, pos_weight in (
            (labels, weight), (torch.ones_like(labels), None), (torch.zeros_like(labels), None)
        )
    )  # fmt: skip
    torch.testing.assert_close(found, labels * weight * positive + (1 - labels) * negative)


def test_attached_to_a_model(device):
    model = nn.Sequential(nn.Linear(3, A), nn.ReLU(), nn.Linear(A, C)).to(device)
    criterion = isda.attach(model, make(device))
    x, labels = torch.randn(N, 3, device=device), batch(device)[1]
    loss = criterion(model(x), labels)
    loss.backward()
    plain = F.binary_cross_entropy_with_logits(model(x), labels)
    assert loss > plain
    model.eval()
    with pytest.warns(UserWarning, match="in eval mode"):
        loss = criterion(model(x), labels)
    torch.testing.assert_close(loss, plain)


def test_half_precision(device):
    """Statistics and loss are float32 for half-precision inputs, with or without autocast."""
    x, labels = batch(device)
    features, weight = x.features.bfloat16(), x.weight.bfloat16()
    logits = F.linear(features, weight)
    single = make(device)
    expected = single(features.float(), weight.float(), labels, logits=logits.float())
    for enabled in (False, True):
        criterion = make(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            found = criterion(features, weight, labels.bfloat16(), logits=logits)
        assert torch.equal(found, expected)
        assert torch.equal(criterion.estimator.covariance, single.estimator.covariance)
        expected_in_eval = F.binary_cross_entropy_with_logits(logits.float(), labels)
        assert torch.equal(criterion.evaluate(logits, labels.bfloat16()), expected_in_eval)
    assert criterion(features[:0], weight, labels[:0]) == 0


def test_double_precision(device):
    x, labels = batch(device, dtype=torch.float64)
    for train in (True, False):
        criterion = make(device, lambda_0=0.0).train(train)
        found = criterion(x.features, x.weight, labels, bias=x.bias)
        logits = F.linear(x.features, x.weight, x.bias)
        torch.testing.assert_close(found, F.binary_cross_entropy_with_logits(logits, labels))


def train(model: nn.Module, rank: int | None, *, compiled: bool = False) -> dict[str, Any]:
    """Two steps on this rank's part of uneven batches, or on the whole batches."""
    criterion = isda.attach(model, ISDABCEWithLogitsLoss(A, C, lambda_0=1.0, ramp="constant"))
    function = torch.compile(criterion, backend="eager") if compiled else criterion
    record: dict[str, Any] = {"losses": [], "gradients": []}
    for step, parts in enumerate([(5, 2), (0, 4)]):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(sum(parts), 3, generator=generator)
        labels = (torch.rand(sum(parts), C, generator=generator) < 0.5).float()
        if rank is not None:
            x, labels = x.split(parts)[rank], labels.split(parts)[rank]
        model.zero_grad()
        loss = function(model(x), labels)
        loss.backward()
        record["losses"].append(loss.detach())
        record["gradients"].append([p.grad.clone() for p in model.parameters()])
    record["state"] = criterion.state_dict()
    return record


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, A), nn.Tanh(), nn.Linear(A, C))


def work(rank: int, world: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    record = {
        compiled: train(DistributedDataParallel(make_model()), rank, compiled=compiled)
        for compiled in (False, True)
    }
    torch.save(record, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.ddp
def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    """Also with torch.compile, which breaks the graph."""
    ranks, expected = results_of(work, 2, tmp_path), train(make_model(), None)
    for compiled in (False, True):
        found = [record[compiled] for record in ranks]
        losses = torch.stack([torch.stack(record["losses"]) for record in found])
        close_ranks(losses.mean(0), torch.stack(expected["losses"]))
        for record in found:
            close_ranks(record["gradients"], expected["gradients"])
            close_ranks(record["state"], expected["state"])


@pytest.mark.parametrize("option", ["weight", "pos_weight"])
@pytest.mark.parametrize("positions", [(C,), (4,), (3, C)], ids=str)
def test_weights_in_eval_mode_are_for_the_classes(positions, option):
    """Not for the positions of tokens, whose number may equal that of the classes."""
    head = nn.Linear(A, C)
    weight = torch.rand(C) + 0.5
    loss = ISDABCEWithLogitsLoss(A, C, total_steps=5, **{option: weight})
    criterion = isda.attach(head, loss)
    x = torch.randn(2, *positions, A)
    target = (torch.rand(2, *positions, C) > 0.5).float()
    expected = F.binary_cross_entropy_with_logits(head(x), target, **{option: weight})
    torch.testing.assert_close(criterion(head(x), target, progress=0.0), expected)
    head.eval()
    with pytest.warns(UserWarning, match="in eval mode"):
        loss_of_batch = criterion(head(x), target)
    torch.testing.assert_close(loss_of_batch, expected)
    loss.reduction = "none"
    each = F.binary_cross_entropy_with_logits(head(x), target, **{option: weight}, reduction="none")
    torch.testing.assert_close(criterion(head(x), target), each)
