"""Counter-based random numbers: statistical tests, and dependence on the key only."""

import math

import pytest
import torch
from torch import Tensor

from isda.experiments.data.counter_rng import (
    bits,
    fold,
    integers,
    key,
    normal,
    permutation,
    uniform,
)

NUMBER = 2**16
SIGMAS = 6.0  # a good generator exceeds 6 standard deviations once in 5e8 tests

# pairs of keys that differ as little as those of a training run
NEIGHBOURS = {
    "seeds": ((0,), (1,)),
    "steps": ((3, 2, 1000), (3, 2, 1001)),
    "purposes": ((3, 1, 5), (3, 2, 5)),
    "exchanged": ((1, 2), (2, 1)),
    "longer": ((7,), (7, 0)),
    "high bit": ((5,), (5 + 2**31,)),
}


def chi_square(cells: Tensor, number: int) -> float:
    """Standard deviations between Pearson's statistic and its mean; it has ``cells - 1`` degrees
    of freedom, of which mean k and variance 2k are known and near normal for k >= 255."""
    count = torch.bincount(cells.flatten(), minlength=number).double()
    assert len(count) == number
    expected = cells.numel() / number
    statistic = ((count - expected).square() / expected).sum().item()
    return (statistic - (number - 1)) / math.sqrt(2 * (number - 1))


def correlation(one: Tensor, other: Tensor) -> float:
    """In standard deviations: that of n unrelated pairs is 1 / √n."""
    pairs = torch.stack((one.flatten(), other.flatten())).double()
    return torch.corrcoef(pairs)[0, 1].item() * math.sqrt(one.numel())


@pytest.mark.parametrize("parts", [(0,), (1,), (2**31,), (0, 0, 0), (123, 2, 77)])
def test_uniform(parts: tuple[int, ...], device: torch.device) -> None:
    numbers = uniform((NUMBER,), key(*parts, device=device))
    assert numbers.dtype == torch.float32
    assert numbers.device.type == device.type
    assert 0 <= numbers.min() <= numbers.max() < 1
    numbers = numbers.cpu().double()
    # of n uniform numbers the mean has standard deviation 1/√(12 n), the mean square √(4/45 / n)
    assert abs(numbers.mean() - 1 / 2) < SIGMAS / math.sqrt(12 * NUMBER)
    assert abs(numbers.square().mean() - 1 / 3) < SIGMAS * math.sqrt(4 / 45 / NUMBER)
    # too uniform is also wrong: a plain counter fills all bins equally
    assert abs(chi_square((numbers * 256).long(), 256)) < SIGMAS
    pairs = (numbers * 16).long().view(-1, 2)
    assert abs(chi_square(pairs[:, 0] * 16 + pairs[:, 1], 256)) < SIGMAS
    for lag in (1, 2, 64, 1000):
        assert abs(correlation(numbers[lag:], numbers[:-lag])) < SIGMAS


def test_every_byte_of_the_bits(device: torch.device) -> None:
    words = bits((NUMBER,), key(4, 2, device=device)).cpu()
    assert words.dtype == torch.int64
    assert words.min() >= 0
    assert words.max() < 2**32
    for shift in (0, 8, 16, 24):
        assert abs(chi_square((words >> shift) & 255, 256)) < SIGMAS


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbouring_keys_are_unrelated(name: str, device: torch.device) -> None:
    keys = [key(*parts, device=device) for parts in NEIGHBOURS[name]]
    one, other = (uniform((NUMBER,), k).cpu() for k in keys)
    assert abs(correlation(one, other)) < SIGMAS
    assert abs(correlation(one[1:], other[:-1])) < SIGMAS
    assert abs(correlation(one, other.flip(0))) < SIGMAS
    # half of the bits differ, n · 32 fair coins
    differing = bits((NUMBER,), keys[0]) ^ bits((NUMBER,), keys[1])
    ones = sum(((differing >> bit) & 1).sum().item() for bit in range(32))
    assert abs(ones / (32 * NUMBER) - 1 / 2) < SIGMAS / (2 * math.sqrt(32 * NUMBER))


