"""Runs the cases of ``helpers`` on local ranks."""

from __future__ import annotations

import pytest
from helpers.cases import all_cases, run_case
from support.seeds import in_ci

import asyncdist as ad

#: Of large models: not for the quick part.
SLOW = {"models.giving_up_in_the_middle_puts_the_weights_back", "models.large_models_are_summed_in_rank_order"}
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in all_cases()]


@pytest.mark.parametrize("ranks", in_ci([1, 2, 3, 4], 1, 2, 4))
@pytest.mark.parametrize("name", NAMES)
def test_local(name: str, ranks: int) -> None:
    assert ad.run_local(run_case, name, ranks=ranks, strict=True) == [name] * ranks
