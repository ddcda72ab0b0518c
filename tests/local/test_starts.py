"""Tests starts whose caller is cancelled when the other ranks depend on it: they complete and are released."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.facts import names
from support.local import worlds, yields

import asyncdist as ad
from asyncdist import World
from asyncdist.collectives.agreed_start import start_together
from asyncdist.collectives.groups import Group
from asyncdist.errors import RemoteError, StartTimeoutError
from asyncdist.simulation import Delay, simulate
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy


@pytest.mark.parametrize("gives_up", [0, 1])
@pytest.mark.parametrize("moment", range(1, 12))
async def test_group_cancelled_at_any_moment_exists_on_all_or_none(moment: int, gives_up: int) -> None:
    async with worlds(2) as made:
        starts = [asyncio.ensure_future(world.new_group([0, 1])) for world in made]
        await yields(moment)
        starts[gives_up].cancel()
        found = await asyncio.gather(*starts, return_exceptions=True)
        while any(world.services.task_count for world in made):
            await yields(1)
        assert isinstance(found[1 - gives_up], (Group, RemoteError))
        if not isinstance(found[gives_up], Group):
            assert isinstance(found[gives_up], asyncio.CancelledError)
        again = await asyncio.gather(*(world.new_group([0, 1]) for world in made))
        assert again[0].tag == again[1].tag
        for world in made:
            agreements = world.agreements
            assert not (agreements.led.over or agreements.led.joins or agreements._verdicts or agreements._forsaken)


async def test_leader_cancelled_after_an_objection_keeps_nothing() -> None:
    """Regression: the leader objected to a start that was over, and kept the objection for members already notified."""
    async with worlds(2) as (leader, member):
        starting = asyncio.ensure_future(leader.new_group([0, 1]))
        await yields(5)
        member.agreements.object((0, 1), "new group", ValueError("no"))
        while not leader.agreements._verdicts:
            leader.services.engine.poll()
            if not leader.agreements._verdicts:
                await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled() and not leader.agreements.led.over


def late_verdict(main: Callable[[World], Any]) -> Any:
    """Run ``main`` on two ranks; rank 0's first message, which carries its decision, is delayed by 20 s."""
    report = simulate(main, ranks=2, faults=[Delay(source=0, dest=1, number=1, duration_s=20)], strict=True)
    report.check_faults()
    return report.results


def test_timed_out_members_of_a_late_go_still_make_the_group() -> None:
    """Regression: the member that had timed out left, and rank 0 was alone in a collective start."""

    async def main(world: World) -> tuple[str, float]:
        try:
            await world.new_group([0, 1], timeout_s=1)
            came_to = "made"
        except StartTimeoutError as error:
            came_to = str(error)
        after_s = world.time()
        await world.new_group([0, 1])
        assert world.time() > 20, "the first group must be made before the second"
        return came_to, after_s

    leader, gave_up = late_verdict(main)
    assert "all ranks joined, but after another 5 s some of them were still in other starts or computing" in leader[0]
    assert 5 <= leader[1] < 5.1
    assert names(gave_up[0], "rank 0", "1 s") and 1 < gave_up[1] < 10


@pytest.mark.parametrize("times", [1, 3])
def test_step_cancelled_before_its_go_averages_first(times: int) -> None:
    """Regression: the cancelled rank skipped the average, and its later averages differed from the others'."""

    async def main(world: World) -> tuple[bool, list[float]]:
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        was_cancelled = False
        values = []
        async with AverageAllPolicy(model, optimizer, average_every=1) as policy:
            for i in range(3):
                torch.nn.init.constant_(model.weight, float(i + world.rank))
                step = asyncio.ensure_future(policy.step())
                for _ in range(times if i == 0 and world.rank == 1 else 0):
                    await asyncio.sleep(5)
                    step.cancel()
                try:
                    await step
                except asyncio.CancelledError:
                    was_cancelled = True
                values.append(model.weight.item())
        return was_cancelled, values

    # The first verdict belongs to the policy's start, and the next two to the start of its group.
    report = simulate(main, ranks=2, faults=[Delay(source=0, dest=1, number=4, duration_s=60)], strict=True)
    report.check_faults()
    assert report.results == ((False, [0.5, 1.5, 2.5]), (True, [0.5, 1.5, 2.5]))


