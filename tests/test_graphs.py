"""``ISDALoss(cuda_graph=True)`` against the same loss without; on a CPU, replays run anew."""

import copy
import pickle

import pytest
import torch
from reference import Inputs, draw
from torch import Tensor, nn

import isda
from isda import ISDALoss, graphs
from isda import loss as loss_module

N, C, A = 7, 13, 5
STRUCTURES = ["full", "diagonal", "shared", "identity"]


@pytest.fixture(autouse=True)
def _capturable(device, monkeypatch):
    """On a CPU: a capture that keeps the functions, and a host that does not look at the batch."""
    if device.type == "cpu":

        def capture(warm_up, functions, device):
            warm_up()
            return map(torch.enable_grad(), functions)

        monkeypatch.setattr(graphs, "_capture", capture)
        monkeypatch.setattr(loss_module, "problem_in", lambda index: 0)
        monkeypatch.setattr(
            ISDALoss, "_is_capturable", lambda criterion, *inputs: torch.is_grad_enabled()
        )


def pair(device: torch.device, **options) -> tuple[ISDALoss, ISDALoss]:
    """A criterion without graphs and one with."""
    options = {"lambda_0": 2.0, "total_steps": 10, **options}
    plain = ISDALoss(A, C, **options).to(device)
    return plain, ISDALoss(A, C, **options, cuda_graph=True).to(device)


def batch(device: torch.device, seed: int, samples: int = N) -> Inputs:
    return draw(samples, C, A, seed=seed, dtype=torch.float32, device=device)


