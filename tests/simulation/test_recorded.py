"""Tests the recordings that a simulated population and a real population write."""

from __future__ import annotations

import io
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import asyncdist as ad
from asyncdist.recording.events import Event
from asyncdist.recording.reader import read_recording
from asyncdist.report.summary import summarise
from asyncdist.story import command, last_events
from asyncdist.story.last_events import describe_recording
from asyncdist.waits import WaitId, WaitKind
from protocols import AsyncSelectiveAveragingPolicy


@dataclass(frozen=True, slots=True)
class Word:
    """A message with a word."""


async def train(world: ad.World) -> list[int]:
    model = torch.nn.Linear(2, 2)
    rounds = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, name="mine") as policy:
        for _ in range(20):
            info = await policy.step(float(world.rank))
            if info:
                rounds.append(info.round)
    return rounds


def of_kind(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event.kind == kind]


def test_a_recording_changes_nothing_and_tells_what_happened(tmp_path: Path) -> None:
    plain = ad.simulate(train, ranks=4, seed=3)
    report = ad.simulate(train, ranks=4, seed=3, record=tmp_path)
    assert report.trace_digest == plain.trace_digest
    recording = read_recording(tmp_path)
    ranks = [list(each.events()) for each in recording.ranks]
    assert [each.rank for each in recording.ranks] == [0, 1, 2, 3]
    for rank, events in enumerate(ranks):
        assert [event.get("iteration") for event in of_kind(events, "step")] == list(range(20))
        assert [event.get("value") for event in of_kind(events, "metric")] == [float(rank)] * 4
        assert [event.get("name") for event in of_kind(events, "policy")] == ["mine"]
        assert [event.get("error") for event in of_kind(events, "over")] == [""]
        assert [event.time_s for event in events] == sorted(event.time_s for event in events)
    applied = [event.get("round") for event in of_kind(ranks[0], "applied")]
    assert applied
    assert applied == report.value()
    decided = {event.get("round"): event.get("replacers") for event in of_kind(ranks[0], "decided")}
    assert all(decided[number] == (0,) for number in applied)


def test_recording_many_events_of_one_callback_takes_no_time(tmp_path: Path) -> None:
    """Regression: after a thousand events in one callback, each further event took virtual time."""

    async def main(world: ad.World) -> float:
        channel = world.channel(Word, tag=100, capacity=2000)
        for _ in range(1200):
            if world.rank == 0:
                channel.send_nowait(Word(), dest=1)
            else:
                await channel.receive()
        return world.time()

    plain = ad.simulate(main, ranks=2, seed=0)
    recorded = ad.simulate(main, ranks=2, seed=0, record=tmp_path)
    assert recorded.results == plain.results
    assert recorded.trace_digest == plain.trace_digest


def test_each_message_that_was_received_was_sent(tmp_path: Path) -> None:
    ad.simulate(train, ranks=4, seed=4, record=tmp_path)
    sent: Counter[tuple[int, int, int]] = Counter()
    received: Counter[tuple[int, int, int]] = Counter()
    for each in read_recording(tmp_path).ranks:
        for event in each.events():
            if event.kind == "sent":
                sent[each.rank, event.fields[0], event.fields[1]] += event.fields[2]
            elif event.kind == "received":
                received[event.fields[0], each.rank, event.fields[1]] += event.fields[2]
    assert received
    assert received <= sent


def test_ranks_on_one_loop_have_a_file_each(tmp_path: Path) -> None:
    ad.run_local(train, ranks=2, record=tmp_path)
    recording = read_recording(tmp_path)
    assert [each.rank for each in recording.ranks] == [0, 1]
    assert all(each.header.transport.startswith("local") for each in recording.ranks)
    assert all(of_kind(list(each.events()), "over") for each in recording.ranks)


def test_the_error_that_ends_a_rank_is_written_down(tmp_path: Path) -> None:
    async def fail(world: ad.World) -> None:
        raise ValueError("of the user's")

    with pytest.raises(ValueError, match="of the user's"):
        ad.run_local(fail, ranks=1, record=tmp_path)
    events = list(read_recording(tmp_path).ranks[0].events())
    assert of_kind(events, "over")[0].get("error") == "ValueError: of the user's"


async def wait_for_a_word(world: ad.World) -> None:
    words = world.channel(Word, tag=100)
    if world.rank == 0:
        await words.receive()
    else:
        await world.sleep(1.0)
        await words.send(Word(), 0)


def test_a_wait_for_a_message_is_recorded_with_its_identity(tmp_path: Path) -> None:
    """Regression: the encoder refused the wait in the middle of a block."""
    ad.simulate(wait_for_a_word, ranks=2, seed=1, record=tmp_path)
    waits = [event for event in read_recording(tmp_path).ranks[0].events() if event.kind == "waited"]
    (long,) = (event.wait for event in waits if event.get("seconds") > 0.9)
    assert long == WaitId(WaitKind.MESSAGE, 100, name="Word")


