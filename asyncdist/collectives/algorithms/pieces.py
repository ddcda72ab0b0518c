"""Sends bytes between two members of a group in pieces, or a notice of an error instead.

Small data is sent as one message. Larger data is sent in pieces, so that a member can relay the first pieces before the
last pieces arrive. A final message of one byte lets the receiver detect a different size.

A member that cannot send the expected bytes sends a *notice* instead: an empty message, followed by the reason. No
member therefore waits for bytes that a lost member should have relayed.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from asyncdist.errors import AsyncdistError, LocalProtocolError, RankLostError, TruncationError
from asyncdist.messaging.engine import Engine
from asyncdist.transports.base import Request
from asyncdist.waits import WaitId, WaitKind

#: Size of a piece in bytes. Data of at most half this size is sent as one message.
PIECE_NBYTES: Final = 512 << 10
#: Maximum number of messages in progress to one member.
AHEAD_COUNT: Final = 4

#: Format of a notice's second message: a rank, the number of bytes that it passes, and the different number of another
#: rank. Both numbers are -1 if the rank is lost.
_NOTICE: Final = struct.Struct("<qqq")


def pieces(first: int, end: int, piece_nbytes: int = PIECE_NBYTES) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each piece of the bytes from ``first`` to ``end``. A final empty range is the end mark.

    Data of at most half a piece is one piece without an end mark, so that no receiver takes it for a first piece.
    """
    if end - first <= piece_nbytes // 2:
        if first < end:
            yield first, end
        return
    for low in range(first, end, piece_nbytes):
        yield low, min(low + piece_nbytes, end)
    yield end, end


def piece_of(view: memoryview, low: int, high: int) -> memoryview:
    """Return the memory of a piece that :func:`pieces` yields, or new memory of one byte for the end mark."""
    return view[low:high] if low < high else memoryview(bytearray(1))


async def attempt(work: Awaitable[object]) -> AsyncdistError | None:
    """Await ``work``, and return its error instead of raising it, so that the caller can notify the other members."""
    try:
        await work
    except (RankLostError, LocalProtocolError, TruncationError) as error:
        return error
    return None


async def receive_exactly(engine: Engine, view: memoryview, source: int, tag: int) -> None:
    """Receive exactly ``len(view)`` bytes from ``source`` into ``view``.

    Raises:
        RankLostError: The source is lost, or has sent a notice that another member is lost.
        LocalProtocolError, TruncationError: The source passes a different number of bytes, or reports that another
            member does.
    """
    _, nbytes = await engine.receive(view, source, tag)
    if nbytes or not len(view):
        check_nbytes(view, nbytes, source)
        return
    notice = bytearray(_NOTICE.size)
    await engine.receive(notice, source, tag)
    rank, nbytes, others = _NOTICE.unpack(notice)
    if nbytes < 0:
        raise RankLostError(f"rank {rank} is lost, so rank {source} abandoned the collective", rank=rank)
    text = (
        f"all members must pass the same number of bytes, but rank {rank} passes {nbytes} and another rank passes "
        f"{others}"
    )
    raise LocalProtocolError(text, rank=rank, nbytes=nbytes, other_nbytes=others)


def check_nbytes(view: memoryview, nbytes: int, source: int) -> None:
    """Raise LocalProtocolError if the message of ``source`` does not have exactly ``len(view)`` bytes."""
    if nbytes != len(view):
        text = (
            f"all members must pass the same number of bytes, but rank {source} passes {nbytes} and this rank passes "
            f"{len(view)}"
        )
        raise LocalProtocolError(text, rank=source, nbytes=nbytes, other_nbytes=len(view))


def notice_of(error: AsyncdistError) -> bytes:
    """Return the second message of a notice that describes ``error``."""
    facts = error.facts
    if isinstance(error, RankLostError):
        return _NOTICE.pack(facts.get("rank", -1), -1, -1)
    if isinstance(error, TruncationError):
        return _NOTICE.pack(facts.get("source", -1), facts.get("message_nbytes") or 0, facts.get("buffer_nbytes", 0))
    return _NOTICE.pack(facts.get("rank", -1), facts.get("nbytes", 0), facts.get("other_nbytes", 0))


async def receive_in_pieces(engine: Engine, view: memoryview, first: int, end: int, source: int, tag: int) -> None:
    """Receive the bytes from ``first`` to ``end`` in pieces. Raise the errors of :func:`receive_exactly`."""
    for low, high in pieces(first, end):
        await receive_exactly(engine, piece_of(view, low, high), source, tag)


class Outlet:
    """Sends pieces to one member, with a limited number in progress. Leaving the context abandons incomplete sends."""

    def __init__(self, engine: Engine, dest: int, tag: int) -> None:
        self._engine = engine
        self._dest = dest
        self._tag = tag
        self._under_way: deque[Request] = deque()
        self._has_sent_error = False
        self.error: AsyncdistError | None = None

    def __enter__(self) -> Outlet:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()

    def give_up(self) -> None:
        """Abandon the sends that have not completed."""
        for request in self._under_way:  # A request may never complete after a rank is lost or has left.
            self._engine.disown(request)
        self._under_way.clear()

    async def put(self, view: memoryview) -> None:
        """Wait while too many sends are in progress, then start a send. After :meth:`send_error`, do nothing."""
        if self._has_sent_error:
            return
        while len(self._under_way) >= AHEAD_COUNT:
            await self._wait_for_oldest()
        if self.error is None:
            self._under_way.append(self._engine.transport.isend(view, self._dest, self._tag))

    async def put_all(self, view: memoryview, first: int, end: int) -> None:
        """Start sending the bytes from ``first`` to ``end`` in pieces."""
        for low, high in pieces(first, end):
            await self.put(piece_of(view, low, high))

    async def send_error(self, error: AsyncdistError) -> None:
        """Send a notice that describes ``error`` instead of the remaining bytes."""
        for message in (b"", notice_of(error)):
            await self.put(memoryview(message))
        self._has_sent_error = True

    async def flush(self) -> AsyncdistError | None:
        """Wait until all pieces have been sent. Return the error that prevented it, or None."""
        while self._under_way:
            await self._wait_for_oldest()
        return self.error

    async def _wait_for_oldest(self) -> None:
        try:
            await self._engine.wait(self._under_way[0], WaitId(WaitKind.SEND, self._tag, self._dest))
        except RankLostError as error:
            if self._engine.failure is not None:
                raise
            self.error = error
            self.give_up()
            return
        self._under_way.popleft()


async def send_pieces(
    engine: Engine, dest: int, tag: int, send: Callable[[Outlet], Awaitable[None]]
) -> AsyncdistError | None:
    """Call ``send`` with an outlet to ``dest``, and wait until all is sent.

    Return the error if ``dest`` is lost, or None.
    """
    with Outlet(engine, dest, tag) as outlet:
        await send(outlet)
        return await outlet.flush()


def raise_first(*errors: AsyncdistError | None) -> None:
    """Raise the first error that is not None."""
    for error in errors:
        if error is not None:
            raise error
