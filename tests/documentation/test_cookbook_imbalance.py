"""Cookbook entries for unbalanced classes against their formulas in float64."""

import torch
from cookbook_loops import EXACT, SINGLE, assert_same, bound, create_head, linear, load, twins
from reference import class_moments, draw
from torch import Tensor, nn
from torch.testing import assert_close

import isda


def test_margins_and_class_weights(device: torch.device) -> None:
    entry = load("long_tail")
    earlier, inputs = draw(40, 13, 5, seed=1), draw(7, 13, 5)
    count = torch.arange(3, 3 + 13 * 7, 7)
    ours, theirs = twins(
        inputs.features, inputs.weight, inputs.bias, device=device, dtype=torch.float32
    )

    weights, margins = [], []
    for n in count.tolist():
        weights.append((1 - 0.999) / (1 - 0.999**n))
        margins.append(0.4 * (min(count.tolist()) / n) ** 0.25)
    average = sum(weights) / len(weights)
    weights = [value / average for value in weights]
    assert_close(entry.balanced_weight(count, beta=0.999), torch.tensor(weights))
    everything = torch.cat([earlier.features.float(), theirs[0].detach()])
    _, _, matrices = class_moments(everything, torch.cat([earlier.target, inputs.target]), 13)
    total, share = torch.zeros((), dtype=torch.float64), 0.0
    for i, y in enumerate(inputs.target.tolist()):
        logits = linear(theirs[0][i], *theirs[1:])
        logits[y] = logits[y] - margins[y]
        total = total + weights[y] * bound(logits, theirs[1], y, matrices[y], 0.8 * 0.7)
        share += weights[y]

    criterion = isda.ISDALoss(
        5, 13, lambda_0=0.8, weight=entry.balanced_weight(count, beta=0.999)
    ).to(device)
    criterion.estimator.update(earlier.features.float().to(device), earlier.target.to(device))
    loss = entry.MarginLoss(criterion, entry.ldam_margin(count, 0.4).to(device)).to(device)
    head = create_head(ours[1], ours[2])
    attached = isda.attach(nn.Sequential(nn.Identity(), head), loss)
    target = inputs.target.to(device)
    value = attached(head(ours[0]), target, progress=0.7)
    assert_same(value, total / share, [ours[0], head.weight, head.bias], theirs, SINGLE)


def test_margins_are_for_training_only(device: torch.device) -> None:
    entry = load("long_tail")
    inputs = draw(7, 13, 5, dtype=torch.float32, device=device)
    criterion = isda.ISDALoss(5, 13).to(device)
    loss = entry.MarginLoss(criterion, torch.rand(13, device=device)).eval()
    logits = nn.functional.linear(inputs.features, inputs.weight)
    expected = nn.functional.cross_entropy(logits, inputs.target)
    assert_close(loss(inputs.features, inputs.weight, inputs.target, logits=logits), expected)
    assert_close(loss.evaluate(logits, inputs.target), expected)


def test_means_and_covariances_mixed_by_confusion(device: torch.device) -> None:
    inputs = draw(7, 13, 5)
    mean, confusion = torch.randn(13, 5).double(), torch.rand(13, 13).double()
    confusion[2] = torch.eye(13)[2]  # a class that is never confused
    ours, theirs = twins(
        inputs.features, inputs.weight, inputs.bias, device=device, dtype=torch.float64
    )

    total, share = torch.zeros((), dtype=torch.float64), 0.0
    weights = [1 + c / 13 for c in range(13)]
    for i, y in enumerate(inputs.target.tolist()):
        shift, matrix = -mean[y], torch.zeros(5, 5, dtype=torch.float64)
        for k in range(13):
            part = confusion[y, k] / sum(confusion[y].tolist())
            shift = shift + part * mean[k]
            matrix = matrix + part * inputs.covariance[k]
        logits = linear(theirs[0][i], *theirs[1:])
        for j in range(13):  # the common shift of all logits of a sample makes no difference
            logits[j] = logits[j] + 0.6 * (theirs[1][j] - theirs[1][y]) @ shift
        total = total + weights[y] * bound(logits, theirs[1], y, matrix, 0.9)
        share += weights[y]

    head = create_head(ours[1], ours[2])
    moments = isda.functional.Moments(torch.ones(13), mean, inputs.covariance)
    loss = load("risda").risda_loss(
        ours[0],
        head,
        inputs.target.to(device),
        isda.functional.Moments(*(value.to(device) for value in moments)),
        confusion.to(device),
        alpha=0.6,
        beta=0.9,
        class_weight=torch.tensor(weights, dtype=torch.float64, device=device),
    )
    assert_same(loss, total / share, [ours[0], head.weight, head.bias], theirs, EXACT)


