"""Tests when a replayed task leaves a collective that no recorded message describes, such as one of MPI."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncdist as ad
from asyncdist.recording.events import Event
from asyncdist.recording.reader import RankRecording, read_recording
from asyncdist.simulation import DivergenceError, replay, simulate, transport as sim_transport
from asyncdist.simulation.replay.input_checks import PATIENCE_S
from asyncdist.tags import COLLECTIVE_FIRST
from simulation.edited_records import Word, keep_events, with_fields


async def is_left_by_a_barrier(world: ad.World, places: list[str]) -> None:
    """On rank 0, a task receives a word while main is in a barrier."""
    channel, place = world.channel(Word, tag=40), "before"

    async def listen() -> None:
        await channel.receive()
        places.append(place)

    if world.rank == 0:
        listener = asyncio.create_task(listen())
        await ad.barrier()
        place = "after"
        await listener
        return
    if world.rank == 1:
        await channel.send(Word(1), 0)
    await world.sleep(0.05 * world.rank)
    await ad.barrier()


def record_as_mpi_does(main: Callable[..., Coroutine[Any, Any, None]], folder: Path, *args: object) -> RankRecording:
    """Record a run without messages of collectives; return the record of rank 0."""
    native = dataclasses.replace(sim_transport._CAPABILITIES, native_collectives=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim_transport, "_CAPABILITIES", native)
        simulate(main, *args, ranks=3, seed=1, record=folder)
    ranks = read_recording(folder).ranks
    for each in ranks:
        keep_events(each, lambda event: event.kind not in ("sent", "received") or event.get("tag") != COLLECTIVE_FIRST)
    return ranks[0]


@pytest.mark.parametrize(
    ("order", "woken_counts", "expected"),
    [
        (("received", "collective"), (1, 2), "before"),  # as in the recording
        (("collective", "received"), (1, 1), "after"),  # the listener has not continued yet
        (("collective", "received"), (1, 2), "after"),
    ],
)
def test_main_leaves_a_collective_of_mpi_when_it_did(
    tmp_path: Path, order: tuple[str, ...], woken_counts: tuple[int, ...], expected: str
) -> None:
    places: list[str] = []
    of_rank_0 = record_as_mpi_does(is_left_by_a_barrier, tmp_path, places)
    events = list(of_rank_0.events())
    found: dict[str, Event] = {}
    for event in events:
        if event.kind == "collective" or event.get("tag") == 40:
            found.setdefault(event.kind, event)
    at = events.index(found["received"])
    named = [(found[kind], {"woken": count}) for kind, count in zip(order, woken_counts, strict=True)]
    moved = [with_fields(event, **fields)._replace(time_s=found["received"].time_s) for event, fields in named]
    before, after = events[:at], [event for event in events[at:] if event not in found.values()]
    keep_events(of_rank_0, lambda event: False, *before, *moved, *after)
    replay(is_left_by_a_barrier, places, recording=read_recording(tmp_path))
    assert places == ["before", expected]


def test_records_without_ends_of_collectives_are_replayed(tmp_path: Path) -> None:
    """Recordings of earlier versions have no such ends."""
    places: list[str] = []
    of_rank_0 = record_as_mpi_does(is_left_by_a_barrier, tmp_path, places)
    keep_events(of_rank_0, lambda event: event.kind != "collective")
    replay(is_left_by_a_barrier, places, recording=read_recording(tmp_path))
    assert len(places) == 2


def test_messages_for_a_collective_of_mpi_need_not_repeat(tmp_path: Path) -> None:
    """The shares of a large reduction in rank order are such messages: a replay sends different ones."""
    places: list[str] = []
    of_rank_0 = record_as_mpi_does(is_left_by_a_barrier, tmp_path, places)
    events = list(of_rank_0.events())
    at = next(i for i, event in enumerate(events) if event.kind == "received" and event.get("tag") == 40)
    share = with_fields(events[at], tag=COLLECTIVE_FIRST + 3, source=2)
    keep_events(of_rank_0, lambda event: False, *events[:at], share, *events[at:])
    replay(is_left_by_a_barrier, places, recording=read_recording(tmp_path))
    assert places == ["before", "before"]


async def hears_after_a_broadcast(world: ad.World, order: list[str], rank_2_is_late: bool) -> None:
    """Rank 0 is in a broadcast while one of its tasks waits for two words, of which the second arrives later."""
    channel = world.channel(Word, tag=40)
    if world.rank == 0:

        async def listen() -> None:
            for _ in range(2):
                await channel.receive()
                order.append("word")

        listener = asyncio.create_task(listen())
        await ad.broadcast(torch.zeros(3), root=1)
        order.append("broadcast")
        await listener
        return
    loop: Any = asyncio.get_running_loop()
    await loop.be_busy(1.0 if rank_2_is_late and world.rank == 2 else 0.01)
    if world.rank == 2:
        await channel.send(Word(2), 0)
        await ad.broadcast(torch.zeros(3), root=1)
        return
    await loop.be_busy(0.1)
    await ad.broadcast(torch.zeros(3), root=1)
    await loop.be_busy(0.1)
    await channel.send(Word(1), 0)


def test_a_task_leaves_a_collective_by_messages_as_recorded(tmp_path: Path) -> None:
    """Messages show when the collective ended, but not when the task continued, some steps later."""
    order: list[str] = []
    simulate(hears_after_a_broadcast, order, False, ranks=3, seed=1, record=tmp_path)
    replay(hears_after_a_broadcast, order, True, recording=read_recording(tmp_path))
    assert order == ["word", "broadcast", "word"] * 2


async def gives_up_a_barrier(world: ad.World, order: list[str], others_are_late: bool) -> None:
    if world.rank:
        loop: Any = asyncio.get_running_loop()
        await loop.be_busy(1.0 if others_are_late else 0.0)
        await ad.barrier()
        return
    try:
        async with asyncio.timeout(0.1):
            await ad.barrier()
        order.append("left")
    except TimeoutError:
        order.append("given up")


def test_a_collective_that_a_task_never_left_is_not_left(tmp_path: Path) -> None:
    order: list[str] = []
    record_as_mpi_does(gives_up_a_barrier, tmp_path, order, True)
    replay(gives_up_a_barrier, order, False, recording=read_recording(tmp_path))
    assert order == ["given up"] * 2


async def adds(world: ad.World, sums: list[float], count: int, bias: float = 0.0) -> None:
    """Add up numbers of all ranks, and report the sum as a policy reports a metric."""
    total = await ad.all_reduce(torch.full((count,), 0.1 * (world.rank + 1) + bias))
    if world.rank == 0:
        sums.append(total[0].item())
        world.services.events.add("metric", 0, 0, total[0].item())


def test_a_sum_of_floating_numbers_is_what_mpi_made_of_them(tmp_path: Path) -> None:
    """MPI adds them in its own order, which rounds differently."""
    sums: list[float] = []
    of_rank_0 = record_as_mpi_does(adds, tmp_path, sums, 2)
    made = torch.full((2,), 0.75)

    def as_made(event: Event) -> Event:
        if event.kind == "metric":
            return event._replace(fields=(0, 0, 0.75))
        return event._replace(fields=(event.get("tag"), 8, made.numpy().tobytes().hex()))

    events = list(of_rank_0.events())
    assert [event.get("nbytes") for event in events if event.kind == "reduced"] == [8]
    changed = [as_made(event) if event.kind in ("reduced", "metric") else event for event in events]
    keep_events(of_rank_0, lambda event: False, *changed)
    replay(adds, sums, 2, recording=read_recording(tmp_path))
    assert sums[0] == pytest.approx(0.6) and sums[1:] == [0.75]
    with pytest.raises(DivergenceError, match="an all_reduce of 8 bytes next, but the replay reduces 12"):
        replay(adds, sums, 3, recording=read_recording(tmp_path))


def test_a_difference_may_be_mpis_order_of_additions(tmp_path: Path) -> None:
    of_rank_0 = record_as_mpi_does(adds, tmp_path, [], 1000)
    [(nbytes, result)] = [event.fields[1:] for event in of_rank_0.events() if event.kind == "reduced"]
    assert (nbytes, result) == (4000, ""), (
        "the whole value must not be recorded, as it would dominate the size of the file"
    )
    assert replay(adds, [], 1000, recording=read_recording(tmp_path)).decision_count == 1
    with pytest.raises(
        DivergenceError, match=r"but the replay has .* 4000 bytes .* in an order that a replay cannot repeat"
    ):
        replay(adds, [], 1000, 0.5, recording=read_recording(tmp_path))


async def is_left_beside_a_sleep(world: ad.World, order: list[str]) -> None:
    async def sleep() -> None:
        await asyncio.sleep(0.06)
        order.append("slept")

    if world.rank == 0:
        sleeper = asyncio.create_task(sleep())
        await ad.barrier()
        order.append("left")
        await sleeper
    else:
        await world.sleep(0.05 * world.rank)
        await ad.barrier()


def test_a_task_leaves_a_collective_before_a_sleeper_wakes(tmp_path: Path) -> None:
    """The timer has fired, but the end of the collective had woken its task before; no task continued in between."""
    order: list[str] = []
    of_rank_0 = record_as_mpi_does(is_left_beside_a_sleep, tmp_path, order)
    assert order == ["slept", "left"]
    events = list(of_rank_0.events())
    timer = next(event for event in events if event.kind == "timer")
    left = next(event for event in events if event.kind == "collective")
    events.remove(left)
    at = events.index(timer) + 1
    events.insert(at, with_fields(left, woken=timer.get("woken"))._replace(time_s=timer.time_s))
    keep_events(of_rank_0, lambda event: False, *events)
    replay(is_left_beside_a_sleep, order, recording=read_recording(tmp_path))
    assert order[2:] == ["left", "slept"]


async def hears_after_a_barrier(world: ad.World, places: list[str]) -> None:
    """Rank 1 sends to rank 0 after a barrier, which rank 0 leaves later."""
    channel, place = world.channel(Word, tag=40), "before"

    async def listen() -> None:
        await channel.receive()
        places.append(place)

    if world.rank == 0:
        listener = asyncio.create_task(listen())
        await asyncio.sleep(0)
    await ad.barrier()
    if world.rank == 0:
        place = "after"
        await listener
    elif world.rank == 1:
        await world.sleep(0.01)
        await channel.send(Word(1), 0)


def test_a_rank_needed_in_a_collective_is_not_held_back(tmp_path: Path) -> None:
    """Regression: the rank waited for a message that the others send after the collective."""
    places: list[str] = []
    of_rank_0 = record_as_mpi_does(hears_after_a_barrier, tmp_path, places)
    events = list(of_rank_0.events())
    word = next(event for event in events if event.kind == "received" and event.get("tag") == 40)
    left = next(event for event in events if event.kind == "collective")
    events.remove(word)
    events.insert(events.index(left), with_fields(word, woken=left.get("woken"))._replace(time_s=left.time_s))
    keep_events(of_rank_0, lambda event: False, *events)
    replayed = replay(hears_after_a_barrier, places, recording=read_recording(tmp_path))
    assert places == ["after", "after"]
    assert replayed.report.virtual_time_s < PATIENCE_S
