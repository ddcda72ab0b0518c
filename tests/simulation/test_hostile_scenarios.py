"""Tests that a rank's well-formed but false messages do not crash other ranks or make them use more memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

import asyncdist as ad
from asyncdist.simulation import Compute, simulate
from protocols import AsyncSelectiveAveragingPolicy
from protocols.joining.dispatcher import PolicyDispatcher, SuccessionMessage
from protocols.joining.messages import Nomination, TakeOver
from simulation.hostile_scenarios import AVERAGING_PROGRAMS, PROGRAMS, run_hostile


@pytest.mark.slow
def test_lies_of_a_rank_crash_no_other_one() -> None:
    """A few of many seeds; tools/soak runs more."""
    sent: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for seed in range(20):
        seen = run_hostile(seed)
        sent += seen.sent
        ends += seen.ends
    assert len(sent) > 25, "too few types of false messages were sent"
    assert ends["well"] > 5 and len(ends) > 3, "the messages must do harm in some runs, but not in all"
    assert len(PROGRAMS) == 6


@pytest.mark.slow
def test_lies_of_a_rank_crash_no_other_one_that_contributes() -> None:
    """Regression: 3 of 100 seeds crashed a rank, such as by a size of 2**53 bytes or by members without it."""
    sent: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for seed in (*range(24), 82):
        seen = run_hostile(seed, AVERAGING_PROGRAMS)
        sent += seen.sent
        ends += seen.ends
    assert len(sent) > 15, "too few types of false messages were sent"
    assert ends["well"] > 5 and len(ends) > 2, "the messages must do harm in some runs, but not in all"


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(500_854, id="the agreed number of a group was below -2**31"),
        pytest.param(501_066, id="a draw of no items from a buffer that had none"),
    ],
)
def test_lies_that_ended_an_honest_rank_once_do_not_any_more(seed: int) -> None:
    run_hostile(seed)


@pytest.mark.parametrize(
    "lie",
    [
        lambda policy: TakeOver(policy, 2**63 - 1, 2),
        lambda policy: Nomination(policy, 2**63 - 1),
        lambda policy: TakeOver(policy, 7, 99),
        lambda policy: TakeOver(policy, 7, 1),
    ],
    ids=["epoch", "nomination", "no member", "the rank itself"],
)
def test_an_untrue_word_about_the_coordinator_changes_nothing(lie: Callable[[int], SuccessionMessage]) -> None:
    """Regression: the first three ended the rank, and the job; after the last, it took part in no round."""

    async def main(world: ad.World) -> int:
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=2) as policy:
            for step in range(40):
                if world.rank == 2 and step == 10:
                    dispatcher = world.services.shared(PolicyDispatcher)
                    dispatcher.send(lie(next(iter(dispatcher._policies))), 1)
                await policy.step(float(world.rank))
            statistics = policy.statistics().coordinator
        return 0 if statistics is None else statistics.reports[1]

    reports = simulate(main, ranks=3, seed=1, compute=Compute(step_s=0.01)).results
    assert reports[0] >= 18 and [*reports[1:]] == [0, 0], reports