def test_keys_of_a_training_run_are_distinct() -> None:
    steps = torch.arange(20_000)
    seen = torch.cat([fold(key(seed, part), steps) for seed in range(3) for part in range(1, 4)])
    assert (seen >= 0).all()
    assert len(seen.unique()) == len(seen)  # of 2⁶³: a chance of 2e-9 to meet
    for word in (seen & 0xFFFFFFFF, seen >> 31):
        assert abs(chi_square((word >> 24) & 255, 256)) < SIGMAS
    # the first number under successive keys is as random as the numbers under one
    first = torch.stack([uniform((1,), k)[0] for k in seen[:4000]])
    assert abs(first.mean().item() - 1 / 2) < SIGMAS / math.sqrt(12 * 4000)
    assert abs(correlation(first[1:], first[:-1])) < SIGMAS


def test_a_slice_equals_that_of_the_whole(device: torch.device) -> None:
    k = key(1, 2, device=device)
    for draw in (bits, uniform, lambda *a, **o: integers(*a, high=7, **o)):
        whole = draw((11, 3, 5), k)
        for first, last in ((0, 11), (4, 9), (10, 11), (11, 11)):
            part = draw((last - first, 3, 5), k, start=first * 15)
            assert torch.equal(part, whole[first:last])


def test_the_same_key_gives_the_same_numbers(device: torch.device) -> None:
    k = key(1, 2, device=device)
    draws = {
        "bits": lambda k: bits((100,), k),
        "uniform": lambda k: uniform((100,), k),
        "integers": lambda k: integers((100,), k, high=10),
        "permutation": lambda k: permutation(100, k),
    }
    for name, draw in draws.items():
        first = draw(k)
        torch.rand(5, device=device)  # torch's generator is not used
        assert torch.equal(draw(k), first), name
        assert torch.equal(draw(key(1, 2, device=device)), first), name
        assert not torch.equal(draw(key(1, 3, device=device)), first), name
        assert torch.equal(draw(k.cpu()), first.cpu()), name


@pytest.mark.parametrize("length", [1, 2, 7, 1000])
def test_permutation(length: int, device: torch.device) -> None:
    order = permutation(length, key(5, device=device))
    assert order.sort().values.tolist() == list(range(length))


def test_permutations_are_equally_likely() -> None:
    orders = torch.stack([permutation(4, key(seed)) for seed in range(2400)])
    number = (orders * torch.tensor([64, 16, 4, 1])).sum(1)
    _, count = number.unique(return_counts=True)
    assert len(count) == 24
    statistic = ((count - 100).square() / 100).sum().item()
    assert statistic < 80  # 23 degrees of freedom: above 80 with probability 3e-8


def test_integers(device: torch.device) -> None:
    for high in (1, 2, 9, 25, 1000):
        numbers = integers((NUMBER,), key(6, high, device=device), high=high).cpu()
        assert numbers.dtype == torch.int64
        assert numbers.min() == 0
        assert numbers.max() == high - 1
    assert abs(chi_square(numbers, 1000)) < SIGMAS
    assert integers((3, 0), key(0, device=device), high=5).shape == (3, 0)


@pytest.mark.parametrize("part", [0, 1, 79, 2**31, 2**32 - 1])
def test_a_part_may_be_a_tensor(part: int, device: torch.device) -> None:
    k = key(3, device=device)
    folded = fold(k, part)
    assert torch.equal(folded, fold(k, torch.tensor(part, device=device)))
    assert torch.equal(folded, key(3, part, device=device))
    assert folded.dtype == torch.int64
    assert folded.shape == ()


def test_normal_numbers() -> None:
    drawn = normal((200, 500), key(3)).double()
    assert drawn.isfinite().all()
    assert abs(drawn.mean()) < 0.02
    assert abs(drawn.var() - 1) < 0.03
    assert abs((drawn**4).mean() - 3) < 0.15
    within = [float((drawn.abs() < limit).double().mean()) for limit in (1.0, 2.0)]
    assert within == pytest.approx([0.6827, 0.9545], abs=0.01)
