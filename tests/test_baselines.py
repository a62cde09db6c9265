"""The losses of Table 4: naive loops, limits, state, random numbers, ranks, compile and capture."""

import copy
import dataclasses
import doctest
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from forks import START_METHOD
from reference import Inputs, draw
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import isda
from isda.experiments.data import counter_rng
from isda.experiments.losses import baselines
from isda.experiments.losses.baselines import (
    CenterLoss,
    CrossEntropyLoss,
    DisturbLabelLoss,
    FocalLoss,
    LabelSmoothingLoss,
    LargeMarginLoss,
    LqLoss,
    center_loss,
    center_update,
    create_criterion,
    disturb_label,
    focal_loss,
    lq_loss,
)
from isda.experiments.losses.large_margin import (
    annealed_beta,
    large_margin_cosine,
    large_margin_logits,
)
from isda.experiments.recipes import get_recipe

N, C, A = 7, 13, 5
PROGRESS = 0.4

CRITERIA: dict[str, Callable[[], nn.Module]] = {
    "ce": CrossEntropyLoss,
    "focal": lambda: FocalLoss(alpha=0.7, gamma=1.5),
    "lq": LqLoss,
    "label_smoothing": lambda: LabelSmoothingLoss(smoothing=0.3),
    "disturb_label": lambda: DisturbLabelLoss(C, noise_rate=0.5, seed=3),
    "center": lambda: center(0.7),
    "large_margin": lambda: LargeMarginLoss(margin=3, beta_start=5.0),
}
criteria = pytest.mark.parametrize("name", CRITERIA)


def center(center_weight: float, **options) -> CenterLoss:
    """A center loss with arbitrary centers, as after some training."""
    criterion = CenterLoss(A, C, center_weight=center_weight, **options)
    with torch.no_grad():
        criterion.centers.copy_(draw(N, C, A, seed=9, dtype=torch.float32).weight)
    return criterion


def inputs(device: torch.device, *, dtype: torch.dtype = torch.float64, samples: int = N) -> Inputs:
    x = draw(samples, C, A, dtype=dtype, device=device)
    return Inputs(x.features.requires_grad_(), x.weight.requires_grad_(), x.bias, *x[3:])


def call(criterion: nn.Module, x: Inputs, **options) -> Tensor:
    options = {"bias": x.bias, "progress": PROGRESS, **options}
    return criterion(x.features, x.weight, x.target, **options)


def close(found: Any, expected: Any, *, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_device=False)


# Naive loops: one sample at a time, in float64, from the papers' formulas


def probability(logits: Tensor, y: int) -> Tensor:
    scores = [torch.exp(logit) for logit in logits]
    return scores[y] / sum(scores)


def reference(criterion: nn.Module, x: Inputs) -> Tensor:
    """Naive loss of a batch with the options of a criterion."""
    losses = []
    target = x.target
    if isinstance(criterion, DisturbLabelLoss):
        key = counter_rng.key(criterion.seed, 0xD1, int(criterion.step), device=target.device)
        target = disturb_label(target, key, num_classes=C, noise_rate=criterion.noise_rate)
    for i in range(len(x.target)):
        a, y = x.features[i], int(target[i])
        logits = torch.stack([x.weight[j] @ a + x.bias[j] for j in range(C)])
        if isinstance(criterion, LargeMarginLoss):
            logits = margin_logits(logits, a, x.weight[y], x.bias[y], y, criterion)
        p = probability(logits, y)
        loss = -torch.log(p)
        if isinstance(criterion, FocalLoss):
            loss = -criterion.alpha * (1 - p) ** criterion.gamma * torch.log(p)
        elif isinstance(criterion, LqLoss):
            loss = (1 - p**criterion.q) / criterion.q
        elif isinstance(criterion, LabelSmoothingLoss):
            share = criterion.smoothing / C
            loss = (1 - criterion.smoothing) * loss
            loss = loss - share * sum(torch.log(probability(logits, j)) for j in range(C))
        elif isinstance(criterion, CenterLoss):
            apart = a - criterion.centers[y]
            loss = loss + criterion.center_weight / 2 * apart @ apart
        losses.append(loss)
    return torch.stack(losses).mean()


