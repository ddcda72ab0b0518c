"""Tests policies whose members join and leave: several policies, stragglers, leaving members and lost ranks."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch
from scripts.population import (
    Mixed,
    Story,
    sgd,
    values,
)
from support.local import run
from support.policies import PLENTY, Lockstep, train

import asyncdist as ad
import protocols
from asyncdist.messaging.streams import WINDOW_COUNT
from asyncdist.runtime import run as runtime
from asyncdist.transports import matching
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    StepInfo,
    parameter_stream,
)
from protocols.selective import coordinator, policy as selective_averaging
from protocols.selective.messages import REPLACER, Assign

# -- several policies -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_policies_at_once_never_mix() -> None:
    stories = Story(), Story()

    lockstep = Lockstep(4)

    async def main(world: ad.World) -> tuple[set[float], set[float]]:
        one, two = Mixed(float(world.rank)), Mixed(100.0 + world.rank)
        async with (
            AsyncSelectiveAveragingPolicy(
                one, sgd(one), average_every=2, name="ones", on_event=stories[0].listener(world.rank)
            ) as first,
            AsyncSelectiveAveragingPolicy(
                two,
                sgd(two),
                average_every=3,
                name="hundreds",
                metric_mode="min",
                on_event=stories[1].listener(world.rank),
            ) as second,
        ):
            async for _ in lockstep.steps(80):
                await first.step(float(world.rank))
                await second.step(float(world.rank))
        return values(one, floating=True), values(two, floating=True)

    results = run(main, 4)
    assert [pair[0] for pair in results] == [{2.0}, {1.0}, {2.0}, {3.0}]
    assert [pair[1] for pair in results] == [{100.0}, {101.0}, {102.0}, {101.0}]
    assert stories[0].verify() >= 3 and stories[1].verify() >= 3


def test_successive_policies_never_mix_if_one_rank_is_late() -> None:
    stories = [Story() for _ in range(4)]

    async def main(world: ad.World) -> list[set[float]]:
        seen = []
        for number, story in enumerate(stories):
            model = Mixed(100.0 * number + world.rank)
            async with AsyncSelectiveAveragingPolicy(
                model, sgd(model), average_every=1, grace_s=0.0, on_event=story.listener(world.rank)
            ) as policy:
                while len(story.applications) < 3:
                    await policy.step(float(world.rank))
                    for _ in range(3 * (world.rank == number)):
                        await world.safe_point()
            seen.append(values(model, floating=True))
        return seen

    results = run(main, 4)
    for number, story in enumerate(stories):
        assert story.verify() >= 3
        for rank in range(4):
            assert all(100.0 * number <= value < 100.0 * number + 4 for value in results[rank][number])


def test_a_policy_on_a_sub_group() -> None:
    story = Story()

    lockstep = Lockstep(3)

    async def main(world: ad.World) -> set[float]:
        model = Mixed(float(world.rank))
        if world.rank % 2 == 0:  # ranks 1 and 3 are not members, and continue alone
            return values(model, floating=True)
        group = await ad.new_group([1, 3, 5])
        async with AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=2, group=group, on_event=story.listener(world.rank)
        ) as policy:
            async for _ in lockstep.steps(60):
                await policy.step(float(world.rank))
        assert (policy.statistics().coordinator is not None) == (world.rank == 1)
        return values(model, floating=True)

    assert run(main, 6) == [{0.0}, {4.0}, {2.0}, {3.0}, {4.0}, {5.0}]
    assert story.verify() >= 3


@pytest.mark.parametrize("strategy", ["mean", "reset_weights"])
def test_a_lone_trainer_has_the_coordinator_that_it_names(strategy: Any) -> None:
    """Regression: the coordinator waited a minute for its only member, and ended the job."""

    async def main(world: ad.World) -> Any:
        if world.rank == 1:
            return (await protocols.coordinate([0])).decision_count
        model = torch.nn.Linear(1, 1)
        policy = AsyncSelectiveAveragingPolicy(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            average_every=2,
            coordinator=1,
            group=await ad.new_group([0]),
            averaging_strategy=strategy,
            model_builder=lambda: torch.nn.Linear(1, 1),
        )
        async with policy:
            return [bool(await policy.step(float(i))) for i in range(20)]

    report = ad.simulate(main, ranks=2, strict=True)
    assert report.results[0] == [False] * 20
    assert 1 <= report.results[1] <= 10
    assert report.virtual_time_s < 1


def test_a_reserved_rank_coordinates_and_trains_nothing() -> None:
    story = Story()

    lockstep = Lockstep(3)

    async def main(world: ad.World) -> Any:
        if world.rank == 3:
            return await protocols.coordinate([0, 1, 2])
        group = await ad.new_group([0, 1, 2])
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(
            model,
            sgd(model),
            average_every=2,
            averaging_strategy="weighted_mean",
            group=group,
            coordinator=3,
            on_event=story.listener(world.rank),
        ) as policy:
            async for _ in lockstep.steps(60):
                await policy.step(float(world.rank))
        assert policy.statistics().coordinator is None
        return values(model, floating=True)

    results = run(main, 4)
    assert results[0] == {float(torch.tensor(5.0) / torch.tensor(3.0)), 5.0 / 3.0}
    assert results[1:3] == [{1.0}, {2.0}]
    assert results[3].applied[0] == story.verify() >= 3
    assert results[3].rounds_decided == results[3].rounds_ended


def test_a_coordinator_that_is_cancelled_tells_its_members(caplog: pytest.LogCaptureFixture) -> None:
    """One member takes over. Regression: a donor that left waited ten seconds for the end of its round."""

    async def main(world: ad.World) -> Any:
        if world.rank == 2:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2):
                    await protocols.coordinate([0, 1])
            return None
        group = await ad.new_group([0, 1])
        model = Mixed(float(world.rank))
        policy = AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, group=group, coordinator=2)
        async with policy:
            await policy.step(float(world.rank))
            await asyncio.sleep(1)
            if world.rank == 1:
                await policy.step(1.0)  # takes the snapshot; the round stays open until rank 0 has received it
            await asyncio.sleep(2)
            info = await policy.step(float(world.rank))
            left_at = world.time()
        assert world.time() - left_at < 1
        return info.abandoned

    assert ad.simulate(main, ranks=3, strict=True).results[:2] == ("the coordinator has stopped", "")
    warnings = [record.getMessage() for record in caplog.records if "now the coordinator" in record.message]
    assert warnings == ["this rank is now the coordinator, after rank 2, which has stopped"]


# -- stragglers and leavers -------------------------------------------------------------------------------------------


def paced(policy_class: Any, **options: Any) -> tuple[list[int], list[int]]:
    """Step rank 1 about five times less often than the others.

    All ranks stop when rank 1 has made 40 steps and was replaced twice. The number of rounds that judge it in time
    depends on the order in which messages arrive.
    """
    finished: list[int] = []
    replaced = [0] * 4

    async def main(world: ad.World) -> int:
        model, steps = Mixed(float(world.rank)), 0
        async with policy_class(model, sgd(model), average_every=2, **options) as policy:
            while not finished:
                steps += 1
                try:
                    replaced[world.rank] += bool(await policy.step(0.0 if world.rank == 1 else 1.0 + world.rank))
                except ad.ClosedError:  # with the synchronous baseline, when another rank has finished
                    break
                for _ in range(20 if world.rank == 1 else 1):
                    await world.safe_point()
                if world.rank == 1 and steps >= 40 and (replaced[1] >= 2 or steps == PLENTY):
                    finished.append(steps)
        return steps

    return run(main, 4), replaced


@pytest.mark.slow
def test_straggler_is_judged_and_replaced_without_a_wait() -> None:
    steps, replaced = paced(AsyncSelectiveAveragingPolicy, grace_s=0.0)
    assert replaced[1] >= 2, replaced
    assert min(steps[0], steps[2], steps[3]) > 3 * steps[1], steps
    together, _ = paced(AverageAllPolicy)
    assert max(together) <= min(together) + 2, together


@pytest.mark.parametrize("leaver", ["donor", "replacer", "idle", "coordinator"])
def test_the_others_go_on_when_a_rank_leaves_early(leaver: str) -> None:
    """The donor leaves right after its snapshot, the replacer when it is assigned, the coordinator's rank early."""
    story = Story()
    gone = {"donor": 3, "replacer": 1, "idle": 2, "coordinator": 0}[leaver]
    metrics = {0: 5.0, 1: 0.0, 2: 1.0, 3: 2.0}
    left_at: list[int] = []

    async def main(world: ad.World) -> tuple[int, set[float]]:
        model, steps, after = Mixed(float(world.rank)), 0, 0
        async with AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=2, on_event=story.listener(world.rank)
        ) as policy:
            while after < 60 and steps < PLENTY:
                steps += 1
                info = await policy.step(metrics[world.rank])
                after += bool(left_at)
                if world.rank == gone:
                    statistics = policy.statistics()
                    ready = {
                        "donor": statistics.snapshot_count > 0,
                        "replacer": statistics.last_round > 0 and not info,
                        "idle": steps == 1,
                        "coordinator": steps == 7,
                    }[leaver]
                    if ready:
                        break
            if world.rank == gone:
                left_at.append(steps)
        return policy.statistics().replacement_count, values(model, floating=True)

    results = run(main, 4)
    assert left_at and left_at[0] < PLENTY
    last = story.applications[-1]
    worst = 2 if leaver == "replacer" else 1
    assert last[0] == worst and gone not in last[1].donors
    assert results[worst][0] >= 2
    assert story.verify() >= 2
    if leaver == "replacer":
        assert results[1] == (0, {1.0})


