"""Reads one rank's recorded events: the inputs that a replay delivers, and the decisions that it compares.

The records of a job are cut at the signals that ended its ranks, because a replay has no signals. The cut is
consistent: no rank receives a message that was sent after the end of its sender's record (K. M. Chandy and L. Lamport,
Distributed Snapshots: Determining Global States of Distributed Systems, ACM Transactions on Computer Systems 3(1),
1985).
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

from asyncdist import tags
from asyncdist.recording.events import BEFORE_WORLD, Event
from asyncdist.recording.reader import RecordingError
from asyncdist.recording.schema import Conditions
from asyncdist.waits import WaitId, WaitKind

#: Kinds of events that a replay must repeat, field by field.
DECISIONS: Final = frozenset(
    {
        *("policy", "metric", "role", "applied", "abandoned", "heard", "decided", "frozen", "ended"),
        *("coordinator", "closed", "weights", "lost", "contributed"),
    }
)
#: Tags of collectives' messages.
COLLECTIVE_TAGS: Final = range(tags.COLLECTIVE_FIRST, tags.COLLECTIVE_LAST + 1)
#: Errors with which a signal ended the user's ``main``.
_SIGNALS: Final = (f"SystemExit: {128 + signal.SIGTERM}", f"SystemExit: {128 + signal.SIGHUP}", "KeyboardInterrupt")
#: Source and tag of a message.
Key: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class RecordedInput:
    """A recorded input of a rank: a message, the end of a timer or deadline, or the loss of a rank.

    ``woken_count``, ``begun_count`` and ``sent_count`` are the numbers of waits ended, waits begun and messages sent
    since the last safe point began. ``turn`` counts the polling passes and yields of the safe point, and is 0 outside
    safe points. ``time_s`` is on the rank's clock.
    """

    turn: int
    woken_count: int
    sent_count: int
    time_s: float
    begun_count: int = field(default=0, kw_only=True)
    counts: ClassVar[bool] = True  #: Whether ``Reading.seen_count`` counts this kind of input.

    def is_same_point(self, other: RecordedInput) -> bool:
        """Return whether no wait ended and no message was sent between the two inputs."""
        return (self.woken_count, self.sent_count) == (other.woken_count, other.sent_count)


@dataclass(slots=True)
class ReceivedMessages(RecordedInput):
    """Messages that one polling pass received without a send in between. ``keys`` are their sources and tags."""

    keys: list[Key]


@dataclass(slots=True)
class ReceivedByTask(ReceivedMessages):
    """A message that a task received outside a polling pass. In the replay, task ``late_for`` is waiting for it."""

    late_for: asyncio.Task[Any] | None = None
    counts: ClassVar[bool] = False


@dataclass(slots=True)
class DeadlineExpired(RecordedInput):
    """The recorded expiry of a deadline that limited a task's wait."""

    what: WaitId


@dataclass(slots=True)
class TimerFired(RecordedInput):
    """The recorded expiry of one of the runtime's timers."""

    what: WaitId


@dataclass(slots=True)
class RankLost(RecordedInput):
    """The point at which the rank was notified of another rank's loss."""

    rank: int


#: Identity of a task's wait for the failure of a collective.
FAILED: Final = WaitId(WaitKind.COLLECTIVE_FAILURE)


@dataclass(slots=True)
class CollectiveEnd(RecordedInput):
    """The point at which a task continued after a collective that failed (:data:`FAILED`) or that MPI completed."""

    what: WaitId


def end_of_collective(tag: int) -> WaitId:
    """Return the identity of a wait for the end of a collective in the group with this tag."""
    return WaitId(WaitKind.COLLECTIVE_END, tag)


@dataclass(slots=True)
class Reading:
    """A recorded reading of the clock, after ``seen_count`` inputs and ``number`` earlier readings."""

    seconds: float
    seen_count: int
    number: int


