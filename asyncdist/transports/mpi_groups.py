"""Communicators and memory windows of MPI, for :mod:`asyncdist.transports.mpi`.

Nothing here imports mpi4py: the transport passes its module.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from asyncdist.transports.base import ANY_SOURCE, Buffer, ReduceOp, Request
from asyncdist.transports.mpi_requests import SendRequest


class _CollectiveRequest:
    """A collective: it has several buffers, and no peer."""

    __slots__ = ("_buffers", "_fail", "_request", "_what")

    cancelled: Final = False
    source: Final = ANY_SOURCE
    nbytes: Final = 0

    def __init__(self, request: Any, buffers: Any, fail: Callable[[BaseException, str], NoReturn], what: str) -> None:
        self._request = request
        self._buffers = buffers  # MPI uses them until the request has completed
        self._fail = fail
        self._what = what

    def test(self) -> bool:
        try:
            return bool(self._request.Test())
        except Exception as error:
            self._fail(error, self._what)

    def cancel(self) -> None:
        """Collectives cannot be cancelled (MPI-4.1 section 6.12)."""


class MpiWindow:
    """Memory of every member, open to all of them from the start (MPI-4.1 chapter 12, passive target).

    Args:
        comm: of the members, who all make it at the same time.
        nbytes: of each.
    """

    def __init__(
        self, mpi: Any, comm: Any, nbytes: int, fail: Callable[[BaseException, Any, Any, int], NoReturn]
    ) -> None:
        self._mpi = mpi
        self._comm = comm
        self._fail = fail
        self._win = mpi.Win.Allocate(nbytes, 1, comm=comm)
        self._win.Set_errhandler(mpi.ERRORS_RETURN)
        self.memory = memoryview(self._win.tomemory())
        self.is_retired = self.is_freed = False
        self._open()

    def _open(self) -> None:
        """Clear the memory and open it to all members.

        On MPICH the first read of a target waits until that one is in MPI, so each member makes it here.
        """
        self.memory[:] = bytes(len(self.memory))
        self._win.Lock_all(self._mpi.MODE_NOCHECK)
        self._win.Sync()
        self._comm.Barrier()
        for source in range(self._comm.size if len(self.memory) else 0):
            self._win.Rget([bytearray(1), self._mpi.BYTE], source, [0, 1, self._mpi.BYTE]).Wait()
        self._comm.Barrier()

    def sync(self) -> None:
        self._win.Sync()

    def start_read(self, buffer: Buffer, source: int, offset: int) -> Request:
        byte, nbytes = self._mpi.BYTE, memoryview(buffer).nbytes
        request = self._win.Rget([buffer, nbytes, byte], source, [offset, nbytes, byte])
        return SendRequest(request, buffer, self._fail, source)

    def retire(self) -> None:
        self.is_retired = True

    def free(self) -> None:
        """Give the memory back. Collective, and blocks until all members are here."""
        if not self.is_freed:
            self.is_freed = True
            self.memory = memoryview(b"")
            self._win.Unlock_all()
            self._win.Free()


class Windows:
    """The windows of some ranks, oldest first, on whichever of their communicators they were made.

    Groups come and go, and a window outlives the communicator that it was made on.
    """

    def __init__(self) -> None:
        self._windows: list[MpiWindow] = []
        self._freed_count = 0

    def give_retired_back(self, mpi: Any, comm: Any) -> None:
        """Free the windows that every member has retired. Collective, and blocks."""
        in_use = (number for number, window in enumerate(self._windows) if not window.is_retired)
        oldest = array("q", [self._freed_count + next(in_use, len(self._windows))])
        comm.Allreduce(mpi.IN_PLACE, oldest, mpi.MIN)
        while self._freed_count < oldest[0]:
            self._windows.pop(0).free()
            self._freed_count += 1

    def append(self, window: MpiWindow) -> None:
        """Add a window, which all members have made."""
        self._windows.append(window)


class MpiGroup:
    """Nonblocking collectives of one communicator (MPI-4.1 chapter 6.12)."""

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

    def is_on_one_host(self) -> bool:
        """Whether the members share memory. Collective."""
        host = self.comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        is_whole = bool(host.size == self.comm.size)
        host.Free()
        return is_whole

    def _start(self, collective: Callable[..., Any], *args: Any) -> Request:
        try:
            request = collective(*args)
        except Exception as error:
            self._fail(error, collective.__name__)
        return _CollectiveRequest(request, args, self._fail, collective.__name__)

    def _fail(self, error: BaseException, name: str) -> NoReturn:
        self._fail_collective(error, f"{name} of the group {list(self.ranks)}")
