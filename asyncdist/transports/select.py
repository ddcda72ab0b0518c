"""Chooses and opens the transport of a rank that a launcher has started."""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import torch

from asyncdist import tags
from asyncdist.errors import TransportError
from asyncdist.launchers import child_environment, detection, job_rendezvous
from asyncdist.launchers.variables import NO_LAUNCHER, Launch
from asyncdist.transports import mpi_launchers
from asyncdist.transports.base import Transport

if TYPE_CHECKING:
    from asyncdist.transports.mpi import MpiMessages

logger = logging.getLogger("asyncdist.transports.select")


def detect(transport: str) -> Launch:
    """Return how this process was started, considering any process group that the program has initialised.

    Raises:
        TransportError: This process is a child of a rank, or imports the script for multiprocessing.
        ValueError: A variable of the launcher is invalid.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise TransportError(
            "asyncdist cannot start in this process, which is a child of multiprocessing, such as a DataLoader's "
            "worker, "
            'and not a rank: start under if __name__ == "__main__": in the script'
        )
    group = None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        group = torch.distributed.get_rank(), torch.distributed.get_world_size()
    started = detection.detect(wanted=transport, group=group)
    if started.source == NO_LAUNCHER and transport == "auto":
        _refuse_child_of_rank()
    return started


def _refuse_child_of_rank() -> None:
    rank_pid = child_environment.rank_above()
    if rank_pid is not None:
        raise TransportError(
            f"asyncdist cannot start in this process, because it is a child of the rank with pid {rank_pid}, which has "
            "a world: use that world in the rank, or start this program as a job of its own with asyncdist run"
        )


def open_transport(name: str, started: Launch) -> Transport:
    """Open the transport ``name`` for a process whose launch is described by ``started``.

    Raises:
        TransportError: The transport cannot be used in a process that was started in this way.
    """
    child_environment.hide_secret()
    return OPENERS[name](started)


def _open_mpi(started: Launch) -> MpiMessages:
    """Initialise MPI and return its transport, after checking that the launcher and the library match."""
    from asyncdist.transports.mpi import MpiTransport
    from asyncdist.transports.mpi_survival import SurvivingMpiTransport

    _refuse_child_of_rank()
    is_worker = multiprocessing.parent_process() is not None and started.source != NO_LAUNCHER
    if is_worker and started.transport == "mpi":
        raise TransportError(
            "asyncdist cannot start on MPI in this process, because it is a child of a rank and has its variables, so "
            "MPI would take it for that rank: open the world in the rank, or start this program as a job of its own "
            "with asyncdist run"
        )
    kind = SurvivingMpiTransport if mpi_launchers.survives_rank_loss() else MpiTransport
    transport: MpiMessages = kind(functools.partial(mpi_launchers.check_library, started))
    if started.transport == "mpi":
        mpi_launchers.check_world_size(started, transport.size, transport.describe())
        if transport.size == 1 and started.source == NO_LAUNCHER:
            detection.check_alone()
        hint = mpi_launchers.oversubscription_hint()
        if hint is not None and transport.rank == 0:
            logger.warning("%s", hint)
    child_environment.become_rank()
    return transport


def _open_torch(_: Launch) -> Transport:
    """Open the torch transport. Ranks find each other through the user's process group or MASTER_ADDR."""
    from asyncdist.transports.torch_distributed import transport
    from asyncdist.transports.torch_distributed.meeting.rendezvous import is_group_initialised

    place = None if is_group_initialised() else job_rendezvous.torch_rendezvous()
    return transport.open_transport(place, granted_tags=tags.BULK)


#: Functions that open the transports between processes, keyed by the transport's name. They import its library.
OPENERS: Final[Mapping[str, Callable[[Launch], Transport]]] = {"mpi": _open_mpi, "torch": _open_torch}