@dataclass(slots=True)
class SafePoint:
    """A recorded safe point: a call in which the user's code polled and yielded to other tasks.

    Attributes:
        woken_count, sent_count: Numbers of ended waits and sent messages since the previous safe point.
        inputs: Inputs during the safe point.
        turn_count: Number of polling passes and yields to other tasks.
    """

    woken_count: int = 0
    sent_count: int = 0
    inputs: deque[RecordedInput] = field(default_factory=deque)
    turn_count: int = 2
    has_ended: bool = False
    time_s: float = 0.0


Entry: TypeAlias = RecordedInput | SafePoint


@dataclass(slots=True)
class RankLog:
    """Stores the record of one rank: its inputs and its decisions.

    Attributes:
        early: Number of messages received before the rank's world was open, keyed by source and tag.
        clock: Clock readings, keyed by the line of code that read the clock
            (:func:`~asyncdist.runtime.recording.key_of_reading`).
        decisions: Decisions, keyed by kind. The order across kinds depends on the order of tasks.
        is_over: Whether the end of ``main`` is recorded.
        end_s: Time of the last event, on the rank's clock.
        results: Results of MPI's reductions, keyed by the group's tag: pairs of size in bytes and content. The content
            is b"" if it was too large to record.
        measured: Measured numbers, which depend on timing, keyed by the identity under which they were recorded.
        tells_sleeps: Whether the record says when asyncio's timers fired.
    """

    entries: deque[Entry] = field(default_factory=deque)
    early: Counter[Key] = field(default_factory=Counter)
    clock: defaultdict[int, deque[Reading]] = field(default_factory=lambda: defaultdict(deque))
    decisions: defaultdict[str, deque[Event]] = field(default_factory=lambda: defaultdict(deque))
    tags: set[int] = field(default_factory=set)
    is_over: bool = False
    end_s: float = 0.0
    error: str = ""
    is_native: bool = False
    tells_sleeps: bool = False
    results: defaultdict[int, deque[tuple[int, bytes]]] = field(default_factory=lambda: defaultdict(deque))
    measured: defaultdict[WaitId, deque[int]] = field(default_factory=lambda: defaultdict(deque))

    def is_without_messages(self, tag: int | None) -> bool:
        """Return whether MPI carried out the collectives with this tag, so that their messages are not recorded."""
        return tag is not None and tag in COLLECTIVE_TAGS and tag not in self.tags

    @property
    def decision_count(self) -> int:
        """Number of recorded decisions that the replay has not reached."""
        return sum(map(len, self.decisions.values()))


def log_of(events: Sequence[Event], conditions: Conditions) -> RankLog:
    """Sort the recorded events of a rank into the inputs and the decisions of its record.

    If a signal ended the rank, ``events`` must end at the signal.
    """
    is_native = conditions.capabilities.native_collectives
    log = RankLog(is_native=is_native, tells_sleeps=conditions.tells_sleeps)
    tells_ends = is_native and any(event.kind == "collective" for event in events)
    reader = _Reader(log, conditions.sent_before_count, tells_ends=tells_ends)
    for event in events:
        reader.read(event)
        log.end_s = event.time_s
    return log


