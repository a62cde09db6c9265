"""Disturbed labels: noise rate, uniformity, and random numbers by index, seed and step."""

from typing import Any

import torch
from baseline_losses import C, call, inputs

from isda.experiments.data import counter_rng
from isda.experiments.losses.baselines import DisturbLabelLoss, disturb_label


def test_ignored_labels_are_not_disturbed(device):
    target = torch.arange(200, device=device) % C
    target[::2] = -100
    key = counter_rng.key(0, device=device)
    found = disturb_label(target, key, num_classes=C, noise_rate=1.0)
    assert (found[::2] == -100).all()
    assert not torch.equal(found[1::2], target[1::2])


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
