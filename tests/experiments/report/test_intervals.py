"""Means over seeds and confidence intervals of differences, against NumPy and SciPy."""

import numpy as np
import pytest
import scipy.stats

from isda.experiments.report.intervals import difference, estimate


def test_estimate_against_numpy():
    values = [30.9, 30.2, 31.4, 30.0]
    result = estimate(values)
    assert (result.mean, result.std) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert estimate([4.0]) == (type(result))(4.0, None, 1)
    assert estimate([4.0]).format() == "4.00"
    with pytest.raises(ValueError, match="at least one"):
        estimate([])


def test_paired_interval_against_scipy():
    one = {0: 30.9, 1: 30.7, 5: 31.0, 7: 30.2}
    other = {7: 29.9, 5: 30.1, 0: 30.2, 1: 30.6}  # a different order: pairs are matched by seed
    test = scipy.stats.ttest_rel([other[seed] for seed in one], list(one.values()))
    interval = test.confidence_interval(0.95)
    result = difference(one, other)
    assert result.paired
    assert result.interval == pytest.approx((interval.low, interval.high))
    assert result.mean == pytest.approx(np.mean(list(other.values())) - np.mean(list(one.values())))
    assert result.significant == (test.pvalue < 0.05)


@pytest.mark.parametrize("shift", [0.0, 1.5])
def test_welch_interval_against_scipy(shift):
    one, other = {0: 30.9, 1: 30.7, 2: 31.3}, {0: 30.2, 1: 30.9, 3: 30.4, 4: 29.7}
    other = {seed: value - shift for seed, value in other.items()}
    test = scipy.stats.ttest_ind(list(other.values()), list(one.values()), equal_var=False)
    interval = test.confidence_interval(0.95)
    result = difference(one, other)
    assert not result.paired
    assert result.counts == (3, 4)
    assert result.interval == pytest.approx((interval.low, interval.high))
    assert result.significant == (test.pvalue < 0.05)


def test_single_seeds_have_no_interval():
    assert difference({0: 3.0}, {0: 2.0}).interval is None
    assert difference({0: 3.0}, {0: 2.0, 1: 1.0}).interval is None
    assert not difference({0: 3.0}, {0: 2.0}).significant
    assert difference({0: 3.0, 1: 3.0}, {4: 2.0, 5: 2.0}).interval == (-1.0, -1.0)
