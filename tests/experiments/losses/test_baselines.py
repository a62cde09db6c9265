"""The losses of Table 4: naive loops, limits, ignored labels, errors, recipes."""

import copy
import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from baseline_losses import (
    CRITERIA,
    PROGRESS,
    A,
    C,
    N,
    call,
    center,
    close,
    criteria,
    inputs,
    probability,
)
from reference import Inputs
from torch import Tensor, nn
from torch.nn import functional as F

import isda
from isda.experiments.data import counter_rng
from isda.experiments.losses.baselines import (
    CenterLoss,
    CrossEntropyLoss,
    DisturbLabelLoss,
    FocalLoss,
    LabelSmoothingLoss,
    LargeMarginLoss,
    LqLoss,
    create_criterion,
    disturb_label,
    focal_loss,
    lq_loss,
)
from isda.experiments.recipes import get_recipe

# Naive loops: one sample at a time, in float64, from the papers' formulas


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
