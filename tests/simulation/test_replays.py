"""Replays of what simulated ranks have written down, and what is told where they cannot be the same."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncdist as ad
from asyncdist.recording.events import Event
from asyncdist.recording.reader import RecordingError, read_recording
from asyncdist.simulation import (
    DivergenceError,
    Kill,
    Link,
    Network,
    Restart,
    Uniform,
    replay,
    replay_script,
    simulate,
    transport as sim_transport,
)
from asyncdist.tags import COLLECTIVE_FIRST, CONTROL
from asyncdist.transports.base import Capabilities
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, OneSidedSelectiveAveragingPolicy
from simulation.edited_records import Word, keep_events, record_with_a_kill, with_fields

STEPS = 30


async def train(world: ad.World, bias: float = 0.0, steps: int = STEPS) -> float:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=3, replacement_ratio=0.5) as policy:
        for _ in range(steps):
            with torch.no_grad():
                model.weight += torch.randn(2, 3)
            await policy.step(random.random() + bias * world.rank)
    return model.weight.sum().item()


@pytest.mark.parametrize("seed", range(6))
def test_ranks_decide_as_they_did_and_have_the_same_weights(tmp_path: Path, seed: int) -> None:
    recorded = simulate(train, ranks=4, seed=seed, record=tmp_path)
    replayed = replay(train, recording=read_recording(tmp_path))
    assert replayed.report.results == recorded.results
    assert replayed.decision_count > 50
    assert (replayed.left_count, replayed.cut_ranks) == (0, ())


@pytest.mark.parametrize("seed", [4, 7, 10])
def test_sends_that_do_not_complete_at_once_are_no_waits_that_count(tmp_path: Path, seed: int) -> None:
    """In a replay all do, so that what came after such a wait came too late, and a stop waited for a rank's end."""
    recorded = simulate(train, ranks=4, seed=seed, record=tmp_path, network=Network(eager_nbytes=0))
    assert replay(train, recording=read_recording(tmp_path)).report.results == recorded.results


async def waits_a_little(world: ad.World) -> float:
    """Receive from the rank before up to a time that is over now and then, after a start to which rank 1 is late."""
    if world.rank == 1:
        await world.sleep(2.5)
    channel, heard = world.channel(Word, tag=40), 0.0
    model = torch.nn.Linear(3, 2)
    async with AverageAllPolicy(model, torch.optim.SGD(model.parameters()), average_every=3) as policy:
        for number in range(20):
            await world.sleep(random.random() / 100)
            await channel.send(Word(number), (world.rank + 1) % world.size)
            with contextlib.suppress(TimeoutError):
                heard += (await channel.receive(timeout_s=0.004)).message.number * (number + 1)
            await policy.step()
    await ad.barrier()
    return heard


@pytest.mark.parametrize("seed", range(4))
def test_timers_and_deadlines_are_over_when_they_were(tmp_path: Path, seed: int) -> None:
    recorded = simulate(waits_a_little, ranks=4, seed=seed, record=tmp_path)
    recording = read_recording(tmp_path)
    kinds = Counter(event.kind for each in recording.ranks for event in each.events())
    assert kinds["timer"] >= 3, "the others were told twice that rank 1 was late"
    assert kinds["deadline"] >= 3
    assert replay(waits_a_little, recording=recording).report.results == recorded.results


def test_the_first_difference_is_told(tmp_path: Path) -> None:
    simulate(train, ranks=3, seed=1, record=tmp_path)
    recording = read_recording(tmp_path)
    with pytest.raises(
        DivergenceError, match=r"rank [12], .*: recorded was \[metric policy 0, iteration 2, value .*now"
    ):
        replay(train, 1e-3, recording=recording)
    with pytest.raises(DivergenceError, match=r"rank [012], after iteration 27: recorded was .* and now"):
        replay(train, 0.0, STEPS - 2, recording=recording)
    with pytest.raises(DivergenceError, match=r"rank [012]"):
        replay(train, 0.0, STEPS + 6, recording=recording)


