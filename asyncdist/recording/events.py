"""Keeps the latest events of a rank, and passes events to a recording.

An event has a time, a kind and fields. :data:`KINDS` lists all kinds. :mod:`asyncdist.recording.writer` writes events
to a file, in which a kind is its index in this list. New kinds and new fields are therefore added at the end.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from asyncdist.waits import WaitId

#: A field of an event.
Field: TypeAlias = int | float | str | WaitId | Sequence[int] | Sequence[float] | None


def whole(field: Field) -> int:
    """Return a field that is known to be an integer."""
    assert isinstance(field, int), f"the field must be an integer, got {field!r}"
    return field


#: The kinds of events, each with the names of its fields. The field ``seconds`` is a duration that ends at the event.
KINDS: Final[dict[str, tuple[str, ...]]] = {
    # A policy has started on this rank. Its number identifies it in the events below.
    "policy": ("policy", "class_name", "name", "average_every", "model_nbytes", "ranks"),
    # A call of ``policy.step`` has ended.
    "step": ("policy", "iteration", "seconds"),
    # The user's code returned a metric.
    "metric": ("policy", "iteration", "value"),
    # This rank's new state in a round: a state of protocols.selective.member, in lower case.
    "role": ("policy", "round", "state"),
    # This rank has applied new weights.
    "applied": (
        *("policy", "round", "iteration", "donors", "weights"),
        *("staleness_steps", "seconds", "nbytes", "coordinator", "route"),
    ),
    # A round whose average this rank should have applied was abandoned.
    "abandoned": ("policy", "round", "iteration", "reason"),
    # On the coordinator: a report has arrived; a round was decided; its donors were fixed; the round has ended.
    "heard": ("policy", "source", "iteration", "value"),
    "decided": ("policy", "round", "donors", "replacers", "route"),
    "frozen": ("policy", "round", "donors"),
    "ended": ("policy", "round", "reason"),
    # Another rank has become the coordinator.
    "coordinator": ("policy", "epoch", "rank"),
    # A policy has ended on this rank.
    "closed": ("policy", "iteration"),
    # A message was passed to the transport, or received from it. The k-th message sent to a rank on a tag is the k-th
    # message that the rank receives from the sender on that tag.
    "sent": ("dest", "tag", "nbytes"),
    # ``pass`` is the number of the polling pass, modulo 65536: a pass receives its messages together. It is -1 if a
    # task received the message without a pass, and -2 before the world was open. ``turn`` counts the passes and yields
    # of the safe point. ``woken`` and ``begun`` count the waits that have ended and begun since the last safe point
    # began.
    "received": ("source", "tag", "nbytes", "pass", "turn", "woken", "begun"),
    # A wait of a task has ended; see :data:`asyncdist.recording.writer.WAIT_S_MIN`.
    "waited": ("what", "seconds"),
    # Another rank was lost, or has returned as a new process. ``turn`` and ``woken`` are as for "received".
    "lost": ("rank", "turn", "woken"),
    "returned": ("rank", "incarnation"),
    # Main has ended with this error; "" if it returned.
    "over": ("error",),
    # For replays: a safe point has begun or ended; a line of code has read the clock; a deadline has passed. The
    # beginning of a safe point without events is not recorded. ``woken`` of a safe point counts the waits that ended
    # between the previous safe point and this one.
    "safe_point": ("has_ended", "turns", "woken"),
    "clock": ("seconds", "line"),
    "deadline": ("what", "turn", "woken"),
    # CRC-32 of a policy's final weights, if they are not too large.
    "weights": ("policy", "checksum"),
    # A timer of the runtime or of asyncio has fired, or work in a thread has ended. Counts are as for "received".
    "timer": ("what", "turn", "woken", "begun"),
    # A task continues after a failed collective. ``turn`` and ``woken`` are as for "received".
    "failed": ("turn", "woken"),
    # A signal has cancelled main. ``waited_for`` names main's wait and its line of code; "" if main was not waiting.
    "interrupted": ("waited_for",),
    # A task continues after a collective that MPI has carried out. ``turn`` and ``woken`` are as for "received".
    "collective": ("tag", "turn", "woken"),
    # MPI has reduced floating-point numbers in its own order. ``result`` has the bytes of the result as
    # hexadecimal digits; "" if they are too many.
    "reduced": ("tag", "nbytes", "result"),
    # A number that depends on timing alone, such as the part of a tensor that was written to another rank's memory.
    "measured": ("what", "value"),
    # The file ends before its rank: it has reached its size limit, or can no longer be written.
    "cut": ("why",),
    # A rank that was restarted or joined late has started with the state of a member, including its weights.
    "joined": ("policy", "round", "iteration", "donor"),
    # The ranks of a host have logged their story, because the job made no progress or is aborted. The rank that logs it
    # and a few others record it.
    "told": ("story",),
}
_PLACES: Final = {kind: {name: place for place, name in enumerate(names)} for kind, names in KINDS.items()}
#: The ``pass`` of a message that was received before the rank's world was open.
BEFORE_WORLD: Final = -2
#: Number of events that a rank keeps in memory. Steps, messages and arriving reports are not kept: they are too many.
CAPACITY: Final = 256


class Event(NamedTuple):
    """An event on a rank.

    Attributes:
        time_s: Time in seconds, on the clock of the rank's loop, which starts at an arbitrary moment.
        kind: One of :data:`KINDS`.
        fields: Values of the fields that :data:`KINDS` lists for the kind.
    """

    time_s: float
    kind: str
    fields: tuple[Field, ...]

    def get(self, name: str) -> Any:
        """Return the field with this name; None if the event does not have it."""
        place = _PLACES[self.kind].get(name, -1)
        return self.fields[place] if 0 <= place < len(self.fields) else None

    @property
    def wait(self) -> WaitId:
        """Identity of the event's wait, timer or number, from its field ``what``."""
        return WaitId(*self.get("what"))

    def __str__(self) -> str:
        named = zip(KINDS[self.kind], self.fields, strict=False)
        return f"{self.kind} {', '.join(f'{name} {value}' for name, value in named)}"


class EventLog:
    """Keeps the latest events of one rank, and passes each to a sink if there is one.

    Args:
        clock: Returns the time in seconds.

    Attributes:
        now: The clock.
        sink: Called with each event; None if nothing is recorded.
        counts: Number of events of each kind. Roles are counted by state, for example as ``"role giving"``.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock
        self._latest: deque[Event] = deque(maxlen=CAPACITY)
        self._policy_count = 0
        self.counts: Counter[str] = Counter()
        self.sink: Callable[[float, str, tuple[Field, ...]], None] | None = None

    def add(self, kind: str, *fields: Field) -> None:
        """Add an event that happens now."""
        time_s = self.now()
        self._latest.append(Event(time_s, kind, fields))
        self.counts[kind if kind != "role" else f"role {fields[-1]}"] += 1
        if self.sink is not None:
            self.sink(time_s, kind, fields)

    def record(self, kind: str, *fields: Field) -> None:
        """Pass an event to the sink without keeping it; for events that are too many to keep."""
        if self.sink is not None:
            self.sink(self.now(), kind, fields)

    def latest(self) -> tuple[Event, ...]:
        """Return the events kept, oldest first."""
        return tuple(self._latest)

    def number_policy(self) -> int:
        """Return the number of this rank's next policy, from 0."""
        self._policy_count += 1
        return self._policy_count - 1