@pytest.mark.parametrize("gives_up", [0, 1])
@pytest.mark.parametrize("moment", range(1, 9))
def test_step_cancelled_at_any_moment_leaves_members_in_step(moment: int, gives_up: int) -> None:
    """Regression: a step cancelled before it was sent still counted: others averaged with a later step."""

    async def main(world: World) -> tuple[list[float], int]:
        model = torch.nn.Linear(1, 1, bias=False)
        values = []
        async with AverageAllPolicy(model, torch.optim.SGD(model.parameters()), average_every=2) as policy:
            for i in range(6):
                torch.nn.init.constant_(model.weight, float(2 * i + world.rank))
                step = asyncio.ensure_future(policy.step())
                if i == 1 and world.rank == gives_up:
                    await yields(moment)
                    step.cancel()
                with contextlib.suppress(asyncio.CancelledError, RemoteError):
                    await step
                values.append(model.weight.item())
            return values, policy._round

    one, two = simulate(main, ranks=2, seed=moment, strict=True).results
    rounds = one[1]
    assert rounds == two[1] in (2, 3)
    averaged = [2.5] if rounds == 3 else [2.0, 3.0]
    assert {one[0][1], two[0][1]} == set(averaged)
    assert one[0][3::2] == two[0][3::2] == [6.5, 10.5]


async def test_who_is_interrupted_does_not_wait_for_the_leaders_word() -> None:
    async with worlds(2) as (_, member):

        async def work(start: Any) -> None:
            await start.agree({}, timeout_s=None)

        async def keep(_: None) -> None: ...

        def begin() -> asyncio.Task[None]:
            return asyncio.ensure_future(
                start_together(
                    member.services, member.agreements, (0, 1), "average", work, keep, name="an average", is_held=True
                )
            )

        started = begin()
        await yields(5)
        started.cancel()
        await yields(5)
        assert not started.done(), "the leader may already have decided to start"
        member.agreements.is_interrupted = lambda: True
        again = begin()
        await yields(5)
        again.cancel()
        await yields(5)
        assert again.cancelled()
        member.services.cancel_tasks()
        await asyncio.wait([started])


def test_what_main_waits_for_in_a_start_is_said() -> None:
    async def main(world: World) -> None:
        model = torch.nn.Linear(1, 1)
        async with AverageAllPolicy(model, torch.optim.SGD(model.parameters()), average_every=1) as policy:
            if world.rank == 1:
                await asyncio.get_running_loop().create_future()
            await policy.step()

    with pytest.raises(ad.DeadlockError, match=r"main of rank 0: averaging of policy .*: the other ranks, in "):
        simulate(main, ranks=2).value()


# -- starts that are given up before this rank has come ----------------------------------------------------------------


def test_start_that_waits_for_a_late_rank_delays_no_other_start() -> None:
    """Regression: rank 1 finished its first start before the second, for which rank 2 waited a minute."""

    async def main(world: World) -> float:
        if world.rank == 0:
            await world.sleep(18)
        first = asyncio.ensure_future(world.new_group([0, 1])) if world.rank < 2 else None
        at_s = 0.0
        if world.rank > 0:
            await asyncio.sleep(0)
            assert (await world.new_group([1, 2], timeout_s=2)).ranks == (1, 2)
            at_s = world.time()
        if first is not None:
            assert (await first).ranks == (0, 1)
        return at_s

    _, here_s, there_s = simulate(main, ranks=3, strict=True).results
    assert here_s < 0.01 and there_s < 0.01


@pytest.mark.parametrize("gives_up", [0, 1, 2])
@pytest.mark.parametrize("how", ["cancelled", "time is up"])
def test_start_given_up_among_others_is_the_same_on_all_ranks(gives_up: int, how: str) -> None:
    """Rank 1, which leads or follows, makes three groups of one kind and abandons one of them."""

    async def main(world: World, ranks: list[int]) -> list[str]:
        if world.rank == 0:
            return []
        if world.rank == 2:
            await world.sleep(18)
        starts = []
        for i in range(3):
            timeout_s = 3 if how == "time is up" and i == gives_up and world.rank == 1 else 60
            starts += [asyncio.ensure_future(world.new_group(ranks, timeout_s=timeout_s))]
            await world.safe_point()
        if how == "cancelled" and world.rank == 1:
            starts[gives_up].cancel()
        found = await asyncio.gather(*starts, return_exceptions=True)
        return [group.number if isinstance(group, Group) else type(group).__name__ for group in found]

    for ranks in ([1, 2], [2, 1]):
        _, here, there = simulate(main, ranks, ranks=3, strict=True).results
        assert here.pop(gives_up) == ("CancelledError" if how == "cancelled" else "StartTimeoutError")
        assert there.pop(gives_up) in ("RemoteError", "StartTimeoutError")
        assert here == there and len(set(here)) == 2 and all("." in number for number in here)


async def enter_average_all(world: World) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    async with AverageAllPolicy(model, optimizer, average_every=1, start_timeout_s=8, group=await pair(world)):
        pass


async def enter_mesh(world: World) -> None:
    await ad.new_mesh({"DP": 2}, group=await pair(world), timeout_s=8)


async def pair(world: World) -> Group:
    """Make the group of ranks 1 and 2, before rank 1 waits for rank 0."""
    group = await world.new_group([1, 2])
    if world.rank == 1:
        world.spawn(world.new_group([0, 1]))
        await world.sleep(0.1)
    return group


