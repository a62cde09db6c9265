"""Test metrics against loops over samples, and top-5 error against every order of tied classes."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from isda.experiments.training.metrics import (
    classification_metrics,
    expected_calibration_error,
    top_k_error,
)


def coarse_logits(samples: int, classes: int) -> tuple[Tensor, Tensor]:
    """Logits with few distinct values, such as those of bfloat16: most samples have ties."""
    generator = torch.Generator().manual_seed(samples)
    logits = torch.randint(-2, 2, (samples, classes), generator=generator).float()
    return logits, torch.randint(classes, (samples,), generator=generator)


@pytest.mark.parametrize(("classes", "k"), [(6, 5), (6, 1), (7, 3), (4, 5), (3, 3)])
def test_ties_count_as_in_a_random_order(device, classes, k):
    """Mean over all orders of the classes, of which a stable sort keeps tied ones in place."""
    logits, target = coarse_logits(12, classes)
    errors = []
    for row, label in zip(logits.tolist(), target.tolist(), strict=True):
        for order in itertools.permutations(range(classes)):
            ranked = sorted(order, key=lambda c, row=row: -row[c])
            errors.append(label not in ranked[:k])
    result = top_k_error(logits.to(device), target.to(device), k)
    assert result.item() == pytest.approx(np.mean(errors), abs=1e-6)


def test_ties_do_not_favour_the_target(device):
    """A network that gives all classes the same logit is right by chance."""
    logits, target = torch.zeros(40, 10, device=device), torch.arange(40, device=device) % 10
    assert top_k_error(logits, target).item() == pytest.approx(0.5)


def test_top_5_without_ties_is_topk(device):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(77, 13, generator=generator)
    target = torch.randint(13, (77,), generator=generator)
    expected = (logits.topk(5).indices != target[:, None]).all(1).float().mean()
    assert top_k_error(logits.to(device), target.to(device)).item() == pytest.approx(expected)


def test_a_nan_is_not_correct(device):
    logits = torch.full((1, 9), float("nan"), device=device)
    assert top_k_error(logits, torch.zeros(1, dtype=torch.int64, device=device)) == 1


def test_all_metrics(device):
    logits, target = (tensor.to(device) for tensor in coarse_logits(33, 9))
    wrong = sum(int(row.argmax()) != int(y) for row, y in zip(logits, target, strict=True))
    expected = [
        100 * wrong / 33,
        F.cross_entropy(logits, target).item(),
        expected_calibration_error(logits.softmax(1), target).item(),
        100 * top_k_error(logits, target).item(),
    ]
    assert classification_metrics(logits, target).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_calibration_error_against_a_loop(device, bins):
    generator = torch.Generator().manual_seed(bins)
    probabilities = (2 * torch.randn(77, 13, generator=generator)).softmax(-1)
    target = torch.randint(13, (77,), generator=generator)
    probabilities[0] = 0.0
    probabilities[0, 2] = 1.0  # upper end of the last bin
    edges = np.linspace(0, 1, bins + 1)
    expected = 0.0
    for low, high in itertools.pairwise(edges):
        gaps = []
        for row, label in zip(probabilities.tolist(), target.tolist(), strict=True):
            if low < max(row) <= high:
                gaps.append((row.index(max(row)) == label) - max(row))
        expected += abs(sum(gaps)) / len(target)
    result = expected_calibration_error(probabilities.to(device), target.to(device), bins)
    assert result.item() == pytest.approx(expected, abs=1e-6)  # float32 sums


def test_calibration_bins_own_their_upper_end(device):
    """Confidence 0.5, right, is in (0, ½]; 0.6, wrong, is in (½, 1]: (0.5 + 0.6) / 2."""
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]], device=device)
    target = torch.tensor([0, 1], device=device)
    result = expected_calibration_error(probabilities, target, bins=2)
    assert result.item() == pytest.approx(0.55)


def test_calibration_error_shows_a_nan(device):
    probabilities = torch.tensor([[0.5, 0.5], [float("nan"), 0.5]], device=device)
    assert expected_calibration_error(probabilities, torch.zeros(2, device=device)).isnan()
