"""Describes what a rank is doing, as plain data that can be sent as MessagePack."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import msgspec

#: State of ``main``: it is awaiting, has returned, is computing, or is blocked in a call that uses no CPU time.
MainState: TypeAlias = Literal["awaits", "returned", "computes", "blocks"]


@dataclass(frozen=True, slots=True)
class Collective:
    """Describes a collective in progress on a rank. ``number`` counts the rank's collectives in the group, from 1."""

    tag: int
    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Describes what one task of a rank is waiting for.

    Attributes:
        who: ``"main"``, or the name of a spawned task.
        what: Description of the awaited event, or "" if the task is about to run.
        line: Line of the user's code, as in ``"main (train.py:12)"``, or "".
        seconds: Seconds for which the wait has lasted, or None if unknown.
        peers: Ranks that can end the wait; any one of them is enough.
        ends_by_itself: Whether a timer or a thread of this rank, and not another rank, ends the wait.
        has_deadline: Whether the wait ends at a deadline if no other rank ends it.
    """

    who: str
    what: str
    line: str = ""
    seconds: float | None = None
    peers: tuple[int, ...] = ()
    tag: int | None = None
    ends_by_itself: bool = False
    collective: Collective | None = None
    has_deadline: bool = False


@dataclass(frozen=True, slots=True)
class ChannelState:
    """Describes a channel of the user's program, with its message counts on this rank."""

    name: str
    tag: int
    sent_count: int
    received_count: int
    unread_count: int
    is_full: bool


@dataclass(frozen=True, slots=True)
class PolicyState:
    """Describes the state of a policy on this rank.

    ``round`` is the number of an exchange of weights, and ``role`` the rank's part in it: a state of
    ``protocols.selective.member``, in lower case. ``coordinator`` is the rank that has taken over from the first
    coordinator, or None.
    """

    name: str
    step: int
    metric: float | None
    round: int | None = None
    role: str = ""
    coordinator: int | None = None


@dataclass(frozen=True, slots=True)
class RankStory:
    """Describes what one rank is doing. Times are ages in seconds.

    Attributes:
        line: Line of the user's code in which ``main`` blocks the loop, or "".
        inner_line: Innermost line called from ``line`` if it is not in the user's code, or "".
        still_s: Seconds since the rank last took a step or received a message.
        started: Number of started collectives, keyed by the group's tag.
        unread: Descriptions of messages that have arrived for channels that are not open.
        heard: Seconds since the last message of each rank that has sent one, keyed by rank.
        lost: Ranks whose processes ended without leaving the world.
        vacant: Ranks without a process, which may join.
        left: Ranks that have returned from ``main``.
        has_further_tasks: Whether other tasks of the program, which are not in ``waits``, may send messages.
    """

    rank: int
    size: int
    pid: int
    hostname: str
    job: str
    program: str
    state: MainState
    line: str
    inner_line: str
    still_s: float
    waits: tuple[Wait, ...] = ()
    policies: tuple[PolicyState, ...] = ()
    started: dict[int, int] = field(default_factory=dict)
    channels: tuple[ChannelState, ...] = ()
    unread: tuple[str, ...] = ()
    heard: dict[int, float] = field(default_factory=dict)
    lost: tuple[int, ...] = ()
    vacant: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    events: tuple[str, ...] = ()
    has_further_tasks: bool = False


_decoder: Final = msgspec.msgpack.Decoder(RankStory)


def to_bytes(found: Any) -> bytes:
    """Encode a rank's description, or its counters, as MessagePack. Unencodable characters become ``?``.

    Unlike JSON, MessagePack can represent NaN.
    """
    try:
        return msgspec.msgpack.encode(found)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(_as_text(msgspec.to_builtins(found)))


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_as_text(key): _as_text(item) for key, item in value.items()}
    return [_as_text(item) for item in value] if isinstance(value, (list, tuple)) else value


def from_bytes(data: bytes) -> RankStory:
    """Decode a rank's description. Raise ValueError if the bytes are not valid."""
    return _decoder.decode(data)
