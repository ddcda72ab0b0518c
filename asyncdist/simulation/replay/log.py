"""What one rank of a recorded run saw, in the order in which a replay has to show it again."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

from asyncdist import tags
from asyncdist.recording.events import BEFORE_WORLD, Event
from asyncdist.recording.reader import RecordingError
from asyncdist.waits import WaitId, WaitKind

#: Events that a replay must repeat, field by field.
DECISIONS: Final = frozenset(
    {
        *("policy", "metric", "role", "applied", "abandoned", "heard", "decided", "frozen", "ended"),
        *("coordinator", "closed", "weights", "lost"),
    }
)
#: A message, by its source and tag.
Key: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class Sight:
    """Something that comes to a rank from outside: a message, a time that is over, a loss.

    Attributes:
        turn: of the safe point, if it was within one.
        woken_count: how many waits had ended by then since the last safe point began.
        sent_count: how many messages the rank had sent by then since that.
        time_s: when it was, on the clock of the rank.
        begun_count: how many waits had begun by then since that; 0 where the record does not tell it.
    """

    turn: int
    woken_count: int
    sent_count: int
    time_s: float
    begun_count: int = field(default=0, kw_only=True)
    counts: ClassVar[bool] = True  #: Whether a clock reading tells its place by it.

    def is_beside(self, other: Sight) -> bool:
        """Whether no wait ended and no message was sent between the two."""
        return (self.woken_count, self.sent_count) == (other.woken_count, other.sent_count)


@dataclass(slots=True)
class Taken(Sight):
    """One pass took up messages together, with nothing sent between them; or a task took one by itself.

    Attributes:
        keys: their sources and tags.
    """

    keys: list[Key]


@dataclass(slots=True)
class TakenByTask(Taken):
    """A task took a message by itself, between two of its awaits; in a replay it may do so a little earlier.

    Attributes:
        late_for: the task that wanted to take it in the replay when that was not there yet; None for none.
    """

    late_for: asyncio.Task[Any] | None = None
    counts: ClassVar[bool] = False


@dataclass(slots=True)
class Passed(Sight):
    """A deadline has passed for the task that waited for this."""

    what: WaitId


@dataclass(slots=True)
class Fired(Sight):
    """A timer of the runtime has fired."""

    what: WaitId


@dataclass(slots=True)
class Lost(Sight):
    """A rank was seen to be lost."""

    rank: int


#: The wait of a task that continues after a collective that has failed.
FAILED: Final = WaitId(WaitKind.COLLECTIVE_FAILURE)


@dataclass(slots=True)
class Left(Sight):
    """A task went on after a collective that had failed, or that MPI had carried by itself.

    Attributes:
        what: :data:`FAILED`, or a wait that :func:`end_of_collective` returns.
    """

    what: WaitId


def end_of_collective(tag: int) -> WaitId:
    """Return the wait of a task that continues after a collective of the group with this tag."""
    return WaitId(WaitKind.COLLECTIVE_END, tag)


@dataclass(slots=True)
class Reading:
    """What the clock said.

    Attributes:
        seconds: that.
        seen_count: how many sights that count came before.
        number: how many times the clock had been read before.
    """

    seconds: float
    seen_count: int
    number: int


@dataclass(slots=True)
class SafePoint:
    """A safe point of the user's code.

    Attributes:
        woken_count, sent_count: as of sights; when it began.
        sights: what the rank saw within it.
        turn_count: the passes and yields that it made.
        has_ended: whether that is recorded.
        time_s: when it began.
    """

    woken_count: int = 0
    sent_count: int = 0
    sights: deque[Sight] = field(default_factory=deque)
    turn_count: int = 2
    has_ended: bool = False
    time_s: float = 0.0


Entry: TypeAlias = Sight | SafePoint


@dataclass(slots=True)
class RankLog:
    """Holds what a rank saw and did.

    Attributes:
        entries: what it saw, oldest first.
        early: messages that it received before its world was open.
        clock: for each line of code that has asked, what the clock said.
        decisions: what it did, by kind: its tasks may have done this in another order.
        tags: those of messages that it received.
        is_over: whether the end of its main is recorded.
        error: with which main ended; "" where it returned.
        is_native: see :func:`log_of`.
        results: of each group's tag, what MPI's reductions came to: so many bytes, and these, or b"" if too many.
        measured: numbers that follow from nothing but timing, by what they are.
        tells_sleeps: whether it tells when asyncio's timers fired.
        tells_collectives: whether it tells of all collectives that have ended when a task went on after them.
    """

    entries: deque[Entry] = field(default_factory=deque)
    early: Counter[Key] = field(default_factory=Counter)
    clock: defaultdict[int, deque[Reading]] = field(default_factory=lambda: defaultdict(deque))
    decisions: defaultdict[str, deque[Event]] = field(default_factory=lambda: defaultdict(deque))
    tags: set[int] = field(default_factory=set)
    is_over: bool = False
    error: str = ""
    is_native: bool = False
    tells_sleeps: bool = False
    tells_collectives: bool = False
    results: defaultdict[int, deque[tuple[int, bytes]]] = field(default_factory=lambda: defaultdict(deque))
    measured: defaultdict[WaitId, deque[int]] = field(default_factory=lambda: defaultdict(deque))

    def is_without_messages(self, tag: int | None) -> bool:
        """Whether collectives on that tag were carried by MPI: the record has no messages of theirs, and none waits."""
        return tag is not None and _is_of_collectives(tag) and tag not in self.tags

    @property
    def decision_count(self) -> int:
        """How many are left."""
        return sum(map(len, self.decisions.values()))


def log_of(
    events: Iterable[Event],
    sent_before_count: int = 0,
    *,
    is_native: bool = False,
    tells_sleeps: bool = False,
    tells_collectives: bool = False,
) -> RankLog:
    """Read a rank's events.

    Args:
        events: as they were recorded, up to where a signal has ended the rank.
        sent_before_count: how many messages the rank sent before its world was open.
        is_native: whether the backend carried collectives by itself: what a replay sends for them does not count.
        tells_sleeps, tells_collectives: see :class:`RankLog`.
    """
    events = list(events)
    log = RankLog(is_native=is_native, tells_sleeps=tells_sleeps, tells_collectives=tells_collectives)
    tells_ends = is_native and any(event.kind == "collective" for event in events)
    reader = _Reader(log, sent_before_count, tells_ends=tells_ends)
    for event in events:
        reader.read(event)
    return log


class _Reader:
    """Fills a log, event by event.

    Args:
        log: the log.
        sent_before_count: how many messages the rank sent before its world was open.
        tells_ends: whether the record tells the ends of collectives, so that their messages do not count.
    """

    def __init__(self, log: RankLog, sent_before_count: int, *, tells_ends: bool) -> None:
        self._log = log
        self._tells_ends = tells_ends
        self._sights: deque[Any] = log.entries  # of the safe point that is under way, if one is
        self._point: SafePoint | None = None
        self._last_pass = -1
        self._sent_count = -sent_before_count
        self._seen_count = self._reading_count = 0

    def read(self, event: Event) -> None:
        """Put down what an event tells."""
        log = self._log
        match event.kind, event.fields:
            case "safe_point", (bool(has_ended), int(turn_count), *_):
                self._read_safe_point(event, has_ended, turn_count)
            case "received", (int(source), int(tag), int(), int(number), *_):
                if not (self._tells_ends and _is_of_collectives(tag)):  # a replay may send others for these
                    self._read_message(event, number, (source, tag))
            case "sent", (int(), int(tag), *_):
                self._last_pass = -1  # what the pass takes up after this may answer it
                self._sent_count += not (log.is_native and _is_of_collectives(tag))
            case "deadline" | "timer" | "failed" | "collective" | "lost", _:
                self._sights.append(_seen(event, self._sent_count))
                self._seen_count += 1
            case "clock", (float(seconds), int(line)):
                log.clock[line].append(Reading(seconds, self._seen_count, self._reading_count))
                self._reading_count += 1
            case "reduced", (int(tag), int(nbytes), str(text)):
                result = bytes.fromhex(text)
                if result and len(result) != nbytes:
                    raise RecordingError(f"a recorded result of a reduction has {len(result)} bytes, not {nbytes}")
                log.results[tag].append((nbytes, result))
            case "measured", (_, int(value)):
                log.measured[event.wait].append(value)
            case "over", (str(text),):
                log.is_over, log.error = True, text
        if event.kind in DECISIONS:
            log.decisions[event.kind].append(event)

    def _read_safe_point(self, event: Event, has_ended: bool, turn_count: int) -> None:
        point = self._point
        if point is None or not has_ended:  # where nothing was seen in it, its beginning is not written down
            point = SafePoint(event.get("woken") or 0, self._sent_count, time_s=event.time_s)
            self._log.entries.append(point)
            self._sent_count = 0
        if has_ended:
            point.turn_count, point.has_ended = turn_count, True
        self._point = None if has_ended else point
        self._sights = self._log.entries if has_ended else point.sights

    def _read_message(self, event: Event, number: int, key: Key) -> None:
        """Put down a message, which the pass of this number took up; below 0 none did."""
        self._log.tags.add(key[1])
        if number == BEFORE_WORLD:
            self._log.early[key] += 1
            return
        sights = self._sights
        if number >= 0 and sights and type(sights[-1]) is Taken and number == self._last_pass:
            sights[-1].keys.append(key)
        else:
            kind = Taken if number >= 0 else TakenByTask
            turn, woken_count, begun_count = (int(event.get(name) or 0) for name in ("turn", "woken", "begun"))
            at = (turn, woken_count, self._sent_count, event.time_s)
            sights.append(kind(*at, [key], begun_count=begun_count))
            self._seen_count += number >= 0
        self._last_pass = number


def _seen(event: Event, sent_count: int) -> Sight:
    """Return what a rank saw that is no message: the end of a wait, a failure, or the loss of a rank."""
    turn, woken_count = int(event.get("turn") or 0), int(event.get("woken") or 0)
    at = (turn, woken_count, sent_count, event.time_s)
    match event.kind:
        case "deadline":
            return Passed(*at, event.wait)
        case "timer":
            return Fired(*at, event.wait, begun_count=int(event.get("begun") or 0))
        case "failed":
            return Left(*at, FAILED)
        case "collective":
            return Left(*at, end_of_collective(int(event.get("tag") or 0)))
        case _:
            return Lost(*at, int(event.get("rank") or 0))


def _is_of_collectives(tag: int) -> bool:
    return tags.COLLECTIVE_FIRST <= tag <= tags.COLLECTIVE_LAST
