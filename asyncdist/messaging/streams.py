"""Bulk streams: tensors as raw bytes on a granted slot, straight into the receiver's buffers.

Bulk has no header. The receiver takes a *slot* of the sender, posts its receives on the slot's tag, and only then
sends a grant (over a channel of whoever uses the stream). Every grant is answered by the whole stream or by one
*abort*, a message of zero bytes on that tag; until then the slot stays taken, so a late chunk can never land in
another stream's buffer. A receiver that gives up sends a cancel and discards until that answer.

Slots are counted per sender and shared by everything on this rank. A slot granted to a peer that is lost is retired.

This module moves bytes. What they mean, and who asks whom, is the caller's.
"""

from __future__ import annotations

import functools
import heapq
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from asyncdist import tags
from asyncdist.errors import AsyncdistError, BusyError, RemoteProtocolError
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.polling import Pollable
from asyncdist.tensors.byte_views import split
from asyncdist.transports.base import Request
from asyncdist.transports.cross_memory_attach import DirectWrite

logger = logging.getLogger("asyncdist.messaging.streams")

CHUNK_NBYTES: Final = 4 << 20
#: Of a user's stream, whose targets are all there: nothing is saved by small ones. One copies for some milliseconds.
USER_CHUNK_NBYTES: Final = 16 << 20
#: Chunks under way at once, at either end.
WINDOW_COUNT: Final = 4
#: A sender that comes to its next piece later than this computes between its safe points: it had better send the rest,
#: which then moves without it.
ATTENTION_S: Final = 0.001
#: What a sender says of the bytes that it has written: how many.
_COUNT_NBYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Grant:
    """Receiver to sender: the receives for ``nbytes`` in chunks of ``chunk_nbytes`` are posted on ``slot``.

    The last ``written_nbytes`` of them are not sent with the others: the sender, a process of the same host, writes
    them to ``address`` (:mod:`asyncdist.transports.cross_memory_attach`), as many as it likes, sends their number in
    eight bytes, and then the rest in chunks. Zero where there is no such thing.
    """

    slot: int
    nbytes: int
    chunk_nbytes: int
    written_nbytes: int = 0
    address: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """Receiver to sender: stop the stream on ``slot`` with an abort."""

    slot: int


def check_grant(grant: Grant, source: int) -> None:
    """Refuse a grant that no receiver of ours makes.

    Raises:
        RemoteProtocolError: a number in it is out of range.
    """
    if not (
        0 <= grant.slot < tags.BULK_SLOT_COUNT
        and 0 <= grant.written_nbytes <= grant.nbytes
        and grant.chunk_nbytes >= 1
        and grant.address >= 0
    ):
        raise RemoteProtocolError(f"rank {source} granted {grant}", rank=source)


class StreamAborted(RemoteProtocolError):
    """The sender gave the stream up. Carries ``rank`` and ``received_nbytes``."""


class _Stream:
    """What both ends share.

    The requests are the engine's; completions only change counts, which a coroutine waits for.
    """

    _direction: ClassVar[str]

    def __init__(self, engine: Engine, peer: int, slot: int) -> None:
        self._engine = engine
        self._peer = peer
        self._tag = tags.BULK_FIRST + slot
        self._error: AsyncdistError | None = None

    @property
    def _what(self) -> str:
        """For reports."""
        return f"stream {self._direction} rank {self._peer}, tag {self._tag}"

    async def _until(self, condition: Callable[[], bool], deadline: float | None = None) -> None:
        def holds() -> bool:
            if self._error is not None:
                raise self._error
            return condition()

        if not await self._engine.until(holds, self._what, deadline=deadline):
            raise TimeoutError(f"{self._what}: nothing more came in time")


class Writer(Pollable):
    """Writes the tails of this rank's streams: in each pass a piece, of each stream in turn.

    No request: what it does is nothing that has arrived, and no deadline or safe point waits for it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams: deque[OutboundStream] = deque()
        engine.add_inlet(self)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to write."""
        return bool(self._streams)

    def add(self, stream: OutboundStream) -> None:
        """Write the tail of ``stream`` from the next pass on, or from this one, if it has not come here yet."""
        self._streams.append(stream)
        self._engine.ring()

    def poll(self) -> int:
        """Write a piece. Never is it a message."""
        if self._streams:
            stream = self._streams.popleft()
            if stream.write_piece():
                self._streams.append(stream)
            if self._streams:
                self._engine.ring()  # no peer will
        return 0