def test_a_recording_that_was_cut_short_ends_and_says_so(tmp_path: Path) -> None:
    simulate(train, ranks=4, seed=1, record=tmp_path)
    cut = read_recording(tmp_path).ranks[2]
    half = sum(1 for _ in cut.events()) // 2
    count = 0

    def is_early(event: Event) -> bool:
        nonlocal count
        count += 1
        return count < half

    keep_events(cut, is_early)
    replayed = replay(train, recording=read_recording(tmp_path))
    assert replayed.cut_ranks == (2,)
    assert replayed.decision_count > 30 and replayed.left_count > 10


@pytest.mark.parametrize("kept_count", [2, 8, 14])
def test_a_rank_does_nothing_more_where_its_record_ends(tmp_path: Path, kept_count: int) -> None:
    """Its timers fired for ever, so that it asked again and again who is late, and others took that for its answers."""
    simulate(waits_a_little, ranks=4, seed=1, record=tmp_path)
    cut = read_recording(tmp_path).ranks[0]
    kept = [event for _, event in zip(range(kept_count), cut.events(), strict=False)]
    keep_events(cut, lambda event: False, *kept)
    replayed = replay(waits_a_little, recording=read_recording(tmp_path))
    assert replayed.cut_ranks == (0,)
    assert replayed.report.virtual_time_s < 1000.0


def test_what_does_not_come_any_more_is_told_in_words(tmp_path: Path) -> None:
    async def waits(world: ad.World, speaker: int) -> None:
        channel = world.channel(Word, tag=40)
        if world.rank == speaker:
            await channel.send(Word(1), 1 - speaker)
        if world.rank == 1:
            await channel.receive()

    simulate(waits, 0, ranks=2, seed=0, record=tmp_path)
    with pytest.raises(
        DivergenceError,
        match="rank 1, before its first step: in the recorded run a message of rank 0 on tag 40 came next; now none",
    ):
        replay(waits, 5, recording=read_recording(tmp_path))


def test_one_who_fails_fails_again(tmp_path: Path) -> None:
    async def fails(world: ad.World) -> float:
        result = await train(world)
        if world.rank == 1:
            raise ValueError("as planned")
        await asyncio.sleep(0)
        return result

    simulate(fails, ranks=3, seed=2, record=tmp_path)
    replayed = replay(fails, recording=read_recording(tmp_path))
    assert str(replayed.report.results[1]) == "as planned"
    with pytest.raises(DivergenceError, match=r"rank 1, .*its main ended with \[ValueError: as planned\]"):
        replay(train, recording=read_recording(tmp_path))


def test_a_metric_that_is_no_number_is_so_again(tmp_path: Path) -> None:
    simulate(train, float("nan"), ranks=3, seed=1, record=tmp_path)
    assert replay(train, float("nan"), recording=read_recording(tmp_path)).decision_count > 50


async def talks_after_a_kill(world: ad.World, word_count: int, killed_word_count: int) -> int:
    """Rank 0 sends words to rank 1, after the first of which it waits for one of rank 2, which is to be killed."""
    channel = world.channel(Word, tag=40)
    if world.rank == 0:
        for number in range(word_count):
            await channel.send(Word(number), 1)
            if number == 0:
                await channel.receive()
    elif world.rank == 1:
        for _ in range(2):
            await channel.receive()
    else:
        await world.safe_point()
        for number in range(killed_word_count):
            await channel.send(Word(number), 0)
        await asyncio.sleep(1000.0)
    return world.rank


def test_ranks_that_need_a_killed_one_or_wait_for_such_a_rank_are_no_difference(tmp_path: Path) -> None:
    recording = record_with_a_kill(talks_after_a_kill, tmp_path, 2, 1)
    assert not any(event.kind == "sent" for event in recording.ranks[2].events()), "its record was torn before that"
    replayed = replay(talks_after_a_kill, 2, 0, recording=recording)
    assert replayed.cut_ranks == (2,)
    assert replayed.report.results == (None, None, None), "rank 0 needs rank 2, and rank 1 needs rank 0"


