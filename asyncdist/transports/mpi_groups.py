"""Wraps MPI communicators for :mod:`asyncdist.transports.mpi`, which passes the module mpi4py.MPI to this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from asyncdist.transports.base import ANY_SOURCE, Buffer, ReduceOp, Request


class _CollectiveRequest:
    """Request of a collective, which has several buffers and no peer."""

    __slots__ = ("_buffers", "_fail", "_request", "_what")

    cancelled: Final = False
    source: Final = ANY_SOURCE
    nbytes: Final = 0

    def __init__(self, request: Any, buffers: Any, fail: Callable[[BaseException, str], NoReturn], what: str) -> None:
        self._request = request
        self._buffers = buffers  # MPI uses the buffers until the request has completed.
        self._fail = fail
        self._what = what

    def test(self) -> bool:
        try:
            return bool(self._request.Test())
        except Exception as error:
            self._fail(error, self._what)

    def cancel(self) -> None:
        """Do nothing, because collectives cannot be cancelled (MPI-4.1 section 6.12)."""


class MpiGroup:
    """Starts nonblocking collectives on one MPI communicator (MPI-4.1 section 6.12)."""

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        ranks: Sequence[int],
        fail_collective: Callable[[BaseException, str], NoReturn],
    ) -> None:
        self._mpi = mpi
        self.comm = comm
        self.ranks = ranks
        self._fail_collective = fail_collective
        self._ops = {"sum": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX, "prod": mpi.PROD}

    def barrier(self) -> Request:
        return self._start(self.comm.Ibarrier)

    def broadcast(self, buffer: Buffer, root: int) -> Request:
        return self._start(self.comm.Ibcast, buffer, root)

    def gather(self, send: Buffer, receive: Buffer | None, root: int) -> Request:
        return self._start(self.comm.Igather, send, receive, root)

    def all_gather(self, send: Buffer, receive: Buffer) -> Request:
        return self._start(self.comm.Iallgather, send, receive)

    def all_reduce(self, buffer: Buffer, op: ReduceOp, receive: Buffer | None = None) -> Request:
        if receive is None:
            return self._start(self.comm.Iallreduce, self._mpi.IN_PLACE, buffer, self._ops[op])
        return self._start(self.comm.Iallreduce, buffer, receive, self._ops[op])

    def all_to_all(
        self, send: Buffer, send_counts: Sequence[int], receive: Buffer, receive_counts: Sequence[int]
    ) -> Request:
        byte = self._mpi.BYTE
        return self._start(self.comm.Ialltoallv, [send, list(send_counts), byte], [receive, list(receive_counts), byte])

    def free(self) -> None:
        self.comm.Free()

    def _start(self, collective: Callable[..., Any], *args: Any) -> Request:
        try:
            request = collective(*args)
        except Exception as error:
            self._fail(error, collective.__name__)
        return _CollectiveRequest(request, args, self._fail, collective.__name__)

    def _fail(self, error: BaseException, name: str) -> NoReturn:
        self._fail_collective(error, f"{name} of the group {list(self.ranks)}")
