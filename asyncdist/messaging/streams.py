"""Bulk streams: send tensors as raw bytes, received directly into the receiver's buffers.

The receiver takes a *slot*, one of the tags reserved for streams from this sender, and posts receives on it. It then
sends a *grant* over a channel of the caller. The sender answers every grant with the whole stream, or with an *abort*,
a message of zero bytes on the slot's tag. The slot stays taken until the answer is complete, so that a late chunk never
arrives in the buffer of a different stream. A receiver that gives up sends a *cancel*, and discards the remaining
chunks. The slots of a lost sender are never reused (*retired*).

This module contains the receiving end and the slots. :mod:`asyncdist.messaging.outbound_streams` contains the sending
end, and :mod:`asyncdist.messaging.user_streams` contains direct writes into the receiver's memory.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from asyncdist import tags
from asyncdist.errors import AsyncdistError, BusyError, RankLostError, RemoteProtocolError
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.polling import Pollable
from asyncdist.transports.base import Request
from asyncdist.waits import WaitId, WaitKind

CHUNK_NBYTES: Final = 4 << 20
#: Chunk size of ``send_stream`` in bytes. Chunks are received into the target tensor, so smaller chunks save no memory.
USER_CHUNK_NBYTES: Final = 16 << 20
#: Maximum number of outstanding chunks at each end of a stream.
WINDOW_COUNT: Final = 4
#: Number of chunks that a :class:`Pacer` receives in one polling pass if no task is waiting for anything else.
BURST_COUNT: Final = 2
_CHUNK_COUNT_MAX: Final = 2**20


@dataclass(frozen=True, slots=True)
class Grant:
    """Permits the sender of a stream to send ``nbytes`` bytes of a tensor.

    The bytes are sent on ``slot``, a tag reserved for streams, in chunks of ``chunk_nbytes``. If ``written_nbytes`` is
    not 0, the sender may write up to this number of the last bytes directly to ``address`` in the receiver's memory
    (:mod:`asyncdist.messaging.user_streams`).
    """

    slot: int
    nbytes: int
    chunk_nbytes: int
    written_nbytes: int = 0
    address: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError if a size is invalid, or if the stream would have too many chunks."""
        _check_slot(self.slot)
        if not 0 <= self.written_nbytes <= self.nbytes or self.address < 0:
            raise ValueError(f"the sizes of a grant must be >= 0 and consistent, got {self}")
        if self.chunk_nbytes < 1 or self.nbytes > self.chunk_nbytes * _CHUNK_COUNT_MAX:
            raise ValueError(f"a grant must have at most {_CHUNK_COUNT_MAX} chunks, got {self}")


@dataclass(frozen=True, slots=True)
class Cancel:
    """Asks the sender of a stream to end the stream on ``slot`` early."""

    slot: int

    def __post_init__(self) -> None:
        """Raise ValueError if the slot's number is out of range."""
        _check_slot(self.slot)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refuses a grant, because this message's sender sends no further streams. The receiver then cancels the stream.

    The sender aborts the stream only after this cancel. Without this order, the abort could arrive first, because it
    has a different tag, and the receiver could not tell it from the abort of a cancelled send.
    """

    slot: int

    def __post_init__(self) -> None:
        """Raise ValueError if the slot's number is out of range."""
        _check_slot(self.slot)


def _check_slot(slot: int) -> None:
    if not 0 <= slot < tags.BULK_SLOT_COUNT:
        raise ValueError(f"slot must be from 0 to {tags.BULK_SLOT_COUNT - 1}, got {slot}")


class StreamAborted(RemoteProtocolError):
    """Raised if the sender of a stream has aborted it. Has the attributes ``rank`` and ``received_nbytes``."""


