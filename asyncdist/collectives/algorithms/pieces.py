"""Sends bytes between two members of a group in pieces, or the news that one is lost in their place.

Up to a limit bytes travel in one message; more of them in pieces, so that who passes them on can begin before it has
all, and an end of one byte: by it, and by the first piece, which is larger than any single message, members that take
part with different sizes find that out.

Each member sends what the others count on, or a *notice* in place of it: a message of no bytes, then why there is
nothing. So nobody waits for what a lost member was to pass on, also where members hear of the loss by nothing else.
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

#: A piece. What is at most half as large is one message.
PIECE_NBYTES: Final = 512 << 10
#: How many messages to one member are under way at once.
AHEAD_COUNT: Final = 4

#: What follows a message without bytes: the rank concerned, the bytes with which it takes part, and those with which
#: another one does. Both are -1 where the rank is lost.
_NOTICE: Final = struct.Struct("<qqq")


def pieces(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where the pieces of the bytes from ``first`` to ``end`` begin and end; an empty one is the end mark."""
    if end - first <= PIECE_NBYTES // 2:
        if first < end:
            yield first, end
        return
    for low in range(first, end, PIECE_NBYTES):
        yield low, min(low + PIECE_NBYTES, end)
    yield end, end


def piece_of(view: memoryview, low: int, high: int) -> memoryview:
    """Return one of :func:`pieces` as bytes to send, or to receive into."""
    return view[low:high] if low < high else memoryview(bytearray(1))


async def attempt(work: Awaitable[object]) -> AsyncdistError | None:
    """Await something, and return its error if it has one that the others are to hear of."""
    try:
        await work
    except (RankLostError, LocalProtocolError, TruncationError) as error:
        return error
    return None


async def take(engine: Engine, view: memoryview, source: int, tag: int) -> None:
    """Receive exactly these bytes.

    Raises:
        RankLostError: the source is lost, or says that a member is.
        LocalProtocolError, TruncationError: the source takes part with another number of bytes, or says so of a member.
    """
    _, nbytes = await engine.receive(view, source, tag)
    if nbytes == len(view):
        return
    if nbytes:
        text = f"rank {source} takes part with {nbytes} bytes, this rank with {len(view)}"
        raise LocalProtocolError(text, rank=source, nbytes=nbytes, other_nbytes=len(view))
    notice = bytearray(_NOTICE.size)
    await engine.receive(notice, source, tag)
    rank, nbytes, others = _NOTICE.unpack(notice)
    if nbytes < 0:
        raise RankLostError(f"rank {rank} is lost, and rank {source} gave the collective up", rank=rank)
    text = f"rank {rank} takes part with {nbytes} bytes, another one with {others}: the same is allowed on all members"
    raise LocalProtocolError(text, rank=rank, nbytes=nbytes, other_nbytes=others)


async def take_all(engine: Engine, view: memoryview, first: int, end: int, source: int, tag: int) -> None:
    """Receive the bytes from ``first`` to ``end``. Raises as :func:`take`."""
    for low, high in pieces(first, end):
        await take(engine, piece_of(view, low, high), source, tag)


class Outlet:
    """Sends pieces to one member, some at a time, as long as that one lives.

    As a context manager it gives up, at its end, what is still under way.

    Args:
        engine: of this rank.
        dest: the member.
        tag: of its group.

    Attributes:
        error: why nothing can be sent any more.
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
        """Wait no more for what is under way."""
        for request in self._under_way:  # a member is lost or has left: they may never complete
            self._engine.disown(request)
        self._under_way.clear()

    async def put(self, view: memoryview) -> None:
        """Start to send a piece, when at most some others are under way; nothing after :meth:`tell`."""
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
        """Send, in place of what would follow, why there is nothing."""
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
        """Wait until all has been sent; return why it has not been."""
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
    """Send to one member until all has left; return the error if it is lost."""
    with Outlet(engine, dest, tag) as outlet:
        await send(outlet)
        return await outlet.flush()


def raise_first(*errors: AsyncdistError | None) -> None:
    """Raise the first error, if there is one."""
    for error in errors:
        if error is not None:
            raise error
