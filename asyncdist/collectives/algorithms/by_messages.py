"""Collectives made of point-to-point messages, for backends without native collectives.

In a small group, all messages go to or from one member: the first member or the root. In a large group, they are
relayed along a tree (:mod:`asyncdist.collectives.algorithms.over_tree`), except for a gather of large rows and for
``all_to_all``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import Any, Final

import torch

from asyncdist.collectives.agreement.tree_shape import DIRECT_COUNT_MAX
from asyncdist.collectives.algorithms import over_tree
from asyncdist.collectives.algorithms.ordered_reduce import BufferPool, fold_in_shares
from asyncdist.collectives.algorithms.over_tree import ROW_NBYTES_MAX
from asyncdist.collectives.algorithms.pieces import check_nbytes, notice_of, piece_of, pieces, receive_exactly
from asyncdist.collectives.algorithms.reductions import LeftFold
from asyncdist.collectives.groups import Group
from asyncdist.errors import RankLostError
from asyncdist.messaging.engine import Engine
from asyncdist.tensors.byte_views import byte_view, empty_stack, flat_bytes
from asyncdist.waits import WaitId, WaitKind

#: Size in bytes of the pieces of large data. MPI counts the bytes of a message in 32-bit integers.
PIECE_NBYTES: Final = 1 << 30


class MessageCollectives:
    """Runs the collectives of one rank by sending messages with the group's tag."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self._engine = engine
        self._rank = rank

    async def barrier(self, group: Group) -> None:
        """Wait until every member has entered the barrier."""
        if _is_large(group):
            await over_tree.barrier(self._engine, group)
        else:
            await self.all_gather(group, torch.zeros(1, dtype=torch.uint8, device="cpu"))

    async def broadcast(self, group: Group, view: memoryview, root: int) -> None:
        """Send the root's bytes to all members, which receive them into ``view``."""
        if _is_large(group):
            await over_tree.broadcast(self._engine, group, view, root)
        elif self._rank == root:
            await _all_of([self._send(view, rank, group.tag) for rank in group.ranks if rank != root])
        else:
            for piece in _pieces_of(view):
                await receive_exactly(self._engine, piece, root, group.tag)

    async def gather(self, group: Group, send: memoryview, receive: torch.Tensor | None, root: int) -> None:
        """Gather the same number of bytes from every member on ``root``, whose ``receive`` has one row per member."""
        if _is_large(group):
            if 0 < len(send) <= ROW_NBYTES_MAX:
                flat = None if receive is None else flat_bytes(receive)
                await over_tree.gather(self._engine, group, send, [len(send)] * group.size, flat, root)
                return
            await over_tree.wait_for_all(self._engine, group, root)  # Let the root detect members that pass small rows.
        await self._gather_rows(group, send, receive, root)

    async def gather_ragged(
        self, group: Group, send: memoryview, sizes: Sequence[int], receive: torch.Tensor | None, root: int
    ) -> None:
        """Concatenate every member's bytes on ``root``. ``sizes`` has the number of bytes of each member."""
        if _is_large(group) and sum(sizes) <= ROW_NBYTES_MAX * group.size:
            await over_tree.gather(self._engine, group, send, sizes, receive, root)
            return
        if receive is None:
            if len(send):
                await self._send(send, root, group.tag)
            return
        parts = zip(group.ranks, torch.split(receive, list(sizes)), strict=True)
        await self._receive_parts(send, [(rank, part) for rank, part in parts if part.numel()], group.tag)

    async def _gather_rows(self, group: Group, send: memoryview, receive: torch.Tensor | None, root: int) -> None:
        if receive is None:
            await self._send(send, root, group.tag)
        else:
            await self._receive_parts(send, list(zip(group.ranks, receive, strict=True)), group.tag)

    async def _receive_parts(self, own: memoryview, parts: Sequence[tuple[int, torch.Tensor]], tag: int) -> None:
        """Receive each rank's bytes into its part, and copy ``own`` into the part of this rank."""
        lost: RankLostError | None = None
        for rank, part in parts:
            try:
                if rank == self._rank:
                    byte_view(part)[:] = own
                else:
                    await self._receive_exactly(byte_view(part), rank, tag)
            except RankLostError as error:  # Continue with the other members, because they are waiting for their sends.
                lost = lost or error
        if lost is not None:
            raise lost

    async def _gather_or_notify(self, group: Group, send: memoryview, receive: torch.Tensor | None, root: int) -> None:
        """Gather on ``root``. If a rank is lost, ``root`` notifies the members, which are waiting for a broadcast."""
        try:
            await self._gather_rows(group, send, receive, root)
        except RankLostError as error:
            if receive is not None:
                for notice in (b"", notice_of(error)):
                    with contextlib.suppress(RankLostError):
                        await self.broadcast(group, memoryview(notice), root)
            raise

    async def all_gather(self, group: Group, send: torch.Tensor) -> torch.Tensor:
        """Return every member's tensor, stacked in the group's order."""
        if _is_large(group):
            return await over_tree.all_gather(self._engine, group, send)
        root = group.ranks[0]
        receive = empty_stack(send, group.size)
        await self._gather_or_notify(group, byte_view(send), receive if self._rank == root else None, root)
        await self.broadcast(group, byte_view(receive), root)
        return receive

    async def fold(self, group: Group, work: torch.Tensor, fold: LeftFold) -> torch.Tensor:
        """Return the reduction of all members' tensors in rank order, on every member."""
        if not _is_large(group):
            return await self._fold_on_first(group, work, fold)
        if work.nbytes <= ROW_NBYTES_MAX:
            return await over_tree.fold_rows(self._engine, group, work, fold)
        flat = work.detach().view(-1)
        result = await over_tree.fold_along_ranks(self._engine, group, flat, fold)
        if result is None:
            result = torch.empty_like(flat)
            await fold_in_shares(self._engine, BufferPool(), group, flat, fold, result)
        return result.view(work.shape)

    async def _fold_on_first(self, group: Group, work: torch.Tensor, fold: LeftFold) -> torch.Tensor:
        root = group.ranks[0]
        receive = empty_stack(work, group.size) if self._rank == root else None
        await self._gather_or_notify(group, byte_view(work), receive, root)
        if receive is not None:
            work = fold([*receive])
        await self.broadcast(group, byte_view(work), root)
        return work

    async def all_to_all(self, group: Group, send: torch.Tensor, receive: torch.Tensor) -> None:
        """Send row i of ``send`` to member i, and receive a row from each member into ``receive``."""
        work: list[Awaitable[Any]] = []
        for position, rank in enumerate(group.ranks):
            work.append(self._send(byte_view(send[position]), rank, group.tag))
            work.append(self._receive_exactly(byte_view(receive[position]), rank, group.tag))
        await _all_of(work)

    async def _send(self, view: memoryview, dest: int, tag: int) -> None:
        for piece in _pieces_of(view):
            request = self._engine.transport.isend(piece, dest, tag)
            await self._engine.wait_or_disown(request, WaitId(WaitKind.SEND, tag, dest))

    async def _receive_exactly(self, view: memoryview, source: int, tag: int) -> None:
        for piece in _pieces_of(view):
            _, nbytes = await self._engine.receive(piece, source, tag)
            check_nbytes(piece, nbytes, source)  # An empty message is not a notice, but a tensor without elements.


def _pieces_of(view: memoryview) -> list[memoryview]:
    """Return the part of ``view`` that each message sends. An empty view is sent as an empty message."""
    return [piece_of(view, low, high) for low, high in pieces(0, len(view), PIECE_NBYTES)] or [view]


async def _all_of(work: Sequence[Awaitable[Any]]) -> None:
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _is_large(group: Group) -> bool:
    return group.size > DIRECT_COUNT_MAX
