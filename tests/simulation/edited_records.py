"""Edits the events of recorded simulations, to make recordings that otherwise only real runs produce."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from asyncdist.recording.events import KINDS, Event
from asyncdist.recording.reader import RankRecording, Recording, read_recording
from asyncdist.recording.writer import RecordOptions, RecordWriter
from asyncdist.simulation import Kill, simulate


@dataclasses.dataclass(frozen=True)
class Word:
    number: int


def record_with_a_kill(main: Callable[..., Coroutine[Any, Any, Any]], folder: Path, *args: object) -> Recording:
    """Record three ranks; the record of rank 2, which is killed, ends with its first safe point."""
    simulate(main, *args, ranks=3, seed=1, record=folder, faults=(Kill(2, at_s=1.0),))
    killed, is_early = read_recording(folder).ranks[2], True

    def wanted(event: Event) -> bool:
        nonlocal is_early
        was_early, is_early = is_early, is_early and event.kind != "safe_point"
        return was_early

    keep_events(killed, wanted)
    return read_recording(folder)


def keep_events(each: RankRecording, wanted: Callable[[Event], bool], *more: Event) -> None:
    """Write a rank's recording again, with only these of its events, and additional ones."""
    kept = [event for event in each.events() if wanted(event)]
    to = RecordWriter(RecordOptions(each.path.parent, replaces=True), lambda: each.header.clock_s, each.rank)
    to.open(raw_header(each))
    for event in (*kept, *more):
        to.add(*event)
    to.close()


def raw_header(each: RankRecording) -> dict[str, Any]:
    """Return the whole header of a file, unchanged."""
    header: dict[str, Any] = msgspec.msgpack.decode(each.path.read_bytes()[: each.header_nbytes])
    return header


def edit_headers(folder: Path, change: Callable[[dict[str, Any]], object]) -> Recording:
    """Change the headers of a recording, and read the recording."""
    for each in read_recording(folder).ranks:
        header, rest = raw_header(each), each.path.read_bytes()[each.header_nbytes :]
        change(header)
        each.path.write_bytes(msgspec.msgpack.encode(header) + rest)
    return read_recording(folder)


def tell_no_sleeps(folder: Path) -> Recording:
    """Mark a recording as one without asyncio's timers, like that of ranks that share a loop."""
    return edit_headers(folder, lambda header: header.update(tells_sleeps=False))


def with_fields(event: Event, **fields: int) -> Event:
    """Return the event with some fields replaced."""
    named = zip(KINDS[event.kind], event.fields, strict=True)
    return event._replace(fields=tuple(fields.get(name, value) for name, value in named))