async def send_on_another_tag(world: ad.World) -> None:
    words = world.channel(Word, tag=100 + world.rank)
    if world.rank == 1:
        await words.send(Word(), 0)
    if world.rank < 2:
        await words.receive()


def test_a_story_names_missing_messages_and_each_ranks_end(tmp_path: Path) -> None:
    with pytest.raises(ad.DeadlockError):
        ad.simulate(send_on_another_tag, ranks=3, seed=1, record=tmp_path)
    title, *lines = describe_recording(str(tmp_path)).splitlines()
    assert "3 ranks, recorded for" in title
    assert "  1 message of rank 1 on tag 101 never reached rank 0" in lines
    assert "  rank 2 has returned from main" in lines
    ended = [line for line in lines if " before the job's last event" in line]
    assert len(ended) == 2 and all(": its recording ends before main does; its last" in line for line in ended)
    assert [" Word, tag 10" in line for line in lines if "last waited" in line] == [True] * 2


def test_a_story_printed_during_the_job_is_kept_once_per_host(tmp_path: Path) -> None:
    """The rank that has printed the report records it, together with other ranks whose loops run."""

    async def stand_still(world: ad.World) -> None:
        for what in ("nothing moves", "the job is aborted"):
            world.services.events.record("told", f"{what}; job 1\n  rank 0 waits for rank 1")
        raise ValueError("interrupted")

    with pytest.raises(ValueError, match="interrupted"):
        ad.run_local(stand_still, ranks=2, record=tmp_path)
    _, *lines = describe_recording(str(tmp_path)).splitlines()
    assert [line.partition(" before the end: ")[2] for line in lines[:4]] == [
        "nothing moves; job 1",
        "",
        "the job is aborted; job 1",
        "",
    ]
    assert lines[1] == lines[3] == "    rank 0 waits for rank 1"
    assert "told" not in "".join(lines[4:])


def test_of_several_recorded_jobs_the_story_of_one_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        ad.simulate(train, ranks=2, seed=seed, record=tmp_path)
    assert command.run(str(tmp_path)) == 2
    job = re.findall(r"--job (\w+)", capsys.readouterr().err)[0]
    assert command.run(str(tmp_path), job) == 0
    assert capsys.readouterr().out.startswith(f"job {job}: ")
    assert command.run(None, job) == 2
    assert "--job needs the folder of a recording" in capsys.readouterr().err


def test_a_story_is_told_where_its_letters_are_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ad.simulate(train, ranks=1, seed=1, record=tmp_path)
    monkeypatch.setattr(last_events, "seconds_in_words", lambda seconds: "\u4e00 second")
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert command.run(str(tmp_path)) == 0
    assert b"recorded for \\u4e00 second" in out.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_long_error_is_cut_to_its_first_and_last_line(tmp_path: Path) -> None:
    """A DataLoader's worker sends such an error: its message contains a traceback, which filled the screen."""

    async def fail(world: ad.World) -> None:
        raise ValueError("Caught KeyError in worker 0.\nOriginal Traceback:\n  File 'data.py', line 3\nKeyError: 'x'\n")

    with pytest.raises(ValueError, match="Caught KeyError"):
        ad.run_local(fail, ranks=1, record=tmp_path)
    line = describe_recording(str(tmp_path)).splitlines()[1]
    assert "rank 0: " in line and "ValueError: Caught KeyError in worker 0. ... KeyError: 'x'; " in line


def test_the_story_of_a_recording_says_what_a_rank_had_come_to(tmp_path: Path) -> None:
    ad.simulate(train, ranks=4, seed=3, record=tmp_path)
    path = next(each.path for each in read_recording(tmp_path).ranks if each.rank == 1)
    path.write_bytes(path.read_bytes()[:-600])  # as after SIGKILL
    lines = describe_recording(str(tmp_path)).splitlines()
    assert [line.split()[:4] for line in lines if "ranks " in line] == [["ranks", "0,", "2,", "3"]]
    assert [line for line in lines if line.startswith("  rank 1: ")]
    steps = sum(event.kind == "step" for event in read_recording(tmp_path).ranks[1].events())
    assert f"    {steps} steps or more: steps of its last second may not be recorded" in lines


async def receive_before_and_after_a_kill(world: ad.World) -> None:
    words = world.channel(Word, tag=100)
    if world.rank == 0:
        for _ in range(3):
            await words.send(Word(), 1)
    elif not world.incarnation:
        for _ in range(3):
            await words.receive()
    await world.sleep(4.0)


def test_messages_received_before_a_restart_are_not_lost(tmp_path: Path) -> None:
    """Regression: a story compared all sent messages with those that the restarted process had received."""
    faults = [ad.Kill(1, at_s=2.0), ad.Restart(1, at_s=3.0)]
    ad.simulate(receive_before_and_after_a_kill, ranks=2, seed=1, record=tmp_path, faults=faults)
    recording = read_recording(tmp_path)
    assert [each.incarnation for each in recording.ranks if each.rank == 1] == [0, 1]
    assert "never reached" not in describe_recording(str(tmp_path))
    assert summarise(recording).messages.lost(range(2)) == []
