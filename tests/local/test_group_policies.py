"""Tests that policies on agent groups average within their own group, on every transport."""

from __future__ import annotations

import pytest
from scripts import group_policies
from support.seeds import seeds

import asyncdist as ad


def test_local() -> None:
    group_policies.check(ad.run_local(group_policies.main, ranks=group_policies.RANKS, strict=True))


@pytest.mark.parametrize("seed", seeds(10))
def test_simulated(seed: int) -> None:
    group_policies.check(ad.simulate(group_policies.main, ranks=group_policies.RANKS, seed=seed, strict=True).results)