def margin_logits(logits, a, w, b, y, criterion: LargeMarginLoss) -> Tensor:
    size = torch.sqrt((a @ a) * (w @ w))
    theta = torch.acos((a @ w) / size)
    m = criterion.margin
    k = math.floor(float(theta.detach()) * m / math.pi)
    psi = (-1) ** k * torch.cos(m * theta) - 2 * k
    beta = max(criterion.beta_min, criterion.beta_start / (1 + 0.3 * PROGRESS) ** 45)
    own = (beta * size * torch.cos(theta) + size * psi) / (1 + beta) + b
    return torch.stack([own if j == y else logits[j] for j in range(len(logits))])


@criteria
def test_value_and_gradients_against_a_naive_loop(name, device):
    criterion, x = CRITERIA[name]().to(device), inputs(device)
    expected = reference(criterion, x)
    gradients = torch.autograd.grad(expected, [x.features, x.weight])
    loss = call(criterion, x)
    close(loss, expected)
    close(torch.autograd.grad(loss, [x.features, x.weight]), gradients)


@criteria
def test_gradcheck(name, device):
    criterion, x = CRITERIA[name]().double().to(device), inputs(device)
    before = copy.deepcopy(criterion.state_dict())

    def loss(*tensors: Tensor) -> Tensor:
        criterion.load_state_dict(before)
        return call(criterion, Inputs(*tensors, x.target, x.covariance))

    assert torch.autograd.gradcheck(loss, (x.features, x.weight, x.bias.requires_grad_()))


@criteria
def test_given_logits_and_scaled_loss(name, device):
    x = inputs(device)
    expected, criterion = CRITERIA[name]().to(device), CRITERIA[name]().to(device)
    tensors = [x.features, x.weight]
    gradients = torch.autograd.grad(call(expected, x), tensors)
    logits = F.linear(x.features, x.weight, x.bias)
    loss = call(criterion, x, logits=logits, progress=torch.tensor(PROGRESS, device=device))
    tensors = [x.features, x.weight]
    # a progress on the device is float32
    doubled = [2 * gradient for gradient in gradients]
    close(list(torch.autograd.grad(2 * loss, tensors)), doubled, tolerance=1e-6)


@criteria
def test_evaluation_is_cross_entropy(name, device):
    criterion, x = CRITERIA[name]().to(device).eval(), inputs(device)
    before = {key: value.clone() for key, value in criterion.state_dict().items()}
    logits = F.linear(x.features, x.weight, x.bias)
    close(call(criterion, x, progress=None), F.cross_entropy(logits, x.target))
    assert all(torch.equal(before[key], value) for key, value in criterion.state_dict().items())


@criteria
def test_empty_batch(name, device):
    criterion, x = CRITERIA[name]().to(device), inputs(device, samples=0)
    loss = call(criterion, x)
    loss.backward()
    assert loss == 0
    for tensor in (x.features, x.weight):
        assert tensor.grad.isfinite().all()


@criteria
@pytest.mark.parametrize("samples", [1, 33])
def test_other_batch_sizes(name, samples, device):
    criterion, x = CRITERIA[name]().to(device), inputs(device, samples=samples)
    expected = reference(criterion, x)
    close(call(criterion, x), expected)


@criteria
@pytest.mark.parametrize("ignored", [[0, 2, 3, 6], [*range(N)]], ids=["some", "all"])
def test_ignored_labels_are_left_out(name, ignored, device):
    """Loss and gradients are those of the other samples; without any, they are 0."""
    criterion, x = CRITERIA[name]().double().to(device), inputs(device)
    kept = torch.tensor([i for i in range(N) if i not in ignored], dtype=torch.int64, device=device)
    target = x.target.clone()
    target[ignored] = -100
    loss = call(criterion, x._replace(target=target))
    found = torch.autograd.grad(loss, [x.features, x.weight])
    if name == "disturb_label":  # the index of a sample decides its random numbers
        key = counter_rng.key(criterion.seed, 0xD1, 0, device=device)
        drawn = disturb_label(x.target, key, num_classes=C, noise_rate=criterion.noise_rate)
        others, x = CrossEntropyLoss(), x._replace(target=drawn)
    else:
        others = CRITERIA[name]().double().to(device)
    part = x._replace(features=x.features[kept], target=x.target[kept])
    expected = call(others, part)
    close(loss, expected)
    tensors = [x.features, x.weight]
    close(found, torch.autograd.grad(expected, tensors))
    assert (found[0][ignored] == 0).all()


