"""What one rank of a recorded run saw, in the order in which a replay has to show it again."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

from asyncdist.recording.events import Event

#: Events that a replay must repeat, field by field.
DECISIONS: Final = frozenset(
    {
        *("policy", "metric", "role", "applied", "abandoned", "heard", "decided", "frozen", "ended"),
        *("coordinator", "closed", "weights", "lost"),
    }
)
#: The errors with which a signal ends a main.
_SIGNALS: Final = ("SystemExit: 1", "KeyboardInterrupt")
#: A message, by its source and tag.
Key: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class Taken:
    """Messages that one pass took up together, with nothing sent between them, or one that a task took by itself.

    Attributes:
        keys: their sources and tags.
        is_of_pass: which of both.
        turn: of the safe point.
        woken_count: how many waits had ended by then in that safe point; 0 where that does not matter.
    """

    keys: list[Key]
    is_of_pass: bool
    turn: int
    woken_count: int

    @property
    def counts(self) -> bool:
        """Whether a clock reading tells its place by it: a task may be let to take its message early."""
        return self.is_of_pass

    @property
    def goes_with_the_one_before(self) -> bool:
        """Whether it is shown at once after what was seen before."""
        return not self.is_of_pass


@dataclass(slots=True)
class Passed:
    """A deadline has passed for the task that waited for this."""

    what: str
    turn: int
    counts: ClassVar[bool] = True
    woken_count: ClassVar[int] = 0
    goes_with_the_one_before: ClassVar[bool] = False


@dataclass(slots=True)
class Fired:
    """A timer of the runtime has fired.

    Attributes:
        what: its name.
        turn: of the safe point.
        woken_count: as of messages.
        has_taken: whether the pass that it made before has taken up the messages that come right before it here.
    """

    what: str
    turn: int
    woken_count: int
    has_taken: bool
    counts: ClassVar[bool] = True

    @property
    def goes_with_the_one_before(self) -> bool:
        """Whether it is shown at once after what was seen before."""
        return self.has_taken


@dataclass(slots=True)
class Lost:
    """A rank was seen to be lost."""

    rank: int
    turn: int
    counts: ClassVar[bool] = True
    woken_count: ClassVar[int] = 0
    goes_with_the_one_before: ClassVar[bool] = False


Sight: TypeAlias = Taken | Passed | Fired | Lost


@dataclass(slots=True)
class Reading:
    """What the clock said.

    Attributes:
        seconds: that.
        seen_count: how many sights that count came before.
    """

    seconds: float
    seen_count: int


@dataclass(slots=True)
class SafePoint:
    """A safe point of the user's code.

    Attributes:
        sights: what the rank saw within it.
        turn_count: the passes and yields that it made.
        has_ended: whether that is recorded.
    """

    sights: deque[Sight] = field(default_factory=deque)
    turn_count: int = 2
    has_ended: bool = False


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
    """

    entries: deque[Entry]
    early: Counter[Key]
    clock: Mapping[int, deque[Reading]]
    decisions: Mapping[str, deque[Event]]
    tags: frozenset[int]
    is_over: bool
    error: str

    @property
    def decision_count(self) -> int:
        """How many are left."""
        return sum(map(len, self.decisions.values()))


def log_of(events: Iterable[Event]) -> RankLog:
    """Read a rank's events, up to its last step where a signal has ended it: a replay has no signals."""
    events = list(events)
    if any(event.kind == "over" and str(event.fields[0]).startswith(_SIGNALS) for event in events):
        steps = [place for place, event in enumerate(events) if event.kind == "step"]
        events = events[: steps[-1] + 1] if steps else []
    entries: deque[Any] = deque()
    early: Counter[Key] = Counter()
    clock: defaultdict[int, deque[Reading]] = defaultdict(deque)
    decisions: defaultdict[str, deque[Event]] = defaultdict(deque)
    tags = set()
    point: SafePoint | None = None
    last_pass = last_taking_pass = -1
    seen_count, is_over, error = 0, False, ""
    for event in events:
        to = entries if point is None else point.sights
        match event.kind, event.fields:
            case "safe_point", (False, *_):
                point = SafePoint()
                entries.append(point)
            case "safe_point", (True, int(turn_count)):
                if point is None:  # nothing was seen in it, so its beginning is not written down
                    point = SafePoint()
                    entries.append(point)
                point.turn_count, point.has_ended = turn_count, True
                point = None
            case "received", (int(source), int(tag), int(), -2, *_):
                early[source, tag] += 1
                tags.add(tag)
            case "received", (int(source), int(tag), int(), int(number), int(turn), *_):
                tags.add(tag)
                if number >= 0 and to and isinstance(to[-1], Taken) and number == last_pass:
                    to[-1].keys.append((source, tag))
                else:
                    woken_count = int(event.get("woken") or 0) if number >= 0 else 0
                    to.append(Taken([(source, tag)], number >= 0, turn, woken_count))
                    seen_count += number >= 0
                last_pass = last_taking_pass = number
            case "sent", _:
                last_pass = -1  # what the pass takes up after this may answer it
            case "deadline", (str(what), int(turn)):
                to.append(Passed(what, turn))
                seen_count += 1
            case "timer", (str(what), int(number), int(turn), int(woken_count)):
                has_taken = number == last_taking_pass and bool(to) and isinstance(to[-1], Taken)
                to.append(Fired(what, turn, woken_count, has_taken))
                seen_count += 1
                last_pass = -1
            case "lost", (int(rank),):
                to.append(Lost(rank, to[-1].turn if to and point else 1))
                seen_count += 1
            case "clock", (float(seconds), int(line)):
                clock[line].append(Reading(seconds, seen_count))
            case "over", (str(text),):
                is_over, error = True, text
        if event.kind in DECISIONS:
            decisions[event.kind].append(event)
    return RankLog(entries, early, clock, decisions, frozenset(tags), is_over, error)
