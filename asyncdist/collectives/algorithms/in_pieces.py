"""Runs native collectives in pieces if a single call would be slow, or too large for the backend's 32-bit sizes."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import torch

from asyncdist.collectives.groups import Group
from asyncdist.messaging.engine import Engine
from asyncdist.tensors.byte_views import byte_view, empty_stack, flat_bytes, split
from asyncdist.transports.base import GroupHandle, ReduceOp, Request
from asyncdist.waits import WaitId, WaitKind

#: Largest size in bytes of a native reduction in one call. Larger reductions are performed in pieces of this size,
#: several at a time, through buffers that stay in the cache. Reducing 64 MiB of float32 took 78 ms in pieces, 150 ms in
#: place, and 90 ms with a raw Iallreduce into a second tensor. These are medians for two Open MPI ranks on two busy
#: cores.
PIECE_NBYTES: Final = 1 << 20
_PIECES_AT_ONCE: Final = 4
#: Largest size in bytes of one ragged exchange. MPI counts bytes and displacements in 32-bit integers.
_RAGGED_NBYTES_MAX: Final = 1 << 30
#: Largest size in bytes of any native call. Open MPI 5 lacks the larger counts of MPI-4. Larger data is moved in
#: pieces, through a buffer of the size below.
COUNT_NBYTES_MAX: Final = (1 << 31) - 1
_STAGED_NBYTES: Final = 64 << 20


async def all_reduce(engine: Engine, native: GroupHandle, work: torch.Tensor, op: ReduceOp) -> None:
    """Reduce ``work`` in place, piece by piece, through a few buffers that are used in turn."""
    ring = torch.empty(_PIECES_AT_ONCE, PIECE_NBYTES // work.itemsize, dtype=work.dtype, device="cpu")
    under_way: deque[tuple[Request, torch.Tensor, torch.Tensor]] = deque()

    async def finish_oldest() -> None:
        request, piece, buffer = under_way[0]
        await engine.wait_or_disown(request, WaitId(WaitKind.ALL_REDUCE, name=op))
        piece.copy_(buffer)
        under_way.popleft()

    try:
        for index, piece in enumerate(torch.split(work.view(-1), ring.shape[1])):
            if len(under_way) == _PIECES_AT_ONCE:
                await finish_oldest()
            buffer = ring[index % _PIECES_AT_ONCE][: piece.numel()]
            under_way.append((native.all_reduce(piece.numpy(), op, buffer.numpy()), piece, buffer))
        while under_way:
            await finish_oldest()
    finally:
        for request, _, _ in under_way:  # A request may never complete after a failure, or after a rank has left.
            engine.disown(request)


async def broadcast(engine: Engine, native: GroupHandle, view: memoryview, position: int) -> None:
    """Send the bytes of the member at ``position`` in the group to all members."""
    what = WaitId(WaitKind.BROADCAST_IN_PIECES, number=len(view))
    for piece in split(view, COUNT_NBYTES_MAX):
        await engine.wait_or_disown(native.broadcast(piece, position), what)


async def exchange(
    engine: Engine,
    group: Group,
    send: torch.Tensor,
    receive: torch.Tensor | None,
    part_nbytes: int,
    exchange: Callable[[memoryview, memoryview | None], Request],
    kind: WaitKind,
) -> None:
    """Run a gather, all-gather or all-to-all in pieces. Each piece is the same byte range of every member's part.

    Args:
        send: Data of this member: one part for all members, or one part for each.
        receive: Memory for one part from each member, or None if this member receives nothing.
        exchange: Function that starts the collective on one piece.
    """
    own = flat_bytes(send).view(-1, part_nbytes)
    parts = None if receive is None else flat_bytes(receive).view(group.size, part_nbytes)
    piece_nbytes = max(1, min(_STAGED_NBYTES, COUNT_NBYTES_MAX) // group.size)
    for low in range(0, part_nbytes, piece_nbytes):
        piece = own[:, low : low + piece_nbytes].contiguous()
        received = None if parts is None else empty_stack(piece[0], group.size)
        request = exchange(byte_view(piece), None if received is None else byte_view(received))
        await engine.wait_or_disown(request, WaitId(kind, number=part_nbytes))
        if parts is not None and received is not None:
            parts[:, low : low + piece_nbytes] = received


async def gather_ragged(
    engine: Engine, group: Group, send: memoryview, sizes: Sequence[int], receive: memoryview, position: int
) -> None:
    """Gather all members' bytes, concatenated, on the member at ``position``, one byte range at a time."""
    assert group.native is not None
    starts = [0, *itertools.accumulate(sizes)]
    mine = starts[group.index]
    for low in range(0, starts[-1], _RAGGED_NBYTES_MAX):
        high = min(low + _RAGGED_NBYTES_MAX, starts[-1])
        counts = [max(0, min(high, end) - max(low, begin)) for begin, end in itertools.pairwise(starts)]
        send_counts = [0] * group.size
        send_counts[position] = counts[group.index]
        first = max(0, low - mine)
        own = send[first : first + counts[group.index]]
        is_root = group.index == position
        request = group.native.all_to_all(own, send_counts, receive[low:high], counts if is_root else [0] * group.size)
        await engine.wait_or_disown(request, WaitId(WaitKind.GATHER_RAGGED, number=starts[-1]))
