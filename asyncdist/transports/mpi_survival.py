"""Sends messages over MPI in jobs that continue when ranks die: Open MPI 5 under ``mpirun --with-ft ulfm``.

With MPI's fault tolerance (ULFM, User-Level Failure Mitigation), requests that involve a dead rank fail with an error.
The following rules were found by experiment with Open MPI 5.0.11:

- Only messages on one communicator are used. If a member dies, MPI's collectives and the creation of communicators may
  block, or complete on only some ranks. Collectives are therefore built from messages.
- Receives from any source are persistent, because plain receives fail forever after a death. A death is acknowledged
  inside the ``except`` block, before any other test. If it were not, these receives would never complete.
- MPI_Finalize is never called, because it may hang after a death. Before a rank exits, it exchanges goodbyes with all
  live ranks, so that no rank mistakes the exit for a death.
- Open MPI does not treat an exit with a nonzero code as a death. If a rank exits with such a code without notifying the
  others, its guardian process (:mod:`asyncdist.launch.guardians`) turns the exit into a death by a signal.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

from asyncdist import rank_program
from asyncdist.errors import RankLostError, TransportError
from asyncdist.transports import mpi_launchers
from asyncdist.transports.base import (
    ANY_SOURCE,
    Buffer,
    PersistentReceive,
    Request,
)
from asyncdist.transports.mpi import MpiMessages
from asyncdist.transports.mpi_requests import WildcardReceive
from asyncdist.wording import ranks_in_words

logger = logging.getLogger("asyncdist.transports.mpi_survival")

#: Seconds that a closing rank waits for the other ranks' goodbyes, which they may send only after their last requests.
_GOODBYE_S: Final = 15.0
_GOODBYE_PERIOD_S: Final = 0.0005
#: Yields the number of earlier worlds of this process.
_world_counts: Final = itertools.count()


class SurvivingMpiTransport(MpiMessages):
    """MPI transport for jobs that continue when ranks die.

    Raises:
        TransportError: There is no usable MPI library, or a rank of this job is already lost.
    """

    def __init__(self, check_library: Callable[[str], None] | None = None) -> None:
        rank_program.report_to_guardian(rank_program.OPENS_WORLD)
        super().__init__(check_library, survives=True)
        self.launch_nonce = mpi_launchers.job_number(next(_world_counts))
        self._losses = {self._mpi.ERR_PROC_FAILED, self._mpi.ERR_PROC_FAILED_PENDING}
        self._lost: set[int] = set()
        self._lost_ranks: frozenset[int] = frozenset()

    def _check_world(self) -> None:
        if not hasattr(self._mpi.Comm, "Ack_failed"):
            raise TransportError(
                "mpi4py must be >= 4.1 to continue after the loss of a rank: pip install 'mpi4py>=4.1'"
            )
        world = self._mpi.COMM_WORLD
        world.Set_errhandler(self._mpi.ERRORS_RETURN)
        failed = world.Get_failed()
        if failed.size:
            raise TransportError(f"a new world needs all ranks of the job, but {failed.size} of them are lost")

    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        if dest in self._lost:  # MPI would complete a small send to a dead rank.
            return _FailedRequest(dest)
        return super().isend(buffer, dest, tag)

    def _send_request(self, buffer: Buffer, dest: int, tag: int) -> Any:
        return _FailedRequest(dest) if dest in self._lost else super()._send_request(buffer, dest, tag)

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        if source != ANY_SOURCE:
            return super().irecv(buffer, source, tag)
        receive = self.persistent_receive(buffer, tag)
        receive.start()
        return receive

    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        mpi = self._mpi
        request = self._comm.Recv_init(buffer, mpi.ANY_SOURCE, tag)
        return WildcardReceive(request, buffer, mpi.Status(), self._fail, self._acknowledge, self._lost)

    def lost_ranks(self) -> frozenset[int]:
        return self._lost_ranks

    def note_handshake(self) -> None:
        """Let the guardian (supervising process) report this rank's exit. No rank uses MPI's collectives any longer."""
        rank_program.report_to_guardian(rank_program.IN_WORLD)

    def close(self) -> None:
        """Send a goodbye to all other ranks, and wait until each of them has sent one or is lost."""
        self._listen = lambda _: None
        nothing = bytearray()
        peers = [rank for rank in range(self.size) if rank != self.rank and rank not in self._lost]
        waiting = [self._end_comm.Isend(nothing, peer, 0) for peer in peers]
        waiting += [self._end_comm.Irecv(nothing, peer, 0) for peer in peers]
        give_up_at = time.monotonic() + _GOODBYE_S
        while (waiting := [request for request in waiting if not self._has_ended(request)]) and (
            time.monotonic() < give_up_at
        ):
            time.sleep(_GOODBYE_PERIOD_S)
        if not self._lost:
            super().close()
        self.close_failed()

    def abort(self, exit_code: int) -> None:
        """End the job through this rank's guardian process. If a rank has died, MPI_Abort may leave mpirun running."""
        if rank_program.report_to_guardian(rank_program.ENDS_JOB):
            os._exit(exit_code)
        super().abort(exit_code)

    def close_failed(self) -> None:
        rank_program.report_to_guardian(rank_program.LEFT_WORLD)

    def _has_ended(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception:  # The other rank is lost.
            return True

    def _fail(self, error: BaseException, status: Any, buffer: Any, peer: int) -> NoReturn:
        if isinstance(error, self._mpi.Exception) and error.Get_error_class() in self._losses:
            if peer != ANY_SOURCE:
                self._note_losses(peer)
                raise _loss_of(peer) from error
            self._note_losses()
            raise RankLostError("the rank that was sending this message is lost", rank=ANY_SOURCE) from error
        super()._fail(error, status, buffer, peer)

    def _acknowledge(self, error: BaseException) -> bool:
        """Return whether ``error`` reports a death. If so, acknowledge it, so that wildcard receives continue."""
        mpi = self._mpi
        is_death = isinstance(error, mpi.Exception) and error.Get_error_class() == mpi.ERR_PROC_FAILED_PENDING
        if is_death:
            self._note_losses()
        return is_death

    def _note_losses(self, *known: int) -> None:
        """Acknowledge all deaths, and call the listener for each newly lost rank."""
        self._comm.Ack_failed()
        failed, group = self._comm.Get_failed(), self._comm.Get_group()
        found = {*known, *(failed.Translate_ranks(None, group) if failed.size else ())}
        failed.Free()
        group.Free()
        new = sorted(found - self._lost)
        self._lost.update(new)
        self._lost_ranks = frozenset(self._lost)
        for (_, dest, _), send in self._repeated.items():
            if dest in new:
                send.give_up(_FailedRequest(dest))
        if new:
            self._report()
        for rank in new:
            self._listen(rank)

    def _report(self) -> None:
        """If this is the lowest live rank, log a warning that names all lost ranks."""
        live = [rank for rank in range(self.size) if rank not in self._lost]
        if live[0] == self.rank:
            lost = sorted(self._lost)
            logger.warning(
                "%s %s lost; the job continues with %d of %d ranks",
                ranks_in_words(lost),
                "are" if len(lost) > 1 else "is",
                len(live),
                self.size,
            )


def _loss_of(rank: int) -> RankLostError:
    return RankLostError(f"rank {rank} is gone: its process has ended", rank=rank)


class _FailedRequest:
    """Represents a send to a lost rank. Its tests raise RankLostError, and so do the starts of a prepared send."""

    cancelled: Final = False
    source: Final = ANY_SOURCE
    nbytes: Final = 0

    def __init__(self, dest: int) -> None:
        self._dest = dest

    def test(self) -> NoReturn:
        raise _loss_of(self._dest)  # Each time a new error, because each raise adds to the error's traceback.

    Start = Test = test  # mpi4py's method names

    def Free(self) -> None:  # noqa: N802 -- mpi4py's name
        """Do nothing, because there is no request of MPI."""

    def cancel(self) -> None:
        """Do nothing, because the request has already failed."""
