"""Has what client and server of a replay buffer share: scopes, layouts as messages, answers to late grants."""

from __future__ import annotations

from typing import Final

from asyncdist import Envelope
from asyncdist.messaging import wire
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import Grant
from asyncdist.protocols.replay_buffer.messages import Declare, ReplayMessage
from asyncdist.protocols.replay_buffer.store import FORMS, Field, RowLayout, check_dtype

#: No field of an item is larger: sizes of batches stay numbers that memory can have.
ITEM_NBYTES_MAX: Final = 1 << 40


def scopes(server: int, name: str) -> tuple[int, int]:
    """Return the scopes of a buffer's messages: to the server, and to its clients."""
    return wire.scope_of((server,), f"replay {name}", 0), wire.scope_of((server,), f"clients of replay {name}", 0)


def declare(layout: RowLayout) -> Declare:
    """Return a layout as a message."""
    fields = layout.fields
    return Declare(
        layout.form, tuple(f.name for f in fields), tuple(f.dtype for f in fields), tuple(f.shape for f in fields)
    )


def declared(message: Declare) -> RowLayout:
    """Return the layout that a message describes.

    Raises:
        ValueError: it describes no layout.
    """
    form = FORMS.get(message.form)
    if form is None or not message.names:
        raise ValueError(f"a batch of the form {message.form!r} with {len(message.names)} fields")
    fields = []
    for name, dtype, shape in zip(message.names, message.dtypes, message.shapes, strict=True):
        check_dtype(dtype)
        fields.append(Field(name, dtype, shape))
        spanned = tuple(max(1, size) for size in shape)  # torch computes with it where another size is 0, too
        if min(shape, default=0) < 0 or Field(name, dtype, spanned).nbytes > ITEM_NBYTES_MAX:
            raise ValueError(f"a field of shape {shape}")
    return RowLayout(form, tuple(fields))


def refuse_grant(services: Services, envelope: Envelope[ReplayMessage]) -> None:
    """Answer a grant that has come too late with an abort: its receiver waits for that, or for items, without end."""
    message = envelope.message
    if isinstance(message, Grant):
        stream = OutboundStream(services.slots, [], envelope.source, message.slot)
        services.spawn_service(stream.abort(), name=f"abort to rank {envelope.source}")