@criteria
def test_ignored_labels_in_evaluation(name, device):
    criterion, x = CRITERIA[name]().to(device).eval(), inputs(device)
    target = x.target.clone()
    target[::2] = -100
    expected = F.cross_entropy(F.linear(x.features, x.weight, x.bias), target)
    close(call(criterion, x._replace(target=target)), expected)


def test_ignored_labels_are_not_disturbed(device):
    target = torch.arange(200, device=device) % C
    target[::2] = -100
    key = counter_rng.key(0, device=device)
    found = disturb_label(target, key, num_classes=C, noise_rate=1.0)
    assert (found[::2] == -100).all()
    assert not torch.equal(found[1::2], target[1::2])


@criteria
def test_low_precision_inputs(name, device):
    """Features and logits of an autocast network: the loss is float32."""
    x = inputs(device, dtype=torch.float32)
    half = x.features.bfloat16()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = F.linear(half, x.weight, x.bias)
        loss = call(CRITERIA[name]().to(device), x._replace(features=half), logits=logits)
    assert loss.dtype == torch.float32
    # 2⁻⁸ for each rounding to bfloat16, of logits around 10
    close(loss, call(CRITERIA[name]().to(device), x), tolerance=0.05)


# Limits


@pytest.mark.parametrize(
    "criterion",
    [
        FocalLoss(alpha=1.0, gamma=0.0),
        LqLoss(q=1e-9),
        LabelSmoothingLoss(smoothing=0.0),
        DisturbLabelLoss(C, noise_rate=0.0),
        center(0.0),
        LargeMarginLoss(margin=1),
        LargeMarginLoss(margin=4, beta_start=1e12, beta_min=1e12),
    ],
    ids=["focal", "lq", "label_smoothing", "disturb_label", "center", "margin", "beta"],
)
def test_limit_is_cross_entropy(criterion, device):
    x, criterion = inputs(device), criterion.to(device)
    logits = F.linear(x.features, x.weight, x.bias)
    # q = 1e-9 and β = 1e12 are close to the limit
    close(call(criterion, x), F.cross_entropy(logits, x.target), tolerance=1e-7)


def test_lq_at_one_is_the_missing_probability(device):
    x = inputs(device)
    logits = F.linear(x.features, x.weight, x.bias)
    expected = [1 - probability(row, int(y)) for row, y in zip(logits, x.target, strict=True)]
    close(lq_loss(logits, x.target, q=1.0), torch.stack(expected))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_focal_and_lq_at_the_extremes_of_probability(gamma, device):
    """Float32 probabilities of 1 and 0 give finite losses and gradients."""
    logits = torch.tensor([[200.0, 0.0], [0.0, 200.0]], device=device)
    logits.requires_grad_()
    target = torch.zeros(2, dtype=torch.int64, device=device)
    for losses in (
        focal_loss(logits, target, alpha=0.5, gamma=gamma),
        lq_loss(logits, target, q=0.4),
    ):
        assert losses.isfinite().all()
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        assert gradient.isfinite().all()


# Large margin


@pytest.mark.parametrize("margin", [1, 2, 3, 4])
def test_large_margin_against_metric_learning(margin, device):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    x = inputs(device)
    package = losses.LargeMarginSoftmaxLoss(num_classes=C, embedding_size=A, margin=margin, scale=1)
    package.W.data = x.weight.detach().T.clone()
    package.to(device)
    expected = package(x.features, x.target)
    criterion = LargeMarginLoss(margin=margin, beta_start=0.0)
    loss = call(criterion, x, bias=None, progress=None)
    close(loss, expected)
    found = torch.autograd.grad(loss, [x.features, x.weight])
    (features_grad, weight_grad) = torch.autograd.grad(expected, [x.features, package.W])
    close(found, (features_grad, weight_grad.T))