class StreamEnd:
    """Base class of the sending and the receiving end of a stream. Detects a restart of the peer."""

    _kind: ClassVar[WaitKind]

    def __init__(self, slots: Slots, peer: int, slot: int) -> None:
        self._slots = slots
        self._engine = slots.engine
        self._peer = peer
        self._incarnation = slots.incarnation_of(peer)
        self._tag = tags.BULK_FIRST + slot
        self._what = WaitId(self._kind, self._tag, peer)
        self._error: AsyncdistError | None = None

    def _is_over(self) -> bool:
        """Return whether the stream has failed. If the peer was restarted, the stream fails with RankLostError."""
        if self._slots.incarnation_of(self._peer) != self._incarnation:
            self._error = self._error or RankLostError(f"rank {self._peer} is gone", rank=self._peer)
        return self._error is not None

    async def _until(
        self, condition: Callable[[], bool], deadline: float | None = None, *, is_of_request: bool = False
    ) -> None:
        def holds() -> bool:
            if self._is_over() and self._error is not None:
                raise self._error
            return condition()

        if not await self._engine.until(holds, self._what, deadline=deadline, is_of_request=is_of_request):
            raise TimeoutError(f"the {self._what} did not complete in time")


class InboundStream(StreamEnd):
    """Receives the chunks of one stream into given buffers, with a window of posted receives.

    Args:
        targets: Buffers of the chunks. Chunk i is received into ``targets[i]``. If the caller iterates over
            :meth:`chunks`, chunks i and i + ``window`` may share a buffer.
        window: Number of posted receives, or 0 if the caller posts them with :meth:`post_up_to`, so that several
            streams can share the targets in turn.
        more: Function that returns targets for further chunks, called once when the last target is filled.
        kept: Memory that the sender may write to. It stays referenced forever if the slot is retired.
        pacer: Object that posts the receives one at a time after :meth:`flow`, or None to keep ``window`` receives
            posted.
        cancel: Function that cancels the stream in a slot. If the stream is a context manager, it is called on exit
            unless the sender has finished or aborted. A generator of contextlib would take 10 us longer.

    Attributes:
        received_nbytes: Number of bytes that the caller has received.
        taken_count: Number of chunks that the caller has received.
    """

    _kind = WaitKind.STREAM_RECEIVE

    def __init__(
        self,
        slots: Slots,
        source: int,
        targets: Sequence[memoryview],
        window: int,
        *,
        more: Callable[[], Sequence[memoryview]] | None = None,
        kept: memoryview | None = None,
        pacer: Pacer | None = None,
        cancel: Callable[[int], None] | None = None,
    ) -> None:
        self.source = source
        self.slot = slots.take(source)
        super().__init__(slots, source, self.slot)
        self._targets = targets
        self._more = more
        self._kept = kept
        self._pacer = pacer
        self._cancel = cancel
        self._window = window
        self._flows = False  # whether each arriving chunk posts the next receive
        self._discards = False  # whether chunks are discarded until the sender finishes or aborts
        self._posted: dict[int, Request] = {}
        self._post_count = self._post_limit = 0
        self._posting = False
        self._arrived: dict[int, int] = {}
        self._arrived_count = self.taken_count = 0
        self._message_count = len(targets)  # fewer after an abort
        self._sink: memoryview | None = None
        self.received_nbytes = 0
        if window:
            self.post_up_to(1 if pacer is not None else window)

    def __enter__(self) -> InboundStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._cancel is not None, "only a stream with a cancel function is a context manager"
        cancel = self._cancel
        self.finish(lambda stream: cancel(stream.slot))

    @property
    def _answered(self) -> bool:
        """Whether all messages of the stream have arrived. An abort is the last message of its stream."""
        return self._arrived_count == self._message_count

    async def chunks(self, *, deadline: float | None = None) -> AsyncIterator[int]:
        """Yield the index of each chunk after its arrival, in order. The caller must have sent a :class:`Grant`.

        Args:
            deadline: Time on the loop's clock, in seconds, for the whole stream.

        Raises:
            TimeoutError: The deadline has passed.
            StreamAborted: The sender has aborted the stream.
            RemoteProtocolError: A chunk has the wrong size.
            RankLostError: The sender is lost.
        """
        for index in range(len(self._targets)):
            await self.arrival(index, deadline=deadline)
            yield index
            self.post_up_to(index + 1 + self._window)

    async def arrival(self, index: int, *, deadline: float | None = None) -> None:
        """Wait for chunk ``index``, whose receive has been posted. The caller must wait for all chunks, in order.

        The errors are the same as for :meth:`chunks`.
        """
        if index not in self._arrived or self._error is not None:
            await self._until(functools.partial(self._arrived.__contains__, index), deadline)
        self._take(index)

    def flow(self) -> None:
        """Let each arriving chunk post the next receive. All targets must be different buffers."""
        self._flows = True
        self._post_next()  # Continue after the chunks that have already arrived.

    def _post_next(self) -> None:
        if self._pacer is None:
            self.post_up_to(self._arrived_count + self._window)
        else:
            self._pacer.add(self)

    def post_one(self) -> int:
        """Post the receive of the next chunk. Return the number of chunks that have arrived immediately."""
        arrived_count = self._arrived_count
        self.post_up_to(arrived_count + 1)
        return self._arrived_count - arrived_count

    async def whole(self, *, deadline: float | None = None) -> None:
        """Wait until all chunks have arrived in the targets, which must be different buffers.

        The errors are the same as for :meth:`chunks`.

        Args:
            deadline: Time on the loop's clock, in seconds.
        """
        self.flow()
        await self._until(lambda: self._answered, deadline)
        for index in range(len(self._targets)):
            self._take(index)

    def _take(self, index: int) -> None:
        nbytes = self._arrived.pop(index)
        if nbytes == 0:
            raise StreamAborted(
                f"rank {self._peer} aborted its stream after {self.received_nbytes} bytes",
                rank=self._peer,
                received_nbytes=self.received_nbytes,
            )
        if nbytes != len(self._targets[index]):
            expected = len(self._targets[index])
            raise RemoteProtocolError(
                f"rank {self._peer} must send a chunk of {expected} bytes, got {nbytes}", rank=self._peer
            )
        self.received_nbytes += nbytes
        self.taken_count += 1

    def post_up_to(self, count: int) -> None:
        """Post the receives of the first ``count`` chunks, except those that are already posted."""
        if count > self._post_limit:
            self._post_limit = count
        # If _posting is true, the loop below has caused this call, because a chunk arrived immediately.
        if self._posting or self._is_over():
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
            elif self._more is not None and index == len(self._targets) - 1:
                self._targets = [*self._targets, *self._more()]
                self._more = None
                self._message_count = len(self._targets)
        if self._discards:
            self._discard_more()
        elif self._flows and self._error is None and not self._answered:
            self._post_next()

    def finish(self, cancel: Callable[[InboundStream], None]) -> None:
        """End the stream. Unless the sender has finished or aborted, cancel it and discard the remaining chunks."""
        if self._is_over() or (not self._answered and self._peer in self._engine.transport.lost_ranks()):
            self._retire()
        elif self._answered:
            if self.taken_count == len(self._targets):
                self._slots.received_nbytes += self.received_nbytes
            self._give_back()
        else:
            self._discards = True
            self._slots.discarding_count += 1
            try:
                cancel(self)
            except RankLostError as error:  # The sender was restarted and never got the grant.
                self._error = self._error or error
            self._discard_more()

    def _discard_more(self) -> None:
        """Receive and discard the remaining chunks, or the abort, in the background.

        Targets that streams share are replaced by a new buffer, because another stream may be using them now.
        """
        if self._answered or self._error is not None:
            self._slots.discarding_count -= 1
            if self._error is not None:
                self._retire()
            else:
                self._give_back()
        else:
            if not self._window and self._sink is None:
                rest = self._targets[self._post_count :]
                self._sink = memoryview(bytearray(max(map(len, rest), default=0)))
            self.post_up_to(self._arrived_count + max(1, self._window))

    def _give_back(self) -> None:
        self._withdraw()
        self._slots.give_back(self._peer, self.slot)

    def _retire(self) -> None:
        """Never reuse the stream's slot, because the lost sender may still write to the stream's memory."""
        self._slots.retired_counts[self._peer] += 1
        self._withdraw()
        if self._kept is not None:
            self._slots.kept.append(self._kept)

    def _withdraw(self) -> None:
        """Cancel the posted receives, because no further message will arrive on this slot."""
        self._flows = self._discards = False
        if self._posted:
            for request in list(self._posted.values()):
                request.cancel()
            self._engine.wake()


