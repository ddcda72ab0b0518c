"""Tests SPARTA and WASH against their formulas, and the laws of the random share and of the permutations."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch
from simulation.simple_scenarios import Array, Plan, check, mean_of, run
from support.seeds import in_ci
from unit.test_simple_rules import GOLDEN, MASK, split_mix

import asyncdist as ad
from asyncdist.simulation import Kill, simulate
from protocols import SparseAveragingPolicy
from protocols.simple.sparse_averaging import RandomShare, bounds_of

#: Options of the simulated runs; the first are for exact runs.
OPTIONS: Final[list[dict[str, Any]]] = [
    {"fraction": 0.2},
    {"fraction": 1},
    {"average_every": 2, "fraction": 0.05, "seed": 7},
    {"operation": "shuffle", "fraction": 0.3},
    {"operation": "shuffle", "fraction": 1, "seed": 3, "average_every": 3},
]


def formula(options: Mapping[str, Any], donors: Sequence[Array], own: Array, number: int) -> Array:
    """Return the mean, or the value that this rank takes, at the chosen indices, and the own values elsewhere."""
    new, mean, seed = own.copy(), mean_of(donors), options.get("seed", 0)
    share = share_of(seed, number, len(own), options.get("fraction", 0.005))
    if options.get("operation") == "shuffle":
        place = next((place for place, donor in enumerate(donors) if donor is own), None)
        for index, source in zip(share, permutations_of(seed, number, len(share), len(donors)), strict=True):
            if place is not None:
                new[index] = donors[source[place]][index]
        return new
    for index in share:
        new[index] = mean[index]
    return new


def permutations_of(seed: int, number: int, count: int, donor_count: int) -> list[list[int]]:
    """Return a permutation of the donors for each value: the order of the random numbers of the round -number."""
    state = split_mix((seed * GOLDEN - number) & MASK)
    keys = [split_mix((state + GOLDEN * (place + 1)) & MASK) & (MASK >> 1) for place in range(count * donor_count)]
    rows = [keys[first : first + donor_count] for first in range(0, len(keys), donor_count)]
    return [sorted(range(donor_count), key=row.__getitem__) for row in rows]


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


@pytest.mark.parametrize(("count", "share"), [(10, 3), (7, 7), (12, 4), (10**10, 10**9), (5 * 10**9, 5 * 10**9)])
def test_ranges_divide_any_number_of_values(count: int, share: int) -> None:
    """Regression: with more than 2**63 as the product of both numbers, indices were negative."""
    places = torch.tensor([0, 1, share // 2, share - 1, share])
    assert bounds_of(places, count, share).tolist() == [int(each) * count // share for each in places]


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
    """Without the random shift, ranges of unequal lengths choose some of seven values twice as often as others."""
    rule, rounds = RandomShare(fraction=0.7), 7_000
    counts = torch.zeros(7)
    for number in range(rounds):
        counts[rule.chosen(number, 7)] += 1
    assert (counts - rounds * 5 / 7).abs().max() < 5 * math.sqrt(rounds * 5 / 7 * 2 / 7)


def test_only_the_share_is_sent() -> None:
    _, record = run(Plan(policy="SparseAveragingPolicy", options={"fraction": 0.2}, steps=(3,) * 4))
    count = sum(array.size for array in record.weights[0][0])
    assert {info.nbytes for info in record.infos[0]} == {int(count * 0.2 + 0.5) * 8}


SHUFFLE: Final[dict[str, Any]] = {"operation": "shuffle", "fraction": 0.3}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", in_ci([torch.float64, torch.float32], torch.float32), ids=str)
def test_fifty_shuffles_equal_the_formula_to_the_bit(dtype: torch.dtype) -> None:
    plan = Plan(policy="SparseAveragingPolicy", options=SHUFFLE, dtype=dtype, steps=(50,) * 4)
    assert check(plan, run(plan)[1], 0.0) == 50


def test_permutations_are_equally_frequent() -> None:
    rule, rounds, count = RandomShare(operation="shuffle"), 50, 120
    seen: Counter[tuple[int, ...]] = Counter()
    for number in range(1, rounds + 1):
        permuted = rule.permuted(number, count, 3)
        assert permuted is not None
        seen.update(map(tuple, permuted.tolist()))
    mean = rounds * count / 6
    assert len(seen) == 6 and all(abs(each - mean) < 5 * math.sqrt(mean) for each in seen.values()), seen


async def shuffled(world: ad.World, nan_rank: int, killed: int) -> tuple[list[Any], list[Any], tuple[int, ...]]:
    """Return a rank's parameters before and after one shuffle as bits, and the donors."""
    model = torch.nn.Linear(30, 20, bias=False, dtype=torch.bfloat16 if nan_rank == 2 else torch.float32)
    torch.nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(world.rank))
    with torch.no_grad():
        model.weight[:, 0] = -0.0 if world.rank % 2 else 0.0  # values that are equal but have different bits
        if world.rank == nan_rank:
            model.weight[3, 3] = math.nan
    if world.rank == killed:
        await asyncio.sleep(0.05)
    before = model.weight.detach().clone()
    policy = SparseAveragingPolicy(model, torch.optim.SGD(model.parameters()), operation="shuffle", fraction=0.9)
    async with policy:
        if world.rank == killed:
            await asyncio.sleep(10.0)
        donors = (await policy.step()).donors
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[model.weight.dtype]
    return before.view(bits).tolist(), model.weight.detach().view(bits).tolist(), donors


@pytest.mark.parametrize(("nan_rank", "killed"), [(-1, -1), (1, -1), (2, -1), (-1, 3), (0, 2)])
def test_a_shuffle_keeps_the_values_of_each_index_to_the_bit(nan_rank: int, killed: int) -> None:
    faults = [Kill(killed, at_s=1.0)] if killed >= 0 else []
    report = simulate(shuffled, nan_rank, killed, ranks=4, faults=faults, until_s=100.0)
    found = {rank: result for rank, result in enumerate(report.results) if rank != killed}
    left = tuple(sorted(found.keys() - {nan_rank}))
    assert {donors for *_, donors in found.values()} == {left}
    before, after = (np.array([found[rank][place] for rank in left]) for place in (0, 1))
    assert np.array_equal(np.sort(before, axis=0), np.sort(after, axis=0))
    assert 0.4 < (before != after).mean() < 0.9
    if nan_rank >= 0:
        assert found[nan_rank][0] == found[nan_rank][1], "a rank that does not contribute must keep its values"


def test_a_shuffle_receives_a_value_of_each_donor() -> None:
    """Each rank receives the share of all four ranks' values."""
    _, record = run(Plan(policy="SparseAveragingPolicy", options=SHUFFLE, steps=(3,) * 4))
    count = sum(array.size for array in record.weights[0][0])
    infos = record.infos[0]
    assert {info.nbytes for info in infos} == {4 * int(count * 0.3 + 0.5) * 8}
    assert {info.wire_nbytes for info in infos} == {int(count * 0.3 + 0.5) * 8}


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^operation must be one of 'mean', 'shuffle', got 'permute'$"):
        RandomShare(operation="permute")  # type: ignore[arg-type]


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
