"""Collectives made of messages along a tree of the members, so that each one has few messages with few others.

The members are numbered from the one at the top, in the order of the group, which goes on with its first member after
its last. :mod:`asyncdist.collectives.agreement.tree_shape` says who stands below whom: at most two below each, with
numbers that follow each other, so what comes from below lies together in memory. Bytes go down in pieces, and each is
passed on while the next one comes.

Every member does its part to the end, whatever it meets: it takes what each neighbour sends, and sends each neighbour
what that one waits for, or a notice of the loss in place of it (:mod:`asyncdist.collectives.algorithms.pieces`). So a
loss leaves nobody waiting: below a lost member its children find out by themselves, above it its parent does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

import torch

from asyncdist.collectives.agreement.tree_shape import halves, path_to
from asyncdist.collectives.algorithms.along_ranks import Passing
from asyncdist.collectives.algorithms.left_folds import LeftFold
from asyncdist.collectives.algorithms.ordered_reduce import Reduction
from asyncdist.collectives.algorithms.pieces import Outlet, attempt, give, piece_of, pieces, raise_first, take, take_all
from asyncdist.collectives.groups import Group
from asyncdist.errors import AsyncdistError, RankLostError
from asyncdist.messaging.engine import Engine
from asyncdist.tensors.byte_views import byte_view, empty_stack

#: Rows of more bytes than this, of each member, are not brought to one of them along the tree: members near the top
#: would take in a large part of all rows, and keep them.
ROW_NBYTES_MAX: Final = 16 << 10
#: Before the result of a reduction: whether it is one. As long as that, the result stays aligned.
_HEAD_NBYTES: Final = 64

#: Where the bytes of the members with two numbers, and of those between them, begin and end.
Stretch: TypeAlias = Callable[[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Child:
    """A member right below another one, which stands above those with the numbers from its own to ``last``."""

    rank: int
    number: int
    last: int


@dataclass(frozen=True, slots=True)
class Place:
    """One member's place in the tree of a collective.

    Attributes:
        tag: of the group.
        number: of the member, from 0 at the top.
        last: the largest number below it.
        parent: the rank above it; None at the top.
        children: those right below it.
    """

    tag: int
    number: int
    last: int
    parent: int | None
    children: tuple[Child, ...]

    @classmethod
    def of(cls, group: Group, top: int) -> Place:
        """Return this rank's place in the tree with the rank ``top`` at the top."""
        size, shift = group.size, group.ranks.index(top)
        number = (group.index - shift) % size
        above, last = path_to(size, number)
        ranks = group.ranks
        return cls(
            group.tag,
            number,
            last,
            ranks[(above[-1] + shift) % size] if above else None,
            tuple(Child(ranks[(first + shift) % size], first, end) for first, end in halves(number, last)),
        )


