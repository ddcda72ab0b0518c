"""Tests that another rank takes over if a coordinator is lost, stops or was only slow, and averaging continues."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from scripts.population import Roles
from support.seeds import in_ci, seeds
from torch import nn

import asyncdist as ad
import protocols
from asyncdist.simulation import Fault, Kill, Network, Partition, SimReport, Stall, simulate
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageApplied,
    CoordinatorChanged,
    PolicyEvent,
    SelectiveStatistics,
    SnapshotTaken,
)
from protocols.joining import dispatcher
from protocols.selective import succession
from protocols.selective.leadership import Leadership
from protocols.selective.messages import Joined, PackedAssign
from protocols.selective.plan import Plan
from protocols.selective.roles.member_channels import MemberChannels

STEP_S = 0.01
EVERY = 5
CADENCE_S = STEP_S * EVERY


@dataclass
class Story:
    """Observations on one rank: time and round of each average, and the final statistics."""

    rounds: list[tuple[float, int]] = field(default_factory=list)
    snapshots: list[tuple[int, int]] = field(default_factory=list)
    coordinators: list[CoordinatorChanged] = field(default_factory=list)
    statistics: SelectiveStatistics | None = None

    def note(self, world: ad.World) -> Callable[[PolicyEvent], None]:
        roles = Roles(world.rank)

        def listen(event: PolicyEvent) -> None:
            roles.see(event)
            if isinstance(event, AverageApplied):
                self.rounds.append((world.time(), event.round))
            elif isinstance(event, SnapshotTaken):
                self.snapshots.append((event.round, event.iteration))
            elif isinstance(event, CoordinatorChanged):
                self.coordinators.append(event)

        return listen


async def train(world: ad.World, steps: int = 120, **options: Any) -> Story:
    """Train under the policy; a rank's metric is its number."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    story = Story()
    async with AsyncSelectiveAveragingPolicy(
        model, optimizer, average_every=EVERY, on_event=story.note(world), **options
    ) as policy:
        for _ in range(steps):
            await asyncio.sleep(STEP_S)
            await policy.step(float(world.rank))
    story.statistics = policy.statistics()
    return story


def population(ranks: int, faults: Sequence[Fault] = (), *, seed: int = 1, **options: Any) -> list[Story | None]:
    """Simulate the population; a killed rank has no observations."""

    async def main(world: ad.World) -> Story:
        return await train(world, **options)

    report: SimReport[Story] = simulate(main, ranks=ranks, seed=seed, faults=faults, strict=True)
    return list(report.results)


def living(stories: Sequence[Story | None]) -> list[Story]:
    return [story for story in stories if story is not None]


def check_rounds(stories: Sequence[Story | None]) -> None:
    """Check that no rank takes an average or a snapshot twice in a round, and that round numbers increase."""
    for story in living(stories):
        numbers = [number for _, number in story.rounds]
        assert numbers == sorted(set(numbers))
        given = [number for number, _ in story.snapshots]
        assert given == sorted(set(given))


def check_goes_on(stories: Sequence[Story | None], since_s: float) -> None:
    """Check that a round completes within three report intervals after the last fault."""
    check_rounds(stories)
    later = [at_s for story in living(stories) for at_s, _ in story.rounds if at_s > since_s]
    assert later and min(later) <= since_s + 3 * CADENCE_S, (
        f"the next average took place at {min(later, default=None)} s, too late"
    )


@contextlib.contextmanager
def leaderships() -> Iterator[dict[int, Leadership]]:
    """Collect the leadership objects of each rank's newest policy."""
    opened: dict[int, Leadership] = {}
    begin = Leadership.begin

    def note(leadership: Leadership) -> None:
        opened[leadership._services.rank] = leadership
        begin(leadership)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Leadership, "begin", note)
        yield opened


def claim(leadership: Leadership) -> None:
    """Let this rank become coordinator, although the coordinator lives."""
    leadership._carry_out(leadership._succession.on_suspicion())


