"""``isda.checks``: logits that do not match the features."""

import pytest
import torch
from torch.nn import functional as F

from isda import checks


@pytest.mark.parametrize("shape", [(2, 1000), (64, 3), (10, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_differ(shape, dtype, device):
    classes, width = shape
    generator = torch.Generator().manual_seed(0)
    inputs, weight, bias = (
        torch.randn(size, generator=generator) for size in ((2, width), (classes, width), classes)
    )
    bias *= width**0.5  # otherwise too small compared to rounding errors
    right, biased = F.linear(inputs, weight), F.linear(inputs, weight, bias)
    for offset, logits, expected in (
        (None, right[:1], False),
        (bias, biased[:1], False),
        (bias, right[:1], True),
        (None, right[1:], True),
        (None, 1.2 * right[:1], True),
        (None, right[:1] * torch.nan, False),
    ):
        given = [x if x is None else x.to(dtype) for x in (inputs[:1], weight, offset, logits)]
        there = [x if x is None else x.to(device) for x in given]
        assert checks.logits_differ(*there, thorough=True).item() == expected


def test_one_wrong_row_among_larger_ones(device):
    """Each row is compared relative to its own norm."""
    generator = torch.Generator().manual_seed(0)
    features, weight = (torch.randn(size, generator=generator) for size in ((9, 7), (13, 7)))
    features[3] /= 1000
    logits = features @ weight.T
    features, weight, logits = (x.to(device) for x in (features, weight, logits))
    assert not checks.logits_differ(features, weight, None, logits, thorough=True)
    logits[3] = -logits[3]
    assert checks.logits_differ(features, weight, None, logits, thorough=True)
