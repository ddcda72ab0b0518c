"""Bounded summaries of long series, beside numpy on all values."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from asyncdist.report.series import LogHistogram


@pytest.mark.parametrize("span", [(0.45, 0.55), (1e-6, 3e-6), (1.0, 50.0)])
def test_quantiles_of_even_values_are_within_two_percent(span: tuple[float, float]) -> None:
    """Of a narrow series the median of one rank was a whole bin above that of the next."""
    rng, histogram = random.Random(3), LogHistogram()
    values = [rng.uniform(*span) for _ in range(5000)]
    for value in values:
        histogram.add(value)
    for fraction in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert histogram.quantile(fraction) == pytest.approx(np.quantile(values, fraction), rel=0.02)
    assert histogram.quantile(1.0) <= max(values)


def test_of_one_value_every_quantile_is_near_it_and_of_none_it_is_no_number() -> None:
    histogram = LogHistogram()
    assert math.isnan(histogram.quantile(0.5))
    histogram.add(3.0)
    assert [histogram.quantile(fraction) for fraction in (0.0, 0.5, 1.0)] == [3.0] * 3