def test_covariances_improved_by_a_meta_gradient(device: torch.device) -> None:
    strength, lr, meta_lr = 0.9, 0.5, 30.0
    batch, balanced = draw(7, 5, 4), draw(6, 5, 4, seed=1)
    body_weight, body_bias = torch.randn(4, 4).double() / 2, torch.randn(4).double()
    parameters = (body_weight, body_bias, batch.weight, batch.bias)
    ours, theirs = twins(*parameters, device=device, dtype=torch.float64)
    weights = [1.0, 2.0, 0.5, 1.5, 1.0]

    def forward(row: Tensor, values: list[Tensor]) -> list[Tensor]:
        hidden = torch.tanh(torch.stack(linear(row, values[0], values[1])))
        return linear(hidden, values[2], values[3])

    def augmented(matrices: Tensor, values: list[Tensor]) -> Tensor:
        total, share = torch.zeros((), dtype=torch.float64), 0.0
        for i, y in enumerate(batch.target.tolist()):
            logits = forward(batch.features[i], values)
            total = total + weights[y] * bound(logits, values[2], y, matrices[y], strength)
            share += weights[y]
        return total / share

    def balanced_loss(matrices: Tensor) -> Tensor:
        slopes = torch.autograd.grad(augmented(matrices, theirs), theirs, create_graph=True)
        values = [value - lr * slope for value, slope in zip(theirs, slopes, strict=True)]
        total = torch.zeros((), dtype=torch.float64)
        for i, y in enumerate(balanced.target.tolist()):
            logits = forward(balanced.features[i], values)
            total = total + torch.log(sum(torch.exp(z) for z in logits)) - logits[y]
        return total / len(balanced.target)

    matrices = batch.covariance.clone().requires_grad_()
    (slope,) = torch.autograd.grad(balanced_loss(matrices), matrices)
    direction, step = torch.randn_like(slope), 1e-6
    difference = balanced_loss(matrices + step * direction) - balanced_loss(
        matrices - step * direction
    )
    # central differences: rounding of 1e-16 divided by the step
    assert_close(difference / (2 * step), (slope * direction).sum(), rtol=1e-6, atol=1e-9)
    expected = augmented(matrices.detach() - meta_lr * slope, theirs)
    assert abs(expected - augmented(batch.covariance, theirs)) > 1e-3  # the test sees the step

    head, layer = create_head(ours[2], ours[3]), create_head(ours[0], ours[1])
    body = nn.Sequential(layer, nn.Tanh())
    loss = load("metasaug").metasaug_loss(
        nn.Sequential(body, head),
        head,
        body(batch.features.to(device)),
        batch.target.to(device),
        (balanced.features.to(device), balanced.target.to(device)),
        batch.covariance.to(device),
        strength=strength,
        lr=lr,
        meta_lr=meta_lr,
        class_weight=torch.tensor(weights, dtype=torch.float64, device=device),
    )
    leaves = [layer.weight, layer.bias, head.weight, head.bias]
    assert_same(loss, expected, leaves, theirs, EXACT)