def run(criterion: ISDALoss, x: Inputs, target: Tensor | None = None, **options) -> list[Tensor]:
    """Loss, and gradients of features, weight and bias."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x.features, x.weight, x.bias)]
    target = x.target if target is None else target
    loss = criterion(leaves[0], leaves[1], target, bias=leaves[2], **options)
    return [loss, *torch.autograd.grad(loss.sum(), leaves)]


def captured(criterion: ISDALoss) -> int:
    return sum(found is not None for found in criterion._graphs._kinds.values())


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def same_state(found: nn.Module, expected: nn.Module) -> None:
    for left, right in zip(found.buffers(), expected.buffers(), strict=True):
        close(left, right)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["index", "ignore", "soft"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_steps_are_those_of_the_plain_loss(structure, kind, reduction, device):
    plain, graphed = pair(device, covariance=structure, reduction=reduction)
    found, expected = [], []
    for step in range(5):
        x = batch(device, step)
        target = x.target.clone()
        if kind == "ignore":
            target[step] = -100
        if kind == "soft":
            target = (x.features @ x.weight.T).softmax(1)
        expected += run(plain, x, target)
        found += run(graphed, x, target)
        same_state(graphed, plain)
    assert captured(graphed) == 1
    for left, right in zip(found, expected, strict=True):  # at the end: none was overwritten
        close(left, right)


@pytest.mark.parametrize("progress", ["number", "tensor"])
def test_progress_changes_from_call_to_call(progress, device):
    plain, graphed = pair(device, total_steps=None)
    for step in range(4):
        value = 0.2 * step
        x = batch(device, step)
        given = torch.tensor(value, device=device) if progress == "tensor" else value
        for left, right in zip(
            run(graphed, x, progress=given), run(plain, x, progress=value), strict=True
        ):
            close(left, right)
    assert captured(graphed) == 1


def test_gradients_accumulate(device):
    plain, graphed = pair(device, ramp="constant")
    weights = [batch(device, 0).weight.clone().requires_grad_() for _ in range(2)]
    for criterion, weight in zip((plain, graphed), weights, strict=True):
        for seed in range(4):
            x = batch(device, seed)
            criterion(x.features, weight, x.target).backward()
    assert captured(graphed) == 1
    close(weights[1].grad, weights[0].grad)


def test_backward_twice(device):
    _, graphed = pair(device, ramp="constant")
    weight = batch(device, 0).weight.clone().requires_grad_()
    for seed in range(3):
        x = batch(device, seed)
        loss = graphed(x.features, weight, x.target)
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    loss.backward()
    assert captured(graphed) == 1
    close(weight.grad, 2 * once)


def test_no_second_derivatives(device):
    _, graphed = pair(device, ramp="constant")
    x = batch(device, 0)
    weight = x.weight.clone().requires_grad_()
    for _ in range(3):
        loss = graphed(x.features, weight, x.target)
    (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(grad.square().sum(), weight)


def test_backward_after_the_next_call_raises(device):
    _, graphed = pair(device)
    weight = batch(device, 0).weight.clone().requires_grad_()
    losses = [graphed(x.features, weight, x.target) for x in (batch(device, s) for s in range(3))]
    losses[2].backward()
    with pytest.raises(RuntimeError, match=r"backward\(\) must come before the next call"):
        losses[1].backward()
    losses[0].backward()  # the first of its kind is no graph


def test_bad_batch(device):
    """A capture leaves no mark; a batch with NaN does, and is left out."""
    plain, graphed = pair(device)
    for criterion in (plain, graphed):
        for seed in range(3):
            run(criterion, batch(device, seed))
    graphed.check()
    same_state(graphed, plain)
    x = batch(device, 3)
    x.features[2, 1] = torch.nan
    assert run(graphed, x)[0].isnan()
    with pytest.raises(ValueError, match="features must be finite"):
        graphed.check()
    same_state(graphed, plain)
    for left, right in zip(
        run(graphed, batch(device, 4)), run(plain, batch(device, 4)), strict=True
    ):
        close(left, right)


def test_shapes(device):
    """As the last batch of an epoch, and more of them than there may be graphs."""
    plain, graphed = pair(device)
    for samples in [7, 3, 7, 3, *range(1, 12), *range(1, 12)]:
        x = batch(device, samples, samples)
        for left, right in zip(run(graphed, x), run(plain, x), strict=True):
            close(left, right)
    assert captured(graphed) == 8
    same_state(graphed, plain)


def test_frozen_weight(device):
    plain, graphed = pair(device)
    for seed in range(3):
        x = batch(device, seed)
        logits = [(x.features @ x.weight.T).requires_grad_() for _ in range(2)]
        for criterion, leaf in zip((plain, graphed), logits, strict=True):
            criterion(x.features, x.weight, x.target, logits=leaf).backward()
        close(logits[1].grad, logits[0].grad)
    assert captured(graphed) == 1


@pytest.mark.parametrize("change", ["option", "buffers"])
def test_changes_drop_the_graphs(change, device):
    plain, graphed = pair(device)
    for seed in range(6):
        x = batch(device, seed)
        for left, right in zip(run(graphed, x), run(plain, x), strict=True):
            close(left, right)
        if seed == 2:
            assert captured(graphed) == 1
            for criterion in (plain, graphed):
                if change == "option":
                    criterion.lambda_0 = 0.5
                else:
                    criterion._apply(torch.clone)  # as .to() does
    assert captured(graphed) == 1
    same_state(graphed, plain)


def test_state_is_loaded_into_graphs(device):
    plain, graphed = pair(device)
    state = copy.deepcopy(plain.state_dict())
    for seed in range(3):
        run(graphed, batch(device, seed))
    graphed.load_state_dict(state)
    x = batch(device, 9)
    for left, right in zip(run(graphed, x), run(plain, x), strict=True):
        close(left, right)
    same_state(graphed, plain)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_graphs_of_its_own(way, device):
    _, graphed = pair(device)
    for seed in range(3):
        run(graphed, batch(device, seed))
    twin = way(graphed)
    assert captured(twin) == 0
    before = copy.deepcopy(twin.state_dict())
    for seed in range(3, 6):
        run(graphed, batch(device, seed))
    assert all(torch.equal(twin.state_dict()[name], before[name]) for name in before)
    for seed in range(3, 6):
        run(twin, batch(device, seed))
    assert captured(twin) == 1
    same_state(twin, graphed)


def test_not_captured(device):
    x = batch(device, 0)
    plain, graphed = pair(device)
    for _ in range(3):
        run(plain, x)
        with torch.no_grad():
            graphed(x.features, x.weight, x.target)
    graphed.eval()
    for _ in range(3):
        run(graphed, x)
    assert captured(plain) == captured(graphed) == 0


def test_attached(device):
    models = [nn.Sequential(nn.Linear(4, A), nn.ReLU(), nn.Linear(A, C)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    losses = []
    for model, cuda_graph in zip(models, (False, True), strict=True):
        model.to(device)
        criterion = isda.attach(model, lambda_0=2.0, total_steps=9, cuda_graph=cuda_graph)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for seed in range(5):
            x = draw(N, C, 4, seed=seed, dtype=torch.float32, device=device)
            loss = criterion(model(x.features), x.target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    assert captured(criterion.criterion) == 1
    close(torch.stack(losses[5:]), torch.stack(losses[:5]))
    for left, right in zip(models[1].parameters(), models[0].parameters(), strict=True):
        close(left, right)


@pytest.mark.gpu
def test_no_replay_waits_for_the_host():
    device = torch.device("cuda")
    _, graphed = pair(device)
    for seed in range(2):
        run(graphed, batch(device, seed))
    x = batch(device, 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(graphed, x)
        run(graphed, x, progress=0.5)  # of another kind
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_inside_a_capture_and_a_compiled_step():
    """A step that is captured or compiled as a whole has no graphs inside."""
    device = torch.device("cuda")
    plain, graphed = pair(device)
    x = batch(device, 0)
    for _ in range(2):
        run(plain, x)
    run(graphed, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(graphed, x)
    graph.replay()
    assert captured(graphed) == 0
    same_state(graphed, plain)
    compiled = torch.compile(graphed, fullgraph=True)
    weight = x.weight.clone().requires_grad_()
    for _ in range(3):
        compiled(x.features, weight, x.target).backward()
        plain(x.features, weight, x.target)
    assert captured(graphed) == 0
    assert found[0].isfinite()
    same_state(graphed, plain)
