"""SPARTA against its formula, and the probabilities of its random share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
import torch
from simulation.simple_scenarios import Array, Plan, mean_of, run
from unit.test_simple_rules import GOLDEN, MASK, split_mix

import asyncdist as ad
from protocols import SparseAveragingPolicy
from protocols.simple.sparse_averaging import RandomShare

#: Options of the simulated runs; the first ones are those of the exact runs.
OPTIONS: Final[list[dict[str, Any]]] = [
    {"fraction": 0.2},
    {"fraction": 1},
    {"average_every": 2, "fraction": 0.05, "seed": 7},
]


def formula(options: Mapping[str, Any], donors: Sequence[Array], own: Array, number: int) -> Array:
    """Return the mean at the chosen indices, and the rank's own values elsewhere."""
    new, mean = own.copy(), mean_of(donors)
    for index in share_of(options.get("seed", 0), number, len(own), options.get("fraction", 0.005)):
        new[index] = mean[index]
    return new


def share_of(seed: int, number: int, count: int, fraction: float) -> list[int]:
    """Return one index of each of n ranges, turned by the last random number."""
    state = split_mix((seed * GOLDEN + number) & MASK)
    share = max(1, int(count * fraction + 0.5))
    numbers = [split_mix((state + GOLDEN * (place + 1)) & MASK) & (MASK >> 1) for place in range(share + 1)]
    found = []
    for place in range(share):
        first, end = place * count // share, (place + 1) * count // share
        found.append((first + numbers[place] % (end - first) + numbers[share]) % count)
    return sorted(found)


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
@pytest.mark.parametrize("fraction", [1e-6, 0.005, 0.3, 0.75, 1.0])
def test_a_share_has_a_fixed_size_and_ascending_indices(count: int, fraction: float) -> None:
    rule = RandomShare(fraction=fraction)
    for number in range(1, 40):
        chosen = rule.chosen(number, count).tolist()
        assert chosen == sorted(set(chosen)) and chosen[0] >= 0 and chosen[-1] < count
        assert len(chosen) == max(1, int(count * fraction + 0.5))


def test_a_share_of_nothing_is_empty() -> None:
    assert RandomShare().chosen(1, 0).tolist() == []


def test_shares_differ_by_round_and_by_seed() -> None:
    shares = {tuple(RandomShare(seed=seed).chosen(number, 10**6).tolist()) for seed in (0, 1) for number in (1, 2)}
    assert len(shares) == 4


def test_rounds_cover_the_values_as_independent_draws_do() -> None:
    """After n rounds, a share 1 - (1 - p)^n of all values has been averaged."""
    rule, count, rounds, p = RandomShare(fraction=0.05), 20_000, 40, 0.05
    covered = torch.zeros(count, dtype=torch.bool)
    for number in range(1, rounds + 1):
        covered[rule.chosen(number, count)] = True
    expected = 1 - (1 - p) ** rounds
    deviation = math.sqrt(expected * (1 - expected) / count)
    assert abs(covered.double().mean().item() - expected) < 5 * deviation


def test_every_value_is_chosen_equally_often() -> None:
    """Without the turn, ranges of unequal lengths choose some of seven values twice as often as others."""
    rule, rounds = RandomShare(fraction=0.7), 7_000
    counts = torch.zeros(7)
    for number in range(rounds):
        counts[rule.chosen(number, 7)] += 1
    assert (counts - rounds * 5 / 7).abs().max() < 5 * math.sqrt(rounds * 5 / 7 * 2 / 7)


def test_only_the_share_is_sent() -> None:
    _, record = run(Plan(policy="SparseAveragingPolicy", options={"fraction": 0.2}, steps=(3,) * 4))
    count = sum(array.size for array in record.weights[0][0])
    assert {info.nbytes for info in record.infos[0]} == {int(count * 0.2 + 0.5) * 8}


@pytest.mark.parametrize("fraction", [0.0, 1.5, -0.5])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"^fraction must be a number above 0 and at most 1, got"):
        RandomShare(fraction=fraction)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^seed must be an integer >= 0, got -1$"):
        RandomShare(seed=-1)


def test_a_rank_with_nan_outside_its_share_does_not_contribute() -> None:
    """Regression: the model's first entry was not checked, since the drawn share counted as this entry."""

    async def main(world: ad.World) -> tuple[int, ...]:
        model = torch.nn.Linear(40, 40)
        torch.nn.init.constant_(model.weight, 1.0)
        if world.rank == 1:
            assert 0 not in RandomShare().chosen(1, 1640)
            torch.nn.init.constant_(model.weight[0, :1], math.nan)
        async with SparseAveragingPolicy(model, torch.optim.SGD(model.parameters())) as policy:
            return (await policy.step()).donors

    assert ad.run_local(main, ranks=3) == [(0, 2)] * 3
