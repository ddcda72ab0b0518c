"""Tests rules whose ranks average with some partners only: the waiting ranks, the averages, and losses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.seeds import seeds
from torch import nn

import asyncdist as ad
from asyncdist.protocols.exchange.ledger import Decide, Instruction, Ledger, TakeCensus
from asyncdist.simulation import Fault, Kill, Restart, Stall, simulate
from protocols import StepInfo
from protocols.simple.policy import SimplePolicy
from protocols.simple.rule import Rule

Seen = tuple[int, list[tuple[StepInfo, float, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRank(Rule):
    """A rule under which each rank averages with the next rank."""

    def partners(self, round: int, rank: int, members: Sequence[int]) -> Sequence[int]:
        return rank, members[(members.index(rank) + 1) % len(members)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypercube(Rule):
    """A rule under which, in round n, each rank averages with the rank whose number differs in bit (n - 1) modulo 2."""

    def partners(self, round: int, rank: int, members: Sequence[int]) -> Sequence[int]:
        other = rank ^ (1 << (round - 1) % 2)
        return (rank, other) if other in members else (rank,)


class Policy(SimplePolicy):
    """A policy with a given rule."""

    def __init__(self, model: nn.Module, rule: Rule, **options: Any) -> None:
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, options)


async def train(world: ad.World, rule: Rule, steps: int = 8, step_s: Sequence[float] = (0.01,) * 8) -> Seen:
    """Step a model of one weight, at first the rank's number, and return each result with the weight and the time."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(float(world.rank))
    found = []
    async with Policy(model, rule) as policy:
        while policy.iteration < steps:
            await asyncio.sleep(step_s[world.rank])
            found.append((await policy.step(), model.weight.item(), world.time()))
    return world.incarnation, found


def test_each_rank_averages_with_the_next() -> None:
    results = simulate(train, NextRank(average_every=1), ranks=4, strict=True).results
    states = [0.0, 1.0, 2.0, 3.0]
    for step in range(8):
        states = [(state + states[(rank + 1) % 4]) / 2 for rank, state in enumerate(states)]
        assert [found[step][1] for _, found in results] == states
        assert [found[step][0].donors for _, found in results] == [(0, 1), (1, 2), (2, 3), (0, 3)]
        assert all(found[step][0].left_out == () for _, found in results)


def test_a_hypercube_reaches_the_exact_mean_in_two_rounds() -> None:
    results = simulate(train, Hypercube(average_every=1), 2, ranks=4, strict=True).results
    assert [[weight for _, weight, _ in found] for _, found in results] == [
        [0.5, 1.5],
        [0.5, 1.5],
        [2.5, 1.5],
        [2.5, 1.5],
    ]


def test_a_rank_waits_for_its_partners_only() -> None:
    slow = (0.01, 0.01, 0.01, 1.0)
    results = simulate(train, Hypercube(average_every=1), 1, slow, ranks=4, strict=True).results
    times = [found[0][2] for _, found in results]
    assert max(times[:2]) < 0.1 and min(times[2:]) >= 1.0


def test_a_lost_partner_is_chosen_again() -> None:
    faults = [Kill(1, at_s=0.035)]
    results = simulate(train, NextRank(average_every=1), ranks=4, faults=faults, until_s=100.0).results
    assert results[0][1][1][0].donors == (0, 1)
    assert results[0][1][-1][0].donors == (0, 2), "the partner must be the next rank that is left"


@pytest.mark.parametrize("rule", [NextRank, Hypercube], ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("seed", seeds(80))
def test_all_ranks_end_whatever_is_lost(seed: int, rule: type[Rule]) -> None:
    chance = random.Random(seed)
    ranks = chance.randint(2, 5)
    killed = chance.sample(range(ranks), chance.randint(0, ranks - 1))
    faults: list[Fault] = []
    for rank in killed:
        at_s = chance.uniform(0.005, 0.15)
        faults.append(Kill(rank, at_s=at_s))
        if chance.random() < 0.5:
            faults.append(Restart(rank, at_s=at_s + chance.uniform(0.01, 0.1)))
    if chance.random() < 0.5:
        faults.append(Stall(chance.randrange(ranks), chance.uniform(0.0, 0.1), chance.choice((0.05, 0.5))))
    steps = [chance.choice((0.005, 0.01, 0.05)) for _ in range(ranks)]
    try:
        report = simulate(train, rule(average_every=1), 12, steps, ranks=ranks, seed=seed, faults=faults, until_s=300.0)
    except ad.LateError:  # the policy had ended when the rank was back
        return
    for rank, result in enumerate(report.results):
        if rank not in killed:
            assert not isinstance(result, BaseException), result
            rounds = [info.round for info, _, _ in result[1]]
            assert rounds == list(range(1, 13)), "each round must be applied once"
            assert all(0.0 <= weight <= ranks - 1 for _, weight, _ in result[1]), (
                "each result must be a mean of the ranks' weights"
            )
            assert all(rank in info.donors for info, _, _ in result[1])


def decided(made: Sequence[Instruction]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the receivers and the donors of all decisions."""
    return [(each.dests, each.verdict.donors) for each in made if isinstance(each, Decide)]


def test_a_rank_gets_its_verdict_when_its_partners_have_captured() -> None:
    ledger = Ledger((0, 1, 2), partners=NextRank(average_every=1).partners)
    assert decided(ledger.on_captured(0, 1, 1.0, 1.0)) == []
    assert decided(ledger.on_captured(1, 1, 1.0, 1.0)) == [((0,), (0, 1))]
    assert decided(ledger.on_captured(2, 1, 1.0, 1.0)) == [((1,), (1, 2)), ((2,), (0, 2))]


def test_only_those_who_lack_a_lost_ranks_data_are_decided_again() -> None:
    ledger = Ledger((0, 1, 2), partners=NextRank(average_every=1).partners)
    for rank in range(3):
        ledger.on_captured(rank, 1, 1.0, 1.0)
    ledger.on_merged(0, 1)
    assert ledger.on_gone(1) == [], "rank 0 has merged, and rank 2 needs no data of rank 1, so nothing is left to do"
    ledger = Ledger((0, 1, 2), partners=NextRank(average_every=1).partners)
    for rank in range(3):
        ledger.on_captured(rank, 1, 1.0, 1.0)
    assert ledger.on_gone(1) == [TakeCensus(1)], "rank 0 has not merged, so the leader must ask for its state"
