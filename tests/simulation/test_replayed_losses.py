"""Tests replays of jobs that lost a rank: who waits for it, whose sends fail, and when a rank notices."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

import asyncdist as ad
from asyncdist.recording.reader import read_recording
from asyncdist.simulation import (
    DivergenceError,
    Kill,
    Link,
    Network,
    replay,
    simulate,
)
from asyncdist.tags import COLLECTIVE_FIRST
from asyncdist.waits import A_CONDITION
from simulation.edited_records import Word, keep_events, record_with_a_kill, with_fields


async def talks_after_a_kill(world: ad.World, word_count: int, killed_word_count: int) -> int:
    """Send words from rank 0 to rank 1; after the first word, rank 1 waits for a word of rank 2, which is killed."""
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


def test_waiting_for_a_killed_rank_is_not_a_difference(tmp_path: Path) -> None:
    """Waiting for a rank that waits for the killed rank is not a difference either."""
    recording = record_with_a_kill(talks_after_a_kill, tmp_path, 2, 1)
    assert not any(event.kind == "sent" for event in recording.ranks[2].events()), (
        "the record of rank 2 must end before its first send"
    )
    replayed = replay(talks_after_a_kill, 2, 0, recording=recording)
    assert replayed.cut_ranks == (2,)
    assert replayed.report.results == (None, None, None), (
        "rank 0 waits for rank 2, and rank 1 for rank 0, so no rank may end"
    )


@pytest.mark.parametrize("ends_at_safe_point", [True, False])
def test_a_safe_point_waits_for_one_that_waits_for_a_killed_rank(tmp_path: Path, ends_at_safe_point: bool) -> None:
    """That rank's record ended before it sent the needed message: it stands at a safe point, or waits for a message."""
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


def test_a_missing_message_of_a_living_rank_is_a_difference(
    tmp_path: Path,
) -> None:
    """The difference is reported although another rank was killed."""
    recording = record_with_a_kill(talks_after_a_kill, tmp_path, 2, 1)
    with pytest.raises(DivergenceError, match=r"rank 1, .*rank 0 on tag 40 .*none arrives"):
        replay(talks_after_a_kill, 1, 1, recording=recording)


def test_a_safe_point_waits_for_missing_messages_alone(tmp_path: Path) -> None:
    """One recorded pass delivered both messages; the killed rank's message is there again, the other is not."""

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
    with pytest.raises(DivergenceError, match=r"rank 0, .*ranks 1, 2 on .*tag 40 .*none arrives"):
        replay(main, 1, recording=recording)


def test_collectives_without_messages_wait_for_a_killed_rank(tmp_path: Path) -> None:
    """The collectives of MPI have no recorded messages."""

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
    results = replayed.report.results[:2]  # the replay ends when the last main ends, whose result is not kept
    assert "lost" in results and "sent" not in results


def how_a_send_ends(channel: ad.Channel[Word], dest: int) -> str:
    try:
        channel.send_nowait(Word(1), dest)
    except ad.RankLostError:
        return "lost"
    return "sent"


def test_a_message_to_a_lost_rank_is_refused_as_recorded(tmp_path: Path) -> None:
    """The sender does not wait for the message."""
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


def test_a_send_fails_by_a_loss_after_the_last_safe_point(tmp_path: Path) -> None:
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


def test_a_waiting_send_fails_by_the_recorded_loss(tmp_path: Path) -> None:
    """Regression: in a replay the message is there at once, so the task continued as if it had been sent."""
    found: list[str] = []

    async def main(world: ad.World) -> None:
        channel = world.channel(Word, tag=40)
        if world.rank == 1:
            loop: Any = asyncio.get_running_loop()
            await loop.be_busy(1000.0)
            return
        try:
            await channel.send(Word(1), 1)
            found.append("sent")
        except ad.RankLostError:
            found.append("lost")
        await world.sleep(0.1)

    network = Network(eager_nbytes=0)  # the message waits for the receiver
    simulate(main, ranks=2, seed=1, record=tmp_path, network=network, faults=(Kill(1, at_s=0.05),))
    replay(main, recording=read_recording(tmp_path))
    assert found == ["lost"] * 2


def test_a_loss_is_seen_after_as_many_waits_as_it_was(tmp_path: Path) -> None:
    """A task that is woken by the message before it finds the other rank alive, as in the recorded run."""
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


