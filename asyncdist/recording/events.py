"""Defines the events of a rank, keeps the latest events in memory, and passes all events to a recording.

An event has a time, a kind and fields. A file represents a kind by its index in :data:`KINDS`, so new kinds and fields
are appended (see :mod:`asyncdist.recording.writer`).

Some fields are needed only for replays. ``pass`` is the number, modulo 65536, of a polling pass (one test of all
outstanding requests). It is -1 if a task received the message without a pass, and -2 before the world was open.
``turn`` counts the passes and yields of the current call of ``safe_point``. ``woken`` and ``begun`` count the waits
that have ended and begun since the last call of ``safe_point`` began. In the event of the call itself, ``woken`` is
counted from the previous call. The beginning of a call without events is not recorded.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from asyncdist.waits import WaitId

#: Largest count in a recording. Every table format can represent it exactly.
COUNT_MAX: Final = 1 << 53
#: Value of one field of an event.
Field: TypeAlias = int | float | str | WaitId | Sequence[int] | Sequence[float] | None


def whole(field: Field) -> int:
    """Return ``field``, and assert for the type checker that it is an int."""
    assert isinstance(field, int), f"the field must be an integer, got {field!r}"
    return field


#: Kinds of events and their field names. The field ``seconds`` is a duration that ends at the event.
KINDS: Final[dict[str, tuple[str, ...]]] = {
    # A policy started on this rank. Its number identifies it in other events.
    "policy": ("policy", "class_name", "name", "average_every", "model_nbytes", "ranks"),
    # A call of ``policy.step`` ended.
    "step": ("policy", "iteration", "seconds"),
    # The user's code returned a metric.
    "metric": ("policy", "iteration", "value"),
    # This rank entered a new state of an averaging round. protocols.selective.member defines the states.
    "role": ("policy", "round", "state"),
    # This rank applied new weights. The fields from ``fragment`` on describe averages of contributions.
    "applied": (
        *("policy", "round", "iteration", "donors", "weights"),
        *("staleness_steps", "seconds", "nbytes", "coordinator", "route"),
        *("fragment", "version", "staleness_versions", "left_out", "gains"),
        *("wire_nbytes", "unencoded_nbytes", "outer_norm", "cosine", "waited_s"),
    ),
    # A round was abandoned, although this rank should have applied its average.
    "abandoned": ("policy", "round", "iteration", "reason"),
    # The coordinator received a rank's report, decided on a round, fixed its donors, or ended the round.
    "heard": ("policy", "source", "iteration", "value"),
    "decided": ("policy", "round", "donors", "replacers", "route"),
    "frozen": ("policy", "round", "donors"),
    "ended": ("policy", "round", "reason"),
    # Another rank became the coordinator.
    "coordinator": ("policy", "epoch", "rank"),
    # A policy ended on this rank.
    "closed": ("policy", "iteration"),
    # A message was passed to the transport. The k-th message sent to a rank on a tag is the k-th message that the rank
    # receives on the tag from this rank.
    "sent": ("dest", "tag", "nbytes"),
    # A message was received from the transport.
    "received": ("source", "tag", "nbytes", "pass", "turn", "woken", "begun"),
    # A task's wait of at least :data:`asyncdist.recording.writer.WAIT_S_MIN` seconds ended.
    "waited": ("what", "seconds"),
    # Another rank was lost, or returned as a new process.
    "lost": ("rank", "turn", "woken"),
    "returned": ("rank", "incarnation"),
    # ``main`` ended with ``error``, or returned if ``error`` is "".
    "over": ("error",),
    # For replays: a ``safe_point`` call began or ended, a line of code read the clock, or a deadline expired.
    # ``line`` is a checksum of the name of the reading function and of the line's number in it.
    "safe_point": ("has_ended", "turns", "woken"),
    "clock": ("seconds", "line"),
    "deadline": ("what", "turn", "woken"),
    # The CRC-32 of a policy's final weights, or None if the weights were too large.
    "weights": ("policy", "checksum"),
    # A timer of the runtime or of asyncio fired, or work in a thread ended.
    "timer": ("what", "turn", "woken", "begun"),
    # A task continued after a failed collective.
    "failed": ("turn", "woken"),
    # A signal cancelled ``main``. ``waited_for`` describes its wait and line of code, or is "" if it was not waiting.
    "interrupted": ("waited_for",),
    # A task continued after a collective that MPI completed.
    "collective": ("tag", "turn", "woken"),
    # MPI reduced floating-point numbers in its own order. ``result`` is hexadecimal, or "" if it is too large.
    "reduced": ("tag", "nbytes", "result"),
    # A number that depends on timing was measured, such as the part of a tensor that another rank has written so far.
    "measured": ("what", "value"),
    # The file ends before its rank does, because the file has reached its size limit or can no longer be written.
    "cut": ("why",),
    # A rank that was restarted or joined late started with the state of another rank, including its weights.
    "joined": ("policy", "round", "iteration", "donor"),
    # The ranks of a host reported why the job made no progress or was aborted. Only some of them record the report.
    "told": ("story",),
    # This rank captured its contribution to a round of averaging. ``group`` is the lowest rank of the policy's group.
    "contributed": (
        *("policy", "round", "fragment", "iteration", "version"),
        *("weight", "norm", "wire_nbytes", "unencoded_nbytes", "group"),
    ),
    # This rank got new hyperparameters. Two JSON objects have the donor's hyperparameters, and the new ones derived
    # from them. The donor is -1 when the policy starts.
    "hyperparameters": ("policy", "round", "iteration", "donor", "inherited", "chosen"),
}
_PLACES: Final = {kind: {name: place for place, name in enumerate(names)} for kind, names in KINDS.items()}
#: Value of ``pass`` for a message that was received before the rank's world was open.
BEFORE_WORLD: Final = -2
#: Number of events that a rank keeps in memory. Frequent events (steps, messages, reports) are not kept.
CAPACITY: Final = 256


class Event(NamedTuple):
    """Describes an event on one rank.

    Attributes:
        time_s: Time in seconds, on the clock of the rank's loop, which starts at an arbitrary moment.
        kind: Key of :data:`KINDS`.
        fields: Values of the fields that :data:`KINDS` lists.
    """

    time_s: float
    kind: str
    fields: tuple[Field, ...]

    def get(self, name: str) -> Any:
        """Return the field with this name, or None if the event does not have the field."""
        place = _PLACES[self.kind].get(name, -1)
        return self.fields[place] if 0 <= place < len(self.fields) else None

    @property
    def wait(self) -> WaitId:
        """Identity of the wait, timer or number that the event's field ``what`` describes."""
        return WaitId(*self.get("what"))

    def __str__(self) -> str:
        named = zip(KINDS[self.kind], self.fields, strict=False)
        return f"{self.kind} {', '.join(f'{name} {value}' for name, value in named)}"


