"""Implements ``send_stream`` and ``receive_stream``, which move tensors of any size between two ranks.

The receiver sends a grant over a channel of the runtime, and the sender answers with the bytes. The nth tensor sent to
a rank is received by that rank's nth receive.

If both ranks share a host, the sender writes a large tensor, or its tail, directly into the receiver's memory
(:mod:`asyncdist.host_memory.cross_memory_attach`). Until the receiver has offered access to its memory and the sender
has confirmed that it has access, all bytes are sent as messages. With direct writes, the sender sends the first part of
the tensor in chunks, and writes as much of the tail as it can. It then sends the number of written bytes as an
eight-byte message, and the unwritten rest in chunks. The receiver posts the receives for the rest after the number has
arrived.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from asyncdist import tags
from asyncdist.errors import ClosedError, LocalProtocolError, RankLostError, RemoteProtocolError
from asyncdist.host_memory.cross_memory_attach import AttachToken, DirectWrite, PeerProcess
from asyncdist.messaging import streams
from asyncdist.messaging.channels import Channel, Envelope
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.polling import Pollable
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import InboundStream
from asyncdist.tensors.byte_views import byte_view, check_dense, split
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("asyncdist.messaging.streams")

#: Minimum size, in bytes, of tensors that are written directly. A direct write needs an additional message.
WRITTEN_NBYTES_MIN: Final = 512 << 10
_PAGE_NBYTES: Final = 4096
#: Maximum seconds of CPU time, and of elapsed time, between two written pieces. After a longer pause, the sender is
#: probably computing. It then sends the rest as messages, which the transport can transfer in the background. The first
#: limit is in CPU time, because on busy cores the sender is often preempted for milliseconds.
ATTENTION_CPU_S: Final = 0.001
ATTENTION_S: Final = 0.02
#: Size in bytes of the chunks that the receiver's MPI copies, one per call, in 0.2 to 0.5 ms. A chunk of 1 MiB would
#: take the receiver 8 % more CPU time per byte.
CHUNK_NBYTES: Final = 2 << 20
#: Maximum number of chunks that the sender has posted. They are transferred even while the sender computes.
CHUNK_WINDOW_COUNT: Final = 32
#: Maximum number of bytes written in one polling pass. It blocks the writer for 0.2 to 0.5 ms.
PIECE_NBYTES: Final = 2 << 20
#: Maximum number of bytes written in one polling pass while another task of the sender is waiting.
SHARED_PIECE_NBYTES: Final = 1 << 20
_COUNT_NBYTES: Final = 8


@dataclass(frozen=True, slots=True)
class AttachOffer:
    """Offers a stream's sender access to the receiver's memory: pid, token, and the token's address."""

    pid: int
    address: int
    token: bytes


@dataclass(frozen=True, slots=True)
class AttachAccept:
    """Confirms that a stream's sender can write to the receiver's memory."""


class _Outgoing:
    """A tensor being sent, and its stream or, if the receiver expects a different size, the receiver's grant.

    ``is_lost`` is whether the receiver's process was lost before it answered. A new process of the rank may exist.
    """

    __slots__ = ("address", "is_lost", "refused", "stream", "view")

    def __init__(self, tensor: torch.Tensor) -> None:
        check_dense(tensor)
        self.view = byte_view(tensor)
        self.address = tensor.data_ptr()
        self.stream: OutboundStream | None = None
        self.refused: streams.Grant | None = None
        self.is_lost = False

    @property
    def is_answered(self) -> bool:
        return self.stream is not None or self.refused is not None


class DirectWriteSender:
    """Writes the last part of a tensor into the receiver's memory, piece by piece, and sends the unwritten rest."""

    def __init__(
        self, slots: streams.Slots, chunks: Sequence[memoryview], dest: int, grant: streams.Grant, tail: DirectWrite
    ) -> None:
        self.stream = OutboundStream(slots, chunks, dest, grant.slot, is_open=True, window=CHUNK_WINDOW_COUNT)
        self._engine = slots.engine
        self._chunk_nbytes = grant.chunk_nbytes
        self.tail = tail
        self._note_time()

    def write_piece(self) -> bool:
        """Write the next piece of the tensor. If too much time has passed since the last piece, send the rest instead.

        Return True if more can be written.
        """
        if self.stream.is_stopping:
            return False
        cpu_s, seconds = time.thread_time() - self._cpu_s, time.perf_counter() - self._written_at
        is_over = cpu_s > ATTENTION_CPU_S or seconds > ATTENTION_S
        if not is_over:
            try:
                piece_nbytes = SHARED_PIECE_NBYTES if self._engine.waiter_count > 1 else PIECE_NBYTES
                self.stream.count_sent(self.tail.write_piece(piece_nbytes))
            except OSError as error:  # The memory is on a device, or the receiver's process has ended.
                logger.debug("stream to rank %d: %s; sending instead", self.stream.dest, error)
                is_over = True
            self._note_time()
        if self.tail.rest and not is_over:
            return True
        self.send_rest()
        return False

    def _note_time(self) -> None:
        self._written_at, self._cpu_s = time.perf_counter(), time.thread_time()

    def send_rest(self) -> None:
        """Send the number of bytes that were written directly, and then the remaining bytes as messages."""
        what = WaitId(WaitKind.WRITTEN_NBYTES, peer=self.stream.dest, number=self.stream.slot)
        nbytes = self._engine.measured(what, self.tail.written_nbytes)
        # A replay writes as much as the recording.
        while self.tail.written_nbytes < nbytes and self.tail.write_piece(PIECE_NBYTES):
            pass
        self.tail.written_nbytes = min(self.tail.written_nbytes, nbytes)
        count = memoryview(self.tail.written_nbytes.to_bytes(_COUNT_NBYTES, "little"))
        self.stream.send_last(count, split(self.tail.rest, self._chunk_nbytes))