@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_the_next_member_takes_over_from_a_killed_coordinator(ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "protocols"):
        stories = population(ranks, [Kill(0, 0.31)])
    check_goes_on(stories, 0.31)
    for story in living(stories):
        assert story.statistics is not None
        assert (story.statistics.coordinator_rank, story.statistics.epoch) == (1, 2)
        assert (story.statistics.coordinator is None) == (story is not stories[1])
        assert story.coordinators == [CoordinatorChanged(rank=1, epoch=2)]
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1 and "rank 0" in told[0], "only rank 0 may warn, and only once"


def test_round_numbers_go_on() -> None:
    stories = population(4, [Kill(0, 0.31)])
    numbers = sorted({number for story in living(stories) for _, number in story.rounds})
    assert numbers == list(range(numbers[0], numbers[-1] + 1)) and numbers[-1] > 15


@pytest.mark.parametrize(
    "faults",
    [
        [Kill(0, 0.31), Kill(1, 0.31)],
        [Kill(0, 0.31), Kill(1, 0.3101)],
        [Kill(0, 0.31), Kill(1, 0.3105), Kill(2, 0.3106)],
        [Kill(1, 0.2), Kill(0, 0.31), Kill(2, 0.5), Kill(3, 0.7)],
    ],
    ids=["both", "the successor, next", "three", "one after the other"],
)
def test_successors_are_killed_too(faults: list[Fault]) -> None:
    stories = population(6, faults)
    check_goes_on(stories, max(fault.at_s for fault in faults if isinstance(fault, Kill)))
    assert len(living(stories)) == 6 - len(faults)


@pytest.mark.slow
def test_a_rank_may_be_killed_at_any_moment_of_a_takeover() -> None:
    for nth in range(20):
        at_s = 0.31 + nth * 0.001
        check_goes_on(population(5, [Kill(0, 0.31), Kill(1 + nth % 2, at_s)], seed=nth), at_s)


def test_the_user_names_the_successors() -> None:
    stories = population(4, [Kill(0, 0.31), Kill(3, 0.6)], successors=[3, 2])
    check_goes_on(stories, 0.6)
    survivors = [story.statistics for story in living(stories)]
    assert [statistics.coordinator_rank for statistics in survivors if statistics] == [2, 2]


def test_successors_must_be_members() -> None:
    async def main(world: ad.World, successors: Any) -> None:
        await train(world, successors=successors)

    for successors, error in (([1, 7], ValueError), ([1, 1], ValueError), ("12", TypeError), ([-1], ValueError)):
        for result in simulate(main, successors, ranks=3, return_exceptions=True).results:
            assert isinstance(result, error) and str(result).startswith("successors")


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "cancelled"])
def test_a_member_takes_over_from_a_reserved_coordinator(is_killed: bool) -> None:
    async def main(world: ad.World) -> Any:
        if world.rank == 3:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(protocols.coordinate([0, 1, 2]), 0.31)
            return None
        group = await ad.new_group([0, 1, 2])
        return await train(world, group=group, coordinator=3)

    faults = [Kill(3, 0.3)] if is_killed else []
    report = simulate(main, ranks=4, seed=2, faults=faults, strict=True)
    check_goes_on(report.results, 0.33)
    for story in living(report.results):
        assert story.statistics is not None and story.statistics.coordinator_rank == 0


def test_a_member_that_has_left_the_policy_is_passed_over() -> None:
    """Regression: only the coordinator knew that it had left."""

    async def main(world: ad.World) -> Story:
        story = await train(world, 20 if world.rank in (1, 2) else 120)
        await asyncio.sleep(2)
        return story

    stories = simulate(main, ranks=5, seed=3, faults=[Kill(0, 0.6)], strict=True).results
    check_goes_on(stories, 0.6)
    assert [story.statistics.coordinator_rank for story in living(stories)[2:] if story.statistics] == [3, 3]


def test_a_coordinator_whose_policy_has_ended_is_replaced_too() -> None:
    """The rank serves the others until they have left, and is killed meanwhile."""

    async def main(world: ad.World) -> Story:
        return await train(world, 20 if world.rank == 0 else 120)

    stories = simulate(main, ranks=4, seed=3, faults=[Kill(0, 0.6)], strict=True).results
    check_goes_on(stories, 0.6)


