"""Sends messages by MPI in a job that goes on when ranks die: Open MPI 5 under ``mpirun --with-ft ulfm``.

Fault tolerance of MPI (ULFM, User-Level Failure Mitigation) makes a death an error of the requests that involve the
dead rank. What this transport keeps to, each found by experiment with Open MPI 5.0.11:

- Only messages of one communicator are used. Collectives and communicators block, or are left half done, when a
  member dies in them; so groups have neither, collectives are made of messages, and one-sided reads are answered by
  their owner. No communicator is shrunk or revoked: the dead are left out.
- Receives from any source are persistent (:class:`asyncdist.transports.mpi_requests.WildcardReceive`), since plain ones
  fail for ever. A death is acknowledged inside the ``except``, before anything else is tested: otherwise they starve.
- What a dead rank had sent may arrive after the news of its death. It is dropped then, so a lost rank stays silent.
- MPI_Finalize is never called: after a death it may hang. A rank that closes says goodbye to all that live, waits for
  theirs, and simply ends. No rank ends while another one still listens, and would take its end for a death.
- The end of a process with another exit code than 0 is no death for Open MPI. A rank that fails has told the others; of
  one that has not, ``os._exit(1)`` say, the guardian (:mod:`asyncdist.launch.guardians`) makes a death by a signal.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from asyncdist import rank_program
from asyncdist.errors import AsyncdistError, RankLostError, TransportError
from asyncdist.transports import mpi_launchers
from asyncdist.transports.base import (
    ANY_SOURCE,
    Buffer,
    Capabilities,
    GroupHandle,
    PersistentReceive,
    Request,
)
from asyncdist.transports.mpi import WRITTEN_SHARE, MpiMessages
from asyncdist.transports.mpi_requests import SendRequest, WildcardReceive
from asyncdist.wording import ranks_in_words

logger = logging.getLogger("asyncdist.transports.mpi_survival")

#: How long a rank that closes waits for the goodbyes of the others: their last requests may take as long as that.
_GOODBYE_S: Final = 15.0
_GOODBYE_PERIOD_S: Final = 0.0005


class SurvivingMpiTransport(MpiMessages):
    """A rank of a job that goes on when others die.

    Args:
        check_library: is shown the MPI library's version before MPI_Init and may raise.

    Raises:
        TransportError: no usable MPI library, or a rank of this job is lost already.
    """

    def __init__(self, check_library: Callable[[str], None] | None = None) -> None:
        rank_program.tell_guardian(rank_program.OPENS_WORLD)
        super().__init__(check_library, finalizes=False)
        self.launch_nonce = mpi_launchers.job_number()
        self.capabilities = Capabilities(
            native_collectives=False,
            survives_rank_loss=True,
            wakes=False,
            tag_max=self._tag_max,
            shares_memory=True,
            written_share=WRITTEN_SHARE,
        )
        self._losses = {self._mpi.ERR_PROC_FAILED, self._mpi.ERR_PROC_FAILED_PENDING}
        self._lost: set[int] = set()
        self._lost_ranks: frozenset[int] = frozenset()
        self._listen: Callable[[int], None] = lambda _: None

    def _check_world(self) -> None:
        if not hasattr(self._mpi.Comm, "Ack_failed"):
            raise TransportError("to go on after the loss of a rank takes mpi4py 4.1: pip install 'mpi4py>=4.1'")
        world = self._mpi.COMM_WORLD
        world.Set_errhandler(self._mpi.ERRORS_RETURN)
        failed = world.Get_failed()
        if failed.size:
            raise TransportError(f"{failed.size} ranks of this job are lost, and a new world takes all of them")

    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        if dest in self._lost:  # MPI completes a small message to a dead rank as if it had arrived
            return _FailedRequest(self._loss_of(dest))
        return SendRequest(self._isend(buffer, dest, tag), buffer, self._fail, dest)

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

    def new_group(self, ranks: Sequence[int], tag: int) -> GroupHandle | None:
        del ranks, tag
        return None

    def lost_ranks(self) -> frozenset[int]:
        return self._lost_ranks

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        self._listen = listen
        for rank in sorted(self._lost):
            listen(rank)

    def note_met(self) -> None:
        """Let the others hear of this rank's end from now on: none of them waits in a call of MPI that needs all."""
        rank_program.tell_guardian(rank_program.IN_WORLD)

    def close(self) -> None:
        """Say goodbye, and wait until every rank that lives has said so, or is lost."""
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
        """End the job through the guardian: after a death MPI_Abort may leave an mpirun that never ends."""
        if rank_program.tell_guardian(rank_program.ENDS_JOB):
            os._exit(exit_code)
        super().abort(exit_code)

    def close_failed(self) -> None:
        rank_program.tell_guardian(rank_program.LEFT_WORLD)

    def _has_ended(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception:  # that rank is lost
            return True

    def _loss_of(self, rank: int) -> RankLostError:
        return RankLostError(f"rank {rank} is gone: its process has ended", rank=rank)

    def _fail(self, error: BaseException, status: Any, buffer: Any, peer: int) -> NoReturn:
        if isinstance(error, self._mpi.Exception) and error.Get_error_class() in self._losses:
            if peer != ANY_SOURCE:
                self._note_losses(peer)
                raise self._loss_of(peer) from error
            self._note_losses()
            raise RankLostError("a rank is gone that was sending a message", rank=ANY_SOURCE) from error
        super()._fail(error, status, buffer, peer)

    def _acknowledge(self, error: BaseException) -> bool:
        """Acknowledge a death, if ``error`` tells a receive from any source of one: the receive goes on."""
        mpi = self._mpi
        is_death = isinstance(error, mpi.Exception) and error.Get_error_class() == mpi.ERR_PROC_FAILED_PENDING
        if is_death:
            self._note_losses()
        return is_death

    def _note_losses(self, *known: int) -> None:
        """Acknowledge all deaths, and tell the listener of those that are new."""
        self._comm.Ack_failed()
        failed, group = self._comm.Get_failed(), self._comm.Get_group()
        found = {*known, *(failed.Translate_ranks(None, group) if failed.size else ())}
        failed.Free()
        group.Free()
        new = sorted(found - self._lost)
        self._lost.update(new)
        self._lost_ranks = frozenset(self._lost)
        if new:
            self._report()
        for rank in new:
            self._listen(rank)

    def _report(self) -> None:
        """Say on the lowest rank that lives who is lost."""
        live = [rank for rank in range(self.size) if rank not in self._lost]
        if live[0] == self.rank:
            lost = sorted(self._lost)
            logger.warning(
                "%s %s lost; the job goes on with %d of %d ranks",
                ranks_in_words(lost),
                "are" if len(lost) > 1 else "is",
                len(live),
                self.size,
            )


class _FailedRequest:
    """A request that has failed before it was started."""

    cancelled: Final = False
    source: Final = ANY_SOURCE
    nbytes: Final = 0

    def __init__(self, error: AsyncdistError) -> None:
        self._error = error

    def test(self) -> NoReturn:
        raise self._error

    def cancel(self) -> None:
        """Do nothing: it has failed."""
