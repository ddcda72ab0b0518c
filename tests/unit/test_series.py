"""Tests bounded summaries of long series against numpy on all values."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from asyncdist.report.series import LogHistogram, TimeBins


@pytest.mark.parametrize("span", [(0.45, 0.55), (1e-6, 3e-6), (1.0, 50.0)])
def test_quantiles_of_even_values_are_within_two_percent(span: tuple[float, float]) -> None:
    """Regression: with a narrow series, the medians of two ranks differed by a whole bin."""
    rng, histogram = random.Random(3), LogHistogram()
    values = [rng.uniform(*span) for _ in range(5000)]
    for value in values:
        histogram.add(value)
    for fraction in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert histogram.quantile(fraction) == pytest.approx(np.quantile(values, fraction), rel=0.02)
    assert histogram.quantile(1.0) <= max(values)


def test_quantiles_of_one_value_are_near_it_and_of_none_are_nan() -> None:
    histogram = LogHistogram()
    assert math.isnan(histogram.quantile(0.5))
    histogram.add(3.0)
    assert [histogram.quantile(fraction) for fraction in (0.0, 0.5, 1.0)] == [3.0] * 3


@pytest.mark.parametrize("start_s", [0.0, 29.0, 3600.0])
def test_late_values_are_told_apart_like_values_at_once(start_s: float) -> None:
    """Regression: a job that imported for half a minute and trained for a second used 13 of 200 columns."""
    bins = TimeBins()
    for place in range(1000):
        bins.add(start_s + place * 1e-3, float(place))
    assert bins.first_s == start_s
    means = bins.means(start_s, start_s + 1.0, 100)
    assert np.abs(means - (np.arange(100) * 10 + 4.5)).max() < 4.0
    assert np.isnan(bins.means(start_s - 1.0, start_s + 1.0, 100)[:50]).all()
