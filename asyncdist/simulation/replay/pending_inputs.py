"""Stores a replayed rank's recorded inputs and arrived messages, and decides which inputs are due.

An input is a message, the end of a timer or deadline, or the loss of a rank. It is due when the replayed rank has
reached the point at which it was recorded. This point is a turn of a safe point or, between two safe points, the
numbers of waits begun, waits ended and messages sent.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from asyncdist.errors import RankLostError
from asyncdist.runtime.recording import ObservedEngine, key_of_reading
from asyncdist.simulation.processes.event_loop import RankLoop
from asyncdist.simulation.replay.log import (
    COLLECTIVE_TAGS,
    FAILED,
    CollectiveEnd,
    DeadlineExpired,
    Entry,
    Key,
    RankLog,
    ReceivedByTask,
    ReceivedMessages,
    RecordedInput,
    SafePoint,
    TimerFired,
    end_of_collective,
)
from asyncdist.simulation.replay.timers import Timers
from asyncdist.transports.base import ANY_SOURCE
from asyncdist.waits import WaitId


class Mailbox:
    """Queues the messages that have arrived at one replayed rank, by source and tag.

    ``ring`` is called with the tag of each arriving message, and ``listen`` with each lost rank.
    """

    def __init__(self) -> None:
        self.ring: Callable[[int], None] | None = None
        self.listen: Callable[[int], None] | None = None
        self.lost: set[int] = set()
        self._messages: defaultdict[Key, deque[tuple[int, bytes]]] = defaultdict(deque)
        self._numbers = itertools.count()

    def put(self, source: int, tag: int, data: bytes) -> None:
        """Add a message, and call ``ring`` with its tag."""
        self._messages[source, tag].append((next(self._numbers), data))
        if self.ring is not None:
            self.ring(tag)

    def pop(self, key: Key) -> bytes:
        """Remove and return the oldest message with this source and tag."""
        return self._messages[key].popleft()[1]

    def count(self, key: Key) -> int:
        """Return the number of messages with this source and tag."""
        return len(self._messages[key])

    def first(self, source: int, tag: int) -> Key | None:
        """Return the key of the oldest message that matches a receive, or None."""
        if source != ANY_SOURCE:
            return (source, tag) if self._messages[source, tag] else None
        waiting = ((queue[0][0], key) for key, queue in self._messages.items() if key[1] == tag and queue)
        return min(waiting, default=(0, None))[1]

    def lose(self, rank: int) -> None:
        """Record that ``rank`` is lost, and call ``listen``."""
        self.lost.add(rank)
        if self.listen is not None:
            self.listen(rank)


def gone(rank: int) -> RankLostError:
    """Return the error for an operation that waits for a lost rank."""
    return RankLostError(f"rank {rank} is gone: its process has ended", rank=rank)


class PendingInputs:
    """Stores a replayed rank's remaining recorded inputs, and the point that the rank has reached in its record.

    Attributes:
        timers, deadlines: Timers of the rank, and deadlines of its waits.
        engine: Engine of the rank, which counts the ended waits. Not set before the world is open.
        is_open: Whether the rank's world is open. Before that, no input is delivered.
        progress_count: Number of inputs delivered and safe points begun.
        catch_up: Function that delivers all inputs that are due. Its argument is the number of inputs, from the start
            of the record, that must not be deferred.
        seen_count: Number of delivered inputs, without messages that tasks received directly.
        reached_s: Recorded time, on the rank's clock, of the last delivered input or begun safe point.
    """

    engine: ObservedEngine

    def __init__(self, log: RankLog, mailbox: Mailbox, loop: RankLoop) -> None:
        self.log = log
        self.mailbox = mailbox
        self.loop = loop
        self.timers = Timers(loop)
        self.deadlines = Timers(loop)
        self.is_open = False
        self.progress_count = 0
        self.progressed_at_s = self.reached_s = 0.0
        self.catch_up: Callable[[int], None] = lambda _: None
        self.seen_count = 0
        self._point: SafePoint | None = None
        self._points = deque(entry for entry in log.entries if isinstance(entry, SafePoint))  # recorded, not yet begun
        self._turn = 0
        self._sent_count = 0
        self._time_s = 0.0
        self._named = Counter(
            pending.what for pending in _all_of(log) if isinstance(pending, (TimerFired, CollectiveEnd))
        )

    def open(self, engine: ObservedEngine) -> None:
        """Start counting waits and messages, just before the user's ``main`` starts."""
        self.engine = engine
        self._sent_count = engine.woken_count = engine.begun_count = 0
        self.is_open = True

    @property
    def is_done(self) -> bool:
        """Whether the rank's whole record has been replayed."""
        return not self.log.entries and self._point is None

    @property
    def is_in_point(self) -> bool:
        """Whether the rank is in a safe point, a call that polls and yields."""
        return self._point is not None

    def next(self) -> RecordedInput | None:
        """Return the next recorded input, or None if user code must begin or end a safe point first."""
        return next(self.upcoming(), None)

    def next_entry(self) -> Entry | None:
        """Return the next recorded input or safe point, or None at the end of the record."""
        return self.next() or next(iter(self.log.entries), None)

    def upcoming(self) -> Iterator[RecordedInput]:
        """Yield the recorded inputs up to the next safe point, or up to the end of the current turn of a safe point."""
        for pending in self._all_upcoming():
            if isinstance(pending, SafePoint) or (self._point is not None and pending.turn > self._turn):
                return
            yield pending

    def _all_upcoming(self) -> deque[Any]:
        return self.log.entries if self._point is None else self._point.inputs

    def remains_in_record(self, what: WaitId) -> bool:
        """Return whether a timer, or the end of a collective, with this identity remains in the record."""
        return self._named[what] > 0

    def remove(self, pending: RecordedInput) -> None:
        """Remove a recorded input that is being delivered."""
        self._all_upcoming().remove(pending)
        if isinstance(pending, (TimerFired, CollectiveEnd)):
            self._named[pending.what] -= 1
        self.seen_count += pending.counts
        self._note_progress(pending)

    def remove_received_by_task(self, key: Key) -> ReceivedByTask | None:
        """Remove and return the first message with this key that a task received in the record, or None."""
        for pending in self._all_upcoming():
            if isinstance(pending, ReceivedByTask) and pending.keys == [key]:
                self.remove(pending)
                return pending
        return None

    def clear(self) -> None:
        """Drop the rest of the record."""
        self.log.entries.clear()
        self._points.clear()
        self._named.clear()

    def idle_s(self) -> float:
        """Return the recorded seconds from the last delivered input to the next one, or to the end of the record."""
        entry = self.next_entry()
        return (self.log.end_s if entry is None else entry.time_s) - self.reached_s

    def _note_progress(self, entry: Entry) -> None:
        self.progressed_at_s = self.loop.time()
        self.reached_s = max(self.reached_s, entry.time_s)  # a safe point that is not in the record has no time
        self.progress_count += 1

    def is_point_due(self) -> bool:
        """Return whether the rank has ended all waits and sent all messages that were recorded before a safe point."""
        point = self.log.entries[0] if self.log.entries else None
        return not isinstance(point, SafePoint) or (
            point.woken_count <= self.engine.woken_count and point.sent_count <= self._sent_count
        )

    def is_received_at_point(self, pending: RecordedInput) -> bool:
        """Return whether ``main`` must reach its next safe point before this message wakes a task."""
        if self._point is not None or type(pending) is not ReceivedMessages:
            return False
        return bool(self._points) and self._points[0].woken_count <= self.engine.woken_count

    def first_late(self) -> ReceivedByTask | None:
        """Return the first message recorded after the next safe point if a task is already waiting for it, or None."""
        first = next((pending for pending in self.upcoming() if not self.is_received_at_point(pending)), None)
        return first if isinstance(first, ReceivedByTask) and first.late_for is not None else None

    def wakes_one_before_point(self, pending: ReceivedMessages) -> bool:
        """Return whether exactly one wait ended between the next input ``pending`` and the next recorded safe point."""
        if self._point is not None or len(pending.keys) == 1:
            return False
        entry = next(iter(self.log.entries), None)
        return isinstance(entry, SafePoint) and entry.woken_count == self.engine.woken_count + 1

    def collective_end_after(self, pending: RecordedInput) -> tuple[CollectiveEnd, bool] | None:
        """Return the recorded end of a collective that resumed a task before this input resumed another task.

        The second item tells whether this end can be replayed now. Return None if no such end is recorded.
        """
        if type(pending) not in (ReceivedMessages, TimerFired):
            return None
        before: list[RecordedInput] = []
        for other in self.upcoming():
            if other.woken_count != pending.woken_count:
                return None
            if isinstance(other, CollectiveEnd):
                causes = isinstance(pending, ReceivedMessages) and _may_have_caused(pending, other)
                return None if causes else (other, all(map(self.is_possible, before)) and self.is_due(other))
            before.append(other)
        return None

    def has_late_timer_after(self, pending: RecordedInput) -> bool:
        """Return whether a timer must fire before this message wakes a task, but has not been set yet."""
        if type(pending) is not ReceivedMessages:
            return False
        same_point = itertools.takewhile(pending.is_same_point, self.upcoming())
        return any(isinstance(other, TimerFired) and not self.is_possible(other) for other in same_point)

    def begin_point(self) -> int:
        """Begin the next safe point, and return its recorded number of turns (polling passes and yields)."""
        entries = self.log.entries
        point = entries.popleft() if entries else SafePoint()
        assert isinstance(point, SafePoint), f"{point} has to be seen before this safe point"
        if self._points:
            self._points.popleft()
        self._point = point
        self.engine.woken_count = self.engine.begun_count = self._sent_count = 0
        self._note_progress(point)
        return point.turn_count

    def set_turn(self, turn: int) -> None:
        """Set the current turn (polling pass or yield) of the safe point."""
        self._turn = self.engine.turn = turn

    def end_point(self) -> None:
        """End the safe point, so that the inputs recorded after it are next."""
        self._point = None

    def note_sent(self, tag: int) -> None:
        """Count a message sent by the rank."""
        self._sent_count += not (self.log.is_native and tag in COLLECTIVE_TAGS)

    def is_due(self, pending: RecordedInput, ending_count: int = 0) -> bool:
        """Return whether the rank has reached the point at which this input was recorded."""
        if not isinstance(pending, ReceivedMessages) and not self.is_possible(pending):
            return False  # the rank must first set a timer or begin a wait
        return (
            pending.woken_count <= self.engine.woken_count + ending_count
            and pending.begun_count <= self.engine.begun_count
            and pending.sent_count <= self._sent_count
        )

    def is_before_next_begin(self, pending: RecordedInput) -> bool:
        """Return whether this input was recorded before the rank's next wait began."""
        engine = self.engine
        return (
            type(pending) in (ReceivedMessages, TimerFired)
            and pending.woken_count <= engine.woken_count
            and pending.begun_count <= engine.begun_count
        )

    def must_have_arrived(self, pending: RecordedInput, ending_count: int = 0) -> bool:
        """Return whether an input is due, so that it must arrive before the rank continues."""
        return self.is_due(pending, ending_count + isinstance(pending, ReceivedByTask))

    def is_possible(self, pending: RecordedInput) -> bool:
        """Return whether a recorded input can be delivered now: its messages have arrived, or its timer is set."""
        match pending:
            case ReceivedMessages():
                return not self.missing_sources(pending)
            case DeadlineExpired(what=what) | CollectiveEnd(what=what):
                return self.deadlines.has(what)
            case TimerFired(what=what):
                return self.timers.has(what)
            case _:
                return True

    def missing_sources(self, pending: RecordedInput | None) -> set[int]:
        """Return the sources of the recorded messages that have not arrived yet."""
        if not isinstance(pending, ReceivedMessages):
            return set()
        return {key[0] for key, count in self._keys_with(pending).items() if self.mailbox.count(key) < count}

    def _keys_with(self, first: ReceivedMessages) -> Counter[Key]:
        """Count the messages, keyed by source and tag, in this input and in the tasks' direct receives after it."""
        keys = Counter(first.keys)
        for pending in self.upcoming():
            if isinstance(pending, ReceivedByTask) and pending is not first:
                if (
                    pending.sent_count > max(first.sent_count, self._sent_count)
                    or pending.woken_count > first.woken_count + 1
                ):
                    break
                keys.update(pending.keys)
            elif pending is not first:
                break
        return keys

    def seen_before_reading(self) -> int:
        """Return the number of recorded inputs before the next recorded clock reading."""
        firsts = (readings[0] for readings in self.log.clock.values() if readings)
        reading = min(firsts, key=lambda reading: reading.number, default=None)
        return 0 if reading is None else reading.seen_count

    def read_clock(self) -> float:
        """Return the time recorded for the calling line of code, or the virtual time before the world is open."""
        if not self.is_open:
            return self.loop.time()
        readings = self.log.clock[key_of_reading(sys._getframe(1))]
        if readings and readings[0].seen_count > self.seen_count and not self.engine._in_pass:
            # In the recorded run, the rank received more inputs before this reading, and the caller may depend on them.
            self.catch_up(readings[0].seen_count)
        while len(readings) > 1 and readings[0].seen_count < self.seen_count >= readings[1].seen_count:
            readings.popleft()  # a task that ran only in the recorded run made this reading
        if readings and readings[0].seen_count <= self.seen_count:
            self._time_s = readings.popleft().seconds
        return self._time_s


def _may_have_caused(pending: ReceivedMessages, left: CollectiveEnd) -> bool:
    """Return whether these recorded messages may have caused ``left``, the end or failure of a collective."""
    tags_of = [tag for _, tag in pending.keys if tag in COLLECTIVE_TAGS]
    return bool(tags_of) if left.what == FAILED else any(left.what == end_of_collective(tag) for tag in tags_of)


def _all_of(log: RankLog) -> Iterator[RecordedInput]:
    for entry in log.entries:
        yield from entry.inputs if isinstance(entry, SafePoint) else (entry,)
