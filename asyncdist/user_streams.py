"""Tensors of any size between two ranks, for user code: ``send_stream`` and ``receive_stream``.

The receiver grants, over a channel of the runtime; the sender answers with the bytes. What meets what is a matter of
order alone: the n-th tensor sent to a rank goes to its n-th receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import torch

from asyncdist import streams, tags
from asyncdist.channels import Channel, Envelope
from asyncdist.errors import ClosedError, LocalProtocolError, RankLostError


class Host(Protocol):
    """The world that these streams belong to: what they need of it."""

    slots: streams.Slots
    gone: set[int]
    stream_sent_nbytes: int
    stream_received_nbytes: int

    def open_channel(
        self, message_types: Any, *, tag: int, scope: int, name: str, handler: Callable[[Envelope[Any]], None]
    ) -> Channel[Any]:
        """One of the runtime's, with a handler."""

    def spawn_service(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> object:
        """A task that the world waits for."""

    def check_peer(self, rank: int) -> None:
        """Refuse what is no rank."""


class _Outgoing:
    """A tensor on its way.

    Attributes:
        view: its bytes.
        stream: since it was granted.
        refused: a grant for another size, which it met instead.
    """

    __slots__ = ("refused", "stream", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.stream: streams.OutboundStream | None = None
        self.refused: streams.Grant | None = None

    @property
    def is_answered(self) -> bool:
        """Whether ``dest`` receives."""
        return self.stream is not None or self.refused is not None

    async def run(self, dest: int) -> bool:
        """Send the rest; whether ``dest`` took it all. Raises as :meth:`asyncdist.World.send_stream`."""
        if self.stream is not None:
            return await self.stream.run()
        if self.refused is None:
            raise RankLostError(f"rank {dest} left before it received", rank=dest)
        nbytes = len(self.view)
        raise LocalProtocolError(
            f"rank {dest} receives {self.refused.nbytes} bytes, this rank sends {nbytes}", dest=dest, nbytes=nbytes
        )


class UserStreams:
    """``send_stream`` and ``receive_stream`` of one world.

    Args:
        world: the world.
        scope: of the grants on the wire; equal on all ranks.
    """

    def __init__(self, world: Host, scope: int) -> None:
        self._world = world
        self._engine = world.slots.engine
        self._refusing = False
        # Of each peer: either grants that no tensor waits for, or tensors that wait for a grant.
        self._grants: dict[int, deque[streams.Grant]] = {}
        self._waiting: dict[int, deque[_Outgoing]] = {}
        self._under_way: dict[tuple[int, int], streams.OutboundStream] = {}
        self._channel: Channel[Any] = world.open_channel(
            streams.Grant | streams.Cancel,
            tag=tags.PARAM,
            scope=scope,
            name="streams",
            handler=self._on_message,
        )

    def _on_message(self, envelope: Envelope[Any]) -> None:
        source, message = envelope.source, envelope.message
        grants = self._grants.setdefault(source, deque())
        if isinstance(message, streams.Grant):
            streams.check_grant(message, source)
            grants.append(message)
            if self._refusing:
                self._refuse(source)
            else:
                self._start_next(source)
        elif pending := [grant for grant in grants if grant.slot == message.slot]:
            # Given up before anybody sent. (An older stream on this slot may still be under way here: it has arrived.)
            grants.remove(pending[0])
            self._abort(source, message.slot)
        elif (source, message.slot) in self._under_way:
            self._under_way[source, message.slot].stop()

    def refuse_all(self) -> None:
        """Nobody will send from here any more: answer every grant, now and later, with an abort."""
        self._refusing = True
        for source in self._grants:
            self._refuse(source)

    def _refuse(self, source: int) -> None:
        grants = self._grants[source]
        while grants:
            grant = grants.popleft()
            if grant.nbytes:  # else it is complete as it is
                self._abort(source, grant.slot)

    def _abort(self, source: int, slot: int) -> None:
        stream = streams.OutboundStream(self._engine, [], source, slot)
        self._world.spawn_service(stream.abort(), name=f"abort to rank {source}")

    def _start_next(self, dest: int) -> None:
        """Answer a grant of ``dest`` with the tensor that waits for one, in the pass that brought the grant."""
        grants, waiting = self._grants.get(dest), self._waiting.get(dest)
        if not grants or not waiting:
            return
        grant, outgoing = grants.popleft(), waiting.popleft()
        if grant.nbytes != len(outgoing.view):
            outgoing.refused = grant
            if grant.nbytes:  # nobody waits for an answer to a grant of nothing: the next stream would get it
                self._abort(dest, grant.slot)
            return
        chunks = streams.split(outgoing.view, grant.chunk_nbytes)
        outgoing.stream = streams.OutboundStream(self._engine, chunks, dest, grant.slot)
        self._under_way[dest, grant.slot] = outgoing.stream
        outgoing.stream.start()

    async def send(self, tensor: torch.Tensor, dest: int) -> None:
        """As :meth:`asyncdist.World.send_stream`."""
        world = self._world
        outgoing = _Outgoing(streams.byte_view(tensor))
        world.check_peer(dest)
        waiting = self._waiting.setdefault(dest, deque())
        waiting.append(outgoing)
        try:
            self._start_next(dest)
            await self._engine.until(
                lambda: outgoing.is_answered or dest in world.gone, f"rank {dest} to receive a stream"
            )
            complete = await outgoing.run(dest)
        finally:
            if outgoing in waiting:
                waiting.remove(outgoing)
            if outgoing.stream is not None:
                self._end(outgoing.stream)
        if not complete:
            raise ClosedError(f"rank {dest} gave up receiving", dest=dest)

    def _end(self, stream: streams.OutboundStream) -> None:
        stream.cut()
        self._world.stream_sent_nbytes += stream.sent_nbytes
        # The receiver may have had it all, and granted the slot again, before this end noticed.
        if self._under_way.get((stream.dest, stream.slot)) is stream:
            del self._under_way[stream.dest, stream.slot]

    async def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """As :meth:`asyncdist.World.receive_stream`."""
        view = streams.byte_view(tensor)
        world = self._world
        world.check_peer(source)
        chunk_nbytes = streams.USER_CHUNK_NBYTES
        targets = streams.split(view, chunk_nbytes)

        def cancel(slot: int) -> None:
            if source not in world.gone:
                self._channel.send_nowait(streams.Cancel(slot), source)

        with world.slots.inbound(source, targets, cancel) as stream:
            self._channel.send_nowait(streams.Grant(stream.slot, len(view), chunk_nbytes), source)
            await stream.whole()
        world.stream_received_nbytes += stream.received_nbytes
        return tensor
