"""Takes means in rank order among the ranks of one host, which read each other's memory: no element is ever sent.

Each rank copies its tensors to a flat tensor that all members map (:mod:`asyncdist.tensors.shared_memory`). There it
folds its share of everybody's elements into a result buffer of its own; and it copies what all have in their result
buffers to its tensors. After each of the three the ranks meet at a barrier. Tensors of more than 64 MiB go through this
in pieces, and a *turn* does the three for three pieces that follow each other.

64 MiB between two ranks took 0.55 to 0.6 of the time of MPI's own Iallreduce, and 38 ms of CPU time on both ranks
together where that took 60. Pieces of 2 MiB, meant to stay in the caches, took 0.8 and 51 ms: a line that another core
has just written is dearer than one from memory, which the hardware fetches ahead.

The result is that of :mod:`asyncdist.collectives.algorithms.ordered_reduce`, to the bit: the same fold of the same
parts in the same order.

Invariants: nothing is read before the barrier of the turn that wrote it, nor written again before that of the turn that
read it; when the call ends, nobody reads. The barrier, of the backend or made of messages, orders the memory of the
ranks as it orders the ranks.

Beside the flat tensor, which is kept for each model on every transport, the result buffers take half as much, and
64 MiB at most; nothing grows with the number of ranks. There is nothing to switch on or off: from 64 KiB on members
tell each other what they can map before anything is written, and unless all of them can map all of it they use messages
(see :func:`map_shared_buffers`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from asyncdist.collectives.algorithms.ordered_reduce import pieces
from asyncdist.collectives.groups import Group
from asyncdist.tensors.bucket import Bucket
from asyncdist.tensors.shared_memory import Address, SharedMemory, find

#: Writes into its first argument what the ranks' tensors, in rank order, come to; elementwise, of their dtype.
FoldInto: TypeAlias = Callable[[Tensor, Sequence[Tensor]], None]
#: Every member's tensor, in the group's order.
AllGather: TypeAlias = Callable[[Tensor], Awaitable[Sequence[Tensor]]]

#: Tensors of more are reduced in pieces, or the result buffers would grow with them.
PIECE_NBYTES: Final = 64 << 20
#: Less is sent: the ranks meet four times here, which took 2.1 to 2.5 times as long as the messages with 0.4 to 16 KiB
#: on torch, 1.1 to 0.8 times with 62 KiB, and half with a MiB; on MPI about as long up to 62 KiB.
SHARED_NBYTES_MIN: Final = 64 << 10
#: One that is being written, and one that is being read.
_RESULT_COUNT: Final = 2
#: What is folded at once: with its result it stays in a core's own cache.
_BLOCK_NBYTES: Final = 512 << 10
#: A cache line, and a multiple of every element's size.
_ALIGNMENT_NBYTES: Final = 64
_WORD_NBYTES: Final = 16
_NOWHERE: Final = bytes(Address.PACKED_NBYTES)


def is_worth_sharing(count: int, dtype: torch.dtype) -> bool:
    """Return whether the ranks of a host read a flat tensor of that size in each other's memory: the same on all."""
    return count * dtype.itemsize >= max(1, SHARED_NBYTES_MIN)