@pytest.mark.parametrize("nth", range(6))
def test_a_message_of_the_takeover_that_is_lost_is_said_again(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is a nomination, a claim, or a member's report to the new coordinator: there are five and more."""
    said: list[str] = []
    send, send_to_coordinator = dispatcher.PolicyDispatcher.send, MemberChannels.send_to_coordinator

    def lossy_send(dispatcher: Any, message: Any, dest: int) -> None:
        said.append(f"{type(message).__name__} to {dest}")
        if len(said) != nth + 1:
            send(dispatcher, message, dest)

    def lossy_send_to_coordinator(channels: MemberChannels, message: Any, coordinator: int, round: int) -> None:
        if isinstance(message, Joined):
            said.append(f"Joined to {coordinator}")
        if not isinstance(message, Joined) or len(said) != nth + 1:
            send_to_coordinator(channels, message, coordinator, round)

    monkeypatch.setattr(dispatcher.PolicyDispatcher, "send", lossy_send)
    monkeypatch.setattr(MemberChannels, "send_to_coordinator", lossy_send_to_coordinator)
    stories = population(4, [Kill(0, 0.31)])
    assert {"TakeOver to 2", "TakeOver to 3", "Joined to 1"} <= set(said)
    assert len(said) >= 5
    check_rounds(stories)
    for story in living(stories):
        assert story.statistics is not None and story.statistics.coordinator_rank == 1
        assert story.statistics.last_round >= 18, "the restarted rank must take part in rounds of the new coordinator"


def test_a_silent_successor_is_passed_over_and_follows_later() -> None:
    stories = population(4, [Kill(0, 0.31), Stall(1, 0.305, 1.0)], steps=200, grace_s=0.02)
    check_rounds(stories)
    later = [at_s for story in living(stories) for at_s, _ in story.rounds if 0.31 < at_s < 1.0]
    assert later and min(later) < 0.31 + 8 * CADENCE_S, "the other ranks must continue without the lost rank"
    assert len({story.statistics.epoch for story in living(stories) if story.statistics}) == 1


def test_a_coordinator_that_was_only_slow_becomes_a_member() -> None:
    """Rank 1 takes over although rank 0 lives."""

    async def main(world: ad.World) -> Story:
        if world.rank == 1:
            asyncio.get_running_loop().call_later(0.31, lambda: claim(opened[1]))
        return await train(world)

    with leaderships() as opened:
        stories = simulate(main, ranks=4, seed=5, strict=True).results
    check_goes_on(stories, 0.31)
    statistics = [story.statistics for story in living(stories) if story.statistics]
    assert [(each.coordinator_rank, each.epoch) for each in statistics] == [(1, 2)] * 4
    assert all(each.coordinator is not None for each in statistics[:2]), "both ranks must have coordinated"
    assert stories[0].rounds[-1][0] > 0.8, "the worst rank must still be replaced after it has coordinated"


def test_a_policy_that_a_coordinator_has_left_is_freed() -> None:
    """Ranks 0 to 2 coordinate in turn, and rank 0 leaves the policy before its turn is over."""
    freed: dict[int, bool] = {}

    async def use(world: ad.World) -> weakref.ref[nn.Module]:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=EVERY) as policy:
            if world.rank in (1, 2):
                asyncio.get_running_loop().call_later(0.3 * world.rank, claim, opened[world.rank])
            for _ in range(20 if world.rank == 0 else 100):
                await asyncio.sleep(STEP_S)
                await policy.step(float(world.rank))
        assert (policy.statistics().coordinator is not None) == (world.rank < 3)
        return weakref.ref(model)

    async def main(world: ad.World) -> None:
        model = await use(world)
        await asyncio.sleep(0.05)
        gc.collect()
        freed[world.rank] = model() is None
        await asyncio.sleep(2)

    with leaderships() as opened:
        simulate(main, ranks=4, strict=True).value()
    assert freed == dict.fromkeys(range(4), True)


