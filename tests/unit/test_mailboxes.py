"""Tests the outbox over a transport that prepares sends: where frames are written, and sends in progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from asyncdist.messaging import mailboxes, wire
from asyncdist.transports.persistent_send import PersistentSend

T = TypeVar("T")

TAG = 77


@dataclass(frozen=True, slots=True)
class Number:
    value: int


@dataclass(frozen=True, slots=True)
class Blob:
    data: bytes


CODEC = wire.Codec(Number | Blob)


def nbytes_of(message: Number | Blob) -> int:
    """Return the size of the payload in bytes."""
    return len(CODEC.encode(message)[1])


@dataclass
class Prepared:
    """A persistent request like MPI's."""

    transport: Transport
    nbytes: int
    room: bytearray

    def Start(self) -> None:  # noqa: N802 -- mpi4py's name
        self.transport.left.append(("prepared", bytes(self.room[: self.nbytes])))

    def Test(self) -> bool:  # noqa: N802
        return not self.transport.holds


@dataclass
class Transport:
    """Records each send and its method; while ``holds`` is true, prepared sends do not complete."""

    size: int = 4
    count_max: int = 100
    holds: bool = False
    left: list[tuple[str, bytes]] = field(default_factory=list)
    repeated: dict[tuple[int, int, int], PersistentSend] = field(default_factory=dict)

    def prepare_send(self, nbytes: int, dest: int, tag: int) -> PersistentSend | None:
        key = nbytes, dest, tag
        if key not in self.repeated and len(self.repeated) < self.count_max:
            room = bytearray(-(-nbytes // 8) * 8)
            self.repeated[key] = PersistentSend(Prepared(self, nbytes, room), room, reraise, dest)
        return self.repeated.get(key)

    def start_send(self, frame: bytearray, dest: int, tag: int) -> None:
        self.left.append(("new", bytes(frame)))

    def shared(self, make: Callable[..., T], *args: Any) -> T:
        return make(*args)

    def outbox(self, scope: int = 2) -> mailboxes.Outbox:
        routes = [wire.pack_route(kind, nonce=1, epoch=0, scope=scope) for kind in range(2)]
        return mailboxes.Outbox(
            CODEC,
            routes,
            SimpleNamespace(transport=self),
            tag=TAG,
            name="x",
            sequence=0,
            contacts=set(),
            flow=None,
        )

    def read(self) -> list[tuple[str, int, int, Any]]:
        """Return, and forget, how each frame was sent, its sequence number, its scope and its message."""
        told = []
        for how, frame in self.left:
            reader = wire.FrameReader(bytearray(frame) + bytes(-len(frame) % 8))
            reader.open(len(frame))
            message = CODEC.decoders[reader.route().kind](reader.payload)
            told.append((how, reader.sequence, reader.route().scope, message))
        self.left.clear()
        return told


def reraise(error: BaseException, *_: object) -> Any:
    raise error


def test_message_behind_one_in_flight_is_sent_next_in_order() -> None:
    transport = Transport(holds=True)
    outbox = transport.outbox()
    assert outbox.post(Number(1), 1, 0) is None
    assert outbox.post(Number(2), 1, 0) is None
    transport.holds = False
    assert outbox.post(Number(3), 1, 0) is None
    assert [(how, sequence, message) for how, sequence, _, message in transport.read()] == [
        ("prepared", 1, Number(1)),
        ("new", 2, Number(2)),
        ("prepared", 3, Number(3)),
    ]


def test_buffers_are_shared_by_scopes_and_kinds_of_one_size() -> None:
    number = Number(1000)
    blob = next(blob for blob in map(Blob, map(bytes, range(20))) if nbytes_of(blob) == nbytes_of(number))
    transport = Transport()
    for scope in (2, 3):
        outbox = transport.outbox(scope)
        for message in (number, blob, number):
            outbox.post(message, 1, 0)
    assert [(how, scope, message) for how, _, scope, message in transport.read()] == [
        ("prepared", scope, message) for scope in (2, 3) for message in (number, blob, number)
    ]
    assert len(transport.repeated) == 1


def test_channel_that_was_closed_leaves_nothing_prepared() -> None:
    transport = Transport()
    for scope in range(2, 50):
        transport.outbox(scope).post(Number(scope), 1, 0)
    assert [how for how, *_ in transport.read()] == ["prepared"] * 48
    assert len(transport.repeated) == 1


@pytest.mark.parametrize("count_max", [0, 1])
def test_where_no_more_are_prepared_messages_leave_by_themselves(count_max: int) -> None:
    transport = Transport(count_max=count_max)
    outbox = transport.outbox()
    for dest in (0, 1, 2, 0):
        outbox.post(Number(dest), dest, 0)
    told = transport.read()
    assert [message for *_, message in told] == [Number(0), Number(1), Number(2), Number(0)]
    assert [how for how, *_ in told] == ["prepared" if dest == 0 and count_max else "new" for dest in (0, 1, 2, 0)]


@pytest.mark.parametrize("more", [0, 1])
def test_a_message_above_the_limit_is_not_prepared(more: int) -> None:
    count = next(n for n in range(1000) if nbytes_of(Blob(bytes(n))) == mailboxes.PREPARED_NBYTES_MAX) + more
    blob = Blob(bytes(index % 251 for index in range(count)))
    transport = Transport()
    transport.outbox().post(blob, 1, 0)
    assert [(how, message) for how, _, _, message in transport.read()] == [("new" if more else "prepared", blob)]


class Lost(Exception):
    """Error of a request whose receiver is lost."""


class Failed:
    """Request that replaces a prepared send's request when the receiver is lost."""

    def test(self) -> Any:
        raise Lost

    Start = Test = test  # mpi4py's names


@pytest.mark.parametrize("holds", [False, True])
def test_prepared_sends_to_a_lost_rank_fail(holds: bool) -> None:
    """Regression: with ``--survive``, a small message to a lost rank counted as sent, and its answer was awaited."""
    transport = Transport(holds=holds)
    outbox = transport.outbox()
    outbox.post(Number(1), 1, 0)
    for send in transport.repeated.values():
        send.give_up(Failed())
    for _ in range(3):
        with pytest.raises(Lost):
            outbox.post(Number(2), 1, 0)
    outbox.post(Number(3), 2, 0)
    assert [message for *_, message in transport.read()] == [Number(1), Number(3)]
