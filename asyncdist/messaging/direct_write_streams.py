"""Streams whose sender writes the tail of a tensor directly into the receiver's memory.

Both ends use a plain stream (:mod:`asyncdist.messaging.streams`) on one slot. Its messages are the chunks of the first
part, then the number of tail bytes that the sender has written (eight bytes; see
:mod:`asyncdist.host_memory.cross_memory_attach`), then the rest of the tail in chunks. The sender decides how much it
writes; the receiver posts the receives for the rest when it knows that number.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from asyncdist.host_memory.cross_memory_attach import DirectWrite
from asyncdist.messaging import streams
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.polling import Pollable
from asyncdist.tensors.byte_views import split
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("asyncdist.messaging.streams")

#: If more seconds than this pass between two pieces, the sender is computing between safe points. It then sends the
#: rest as messages, which move without its help.
ATTENTION_S: Final = 0.001
_COUNT_NBYTES: Final = 8


class DirectWriteSender:
    """Writes the tail of one outbound stream piece by piece, and then sends the unwritten rest.

    Args:
        slots: Stream slots of this rank.
        chunks: Bytes to send first; see :class:`~asyncdist.messaging.outbound_streams.OutboundStream`.
        dest: Rank that granted the stream.
        slot: Granted slot.
        tail: Bytes to write.

    Attributes:
        stream: The plain stream, which is open until :meth:`send_rest`.
    """

    def __init__(
        self, slots: streams.Slots, chunks: Sequence[memoryview], dest: int, slot: int, tail: DirectWrite
    ) -> None:
        self.stream = OutboundStream(slots, chunks, dest, slot, is_open=True)
        self._engine = slots.engine
        self.tail = tail
        self._written_at = time.perf_counter()

    def write_piece(self) -> bool:
        """Write a piece of the tail; return whether to write more. After a long pause, return False."""
        if self.stream.is_stopping:
            return False
        is_over = time.perf_counter() - self._written_at > ATTENTION_S
        if not is_over:
            try:
                self.stream.count_sent(self.tail.write_piece())
            except OSError as error:  # device memory, or the process has ended, which the transport will report
                logger.debug("stream to rank %d: %s; sending instead", self.stream.dest, error)
                is_over = True
            self._written_at = time.perf_counter()
        if self.tail.rest and not is_over:
            return True
        self.send_rest()
        return False

    def send_rest(self) -> None:
        """Stop writing; send the number of written bytes, and then the rest."""
        what = WaitId(WaitKind.WRITTEN_NBYTES, peer=self.stream.dest, number=self.stream.slot)
        nbytes = self._engine.measured(what, self.tail.written_nbytes)
        while (
            self.tail.written_nbytes < nbytes and self.tail.write_piece()
        ):  # in a replay, write as much as in the recording
            pass
        self.tail.written_nbytes = min(self.tail.written_nbytes, nbytes)
        count = memoryview(self.tail.written_nbytes.to_bytes(_COUNT_NBYTES, "little"))
        self.stream.send_last(count, split(self.tail.rest, streams.USER_CHUNK_NBYTES))


class Writer(Pollable):
    """Writes the tails of this rank's streams: one piece per pass, the streams in turn.

    It is not a request: no deadline or safe point waits for it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._senders: deque[DirectWriteSender] = deque()
        engine.add_pollable(self)

    @property
    def is_busy(self) -> bool:
        """Whether any tail is unfinished."""
        return bool(self._senders)

    def add(self, sender: DirectWriteSender) -> None:
        """Write the tail of ``sender`` from the next poll on."""
        self._senders.append(sender)
        self._engine.ring()

    def poll(self) -> int:
        """Write one piece; return 0, since no message was delivered."""
        if self._senders:
            sender = self._senders.popleft()
            if sender.write_piece():
                self._senders.append(sender)
            if self._senders:
                self._engine.ring()  # no peer rings for it
        return 0


class DirectWriteReceiver:
    """Receives a stream whose sender writes to ``tail``; a context manager that finishes the stream.

    Args:
        slots: Stream slots of this rank.
        source: Rank of the sender.
        targets: Buffers for the chunks that are sent first.
        tail: Memory that the sender writes to. It is kept until the sender has answered.
        cancel: Sends a cancel for slot n; called only if the sender has not answered.
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
        self._uncounted_nbytes = 0  # written bytes minus the eight bytes of the count message
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
