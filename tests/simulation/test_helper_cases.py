"""Runs the cases of ``helpers`` in simulations with several seeds."""

from __future__ import annotations

import pytest
from helpers.cases import all_cases, run_case
from support.seeds import in_ci

import asyncdist as ad

#: Cases with large models, which the quick tests leave out.
SLOW = {
    "models.giving_up_in_the_middle_puts_the_weights_back",
    "models.large_models_are_summed_in_rank_order",
    "soups.the_choice_is_that_of_a_second_implementation",
    "soups.wrong_calls_leave_every_model_alone",
}
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in all_cases()]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 5])
@pytest.mark.parametrize("seed", in_ci(range(2), 0))
@pytest.mark.parametrize("name", NAMES)
def test_simulated(name: str, seed: int, ranks: int) -> None:
    report = ad.simulate(run_case, name, ranks=ranks, seed=seed, strict=True)
    assert report.results == (name,) * ranks
