"""What protocols may ask of the rank that they run on.

The :class:`asyncdist.World` of a rank provides these services. Protocols, streams and versioned windows are typed by
this protocol class in place of it, so that they depend on messages alone and not on how a rank starts and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from asyncdist.messaging import streams
from asyncdist.messaging.channels import Channel, Envelope
from asyncdist.messaging.engine import Engine


class Services(Protocol):
    """The services of one rank.

    Attributes:
        engine: polls the requests of this rank.
        slots: the slots of the bulk streams that this rank receives.
        gone: ranks that have left or are lost.
        stream_sent_nbytes: bytes of bulk streams sent so far.
        stream_received_nbytes: bytes of bulk streams received so far.
    """

    engine: Engine
    slots: streams.Slots
    gone: set[int]
    stream_sent_nbytes: int
    stream_received_nbytes: int

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    def open_channel(
        self, message_types: Any, *, tag: int, scope: int, name: str, handler: Callable[[Envelope[Any]], None]
    ) -> Channel[Any]:
        """Open a channel of the runtime, whose messages go to a handler."""

    def spawn_service(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> object:
        """Start a task that the rank awaits before it ends."""

    def check_peer(self, rank: int) -> None:
        """Raise LocalProtocolError if there is no such rank."""

    def on_gone(self, listener: Callable[[int], None]) -> None:
        """Call ``listener(rank)`` for each rank that leaves or is lost from now on."""

    async def assemble(self, ranks: Sequence[int], what: str) -> None:
        """Return when all ``ranks`` are here, and may enter what blocks until all of them have entered it."""
