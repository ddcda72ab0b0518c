"""Collectives made of messages that are relayed along a tree, so that each member of a large group sends few messages.

The members are numbered from the root, in the group's cyclic order. In the tree
(:mod:`asyncdist.collectives.agreement.tree_shape`) every subtree is a range of consecutive numbers, so a subtree's data
is contiguous in memory. Bytes are relayed down the tree in pieces, each while the next piece arrives.

After an error, each member still sends every neighbour the expected bytes, or a notice of the error instead
(:mod:`asyncdist.collectives.algorithms.pieces`). No member therefore waits forever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

import torch

from asyncdist.collectives.agreement.tree_shape import halves, path_to
from asyncdist.collectives.algorithms.ordered_reduce import Reduction
from asyncdist.collectives.algorithms.pieces import (
    AHEAD_COUNT,
    PIECE_NBYTES,
    Outlet,
    attempt,
    piece_of,
    pieces,
    raise_first,
    receive_exactly,
    receive_in_pieces,
    send_pieces,
)
from asyncdist.collectives.algorithms.reductions import LeftFold
from asyncdist.collectives.groups import Group
from asyncdist.errors import AsyncdistError, RankLostError
from asyncdist.messaging.engine import Engine
from asyncdist.tensors.byte_views import byte_view, empty_stack, new_memory

#: Largest row, in bytes, that is gathered along the tree. With larger rows, members near the root would relay too many
#: bytes.
ROW_NBYTES_MAX: Final = 16 << 10
#: Size in bytes of the prefix of a reduction's result. Its first byte says whether there is a result. 64 bytes keep the
#: result aligned.
_HEAD_NBYTES: Final = 64

#: Function that maps a range of members, given by its first and last number, to the byte range of their data.
Stretch: TypeAlias = Callable[[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class TreePosition:
    """A member's position in the tree of a collective. Its subtree contains the members ``number`` to ``last``.

    Attributes:
        children: Rank of each child, and the first and the last number in its subtree.
    """

    tag: int
    number: int
    last: int
    parent: int | None
    children: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, group: Group, top: int) -> TreePosition:
        """Return this rank's position in the tree whose root is the rank ``top``."""
        size, shift = group.size, group.ranks.index(top)
        number = (group.index - shift) % size
        above, last = path_to(size, number)
        ranks = group.ranks
        return cls(
            group.tag,
            number,
            last,
            ranks[(above[-1] + shift) % size] if above else None,
            tuple((ranks[(first + shift) % size], first, end) for first, end in halves(number, last)),
        )


async def barrier(engine: Engine, group: Group) -> None:
    """Wait until every member has entered the barrier."""
    position, token = TreePosition.of(group, group.ranks[0]), memoryview(bytearray(1))
    error = await _collect(engine, position, token, _everything(token))
    raise_first(error, await _spread(engine, position, token, error=error))


async def wait_for_all(engine: Engine, group: Group, root: int) -> None:
    """Wait, on ``root`` only, until every member has called this method.

    Raises:
        LocalProtocolError, TruncationError: On ``root``, if a member has called :meth:`gather` instead.
    """
    token = memoryview(bytearray(1))
    error = await _collect(engine, TreePosition.of(group, root), token, _everything(token))
    if not isinstance(error, RankLostError):  # raised later, after the root has received from the other members
        raise_first(error)


async def broadcast(engine: Engine, group: Group, view: memoryview, root: int) -> None:
    """Send the root's bytes to all members, which receive them into ``view``."""
    raise_first(await _spread(engine, TreePosition.of(group, root), view))


async def gather(
    engine: Engine, group: Group, send: memoryview, sizes: Sequence[int], receive: torch.Tensor | None, root: int
) -> None:
    """Gather every member's bytes, whose counts are ``sizes``, into the root's flat uint8 tensor ``receive``."""
    position, shift = TreePosition.of(group, root), group.ranks.index(root)
    starts = [0, *accumulate((*sizes[shift:], *sizes[:shift]))]
    own, end = starts[position.number], starts[position.last + 1]
    view = memoryview(bytearray(end - own))
    view[: len(send)] = send
    raise_first(
        await _collect(engine, position, view, lambda first, last: (starts[first] - own, starts[last + 1] - own))
    )
    if receive is not None:
        into, turn = byte_view(receive), sum(sizes[:shift])
        into[turn:], into[:turn] = view[: end - turn], view[end - turn :]