def test_a_killed_rank_gets_no_message_that_it_never_saw(tmp_path: Path) -> None:
    """Its record has no message on that tag, because it was killed before one arrived."""
    ends: list[str] = []

    async def main(world: ad.World) -> None:
        channel = world.channel(Word, tag=40)
        if world.rank == 1:
            await channel.send(Word(1), 0)
            return
        await asyncio.sleep(0.05)
        try:
            await channel.receive(timeout_s=0.01)
            ends.append("received")
        except TimeoutError:
            ends.append("timeout")
        await channel.receive()

    simulate(main, ranks=2, seed=1, record=tmp_path, network=Network(links={(1, 0): Link(latency_s=0.5)}))
    of_rank_0 = read_recording(tmp_path).ranks[0]
    events = list(of_rank_0.events())
    last = next(i for i, event in enumerate(events) if event.kind == "received" and event.get("tag") == 40)
    keep_events(of_rank_0, lambda event: False, *events[:last])
    replay(main, recording=read_recording(tmp_path))
    assert ends == ["timeout", "timeout"]


def test_a_receive_from_a_lost_rank_fails_while_main_waits(tmp_path: Path) -> None:
    """Main waits for something else meanwhile."""
    order: list[str] = []

    async def main(world: ad.World) -> None:
        engine = world.services.engine
        if world.rank:
            await world.safe_point()
            await asyncio.sleep(1000.0 * (world.rank - 1))
            return

        async def listen() -> None:
            with pytest.raises(ad.RankLostError):
                await engine.wait(engine.transport.irecv(bytearray(8), 2, 7500), A_CONDITION)
            order.append("failed")

        listener = asyncio.create_task(listen())
        await asyncio.sleep(2.0)
        order.append("slept")
        await listener

    recording = record_with_a_kill(main, tmp_path)
    assert order == ["failed", "slept"]
    replay(main, recording=recording)
    assert order == ["failed", "slept"] * 2


async def is_left_by_a_collective(world: ad.World, places: list[str]) -> None:
    """On rank 0, a task receives a word while main is in a collective, which ends with the loss of rank 2."""
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
        (("received", "lost", "failed"), (1, 1, 2), "before"),  # as in the recording
        (("lost", "received", "failed"), (1, 1, 2), "before"),
        (("lost", "received", "failed"), (1, 1, 1), "after"),  # the task has not continued yet
        (("lost", "failed", "received"), (1, 1, 2), "after"),
    ],
)
def test_main_leaves_a_collective_that_fails_when_it_did(
    tmp_path: Path, order: tuple[str, ...], woken_counts: tuple[int, ...], expected: str
) -> None:
    """A loss ends the collective. Messages that take time in the replay arrived before or after it."""
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


def test_a_loss_seen_while_looking_for_a_message_comes_first(tmp_path: Path) -> None:
    """The task continues with the message before any other task continues because of the loss."""

    async def main(world: ad.World) -> list[str]:
        channel, engine, order = world.channel(Word, tag=40), world.services.engine, []
        if world.rank == 1:
            await channel.send(Word(1), 0)
            await world.sleep(2.0)
        elif world.rank == 2:
            await world.safe_point()
            await world.sleep(2.0)
        else:

            async def note_loss() -> None:
                await engine.until(lambda: 2 in world.services.gone)
                order.append("loss")

            noting = asyncio.create_task(note_loss())
            await world.sleep(0.05)
            await engine.send(b"x", 1, 41)
            await channel.receive()
            order.append("message")
            await world.safe_point()
            await noting
        return order

    of_rank_0 = record_with_a_kill(main, tmp_path).ranks[0]
    events = list(of_rank_0.events())
    word = next(event for event in events if event.kind == "received" and event.get("tag") == 40)
    loss = next(event for event in events if event.kind == "lost")
    kept = [event for event in events if event not in (word, loss)]
    at = next(place for place, event in enumerate(kept) if event.kind == "sent" and event.get("tag") == 41) + 1
    seen = with_fields(loss, turn=2, woken=1), with_fields(word, **{"pass": -1}, turn=2, woken=1, begun=2)
    moved = [each._replace(time_s=kept[at].time_s) for each in seen]
    keep_events(of_rank_0, lambda _: False, *kept[:at], *moved, *kept[at:])
    assert replay(main, recording=read_recording(tmp_path)).report.results[0] == ["message", "loss"]
