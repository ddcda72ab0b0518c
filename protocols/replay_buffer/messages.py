"""Defines the messages between a replay buffer's server and its clients, and their scopes.

Items are sent as bytes: small batches inside the message (``data``), larger ones as a stream of ``nbytes`` bytes after
the receiver has sent a :class:`asyncdist.messaging.streams.Grant`. A client numbers its requests. The server answers
each request once, with ``Added``, ``Drawn`` or ``Failed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncdist import Envelope
from asyncdist.messaging import wire
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import Cancel, Grant
from asyncdist.protocols.replay_buffer.store import FORMS, Field, RowLayout, dtype_of

#: Maximum size in bytes of a payload inside a message. Larger payloads are streamed. A frame has at most 64 KiB, and a
#: long frame delays the short frames behind it.
INLINE_NBYTES_MAX: Final = 32 << 10
#: Maximum size in bytes of an item's field, so that the computed size of a batch does not overflow.
_ITEM_NBYTES_MAX: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class Open:
    """Client to server, repeated until answered: asks the server to accept this client.

    Attributes:
        entry: Number that distinguishes successive clients of the same buffer on one rank.
    """

    entry: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Server to client: accepts the client, and describes the buffer.

    Attributes:
        in_flight_max: Maximum number of the client's unanswered draws, and of its unanswered adds and updates.
    """

    entry: int
    capacity: int
    in_flight_max: int
    prioritized: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """Server to client, as the last message: rejects a client that enters, or that has violated the protocol."""

    entry: int
    reason: str


@dataclass(frozen=True, slots=True)
class Declare:
    """Both directions, before the first item: declares the batches' form, and each field's name, dtype and shape."""

    form: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Add:
    """Client to server: adds ``count`` items, followed by their priorities (float64) if ``has_priorities``."""

    request: int
    count: int
    has_priorities: bool
    nbytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Draw:
    """Client to server: asks for ``count`` items. If ``waits`` is false, fewer items are accepted."""

    request: int
    count: int
    beta: float
    waits: bool

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be >= 1, got {self.count}")


@dataclass(frozen=True, slots=True)
class Update:
    """Client to server: sets priorities of ``count`` items. The payload is their ids, then the priorities (float64)."""

    request: int
    count: int
    nbytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Client to server: withdraws a draw whose caller was cancelled. The server still answers the draw."""

    request: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """Client to server: the client will add no more items, and is waiting for the answers to its requests."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Server to client, as the last message: the server ended while it still had clients.

    Attributes:
        kind: Class name of the exception that has ended the server; "" if the server was cancelled.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Left:
    """Client to server, as the last message: the client leaves."""


@dataclass(frozen=True, slots=True)
class Added:
    """Server to client: adds or updates are complete. ``scores`` has the scoring hook's result for each request."""

    requests: tuple[int, ...]
    scores: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Server to client: answers a draw with ``count`` rows, followed by their ids (int64) and weights (float64)."""

    request: int
    count: int
    nbytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """Server to client: a request has failed. If ``later`` is true, it may succeed when repeated."""

    request: int
    later: bool
    reason: str


Change = Add | Update  #: Requests whose payload the server stores.
ReplayMessage = (
    Open
    | Welcome
    | Refused
    | Declare
    | Add
    | Draw
    | Update
    | Withdraw
    | Leaving
    | Left
    | Added
    | Drawn
    | Failed
    | Ended
    | Grant
    | Cancel
)


def scopes(server: int, name: str) -> tuple[int, int]:
    """Return the scope of messages to the buffer's server, and the scope of messages to its clients."""
    return wire.scope_of((server,), f"replay {name}", 0), wire.scope_of((server,), f"clients of replay {name}", 0)


def declare(layout: RowLayout) -> Declare:
    """Return the message that declares the layout of batches, sent by a client or by the server."""
    fields = layout.fields
    return Declare(
        layout.form, tuple(f.name for f in fields), tuple(f.dtype for f in fields), tuple(f.shape for f in fields)
    )


def declared(message: Declare) -> RowLayout:
    """Return the batch layout that a message declares. Raise ValueError if the layout is invalid."""
    form = FORMS.get(message.form)
    if form is None or not message.names:
        raise ValueError(f"invalid form {message.form!r} of a batch with {len(message.names)} fields")
    fields = []
    for name, dtype, shape in zip(message.names, message.dtypes, message.shapes, strict=True):
        dtype_of(dtype)  # refuses an invalid name
        fields.append(Field(name, dtype, shape))
        spanned = tuple(max(1, size) for size in shape)  # torch computes all strides even if a size is 0
        if min(shape, default=0) < 0 or Field(name, dtype, spanned).nbytes > _ITEM_NBYTES_MAX:
            raise ValueError(f"invalid shape {shape} of a field")
    return RowLayout(form, tuple(fields))


def refuse_grant(services: Services, envelope: Envelope[ReplayMessage]) -> None:
    """Abort the stream that a late grant requests, because the sender is waiting for it. Ignore other messages."""
    message = envelope.message
    if isinstance(message, Grant):
        stream = OutboundStream(services.slots, [], envelope.source, message.slot)
        services.spawn_service(stream.abort(), name=f"abort to rank {envelope.source}")