def test_rank_cancelled_while_leaving_still_announces_its_leave() -> None:
    """A donor that leaves waits for its replacer; the user's own timeout expires during that wait."""
    story = Story()

    timed_out: list[int] = []

    async def main(world: ad.World) -> int:
        model, after = Mixed(float(world.rank)), 0
        policy = AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=2, on_event=story.listener(world.rank))
        try:
            async with asyncio.timeout(None) as timeout, policy:
                while after < 60:
                    await policy.step(float(world.rank))
                    after += bool(timed_out)
                    while world.rank == 0 and policy.statistics().last_round and not timed_out:
                        await world.safe_point()  # no step, so nothing is applied and no End is sent
                    if world.rank == 3 and (1, 3) in story.snapshots:
                        timeout.reschedule(asyncio.get_running_loop().time() + 0.05)
                        break
        except TimeoutError:
            timed_out.append(world.rank)
        return policy.statistics().replacement_count

    counts = run(main, 4)
    assert timed_out == [3] and counts[0] >= 2
    assert all(3 not in event.donors for _, event, _ in story.applications[1:])


def test_a_rank_that_was_replaced_since_it_was_judged_declines() -> None:
    """The round's deadline passed before its Applied message arrived, so the next decision did not include it."""
    lockstep = Lockstep(2)

    async def main(world: ad.World) -> dict[str, int]:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=1, threshold=0.5, cooldown=10**9
        ) as policy:
            async for _ in lockstep.steps(30):
                info = await policy.step(float(world.rank))
                if info:
                    at = policy.iteration - 1
                    assign = Assign(REPLACER, (1,), (0,), judged_iteration=at - 1, best=1)
                    policy._opened.carry_out(policy._member.on_assign(assign, 99))
        return dict(policy.statistics().declined)

    declined, nothing = run(main, 2)
    assert list(declined.values()) == [1] and "replaced" in next(iter(declined))
    assert not nothing


