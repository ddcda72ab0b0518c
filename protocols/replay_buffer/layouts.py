"""Helpers of a replay buffer's client and server: message scopes, conversion of layouts, answers to late grants."""

from __future__ import annotations

from typing import Final

from asyncdist import Envelope
from asyncdist.messaging import wire
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import Grant
from asyncdist.protocols.replay_buffer.messages import Declare, ReplayMessage
from asyncdist.protocols.replay_buffer.store import FORMS, Field, RowLayout, check_dtype

#: Maximum size in bytes of an item's field, so that the computed size of a batch does not overflow.
ITEM_NBYTES_MAX: Final = 1 << 40


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
        check_dtype(dtype)
        fields.append(Field(name, dtype, shape))
        spanned = tuple(max(1, size) for size in shape)  # torch computes all strides even if a size is 0
        if min(shape, default=0) < 0 or Field(name, dtype, spanned).nbytes > ITEM_NBYTES_MAX:
            raise ValueError(f"invalid shape {shape} of a field")
    return RowLayout(form, tuple(fields))


def refuse_grant(services: Services, envelope: Envelope[ReplayMessage]) -> None:
    """Abort the stream that a late grant requests, since the grant's sender waits for it. Ignore other messages."""
    message = envelope.message
    if isinstance(message, Grant):
        stream = OutboundStream(services.slots, [], envelope.source, message.slot)
        services.spawn_service(stream.abort(), name=f"abort to rank {envelope.source}")
