"""``ISDALoss(cuda_graph=True)`` against the same loss without; on a CPU, from a tape."""

import copy
import gc
import pickle
import weakref

import pytest
import tape
import torch
from reference import Inputs, draw
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isda
from isda import ISDALoss, functional, graphs
from isda import loss as loss_module

N, C, A = 7, 13, 5
STRUCTURES = ["full", "diagonal", "shared", "identity"]


@pytest.fixture(autouse=True)
def _capturable(device, monkeypatch):
    """On a CPU: a tape for a capture, and a host that does not look at the batch."""
    if device.type == "cpu":
        monkeypatch.setattr(graphs, "_capture", tape.capture)
        monkeypatch.setattr(loss_module, "can_capture", lambda inputs: True)
        monkeypatch.setattr(loss_module, "problem_in", lambda index: 0)
        monkeypatch.setattr(functional, "at_hand", lambda tensor: False)


def pair(device: torch.device, **options) -> tuple[ISDALoss, ISDALoss]:
    """A criterion without graphs and one with."""
    options = {"lambda_0": 2.0, "total_steps": 10, "covariance": "diagonal", **options}
    plain = ISDALoss(A, C, **options).to(device)
    return plain, ISDALoss(A, C, **options, cuda_graph=True).to(device)


def batch(device: torch.device, seed: int, samples: int = N) -> Inputs:
    return draw(samples, C, A, seed=seed, dtype=torch.float32, device=device)


def run(criterion: ISDALoss, x: Inputs, target: Tensor | None = None, **options) -> list[Tensor]:
    """Loss, and gradients of a weighted sum for logits and weight."""
    weight = x.weight.clone().requires_grad_()
    logits = F.linear(x.features, x.weight, x.bias).requires_grad_()
    target = x.target if target is None else target
    loss = criterion(x.features, weight, target, logits=logits, **options)
    upstream = torch.arange(2.0, loss.numel() + 2, device=loss.device).view(loss.shape)
    return [loss, *torch.autograd.grad(loss, (logits, weight), upstream, allow_unused=True)]


def captured(criterion: ISDALoss) -> int:
    return len(criterion._graphs._captured)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def same_state(found: nn.Module, expected: nn.Module) -> None:
    for left, right in zip(found.buffers(), expected.buffers(), strict=True):
        close(left, right)