async def all_gather(engine: Engine, group: Group, send: torch.Tensor) -> torch.Tensor:
    """Return every member's tensor, stacked in the group's order, on every member."""
    position, nbytes = TreePosition.of(group, group.ranks[0]), send.nbytes
    receive = empty_stack(send, group.size)
    view = byte_view(receive)
    view[position.number * nbytes : (position.number + 1) * nbytes] = byte_view(send)

    def rows(first: int, last: int) -> tuple[int, int]:
        return first * nbytes, (last + 1) * nbytes

    error = await _collect(engine, position, view, rows)
    raise_first(error, await _spread(engine, position, view, has=rows, error=error))
    return receive


async def fold_rows(engine: Engine, group: Group, work: torch.Tensor, fold: Reduction) -> torch.Tensor:
    """Reduce all members' small tensors in rank order on the first member. Every member gets the result."""
    position, nbytes = TreePosition.of(group, group.ranks[0]), work.nbytes
    rows = empty_stack(work, position.last - position.number + 1)
    view = byte_view(rows)
    view[:nbytes] = byte_view(work)

    def stretch(first: int, last: int) -> tuple[int, int]:
        return (first - position.number) * nbytes, (last + 1 - position.number) * nbytes

    error = await _collect(engine, position, view, stretch)
    if position.parent is not None:
        work = torch.empty_like(work)
    elif error is None:
        work = fold([*rows])
    raise_first(error, await _spread(engine, position, byte_view(work), error=error))
    return work


async def fold_along_ranks(engine: Engine, group: Group, values: torch.Tensor, fold: LeftFold) -> torch.Tensor | None:
    """Reduce all members' flat tensors in rank order. Return None if the reduction needs all tensors at once."""
    position, token = TreePosition.of(group, group.ranks[-1]), memoryview(bytearray(1))
    # A member that passes fewer bytes calls fold_rows instead. This exchange detects the mismatch.
    error = await _collect(engine, position, token, _everything(token))
    error = await _spread(engine, position, token, error=error) or error
    memory = new_memory(_HEAD_NBYTES + values.nbytes)
    memory[:_HEAD_NBYTES] = 0
    result = memory[_HEAD_NBYTES:].view(values.dtype)
    failed, is_whole = await _pass_along(engine, group, values, fold, result, error)
    error, memory[0] = failed or error, is_whole
    raise_first(error, await _spread(engine, position, byte_view(memory), error=error))
    return result if memory[0] else None


# -- up and down ------------------------------------------------------------------------------------------------------


async def _collect(engine: Engine, position: TreePosition, view: memoryview, stretch: Stretch) -> AsyncdistError | None:
    """Receive the subtree's bytes from the children, and send them to the parent together with this member's bytes.

    Return the first error, or None.
    """
    tag = position.tag
    error: AsyncdistError | None = None
    for rank, first, last in position.children:  # Continue after an error: the next child is waiting for its send.
        low, high = stretch(first, last)
        failed = await attempt(receive_in_pieces(engine, view, low, high, rank, tag))
        error = error or failed
    if position.parent is None:
        return error
    low, high = stretch(position.number, position.last)

    async def send(outlet: Outlet) -> None:
        if error is None:
            await outlet.put_all(view, low, high)
        elif low < high:
            await outlet.send_error(error)

    failed = await send_pieces(engine, position.parent, tag, send)
    return error or failed


async def _spread(
    engine: Engine,
    position: TreePosition,
    view: memoryview,
    *,
    has: Stretch | None = None,
    error: AsyncdistError | None = None,
) -> AsyncdistError | None:
    """Relay the root's bytes, or a notice of an error, to all members. Return the first error, or None.

    Args:
        has: Function that returns the byte range that a subtree already has, or None if subtrees have no bytes.
        error: Earlier error on this member, of which its children are notified.
    """
    has = has or _nothing
    feeds = [_Feed(engine, position.tag, view, rank, has(first, last)) for rank, first, last in position.children]
    own = has(position.number, position.last)
    try:
        if position.parent is not None:
            failed = await _relay_down(engine, view, own, position.parent, position.tag, feeds)
            error = error or failed
        for feed in feeds:
            if error is None:
                await feed.advance(len(view))
            else:
                await feed.outlet.send_error(error)
        for feed in feeds:
            failed = await feed.outlet.flush()
            error = error or failed
    finally:
        for feed in feeds:
            feed.outlet.give_up()
    return error