class EventLog:
    """Keeps the latest events of one rank, and passes every event to a sink, if there is one.

    Attributes:
        sink: Function called with each event, or None.
        counts: Number of events of each kind. Roles are counted by state, for example as ``"role giving"``.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock
        self._latest: deque[Event] = deque(maxlen=CAPACITY)
        self._policy_count = 0
        self.counts: Counter[str] = Counter()
        self.sink: Callable[[float, str, tuple[Field, ...]], None] | None = None

    def add(self, kind: str, *fields: Field) -> None:
        """Add an event at the current time."""
        time_s = self.now()
        self._latest.append(Event(time_s, kind, fields))
        self.counts[kind if kind != "role" else f"role {fields[-1]}"] += 1
        if self.sink is not None:
            self.sink(time_s, kind, fields)

    def record(self, kind: str, *fields: Field) -> None:
        """Pass an event to the sink without keeping it in memory. Frequent events would displace all others there."""
        if self.sink is not None:
            self.sink(self.now(), kind, fields)

    def latest(self) -> tuple[Event, ...]:
        """Return the kept events, oldest first."""
        return tuple(self._latest)

    def number_policy(self) -> int:
        """Return the number of this rank's next policy. Policies are counted from 0."""
        self._policy_count += 1
        return self._policy_count - 1
