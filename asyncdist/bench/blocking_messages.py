"""Sends messages with blocking calls of mpi4py or torch.distributed, for comparison with asyncdist.

The messages are the raw tensors, without a header or a check, and asyncdist does not poll meanwhile.
"""

from __future__ import annotations

import abc
from typing import Any, Final

import torch

import asyncdist as ad
from asyncdist.launchers import job_rendezvous

_TAG: Final = 99


class Rival(abc.ABC):
    """A library with which asyncdist is compared. ``name`` lists the calls with which it sends and receives tensors."""

    name: str

    def __init__(self) -> None:
        self._byte = torch.zeros(1, dtype=torch.uint8, device="cpu")

    @abc.abstractmethod
    def send(self, tensor: torch.Tensor, dest: int) -> None:
        """Send a contiguous tensor of bytes on the CPU."""

    @abc.abstractmethod
    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Receive into a contiguous tensor of bytes on the CPU."""

    def align(self, rank: int, peer: int) -> None:
        """Exchange one byte with the peer, so that both ranks continue at nearly the same time."""
        self.round_trips(self._byte, self._byte.clone(), 1, rank, peer)

    def round_trips(self, outgoing: torch.Tensor, incoming: torch.Tensor, count: int, rank: int, peer: int) -> None:
        """Send ``count`` messages to the peer and receive as many, alternately. The lower rank begins."""
        for _ in range(count):
            if rank < peer:
                self.send(outgoing, peer)
                self.receive(incoming, peer)
            else:
                self.receive(incoming, peer)
                self.send(outgoing, peer)


class MpiRival(Rival):
    """Calls ``Send`` and ``Recv`` of ``MPI.COMM_WORLD``."""

    name = "mpi4py Send, Recv"

    def __init__(self) -> None:
        from mpi4py import MPI

        super().__init__()
        self._comm = MPI.COMM_WORLD

    def send(self, tensor: torch.Tensor, dest: int) -> None:
        """Send a contiguous tensor of bytes on the CPU."""
        self._comm.Send(tensor.numpy(), dest, _TAG)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Receive into a contiguous tensor of bytes on the CPU."""
        self._comm.Recv(tensor.numpy(), source, _TAG)


class TorchRival(Rival):
    """Calls ``send`` and ``recv`` of torch.distributed's default process group, on gloo."""

    name = "gloo send, recv"

    def __init__(self, dist: Any) -> None:
        super().__init__()
        self._dist = dist

    def send(self, tensor: torch.Tensor, dest: int) -> None:
        """Send a contiguous tensor of bytes on the CPU."""
        self._dist.send(tensor, dest, tag=_TAG)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Receive into a contiguous tensor of bytes on the CPU."""
        self._dist.recv(tensor, source, tag=_TAG)


async def rival_of(world: ad.World) -> Rival:
    """Return the other library, which uses the same network backend as the world. All ranks must call this function."""
    if world.transport_name != "torch":
        return MpiRival()
    from torch import distributed

    dist: Any = distributed
    if not dist.is_initialized():
        # The store is new, because the launcher's variables may be missing (srun), and their port may be in use.
        address, size = job_rendezvous.torch_rendezvous().address, world.size
        served = dist.TCPStore(address, 0, size, is_master=True, wait_for_workers=False) if world.rank == 0 else None
        port = torch.tensor(served.port if served is not None else 0, device="cpu")
        port = await ad.broadcast(port, root=0)
        store = served or dist.TCPStore(address, int(port), size, is_master=False)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=size)
    return TorchRival(dist)
