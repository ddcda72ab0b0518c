"""Nonblocking collectives over a group, such as broadcast, gather and all-reduce.

All members must await the same collectives in the same order, with tensors of equal shape and dtype. Tensors are dense,
of any dtype, layout and device. They are sent as bytes through CPU memory.

If the backend has native collectives, these are started as nonblocking operations and polled (MPI-4.1 section 6.12).
Otherwise, collectives consist of messages (:mod:`asyncdist.collectives.algorithms.by_messages`). Reductions by messages
run in rank order, so their results do not depend on timing. Native reductions run in the backend's order.

If a member leaves the world or frees the group before it has started a collective, the other members get ClosedError,
even while they are waiting (:mod:`asyncdist.collectives.membership`). The loss of a member ends all collectives of its
groups with RankLostError. A simulation detects mismatched calls (:mod:`asyncdist.collectives.call_checker`). Between
processes, only operations that exchange headers (:mod:`asyncdist.collectives.error_exchange`) detect mismatches.

**Cancellation**: a cancelled collective continues in the background until it completes, because the other members take
part in it. It still reads the caller's tensors. A tensor that is changed in place may or may not be written. Returned
results are lost. Later collectives of this rank in the group wait for its completion.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch

from asyncdist import validation
from asyncdist.collectives.algorithms import in_pieces, reductions
from asyncdist.collectives.algorithms.by_messages import MessageCollectives
from asyncdist.collectives.algorithms.ordered_reduce import BufferPool, Reduction, fold_in_shares
from asyncdist.collectives.algorithms.reductions import MEAN, OrderedReduction
from asyncdist.collectives.algorithms.shared_memory_reduce import fold_on_host, is_worth_sharing, map_shared_buffers
from asyncdist.collectives.call_checker import HELPER, CollectiveCall
from asyncdist.collectives.groups import Group
from asyncdist.collectives.membership import MembershipLog
from asyncdist.errors import AsyncdistError, LocalProtocolError
from asyncdist.messaging.engine import Engine, yield_to_loop
from asyncdist.messaging.polling import resolve_waiter
from asyncdist.tensors.bucket import Bucket
from asyncdist.tensors.byte_views import byte_view, check_dense, check_writable, empty_stack, new_memory, to_host, write
from asyncdist.tensors.means import mean_into
from asyncdist.transports.base import GroupHandle, ReduceOp, Request
from asyncdist.waits import WaitId, WaitKind

T = TypeVar("T")


class Collectives:
    """Runs the collectives of one rank. Ranks passed as arguments are ranks in the world.

    Args:
        membership: Record of the collectives in which each member takes part, or None inside a sequence of collectives,
            because the sequence counts as one collective.
        buffers: Memory that reductions reuse, shared by a rank and its sequences.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        membership: MembershipLog | None = None,
        *,
        buffers: BufferPool | None = None,
    ) -> None:
        self._engine = engine
        self._rank = rank
        self._by_messages = MessageCollectives(engine, rank)
        self._spawn = spawn
        self._buffers = BufferPool() if buffers is None else buffers
        self._membership = membership
        self._checker = None if membership is None else engine.transport.collective_checker
        self._newest: dict[int, asyncio.Task[Any]] = {}

    async def barrier(self, group: Group) -> None:
        """Wait until every member has entered the barrier."""
        self._note(group, "barrier")
        if group.size == 1:
            return
        if group.native is not None:
            await self._native(group, group.native.barrier, WaitId(WaitKind.BARRIER))
        else:
            await self._finish(group, self._by_messages.barrier, group)

    async def broadcast(self, tensor: torch.Tensor, group: Group, root: int) -> torch.Tensor:
        """Write the root's values into every member's ``tensor``, and return the tensor."""
        root, position = _root_of(group, root)
        is_root = self._rank == root
        (check_dense if is_root else check_writable)(tensor)
        self._note(group, "broadcast", tensor, root)
        host = to_host(tensor)
        view = byte_view(host)
        if len(view) == 0 or group.size == 1:
            pass
        elif group.native is not None and len(view) <= in_pieces.COUNT_NBYTES_MAX:
            start = functools.partial(group.native.broadcast, view, position)
            await self._native(group, start, WaitId(WaitKind.BROADCAST, number=root))
        elif group.native is not None:
            await self._finish(group, in_pieces.broadcast, self._engine, group.native, view, position)
        else:
            await self._finish(group, self._by_messages.broadcast, group, view, root)
        if not is_root and host.data_ptr() != tensor.data_ptr():
            write(tensor, host)
        return tensor

    async def gather(self, tensor: torch.Tensor, group: Group, root: int) -> list[torch.Tensor] | None:
        """On ``root``, return every member's tensor in the group's order. On other ranks, return None."""
        root, position = _root_of(group, root)
        check_dense(tensor)
        self._note(group, "gather", tensor, root)
        send = to_host(tensor)
        receive = empty_stack(send, group.size) if self._rank == root else None
        if send.numel() == 0 or group.native is None:
            await self._finish(group, self._by_messages.gather, group, byte_view(send), receive, root)
        else:
            gather, what = functools.partial(group.native.gather, root=position), WaitId(WaitKind.GATHER, number=root)
            await self._exchange(group, send, receive, send.nbytes, gather, what, WaitKind.GATHER_IN_PIECES)
        return None if receive is None else [part.to(tensor.device) for part in receive]

    async def all_gather(self, tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
        """Return every member's tensor, in the group's order."""
        check_dense(tensor)
        self._note(group, "all_gather", tensor)
        send = to_host(tensor)
        if send.numel() == 0:
            await self.barrier(group)
            receive = empty_stack(send, group.size)
        elif group.native is not None:
            receive = empty_stack(send, group.size)
            gather, what = group.native.all_gather, WaitId(WaitKind.ALL_GATHER)
            await self._exchange(group, send, receive, send.nbytes, gather, what, WaitKind.ALL_GATHER_IN_PIECES)
        else:
            receive = await self._finish(group, self._by_messages.all_gather, group, send)
        return [part.to(tensor.device) for part in receive]

    async def all_mean(self, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        """Replace a contiguous CPU tensor of float32, complex64 or wider by its mean over all members. Return it."""
        flat = tensor.view(-1)
        if group.size == 1 or not len(flat):
            await self.all_reduce(tensor, group, "sum")
        elif group.native is not None:
            await self._finish(group, fold_in_shares, self._engine, self._buffers, group, flat, MEAN, flat)
        else:
            self._note(group, "all_reduce", tensor, reduction="mean")
            flat.copy_(await self._finish(group, self._by_messages.fold, group, flat, MEAN))
        return tensor

    async def all_mean_bucket(self, bucket: Bucket, group: Group) -> None:
        """Replace a bucket's tensors by their means over all members, which must pass equal lengths and dtype.

        Each piece of the bucket is copied out just before it is sent, and back when its mean arrives.
        """
        if self._membership is not None:
            await self.join(self.start_sequence(group, lambda alone: alone.all_mean_bucket(bucket, group)), group)
            return
        count = len(bucket.flat)
        views = await self._shared_views(bucket, group)
        if views is not None:
            barrier = functools.partial(self.barrier, group)
            await fold_on_host(group, bucket, views, mean_into, barrier)
        elif group.native is not None and group.size > 1 and count:
            await fold_in_shares(self._engine, self._buffers, group, bucket.flat, MEAN, bucket)
        else:
            bucket.copy_in(0, count)
            bucket.copy_out(0, await self.all_mean(bucket.flat.clone(), group))

    async def _shared_views(self, bucket: Bucket, group: Group) -> list[torch.Tensor] | None:
        """Return all members' shared memory, or None if members are on different hosts or sharing is not faster."""
        is_wanted = group.size > 1 and is_worth_sharing(len(bucket.flat), bucket.flat.dtype)
        if not is_wanted or not self._engine.transport.capabilities.shares_memory:
            return None
        return await map_shared_buffers(bucket.memory, group, lambda card: self.all_gather(card, group))

    async def reduce_in_order(self, tensor: torch.Tensor, group: Group, fold: Reduction) -> torch.Tensor:
        """Return the reduction of all members' tensors in rank order. Each member computes a part of it.

        A native reduction would run in an order that depends on the backend's version and on the size.

        Args:
            tensor: 1-D contiguous CPU tensor, not empty, of equal length and dtype on all members.
        """
        if group.native is not None and group.size > 1:
            result = torch.empty(len(tensor), dtype=fold([tensor[:0]] * group.size).dtype, device="cpu")
            await self._finish(group, fold_in_shares, self._engine, self._buffers, group, tensor, fold, result)
            return result
        # A sequence counts as one collective, like a native reduction.
        if self._membership is not None:
            alone = self.start_sequence(group, lambda alone: alone.reduce_in_order(tensor, group, fold))
            return await self.join(alone, group)
        share = -(-len(tensor) // group.size)
        padded = torch.cat([tensor, tensor.new_zeros(share * group.size - len(tensor))])
        mine = fold(await self.all_to_all(torch.split(padded, share), group))
        return torch.cat(await self.all_gather(mine, group))[: len(tensor)]

    async def all_reduce(self, tensor: torch.Tensor, group: Group, op: ReduceOp) -> torch.Tensor:
        """Replace every member's tensor by the elementwise reduction of all members' tensors, and return it."""
        if op not in reductions.OPERATIONS:
            raise LocalProtocolError(
                f"op must be one of {', '.join(map(repr, reductions.OPERATIONS))}, got {op!r}", op=op
            )
        check_writable(tensor)
        reductions.check(tensor, op)
        self._note(group, "all_reduce", tensor, reduction=op)
        if group.size == 1 or not tensor.numel():
            return tensor
        work, how = reductions.to_numbers(tensor, op)
        if group.native is None:
            work = await self._finish(group, self._by_messages.fold, group, work, OrderedReduction(how))
        elif work.nbytes > in_pieces.PIECE_NBYTES:
            await self._finish(group, in_pieces.all_reduce, self._engine, group.native, work, how)
        else:
            start = functools.partial(group.native.all_reduce, work.numpy(), how)
            await self._native(group, start, WaitId(WaitKind.ALL_REDUCE, name=op))
        if group.size > 2 and reductions.depends_on_order(work):
            self._engine.note_reduced(group.tag, byte_view(work))
        reductions.store(work, tensor, op)
        return tensor

    async def all_to_all(self, tensors: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
        """Send tensor i to member i, and return the received tensors. All tensors have equal shape and dtype."""
        if len(tensors) != group.size:
            raise LocalProtocolError(
                f"tensors must have one tensor for each of the {group.size} members of all_to_all, got {len(tensors)}"
            )
        for index, tensor in enumerate(tensors):
            check_dense(tensor, f"tensors[{index}]")
        first = tensors[0]
        if any(t.shape != first.shape or t.dtype != first.dtype for t in tensors):
            kinds = ", ".join(sorted({f"{t.dtype} {tuple(t.shape)}" for t in tensors}))
            raise LocalProtocolError(f"the tensors of all_to_all must have equal shape and dtype, got {kinds}")
        self._note(group, "all_to_all", first)
        send = torch.stack([to_host(tensor) for tensor in tensors])
        receive = torch.empty_like(send)
        count = first.numel() * first.element_size()
        if count == 0:
            await self.barrier(group)
        elif group.native is not None:
            exchange = functools.partial(_all_to_all_evenly, group.native, group.size)
            what = WaitId(WaitKind.ALL_TO_ALL)
            await self._exchange(group, send, receive, count, exchange, what, WaitKind.ALL_TO_ALL_IN_PIECES)
        else:
            await self._finish(group, self._by_messages.all_to_all, group, send, receive)
        return [part.to(first.device) for part in receive]

    async def gather_bytes(
        self, send: torch.Tensor, sizes: Sequence[int], group: Group, root: int
    ) -> torch.Tensor | None:
        """On ``root``, return all members' bytes, of the given sizes, in the group's order. Elsewhere, return None."""
        root, position = _root_of(group, root)
        if send.nbytes != sizes[group.index]:
            raise LocalProtocolError(
                f"send must have the {sizes[group.index]} bytes that sizes has for this member, got {send.nbytes}"
            )
        receive = new_memory(sum(sizes)) if self._rank == root else None
        if group.size == 1 and receive is not None:
            receive.copy_(send)
        elif sum(sizes) and group.native is not None:
            received = memoryview(bytearray()) if receive is None else byte_view(receive)
            args = byte_view(send), sizes, received, position
            await self._finish(group, in_pieces.gather_ragged, self._engine, group, *args)
        elif sum(sizes):
            await self._finish(group, self._by_messages.gather_ragged, group, byte_view(send), sizes, receive, root)
        return receive

    def is_busy(self, group: Group) -> bool:
        """Return whether a collective of the group is in progress on this rank or waiting for an earlier one."""
        assert self._membership is not None, "a sequence is itself in progress"
        return group.tag in self._newest or self._membership.is_under_way(group)

    def start_sequence(self, group: Group, work: Callable[[Collectives], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Start a sequence of collectives that counts as one collective of the group.

        Args:
            work: Coroutine function that is called with a :class:`Collectives` object for the sequence.

        Returns:
            Task to await with :meth:`join`. It must not be cancelled, because the other members take part in the
            collective.
        """
        self._note(group, HELPER)
        return self._start(group, work, Collectives(self._engine, self._rank, self._spawn, buffers=self._buffers))

    async def join(self, sequence: asyncio.Task[T], group: Group) -> T:
        """Return the result of a sequence of collectives. Cancelling the caller does not cancel the sequence."""
        return await self._engine.shielded(sequence, group.tag)

    def _note(
        self,
        group: Group,
        operation: str,
        tensor: torch.Tensor | None = None,
        root: int | None = None,
        *,
        reduction: str | None = None,
    ) -> None:
        """In a simulation, check that the other members make the same call."""
        if self._checker is not None:
            dtype, shape = (None, None) if tensor is None else (tensor.dtype, tensor.shape)
            self._checker.note(
                group.ranks, group.key, self._rank, CollectiveCall(operation, root, reduction, dtype, shape)
            )

    def _exchange(
        self,
        group: Group,
        send: torch.Tensor,
        receive: torch.Tensor | None,
        part_nbytes: int,
        exchange: Callable[[memoryview, memoryview | None], Request],
        what: WaitId,
        kind_in_pieces: WaitKind,
    ) -> Coroutine[Any, Any, None]:
        """Run a native collective in one call or, if the data is too large, in pieces (:func:`in_pieces.exchange`)."""
        if part_nbytes * group.size > in_pieces.COUNT_NBYTES_MAX:
            args = group, send, receive, part_nbytes, exchange, kind_in_pieces
            return self._finish(group, in_pieces.exchange, self._engine, *args)
        received = None if receive is None else byte_view(receive)
        return self._native(group, functools.partial(exchange, byte_view(send), received), what)

    def _begin(self, membership: MembershipLog, group: Group) -> int:
        self._engine.note_collective_begun()
        return membership.begin(group)

    async def _native(self, group: Group, start: Callable[[], Request], what: WaitId) -> None:
        """Start a native collective after all earlier collectives of this rank in the group, and await it."""
        if self._membership is None:
            await self._started(start, what)
            return
        if group.tag in self._newest:
            await self._finish(group, self._started, start, what)
            return
        number = self._begin(self._membership, group)
        try:
            self._membership.check(group, number)
            await self._follow(group, number, start(), what)
        except AsyncdistError:
            await self._engine.note_failed()
            raise
        await self._engine.note_collective(group.tag)

    async def _follow(self, group: Group, number: int, request: Request, what: WaitId) -> None:
        """Wait until a native collective completes or fails. If the caller is cancelled, the collective continues."""
        assert self._membership is not None, "the collectives of a sequence are part of its task"
        membership, engine, waiter = self._membership, self._engine, self._engine.loop.create_future()

        def stop(error: AsyncdistError) -> None:
            engine.disown(request)
            membership.end(entry)
            resolve_waiter(waiter, error)

        def on_done(error: AsyncdistError | None) -> None:
            if error is not None:
                membership.spoil(group, error)
            membership.end(entry)
            resolve_waiter(waiter, error)

        entry = membership.enter(group, number, stop)
        engine.watch(request, what, on_done)
        engine.collective_waits.add(waiter)
        try:
            if not waiter.done():
                await engine.park(waiter, what, is_of_request=True)
            waiter.result()
        finally:
            engine.collective_waits.discard(waiter)
            waiter.cancel()  # Without this call, asyncio would report that the exception was never retrieved.

    async def _started(self, start: Callable[[], Request], what: WaitId) -> None:
        await self._engine.wait_or_disown(start(), what)

    # -- in turn ----------------------------------------------------------------------------------------------------

    async def _finish(self, group: Group, work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run a collective to its end, even if the caller is cancelled, because the other members take part in it.

        The collectives of a group run in turn, because their messages share the group's tag and could overtake each
        other.
        """
        if self._membership is None:  # A sequence runs in order, and is never cancelled.
            return await work(*args)
        return await self._engine.shielded(self._start(group, work, *args), group.tag)

    def _start(self, group: Group, work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> asyncio.Task[T]:
        assert self._membership is not None, "the collectives of a sequence are part of its task"
        number = self._begin(self._membership, group)
        task = self._spawn(self._in_turn(self._newest.get(group.tag), self._membership, group, number, work, *args))
        self._newest[group.tag] = task
        task.add_done_callback(functools.partial(self._forget, group.tag))
        return task

    def _forget(self, tag: int, task: asyncio.Task[Any]) -> None:
        if self._newest.get(tag) is task:
            del self._newest[tag]
            self._engine.recheck()  # A task that frees the group may be waiting for this collective.

    async def _in_turn(
        self,
        previous: asyncio.Task[Any] | None,
        membership: MembershipLog,
        group: Group,
        number: int,
        work: Callable[..., Coroutine[Any, Any, T]],
        *args: Any,
    ) -> T:
        if previous is not None and not previous.done():
            await self._engine.ended(previous)
        task = asyncio.current_task()
        assert task is not None
        with membership.waiting(group, number, lambda _: task.cancel()) as participation:
            try:
                result = await work(*args)
                # The work has completed, but another member does not take part, so this task is already being
                # cancelled.
                if participation.error is not None:
                    await yield_to_loop()
            except asyncio.CancelledError:
                if participation.error is None:
                    raise
                raise participation.error from None
        return result


def _all_to_all_evenly(native: GroupHandle, size: int, send: memoryview, receive: memoryview | None) -> Request:
    counts = [len(send) // size] * size
    return native.all_to_all(send, counts, receive, counts)


def _root_of(group: Group, root: Any) -> tuple[int, int]:
    """Return the rank ``root``, an integer of any type, as an int, and its position in the group."""
    (number,) = validation.whole_numbers((root,)) or (-1,)
    if number not in group.ranks:
        raise LocalProtocolError(f"root must be one of the group's ranks {list(group.ranks)}, got {root!r}", root=root)
    return number, group.ranks.index(number)
