"""Tests which waiting ranks are reported as deadlocked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

import asyncdist as ad
from asyncdist.runtime.story.collecting import Activity, collect
from asyncdist.story.facts import RankStory
from asyncdist.story.formatting import stuck_ranks


@dataclass(frozen=True, slots=True)
class Note:
    number: int


Work = Callable[[ad.World, "ad.Channel[Note]"], Coroutine[Any, Any, None]]


async def receives(world: ad.World, channel: ad.Channel[Note]) -> None:
    await channel.receive()


async def meets(world: ad.World, channel: ad.Channel[Note]) -> None:
    await ad.barrier()


async def receives_with_a_timeout(world: ad.World, channel: ad.Channel[Note]) -> None:
    await channel.receive(timeout_s=1e9)


async def receives_and_sends_later(world: ad.World, channel: ad.Channel[Note]) -> None:
    async def later() -> None:
        await world.sleep(1e9)
        await channel.send(Note(1), 1 - world.rank)

    task = asyncio.create_task(later())
    try:
        await channel.receive()
    finally:
        task.cancel()


async def awaits_a_task_of_the_user(world: ad.World, channel: ad.Channel[Note]) -> None:
    await asyncio.gather(receives(world, channel), receives(world, channel))


async def receives_behind_many_tasks(world: ad.World, channel: ad.Channel[Note]) -> None:
    tasks = [world.spawn(receives(world, channel)) for _ in range(20)]
    tasks.append(world.spawn(world.sleep(1e9), name="the last one of them"))
    try:
        await channel.receive()
    finally:
        for task in tasks:
            task.cancel()


@pytest.mark.parametrize(
    ("work", "is_deadlock"),
    [
        (receives, True),
        (meets, False),  # both ranks are in the barrier, in the first turn after they have entered it
        (awaits_a_task_of_the_user, True),
        (receives_with_a_timeout, False),
        (receives_and_sends_later, False),
        (receives_behind_many_tasks, False),
    ],
)
def test_a_job_that_may_continue_is_not_called_deadlocked(work: Work, is_deadlock: bool) -> None:
    """Regression: waits with a timeout, and tasks that world.spawn had not started, were not considered."""
    stories: dict[int, RankStory] = {}

    async def main(world: ad.World) -> None:
        task, activity = asyncio.current_task(), Activity(world)
        assert task is not None

        def collect_story() -> None:
            stories[world.rank] = collect(world, task, activity)
            if len(stories) == 2:
                for each in working:
                    each.cancel()

        working.add(task)
        asyncio.get_running_loop().call_later(0 if work is meets else 0.1, collect_story)
        with contextlib.suppress(asyncio.CancelledError):
            await work(world, world.channel(Note, tag=100))
        working.discard(task)
        task.uncancel()

    working: set[asyncio.Task[Any]] = set()
    ad.run_local(main, ranks=2)
    assert len(stories) == 2
    assert bool(stuck_ranks(stories)) == is_deadlock