@pytest.mark.parametrize("start", [enter_average_all, enter_mesh])
def test_start_with_a_group_does_not_wait_for_other_groups_ranks(start: Any) -> None:
    """Regression: the start waited for the other group until it timed out."""

    async def main(world: World) -> float:
        if world.rank == 0:
            await world.sleep(40)
            await world.new_group([0, 1])
            return 0.0
        await start(world)
        return world.time()

    report = simulate(main, ranks=3, strict=True)
    assert max(report.results) < 0.2 and report.virtual_time_s > 40


def test_policy_is_not_reentered_while_an_abandoned_start_waits() -> None:
    """Regression: both starts continued, and the end of the first closed the policy of the second."""

    async def main(world: World) -> list[str]:
        model = torch.nn.Linear(1, 1)
        policy = AsyncSelectiveAveragingPolicy(model, torch.optim.SGD(model.parameters()), average_every=1)
        policy._start_timeout_s = 1
        found = []
        for pause_s in (0, 20):
            await world.sleep(pause_s * world.rank)
            try:
                async with policy:
                    found.append("entered")
                    await world.sleep(40)
                    break
            except ad.AsyncdistError as error:
                found.append(f"{type(error).__name__}: {error}")
                if "StartTimeoutError" in found[-1]:
                    with pytest.raises(
                        ad.BusyError, match="is already being started, by another task or by a cancelled"
                    ):
                        await policy.__aenter__()
        return found

    made, gave_up = late_verdict(main)
    assert made == ["entered"]
    assert gave_up[0].startswith("StartTimeoutError") and "was entered before" in gave_up[1]


def test_a_policy_that_could_not_be_started_may_be_entered_again() -> None:
    async def main(world: World) -> int:
        model = torch.nn.Linear(1, 1)
        policy = AverageAllPolicy(model, torch.optim.SGD(model.parameters()), average_every=1, start_timeout_s=1)
        await world.sleep(3 * world.rank)
        failed_count = 0
        while True:
            try:
                async with policy:
                    assert await policy.step()
                    return failed_count
            except StartTimeoutError:
                failed_count += 1
                await world.sleep(10 - world.time())

    assert simulate(main, ranks=2, strict=True).results == (1, 1)


@pytest.mark.parametrize("moment", range(1, 5))
def test_policy_cancelled_while_leaving_keeps_no_model(moment: int) -> None:
    """Regression: the policy's buffers, twice the model's size, stayed in memory as long as the model."""

    async def main(world: World) -> int:
        model = torch.nn.Linear(1, 1)

        async def train() -> None:
            async with AverageAllPolicy(model, torch.optim.SGD(model.parameters()), average_every=1) as policy:
                await policy.step()
                assert len(world.scratch._kept) == 1
                leaving.set()

        leaving = asyncio.Event()
        training = asyncio.ensure_future(train())
        await leaving.wait()
        await yields(moment - 1)
        training.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await training
        return len(world.scratch._kept)

    assert simulate(main, ranks=2, seed=moment, strict=True).results == (0, 0)


def test_members_stay_in_step_after_a_model_change_in_a_step() -> None:
    """Regression: the other members waited for its next step, and were one step behind from then on."""

    async def main(world: World) -> list[str]:
        model = torch.nn.Linear(2, 2)
        weight, found = model.weight, []
        async with AverageAllPolicy(model, torch.optim.SGD(model.parameters()), average_every=1) as policy:
            for i in range(3):
                is_changed = world.rank == 1 and i == 1
                model.weight = torch.nn.Parameter(torch.zeros(3, 2)) if is_changed else weight
                try:
                    found.append(str(bool(await policy.step())))
                except (ValueError, RemoteError) as error:
                    found.append(type(error).__name__)
        return found

    results = simulate(main, ranks=3, strict=True).results
    assert results[1] == ["True", "ValueError", "True"]
    assert results[0] == results[2] == ["True", "RemoteError", "True"]


def test_members_learn_of_a_timeout_within_a_part_of_a_start() -> None:
    """Regression: a rank abandoned the start halfway, and the others waited for it in their first step forever."""

    async def main(world: World, moment_s: float) -> str:
        told = "averaged"

        async def train() -> None:
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters())
            async with AverageAllPolicy(model, optimizer, average_every=1, start_timeout_s=1) as policy:
                await policy.step()

        training = asyncio.ensure_future(train())
        if world.rank == 1:
            await world.sleep(moment_s)
            time.sleep(20)  # noqa: ASYNC251 - it computes
        try:
            async with asyncio.timeout(100):
                await training
        except ad.AsyncdistError as error:
            told = type(error).__name__
        await world.sleep(200)
        return told

    results = {ad.simulate(main, i * 4e-6, ranks=2, seed=i, strict=True).results for i in range(8)}
    assert ("StartTimeoutError", "ClosedError") in results