class _Reader:
    """Adds events to a RankLog. With ``tells_ends``, the log has the ends of collectives instead of their messages."""

    def __init__(self, log: RankLog, sent_before_count: int, *, tells_ends: bool) -> None:
        self._log = log
        self._tells_ends = tells_ends
        self._inputs: deque[Any] = log.entries  # the inputs of the safe point in progress, otherwise all entries
        self._point: SafePoint | None = None
        self._last_pass = -1
        self._sent_count = -sent_before_count
        self._seen_count = self._reading_count = 0

    def read(self, event: Event) -> None:
        log = self._log
        match event.kind, event.fields:
            case "safe_point", (bool(has_ended), int(turn_count), *_):
                self._read_safe_point(event, has_ended, turn_count)
            case "received", (int(source), int(tag), int(), int(number), *_):
                if not (self._tells_ends and tag in COLLECTIVE_TAGS):  # replayed collectives may send other messages
                    self._read_message(event, number, (source, tag))
            case "sent", (int(), int(tag), *_):
                self._last_pass = -1  # a later message in the same pass may be a reply to this message
                self._sent_count += not (log.is_native and tag in COLLECTIVE_TAGS)
            case "deadline" | "timer" | "failed" | "collective" | "lost", _:
                self._inputs.append(_input_of(event, self._sent_count))
                self._seen_count += 1
            case "clock", (float(seconds), int(line)):
                log.clock[line].append(Reading(seconds, self._seen_count, self._reading_count))
                self._reading_count += 1
            case "reduced", (int(tag), int(nbytes), str(text)):
                result = bytes.fromhex(text)
                if result and len(result) != nbytes:
                    raise RecordingError(
                        f"a recorded result of a reduction must have {nbytes} bytes, got {len(result)}"
                    )
                log.results[tag].append((nbytes, result))
            case "measured", (_, int(value)):
                log.measured[event.wait].append(value)
            case "over", (str(text),):
                log.is_over, log.error = True, text
        if event.kind in DECISIONS:
            log.decisions[event.kind].append(event)

    def _read_safe_point(self, event: Event, has_ended: bool, turn_count: int) -> None:
        point = self._point
        if point is None or not has_ended:  # the beginning of a safe point without inputs is not recorded
            point = SafePoint(event.get("woken") or 0, self._sent_count, time_s=event.time_s)
            self._log.entries.append(point)
            self._sent_count = 0
        if has_ended:
            point.turn_count, point.has_ended = turn_count, True
        self._point = None if has_ended else point
        self._inputs = self._log.entries if has_ended else point.inputs

    def _read_message(self, event: Event, number: int, key: Key) -> None:
        """Add a message received by polling pass ``number``, or by a task if ``number`` is negative."""
        self._log.tags.add(key[1])
        if number == BEFORE_WORLD:
            self._log.early[key] += 1
            return
        inputs = self._inputs
        if number >= 0 and inputs and type(inputs[-1]) is ReceivedMessages and number == self._last_pass:
            inputs[-1].keys.append(key)
        else:
            kind = ReceivedMessages if number >= 0 else ReceivedByTask
            turn, woken_count, begun_count = (int(event.get(name) or 0) for name in ("turn", "woken", "begun"))
            at = (turn, woken_count, self._sent_count, event.time_s)
            inputs.append(kind(*at, [key], begun_count=begun_count))
            self._seen_count += number >= 0
        self._last_pass = number


def _input_of(event: Event, sent_count: int) -> RecordedInput:
    """Convert an event other than a received message to a recorded input."""
    turn, woken_count = int(event.get("turn") or 0), int(event.get("woken") or 0)
    at = (turn, woken_count, sent_count, event.time_s)
    match event.kind:
        case "deadline":
            return DeadlineExpired(*at, event.wait)
        case "timer":
            return TimerFired(*at, event.wait, begun_count=int(event.get("begun") or 0))
        case "failed":
            return CollectiveEnd(*at, FAILED)
        case "collective":
            return CollectiveEnd(*at, end_of_collective(int(event.get("tag") or 0)))
        case _:
            return RankLost(*at, int(event.get("rank") or 0))


def cut_at_signals(records: Mapping[int, Sequence[Event]]) -> dict[int, Sequence[Event]]:
    """Return each rank's events up to a signal that ended the rank, or up to a receive whose send was cut off."""
    ends = {rank: _end(events) for rank, events in records.items()}
    if any(ends[rank] < len(events) for rank, events in records.items()):
        _make_consistent(ends, {rank: _Messages.of(events) for rank, events in records.items()})
    return {rank: events[: ends[rank]] for rank, events in records.items()}


def _end(events: Sequence[Event]) -> int:
    """Return the number of events before a signal, or up to the last step if the signal's exception ended ``main``."""
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
