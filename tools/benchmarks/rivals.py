"""The benchmarks' rivals: raw messages as a script without asyncdist would send them, between the same ranks.

On MPI, the rival makes nonblocking calls of mpi4py and tests them until they are done. On torch, it calls the blocking
``send`` and ``recv`` on a separate gloo group. These calls do not pack, check or decode anything. They do not yield to
the event loop, so asyncdist does not poll during these calls.
"""

from __future__ import annotations

import time
from typing import Any, Final, Protocol

import torch

import asyncdist as ad
from asyncdist.bench import blocking_messages

_TAG: Final = 99
_PERIOD_S: Final = 0.001


class Rival(Protocol):
    """Messages between the two ranks of a benchmark."""

    async def align(self) -> None:
        """Return on all ranks at nearly the same time, with no operation of asyncdist in progress."""

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor to the other rank."""

    def round_trip(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        """Make a round trip: rank 0 sends first, and rank 1 answers."""

    def round_trips(self, outgoing: torch.Tensor, incoming: torch.Tensor, count: int) -> None:
        """Make ``count`` round trips in a loop that only makes the calls that move bytes."""

    def await_message(self, incoming: torch.Tensor) -> None:
        """Wait for a message, possibly for seconds, without spinning."""


def rival_of(world: ad.World) -> Rival:
    """Return the rival for the world's transport. All ranks must call this function."""
    return TorchRival(world) if world.transport_name == "torch" else MpiRival()


async def align(comm: Any) -> None:
    """Return on all ranks of MPI at nearly the same time, with no operation of asyncdist in progress.

    With a barrier of asyncdist alone, ranks continue up to a millisecond apart, because an idle rank polls that often.
    """
    await ad.barrier()
    spin(comm.Ibarrier())


def spin(request: Any) -> None:
    test = request.Test
    while not test():
        pass


class MpiRival:
    """Raw mpi4py on MPI.COMM_WORLD."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        self._peer = 1 - self._comm.rank

    async def align(self) -> None:
        await align(self._comm)

    def send(self, tensor: torch.Tensor) -> None:
        spin(self._comm.Isend(tensor.numpy(), self._peer, _TAG))

    def round_trip(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        arriving = self._comm.Irecv(incoming.numpy(), self._peer, _TAG)
        if self._comm.rank == 0:
            self.send(outgoing)
            spin(arriving)
        else:
            spin(arriving)
            self.send(outgoing)

    def round_trips(self, outgoing: torch.Tensor, incoming: torch.Tensor, count: int) -> None:
        comm, peer = self._comm, self._peer
        send, receive = bytearray(outgoing.nbytes), bytearray(incoming.nbytes)
        if comm.rank == 0:
            for _ in range(count):
                arriving = comm.Irecv(receive, peer, _TAG)
                spin(comm.Isend(send, peer, _TAG))
                spin(arriving)
        else:
            for _ in range(count):
                spin(comm.Irecv(receive, peer, _TAG))
                spin(comm.Isend(send, peer, _TAG))

    def await_message(self, incoming: torch.Tensor) -> None:
        request = self._comm.Irecv(incoming.numpy(), self._peer, _TAG)
        while not request.Test():
            time.sleep(_PERIOD_S)


class TorchRival:
    """Blocking calls on the process group that a script would make."""

    def __init__(self, world: ad.World) -> None:
        from torch import distributed as dist

        self._rank, self._peer = world.rank, 1 - world.rank
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self._barrier = dist.barrier
        self._messages = blocking_messages.rival_on_gloo(dist)

    async def align(self) -> None:
        await ad.barrier()
        self._barrier()

    def send(self, tensor: torch.Tensor) -> None:
        self._messages.send(tensor, self._peer)

    def round_trip(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        self.round_trips(outgoing, incoming, 1)

    def round_trips(self, outgoing: torch.Tensor, incoming: torch.Tensor, count: int) -> None:
        self._messages.round_trips(outgoing, incoming, count, self._rank, self._peer)

    def await_message(self, incoming: torch.Tensor) -> None:
        self._messages.receive(incoming, self._peer)
