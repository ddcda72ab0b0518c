"""Tests moments that random runs rarely reach, but that the runs of ``certain_scenarios`` always reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import asyncdist as ad
from simulation import certain_scenarios as certain


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "scenario", [certain.repeated, certain.mirrored, certain.half_merged], ids=lambda scenario: scenario.__name__
)
def test_a_rare_moment_does_no_harm(scenario: Callable[[int], ad.SimReport], seed: int) -> None:
    scenario(seed)
