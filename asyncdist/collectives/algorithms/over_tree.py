"""Collectives made of messages along a tree of the members, so that each member exchanges few messages with few others.

The members are numbered from the root on, in the cyclic order of the group. In the tree
(:mod:`asyncdist.collectives.agreement.tree_shape`) every subtree is a range of consecutive numbers, so the data of a
subtree is contiguous in memory. Bytes travel down in pieces, each of which is passed on while the next one arrives.

Every member does its part to the end in spite of errors: it receives from each neighbour, and sends each neighbour the
expected bytes, or a notice of a loss instead (:mod:`asyncdist.collectives.algorithms.pieces`). A loss therefore leaves
no member waiting: a lost member's children and its parent detect the loss.
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

#: Largest row, in bytes, that is gathered along the tree; with larger ones, members near the root would have to receive
#: and keep a large part of all rows.
ROW_NBYTES_MAX: Final = 16 << 10
#: Size of the flag before the result of a reduction: whether there is one. It keeps the result aligned.
_HEAD_NBYTES: Final = 64

#: Returns the range of bytes of the members from one number to another.
Stretch: TypeAlias = Callable[[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Child:
    """A child of a member, whose subtree is the range from its own number to ``last``."""

    rank: int
    number: int
    last: int


@dataclass(frozen=True, slots=True)
class Place:
    """One member's place in the tree of a collective.

    Attributes:
        tag: Tag of the group.
        number: Number of the member; 0 for the root.
        last: Largest number in its subtree.
        parent: Rank of the parent; None for the root.
        children: Children of the member.
    """

    tag: int
    number: int
    last: int
    parent: int | None
    children: tuple[Child, ...]

    @classmethod
    def of(cls, group: Group, top: int) -> Place:
        """Return this rank's place in the tree whose root is the rank ``top``."""
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
        engine: Engine of the rank.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def barrier(self, group: Group) -> None:
        """Return once every member has entered."""
        place, token = Place.of(group, group.ranks[0]), memoryview(bytearray(1))
        error = await self._collect(place, token, _everything(token))
        raise_first(error, await self._spread(place, token, error=error))

    async def meet(self, group: Group, root: int) -> None:
        """Wait, on ``root``, until every member has entered.

        Raises:
            LocalProtocolError, TruncationError: On ``root``: a member has called :meth:`gather` instead.
        """
        token = memoryview(bytearray(1))
        error = await self._collect(Place.of(group, root), token, _everything(token))
        if not isinstance(
            error, RankLostError
        ):  # the root handles the error later, after it has received from the others
            raise_first(error)

    async def broadcast(self, group: Group, view: memoryview, root: int) -> None:
        """Send ``root``'s bytes to all."""
        raise_first(await self._spread(Place.of(group, root), view))

    async def gather(
        self, group: Group, send: memoryview, sizes: Sequence[int], receive: torch.Tensor | None, root: int
    ) -> None:
        """Bring every member's bytes to ``root``; ``sizes`` says how many each has, in the group's order.

        Args:
            group: Group whose members call this.
            root: Rank that receives.
            send: Bytes of this member.
            sizes: Number of bytes of each member; equal on all members.
            receive: On ``root`` a flat uint8 tensor for the bytes of all members, in the group's order.
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
        """Return every member's tensor, stacked in the group's order. Each member receives every other tensor once."""
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
        """Reduce small tensors in rank order on the first member, and send the result to all."""
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
        """Return the reduction in rank order on all members; None, on all, if it needs all tensors at once.

        Args:
            group: Group whose members call this.
            values: Flat contiguous CPU tensor of equal length and dtype on all members.
            fold: The reduction, equal on all members.
        """
        place, token = Place.of(group, group.ranks[-1]), memoryview(bytearray(1))
        # Members that pass few bytes are in fold_rows, and detect that here. No member leaves between the stages, since
        # the others count on it in all of them.
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
        """Receive the subtree's bytes, and send them to the parent with this member's own; return the first error."""
        engine, tag = self._engine, place.tag
        error: AsyncdistError | None = None
        for child in place.children:  # even after the loss of one child: the next one waits for its send to complete
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
        """Pass bytes, or the root's error, down from the root to all; return the first error.

        Args:
            place: Place of this member.
            view: Memory for all bytes.
            has: Returns the range of bytes that a subtree already has; by default none.
            error: Earlier error of this member. Its parent knows of it, and sends a notice.
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
        """Receive all bytes except this member's own range, and pass on each piece as soon as it has arrived."""
        first, end = own
        for low, high in (*pieces(0, first), *pieces(end, len(view))):
            error = await attempt(take(self._engine, piece_of(view, low, high), parent, tag))
            if error is not None:
                return error
            for feed in feeds:
                await feed.advance(end if high == first else high)
        return None


class _Feed:
    """Passes the missing bytes on to one child as they arrive.

    Args:
        engine, tag: Engine and tag of the collective.
        view: Memory for all bytes.
        dest: Rank of the child.
        has: Range of bytes that the child's subtree already has.
    """

    def __init__(self, engine: Engine, tag: int, view: memoryview, dest: int, has: tuple[int, int]) -> None:
        self.outlet = Outlet(engine, dest, tag)
        self._view = view
        self._pieces = deque((*pieces(0, has[0]), *pieces(has[1], len(view))))

    async def advance(self, frontier: int) -> None:
        """Send the pieces before ``frontier``, up to which all bytes have arrived."""
        while self._pieces and self._pieces[0][1] <= frontier:
            await self.outlet.put(piece_of(self._view, *self._pieces.popleft()))


def _everything(view: memoryview) -> Stretch:
    return lambda first, last: (0, len(view))


def _nothing(first: int, last: int) -> tuple[int, int]:
    return 0, 0