def test_buffer_that_may_receive_discarded_chunks_is_not_reused() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            first = policy._resources.buffers.acquire()
            policy._resources.buffers.release(first, is_clean=True)
            second = policy._resources.buffers.acquire()
            assert second.buffers is first.buffers
            policy._resources.buffers.release(second, is_clean=False)  # as after a stream that is not answered yet
            third = policy._resources.buffers.acquire()
            assert third.buffers is not first.buffers
            third.hold()  # as while other ranks of this host use the memory
            policy._resources.buffers.release(third, is_clean=True)
            fourth = policy._resources.buffers.acquire()
            assert fourth.buffers is not third.buffers and policy._resources.buffers.in_use == 2
            third.release()
            fourth.release()
            assert policy._resources.buffers.in_use == 0

    run(main, 2)


def test_rank_that_leaves_by_its_own_exception_is_not_waited_for() -> None:
    """The rank catches the exception and continues without the policy; the others' rounds need every live member."""
    replaced: list[int] = []

    class Enough(Exception):
        pass

    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        try:
            async with AsyncSelectiveAveragingPolicy(
                model, sgd(model), average_every=1, quorum=1.0, grace_s=1000.0
            ) as policy:
                while len(replaced) < 3:
                    if await policy.step(float(world.rank)):
                        replaced.append(world.rank)
                    if world.rank == 2 and replaced:
                        raise Enough
        except Enough:
            while len(replaced) < 3:
                await world.safe_point()

    run(main, 3)
    assert replaced == [0, 0, 0]


def test_all_but_one_leave() -> None:
    async def main(world: ad.World) -> int:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, grace_s=0.0) as policy:
            for _ in range(5 if world.rank else 200):
                await policy.step(float(world.rank))
        return policy.iteration

    assert run(main, 4) == [200, 5, 5, 5]


def test_a_rank_that_ends_its_policy_trains_on_beside_the_others() -> None:
    lockstep = Lockstep(3)

    async def main(world: ad.World) -> int:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=2) as policy:
            if world.rank == 2:
                for _ in range(3):
                    await policy.step(float(world.rank))
            else:
                async for _ in lockstep.steps(80):
                    await policy.step(float(world.rank))
        for _ in range(200 if world.rank == 2 else 0):
            await world.safe_point()
        return policy.statistics().replacement_count

    results = run(main, 4)
    assert results[0] >= 3 and results[1:] == [0, 0, 0]