class SharedFlatBuffers:
    """Makes flat tensors that the ranks of a host share, with memory for results behind them.

    Args:
        is_shared: whether there is anybody to share with.
    """

    def __init__(self, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._memories: dict[int, SharedMemory] = {}  # by where their tensors begin

    @torch.inference_mode(False)  # it outlives the caller's mode
    def new(self, count: int, *, dtype: torch.dtype) -> Tensor:
        """Make a tensor, uninitialised; in this rank's own memory where it cannot be shared, or need not be."""
        if self._is_shared and (dtype.is_floating_point or dtype.is_complex) and is_worth_sharing(count, dtype):
            with contextlib.suppress(OSError):  # no such memory on this system, or no descriptor left for it
                memory = SharedMemory(_memory_nbytes(count, dtype))
                self._memories[memory.tensor.data_ptr()] = memory
                return memory.tensor[: count * dtype.itemsize].view(dtype)
        return torch.empty(count, dtype=dtype, device="cpu")

    def memory_of(self, flat: Tensor) -> SharedMemory | None:
        """Return the memory that a tensor begins; None where it is not shared."""
        return self._memories.get(flat.data_ptr())

    def keep(self, flats: Iterable[Tensor]) -> None:
        """Let go of all tensors but these."""
        kept = {flat.data_ptr() for flat in flats}
        self._memories = {start: memory for start, memory in self._memories.items() if start in kept}


async def map_shared_buffers(memory: SharedMemory | None, group: Group, all_gather: AllGather) -> list[Tensor] | None:
    """Find every member's memory. All members await this at the same time.

    One small all-gather, and another one where the members have not met with just this memory before.

    Args:
        memory: this rank's; None where it has none.
        group: of two members or more.
        all_gather: of 1-D uint8 tensors over the group.

    Returns:
        Every member's memory; None on all members where one of them has none, or cannot find another one's.
    """
    known, views = (b"", None) if memory is None else memory.views.get(group, (b"", None))
    address = _NOWHERE if memory is None else memory.address.pack()
    card = torch.frombuffer(bytearray(address + known.ljust(_WORD_NBYTES, b"\0")), dtype=torch.uint8)
    cards = [bytes(each.numpy()) for each in await all_gather(card)]
    addresses = [card[: Address.PACKED_NBYTES] for card in cards]
    if memory is None or _NOWHERE in addresses:
        return None
    word = hashlib.sha256(b"".join(addresses)).digest()[:_WORD_NBYTES]
    if any(card[Address.PACKED_NBYTES :] != word for card in cards):
        views = _find_all(memory, group.index, addresses)
        answers = await all_gather(torch.tensor([views is not None], dtype=torch.uint8, device="cpu"))
        if not all(map(bool, answers)):
            views = None
        memory.views[group] = word, views
    return views


def _find_all(memory: SharedMemory, index: int, packed: Sequence[bytes]) -> list[Tensor] | None:
    addresses = [Address.unpack(each) for each in packed]
    if any(address.nbytes != memory.address.nbytes for address in addresses):
        return None
    try:
        return [memory.tensor if position == index else find(address) for position, address in enumerate(addresses)]
    except OSError:
        return None


async def fold_on_host(
    group: Group, bucket: Bucket, views: Sequence[Tensor], fold: FoldInto, barrier: Callable[[], Awaitable[None]]
) -> None:
    """Reduce every member's tensors; all members await this at the same time.

    Args:
        group: of two members or more.
        bucket: the tensors, equally long on all members, not empty.
        views: every member's memory, as :func:`map_shared_buffers` gave it; this rank's begins with the bucket's flat
            tensor.
        fold: the reduction, the same on all members.
        barrier: of the group.
    """
    folding = _Folding(group, bucket, views, fold)
    count = len(folding.pieces)
    for turn in range(count + 2):  # a piece goes in, the one before it is folded, the one before that goes out
        if turn < count:
            bucket.copy_in(folding.pieces[turn].start, folding.pieces[turn].end)
        if 1 <= turn <= count:
            folding.fold_share(turn - 1)
        if turn >= 2:
            folding.store(turn - 2)
        await barrier()


class _Folding:
    """Knows where everything lies in the members' memory."""

    def __init__(self, group: Group, bucket: Bucket, views: Sequence[Tensor], fold: FoldInto) -> None:
        self._group = group
        self._bucket = bucket
        self._fold = fold
        count, dtype = len(bucket.flat), bucket.flat.dtype
        share_count = -(-min(PIECE_NBYTES // dtype.itemsize, count) // group.size)
        self.pieces = list(pieces(count, group.size, share_count))
        self._flats = [view[: count * dtype.itemsize].view(dtype) for view in views]
        start, nbytes = _results_start(count, dtype), _result_nbytes(count, dtype)
        results = [view[start:].view(-1, nbytes) for view in views]
        self._results: list[list[Tensor]] = [[result.view(dtype) for result in of_member] for of_member in results]
        self._block_count = max(1, _BLOCK_NBYTES // dtype.itemsize)

    def fold_share(self, number: int) -> None:
        """Reduce this rank's share of a piece into its result buffer."""
        piece = self.pieces[number]
        own = piece.share(self._group.index)
        result = self._result(self._group.index, number, own)
        parts = [flat[piece.start : piece.end][own] for flat in self._flats]
        for block in zip(*(torch.split(part, self._block_count) for part in (result, *parts)), strict=True):
            self._fold(block[0], block[1:])

    def store(self, number: int) -> None:
        """Copy a piece's results from every member's result buffer into the tensors."""
        piece = self.pieces[number]
        for index in range(self._group.size):
            share = piece.share(index)
            if share.start < share.stop:
                self._bucket.copy_out(piece.start + share.start, self._result(index, number, share))

    def _result(self, index: int, number: int, share: slice) -> Tensor:
        return self._results[index][number % _RESULT_COUNT][: share.stop - share.start]


def _memory_nbytes(count: int, dtype: torch.dtype) -> int:
    """Return the size of a flat tensor with its result buffers."""
    result_count = min(_RESULT_COUNT, -(-count // (PIECE_NBYTES // dtype.itemsize)))
    return _results_start(count, dtype) + result_count * _result_nbytes(count, dtype)


def _results_start(count: int, dtype: torch.dtype) -> int:
    return _aligned(count * dtype.itemsize)


def _result_nbytes(count: int, dtype: torch.dtype) -> int:
    """Return the size of a result buffer: one share of two members, since those of more are no larger."""
    return _aligned(-(-min(PIECE_NBYTES // dtype.itemsize, count) // 2) * dtype.itemsize)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
