"""What a rank does right now, as plain data that travels as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import msgspec

#: What main does: it awaits something, has returned, or does not let the loop run: it computes, or it blocks in a call
#: that takes no time of a core.
MainState: TypeAlias = Literal["awaits", "returned", "computes", "blocks"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that a rank is in.

    Attributes:
        tag: of its group.
        number: its place among those that this rank has started in the group, from 1.
        ranks: the members.
    """

    tag: int
    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """What a task waits for.

    Attributes:
        who: ``"main"``, or the name of a task that it has spawned.
        what: in words; empty while the task is about to run.
        line: of the user's code, as in ``"main (train.py:12)"``; empty where none is known.
        seconds: how long so far; None where that is not known.
        peers: ranks of which each one can end it.
        tag: on which that happens; None where there is none.
        ends_by_itself: whether a timer or a thread ends it.
        collective: that it is part of, if any.
    """

    who: str
    what: str
    line: str = ""
    seconds: float | None = None
    peers: tuple[int, ...] = ()
    tag: int | None = None
    ends_by_itself: bool = False
    collective: Collective | None = None


@dataclass(frozen=True, slots=True)
class ChannelState:
    """A channel of the user's program, and its counts on this rank."""

    name: str
    tag: int
    sent_count: int
    received_count: int
    unread_count: int
    is_full: bool


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What a policy has come to on this rank.

    Attributes:
        name: the policy's, or empty.
        step: how many steps it has done.
        metric: the last number that was given.
        round: of the role; None before the first.
        role: a state of ``protocols.selective.member``, in small letters; empty before the first.
        coordinator: the rank that coordinates, where this one does, or has been told of another one.
    """

    name: str
    step: int
    metric: float | None
    round: int | None = None
    role: str = ""
    coordinator: int | None = None


@dataclass(frozen=True, slots=True)
class RankStory:
    """What one rank does right now. Times are ages, in seconds.

    Attributes:
        rank, size, pid, hostname: of the rank.
        job: eight hexadecimal digits, the same on all ranks of a job.
        program: the script.
        state: what main does.
        line: where it stands, if it lets nothing else run.
        inner_line: the innermost line there, where that is not the user's.
        still_s: since when the rank has done no step and received nothing.
        waits: what main and spawned tasks wait for.
        policies: those that are open.
        started: how many collectives were started, by the group's tag.
        channels: those of the user's program.
        unread: what has arrived for channels that are not open, in words.
        heard: for each rank since when nothing has come from it; a rank from which nothing ever came is not in it.
        lost: ranks that are lost.
        left: ranks that have returned.
        events: the latest, in words.
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
    left: tuple[int, ...] = ()
    events: tuple[str, ...] = ()


_decoder: Final = msgspec.msgpack.Decoder(RankStory)


def to_bytes(story: RankStory) -> bytes:
    """Return the story as MessagePack, which has NaN; what is not text, as a script's name, has question marks."""
    try:
        return msgspec.msgpack.encode(story)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(_as_text(msgspec.to_builtins(story)))


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_as_text(key): _as_text(item) for key, item in value.items()}
    return [_as_text(item) for item in value] if isinstance(value, (list, tuple)) else value


def from_bytes(data: bytes) -> RankStory:
    """Return the story that is in these bytes. Raises ValueError where they are none."""
    return _decoder.decode(data)
