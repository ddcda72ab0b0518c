"""Chooses and opens the transport of a rank: MPI, torch.distributed, or one for messages and one for streams."""

from __future__ import annotations

import functools
import logging
import multiprocessing
from typing import TYPE_CHECKING, Literal

import torch

from asyncdist import environment, local_host, tags
from asyncdist.errors import TransportError
from asyncdist.transports import mpi_launchers
from asyncdist.transports.base import Transport
from asyncdist.trust import job_secret

if TYPE_CHECKING:
    from asyncdist.transports.mpi import MpiMessages

logger = logging.getLogger("asyncdist.transports.select")


def detect(transport: str) -> environment.Launch:
    """Return what started this process, the program's own process group included.

    Raises:
        TransportError: this process is a child of a rank, or a child that imports the script, which is not to start
            there.
        ValueError: as :func:`launch.detect`.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise TransportError(
            "this process is a child of multiprocessing (a worker of a DataLoader?) that imports the script, and is no "
            'rank: in the script, start under if __name__ == "__main__":'
        )
    group = None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        group = torch.distributed.get_rank(), torch.distributed.get_world_size()
    started = environment.detect(wanted=transport, group=group)
    if started.source == environment.NO_LAUNCHER and transport == "auto":
        _refuse_child_of_rank()
    return started


def _refuse_child_of_rank() -> None:
    rank_pid = environment.rank_above()
    if rank_pid is not None:
        raise TransportError(
            f"this process is a child of the rank with pid {rank_pid}, which has a world: use that world there, or "
            "start this program as a job of its own, with asyncdist run"
        )


def open_transport(name: str, bulk: str | None, started: environment.Launch) -> Transport:
    """Open the rank's transport.

    Args:
        name: ``"mpi"`` or ``"torch"``.
        bulk: the one for streams of tensors, where that is another; :func:`check_bulk` has let it pass.
        started: what started this process.

    Raises:
        TransportError: the rank was started in a way that it cannot be used with.
        ValueError: a backend of torch.distributed that cannot carry this.
    """
    environment.hide_secret()
    own = name, started.backend
    other = own if bulk is None else environment.split_transport(bulk)
    if name == "torch":
        check_torch_backend(started.backend)
    if other[0] == "torch":
        check_torch_backend(other[1], what="transport" if other == own else "bulk")
    mpi = _open_mpi(started) if "mpi" in (name, other[0]) else None
    if mpi is not None and other != own and mpi.size == 1 and (started.expected_size or 1) > 1:
        mpi.close()
        raise TransportError(
            f"transport={name!r} and bulk={bulk!r} need MPI as well, but {started.source} says that this is one of "
            f"{started.expected_size} ranks, and MPI knows of none but itself: start with mpirun (or asyncdist run -n "
            f"{started.expected_size} script.py), under which torch's ranks meet through MPI"
        )
    control = mpi if name == "mpi" and mpi is not None else _open_torch(mpi, started.backend)
    if other == own:
        return control
    from asyncdist.transports.split_plane import TwoPlaneTransport

    bulk_plane = mpi if other[0] == "mpi" and mpi is not None else _open_torch(mpi, other[1], control)
    return TwoPlaneTransport(control, bulk_plane, tags.BULK)


def _open_mpi(started: environment.Launch) -> MpiMessages:
    """Open MPI, after checking that launcher and library belong together and that the launcher started this process."""
    from asyncdist.transports.mpi import MpiTransport
    from asyncdist.transports.mpi_survival import SurvivingMpiTransport

    _refuse_child_of_rank()
    is_worker = multiprocessing.parent_process() is not None and started.source != environment.NO_LAUNCHER
    if is_worker and started.transport == "mpi":
        raise TransportError(
            "this process is a child of a rank and has its variables, with which MPI would take it for that rank: open "
            "the world there, or start this program as a job of its own, with asyncdist run"
        )
    kind = SurvivingMpiTransport if mpi_launchers.survives_rank_loss() else MpiTransport
    transport: MpiMessages = kind(functools.partial(mpi_launchers.check_library, started))
    if started.transport == "mpi":
        mpi_launchers.check_world_size(
            started.expected_size, transport.size, transport.describe(), source=started.source
        )
        if transport.size == 1 and started.source == environment.NO_LAUNCHER:
            environment.check_alone()
        hint = mpi_launchers.oversubscription_hint()
        if hint is not None and transport.rank == 0:
            logger.warning("%s", hint)
    environment.become_rank()
    return transport


def _open_torch(mpi: MpiMessages | None, backend: str, control: Transport | None = None) -> Transport:
    """Open torch.distributed, alone or as the bulk plane beside ``control``.

    Its ranks meet where the user's process group did, or its variables say, or through MPI.
    """
    from asyncdist.transports.torch_distributed.meeting.rendezvous import is_group_initialised
    from asyncdist.transports.torch_distributed.transport import open_bulk, open_transport

    place = None if is_group_initialised() else _torch_rendezvous(mpi)
    local_rank = environment.local_rank()
    if control is None or backend == environment.TORCH_BACKEND:
        return open_transport(place, granted_tags=tags.BULK, backend=backend, local_rank=local_rank)
    return open_bulk(control, tags.BULK_ENTRIES, place, backend=backend, local_rank=local_rank)


def _torch_rendezvous(mpi: MpiMessages | None) -> environment.TorchRendezvous:
    if mpi is None or environment.names_torch_rendezvous():
        return environment.torch_rendezvous()
    own = f"{mpi.own_address()} {local_host.find_free_port()} {job_secret.draw()}"
    address, port, secret = mpi.said_by_rank_0(own).split()
    return environment.TorchRendezvous(
        mpi.rank,
        mpi.size,
        address,
        int(port),
        is_store_served=False,
        secret=job_secret.JobSecret(secret.encode()),
        is_loopback=local_host.is_loopback(address),
    )


def check_torch_backend(backend: str, *, what: Literal["transport", "bulk"] = "transport") -> None:
    """Raise ValueError, which says why, for a backend of torch.distributed that cannot be the transport, or bulk."""
    from asyncdist.transports.torch_distributed.backends import check_backend

    check_backend(backend, what=what)


def describe_torch_backend(backend: str) -> str:
    """Say what an available backend of torch.distributed is used for."""
    from asyncdist.transports.torch_distributed.backends import describe_use

    return describe_use(backend)


def check_bulk(bulk: str | None, transport: str) -> None:
    """Raise ValueError for a ``bulk`` that names no transport, or has none beside it."""
    if bulk is None:
        return
    environment.split_transport(bulk, what="bulk", allowed=("mpi", "torch"))
    if transport == "local":
        raise ValueError(f"bulk={bulk!r} needs a transport between processes, not 'local'")