async def _relay_down(
    engine: Engine, view: memoryview, own: tuple[int, int], parent: int, tag: int, feeds: Sequence[_Feed]
) -> AsyncdistError | None:
    """Receive all bytes except the range ``own`` from the parent, and relay each piece as it arrives."""
    first, end = own
    for low, high in (*pieces(0, first), *pieces(end, len(view))):
        error = await attempt(receive_exactly(engine, piece_of(view, low, high), parent, tag))
        if error is not None:
            return error
        for feed in feeds:
            await feed.advance(end if high == first else high)
    return None


async def _pass_along(
    engine: Engine,
    group: Group,
    values: torch.Tensor,
    fold: LeftFold,
    result: torch.Tensor,
    error: AsyncdistError | None,
) -> tuple[AsyncdistError | None, bool]:
    """Receive the partial result from the previous rank, add this rank's values, and send the sum to the next rank.

    The last rank gets the result. No rank needs more memory than its own tensor and a few pieces. The pieces are
    pipelined, so n ranks and p pieces take n + p hops. A reduction along a tree would need fewer hops, but would round
    differently. If a rank fails, it sends the next rank a notice instead of the partial result.

    Args:
        values: This rank's tensor: flat, contiguous, on the CPU, with equal length and dtype on all members.
        result: Tensor of the same length, which receives the result on the last member.
        error: Earlier error on this rank, or None.

    Returns:
        A pair. The first item is the error that prevented this rank or the next rank from receiving the partial result,
        or None. The second is whether ``result`` is complete on the last member, or the reduction needs all tensors at
        once.
    """
    if group.index + 1 == group.size:
        failed, is_whole = await _receive_partial(engine, group, values, fold, result, None)
        return failed or error, is_whole
    with Outlet(engine, group.ranks[group.index + 1], group.tag) as outlet:
        if error is not None:
            await outlet.send_error(error)
        failed, is_whole = await _receive_partial(engine, group, values, fold, result, outlet)
        error = failed or error
        if error is not None:
            await outlet.send_error(error)
        else:
            # An end mark of one byte lets the receiver detect a different size.
            await outlet.put(memoryview(bytearray(1)))
        return await outlet.flush() or error, is_whole


async def _receive_partial(
    engine: Engine, group: Group, values: torch.Tensor, fold: LeftFold, result: torch.Tensor, outlet: Outlet | None
) -> tuple[AsyncdistError | None, bool]:
    """Receive the partial result, add this rank's values, and put the sums into ``outlet`` or else into ``result``."""
    source, is_whole = group.ranks[group.index - 1] if group.index else None, True
    count = PIECE_NBYTES // values.itemsize
    totals = torch.empty(AHEAD_COUNT + 1, count, dtype=values.dtype, device="cpu")
    results = torch.split(result, count)
    for turn, piece in enumerate(torch.split(values, count)):
        total = results[turn] if outlet is None else totals[turn % len(totals), : len(piece)]
        if source is None:
            total.copy_(piece)
        else:
            error = await attempt(receive_exactly(engine, byte_view(total), source, group.tag))
            if error is not None:
                return error, is_whole
            fold.add(total, piece)
        if outlet is not None:
            await outlet.put(byte_view(total))
        elif not fold.finish(total, piece, group.size):
            is_whole = False
    if source is None:
        return None, is_whole
    return await attempt(receive_exactly(engine, memoryview(bytearray(1)), source, group.tag)), is_whole


class _Feed:
    """Relays arriving bytes to one child, except the byte range ``has``, which the child's subtree already has."""

    def __init__(self, engine: Engine, tag: int, view: memoryview, dest: int, has: tuple[int, int]) -> None:
        self.outlet = Outlet(engine, dest, tag)
        self._view = view
        self._pieces = deque((*pieces(0, has[0]), *pieces(has[1], len(view))))

    async def advance(self, frontier: int) -> None:
        """Send the unsent pieces before ``frontier``, the number of bytes that have arrived."""
        while self._pieces and self._pieces[0][1] <= frontier:
            await self.outlet.put(piece_of(self._view, *self._pieces.popleft()))


def _everything(view: memoryview) -> Stretch:
    return lambda first, last: (0, len(view))


def _nothing(first: int, last: int) -> tuple[int, int]:
    return 0, 0