class OutboundStream(_Stream):
    """The sending end of one granted stream.

    Args:
        engine: this rank's.
        chunks: what to send, in order. They must not change until :attr:`under_way_count` is zero, as it is when
            :meth:`run` has returned.
        dest: the rank that granted.
        slot: its slot.
        tail: what comes after the chunks and is to be written, as far as this rank comes to it.
    """

    _direction = "to"

    def __init__(
        self,
        engine: Engine,
        chunks: Sequence[memoryview],
        dest: int,
        slot: int,
        tail: DirectWrite | None = None,
    ) -> None:
        super().__init__(engine, dest, slot)
        self.dest = dest
        self.slot = slot
        self._chunks = chunks
        self._tail = tail
        self._written_at = time.perf_counter() if tail is not None else 0.0
        self._count: memoryview | None = None
        self._next = 0
        self._posting = False
        self._stopping = self._aborted = False
        self.under_way_count = 0
        self.sent_nbytes = 0

    @property
    def has_left(self) -> bool:
        """Whether all of it has been sent and its memory is free; :meth:`run` may not have had its turn to say so."""
        return self._is_posted and self.under_way_count == 0

    @property
    def _is_posted(self) -> bool:
        return self._tail is None and self._next == len(self._chunks)

    def stop(self) -> None:
        """Send no further chunk, but the abort."""
        self._stopping = True
        self._engine.recheck()

    def start(self) -> bool:
        """Send what the window holds; :meth:`run` goes on, or :meth:`cut` ends it.

        Returns:
            Whether that was everything, and has left. A small stream needs no task of its own.
        """
        self._post_more()
        return self.has_left and self._error is None

    async def run(self) -> bool:
        """Send everything; whether it was the whole stream.

        Each chunk that has left makes room for the next, in the engine's pass; this coroutine waits for the last.

        **Cancellation**: answers the grant with the abort; what is under way stays with the engine.

        Raises:
            RankLostError: the receiver is gone.
        """
        self.start()
        try:
            await self._until(lambda: self._stopping or self._is_posted)
        finally:
            complete = self.cut()
        await self._until(lambda: self.under_way_count == 0)
        return complete

    def cut(self) -> bool:
        """Send no further chunk, and answer with the abort, once, unless all are under way; whether they are."""
        self._stopping = True
        complete = self._is_posted
        if not complete and self._error is None and not self._aborted:
            self._aborted = True
            self._post(memoryview(b""))
        return complete

    async def abort(self) -> None:
        """Answer the grant with the abort alone, in place of :meth:`run`.

        Raises:
            RankLostError: the receiver is gone.
        """
        self._stopping = True
        self._post(memoryview(b""))
        await self._until(lambda: self.under_way_count == 0)

    def _post_more(self) -> None:
        if self._posting:  # a chunk left at once: the loop below goes on
            return
        self._posting = True
        try:
            while self._next < len(self._chunks) and self.under_way_count < WINDOW_COUNT and not self._stopping:
                chunk = self._chunks[self._next]
                self._next += 1
                self._post(chunk)
                if self._error is not None:
                    break
        finally:
            self._posting = False

    def write_piece(self) -> bool:
        """Write a piece of the tail; whether there is more to write. A rank that comes too late sends the rest."""
        tail = self._tail
        if tail is None or self._stopping:
            return False
        is_over = time.perf_counter() - self._written_at > ATTENTION_S
        if not is_over:
            try:
                self.sent_nbytes += tail.write_piece()
            except OSError as error:  # memory of a device, say, or the process has ended; the transport will tell
                logger.debug("%s: %s; sending instead", self._what, error)
                is_over = True
            self._written_at = time.perf_counter()
        if tail.rest and not is_over:
            return True
        self.send_rest()
        return False

    def send_rest(self) -> None:
        """Write no more: say how much has been written, and send the rest."""
        assert self._tail is not None, f"{self._what}: nothing is written"
        self._count = memoryview(self._tail.written_nbytes.to_bytes(_COUNT_NBYTES, "little"))
        self._chunks = [*self._chunks, self._count, *split(self._tail.rest, USER_CHUNK_NBYTES)]
        self._tail = None
        self._post_more()
        self._engine.recheck()

    def _post(self, chunk: memoryview) -> None:
        """Send it. The engine keeps what does not leave at once; of a small state nothing comes there."""
        try:
            request = self._engine.transport.start_send(chunk, self._peer, self._tag)
        except AsyncdistError as error:
            self._error = self._error or error
            return
        if chunk is not self._count:
            self.sent_nbytes += len(chunk)
        if request is not None:
            self.under_way_count += 1
            self._engine.watch(request, self._what, self._on_sent)

    def _on_sent(self, error: AsyncdistError | None) -> None:
        self.under_way_count -= 1
        self._error = self._error or error
        if self._error is None:
            self._post_more()