@pytest.mark.parametrize("faults", [[], [Kill(0, 0.31)]], ids=["all live", "one is killed"])
def test_nothing_of_a_population_is_kept_when_it_has_ended(faults: Sequence[Fault]) -> None:
    kept: list[weakref.ref[Any]] = []

    async def main(world: ad.World) -> None:
        kept.append(weakref.ref(world.services))
        await train(world, 40)

    simulate(main, ranks=3, faults=faults)
    gc.collect()
    assert len(kept) == 3 and not any(services() for services in kept)


def test_an_assignment_of_a_lost_coordinator_is_not_a_role() -> None:
    async def main(world: ad.World) -> str:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=1000) as policy:
            if world.rank == 2:
                inbox = policy._opened.channels.control.inbox
                inbox.mailbox.append(ad.Envelope(PackedAssign(Plan((1, 2), (2,), (5, 5), 1).packed()), 0, 1))
                inbox.wake_one()
                leadership = policy._tracker
                assert isinstance(leadership, Leadership)
                leadership._lose_coordinator("is gone", 0)
            await asyncio.sleep(2.0)
            return policy._member.state.name

    assert simulate(main, ranks=3, seed=1, strict=True).results == ("IDLE", "IDLE", "IDLE")


def test_a_partition_that_heals_leaves_one_coordinator() -> None:
    """The transport reports no loss: messages are only late."""
    faults = [Partition((0,), 0.3, 0.6)]
    stories = population(4, faults, steps=200)
    check_goes_on(stories, 0.8)
    assert len({(s.statistics.coordinator_rank, s.statistics.epoch) for s in living(stories) if s.statistics}) == 1


def compute(step_s: float) -> None:
    """Block the loop, as training does."""
    time.sleep(step_s)


def slow_rank_0(step_s: float, *, is_all: bool = False) -> list[Story]:
    """Let rank 0 coordinate with steps of this length; the others train for 30 s."""

    async def main(world: ad.World) -> Story:
        torch.manual_seed(world.rank)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        story = Story()
        async with AsyncSelectiveAveragingPolicy(
            model, optimizer, average_every=EVERY, on_event=story.note(world), grace_s=0.05
        ) as policy:
            while world.time() < 30:
                compute(step_s if is_all or world.rank == 0 else 0.05)
                await policy.step(float(world.rank))
        story.statistics = policy.statistics()
        return story

    stories = living(simulate(main, ranks=4, seed=6, strict=True).results)
    check_rounds(stories)
    return stories


def rounds_of(stories: list[Story]) -> int:
    return max(story.statistics.last_round for story in stories if story.statistics)


def test_a_member_takes_over_from_a_coordinator_of_long_steps() -> None:
    """Rounds wait for the coordinator once, and not for every answer."""
    stories = slow_rank_0(4.0)
    assert {story.statistics.coordinator_rank for story in stories if story.statistics} == {1}
    assert {story.statistics.epoch for story in stories if story.statistics} == {2}
    served = stories[1].statistics and stories[1].statistics.coordinator
    assert served and Counter(straggler.rank for straggler in served.stragglers).most_common(1)[0][0] == 0, (
        "the statistics must name rank 0 as the straggler"
    )
    assert min(at_s for story in stories for at_s, _ in story.rounds) < 4.0, (
        "a round must take place before rank 0's first step has ended"
    )


def test_a_member_takes_over_from_a_coordinator_that_is_late() -> None:
    """None of its steps is long, but they are five times as long as the others': half of the rounds would be missed."""
    stories = slow_rank_0(0.25)
    assert {story.statistics.coordinator_rank for story in stories if story.statistics} <= {1, 2, 3}
    assert {story.statistics.epoch for story in stories if story.statistics} <= {2, 3, 4}, (
        "members may take over only once or twice"
    )
    assert rounds_of(stories) >= 0.8 * rounds_of(slow_rank_0(0.05))


def test_a_member_takes_over_from_a_computing_former_coordinator() -> None:
    """The former coordinator has left the policy and computes."""

    async def main(world: ad.World) -> Story:
        story = await train(world, steps=20 if world.rank == 0 else 400)
        if world.rank == 0:
            compute(10.0)
        return story

    stories = simulate(main, ranks=4, seed=2, strict=True).results
    check_goes_on(stories, 20 * STEP_S + succession.SILENT_S + 2 * CADENCE_S)
    assert {story.statistics.coordinator_rank for story in stories[1:] if story.statistics} == {1}


