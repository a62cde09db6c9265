"""Cookbook entries for other heads and targets against their formulas in float64."""

import torch
from cookbook_loops import SINGLE, assert_same, bound, create_head, linear, load, twins
from reference import class_moments, draw
from torch import nn

import isda


def test_cosine_classifier(device: torch.device) -> None:
    inputs = draw(7, 13, 5)
    head = load("cosine").create_cosine_head(5, 13, scale=3.0).to(device)
    scale, raw = (
        head[1].parametrizations.weight[0].log_scale,
        (head[1].parametrizations.weight.original),
    )
    ours, theirs = twins(inputs.features, raw, scale, device=device, dtype=torch.float32)
    features, weight, log_scale = theirs
    directions = [row / (row @ row).sqrt() for row in weight]
    rows = torch.stack([log_scale.exp() * row for row in directions])
    units = [row / (row @ row).sqrt() for row in features]
    _, _, matrices = class_moments(torch.stack(units).detach(), inputs.target, 13)
    expected = torch.zeros((), dtype=torch.float64)
    for i, y in enumerate(inputs.target.tolist()):
        expected = expected + bound(linear(units[i], rows), rows, y, matrices[y], 4.0) / 7

    model = nn.Sequential(head)
    criterion = isda.attach(model, lambda_0=4.0, ramp="constant")
    loss = criterion(model(ours[0]), inputs.target.to(device))
    assert_same(loss, expected, [ours[0], raw, scale], theirs, SINGLE)


def test_variances_of_each_sample(device: torch.device) -> None:
    earlier, inputs = draw(40, 13, 5, seed=1), draw(7, 13, 5)
    estimator = load("sample_variance").SampleVariance(5, 13).to(device)
    criterion = isda.ISDALoss(
        5, 13, lambda_0=0.8, ramp="constant", covariance=estimator, synchronize=False
    ).to(device)
    with torch.no_grad():
        estimator.network.weight.normal_().div_(4)
        estimator.network.bias.normal_().div_(4)
    network = estimator.network
    ours, theirs = twins(
        inputs.features,
        inputs.weight,
        inputs.bias,
        network.weight,
        network.bias,
        device=device,
        dtype=torch.float32,
    )
    features, weight, bias, network_weight, network_bias = theirs
    everything = torch.cat([earlier.features.float(), features.detach()])
    _, _, matrices = class_moments(everything, torch.cat([earlier.target, inputs.target]), 13)
    expected = divergence = torch.zeros((), dtype=torch.float64)
    for i, y in enumerate(inputs.target.tolist()):
        ratio = linear(features[i].detach(), network_weight, network_bias)
        variances = [matrices[y, a, a] * torch.exp(ratio[a]) for a in range(5)]
        logits = linear(features[i], weight, bias)
        expected = expected + bound(logits, weight, y, torch.diag(torch.stack(variances)), 0.8) / 7
        for a in range(5):  # KL divergence of two normal distributions of mean 0
            share = variances[a] / matrices[y, a, a] if matrices[y, a, a] else torch.exp(ratio[a])
            divergence = divergence + 0.5 * (share - 1 - torch.log(share)) / 7

    estimator.update(earlier.features.float().to(device), earlier.target.to(device))
    head = create_head(ours[1], ours[2])
    loss = criterion(ours[0], head.weight, inputs.target.to(device), bias=head.bias)
    leaves = [ours[0], head.weight, head.bias, network.weight, network.bias]
    loss, expected = loss + 0.1 * estimator.divergence(), expected + 0.1 * divergence
    assert_same(loss, expected, leaves, theirs, SINGLE)


def test_segmentation_with_upsampled_logits(device: torch.device) -> None:
    (n, a, c), (h, w), (height, width) = (2, 5, 4), (3, 4), (7, 9)
    inputs = draw(n * h * w, c, a)
    ours, theirs = twins(
        inputs.features.view(n, h, w, a).movedim(-1, 1),
        inputs.weight[:, :, None, None],
        inputs.bias,
        device=device,
        dtype=torch.float32,
    )
    features, bias = theirs[0], theirs[2]
    weight = theirs[1][:, :, 0, 0]
    target = torch.randint(c, (n, height, width))
    target[0, 2:4] = 255  # ignored
    target[1, :, 5] = 255

    rows, labels = [], []
    for i in range(n):
        for y in range(h):
            for x in range(w):
                label = int(target[i, y * height // h, x * width // w])  # nearest neighbour
                if label != 255:
                    rows.append(features[i, :, y, x].detach())
                    labels.append(label)
    _, _, matrices = class_moments(torch.stack(rows), torch.tensor(labels), c)

    def source(position: int, size: int, full: int) -> tuple[int, int, float]:
        """Two neighbours and the share of the second, in bilinear interpolation."""
        place = max((position + 0.5) * size / full - 0.5, 0.0)
        return int(place), min(int(place) + 1, size - 1), place - int(place)

    losses = []
    for i in range(n):
        for y in range(height):
            for x in range(width):
                label = int(target[i, y, x])
                if label == 255:
                    continue
                top, bottom, down = source(y, h, height)
                left, right, along = source(x, w, width)
                feature = (1 - down) * (
                    (1 - along) * features[i, :, top, left] + along * features[i, :, top, right]
                ) + down * (
                    (1 - along) * features[i, :, bottom, left]
                    + along * features[i, :, bottom, right]
                )
                logits = linear(feature, weight, bias)
                losses.append(bound(logits, weight, label, matrices[label], 0.8))
    expected = torch.stack(losses).mean()

    head = nn.Conv2d(a, c, 1, device="meta")
    head.weight, head.bias = nn.Parameter(ours[1]), nn.Parameter(ours[2])
    estimator = isda.FullCovariance(a, c).to(device)
    loss = load("segmentation").segmentation_loss(
        estimator, head, ours[0], target.to(device), strength=0.8
    )
    assert_same(loss, expected, [ours[0], head.weight, head.bias], theirs, SINGLE)


def test_several_labels(device: torch.device) -> None:
    inputs = draw(7, 13, 5)
    target = (torch.rand(7, 13) < 0.3).float()
    target[3] = 0  # a sample without labels
    target[:, 4] = 0  # a label without samples
    ours, theirs = twins(
        inputs.features, inputs.weight, inputs.bias, device=device, dtype=torch.float32
    )
    features, weight, bias = theirs
    pairs = [(i, c) for i in range(7) for c in range(13) if target[i, c]]
    rows = torch.stack([features[i].detach() for i, _ in pairs])
    _, _, matrices = class_moments(rows, torch.tensor([c for _, c in pairs]), 13)
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(7):
        own = [c for c in range(13) if target[i, c]]
        for k, logit in enumerate(linear(features[i], weight, bias)):
            number = sum(float(target[n, k]) for n in range(7))
            quadratic = sum(weight[k] @ matrices[c] @ weight[k] / len(own) for c in own)
            if target[i, k]:
                part = (7 - number) / number * torch.log(1 + torch.exp(-logit + 0.4 * quadratic))
            else:
                part = torch.log(1 + torch.exp(logit + 0.4 * quadratic))
            expected = expected + part / (7 * 13)

    criterion = load("multi_label").create_multi_label_loss(
        5, target, lambda_0=0.8, ramp="constant"
    )
    head = create_head(ours[1], ours[2])
    loss = criterion.to(device)(ours[0], head.weight, target.to(device), bias=head.bias)
    assert_same(loss, expected, [ours[0], head.weight, head.bias], theirs, SINGLE)
