"""Tests the mean cosine of contributions, the limits of messages about them, and a report's conclusions about them."""

from __future__ import annotations

import math

import pytest

from asyncdist.protocols.async_diloco.messages import Arrived, MemberState
from asyncdist.protocols.exchange.fragment import mean_cosine
from asyncdist.protocols.exchange.messages import ATTEMPT_MAX, RoundState, Verdict


@pytest.mark.parametrize(
    ("weights", "norms", "norm", "cosine"),
    [
        ((1.0, 1.0), (3.0, 4.0), 2.5, 0.0),
        ((1.0, 3.0), (2.0, 2.0), 2.0, 1.0),
        ((1.0, 1.0), (1e200, 1e200), 1e200, 1.0),
        ((1.0, 1.0), (1e308, 1e308), 1e308, None),
        ((1.0, 1.0), (0.0, 0.0), 0.0, None),
        ((1.0, 1.0), (-1e300, 1e-300), 1.0, None),
        ((1.0, 1.0), (math.inf, 1.0), 1.0, None),
        ((1.0,), (2.0,), 2.0, None),
    ],
)
def test_cosine_of_any_norms(
    weights: tuple[float, ...], norms: tuple[float, ...], norm: float, cosine: float | None
) -> None:
    """Regression: norms beyond 1e154, as of a float64 model that diverges, raised OverflowError."""
    found = mean_cosine(Verdict(1, tuple(range(len(norms))), weights, norms), norm)
    assert found == cosine or (found is not None and cosine == pytest.approx(found, abs=1e-12))


def test_numbers_that_no_frame_can_carry_are_refused() -> None:
    with pytest.raises(ValueError, match="base_version must be from 0 to"):
        Arrived(2**32, 1, 1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="version must be from 0 to"):
        MemberState(2**53, (), -1, 0, ())
    with pytest.raises(ValueError, match="sequence must be > 0 if and only if"):
        MemberState(1, (), -1, 2**32, (Arrived(0, 1, 1.0, 1.0, 0.0),))
    with pytest.raises(ValueError, match="attempt from 0 to"):
        RoundState(1, ATTEMPT_MAX + 1, False, 1.0, 1.0)
    with pytest.raises(ValueError, match="attempt must be from 1 to"):
        Verdict(2**40, (0,), (1.0,), (1.0,))