@pytest.mark.parametrize("ends_at_safe_point", [True, False])
def test_a_safe_point_waits_for_a_rank_that_waits_for_a_killed_one(tmp_path: Path, ends_at_safe_point: bool) -> None:
    """Its record ended before it sent what that rank needs: it stands at a safe point, or waits for a message."""
    is_recorded = False

    async def main(world: ad.World) -> None:
        channel = world.channel(Word, tag=40)
        if world.rank == 0:
            await channel.send((await channel.receive()).message, 1)
        elif world.rank == 1:
            time.sleep(0.5)  # noqa: ASYNC251 - it computes
            await world.safe_point()
            assert channel.receive_nowait() is not None
        else:
            await world.safe_point()
            if ends_at_safe_point:
                await world.safe_point()
            elif is_recorded:
                await channel.receive()
            await channel.send(Word(1), 0)
            await asyncio.sleep(1000.0)

    recording = record_with_a_kill(main, tmp_path)
    is_recorded = True
    assert replay(main, recording=recording).report.results == (None, None, None)


def test_a_message_of_a_living_rank_that_does_not_come_is_a_difference_although_another_was_killed(
    tmp_path: Path,
) -> None:
    recording = record_with_a_kill(talks_after_a_kill, tmp_path, 2, 1)
    with pytest.raises(DivergenceError, match=r"rank 1, .*a message of rank 0 on tag 40 came next; now none comes"):
        replay(talks_after_a_kill, 1, 1, recording=recording)


def test_a_safe_point_waits_for_what_has_not_come_and_not_for_what_came_of_a_killed_rank(tmp_path: Path) -> None:
    """It saw both in one pass; that of the killed rank is there again, and that of the living one is not."""

    async def main(world: ad.World, speaker_count: int) -> None:
        channel = world.channel(Word, tag=40)
        await world.safe_point()
        if world.rank in range(3 - speaker_count, 3):
            await channel.send(Word(world.rank), 0)
        if world.rank == 0:
            time.sleep(0.5)  # noqa: ASYNC251 - it computes
        await world.safe_point()
        if world.rank == 2:
            await asyncio.sleep(1000.0)

    recording = record_with_a_kill(main, tmp_path, 2)
    senders = {event.get("source") for event in recording.ranks[0].events() if event.get("tag") == 40}
    assert senders == {1, 2}
    with pytest.raises(DivergenceError, match=r"rank 0, .*messages of ranks 1, 2 on .*tag 40 came next; now none"):
        replay(main, 1, recording=recording)


def test_collectives_without_recorded_messages_wait_for_a_killed_rank(tmp_path: Path) -> None:
    """As those of MPI."""

    async def main(world: ad.World) -> None:
        await world.safe_point()
        await world.safe_point()
        await ad.barrier()
        if world.rank == 2:
            await asyncio.sleep(1000.0)
        await world.safe_point()

    for each in record_with_a_kill(main, tmp_path).ranks:
        keep_events(each, lambda event: event.kind not in ("sent", "received") or event.get("tag") != COLLECTIVE_FIRST)
    replayed = replay(main, recording=read_recording(tmp_path))
    assert replayed.cut_ranks == (2,)
    assert replayed.report.results == (None, None, None)


async def adds(world: ad.World) -> float:
    total = torch.zeros(1)
    for _ in range(3):
        total += await ad.all_reduce(torch.tensor([float(world.rank)]))
    await ad.barrier()
    return total.item()


def test_collectives_that_used_no_recorded_message_take_place(tmp_path: Path) -> None:
    """As those of MPI, which carries them by itself."""
    simulate(adds, ranks=4, seed=1, record=tmp_path)
    for each in read_recording(tmp_path).ranks:
        keep_events(each, lambda event: event.kind not in ("sent", "received") or event.get("tag") != COLLECTIVE_FIRST)
    assert replay(adds, recording=read_recording(tmp_path)).report.results == (18.0,) * 4


