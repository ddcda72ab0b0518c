"""Tests that memory stays constant over equal phases of a run in which everything is opened and closed repeatedly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import asyncdist as ad
from asyncdist.messaging import demultiplexer
from asyncdist.recording import events
from asyncdist.simulation import fabric, simulate
from simulation import long_run
from simulation.long_run import Note


@pytest.mark.slow
def test_memory_is_flat_over_equal_phases_with_kills_and_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    # full early; `./tools/soak --memory` runs long enough to fill larger ones
    monkeypatch.setattr(events, "CAPACITY", 8)
    monkeypatch.setattr(fabric, "_SHARED_COUNT_MAX", 8)
    looks = long_run.run(16, train_s=1.0)
    long_run.check_flat(looks)
    assert looks[-1].steps > 1000


def test_a_run_that_grows_is_told() -> None:
    flat = [long_run.Look(phase, phase * 100, 10_000, 1000, 1 << 28) for phase in range(16)]
    long_run.check_flat(flat)
    grown = [replace(look, objects=look.objects + 60 * look.phase) for look in flat]
    with pytest.raises(AssertionError, match="objects have grown from 1,570 to 1,810 in 4 phases of a run of 16"):
        long_run.check_flat(grown)


def test_only_the_newest_closed_channels_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demultiplexer, "ANSWERING_COUNT_MAX", 2)
    answered: Counter[str] = Counter()

    async def main(world: ad.World) -> dict[str, int]:
        names = ["first", "second", "third"]
        for scope, name in enumerate(names):
            channel = world.services.open_channel(Note, tag=7001, scope=scope, name=name)
            await channel.send(Note(name), 0)
            await channel.receive()
            channel.close(afterwards=lambda envelope: answered.update([envelope.message.text]))
        for scope, name in enumerate(names):
            sender = world.services.open_channel(Note, tag=7001, scope=10 + scope, peer_scope=scope, name="late")
            await sender.send(Note(name), 0)
            sender.close()
        await world.progress()
        counts = world.services.channel_totals()
        assert counts.sent_count - counts.received_count == 1, "the counts of closed channels must be kept"
        return counts.dropped

    dropped = simulate(main, ranks=1).value()
    assert answered == {"second": 1, "third": 1}
    assert dropped == {"closed scope": 1}
