"""The cases of ``helpers``, simulated with several seeds."""

from __future__ import annotations

import pytest
from helpers.cases import all_cases, run_case

import asyncdist as ad

NAMES = list(all_cases())


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_simulated(name: str, ranks: int) -> None:
    for seed in range(2):
        report = ad.simulate(run_case, name, ranks=ranks, seed=seed, strict=True)
        assert report.results == (name,) * ranks