class Pacer(Pollable):
    """Posts the receives of streams in turn, so that other tasks run between the chunks.

    If the sender is on the same host, MPI copies a whole chunk when its receive is posted. A polling pass with several
    posted receives would copy several chunks, and would deliver no message meanwhile.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams: deque[InboundStream] = deque()
        engine.add_pollable(self, is_first=True)

    def add(self, stream: InboundStream) -> None:
        """Post the next receive of ``stream`` in the next polling pass."""
        self._streams.append(stream)
        self._engine.ring()

    def poll(self) -> int:
        """Receive one chunk, or several if no task is waiting for anything else. Return the number of chunks."""
        arrived_count = 0
        if self._streams:
            self._engine.yield_core_to_receivers()
        for _ in range(1 if self._engine.waiter_count > 1 else BURST_COUNT):
            if not self._streams:
                break
            arrived_count += self._streams.popleft().post_one()
        if self._streams:
            self._engine.ring()
        return arrived_count


class Slots:
    """Allocates the slots (tags) on which each sender sends its streams, and counts the bytes of all streams.

    Attributes:
        sent_nbytes: Number of bytes sent in streams, including aborted streams.
        received_nbytes: Number of bytes of completely received streams.
        discarding_count: Number of cancelled streams whose sender has not yet finished or aborted.
        retired_counts: Number of slots that are never reused, by sender.
        kept: Memory areas to which lost senders may still write.
    """

    def __init__(self, engine: Engine, incarnations: Mapping[int, int] | None = None) -> None:
        self.engine = engine
        self._incarnations = incarnations
        self.kept: list[memoryview] = []
        self.discarding_count = 0
        self.sent_nbytes = self.received_nbytes = 0
        # For each sender, the number of different slots ever taken, and a heap of the slots that are free again.
        self._used_counts: Counter[int] = Counter()
        self.retired_counts: Counter[int] = Counter()
        self._given_back: defaultdict[int, list[int]] = defaultdict(list)

    def incarnation_of(self, rank: int) -> int:
        """Return the number of restarts of ``rank``, which identifies its current process."""
        return self._incarnations.get(rank, 0) if self._incarnations else 0

    def take(self, source: int) -> int:
        """Return the lowest free slot (tag) for a stream from ``source``. Raise BusyError if there is none."""
        if self._given_back[source]:
            return heapq.heappop(self._given_back[source])
        slot = self._used_counts[source]
        if slot == tags.BULK_SLOT_COUNT:
            raise BusyError(
                f"all {tags.BULK_SLOT_COUNT} stream slots of rank {source} are in use; await other receives from it "
                "first",
                rank=source,
            )
        self._used_counts[source] += 1
        return slot

    def give_back(self, source: int, slot: int) -> None:
        """Free a slot for later streams from ``source``."""
        heapq.heappush(self._given_back[source], slot)

    @property
    def unanswered_count(self) -> int:
        """Number of allocated slots whose sender is not lost and has not finished."""
        lost = self.engine.transport.lost_ranks()
        return sum(
            self._taken_count(source) - self.retired_counts[source]
            for source in list(self._used_counts)
            if source not in lost
        )

    @property
    def taken_count(self) -> int:
        """Number of allocated slots, including those that are never reused."""
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
    ) -> InboundStream:
        """Return a context manager that receives a stream. If the stream is unfinished on exit, it calls ``cancel``."""
        return InboundStream(self, source, targets, window, cancel=cancel)