class InboundStream(_Stream):
    """The receiving end: a window of posted receives on one slot.

    Args:
        slots: where the slot comes from.
        source: the sender.
        targets: chunk i is received into ``targets[i]``. Targets may repeat at a distance of ``window`` chunks: a
            target is posted again only when the caller has asked for the chunk after the one that it held.
        window: receives posted at once; 0 for a caller that says which ones by :meth:`post_up_to`, and may have
            targets that several streams share, one after the other.
        tail: memory behind the targets that the sender writes to by itself. Kept until it has answered.
    """

    _direction = "from"

    def __init__(
        self, slots: Slots, source: int, targets: Sequence[memoryview], window: int, tail: memoryview | None = None
    ) -> None:
        self.source = source
        self.slot = slots.take(source)
        super().__init__(slots.engine, source, self.slot)
        self._slots = slots
        self._tail = tail
        self._count_index = len(targets)
        self._targets = targets if tail is None else [*targets, memoryview(bytearray(_COUNT_NBYTES))]
        self._window = window
        self._posted: dict[int, Request] = {}
        self._post_count = self._post_limit = 0
        self._posting = False
        self._arrived: dict[int, int] = {}
        self._arrived_count = 0
        self._message_count = len(self._targets)  # until an abort says that there are fewer
        self._answered = not self._targets
        self._continuous = False
        self._discarding = False
        self._sink: memoryview | None = None
        self.received_nbytes = 0
        if window:
            self.post_up_to(window)

    async def chunks(self, *, deadline: float | None = None) -> AsyncIterator[int]:
        """The index of each chunk when it has arrived, in order. Send the grant before the first.

        Args:
            deadline: on the loop's clock, for the whole stream.

        Raises:
            TimeoutError: the deadline passed first.
            StreamAborted: the sender gave up.
            RemoteProtocolError: a chunk of the wrong size.
            RankLostError: the sender is gone.
        """
        for index in range(len(self._targets)):
            await self.arrival(index, deadline=deadline)
            yield index
            self.post_up_to(index + 1 + self._window)

    async def arrival(self, index: int, *, deadline: float | None = None) -> None:
        """Wait for chunk ``index``, which has been posted; for each of them once, in order.

        Raises:
            TimeoutError, StreamAborted, RemoteProtocolError, RankLostError: as :meth:`chunks`.
        """
        if index not in self._arrived or self._error is not None:
            await self._until(functools.partial(self._arrived.__contains__, index), deadline)
        self._take(index)

    async def whole(self) -> None:
        """Wait until all of it is in the targets, which must not repeat. Each arrival posts the next receive.

        Raises:
            StreamAborted, RemoteProtocolError, RankLostError: as :meth:`chunks`.
        """
        self._continuous = True
        self.post_up_to(self._arrived_count + self._window)  # some may have arrived at once
        await self._until(lambda: self._answered)
        for index in range(len(self._targets)):
            self._take(index)

    def _take(self, index: int) -> None:
        nbytes = self._arrived.pop(index)
        if nbytes == 0:
            raise StreamAborted(
                f"rank {self._peer} gave up its stream after {self.received_nbytes} bytes",
                rank=self._peer,
                received_nbytes=self.received_nbytes,
            )
        if nbytes != len(self._targets[index]):
            expected = len(self._targets[index])
            raise RemoteProtocolError(
                f"rank {self._peer} sent a chunk of {nbytes} bytes for {expected}", rank=self._peer
            )
        self.received_nbytes += nbytes

    def post_up_to(self, count: int) -> None:
        """Post the receives of the first ``count`` chunks, as far as they are not posted yet."""
        if count > self._post_limit:
            self._post_limit = count
        if self._posting:  # a chunk was there already: the loop below goes on
            return
        self._posting = True
        try:
            while self._post_count < self._post_limit and self._post_count < self._message_count:
                index = self._post_count
                self._post_count += 1
                target = self._targets[index] if self._sink is None else self._sink[: len(self._targets[index])]
                request = self._engine.transport.irecv(target, self._peer, self._tag)
                self._posted[index] = request
                self._engine.watch(request, self._what, functools.partial(self._on_arrival, index))
        finally:
            self._posting = False

    def _on_arrival(self, index: int, error: AsyncdistError | None) -> None:
        request = self._posted.pop(index)
        if error is None and request.cancelled:
            return
        self._arrived_count += 1
        if error is not None:
            self._error = self._error or error
        else:
            self._arrived[index] = request.nbytes
            if request.nbytes == 0:
                self._message_count = index + 1
            elif self._tail is not None and index == self._count_index:
                rest = self._tail[int.from_bytes(self._targets[index], "little") :]
                self._targets = [*self._targets, *split(rest, USER_CHUNK_NBYTES)]
                self._message_count = len(self._targets)
            # An abort may complete before the chunk ahead of it, whose target is in use until then.
            self._answered = self._arrived_count == self._message_count
        if self._discarding:
            self._discard_more()
        elif self._continuous and self._error is None and not self._answered:
            self.post_up_to(self._arrived_count + self._window)

    def finish(self, cancel: Callable[[InboundStream], None]) -> None:
        """End it. If the sender has not answered yet, ``cancel`` tells it, and the rest is discarded."""
        if self._error is not None or (not self._answered and self._peer in self._engine.transport.lost_ranks()):
            self._retire()
        elif self._answered:
            self._withdraw()
            self._slots.give_back(self._peer, self.slot)
        else:
            self._discarding = True
            self._slots.discarding_count += 1
            cancel(self)
            self._discard_more()

    def _discard_more(self) -> None:
        """Take the answer, the rest or the abort, in the background. The targets stay in use until then.

        Those that are not posted yet may be another stream's by now: where they are shared, one buffer of this
        stream's own takes the place of them all, one message at a time.
        """
        if self._answered or self._error is not None:
            self._discarding = False
            self._slots.discarding_count -= 1
            if self._error is not None:
                self._retire()
            else:
                self._withdraw()
                self._slots.give_back(self._peer, self.slot)
        else:
            if not self._window and self._sink is None:
                rest = self._targets[self._post_count :]
                self._sink = memoryview(bytearray(max(map(len, rest), default=0)))
            self.post_up_to(self._arrived_count + max(1, self._window))

    def _retire(self) -> None:
        """The slot stays taken for ever: nobody will answer for it. A sender that lives may still write a piece."""
        self._withdraw()
        if self._tail is not None:
            self._slots.kept.append(self._tail)

    def _withdraw(self) -> None:
        """Take back receives that no message will come for."""
        if self._posted:
            for request in list(self._posted.values()):
                request.cancel()
            self._engine.wake()


