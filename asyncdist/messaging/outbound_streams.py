"""Sends the chunks of a tensor as a bulk stream. The receiving end is in :mod:`asyncdist.messaging.streams`."""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist.errors import AsyncdistError
from asyncdist.messaging.streams import WINDOW_COUNT, Slots, StreamEnd
from asyncdist.waits import WaitId, WaitKind


class OutboundStream(StreamEnd):
    """Sends the chunks of a tensor, after the receiver has permitted it, as one stream.

    The chunks must not change until :meth:`run` has returned.
    """

    _kind = WaitKind.STREAM_SEND

    def __init__(
        self,
        slots: Slots,
        chunks: Sequence[memoryview],
        dest: int,
        slot: int,
        *,
        is_open: bool = False,
        window: int = WINDOW_COUNT,
    ) -> None:
        super().__init__(slots, dest, slot)
        self.dest = dest
        self.slot = slot
        self._chunks = chunks
        self._is_open = is_open
        self._window = window
        self._count: memoryview | None = None
        self._next = 0
        self._posting = False
        self.is_stopping = self._aborted = False
        self.under_way_count = 0
        self.sent_nbytes = 0
        self._told: WaitId | None = None  # identity of the wait for the stream's end, or None if it is not recorded

    @property
    def has_left(self) -> bool:
        """Whether all chunks have been sent and their memory may be reused. :meth:`run` may still be running."""
        return self._is_posted and self.under_way_count == 0

    @property
    def _is_posted(self) -> bool:
        return not self._is_open and self._next == len(self._chunks)

    def stop(self) -> None:
        """End the stream early by sending an empty message instead of further chunks."""
        self.is_stopping = True
        self._engine.recheck()

    def start(self) -> bool:
        """Send the first window of chunks. Return whether all chunks of the stream have already left this rank."""
        self._post_more()
        return self.has_left and self._error is None

    async def run(self) -> bool:
        """Send all chunks, and wait until they have left this rank. Return False if the stream was aborted.

        **Cancellation**: the abort is sent, and the engine completes the sends in progress.

        Raises:
            RankLostError: The receiver is lost.
        """
        self.start()
        try:
            await self._until(lambda: self.is_stopping or self._is_posted, is_of_request=True)
        finally:
            complete = self.cut()
        await self._until(lambda: self.under_way_count == 0, is_of_request=True)
        return complete

    async def run_notified(self, tag: int, *, aborts: bool = False) -> bool:
        """Send all chunks, or only an abort, and record the end of the stream. Return whether all chunks were sent."""
        name = self._told = self._engine.name_send(WaitKind.STREAM_LEFT, self.dest, tag)
        try:
            complete = False
            if aborts:
                await self.abort()
            else:
                complete = await self.run()
        finally:
            self._told = None
        if name is not None:
            await self._engine.repeat_sent(name, self.dest)
        return complete

    def cut(self) -> bool:
        """Stop sending chunks. Return True if all chunks were posted. Otherwise, abort the stream and return False."""
        self.is_stopping = True
        complete = self._is_posted
        if not complete and self._error is None and not self._aborted:
            self._aborted = True
            self._post(memoryview(b""))
        return complete

    async def abort(self) -> None:
        """Answer the receiver's request for this stream with an abort, without calling :meth:`run`."""
        self.is_stopping = True
        self._post(memoryview(b""))
        await self._until(lambda: self.under_way_count == 0, is_of_request=True)

    def _post_more(self) -> None:
        if self._posting:  # The loop below has caused this call, because a chunk left immediately.
            return
        self._posting = True
        try:
            while self._next < len(self._chunks) and self.under_way_count < self._window and not self.is_stopping:
                chunk = self._chunks[self._next]
                self._next += 1
                self._post(chunk)
                if self._error is not None:
                    break
        finally:
            self._posting = False

    def send_last(self, count: memoryview, chunks: Sequence[memoryview]) -> None:
        """Send ``count`` (a message that is not part of the tensor), and then the last chunks of an open stream."""
        self._count = count
        self.send_more([count, *chunks], is_last=True)

    def send_more(self, chunks: Sequence[memoryview], *, is_last: bool) -> None:
        """Send further chunks of an open stream. ``is_last`` ends the stream."""
        self._chunks = [*self._chunks, *chunks]
        self._is_open = not is_last
        self._post_more()
        self._engine.recheck()

    def count_sent(self, nbytes: int) -> None:
        """Add ``nbytes`` to the number of bytes sent as messages or written directly."""
        self.sent_nbytes += nbytes
        self._slots.sent_nbytes += nbytes

    def _post(self, chunk: memoryview) -> None:
        if self._is_over():
            return
        try:
            request = self._engine.transport.start_send(chunk, self._peer, self._tag)
        except AsyncdistError as error:
            self._error = self._error or error
            return
        if chunk is not self._count:
            self.count_sent(len(chunk))
        if request is not None:
            self.under_way_count += 1
            self._engine.watch(request, self._what, self._on_sent)

    def _on_sent(self, error: AsyncdistError | None) -> None:
        self.under_way_count -= 1
        self._error = self._error or error
        if self._error is None:
            self._post_more()
        is_over = self.under_way_count == 0 and (self.is_stopping or self._is_posted)
        if is_over and self._told and self._engine._in_pass:
            self._engine.wake_by(self._told, bool)
            self._told = None
