"""Streams whose sender writes the tail of a tensor directly into the receiver's memory, for ranks on one host.

Both ends use a plain stream (:mod:`asyncdist.messaging.streams`). The sender sends the first part of the tensor in
chunks, and writes as much of the tail as it can (:mod:`asyncdist.host_memory.cross_memory_attach`). It then sends the
number of written bytes as an eight-byte message, and the unwritten rest in chunks. The receiver posts the receives for
the rest after the number has arrived.
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
#: Maximum number of bytes written in one polling pass while another task of the sender waits.
SHARED_PIECE_NBYTES: Final = 1 << 20
_COUNT_NBYTES: Final = 8


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
                self.stream.count_sent(self.tail.write_piece(self._piece_nbytes()))
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

    def _piece_nbytes(self) -> int:
        return SHARED_PIECE_NBYTES if self._engine.waiter_count > 1 else PIECE_NBYTES

    def send_rest(self) -> None:
        """Send the number of bytes that were written directly, and then the remaining bytes as messages."""
        what = WaitId(WaitKind.WRITTEN_NBYTES, peer=self.stream.dest, number=self.stream.slot)
        nbytes = self._engine.measured(what, self.tail.written_nbytes)
        while self.tail.written_nbytes < nbytes and self.tail.write_piece(
            PIECE_NBYTES
        ):  # a replay writes as much as the recording
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


class DirectWriteReceiver:
    """Context manager that receives a stream whose sender writes into ``tail``, and finishes the stream on exit.

    Args:
        targets: Buffers for the chunks before the tail.
        tail: Memory that the sender writes into. It stays referenced until the sender has sent everything or aborted.
        cancel: Function that cancels the stream in a slot. Called on exit if the sender has neither finished nor
            aborted.
        chunk_nbytes: Size of the chunks.
        pacer: Object that posts the receives of the chunks.
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
        self._tail = tail
        self._chunk_nbytes = chunk_nbytes
        self._count = memoryview(bytearray(_COUNT_NBYTES))
        # Written bytes, which the stream does not count, minus the eight bytes of their number, which it does count.
        self._uncounted_nbytes = 0
        self._cancel = cancel
        self._stream = streams.InboundStream(
            slots,
            source,
            [*targets, self._count],
            streams.WINDOW_COUNT,
            more=self._targets_of_rest,
            kept=tail,
            pacer=pacer,
        )

    def _targets_of_rest(self) -> list[memoryview]:
        written_nbytes = int.from_bytes(self._count, "little")
        self._uncounted_nbytes = written_nbytes - _COUNT_NBYTES
        return split(self._tail[written_nbytes:], self._chunk_nbytes)

    def __enter__(self) -> streams.InboundStream:
        return self._stream

    def __exit__(self, *exc_info: object) -> None:
        self._stream.received_nbytes += self._uncounted_nbytes
        self._stream.finish(lambda stream: self._cancel(stream.slot))
