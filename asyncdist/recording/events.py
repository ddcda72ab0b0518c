"""Keeps what has happened on a rank lately, and hands it on to be written down.

An event is a time, a kind and its fields. :data:`KINDS` lists all kinds; :mod:`asyncdist.recording.writer` writes the
same events to a file, in which a kind is its place in this list. So kinds are added at the end, and fields too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from asyncdist.waits import WaitId

#: What a field of an event may be.
Field: TypeAlias = int | float | str | WaitId | Sequence[int] | Sequence[float] | None


def whole(field: Field) -> int:
    """Return a field that is a whole number by its kind."""
    assert isinstance(field, int), f"{field!r} in place of a whole number"
    return field


#: The kinds of events, each with the names of its fields. Seconds are seconds, times are those of the event.
KINDS: Final[dict[str, tuple[str, ...]]] = {
    # A policy has started on this rank. The number stands for it in the events below.
    "policy": ("policy", "class_name", "name", "average_every", "model_nbytes", "ranks"),
    # A call of ``policy.step`` has ended, which took so many seconds.
    "step": ("policy", "iteration", "seconds"),
    # A metric was asked for and given.
    "metric": ("policy", "iteration", "value"),
    # What this rank does in a round from now on: a state of protocols.selective.member, in small letters.
    "role": ("policy", "round", "state"),
    # New weights are in place.
    "applied": (
        *("policy", "round", "iteration", "donors", "weights"),
        *("staleness_steps", "seconds", "nbytes", "coordinator", "route"),
    ),
    # A round that this rank was to apply came to nothing.
    "abandoned": ("policy", "round", "iteration", "reason"),
    # Of the coordinator: a report has come; a round was decided, its donors were fixed, and it was over.
    "heard": ("policy", "source", "iteration", "value"),
    "decided": ("policy", "round", "donors", "replacers", "route"),
    "frozen": ("policy", "round", "donors"),
    "ended": ("policy", "round", "reason"),
    # Another rank coordinates from now on.
    "coordinator": ("policy", "epoch", "rank"),
    # A policy has ended on this rank.
    "closed": ("policy", "iteration"),
    # Of the transport: a message was handed to it, or has come from it; the k-th one sent to a rank on a tag is the
    # k-th one that this rank receives from the sender on that tag.
    "sent": ("dest", "tag", "nbytes"),
    # The number of the pass, modulo 65536, tells which messages the rank took up together; -1 is for one that a task
    # took by itself, -2 for one before the world was open. The turn is that of its safe point: passes and yields. So
    # many waits had ended, and begun, since that safe point began.
    "received": ("source", "tag", "nbytes", "pass", "turn", "woken", "begun"),
    # A task has waited so many seconds, up to now; see :data:`asyncdist.recording.writer.WAIT_S_MIN`.
    "waited": ("what", "seconds"),
    # Of other ranks: one was lost, or is there again as a new process; turn and waits are as of a message.
    "lost": ("rank", "turn", "woken"),
    "returned": ("rank", "incarnation"),
    # The error that ends this rank, or "" where main has returned.
    "over": ("error",),
    # For replays: a safe point has begun, or ended; a line of code has read the clock; a deadline has passed.
    # The beginning of a safe point in which nothing happened is left out. So many waits had ended as it began, since
    # the one before.
    "safe_point": ("has_ended", "turns", "woken"),
    "clock": ("seconds", "line"),
    "deadline": ("what", "turn", "woken"),
    # The last weights of a policy, as a CRC-32 of all bytes, where they are not too many.
    "weights": ("policy", "checksum"),
    # A timer of the runtime or of asyncio has fired, or work in a thread has ended; turn and waits are as of a message.
    "timer": ("what", "turn", "woken", "begun"),
    # A task goes on after a collective that has failed; turn and waits are as of a message.
    "failed": ("turn", "woken"),
    # Main is cancelled because of a signal; what it waited for, and in which line, or "".
    "interrupted": ("waited_for",),
    # A task goes on after a collective that MPI has carried by itself; turn and waits are as of a message.
    "collective": ("tag", "turn", "woken"),
    # MPI has added or multiplied floating numbers in an order of its own: the result's bytes, in hexadecimal digits,
    # where they are few, else "".
    "reduced": ("tag", "nbytes", "result"),
    # A number that follows from nothing but timing, as how much of a tensor was written into another rank's memory.
    "measured": ("what", "value"),
    # The file ends here, though the rank goes on: it is as large as it may be, or cannot be written any more.
    "cut": ("why",),
    # A rank that was started again, or came later, has begun with the state of a member: weights and all.
    "joined": ("policy", "round", "iteration", "donor"),
    # What all ranks of a host did was told, in these words: nothing had moved, or the job is aborted. The rank that
    # tells it writes it down, and a few others.
    "told": ("story",),
}
_PLACES: Final = {kind: {name: place for place, name in enumerate(names)} for kind, names in KINDS.items()}
#: In place of the number of a pass: the message came before the rank's world was open.
BEFORE_WORLD: Final = -2
#: Events that a rank keeps in memory. Steps, messages and reports that come are not among them: they are too many.
CAPACITY: Final = 256


class Event(NamedTuple):
    """Says that something happened.

    Attributes:
        time_s: when, on the clock of the rank's loop, in seconds from an arbitrary start.
        kind: one of :data:`KINDS`.
        fields: as listed there.
    """

    time_s: float
    kind: str
    fields: tuple[Field, ...]

    def get(self, name: str) -> Any:
        """Return a field by its name; None where the event has none."""
        place = _PLACES[self.kind].get(name, -1)
        return self.fields[place] if 0 <= place < len(self.fields) else None

    @property
    def wait(self) -> WaitId:
        """The wait, the timer or the number of an event that has one."""
        return WaitId(*self.get("what"))

    def __str__(self) -> str:
        named = zip(KINDS[self.kind], self.fields, strict=False)
        return f"{self.kind} {', '.join(f'{name} {value}' for name, value in named)}"


class EventLog:
    """Keeps the latest events of one rank, and hands each to a sink if there is one.

    Args:
        clock: returns the time in seconds.

    Attributes:
        now: that clock.
        sink: called with each event; None where nothing is written down.
        counts: how many events of each kind there were; of roles each state by itself, as in ``"role giving"``.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock
        self._latest: deque[Event] = deque(maxlen=CAPACITY)
        self._policy_count = 0
        self.counts: Counter[str] = Counter()
        self.sink: Callable[[float, str, tuple[Field, ...]], None] | None = None

    def add(self, kind: str, *fields: Field) -> None:
        """Add an event, now."""
        time_s = self.now()
        self._latest.append(Event(time_s, kind, fields))
        self.counts[kind if kind != "role" else f"role {fields[-1]}"] += 1
        if self.sink is not None:
            self.sink(time_s, kind, fields)

    def record(self, kind: str, *fields: Field) -> None:
        """Add an event to what is written down alone: one of those that are too many to be kept."""
        if self.sink is not None:
            self.sink(self.now(), kind, fields)

    def latest(self) -> tuple[Event, ...]:
        """Return the events kept, oldest first."""
        return tuple(self._latest)

    def number_policy(self) -> int:
        """Return the number of one more policy of this rank, from 0."""
        self._policy_count += 1
        return self._policy_count - 1
