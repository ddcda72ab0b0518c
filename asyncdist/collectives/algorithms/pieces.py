"""Sends bytes between two members of a group in pieces, or a notice of a loss instead.

Up to a limit, bytes travel in one message. More bytes travel in pieces, so that a relaying member can begin before all
have arrived, and end with a message of one byte. Different sizes on members are detected by this end, and by the first
piece, which is larger than any single message.

Each member sends the bytes that others expect, or a *notice* instead: an empty message, followed by the reason. No
member therefore waits for bytes that a lost member was to pass on, even if nothing else reports the loss.
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

#: Size of a piece. Data of at most half this size is one message.
PIECE_NBYTES: Final = 512 << 10
#: Maximum number of messages in progress to one member.
AHEAD_COUNT: Final = 4

#: Format of the message that follows an empty message: the rank concerned, its number of bytes, and that of another
#: rank. Both numbers are -1 if the rank is lost.
_NOTICE: Final = struct.Struct("<qqq")


def pieces(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the pieces of the bytes from ``first`` to ``end``; an empty range is the end mark."""
    if end - first <= PIECE_NBYTES // 2:
        if first < end:
            yield first, end
        return
    for low in range(first, end, PIECE_NBYTES):
        yield low, min(low + PIECE_NBYTES, end)
    yield end, end


def piece_of(view: memoryview, low: int, high: int) -> memoryview:
    """Return the memory of one of :func:`pieces`, to send from or to receive into."""
    return view[low:high] if low < high else memoryview(bytearray(1))


async def attempt(work: Awaitable[object]) -> AsyncdistError | None:
    """Await ``work``; return its error if the other members must be notified of it."""
    try:
        await work
    except (RankLostError, LocalProtocolError, TruncationError) as error:
        return error
    return None


async def take(engine: Engine, view: memoryview, source: int, tag: int) -> None:
    """Receive exactly ``len(view)`` bytes.

    Raises:
        RankLostError: The source, or according to it another member, is lost.
        LocalProtocolError, TruncationError: The source, or according to it another member, passes another number of
            bytes.
    """
    _, nbytes = await engine.receive(view, source, tag)
    if nbytes == len(view):
        return
    if nbytes:
        text = f"rank {source} passes {nbytes} bytes, but this rank passes {len(view)}"
        raise LocalProtocolError(text, rank=source, nbytes=nbytes, other_nbytes=len(view))
    notice = bytearray(_NOTICE.size)
    await engine.receive(notice, source, tag)
    rank, nbytes, others = _NOTICE.unpack(notice)
    if nbytes < 0:
        raise RankLostError(f"rank {rank} is lost, so rank {source} has abandoned the collective", rank=rank)
    text = f"rank {rank} passes {nbytes} bytes, but another rank passes {others}; all members must pass equally many"
    raise LocalProtocolError(text, rank=rank, nbytes=nbytes, other_nbytes=others)


async def take_all(engine: Engine, view: memoryview, first: int, end: int, source: int, tag: int) -> None:
    """Receive the bytes from ``first`` to ``end``. Raises as :func:`take`."""
    for low, high in pieces(first, end):
        await take(engine, piece_of(view, low, high), source, tag)


class Outlet:
    """Sends pieces to one member, several at a time, as long as that member lives.

    As a context manager it abandons outstanding sends at its end.

    Args:
        engine: Engine of this rank.
        dest: Rank of the member.
        tag: Tag of the group.

    Attributes:
        error: Error because of which nothing can be sent; or None.
    """

    def __init__(self, engine: Engine, dest: int, tag: int) -> None:
        self._engine = engine
        self._dest = dest
        self._tag = tag
        self._under_way: deque[Request] = deque()
        self._has_told = False
        self.error: AsyncdistError | None = None

    def __enter__(self) -> Outlet:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()

    def give_up(self) -> None:
        """Abandon the outstanding sends."""
        for request in self._under_way:  # after a loss or a departure they may never complete
            self._engine.disown(request)
        self._under_way.clear()

    async def put(self, view: memoryview) -> None:
        """Start to send a piece, after waiting for older ones if too many are in progress; no-op after :meth:`tell`."""
        if self._has_told:
            return
        while len(self._under_way) >= AHEAD_COUNT:
            await self._wait_for_oldest()
        if self.error is None:
            self._under_way.append(self._engine.transport.isend(view, self._dest, self._tag))

    async def put_all(self, view: memoryview, first: int, end: int) -> None:
        """Start to send the bytes from ``first`` to ``end``."""
        for low, high in pieces(first, end):
            await self.put(piece_of(view, low, high))

    async def tell(self, error: AsyncdistError) -> None:
        """Send a notice with the error instead of the remaining bytes."""
        facts = error.facts
        if isinstance(error, RankLostError):
            notice = _NOTICE.pack(facts.get("rank", -1), -1, -1)
        elif isinstance(error, TruncationError):
            notice = _NOTICE.pack(
                facts.get("source", -1), facts.get("message_nbytes") or 0, facts.get("buffer_nbytes", 0)
            )
        else:
            notice = _NOTICE.pack(facts.get("rank", -1), facts.get("nbytes", 0), facts.get("other_nbytes", 0))
        for message in (b"", notice):
            await self.put(memoryview(message))
        self._has_told = True

    async def flush(self) -> AsyncdistError | None:
        """Wait until everything has been sent; return the error if it was not."""
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


async def give(engine: Engine, dest: int, tag: int, send: Callable[[Outlet], Awaitable[None]]) -> AsyncdistError | None:
    """Send to one member until everything has left; return the error if the member is lost."""
    with Outlet(engine, dest, tag) as outlet:
        await send(outlet)
        return await outlet.flush()


def raise_first(*errors: AsyncdistError | None) -> None:
    """Raise the first error, if there is one."""
    for error in errors:
        if error is not None:
            raise error
