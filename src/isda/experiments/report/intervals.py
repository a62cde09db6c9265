"""Error bars over seeds, and calibration.

The paper gives mean and standard deviation over three runs; with so few, several of its CIFAR-10
gains are within noise, so a comparison here always comes with a 95 % interval.
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
]

RESOLUTION = 1e-4
"""Points of error, kept as float32, below which two are the same: less than one of 50,000 images in
one of ten epochs."""


@dataclass(frozen=True)
class Estimate:
    """Mean and spread of a quantity over runs."""

    mean: float
    """Mean over the runs."""

    std: float | None
    """Sample standard deviation (n − 1); None for a single run."""

    count: int
    """Number of runs."""

    def format(self, digits: int = 2) -> str:
        """``30.18 ± 0.56``, or the mean alone for one run."""
        spread = "" if self.std is None else f" ± {self.std:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


@dataclass(frozen=True)
class Difference:
    """Mean of a method minus mean of its baseline; below zero the method has less of it."""

    mean: float
    """Difference of the means."""

    interval: tuple[float, float] | None
    """95 % Student-t interval of the difference; None where there are too few runs for one."""

    paired: bool
    """Whether mean and interval are those of seed-wise differences."""

    counts: tuple[int, int]
    """Number of runs of baseline and method that went into it."""

    without: tuple[int, ...] = ()
    """Seeds left out because one side lacks them."""

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out zero; one without width, of runs alike, says nothing."""
        low, high = self.interval or (0.0, 0.0)
        return high - low > RESOLUTION and (low > 0 or high < 0)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and sample standard deviation of one value per run.

    >>> estimate([1.0, 3.0]).format()
    '2.00 ± 1.41'
    """
    if not values:
        raise ValueError("values must hold at least one number, got none")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, math.sqrt(_variance(values)), len(values))


def difference(baseline: Mapping[int, float], method: Mapping[int, float]) -> Difference:
    """Difference of a method and its baseline, with its 95 % interval.

    Where one side has all the seeds of the other, the runs are paired, and further seeds are left
    out: a seed gives both the same initial weights and the same order of images. Otherwise all runs
    count, and the interval is Welch's.

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


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