def test_ranks_that_come_to_their_end_in_another_order_return_what_they_did(tmp_path: Path) -> None:
    simulate(adds, ranks=4, seed=1, record=tmp_path)
    for each in read_recording(tmp_path).ranks:
        ended = False

        def wanted(event: Event) -> bool:
            nonlocal ended
            ended = ended or event.kind == "over"
            return event.kind != "received" or not ended

        never = Event(each.header["clock_s"] + 100.0, "received", ((each.rank + 1) % 4, CONTROL, 53, 1, 0))
        keep_events(each, wanted, never)
    assert replay(adds, recording=read_recording(tmp_path)).report.results == (18.0,) * 4


def test_what_was_received_before_the_world_was_open_is_not_mistaken_for_what_came_later(tmp_path: Path) -> None:
    """As for the agreements with which a real job starts, and a simulated one does not."""

    async def main(world: ad.World) -> list[float]:
        totals = []
        for number in range(4):
            if world.rank == 0:
                await world.sleep(0.1)  # then it finds the others' messages there and takes them one after the other
            totals.append((await ad.all_reduce(torch.tensor([float(world.rank + number)]))).item())
            await world.safe_point()
        return totals

    recorded = simulate(main, ranks=4, seed=1, record=tmp_path)
    for each in read_recording(tmp_path).ranks:
        others = [rank for rank in range(4) if rank != each.rank]
        early = [Event(each.header["clock_s"], "received", (rank, COLLECTIVE_FIRST, 64, -2, 0)) for rank in others]
        keep_events(each, lambda event: True, *early)
    assert replay(main, recording=read_recording(tmp_path)).report.results == recorded.results


def test_groups_of_mpi_are_agreed_on_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its members agree once more, with messages, before it makes a communicator."""

    async def groups(world: ad.World) -> float:
        if world.rank != 1:
            await ad.new_group([0, 2])
        return await train(world)

    native = functools.partial(dataclasses.replace, native_collectives=True)
    monkeypatch.setattr(sim_transport, "Capabilities", lambda **named: native(Capabilities(**named)))
    recorded = simulate(groups, ranks=3, seed=1, record=tmp_path)
    monkeypatch.undo()
    assert replay(groups, recording=read_recording(tmp_path)).report.results == recorded.results


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    simulate(train, ranks=3, seed=3, record=tmp_path / "lacks")
    next((tmp_path / "lacks").glob("*-rank00001.record")).unlink()
    with pytest.raises(RecordingError, match="rank 1 has no recording; a replay needs those of all ranks"):
        replay(train, recording=read_recording(tmp_path / "lacks"))
    faults = (Kill(rank=2, at_s=0.005), Restart(rank=2, at_s=0.02))
    simulate(train, ranks=3, seed=3, record=tmp_path / "again", faults=faults, until_s=60.0)
    with pytest.raises(RecordingError, match="rank 2 was started again"):
        replay(train, recording=read_recording(tmp_path / "again"))


def test_a_policy_that_reads_memory_of_others_is_refused(tmp_path: Path) -> None:
    async def main(world: ad.World) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with OneSidedSelectiveAveragingPolicy(model, optimizer, average_every=3) as policy:
            for _ in range(6):
                await policy.step(float(world.rank))

    simulate(main, ranks=2, seed=1, record=tmp_path)
    recording = read_recording(tmp_path)
    replay(main, recording=recording)  # by messages
    recording.ranks[0].header["capabilities"]["one_sided_reads"] = True
    with pytest.raises(RecordingError, match="OneSidedSelectiveAveragingPolicy read each other's memory"):
        replay(main, recording=recording)


SCRIPT = """
import asyncdist as ad

async def main(world):
    await ad.barrier()
    if BROKEN and world.rank == 1:
        raise ValueError("broken")
    return world.rank

