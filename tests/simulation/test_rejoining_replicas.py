"""Tests DiLoCo between replicas of several ranks that are lost, restarted, and join the running policy again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import asyncdist as ad
from asyncdist.simulation import Fault, Kill, Network, Restart, SlowLink, Stall, Uniform, simulate
from protocols import AsyncDiLoCoPolicy
from simulation import diloco_rejoining_scenarios as scenarios
from simulation.diloco_rejoining_scenarios import Plan, check, run

OPTIONS: dict[str, Any] = {"average_every": 3, "outer_optimizer": None, "fragments": 1, "late": "wait"}


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(6, 66, 6))])
def test_seeds(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 6):
        seen += scenarios.seen_in(seed)[1]
    assert seen["joined"] > 6 and seen["rounds without a replica"] and seen["whole replicas at the end"] > 6, seen


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(6, 66, 6))])
def test_seeds_of_asynchronous_diloco(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 6):
        seen += scenarios.seen_in(seed, draw=scenarios.draw_async_plan)[1]
    assert seen["joined"] > 6 and seen["contributions of a joined replica"] > 6, seen


@pytest.mark.slow
def test_the_leader_waits_for_the_return_of_a_follower() -> None:
    """Regression: the late notice of a follower's loss removed its replica, which had joined meanwhile."""
    options = {"average_every": 1, "late": "wait", "quorum": 1, "drain_timeout_s": 1.0}
    faults = [fault for rank in (2, 3) for fault in (Kill(rank, at_s=0.06), Restart(rank, at_s=0.061))]
    network = Network(loss_detection_s=Uniform(0.0, 0.2))
    plan = Plan(steps=30, kind=AsyncDiLoCoPolicy, options=options, faults=tuple(faults), network=network)
    _, lives = run(plan, 32)
    check(plan, lives)
    assert len([each for each in lives[2, 1].applied if each < max(lives[0, 0].applied)]) > 10


@pytest.mark.slow
def test_a_new_leader_forgets_the_lost_leaders_admission() -> None:
    """Regression: its election failed with KeyError, because that rank has no state and reports none."""
    assert scenarios.seen_in(539, draw=scenarios.draw_async_plan)[1]["joined"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_replica_joins_again(lost: int) -> None:
    """Replica 0 leads. The ranks are back at different times, but join after the same round."""
    one, two = 2 * lost, 2 * lost + 1
    faults = (Kill(two, at_s=0.05), Kill(one, at_s=0.051), Restart(two, at_s=0.1), Restart(one, at_s=0.12))
    plan = Plan(options=OPTIONS, faults=faults)
    _, lives = run(plan)
    seen = check(plan, lives)
    assert seen["joined"] == 2 and seen["whole replicas at the end"] == 2 and seen["rounds without a replica"] == 3
    assert {lives[rank, 1].joined_at for rank in (one, two)} == {12}
    assert lives[one, 1].applied[8][0] == (0, 2)


@pytest.mark.slow
def test_the_leaders_replica_is_lost_while_it_admits_another() -> None:
    """The restarted replica asks the next leader."""
    joined = Counter[str]()
    for delay_ms in (1, 4, 7, 10):
        slow = [SlowLink(0, 4, at_s=0.0, factor=100), SlowLink(1, 5, at_s=0.0, factor=30)]
        lost: list[Fault] = [Kill(4, at_s=0.05), Kill(5, at_s=0.05), Restart(4, at_s=0.09), Restart(5, at_s=0.1)]
        leader = [Kill(rank, at_s=0.105 + delay_ms / 1000) for rank in (0, 1)]
        plan = Plan(replicas=3, options={**OPTIONS, "average_every": 1}, faults=(*slow, *lost, *leader))
        _, lives = run(plan)
        joined += check(plan, lives)
        assert {lives[rank, 1].has_ended for rank in (4, 5)} == {True}, delay_ms
    assert joined["joined"] == 8, joined


def test_a_restarted_rank_reports_no_unmet_rank_as_lost() -> None:
    """Regression: it freed a group before it was connected to rank 1, and the others took rank 1 for lost."""

    async def main(world: ad.World) -> int:
        if world.incarnation:
            group = await world.peers.groups.replica_group((2, 3), 10.0)
            is_unmet = world.services.is_unmet(1)
            await group.free()
            await world.sleep(0.1)
            return int(is_unmet)
        group = await ad.new_group((0, 1) if world.rank < 2 else (2, 3))
        await world.sleep(5.0)
        return await ad.reduce_and_broadcast(lambda: 5, sum, group=group)

    ends: list[Fault] = [Kill(rank, at_s=0.1) for rank in (2, 3)]
    backs: list[Fault] = [Restart(2, at_s=0.15), Stall(1, 0.25, 4.0), Restart(3, at_s=0.3)]
    assert simulate(main, ranks=4, faults=[*ends, *backs], until_s=30.0).results == (10, 10, 0, 1)


def test_a_group_waits_for_a_member_that_is_connected_later() -> None:
    """Regression: the first member knew only the lost process of another restarted member, and refused the group."""

    async def main(world: ad.World) -> int:
        if not world.incarnation:
            await world.sleep(2.0)
            return 0
        group = await world.peers.groups.replica_group((1, 2, 3), 10.0)
        return group.size

    ends = [Kill(rank, at_s=0.1) for rank in (1, 2, 3)]
    backs = [Restart(rank, at_s=0.2 + rank / 100) for rank in (1, 2, 3)]
    for rank in (2, 3):
        slow = SlowLink(rank, 1, at_s=0.0, factor=1000)
        assert simulate(main, ranks=4, faults=[*ends, *backs, slow], until_s=30.0).results == (0, 3, 3, 3)
