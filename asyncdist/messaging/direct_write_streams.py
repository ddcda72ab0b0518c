"""Streams whose sender writes the end of a tensor into the receiver's memory by itself.

Both ends compose a plain stream (:mod:`asyncdist.messaging.streams`) on one slot. Its messages are the chunks of the
first part, then eight bytes that say how much of the tail the sender has written
(:mod:`asyncdist.transports.cross_memory_attach`), then the rest of the tail in chunks. The sender decides how much it
writes; the receiver posts the receives of the rest when it knows.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from asyncdist.messaging import streams
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.polling import Pollable
from asyncdist.tensors.byte_views import split
from asyncdist.transports.cross_memory_attach import DirectWrite
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("asyncdist.messaging.streams")

#: A sender that comes to its next piece later than this computes between its safe points: it had better send the rest,
#: which then moves without it.
ATTENTION_S: Final = 0.001
_COUNT_NBYTES: Final = 8


class DirectWriteSender:
    """Writes the tail of one outbound stream, piece by piece, and then sends what it has not written.

    Args:
        slots: of this rank.
        chunks: the bytes to send first, as of :class:`~asyncdist.messaging.outbound_streams.OutboundStream`.
        dest: the rank that granted.
        slot: its slot.
        tail: the bytes to write.

    Attributes:
        stream: the plain stream, which is open until :meth:`send_rest`.
    """

    def __init__(
        self, slots: streams.Slots, chunks: Sequence[memoryview], dest: int, slot: int, tail: DirectWrite
    ) -> None:
        self.stream = OutboundStream(slots, chunks, dest, slot, is_open=True)
        self._engine = slots.engine
        self.tail = tail
        self._written_at = time.perf_counter()

    def write_piece(self) -> bool:
        """Write a piece of the tail; returns whether to write more. A rank that comes too late sends the rest."""
        if self.stream.is_stopping:
            return False
        is_over = time.perf_counter() - self._written_at > ATTENTION_S
        if not is_over:
            try:
                self.stream.count_sent(self.tail.write_piece())
            except OSError as error:  # memory of a device, say, or the process has ended; the transport will tell
                logger.debug("stream to rank %d: %s; sending instead", self.stream.dest, error)
                is_over = True
            self._written_at = time.perf_counter()
        if self.tail.rest and not is_over:
            return True
        self.send_rest()
        return False

    def send_rest(self) -> None:
        """Write no more: send the number of bytes that have been written, and the rest."""
        what = WaitId(WaitKind.WRITTEN_NBYTES, peer=self.stream.dest, number=self.stream.slot)
        nbytes = self._engine.measured(what, self.tail.written_nbytes)
        while self.tail.written_nbytes < nbytes and self.tail.write_piece():  # in a replay, which is slower
            pass
        self.tail.written_nbytes = min(self.tail.written_nbytes, nbytes)
        count = memoryview(self.tail.written_nbytes.to_bytes(_COUNT_NBYTES, "little"))
        self.stream.send_last(count, split(self.tail.rest, streams.USER_CHUNK_NBYTES))


class Writer(Pollable):
    """Writes the tails of this rank's streams: one piece in each pass, of each stream in turn.

    It is no request: it completes nothing that has arrived, and no deadline or safe point waits for it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._senders: deque[DirectWriteSender] = deque()
        engine.add_pollable(self)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to write."""
        return bool(self._senders)

    def add(self, sender: DirectWriteSender) -> None:
        """Write the tail of ``sender`` from the next pass on, or from this one, if it has not come here yet."""
        self._senders.append(sender)
        self._engine.ring()

    def poll(self) -> int:
        """Write a piece. It never counts as a message."""
        if self._senders:
            sender = self._senders.popleft()
            if sender.write_piece():
                self._senders.append(sender)
            if self._senders:
                self._engine.ring()  # no peer will
        return 0


class DirectWriteReceiver:
    """Receives a stream whose sender writes to ``tail``; a context manager that finishes it.

    Args:
        slots: where the slot comes from.
        source: the sender.
        targets: of the chunks that are sent first.
        tail: memory that the sender writes to. It is kept until the sender has answered.
        cancel: tells the sender that slot n is given up; called only while it has not answered.
    """

    def __init__(
        self,
        slots: streams.Slots,
        source: int,
        targets: Sequence[memoryview],
        tail: memoryview,
        cancel: Callable[[int], None],
    ) -> None:
        self._tail = tail
        self._count = memoryview(bytearray(_COUNT_NBYTES))
        self._uncounted_nbytes = 0  # by the stream's messages; one of them is the count
        self._cancel = cancel
        self._stream = streams.InboundStream(
            slots, source, [*targets, self._count], streams.WINDOW_COUNT, more=self._targets_of_rest, kept=tail
        )

    def _targets_of_rest(self) -> list[memoryview]:
        written_nbytes = int.from_bytes(self._count, "little")
        self._uncounted_nbytes = written_nbytes - _COUNT_NBYTES
        return split(self._tail[written_nbytes:], streams.USER_CHUNK_NBYTES)

    def __enter__(self) -> streams.InboundStream:
        return self._stream

    def __exit__(self, *exc_info: object) -> None:
        self._stream.received_nbytes += self._uncounted_nbytes
        self._stream.finish(lambda stream: self._cancel(stream.slot))