@pytest.mark.parametrize("margin", [1, 2, 3, 4, 5])
def test_large_margin_cosine_at_every_angle(margin):
    theta = torch.linspace(0, math.pi, 997, dtype=torch.float64)
    k = (theta * margin / math.pi).floor().clamp(max=margin - 1)
    expected = (-1) ** k * torch.cos(margin * theta) - 2 * k
    found = large_margin_cosine(theta.cos(), margin=margin)
    close(found, expected)
    assert (found.diff() < 0).all()  # ψ decreases monotonically from 1
    close(found[[0, -1]], torch.tensor([1.0, 1.0 - 2 * margin], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_margin_gradient_at_the_ends(dtype, device):
    """Features parallel, antiparallel and orthogonal to a row, and zero features."""
    weight = torch.tensor([[3.0, 4.0], [0.3, 0.1]], dtype=dtype, device=device).requires_grad_()
    features = torch.tensor([[6.0, 8.0], [-6.0, -8.0], [-8.0, 6.0], [0.0, 0.0]], dtype=dtype)
    features = features.to(device).requires_grad_()
    target = torch.zeros(4, dtype=torch.int64, device=device)
    logits = large_margin_logits(features, weight, target, features @ weight.T, margin=4)
    expected = torch.tensor([50.0, -350.0, -150.0, 0.0], dtype=dtype)  # |w| |a| = 50
    close(logits[:, 0].detach().cpu(), expected, tolerance=1e-6)
    for gradient in torch.autograd.grad(F.cross_entropy(logits, target), [features, weight]):
        assert gradient.isfinite().all()


def test_beta_falls_as_in_the_original(device):
    """The original: base · (1 + gamma · iteration)^−power with 1000, 1e-5, 45 and 30,000 steps."""
    for iteration in (0, 1, 15_000, 30_000):
        expected = 1000 * (1 + 1e-5 * iteration) ** -45
        progress = iteration / 30_000
        assert annealed_beta(progress) == pytest.approx(expected)
        found = annealed_beta(torch.tensor(progress, device=device))
        assert float(found) == pytest.approx(expected, rel=1e-4)  # float32 to the power of 45
        for each in (progress, torch.tensor(progress, device=device)):
            floored = annealed_beta(each, beta_min=2.0)
            assert float(floored) == pytest.approx(max(expected, 2.0), rel=1e-4)


# Center loss


@pytest.mark.parametrize("center_weight", [0.0, 0.003, 2.0])
@pytest.mark.parametrize("samples", [7, 60])
def test_centers_move_as_in_the_original(center_weight, samples, device):
    """c_j moves by α Σ (a_i − c_j) / (1 + n_j), whatever the weight of the term."""
    criterion, x = center(center_weight).double().to(device), inputs(device, samples=samples)
    x.target[-1] = -100  # ignored
    before = criterion.centers.clone()
    expected = before.clone()
    for j in range(C):
        total, count = torch.zeros(A, dtype=torch.float64, device=device), 0
        for a, y in zip(x.features.detach(), x.target, strict=True):
            if y == j:
                total, count = total + before[j] - a, count + 1
        expected[j] -= 0.5 * total / (1 + count)
    update = center_update(x.features.detach(), before, x.target)
    call(criterion, x)
    close(criterion.centers, expected)
    close(before - 0.5 * update, expected)
    assert torch.equal(criterion.centers[2], before[2])  # the absent class


def test_centers_reach_the_class_means(device):
    """With N = 128 and C = 100, an epoch of CIFAR (390 steps) is enough."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(100, A, generator=generator)
    criterion = CenterLoss(A, 100).to(device)
    for _ in range(390):
        target = torch.randint(100, (128,), generator=generator)
        features = means[target].to(device)
        criterion(features, torch.zeros(100, A, device=device), target.to(device))
    # a step with one sample covers a quarter of the distance: (3/4)^390 remains
    close(criterion.centers.cpu(), means, tolerance=1e-6)


# Disturbed labels


def test_noise_rate_and_uniformity(device):
    samples, rate, classes = 200_000, 0.3, 7
    target = torch.full((samples,), 2, dtype=torch.int64, device=device)
    key = counter_rng.key(5, device=device)
    found = disturb_label(target, key, num_classes=classes, noise_rate=rate)
    count = torch.bincount(found, minlength=classes).double().cpu() / samples
    expected = torch.full((classes,), rate / classes, dtype=torch.float64)
    expected[2] += 1 - rate
    deviation = (expected * (1 - expected) / samples).sqrt()
    assert ((count - expected).abs() < 4.5 * deviation).all()  # all seven pass in 99.99 %


def test_random_numbers_differ_between_steps_and_samples(device):
    """Which labels are disturbed is independent between steps and between neighbours."""
    samples, rate, classes = 100_000, 0.5, 1000
    target = torch.full((samples,), 1000, dtype=torch.int64, device=device)  # never drawn
    masks, labels = [], []
    for step in range(2):
        key = counter_rng.key(0, step, device=device)
        drawn = disturb_label(target, key, num_classes=classes, noise_rate=rate)
        masks.append((drawn < 1000).double().cpu())
        labels.append(drawn.double().cpu())
    both = masks[0] * masks[1]
    neighbours = masks[0][1:] * masks[0][:-1]
    deviation = (0.25 * 0.75 / samples) ** 0.5
    assert abs(float(both.mean()) - 0.25) < 4 * deviation
    assert abs(float(neighbours.mean()) - 0.25) < 6 * deviation  # neighbouring products overlap
    pairs = torch.stack([labels[0][both > 0], labels[1][both > 0]])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 4 / both.sum() ** 0.5


def test_index_decides_the_random_numbers(device):
    target = torch.arange(20, device=device) % C
    key = counter_rng.key(1, device=device)
    options: dict[str, Any] = {"num_classes": C, "noise_rate": 0.5}
    whole = disturb_label(target, key, **options)
    assert not torch.equal(whole, target)
    for start in (8, torch.tensor(8, device=device)):
        assert torch.equal(disturb_label(target[8:], key, start=start, **options), whole[8:])


def test_loss_depends_on_seed_and_step(device):
    x = inputs(device, samples=33)

    def losses(seed: int, step: int = 0) -> list[float]:
        criterion = DisturbLabelLoss(C, noise_rate=0.5, seed=seed).to(device)
        criterion.step.fill_(step)
        return [float(call(criterion, x).detach()) for _ in range(3)]

    assert losses(0) == losses(0)
    assert len({*losses(0), *losses(1)}) == 6
    assert losses(0, step=2)[0] == losses(0)[2]


# State


@pytest.mark.parametrize("name", ["disturb_label", "center"])
def test_state_round_trip(name, device):
    """A checkpoint in the middle: the rest of the training is the same, bit for bit."""
    x = inputs(device, samples=33)

    def train(criterion: nn.Module, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(float(call(criterion, x).detach()))
        return losses

    whole = train(CRITERIA[name]().to(device), 5)
    first, file = CRITERIA[name]().to(device), io.BytesIO()
    train(first, 3)
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed = CRITERIA[name]()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    tolerance = 0 if device.type == "cpu" else 1e-6  # a GPU adds in any order
    assert train(resumed.to(device), 2) == pytest.approx(whole[3:], rel=tolerance, abs=0)


def test_losses_without_state():
    for name in ("ce", "focal", "lq", "large_margin"):
        assert not CRITERIA[name]().state_dict()
    assert list(CRITERIA["disturb_label"]().state_dict()) == ["step"]


# Users' models


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, A), nn.Tanh(), nn.Linear(A, C))


@criteria
def test_attached_to_a_model(name, device):
    model, criterion = make_model().to(device), CRITERIA[name]().to(device)
    x, target = torch.randn(N, 4, device=device), torch.arange(N, device=device)
    features = model[:2](x)
    other = CRITERIA[name]().to(device)
    expected = other(features, model[2].weight, target, bias=model[2].bias, progress=PROGRESS)
    expected_grad = torch.autograd.grad(expected, model.parameters())
    attached = isda.attach(model, criterion)
    loss = attached(model(x), target, progress=PROGRESS)
    close(loss, expected, tolerance=1e-6)
    close(torch.autograd.grad(loss, model.parameters()), expected_grad, tolerance=1e-6)
    model.eval()
    with pytest.warns(UserWarning, match="in eval mode"):
        loss = attached(model(x), target)
    close(loss, F.cross_entropy(model(x), target), tolerance=1e-6)


@pytest.mark.parametrize("criterion", [FocalLoss(alpha=1.0, gamma=0.0), center(0.0)])
def test_attached_to_a_model_with_ignored_labels(criterion, device):
    """In their limits the losses equal torch's cross entropy, also with ignored labels."""
    model, x = make_model().to(device), torch.randn(8, 4, device=device)
    target = torch.tensor([3, -100, -100, 1, 0, -100, 2, -100], device=device)
    attached = isda.attach(model, criterion.to(device))
    expected = F.cross_entropy(model(x), target)
    gradients = torch.autograd.grad(expected, model.parameters())
    loss = attached(model(x), target)
    close(loss, expected, tolerance=1e-6)
    close(torch.autograd.grad(loss, model.parameters()), gradients, tolerance=1e-6)


def test_code_of_the_page_runs():
    page = Path(__file__).parents[1] / "docs" / "baselines.md"
    model = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 100))
    names: dict[str, Any] = {"torch": torch, "model": model}
    names |= {"x": torch.randn(N, 4), "y": torch.arange(N)}
    parts = re.findall("```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(parts) == 1
    exec(parts[0], names)
    close(
        names["loss"].detach(),
        focal_loss(model(names["x"]), names["y"], alpha=0.5, gamma=1.0).mean().detach(),
        tolerance=1e-6,
    )


def test_docstrings_run():
    assert doctest.testmod(baselines, extraglobs={"isda": isda}).failed == 0


def test_center_term_reaches_the_features(device):
    model = make_model().to(device)
    x, target = torch.randn(N, 4, device=device), torch.arange(N, device=device)
    gradients = []
    for weight in (0.0, 1.0):
        attached = isda.attach(model, center(weight).to(device))
        loss = attached(model(x), target)
        gradients.append(torch.autograd.grad(loss, model.parameters()))
        attached.remove()
    term = center_loss(model[:2](x), center(1.0).to(device).centers, target).mean()
    expected = torch.autograd.grad(term, [model[0].weight, model[0].bias])
    found = [with_term - without for without, with_term in zip(*gradients, strict=True)]
    close(found[:2], list(expected), tolerance=1e-5)
    assert all(gradient.abs().max() > 1e-3 for gradient in found[:2])
    close(found[2:], [torch.zeros_like(gradient) for gradient in found[2:]], tolerance=1e-6)


@criteria
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_compiled(name, backend, device):
    """The second backend recomputes cheap operations in the backward pass, like inductor."""
    torch._dynamo.reset()
    criterion, eager = CRITERIA[name]().to(device), CRITERIA[name]().to(device)
    x = inputs(device, dtype=torch.float32)
    progress = torch.tensor(PROGRESS, device=device)
    step = torch.compile(
        lambda x: call(criterion, x, progress=progress), fullgraph=True, backend=backend
    )
    for _ in range(2):
        results = []
        for loss in (step(x), call(eager, x, progress=progress)):
            gradients = torch.autograd.grad(loss, [x.features, x.weight])
            results.append([loss.detach(), *gradients])
        close(*results, tolerance=1e-6)
    close(criterion.state_dict(), eager.state_dict())


@pytest.mark.gpu
@criteria
def test_captured_in_a_graph(name):
    """Forward and backward pass replay in a CUDA graph and update the state."""
    device = torch.device("cuda")
    criterion, eager = CRITERIA[name]().to(device), CRITERIA[name]().to(device)
    x = inputs(device, dtype=torch.float32)
    progress = torch.tensor(PROGRESS, device=device)

    def step(module: nn.Module) -> list[Tensor]:
        loss = call(module, x, progress=progress)
        tensors = [x.features, x.weight]
        return [loss.detach(), *torch.autograd.grad(loss, tensors)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for module in (criterion, eager):
            for _ in range(2):
                step(module)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(criterion)
    for _ in range(2):
        graph.replay()
        close(found, step(eager), tolerance=1e-5)
    close(criterion.state_dict(), eager.state_dict())


# Several ranks

SPLITS = {"even": (4, 4), "uneven": (1, 6), "empty": (0, 5), "nothing": (0, 0), "ignored": (3, 5)}
COLLECTIVE = ["disturb_label", "center"]  # need more from other ranks than the number of samples


def train(model: nn.Module, name: str, parts: tuple[int, ...], rank: int | None) -> dict[str, Any]:
    """Two steps on a rank's part of the batches, or on all of them."""
    criterion = CRITERIA[name]()
    attached = isda.attach(model, criterion)
    record: dict[str, Any] = {"losses": [], "gradients": []}
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(sum(parts), 4, generator=generator)
        target = torch.randint(C, (sum(parts),), generator=generator)
        if parts == SPLITS["ignored"]:
            target[torch.tensor([0, 2, 4])] = -100  # two of three, one of five
        if rank is not None:
            x, target = x.split(parts)[rank], target.split(parts)[rank]
        model.zero_grad()
        loss = attached(model(x), target, progress=PROGRESS)
        loss.backward()
        record["losses"].append(loss.detach())
        record["gradients"].append([p.grad.clone() for p in model.parameters()])
    record["state"] = criterion.state_dict()
    attached.remove()
    return record


def compiled(name: str, rank: int) -> Tensor:
    criterion, x = CRITERIA[name](), inputs(torch.device("cpu"), samples=8)
    part = [tensor.detach().chunk(2)[rank] for tensor in (x.features, x.target)]
    step = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    return step(part[0], x.weight.detach(), part[1], bias=x.bias, progress=PROGRESS).detach()


def work(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    results: dict[Any, Any] = {}
    for name in CRITERIA:
        for split, parts in SPLITS.items():
            results[name, split] = train(DistributedDataParallel(make_model()), name, parts, rank)
    for name in COLLECTIVE:
        results[name, "compiled"] = compiled(name, rank)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(work, args=(str(folder),), nprocs=2, start_method=START_METHOD)
    return [torch.load(Path(folder, f"rank{rank}.pt")) for rank in range(2)]


@pytest.mark.ddp
@criteria
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_equal_one_process(ranks, name, split):
    """Mean loss, averaged gradients, state and disturbed labels are the same."""
    expected = train(make_model(), name, SPLITS[split], None)
    found = [record[name, split] for record in ranks]
    losses = torch.stack([torch.stack(record["losses"]) for record in found])
    # float32 sums in a different order
    close(losses.mean(0), torch.stack(expected["losses"]), tolerance=1e-5)
    for record in found:
        close(record["gradients"], expected["gradients"], tolerance=1e-5)
        close(record["state"], expected["state"], tolerance=1e-5)
        assert all(
            torch.equal(record["state"][key], found[0]["state"][key]) for key in record["state"]
        )


@pytest.mark.ddp
@pytest.mark.parametrize("name", COLLECTIVE)
def test_compiled_on_two_ranks(ranks, name):
    expected = call(CRITERIA[name](), inputs(torch.device("cpu"), samples=8))
    close(torch.stack([record[name, "compiled"] for record in ranks]).mean(), expected.detach())


# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FocalLoss(alpha=0.0), "alpha must be > 0 and finite, got 0.0"),
        (lambda: FocalLoss(gamma=-1.0), "gamma must be >= 0 and finite, got -1.0"),
        (lambda: LqLoss(q=0.0), "q must be in (0, 1], got 0.0"),
        (lambda: LqLoss(q=1.5), "q must be in (0, 1], got 1.5"),
        (lambda: FocalLoss(alpha="x"), "alpha must be > 0 and finite, got x"),
        (lambda: FocalLoss(gamma=None), "gamma must be >= 0 and finite, got None"),
        (lambda: LqLoss(q="0.4"), "q must be in (0, 1], got 0.4"),
        (lambda: LabelSmoothingLoss(smoothing=1.0), "smoothing must be >= 0 and < 1, got 1.0"),
        (lambda: DisturbLabelLoss(0), "num_classes must be an integer >= 1, got 0"),
        (lambda: DisturbLabelLoss(5.5), "num_classes must be an integer >= 1, got 5.5"),
        (lambda: DisturbLabelLoss(3, noise_rate=[]), "noise_rate must be in [0, 1], got []"),
        (lambda: DisturbLabelLoss(3, noise_rate=1.1), "noise_rate must be in [0, 1], got 1.1"),
        (lambda: CenterLoss(0, 3), "num_features must be an integer >= 1, got 0"),
        (lambda: CenterLoss(3, 0), "num_classes must be an integer >= 1, got 0"),
        (lambda: CenterLoss("3", 1), "num_features must be an integer >= 1, got 3"),
        (lambda: center("x"), "center_weight must be >= 0 and finite, got x"),
        (lambda: center(-1.0), "center_weight must be >= 0 and finite, got -1.0"),
        (lambda: center(1.0, learning_rate=0.0), "learning_rate must be in (0, 1], got 0.0"),
        (lambda: LargeMarginLoss(margin=0), "margin must be an integer >= 1, got 0"),
        (lambda: LargeMarginLoss(margin=2.5), "margin must be an integer >= 1, got 2.5"),
        (lambda: LargeMarginLoss(margin=True), "margin must be an integer >= 1, got True"),
        (lambda: LargeMarginLoss(beta_min="x"), "beta_min must be >= 0 and finite, got x"),
        (lambda: LargeMarginLoss(beta_start=-1), "beta_start must be >= 0 and finite, got -1"),
        (lambda: LargeMarginLoss(beta_min=math.nan), "beta_min must be >= 0 and finite, got nan"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


@criteria
def test_bad_arguments(name, device):
    criterion, x = CRITERIA[name]().to(device), inputs(device)
    before = {key: value.clone() for key, value in criterion.state_dict().items()}
    cases: list[tuple[Inputs, dict[str, Any], str]] = [
        (x._replace(weight=x.weight[:, :4]), {}, "features and weight must be of shapes"),
        (x._replace(features=x.features[0]), {}, "features and weight must be of shapes"),
        (x._replace(target=x.target[:3]), {}, r"target must be int64 .* of shape \(7,\), got"),
        (x._replace(target=x.target.double()), {}, "target must be int64 .* got torch.float64"),
        (x, {"logits": x.features}, r"logits must be of shape \(7, 13\), got \(7, 5\)"),
        (x, {"progress": 1.5}, r"progress must be in \[0, 1\], got 1.5"),
    ]
    for bad, options, message in cases:
        with pytest.raises(ValueError, match=message):
            call(criterion, bad, **options)
    assert all(torch.equal(before[key], value) for key, value in criterion.state_dict().items())


def test_arguments_that_do_not_fit_the_options(device):
    x = inputs(device)
    with pytest.raises(ValueError, match=r"logits must be of shape \(N, 3\), got \(7, 13\)"):
        call(DisturbLabelLoss(3).to(device), x)
    with pytest.raises(ValueError, match=r"weight must be of shape \(3, 5\), got \(13, 5\)"):
        call(CenterLoss(A, 3).to(device), x)
    with pytest.raises(ValueError, match="progress must be given in training"):
        call(LargeMarginLoss(), x, progress=None)


# Recipes


def test_create_criterion():
    for name, kind in {"ce": CrossEntropyLoss, "isda": isda.ISDALoss}.items():
        recipe = get_recipe(f"digits-resnet8-{name}")
        assert type(create_criterion(recipe, num_features=A, num_classes=C)) is kind


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("large_margin", LargeMarginLoss()),
        ("disturb_label", DisturbLabelLoss(C, noise_rate=0.1, seed=4)),
        ("focal", FocalLoss(alpha=0.5, gamma=1.0)),
        ("center", CenterLoss(A, C, learning_rate=0.5)),
        ("lq", LqLoss(q=0.4)),
        ("label_smoothing", LabelSmoothingLoss(smoothing=0.1)),
    ],
)
def test_create_criterion_of_table_4(method, expected):
    plain = get_recipe("cifar100-resnet110-ce")
    noise_rate = 0.1 if method == "disturb_label" else 0.0
    recipe = dataclasses.replace(plain, method=method, noise_rate=noise_rate)
    criterion = create_criterion(recipe, num_features=A, num_classes=C, seed=4)
    assert type(criterion) is type(expected)
    assert repr(criterion) == repr(expected)
    shapes = [{k: v.shape for k, v in each.state_dict().items()} for each in (criterion, expected)]
    assert shapes[0] == shapes[1]
