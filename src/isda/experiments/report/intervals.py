"""Means, standard deviations and 95 % intervals over seeds.

The paper reports mean and standard deviation over three runs. With so few runs, several of its
CIFAR-10 gains are within noise, so every comparison here has a 95 % interval.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

__all__ = [
    "RESOLUTION",
    "Difference",
    "Estimate",
    "difference",
    "estimate",
    "interval_words",
    "seeds_needed",
    "signed",
]

RESOLUTION = 1e-4
"""Errors closer than this, in percentage points, count as equal: it is the rounding error of
float32, and less than one of 50,000 images in one of ten epochs."""


@dataclass(frozen=True)
class Estimate:
    """Mean and spread of a quantity over runs."""

    mean: float
    """Mean over the runs."""

    std: float | None
    """Sample standard deviation (n − 1); None for a single run."""

    count: int
    """Number of runs."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % Student-t interval of the mean; None for a single run."""
        if self.std is None:
            return None
        half = float(stdtrit(self.count - 1, 0.975)) * self.std / math.sqrt(self.count)
        return self.mean - half, self.mean + half

    def format(self, digits: int = 2) -> str:
        """``30.18 ± 0.56``, or the mean alone for one run."""
        spread = "" if self.std is None else f" ± {self.std:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


@dataclass(frozen=True)
class Difference:
    """Mean of a method minus mean of its baseline; negative if the method has the lower value."""

    mean: float
    """Difference of the means."""

    interval: tuple[float, float] | None
    """95 % Student-t interval of the difference; None if there are too few runs."""

    paired: bool
    """Whether mean and interval are computed from differences per seed."""

    counts: tuple[int, int]
    """Number of runs of baseline and method that were used."""

    without: tuple[int, ...] = ()
    """Seeds that were dropped because only one side has them."""

    @property
    def significant(self) -> bool:
        """Whether the interval excludes zero; an interval of zero width is not significant."""
        low, high = self.interval or (0.0, 0.0)
        return not self.constant and (low > 0 or high < 0)

    @property
    def constant(self) -> bool:
        """Whether all seeds have the same difference, so that the interval says nothing."""
        low, high = self.interval or (0.0, math.inf)
        return high - low <= RESOLUTION


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and sample standard deviation of one value per run.

    >>> estimate([1.0, 3.0]).format()
    '2.00 ± 1.41'
    """
    if not values:
        raise ValueError("values must have at least one number, got none")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, math.sqrt(_variance(values)), len(values))


def difference(baseline: Mapping[int, float], method: Mapping[int, float]) -> Difference:
    """Difference between a method and its baseline, with its 95 % interval.

    If one side has all the seeds of the other, the runs are paired by seed and the remaining seeds
    are dropped: both runs of a seed have the same initial weights and the same order of images.
    Otherwise all runs are used, and the interval is Welch's.

    Args:
        baseline: value by seed.
        method: value by seed.
    """
    shared = [seed for seed in baseline if seed in method]
    paired = len(shared) == min(len(baseline), len(method))
    without: tuple[int, ...] = ()
    if paired:
        without = tuple(sorted(baseline.keys() ^ method.keys()))
        baseline, method = ({seed: side[seed] for seed in shared} for side in (baseline, method))
    one, other = list(baseline.values()), list(method.values())
    mean = estimate(other).mean - estimate(one).mean
    counts = (len(one), len(other))
    if min(counts) < 2:
        return Difference(mean, None, paired, counts, without)
    if paired:
        freedom = len(one) - 1.0
        variance = _variance([method[seed] - baseline[seed] for seed in shared]) / len(one)
    else:
        parts = [_variance(one) / len(one), _variance(other) / len(other)]
        variance = sum(parts)
        spread = parts[0] ** 2 / (len(one) - 1) + parts[1] ** 2 / (len(other) - 1)
        freedom = variance**2 / spread if spread > 0 else 1.0
    half = float(stdtrit(freedom, 0.975)) * math.sqrt(variance)
    return Difference(mean, (mean - half, mean + half), paired, counts, without)


def seeds_needed(change: Difference) -> int | None:
    """Paired seeds with which an interval of the same spread excludes zero; None: more than 50."""
    number = change.counts[0]
    if change.interval is None or number < 2:
        return None
    half = (change.interval[1] - change.interval[0]) / 2
    spread = half * math.sqrt(number) / float(stdtrit(number - 1, 0.975))
    for count in range(number, 51):
        if float(stdtrit(count - 1, 0.975)) * spread / math.sqrt(count) < abs(change.mean):
            return count
    return None


def signed(change: Difference | float, digits: int = 2) -> str:
    """``−0.69 (−1.20 to −0.18)``, or the number alone without an interval or with an empty one."""
    if isinstance(change, float):
        return f"{change:+z.{digits}f}".replace("-", "−")
    if change.interval is None or change.constant:
        return signed(change.mean, digits)
    return f"{signed(change.mean, digits)} ({interval_words(change.interval, digits)})"


def interval_words(interval: tuple[float, float], digits: int = 2) -> str:
    """``−1.20 to −0.18``, with signs as in the difference; an end just below 0 is ``−0.00``."""
    return " to ".join(f"{end:+.{digits}f}".replace("-", "−") for end in interval)


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