@pytest.mark.parametrize("where", ["coordinator", "member"])
def test_defect_in_a_policys_task_ends_the_job_with_a_traceback(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No code awaits these tasks, so their failure must not end the averaging silently."""

    def broken(*_: Any, **__: Any) -> None:
        raise AssertionError("invariant 42")

    if where == "coordinator":
        monkeypatch.setattr(coordinator.RoundCoordinator, "on_ready", broken)
    else:
        monkeypatch.setattr(selective_averaging.RoundMember, "on_frozen", broken)
    with pytest.raises(AssertionError, match="invariant 42"):
        train(steps=300)


# -- losses, where the transport survives them ------------------------------------------------------------------------


class Died(Exception):
    """Raised on a rank that is lost, in order to end its main."""


def lose(world: ad.World, rank: int) -> None:
    world._transport._hub.lose(rank)  # type: ignore[attr-defined]


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time for which a lost rank of this process waits for unreachable peers."""
    monkeypatch.setattr(runtime, "GRACE_S", 0.2)


@pytest.mark.usefixtures("short_grace")
@pytest.mark.long
def test_when_the_coordinator_is_lost_another_member_takes_over(caplog: pytest.LogCaptureFixture) -> None:
    iterations = [0] * 4
    rounds: set[int] = set()

    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=2) as policy:
            for step in range(200):
                if step == 20 and world.rank == 0:
                    lose(world, 0)
                    raise Died
                info = await policy.step(float(world.rank))
                iterations[world.rank] += 1
                if info and step > 40:
                    rounds.add(info.round)

    with caplog.at_level(logging.WARNING, "protocols"), pytest.raises((Died, ad.RankLostError)):
        run(main, 4)
    assert iterations == [20, 200, 200, 200]
    assert len(rounds) > 3
    warnings = [record.getMessage() for record in caplog.records if record.name == "protocols.selective.leadership"]
    assert len(warnings) == 1 and "rank 0" in warnings[0]


@pytest.mark.usefixtures("short_grace")
@pytest.mark.long
def test_a_donor_lost_before_the_freeze_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    story = Story()
    applied: list[StepInfo] = []
    lost: list[int] = []

    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=2, round_timeout_s=0.4, on_event=story.listener(world.rank)
        ) as policy:
            while len(applied) < 3:
                if world.rank == 3 and policy.statistics().last_round > 0:
                    lose(world, 3)
                    lost.append(policy.statistics().snapshot_count)
                    raise Died
                info = await policy.step(float(world.rank))
                if world.rank == 3:  # assigned by a message that arrived between two steps
                    while not policy.statistics().last_round and policy.iteration > 2:
                        await world.safe_point()
                if info:
                    applied.append(info)

    with pytest.raises((Died, ad.RankLostError)):
        run(main, 4)
    assert lost == [0]
    assert all(info.donors == (1, 2) for info in applied)
    assert story.verify() >= 3


@pytest.mark.slow
@pytest.mark.usefixtures("short_grace")
@pytest.mark.long
def test_replacer_keeps_its_weights_if_a_donor_is_lost_midstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 bytes make the stream long, so that rank 3 dies inside it.

    Chunks beyond the two windows are sent only when the round is frozen, so the round cannot end without rank 3.
    """
    monkeypatch.setattr(parameter_stream.messages, "CHUNK_NBYTES", 64)
    monkeypatch.setattr(matching, "EAGER_NBYTES", 16)
    abandoned: list[str] = []
    states: list[set[float]] = []

    def is_streaming(policy: AsyncSelectiveAveragingPolicy) -> bool:
        sent = [stream.sent_nbytes for offer in policy._opened.channels.server._offers for stream in offer.streams]
        return max(sent, default=0) > 2 * WINDOW_COUNT * 64

    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank), width=4096)
        async with AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=2, averaging_strategy="best_only", grace_s=60.0
        ) as policy:
            while not states and policy.iteration < PLENTY:
                if world.rank == 3 and is_streaming(policy):
                    lose(world, 3)
                    raise Died
                info = await policy.step(float(world.rank))
                if world.rank == 0 and (info.abandoned or info):
                    states.append(values(model, floating=True))
                while world.rank == 3 and policy._opened.channels.server._offers and not is_streaming(policy):
                    await world.safe_point()
            while world.rank == 0 and not abandoned:  # the coordinator may be notified of it later
                await world.safe_point()
                coordinator = policy.statistics().coordinator
                assert coordinator is not None
                abandoned.extend(coordinator.abandoned)

    with pytest.raises((Died, ad.RankLostError)):
        run(main, 4)
    assert states == [{0.0}]
    assert any(reason.startswith("the stream from rank 3 did not complete") for reason in abandoned)
