"""Cuts the records of a job at the signals that ended its ranks, because a replay has no signals.

The cut is consistent: no rank receives a message that was sent after the end of its sender's record (K. M. Chandy and
L. Lamport, Distributed Snapshots: Determining Global States of Distributed Systems, ACM Transactions on Computer
Systems 3(1), 1985).
"""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from asyncdist.recording.events import Event
from asyncdist.simulation.replay.log import Key

#: Errors with which a signal ended the user's ``main``.
_SIGNALS: Final = (f"SystemExit: {128 + signal.SIGTERM}", f"SystemExit: {128 + signal.SIGHUP}", "KeyboardInterrupt")


def cut_at_signals(records: Mapping[int, Sequence[Event]]) -> dict[int, Sequence[Event]]:
    """Return each rank's events up to a signal that ended the rank, or up to a receive whose send was cut off."""
    ends = {rank: _end(events) for rank, events in records.items()}
    if any(ends[rank] < len(events) for rank, events in records.items()):
        _make_consistent(ends, {rank: _Messages.of(events) for rank, events in records.items()})
    return {rank: events[: ends[rank]] for rank, events in records.items()}


def _end(events: Sequence[Event]) -> int:
    """Return the number of events before a signal, or up to the last step if main ended with the signal's exception."""
    end = 0
    for place, event in enumerate(events):
        if event.kind == "interrupted":
            return place
        if event.kind == "over" and str(event.fields[0]).startswith(_SIGNALS):
            return end
        if event.kind == "step":
            end = place + 1
    return len(events)


@dataclass(slots=True)
class _Messages:
    """Indices of the sends and receives in a rank's record.

    ``sent`` is keyed by receiver and tag. The last sends of a killed rank may be missing.
    """

    end: int
    sent: defaultdict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))
    received: list[tuple[int, Key]] = field(default_factory=list)

    @classmethod
    def of(cls, events: Sequence[Event]) -> _Messages:
        found = cls(len(events))
        for place, event in enumerate(events):
            match event.kind, event.fields:
                case "sent", (int(dest), int(tag), *_):
                    found.sent[dest, tag].append(place)
                case "received", (int(source), int(tag), *_):
                    found.received.append((place, (source, tag)))
        return found

    def first_received_after(self, ends: Mapping[int, int], rank: int, messages: Mapping[int, _Messages]) -> int | None:
        """Return the index of the first receive of a message sent after the cut of its source's record, or None."""
        counts: Counter[Key] = Counter()
        for place, (source, tag) in self.received:
            if place >= ends[rank]:
                return None
            number = counts[source, tag]
            counts[source, tag] += 1
            by_source = messages[source]
            sent = by_source.sent[rank, tag]
            sent_at = sent[number] if number < len(sent) else by_source.end
            if ends[source] <= sent_at and ends[source] < by_source.end:
                return place
        return None


def _make_consistent(ends: dict[int, int], messages: Mapping[int, _Messages]) -> None:
    """Shorten records until no rank receives a message that was sent after the end of its source's record."""
    has_changed = True
    while has_changed:
        has_changed = False
        for rank, of_rank in messages.items():
            place = of_rank.first_received_after(ends, rank, messages)
            if place is not None:
                ends[rank], has_changed = place, True