class TreeCollectives:
    """The collectives of one rank, along trees.

    Args:
        engine: the rank's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def barrier(self, group: Group) -> None:
        """Return once every member has entered."""
        place, token = Place.of(group, group.ranks[0]), memoryview(bytearray(1))
        error = await self._collect(place, token, _everything(token))
        raise_first(error, await self._spread(place, token, error=error))

    async def meet(self, group: Group, root: int) -> None:
        """Let ``root`` go on once every member has entered.

        Raises:
            LocalProtocolError, TruncationError: a member is in :meth:`gather` instead; on ``root``.
        """
        token = memoryview(bytearray(1))
        error = await self._collect(Place.of(group, root), token, _everything(token))
        if not isinstance(
            error, RankLostError
        ):  # which the root meets again, when it has taken in what the others send
            raise_first(error)

    async def broadcast(self, group: Group, view: memoryview, root: int) -> None:
        """Send ``root``'s bytes to all."""
        raise_first(await self._spread(Place.of(group, root), view))

    async def gather(
        self, group: Group, send: memoryview, sizes: Sequence[int], receive: torch.Tensor | None, root: int
    ) -> None:
        """Bring every member's bytes to ``root``; ``sizes`` says how many each has, in the group's order.

        Args:
            group, root: as everywhere.
            send: this member's.
            sizes: the same on all members.
            receive: on ``root`` a flat tensor of bytes for all, in the group's order.
        """
        place, shift = Place.of(group, root), group.ranks.index(root)
        starts = [0, *accumulate((*sizes[shift:], *sizes[:shift]))]
        own, end = starts[place.number], starts[place.last + 1]
        view = memoryview(bytearray(end - own))
        view[: len(send)] = send
        raise_first(await self._collect(place, view, lambda first, last: (starts[first] - own, starts[last + 1] - own)))
        if receive is not None:
            into, turn = byte_view(receive), sum(sizes[:shift])
            into[turn:], into[:turn] = view[: end - turn], view[end - turn :]

    async def all_gather(self, group: Group, send: torch.Tensor) -> torch.Tensor:
        """Bring every member's tensor to all, stacked in the group's order. Each takes in every other one's once."""
        place, nbytes = Place.of(group, group.ranks[0]), send.nbytes
        receive = empty_stack(send, group.size)
        view = byte_view(receive)
        view[place.number * nbytes : (place.number + 1) * nbytes] = byte_view(send)

        def rows(first: int, last: int) -> tuple[int, int]:
            return first * nbytes, (last + 1) * nbytes

        error = await self._collect(place, view, rows)
        raise_first(error, await self._spread(place, view, has=rows, error=error))
        return receive

    async def fold_rows(self, group: Group, work: torch.Tensor, fold: Reduction) -> torch.Tensor:
        """Reduce on the first member, in rank order, and send the result to all; for small tensors."""
        place, nbytes = Place.of(group, group.ranks[0]), work.nbytes
        rows = empty_stack(work, place.last - place.number + 1)
        view = byte_view(rows)
        view[:nbytes] = byte_view(work)

        def stretch(first: int, last: int) -> tuple[int, int]:
            return (first - place.number) * nbytes, (last + 1 - place.number) * nbytes

        error = await self._collect(place, view, stretch)
        if place.parent is not None:
            work = torch.empty_like(work)
        elif error is None:
            work = fold([*rows])
        raise_first(error, await self._spread(place, byte_view(work), error=error))
        return work

    async def fold_along_ranks(self, group: Group, values: torch.Tensor, fold: LeftFold) -> torch.Tensor | None:
        """Reduce in rank order, and give the result to all; None, on all, where that takes all tensors at once.

        Args:
            group: whose members call this.
            values: flat, contiguous and in CPU memory; of one length and dtype on all members.
            fold: the same on all members.
        """
        place, token = Place.of(group, group.ranks[-1]), memoryview(bytearray(1))
        # Members that take part with few bytes are in fold_rows, and find out here. None leaves between the stages: the
        # others count on it in all of them.
        error = await self._collect(place, token, _everything(token))
        error = await self._spread(place, token, error=error) or error
        memory = torch.empty(_HEAD_NBYTES + values.nbytes, dtype=torch.uint8, device="cpu")
        result = memory[_HEAD_NBYTES:].view(values.dtype)
        passing = Passing(self._engine, group, values, fold, result)
        error = await passing.run(error) or error
        memory[0] = passing.is_whole
        raise_first(error, await self._spread(place, byte_view(memory), error=error))
        return result if memory[0] else None

    # -- up and down ------------------------------------------------------------------------------------------------

    async def _collect(self, place: Place, view: memoryview, stretch: Stretch) -> AsyncdistError | None:
        """Take in what those below this member have, and pass it up with its own; return the first error."""
        engine, tag = self._engine, place.tag
        error: AsyncdistError | None = None
        for child in place.children:  # the next one's also where one is lost: it waits for that to arrive
            low, high = stretch(child.number, child.last)
            failed = await attempt(take_all(engine, view, low, high, child.rank, tag))
            error = error or failed
        if place.parent is None:
            return error
        low, high = stretch(place.number, place.last)

        async def send(outlet: Outlet) -> None:
            if error is None:
                await outlet.put_all(view, low, high)
            elif low < high:
                await outlet.tell(error)

        failed = await give(engine, place.parent, tag, send)
        return error or failed

    async def _spread(
        self, place: Place, view: memoryview, *, has: Stretch | None = None, error: AsyncdistError | None = None
    ) -> AsyncdistError | None:
        """Pass bytes down from the top to all, or the error that the top has; return the first error.

        Args:
            place: of this member.
            view: for all bytes.
            has: which of them a member and those below it have already; none by default.
            error: that this member has had before. Its parent sends a notice then, as it has been told.
        """
        has = has or _nothing
        feeds = [
            _Feed(self._engine, place.tag, view, child.rank, has(child.number, child.last)) for child in place.children
        ]
        own = has(place.number, place.last)
        try:
            if place.parent is not None:
                failed = await self._take_down(view, own, place.parent, place.tag, feeds)
                error = error or failed
            for feed in feeds:
                if error is None:
                    await feed.advance(len(view))
                else:
                    await feed.outlet.tell(error)
            for feed in feeds:
                failed = await feed.outlet.flush()
                error = error or failed
        finally:
            for feed in feeds:
                feed.outlet.give_up()
        return error

    async def _take_down(
        self, view: memoryview, own: tuple[int, int], parent: int, tag: int, feeds: Sequence[_Feed]
    ) -> AsyncdistError | None:
        """Take in all but this member's own stretch, and pass on each piece as soon as it has come."""
        first, end = own
        for low, high in (*pieces(0, first), *pieces(end, len(view))):
            error = await attempt(take(self._engine, piece_of(view, low, high), parent, tag))
            if error is not None:
                return error
            for feed in feeds:
                await feed.advance(end if high == first else high)
        return None


class _Feed:
    """Passes on to one child what it has not, as far as that has come.

    Args:
        engine, tag: of the collective.
        view: for all bytes.
        dest: the child.
        has: what it and those below it have already.
    """

    def __init__(self, engine: Engine, tag: int, view: memoryview, dest: int, has: tuple[int, int]) -> None:
        self.outlet = Outlet(engine, dest, tag)
        self._view = view
        self._pieces = deque((*pieces(0, has[0]), *pieces(has[1], len(view))))

    async def advance(self, frontier: int) -> None:
        """Send the pieces before ``frontier``, up to which all bytes have come."""
        while self._pieces and self._pieces[0][1] <= frontier:
            await self.outlet.put(piece_of(self._view, *self._pieces.popleft()))


def _everything(view: memoryview) -> Stretch:
    return lambda first, last: (0, len(view))


def _nothing(first: int, last: int) -> tuple[int, int]:
    return 0, 0
