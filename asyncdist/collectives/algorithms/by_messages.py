"""Collectives made of messages through one of the members, for backends that have none of their own."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Sequence
from typing import Any, Final

import torch

from asyncdist.collectives.algorithms.ordered_reduce import Reduction
from asyncdist.collectives.groups import Group
from asyncdist.errors import LocalProtocolError, RankLostError
from asyncdist.messaging.engine import Engine
from asyncdist.tensors.byte_views import byte_view, empty_stack

#: What follows a message without bytes: the rank that is lost.
_LOST: Final = struct.Struct("<q")


class MessageCollectives:
    """The collectives of one rank, each in messages on its group's tag.

    Args:
        engine: the rank's.
        rank: of the world.
    """

    def __init__(self, engine: Engine, rank: int) -> None:
        self._engine = engine
        self._rank = rank

    async def broadcast(self, group: Group, view: memoryview, root: int) -> None:
        """Send ``root``'s bytes to all."""
        if self._rank == root:
            await _all_of([self._send(view, rank, group.tag) for rank in group.ranks if rank != root])
        else:
            await self._receive_exactly(view, root, group.tag, may_be_notice=True)

    async def gather(self, group: Group, send: memoryview, receive: torch.Tensor | None, root: int) -> None:
        """Bring equally many bytes of every member to ``root``, which alone passes ``receive``, with a row for each."""
        if receive is None:
            await self._send(send, root, group.tag)
            return
        lost: RankLostError | None = None
        for position, rank in enumerate(group.ranks):
            if rank == root:
                byte_view(receive[position])[:] = send
                continue
            try:
                await self._receive_exactly(byte_view(receive[position]), rank, group.tag)
            except RankLostError as error:  # the others have sent, or will, and wait for that to arrive
                lost = lost or error
        if lost is not None:
            raise lost

    async def gather_ragged(
        self, group: Group, send: memoryview, sizes: Sequence[int], receive: torch.Tensor | None, root: int
    ) -> None:
        """Bring every member's bytes to ``root``, one after the other; ``sizes`` says how many each has."""
        if receive is None:
            if len(send):
                await self._send(send, root, group.tag)
            return
        parts = torch.split(receive, list(sizes))
        lost: RankLostError | None = None
        for rank, part in zip(group.ranks, parts, strict=True):
            try:
                if rank == root:
                    byte_view(part)[:] = send
                elif part.numel():
                    await self._receive_exactly(byte_view(part), rank, group.tag)
            except RankLostError as error:
                lost = lost or error
        if lost is not None:
            raise lost

    async def _gather_or_tell(self, group: Group, send: memoryview, receive: torch.Tensor | None, root: int) -> None:
        """Gather; where a member is lost, the root tells the others: no bytes in place of the result, then its rank."""
        try:
            await self.gather(group, send, receive, root)
        except RankLostError as error:
            if receive is not None:
                for notice in (b"", _LOST.pack(error.rank)):
                    with contextlib.suppress(RankLostError):
                        await self.broadcast(group, memoryview(notice), root)
            raise

    async def all_gather(self, group: Group, send: torch.Tensor) -> torch.Tensor:
        """Bring every member's tensor to all, stacked in the group's order."""
        root = group.ranks[0]
        receive = empty_stack(send, group.size)
        await self._gather_or_tell(group, byte_view(send), receive if self._rank == root else None, root)
        await self.broadcast(group, byte_view(receive), root)
        return receive

    async def fold_on_first(self, group: Group, work: torch.Tensor, fold: Reduction) -> torch.Tensor:
        """Reduce on the first member, in rank order, and send the result to all."""
        root = group.ranks[0]
        receive = empty_stack(work, group.size) if self._rank == root else None
        await self._gather_or_tell(group, byte_view(work), receive, root)
        if receive is not None:
            work = fold([*receive])
        await self.broadcast(group, byte_view(work), root)
        return work

    async def all_to_all(self, group: Group, send: torch.Tensor, receive: torch.Tensor) -> None:
        """Send row i to member i, and receive one from each."""
        work: list[Awaitable[Any]] = []
        for position, rank in enumerate(group.ranks):
            work.append(self._send(byte_view(send[position]), rank, group.tag))
            work.append(self._receive_exactly(byte_view(receive[position]), rank, group.tag))
        await _all_of(work)

    async def _send(self, view: memoryview, dest: int, tag: int) -> None:
        request = self._engine.transport.isend(view, dest, tag)
        await self._engine.wait_or_disown(request, f"send to {dest}, tag {tag}")

    async def _receive_exactly(self, view: memoryview, source: int, tag: int, *, may_be_notice: bool = False) -> None:
        _, nbytes = await self._engine.receive(view, source, tag)
        if may_be_notice and not nbytes and len(view):
            notice = bytearray(_LOST.size)
            await self._engine.receive(notice, source, tag)
            (lost,) = _LOST.unpack(notice)
            raise RankLostError(f"rank {lost} is lost, and rank {source} gave the collective up", rank=lost)
        if nbytes != len(view):
            raise LocalProtocolError(
                f"rank {source} takes part with {nbytes} bytes, this rank with {len(view)}", rank=source
            )


async def _all_of(work: Sequence[Awaitable[Any]]) -> None:
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