def test_a_second_member_takes_over_when_the_first_is_as_slow() -> None:
    """Ranks 0 and 1 are in a long step at the same time."""

    async def main(world: ad.World) -> Story:
        if world.rank < 2:
            asyncio.get_running_loop().call_later(0.3, compute, 6.0)
        return await train(world, steps=800)

    stories = simulate(main, ranks=5, seed=3, strict=True).results
    check_goes_on(stories, 0.3 + 2 * succession.SILENT_S + 2 * CADENCE_S)
    assert {(s.statistics.coordinator_rank, s.statistics.epoch) for s in stories if s.statistics} == {(2, 3)}


def test_a_coordinator_that_calls_rarely_keeps_its_task() -> None:
    """All ranks, including the coordinator, make many iterations between two calls."""

    async def main(world: ad.World) -> SelectiveStatistics:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=100) as policy:
            for iteration in range(0, 2000, 100):
                compute(5.0)
                await policy(iteration, model, optimizer, float(world.rank))
        return policy.statistics()

    stories = simulate(main, ranks=4, seed=1, strict=True).results
    assert [(each.coordinator_rank, each.epoch) for each in stories] == [(0, 0)] * 4
    assert stories[0].replacement_count > 1


def test_a_coordinator_whose_peers_are_as_slow_keeps_its_task() -> None:
    assert [s.statistics.epoch for s in slow_rank_0(1.0, is_all=True) if s.statistics] == [0] * 4


@pytest.mark.parametrize(
    ("is_reserved", "every"), in_ci(itertools.product([False, True], [1, 40]), (False, 40), (True, 1))
)
def test_a_coordinator_keeps_its_task_while_members_evaluate(is_reserved: bool, every: int) -> None:
    """A pause follows a report, and rank 0 returns last. A reserved coordinator has answered meanwhile."""

    async def main(world: ad.World) -> Any:
        members = [rank for rank in range(4) if rank or not is_reserved]
        if world.rank not in members:
            return await protocols.coordinate(members)
        group = await ad.new_group(members)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with AsyncSelectiveAveragingPolicy(
            model, optimizer, average_every=every, group=group, coordinator=0
        ) as policy:
            for epoch in range(15):
                for _ in range(40):
                    compute(STEP_S)
                    await policy.step(float(world.rank))
                compute(3.0 * (epoch + 1) - 0.04 * world.rank - world.time())
        return policy.statistics()

    for statistics in simulate(main, ranks=4, strict=True).results[is_reserved:]:
        assert (statistics.coordinator_rank, statistics.epoch) == (0, 0)


@pytest.mark.parametrize("seed", seeds(10))
def test_a_policy_starts_without_ranks_lost_by_then(seed: int) -> None:
    """No launcher restarts them; the others start anyway, and average."""
    draws = random.Random(f"lost in the start {seed}")
    ranks = draws.randint(2, 6)
    late_s = [draws.choice((0.0, 1e-5, 1e-3)) for _ in range(ranks)]
    victims = draws.sample(range(ranks), draws.randint(1, ranks - 1))
    faults = [
        Kill(rank, at_s=draws.choice((0.0, draws.uniform(0.0, 2e-4), draws.uniform(0.0, 1.2e-3)))) for rank in victims
    ]

    async def main(world: ad.World) -> Story:
        await world.sleep(late_s[world.rank])
        return await train(world, 40, start_timeout_s=5.0)

    network = Network(loss_detection_s=draws.choice((1e-5, 1e-3, 0.1)))
    report = simulate(main, ranks=ranks, seed=seed, faults=faults, network=network, until_s=100.0, strict=True)
    live = sorted(set(range(ranks)) - set(victims))
    for rank in live:
        story = report.results[rank]
        assert isinstance(story, Story), report.results
        assert story.statistics is not None and story.statistics.coordinator_rank in live
        assert story.statistics.last_round >= 2 or len(live) == 1
