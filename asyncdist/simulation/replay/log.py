"""What one rank of a recorded run saw, in the order in which a replay has to show it again."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

from asyncdist import tags
from asyncdist.recording.events import Event

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

    what: str


@dataclass(slots=True)
class Fired(Sight):
    """A timer of the runtime has fired.

    Attributes:
        what: its name.
    """

    what: str


@dataclass(slots=True)
class Lost(Sight):
    """A rank was seen to be lost."""

    rank: int


#: What a task waits for that goes on after a collective that has failed.
FAILED: Final = "that a collective has failed"


@dataclass(slots=True)
class Left(Sight):
    """A task went on after a collective that had failed, or that MPI had carried by itself.

    Attributes:
        what: :data:`FAILED`, or what :func:`end_of_collective` says.
    """

    what: str


def end_of_collective(tag: int) -> str:
    """Return what a task waits for that goes on after a collective of the group with this tag."""
    return f"the end of a collective, tag {tag}"


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

    entries: deque[Entry]
    early: Counter[Key]
    clock: Mapping[int, deque[Reading]]
    decisions: Mapping[str, deque[Event]]
    tags: frozenset[int]
    is_over: bool
    error: str
    is_native: bool
    tells_sleeps: bool = False
    tells_collectives: bool = False
    results: Mapping[int, deque[tuple[int, bytes]]] = field(default_factory=dict)
    measured: Mapping[str, deque[int]] = field(default_factory=dict)

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
    tells_ends = is_native and any(event.kind == "collective" for event in events)
    entries: deque[Any] = deque()
    early: Counter[Key] = Counter()
    clock: defaultdict[int, deque[Reading]] = defaultdict(deque)
    decisions: defaultdict[str, deque[Event]] = defaultdict(deque)
    results: defaultdict[int, deque[tuple[int, bytes]]] = defaultdict(deque)
    measured: defaultdict[str, deque[int]] = defaultdict(deque)
    received_tags = set()
    point: SafePoint | None = None
    last_pass, sent_count, seen_count, reading_count, is_over, error = -1, -sent_before_count, 0, 0, False, ""
    for event in events:
        to = entries if point is None else point.sights
        match event.kind, event.fields:
            case "safe_point", (bool(has_ended), int(turn_count), *_):
                if point is None or not has_ended:  # where nothing was seen in it, its beginning is not written down
                    point = SafePoint(event.get("woken") or 0, sent_count, time_s=event.time_s)
                    entries.append(point)
                    sent_count = 0
                if has_ended:
                    point.turn_count, point.has_ended = turn_count, True
                    point = None
            case "received", (int(), int(tag), *_) if tells_ends and _is_of_collectives(tag):
                pass  # a replay may send others for it
            case "received", (int(source), int(tag), int(), -2, *_):
                early[source, tag] += 1
                received_tags.add(tag)
            case "received", (int(source), int(tag), int(), int(number), int(turn), *_):
                received_tags.add(tag)
                if number >= 0 and to and type(to[-1]) is Taken and number == last_pass:
                    to[-1].keys.append((source, tag))
                else:
                    to.append(_taken(event, number, turn, sent_count, (source, tag)))
                    seen_count += number >= 0
                last_pass = number
            case "sent", (int(), int(tag), *_):
                last_pass = -1  # what the pass takes up after this may answer it
                sent_count += not (is_native and _is_of_collectives(tag))
            case "deadline" | "timer" | "failed" | "collective" | "lost", _:
                to.append(_seen(event, sent_count))
                seen_count += 1
            case "clock", (float(seconds), int(line)):
                clock[line].append(Reading(seconds, seen_count, reading_count))
                reading_count += 1
            case "reduced", (int(tag), int(nbytes), str(text)):
                results[tag].append((nbytes, bytes.fromhex(text)))
            case "measured", (str(what), int(value)):
                measured[what].append(value)
            case "over", (str(text),):
                is_over, error = True, text
        if event.kind in DECISIONS:
            decisions[event.kind].append(event)
    tags_received, tells = frozenset(received_tags), (tells_sleeps, tells_collectives)
    return RankLog(
        entries, early, clock, decisions, tags_received, is_over, error, is_native, *tells, results, measured
    )


def _seen(event: Event, sent_count: int) -> Sight:
    """Return what a rank saw that is no message: the end of a wait, a failure, or the loss of a rank."""
    turn, woken_count = int(event.get("turn") or 0), int(event.get("woken") or 0)
    at = (turn, woken_count, sent_count, event.time_s)
    match event.kind:
        case "deadline":
            return Passed(*at, str(event.get("what")))
        case "timer":
            return Fired(*at, str(event.get("what")), begun_count=int(event.get("begun") or 0))
        case "failed":
            return Left(*at, FAILED)
        case "collective":
            return Left(*at, end_of_collective(int(event.get("tag") or 0)))
        case _:
            return Lost(*at, int(event.get("rank") or 0))


def _taken(event: Event, number: int, turn: int, sent_count: int, key: Key) -> Taken:
    """Return a message that a pass took up, or, where its number is below 0, a task by itself."""
    kind = Taken if number >= 0 else TakenByTask
    woken_count, begun_count = (int(event.get(name) or 0) for name in ("woken", "begun"))
    return kind(turn, woken_count, sent_count, event.time_s, [key], begun_count=begun_count)


def _is_of_collectives(tag: int) -> bool:
    return tags.COLLECTIVE_FIRST <= tag <= tags.COLLECTIVE_LAST