class Writer(Pollable):
    """Writes tensors directly into other ranks' memory. Each polling pass writes one piece, of each tensor in turn."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._senders: deque[DirectWriteSender] = deque()
        engine.add_pollable(self, is_first=True)

    @property
    def is_busy(self) -> bool:
        """Whether any tensor has not been written completely."""
        return bool(self._senders)

    def add(self, sender: DirectWriteSender) -> None:
        """Start writing the tensor of ``sender`` in the next polling pass."""
        self._senders.append(sender)
        self._engine.ring()

    def poll(self) -> int:
        """Write one piece. Return 0, because no message was delivered."""
        if self._senders:
            self._engine.yield_core_to_receivers()
            sender = self._senders.popleft()
            if sender.write_piece():
                self._senders.append(sender)
            if self._senders:
                self._engine.ring()  # No message will cause the polling pass that writes the next piece.
        return 0


class DirectWriteStream(InboundStream):
    """Receives a stream whose sender writes into ``tail``. A context manager.

    Args:
        targets: Buffers for the chunks before the tail.
        tail: Memory that the sender writes into. It stays referenced until the sender has sent everything or aborted.
    """

    def __init__(
        self,
        slots: streams.Slots,
        source: int,
        targets: Sequence[memoryview],
        tail: memoryview,
        chunk_nbytes: int,
        cancel: Callable[[int], None],
        pacer: streams.Pacer,
    ) -> None:
        count = memoryview(bytearray(_COUNT_NBYTES))
        # Written bytes, which the stream does not count, minus the eight bytes of their number, which it does count.
        self._uncounted_nbytes = 0

        def targets_of_rest() -> list[memoryview]:
            written_nbytes = int.from_bytes(count, "little")
            self._uncounted_nbytes = written_nbytes - _COUNT_NBYTES
            return split(tail[written_nbytes:], chunk_nbytes)

        all_targets, window = [*targets, count], streams.WINDOW_COUNT
        super().__init__(
            slots, source, all_targets, window, more=targets_of_rest, kept=tail, pacer=pacer, cancel=cancel
        )

    def __exit__(self, *exc_info: object) -> None:
        self.received_nbytes += self._uncounted_nbytes
        super().__exit__(*exc_info)


class UserStreams:
    """Sends and receives the tensors of one rank's ``send_stream`` and ``receive_stream`` calls."""

    def __init__(self, services: Services, scope: int) -> None:
        self._services = services
        self._engine = services.slots.engine
        self._refusing = False
        self._refused: set[tuple[int, int]] = set()  # senders that have left, and the slots that they have refused
        # For each other rank, its grants that are waiting for tensors, or tensors that are waiting for its grants.
        self._grants: dict[int, deque[streams.Grant]] = {}
        self._waiting: dict[int, deque[_Outgoing]] = {}
        self._under_way: dict[tuple[int, int], OutboundStream] = {}
        self._written_share = self._engine.transport.capabilities.written_share
        self._tokens: dict[int, AttachToken] = {}
        self._is_listening = False  # whether lost and leaving ranks are reported to this object
        self._finders: set[int] = set()  # ranks that can write to this rank's memory
        self._processes: dict[int, PeerProcess] = {}  # ranks to whose memory this rank can write
        self._writer: Writer | None = None
        self._pacer: streams.Pacer | None = None
        # Offers that arrive during open_channel are stored, because the replies need the channel.
        early_offers: dict[int, AttachOffer] = {}
        self._early_offers: dict[int, AttachOffer] | None = early_offers
        self._channel: Channel[Any] = services.open_channel(
            streams.Grant | streams.Cancel | streams.Refusal | AttachOffer | AttachAccept,
            tag=tags.PARAM,
            scope=scope,
            name="streams",
            handler=self._on_message,
            admits_restarted=True,
        )
        services.on_returned(self._on_returned)
        self._early_offers = None
        for source, offer in early_offers.items():
            self._look_for(source, offer)

    def _on_message(self, envelope: Envelope[Any]) -> None:
        source, message = envelope.source, envelope.message
        grants = self._grants.setdefault(source, deque())
        if isinstance(message, streams.Grant):
            if message.nbytes and self._has_grant_per_slot(grants):
                raise RemoteProtocolError(f"rank {source} granted more streams than it has slots", rank=source)
            grants.append(message)
            if self._refusing:
                self._refuse(source, message)
            else:
                self._start_next(source)
        elif isinstance(message, streams.Refusal):
            self._refused.add((source, message.slot))
            self._send_later(streams.Cancel(message.slot), source)
        elif isinstance(message, AttachOffer):
            if self._early_offers is None:
                self._look_for(source, message)
            else:
                self._early_offers[source] = message
        elif isinstance(message, AttachAccept):
            self._finders |= self._tokens.keys() & {source}
        elif pending := [grant for grant in grants if grant.nbytes and grant.slot == message.slot]:
            # The receive was cancelled or refused before this rank sent anything. Earlier streams on this slot have
            # arrived completely. Receives of empty tensors return immediately, and cannot be cancelled.
            grants.remove(pending[0])
            self._abort(source, message.slot)
        elif (source, message.slot) in self._under_way:
            self._under_way[source, message.slot].stop()

    def _has_grant_per_slot(self, grants: Collection[streams.Grant]) -> bool:
        """Return whether the grants occupy all slots. Receives of empty tensors return at once, and occupy none."""
        most = tags.BULK_SLOT_COUNT
        return len(grants) >= most and sum(bool(grant.nbytes) for grant in grants) >= most

    def refuse_all(self) -> None:
        """Refuse all streams that other ranks request from now on or have requested.

        Called when this rank stops sending.
        """
        self._refusing = True
        for source, grants in self._grants.items():
            for grant in tuple(grants):
                self._refuse(source, grant)

    def _refuse(self, source: int, grant: streams.Grant) -> None:
        if grant.nbytes:
            self._send_later(streams.Refusal(grant.slot), source)
        else:  # An empty stream has no chunks, so its receiver does not wait.
            self._grants[source].remove(grant)

    def _send_later(self, message: Any, dest: int) -> None:
        self._services.spawn_service(self._channel.send(message, dest), name=f"stream message to rank {dest}")

    def _abort(self, source: int, slot: int) -> None:
        stream = OutboundStream(self._services.slots, [], source, slot)
        self._services.spawn_service(stream.abort(), name=f"abort to rank {source}")

    def _start_next(self, dest: int) -> None:
        grants, waiting = self._grants.get(dest), self._waiting.get(dest)
        if not grants or not waiting:
            return
        grant, outgoing = grants.popleft(), waiting.popleft()
        if grant.nbytes != len(outgoing.view):
            outgoing.refused = grant
            if grant.nbytes:  # The next stream on the slot would receive an abort of an empty stream.
                self._abort(dest, grant.slot)
            return
        sent_nbytes = grant.nbytes - grant.written_nbytes
        chunks = split(outgoing.view[:sent_nbytes], grant.chunk_nbytes)
        if grant.written_nbytes:
            view, address = outgoing.view[sent_nbytes:], outgoing.address + sent_nbytes
            tail = DirectWrite(self._processes.get(dest), view, address, grant.address)
            sender = DirectWriteSender(self._services.slots, chunks, dest, grant, tail)
            outgoing.stream = sender.stream
        else:
            sender = None
            outgoing.stream = OutboundStream(self._services.slots, chunks, dest, grant.slot)
        self._under_way[dest, grant.slot] = outgoing.stream
        outgoing.stream.start()
        if sender is not None:
            self._write(sender)

    async def send(self, tensor: torch.Tensor, dest: int) -> None:
        """Send a tensor to ``dest``, which must receive it. Implements :meth:`asyncdist.World.send_stream`."""
        services = self._services
        outgoing = _Outgoing(tensor)
        services.check_peer(dest)
        waiting = self._waiting.setdefault(dest, deque())
        waiting.append(outgoing)
        try:
            self._start_next(dest)
            what = WaitId(WaitKind.STREAM_RECEIVER, tags.PARAM, dest)
            await self._engine.until(lambda: outgoing.is_answered or outgoing.is_lost or dest in services.gone, what)
            if outgoing.stream is not None:
                complete = await outgoing.stream.run_notified(tags.PARAM)
            elif outgoing.refused is not None:
                wanted, nbytes = outgoing.refused.nbytes, len(outgoing.view)
                text = f"the tensor must have the {wanted} bytes that rank {dest} receives, got {nbytes}"
                raise LocalProtocolError(text, dest=dest, nbytes=nbytes)
            else:
                raise self._gone(dest, "received", is_lost=outgoing.is_lost)
        finally:
            if not outgoing.is_answered and outgoing in waiting:
                waiting.remove(outgoing)
            if outgoing.stream is not None:
                self._end(outgoing.stream)
        if not complete:
            raise ClosedError(f"rank {dest} cancelled its receive of the tensor", dest=dest)

    def _end(self, stream: OutboundStream) -> None:
        stream.cut()
        # The receiver may have granted the slot again. The entry then belongs to a newer stream.
        if self._under_way.get((stream.dest, stream.slot)) is stream:
            del self._under_way[stream.dest, stream.slot]

    async def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive from ``source`` into ``tensor``, and return it. Implements :meth:`asyncdist.World.receive_stream`."""
        check_dense(tensor)
        view = byte_view(tensor)
        services = self._services
        services.check_peer(source)
        if source in services.gone:
            raise self._gone(source, "sent")
        written_nbytes = self._written_nbytes(len(view), source)
        sent_nbytes = len(view) - written_nbytes
        # Chunks are small if this rank copies them from the sender on the same host, because each copy blocks its loop.
        is_copying = written_nbytes and sent_nbytes
        chunk_nbytes = CHUNK_NBYTES if is_copying else streams.USER_CHUNK_NBYTES
        targets = split(view[:sent_nbytes], chunk_nbytes)
        address = tensor.data_ptr() + sent_nbytes if written_nbytes else 0

        def cancel(slot: int) -> None:
            if source not in services.gone:
                self._channel.send_nowait(streams.Cancel(slot), source)

        stream: InboundStream
        if written_nbytes:
            pacer = self._pacer = self._pacer or streams.Pacer(self._engine)
            tail = view[sent_nbytes:]
            stream = DirectWriteStream(services.slots, source, targets, tail, chunk_nbytes, cancel, pacer)
        else:
            stream = services.slots.inbound(source, targets, cancel)
        with stream:
            grant = streams.Grant(stream.slot, len(view), chunk_nbytes, written_nbytes, address)
            self._channel.send_nowait(grant, source)
            try:
                await stream.whole()
            except streams.StreamAborted as error:
                if (source, stream.slot) in self._refused:
                    raise self._gone(source, "sent") from error
                raise
        return tensor

    def _gone(self, rank: int, done: str, *, is_lost: bool = False) -> RankLostError:
        ended = "was lost" if is_lost or rank in self._services.lost_ranks() else "left"
        return RankLostError(f"rank {rank} {ended} before it {done} the tensor", rank=rank)

    # -- direct writes ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Revoke the permission of all other ranks to write to this rank's memory."""
        for token in self._tokens.values():
            token.revoke()

    def _on_gone(self, rank: int) -> None:
        if rank in self._tokens:
            self._tokens[rank].revoke()

    def _on_returned(self, rank: int) -> None:
        """Drop the grants, tensors and memory access of a restarted rank's previous process."""
        self._on_gone(rank)
        for outgoing in self._waiting.get(rank, ()):
            outgoing.is_lost = True  # Its task may not have run since the loss, and must not wait for the new process.
        for of_ranks in (self._grants, self._waiting, self._tokens, self._processes):
            of_ranks.pop(rank, None)
        self._finders.discard(rank)
        self._refused = {(source, slot) for source, slot in self._refused if source != rank}

    def _write(self, sender: DirectWriteSender) -> None:
        """Write the last part of a tensor directly. If direct writes are unavailable or busy, send it as messages."""
        if self._writer is None or (self._writer.is_busy and self._written_share < 1.0):
            sender.send_rest()
        else:
            self._writer.add(sender)

    def _written_nbytes(self, nbytes: int, source: int) -> int:
        """Return the number of bytes that ``source`` may write directly. If it has no access yet, offer it access."""
        if nbytes < WRITTEN_NBYTES_MIN or not self._written_share:
            return 0
        if source in self._finders:
            return nbytes if self._written_share == 1.0 else int(nbytes * self._written_share) & -_PAGE_NBYTES
        if source not in self._tokens:
            if not self._is_listening:
                self._is_listening = True
                self._services.on_gone(self._on_gone)
            token = self._tokens[source] = AttachToken()
            self._channel.send_nowait(AttachOffer(token.pid, token.address, token.token), source)
        return 0

    def _look_for(self, source: int, offer: AttachOffer) -> None:
        if self._written_share:
            try:
                self._processes[source] = PeerProcess(offer.pid, offer.address, offer.token)
            except OSError as error:  # The receiver is on a different host, or access is not permitted.
                logger.debug("rank %d cannot be written to: %s", source, error)
            else:
                self._writer = self._writer or Writer(self._engine)
                self._channel.send_nowait(AttachAccept(), source)
