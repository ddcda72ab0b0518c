"""The sending end of a bulk stream; see :mod:`asyncdist.messaging.streams`."""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist.errors import AsyncdistError
from asyncdist.messaging.streams import WINDOW_COUNT, Slots, StreamEnd
from asyncdist.waits import WaitId, WaitKind


class OutboundStream(StreamEnd):
    """The sending end of one granted stream.

    Args:
        slots: of this rank; counts the bytes.
        chunks: the bytes to send, in order. They must not change until :attr:`under_way_count` is zero, as it is when
            :meth:`run` has returned.
        dest: the rank that granted.
        slot: its slot.
        is_open: whether more chunks follow, by :meth:`send_more` or :meth:`send_last`.
    """

    _kind = WaitKind.STREAM_SEND

    def __init__(
        self, slots: Slots, chunks: Sequence[memoryview], dest: int, slot: int, *, is_open: bool = False
    ) -> None:
        super().__init__(slots, dest, slot)
        self.dest = dest
        self.slot = slot
        self._chunks = chunks
        self._is_open = is_open
        self._count: memoryview | None = None
        self._next = 0
        self._posting = False
        self.is_stopping = self._aborted = False
        self.under_way_count = 0
        self.sent_nbytes = 0
        self._told: WaitId | None = None  # the identity of the wait for its end

    @property
    def has_left(self) -> bool:
        """Whether all chunks have been sent and their memory is free; :meth:`run` may not have returned yet."""
        return self._is_posted and self.under_way_count == 0

    @property
    def _is_posted(self) -> bool:
        return not self._is_open and self._next == len(self._chunks)

    def stop(self) -> None:
        """Send no further chunk, only the abort."""
        self.is_stopping = True
        self._engine.recheck()

    def start(self) -> bool:
        """Send the first window of chunks; :meth:`run` goes on, or :meth:`cut` ends it.

        Returns:
            Whether all chunks have left already. A small stream needs no task of its own.
        """
        self._post_more()
        return self.has_left and self._error is None

    async def run(self) -> bool:
        """Send all chunks; returns whether the whole stream was sent.

        The engine's pass sends the next chunk when one has left; this coroutine waits for the last.

        **Cancellation**: answers the grant with the abort; the engine keeps the sends that are under way.

        Raises:
            RankLostError: the receiver is gone.
        """
        self.start()
        try:
            await self._until(lambda: self.is_stopping or self._is_posted, is_of_request=True)
        finally:
            complete = self.cut()
        await self._until(lambda: self.under_way_count == 0, is_of_request=True)
        return complete

    async def run_told(self, tag: int, *, aborts: bool = False) -> bool:
        """As :meth:`run`, or :meth:`abort`, for a task that does something after that; recordings tell when.

        Args:
            tag: of the channel on which it was granted.
            aborts: whether to answer with the abort alone; then it returns False.
        """
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
        """Send no further chunk, and the abort, once, unless all chunks were posted; returns whether they were."""
        self.is_stopping = True
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
        self.is_stopping = True
        self._post(memoryview(b""))
        await self._until(lambda: self.under_way_count == 0, is_of_request=True)

    def _post_more(self) -> None:
        if self._posting:  # a chunk left at once: the loop below goes on
            return
        self._posting = True
        try:
            while self._next < len(self._chunks) and self.under_way_count < WINDOW_COUNT and not self.is_stopping:
                chunk = self._chunks[self._next]
                self._next += 1
                self._post(chunk)
                if self._error is not None:
                    break
        finally:
            self._posting = False

    def send_last(self, count: memoryview, chunks: Sequence[memoryview]) -> None:
        """Send ``count``, which :attr:`sent_nbytes` leaves out, and the last chunks of a stream that is open."""
        self._count = count
        self.send_more([count, *chunks], is_last=True)

    def send_more(self, chunks: Sequence[memoryview], *, is_last: bool) -> None:
        """Send further chunks of a stream that is open, and close it after the last ones."""
        self._chunks = [*self._chunks, *chunks]
        self._is_open = not is_last
        self._post_more()
        self._engine.recheck()

    def count_sent(self, nbytes: int) -> None:
        """Count bytes of the stream that have been sent, or written into the receiver's memory."""
        self.sent_nbytes += nbytes
        self._slots.sent_nbytes += nbytes

    def _post(self, chunk: memoryview) -> None:
        """Send one chunk. The engine keeps a send that does not complete at once; most small ones do."""
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