def same_results(found: list[Tensor], expected: list[Tensor]) -> None:
    for left, right in zip(found, expected, strict=True):
        close(left, right)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["index", "ignore", "soft"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_steps_are_those_of_the_plain_loss(structure, kind, reduction, device):
    if structure == "full" and device.type == "cpu":
        pytest.skip("asks the host, without kernels")
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
    same_results(found, expected)  # at the end: none was overwritten


@pytest.mark.parametrize("progress", ["number", "tensor"])
def test_progress_changes_from_call_to_call(progress, device):
    plain, graphed = pair(device, total_steps=None)
    for step in range(4):
        value = 0.2 * step
        x = batch(device, step)
        given = torch.tensor(value, device=device) if progress == "tensor" else value
        same_results(run(graphed, x, progress=given), run(plain, x, progress=value))
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
    same_results(run(graphed, batch(device, 4)), run(plain, batch(device, 4)))


def test_shapes(device):
    """As the last batch of an epoch, and more of them than there may be graphs."""
    plain, graphed = pair(device)
    for samples in [*range(1, 12), 7, 3, 7, 3, *range(1, 12)]:
        x = batch(device, samples, samples)
        same_results(run(graphed, x), run(plain, x))
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


def test_kinds_that_come_once_take_no_place(device):
    _, graphed = pair(device)
    for samples in [*range(1, 80), 7, 7, 7]:
        run(graphed, batch(device, 0, samples))
    assert captured(graphed) == 1


def test_dtypes_and_gradients_are_kinds(device):
    plain, graphed = pair(device)
    for seed in range(12):
        x = batch(device, seed)
        logits = F.linear(x.features, x.weight).to((torch.float32, torch.bfloat16)[seed % 2])
        weight = x.weight.clone().requires_grad_(seed % 3 > 0)
        losses = []
        for criterion in (plain, graphed):
            leaf, weight.grad = logits.clone().requires_grad_(), None
            loss = criterion(x.features, weight, x.target, logits=leaf)
            loss.backward()
            losses.append([loss, leaf.grad, *[weight.grad] * weight.requires_grad])
        for left, right in zip(*losses, strict=True):
            assert left.dtype == right.dtype
            close(right, left)
    assert captured(graphed) == 4


@pytest.mark.parametrize("change", ["option", "decay", "buffers"])
def test_changes_drop_the_graphs(change, device):
    plain, graphed = pair(device)
    for seed in range(6):
        x = batch(device, seed)
        same_results(run(graphed, x), run(plain, x))
        if seed == 2:
            assert captured(graphed) == 1
            for criterion in (plain, graphed):
                if change == "option":
                    criterion.lambda_0 = 0.5
                elif change == "decay":
                    criterion.estimator.decay = 0.5
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
    same_results(run(graphed, x), run(plain, x))
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


def test_not_captured(device, monkeypatch):
    x = batch(device, 0)
    weight = x.weight.clone().requires_grad_()
    plain, graphed = pair(device)
    for _ in range(3):
        run(plain, x)
        graphed(x.features, x.weight, x.target)  # needs no gradient
        with torch.no_grad():
            graphed(x.features, weight, x.target)
    graphed.eval()
    for _ in range(3):
        run(graphed, x)
    assert captured(plain) == captured(graphed) == 0
    graphed.train()
    assert graphed._is_capturable(x.features, weight)
    monkeypatch.setattr(graphed, "_world", lambda: 2)
    assert not graphed._is_capturable(x.features, weight)


class Halved(isda.DiagonalCovariance):
    """Of the user's own, with a state that no graph knows."""

    def update(self, features: Tensor, target: Tensor) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        super().update(features / 2**self.calls, target)


def test_estimators_of_ones_own_are_not_captured(device):
    plain, graphed = (
        ISDALoss(A, C, total_steps=9, covariance=Halved(A, C), cuda_graph=cuda_graph).to(device)
        for cuda_graph in (False, True)
    )
    for seed in range(4):
        same_results(run(graphed, batch(device, seed)), run(plain, batch(device, seed)))
    assert captured(graphed) == 0


def test_empty_batches(device):
    plain, graphed = pair(device)
    for criterion in (plain, graphed):
        for _ in range(3):
            run(criterion, batch(device, 0, 0))
    same_state(graphed, plain)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection(device):
    _, graphed = pair(device)
    with torch.autograd.set_detect_anomaly(True):
        for seed in range(3):
            run(graphed, batch(device, seed))
    assert captured(graphed) == 0


def test_a_failed_capture_leaves_no_mark(device, monkeypatch):
    plain, graphed = pair(device)
    x = batch(device, 0)
    for criterion in (plain, graphed):
        run(criterion, x)
    with monkeypatch.context() as patch:
        patch.setattr(graphed.estimator, "quadratic", lambda *_: 1 / 0)
        patch.setattr(graphed.estimator, "update_and_quadratic", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(graphed, x)
    graphed.check()
    same_results(run(graphed, x), run(plain, x))
    assert captured(graphed) == 1


def test_in_a_checkpoint(device):
    """Which counts the batch when it computes the loss again, with or without graphs."""
    plain, graphed = pair(device, ramp="constant", covariance="identity")
    for seed in range(3):
        x, grads = batch(device, seed), []
        for criterion in (plain, graphed):
            weight = x.weight.clone().requires_grad_()
            checkpoint(criterion, x.features, weight, x.target, use_reentrant=False).backward()
            grads.append(weight.grad)
        close(grads[1], grads[0])


def test_logits_are_freed(device):
    _, graphed = pair(device)
    x = batch(device, 0)
    weight = x.weight.clone().requires_grad_()
    for _ in range(3):
        logits = F.linear(x.features, weight)
        loss = graphed(x.features, weight, x.target, logits=logits)
        loss.backward()
    watched = weakref.ref(logits)
    del logits
    gc.collect()
    assert watched() is None


def test_attached(device):
    models = [nn.Sequential(nn.Linear(4, A), nn.ReLU(), nn.Linear(A, C)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    losses = []
    for model, cuda_graph in zip(models, (False, True), strict=True):
        model.to(device)
        options = {"lambda_0": 2.0, "total_steps": 9, "covariance": "diagonal"}
        criterion = isda.attach(model, **options, cuda_graph=cuda_graph)
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


@pytest.mark.parametrize("biased", [False, True])
def test_logits_of_another_batch(biased, device):
    """A graph looks at the logits of each batch, and leaves a wrong one out."""
    model = nn.Linear(A, C, bias=biased, device=device)
    if biased:
        nn.init.uniform_(model.bias, 1.0, 2.0)
    criterion = isda.attach(
        model, lambda_0=2.0, total_steps=9, covariance="diagonal", cuda_graph=True
    )
    for seed in range(3):
        x = batch(device, seed)
        assert criterion(model(x.features), x.target).isfinite()
    assert captured(criterion.criterion) == 1
    criterion.check()
    before = copy.deepcopy(criterion.criterion)
    logits = model(batch(device, 4).features)
    model(x.features)
    assert criterion(logits, x.target).isnan()
    with pytest.raises(ValueError, match="logits of another batch"):
        criterion.check()
    same_state(criterion.criterion.estimator, before.estimator)
    assert criterion.criterion.step == before.step == 3
    assert criterion(model(x.features), x.target).isfinite()
    criterion.check()
    assert captured(criterion.criterion) == 1
    if biased:
        with torch.no_grad():
            model.bias += 5  # which the graph is given as it is now
        assert criterion(model(x.features), x.target).isfinite()
        criterion.check()


def test_one_criterion_for_two_models(device):
    """Each has a flag of its own, which a graph holds."""
    criterion = pair(device)[1]
    models = [nn.Linear(A, C, device=device) for _ in range(2)]
    attached = [isda.attach(model, criterion) for model in models]
    for seed in range(3):
        x = batch(device, seed)
        for model, loss in zip(models, attached, strict=True):
            assert loss(model(x.features), x.target).isfinite()
    both = list(criterion._graphs._captured.values())
    assert len(both) == 2
    logits = models[1](x.features)
    models[1](x.features + 5)
    assert attached[1](logits, x.target).isnan()
    assert not attached[0].mismatch
    with pytest.raises(ValueError, match="logits of another batch"):
        attached[1].check()
    assert list(criterion._graphs._captured.values()) == both


def test_a_forward_put_in_its_place(device):
    criterion = pair(device)[1]
    model = nn.Linear(A, C, device=device)
    attached, forward = isda.attach(model, criterion), criterion.forward
    criterion.forward = lambda *args, bias, logits: forward(*args, bias=bias, logits=logits) / 2
    x = batch(device, 0)
    assert attached(model(x.features), x.target).isfinite()
    logits = model(x.features)
    model(x.features + 5)
    assert attached(logits, x.target).isnan()


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