ad.run(main)
"""


def test_a_script_that_has_changed_is_named_and_a_mended_one_need_not_go_the_same_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "failing.py"
    script.write_text(SCRIPT.replace("BROKEN", "True"))
    namespace: dict[str, object] = {"__name__": "elsewhere"}
    source = script.read_text().replace("ad.run(main)", "")
    exec(compile(source, str(script), "exec"), namespace)
    simulate(namespace["main"], ranks=2, seed=0, record=tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="broken"):
        replay_script(tmp_path / "run", script)
    assert "is another script than the recorded one, or has changed since" in caplog.text
    script.write_text(SCRIPT.replace("BROKEN", "False"))
    assert replay_script(tmp_path / "run", script) is None, "mended"
    with pytest.raises(RecordingError, match=r"'nowhere.py', the script of the recorded run, is not there"):
        replay_script(tmp_path / "run", "nowhere.py")


def test_a_send_to_a_lost_rank_fails_as_it_did(tmp_path: Path) -> None:
    async def main(world: ad.World) -> str:
        channel = world.channel(Word, tag=40)
        while 2 not in world.services.gone:
            await world.safe_point()
            await world.sleep(0.01)
        try:
            await channel.send(Word(1), 2)
        except ad.RankLostError:
            return "lost"
        return "sent"

    recorded = simulate(main, ranks=3, seed=1, record=tmp_path, faults=(Kill(2, at_s=0.05),))
    assert recorded.results[:2] == ("lost", "lost")
    replayed = replay(main, recording=read_recording(tmp_path))
    results = replayed.report.results[:2]  # it is over when the last main ends, whose result is not kept
    assert "lost" in results and "sent" not in results


def how_a_send_ends(channel: ad.Channel[Word], dest: int) -> str:
    try:
        channel.send_nowait(Word(1), dest)
    except ad.RankLostError:
        return "lost"
    return "sent"


def test_a_message_to_a_lost_rank_that_is_not_waited_for_is_refused_as_it_was(tmp_path: Path) -> None:
    found: list[str] = []

    async def main(world: ad.World) -> None:
        channel = world.channel(Word, tag=40)
        while 1 not in world.services.gone:
            await world.safe_point()
            await world.sleep(0.01)
        found.append(how_a_send_ends(channel, 1))

    simulate(main, ranks=2, seed=1, record=tmp_path, faults=(Kill(1, at_s=0.05),))
    assert found == ["lost"]
    replay(main, recording=read_recording(tmp_path))
    assert found == ["lost"] * 2


def test_a_send_fails_as_it_did_by_a_loss_that_came_after_the_last_safe_point(tmp_path: Path) -> None:
    found: list[str] = []

    async def main(world: ad.World) -> None:
        channel = world.channel(Word, tag=40)
        if world.rank == 1:
            await asyncio.sleep(1000.0)
        await world.safe_point()
        loop: Any = asyncio.get_running_loop()
        await loop.be_busy(0.2)
        found.append(how_a_send_ends(channel, 1))
        await world.sleep(0.1)

    simulate(main, ranks=2, seed=1, record=tmp_path, faults=(Kill(1, at_s=0.05),))
    of_rank_0 = read_recording(tmp_path).ranks[0]
    events = list(of_rank_0.events())
    loss = next(event for event in events if event.kind == "lost")
    at = next(place for place, event in enumerate(events) if event.kind == "sent")
    rest = [event for event in events[at:] if event is not loss]
    keep_events(of_rank_0, lambda event: False, *events[:at], loss._replace(time_s=events[at].time_s), *rest)
    replay(main, recording=read_recording(tmp_path))
    assert found == ["lost"] * 2


def test_a_message_that_came_right_before_a_safe_point_wakes_its_task_within_that(tmp_path: Path) -> None:
    """In the replay it is there before, while user code still waits for something else."""
    places: list[str] = []

    async def main(world: ad.World) -> None:
        channel, place = world.channel(Word, tag=40), "before"

        async def listen() -> None:
            await channel.receive()
            places.append(place)

        if world.rank == 0:
            await channel.send(Word(1), 1)
            return
        listener = asyncio.create_task(listen())
        await world.sleep(0.1)
        loop: Any = asyncio.get_running_loop()
        await loop.be_busy(0.2)  # the message arrives
        world.services.engine.poll()
        place = "within"
        await world.safe_point()
        await listener

    simulate(main, ranks=2, seed=1, record=tmp_path, network=Network(link=Link(latency_s=Uniform(0.2, 0.2))))
    assert places == ["within"]
    replay(main, recording=read_recording(tmp_path))
    assert places == ["within"] * 2


def test_a_loss_is_seen_after_as_many_waits_as_it_was(tmp_path: Path) -> None:
    """A task that is woken by the message before it finds the other rank alive, as it did."""
    found: list[bool] = []

    async def main(world: ad.World) -> None:
        channel = world.channel(Word, tag=40)
        if world.rank == 0:
            for _ in range(2):
                await channel.receive()
                found.append(2 in world.services.gone)
            while 2 not in world.services.gone:
                await world.sleep(0.01)
        elif world.rank == 1:
            await channel.send(Word(1), 0)
            await world.sleep(0.01)
            await channel.send(Word(2), 0)
        else:
            await asyncio.sleep(1000.0)

    simulate(main, ranks=3, seed=1, record=tmp_path, faults=(Kill(2, at_s=0.05),))
    assert found == [False, False]
    replay(main, recording=read_recording(tmp_path))
    assert found == [False, False] * 2


async def is_left_by_a_collective(world: ad.World, places: list[str]) -> None:
    """On rank 0 a task receives a word while main is in a collective, which the loss of rank 2 ends."""
    channel, place = world.channel(Word, tag=40), "before"

    async def listen() -> None:
        await channel.receive()
        places.append(place)

    if world.rank == 0:
        listener = asyncio.create_task(listen())
        with contextlib.suppress(ad.RankLostError):
            await ad.barrier()
        place = "after"
        await listener
    elif world.rank == 1:
        await world.sleep(0.02)
        await channel.send(Word(1), 0)
        await world.sleep(0.1)
    else:
        await asyncio.sleep(1000.0)


@pytest.mark.parametrize(
    ("order", "woken_counts", "expected"),
    [
        (("received", "lost", "failed"), (1, 1, 2), "before"),  # as it is recorded
        (("lost", "received", "failed"), (1, 1, 2), "before"),
        (("lost", "received", "failed"), (1, 1, 1), "after"),  # the task has not gone on yet
        (("lost", "failed", "received"), (1, 1, 2), "after"),
    ],
)
def test_main_leaves_a_collective_that_fails_when_it_did(
    tmp_path: Path, order: tuple[str, ...], woken_counts: tuple[int, ...], expected: str
) -> None:
    """A loss ends it, and messages that came since then, which take their time in the replay, came first or did not."""
    places: list[str] = []
    simulate(is_left_by_a_collective, places, ranks=3, seed=1, record=tmp_path, faults=(Kill(2, at_s=0.05),))
    of_rank_0 = read_recording(tmp_path).ranks[0]
    events = list(of_rank_0.events())
    found = {event.kind: event for event in events if event.kind in order and event.get("tag") in (None, 40)}
    at = min(events.index(event) for event in found.values())
    named = [(found[kind], {"woken": count}) for kind, count in zip(order, woken_counts, strict=True)]
    moved = [with_fields(event, **fields)._replace(time_s=found["received"].time_s) for event, fields in named]
    before, after = events[:at], [event for event in events[at:] if event not in found.values()]
    keep_events(of_rank_0, lambda event: False, *before, *moved, *after)
    replay(is_left_by_a_collective, places, recording=read_recording(tmp_path))
    assert places == ["before", expected]
