"""PAPA against its formula, and the laws that it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from simulation.simple_scenarios import Array, Plan, mean_of, run

from protocols.simple.population_averaging import PullToMean

#: Options of the simulated runs; the first ones are those of the exact runs.
OPTIONS: list[dict[str, Any]] = [{"average_every": 2, "pull": 0.25}, {"pull": 1}, {"average_every": 3, "pull": 0.01}]


def formula(options: Mapping[str, Any], donors: Sequence[Array], own: Array, number: int) -> Array:
    """Return own + pull * (mean - own)."""
    del number
    pull = options.get("pull", 0.01)
    return mean_of(donors) if pull == 1 else own + pull * (mean_of(donors) - own)


def test_a_pull_moves_towards_the_mean() -> None:
    own, mean = torch.tensor([1.0, -2.0]), torch.tensor([2.0, 2.0])
    assert PullToMean(pull=0.25).apply(own, mean, 1).tolist() == [1.25, -1.0]
    assert PullToMean(pull=1.0).apply(own, mean, 1).tolist() == [2.0, 2.0]
    assert own.tolist() == [1.0, -2.0] and mean.tolist() == [2.0, 2.0]


def test_a_pull_keeps_the_mean_of_the_ranks() -> None:
    """Exact, since all values are dyadic."""
    states = torch.arange(32.0, dtype=torch.float64).view(4, 8) ** 2
    pulled = [PullToMean(pull=0.5).apply(own, states.mean(0), 1) for own in states]
    assert torch.equal(torch.stack(pulled).mean(0), states.mean(0))


def test_runs_with_any_pull_have_the_same_mean() -> None:
    steps = (12,) * 4
    runs = [run(Plan(policy="PopulationAveragingPolicy", options=each, steps=steps))[1].weights for each in OPTIONS]
    first, *others = ([mean_of([weights[rank][-1][0] for rank in range(4)])] for weights in runs)
    for mean in others:
        np.testing.assert_allclose(mean, first, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pull", [0.0, 1.5, -0.5, float("nan"), "1"])
def test_a_pull_out_of_range_is_refused(pull: Any) -> None:
    with pytest.raises(ValueError, match=r"^pull must be a number above 0 and at most 1, got"):
        PullToMean(pull=pull)