class Slots:
    """The slots of every sender, as this rank grants them.

    Attributes:
        engine: this rank's.
        discarding_count: streams that were given up and have not been answered yet.
        kept: memory that a sender may still write to, though it is believed to be lost.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.kept: list[memoryview] = []
        self.discarding_count = 0
        # By sender: how many slots have ever been taken, the lowest first, and a heap of those given back since.
        self._used_counts: Counter[int] = Counter()
        self._given_back: defaultdict[int, list[int]] = defaultdict(list)

    def take(self, source: int) -> int:
        """The lowest free slot of ``source``.

        Raises:
            BusyError: all of them are taken.
        """
        if self._given_back[source]:
            return heapq.heappop(self._given_back[source])
        slot = self._used_counts[source]
        if slot == tags.BULK_SLOT_COUNT:
            raise BusyError(f"all {tags.BULK_SLOT_COUNT} stream slots of rank {source} are taken", rank=source)
        self._used_counts[source] += 1
        return slot

    def give_back(self, source: int, slot: int) -> None:
        """The slot has been answered."""
        heapq.heappush(self._given_back[source], slot)

    @property
    def unanswered_count(self) -> int:
        """Slots in use that a peer can still answer for: those granted to lost ones are retired."""
        lost = self.engine.transport.lost_ranks()
        return sum(self._taken_count(source) for source in self._used_counts if source not in lost)

    @property
    def taken_count(self) -> int:
        """Slots in use, retired ones included."""
        return sum(map(self._taken_count, self._used_counts))

    def _taken_count(self, source: int) -> int:
        return self._used_counts[source] - len(self._given_back[source])

    def inbound(
        self,
        source: int,
        targets: Sequence[memoryview],
        cancel: Callable[[int], None],
        *,
        window: int = WINDOW_COUNT,
        tail: memoryview | None = None,
    ) -> _Inbound:
        """A stream from ``source`` whose slot is looked after however the body of ``with`` ends.

        Args:
            source: the sender.
            targets: see :class:`InboundStream`.
            cancel: tells the sender that slot n is given up; called only while it has not answered.
            window, tail: see :class:`InboundStream`.
        """
        return _Inbound(InboundStream(self, source, targets, window, tail), cancel)


class _Inbound:
    """The context of :meth:`Slots.inbound`; one made by contextlib costs 10 us more with cold caches."""

    __slots__ = ("_cancel", "_stream")

    def __init__(self, stream: InboundStream, cancel: Callable[[int], None]) -> None:
        self._stream = stream
        self._cancel = cancel

    def __enter__(self) -> InboundStream:
        return self._stream

    def __exit__(self, *exc_info: object) -> None:
        self._stream.finish(lambda stream: self._cancel(stream.slot))
