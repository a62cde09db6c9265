"""Cookbook entries for samples without labels or of new classes, against their formulas."""

import torch
from cookbook_loops import (
    SINGLE,
    assert_same,
    bound,
    create_head,
    largest,
    linear,
    load,
    softmax,
    twins,
)
from reference import class_moments, draw

import isda


def test_consistency_of_unlabelled_samples(device: torch.device) -> None:
    inputs, other = draw(7, 13, 5), draw(6, 13, 5, seed=1)
    ours, theirs = twins(
        inputs.features,
        inputs.weight / 2,
        inputs.bias,
        other.features,
        device=device,
        dtype=torch.float32,
    )
    features, weight, bias, unlabelled = theirs
    earlier = draw(40, 13, 5, seed=2)
    everything = torch.cat([earlier.features.float(), features.detach()])
    _, _, matrices = class_moments(everything, torch.cat([earlier.target, inputs.target]), 13)
    expected = torch.zeros((), dtype=torch.float64)
    for i, y in enumerate(inputs.target.tolist()):
        logits = linear(features[i], weight, bias)
        expected = expected + bound(logits, weight, y, matrices[y], 0.8 * 0.7) / 7
    for i in range(6):
        logits = linear(unlabelled[i], weight, bias)
        probabilities = softmax(logits)
        matrix = matrices[largest(probabilities)]
        for k in range(13):
            part = bound(logits, weight, k, matrix, 0.8 * 0.7)
            expected = expected + 0.3 * probabilities[k] * part / 6

    criterion = isda.ISDALoss(5, 13, lambda_0=0.8).to(device)
    criterion.estimator.update(earlier.features.float().to(device), earlier.target.to(device))
    head = create_head(ours[1], ours[2])
    loss = load("semi_supervised").semi_supervised_loss(
        criterion,
        head,
        ours[0],
        inputs.target.to(device),
        ours[3],
        progress=0.7,
        consistency=0.3,
    )
    assert_same(loss, expected, [ours[0], head.weight, head.bias, ours[3]], theirs, SINGLE)
    assert int(criterion.estimator.count.sum()) == 47  # without the unlabelled ones
    assert int(criterion.step) == 1


def test_adaptation_without_the_source_data(device: torch.device) -> None:
    source, inputs = draw(40, 13, 5, seed=1), draw(7, 13, 5)
    ours, theirs = twins(
        inputs.features, inputs.weight / 2, inputs.bias, device=device, dtype=torch.float32
    )
    features, weight, bias = theirs
    _, _, matrices = class_moments(source.features.float(), source.target, 13)
    rows = [linear(features[i], weight, bias) for i in range(7)]
    probabilities = [softmax(row) for row in rows]
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(7):
        cosines = []
        for n in range(7):
            scale = features[i].norm() * features[n].norm()
            cosines.append(((features[i] @ features[n] / scale).item(), n))
        nearest = [n for _, n in sorted(cosines, reverse=True) if n != i][:2]
        matrix = matrices[largest(probabilities[i])]
        for k in range(13):
            share = sum(probabilities[n][k] for n in nearest) / 2
            expected = expected + share * bound(rows[i], weight, k, matrix, 0.8) / 7

    estimator = isda.FullCovariance(5, 13)
    criterion = isda.ISDALoss(
        5, 13, lambda_0=0.8, covariance=estimator, ramp="constant", frozen=True
    ).to(device)
    estimator.update(source.features.float().to(device), source.target.to(device))
    before = [value.clone() for value in estimator.moments]
    head = create_head(ours[1], ours[2])
    loss = load("source_free").adaptation_loss(criterion, head, ours[0], neighbours=2)
    assert_same(loss, expected, [ours[0], head.weight, head.bias], theirs, SINGLE)
    for value, old in zip(estimator.moments, before, strict=True):
        assert torch.equal(value, old)


def test_replay_of_class_means(device: torch.device) -> None:
    entry = load("incremental")
    old, new = draw(40, 8, 5, seed=1), draw(7, 13, 5)
    estimator = isda.FullCovariance(5, 8)
    criterion = isda.ISDALoss(
        5, 8, lambda_0=0.8, covariance=estimator, ramp="constant", frozen=True
    ).to(device)
    estimator.update(old.features.float().to(device), old.target.to(device))
    criterion.grow(13)
    head = entry.grow_head(create_head(old.weight.float(), old.bias.float()).to(device), 13)
    assert torch.equal(head.weight[:8].cpu(), old.weight.float())
    assert torch.equal(head.bias[:8].cpu(), old.bias.float())

    ours, theirs = twins(new.features, head.weight, head.bias, device=device, dtype=torch.float32)
    features, weight, bias = theirs
    _, means, matrices = class_moments(old.features.float(), old.target, 8)
    old_features = (new.features + 0.5).float()
    expected, distance = torch.zeros((), dtype=torch.float64), 0.0
    for i, y in enumerate(new.target.tolist()):
        nothing = torch.zeros(5, 5, dtype=torch.float64)
        logits = linear(features[i], weight, bias)
        expected = expected + bound(logits, weight, y, nothing, 0.0) / 7
        for a in range(5):
            distance = distance + (features[i, a] - old_features[i, a].double()) ** 2
    old_target = torch.tensor([7, 2, 2, 5])
    for c in old_target.tolist():
        logits = linear(means[c], weight, bias)
        expected = expected + 0.4 * bound(logits, weight, c, matrices[c], 0.8) / 4
    expected = expected + 0.2 * distance.sqrt()

    head = create_head(ours[1], ours[2])
    loss = entry.il2a_loss(
        criterion,
        head,
        ours[0],
        old_features.to(device),
        new.target.to(device),
        old_target.to(device),
        estimator.moments.mean.float(),
        gamma=0.4,
        eta=0.2,
    )
    assert_same(loss, expected, [ours[0], head.weight, head.bias], theirs, SINGLE)
    assert int(estimator.count.sum()) == 40
