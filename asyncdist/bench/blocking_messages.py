"""Sends messages with blocking calls of mpi4py or torch.distributed, for comparison with asyncdist.

The messages are the raw tensors, without a header or a check, and asyncdist does not poll meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

import asyncdist as ad
from asyncdist.launchers import job_rendezvous

_TAG: Final = 99


@dataclass(frozen=True, slots=True)
class Rival:
    """Describes a library with which asyncdist is compared.

    Attributes:
        name: The calls with which the library sends and receives tensors.
        send: Function that sends a contiguous tensor of bytes on the CPU to a rank.
        receive: Function that receives into a contiguous tensor of bytes on the CPU, from a rank.
    """

    name: str
    send: Callable[[torch.Tensor, int], object]
    receive: Callable[[torch.Tensor, int], object]

    def align(self, rank: int, peer: int) -> None:
        """Exchange one byte with the peer, so that both ranks continue at nearly the same time."""
        outgoing, incoming = (torch.zeros(1, dtype=torch.uint8, device="cpu") for _ in range(2))
        self.round_trips(outgoing, incoming, 1, rank, peer)

    def round_trips(self, outgoing: torch.Tensor, incoming: torch.Tensor, count: int, rank: int, peer: int) -> None:
        """Alternately send a message to the peer and receive one, ``count`` times each. The lower rank begins."""
        for _ in range(count):
            if rank < peer:
                self.send(outgoing, peer)
                self.receive(incoming, peer)
            else:
                self.receive(incoming, peer)
                self.send(outgoing, peer)


def rival_on_gloo(dist: Any) -> Rival:
    """Return the rival that uses torch.distributed's default process group, which must be on gloo."""
    return Rival(
        "gloo send, recv",
        lambda tensor, dest: dist.send(tensor, dest, tag=_TAG),
        lambda tensor, source: dist.recv(tensor, source, tag=_TAG),
    )


async def rival_of(world: ad.World) -> Rival:
    """Return the library to compare with, on the same network backend as the world. All ranks must call this."""
    if world.transport_name != "torch":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        return Rival(
            "mpi4py Send, Recv",
            lambda tensor, dest: comm.Send(tensor.numpy(), dest, _TAG),
            lambda tensor, source: comm.Recv(tensor.numpy(), source, _TAG),
        )
    from torch import distributed

    dist: Any = distributed
    if not dist.is_initialized():
        # A new store is used: the launcher's environment variables may be missing (srun), or their port may be in use.
        address, size = job_rendezvous.torch_rendezvous().address, world.size
        served = dist.TCPStore(address, 0, size, is_master=True, wait_for_workers=False) if world.rank == 0 else None
        port = torch.tensor(served.port if served is not None else 0, device="cpu")
        port = await ad.broadcast(port, root=0)
        store = served or dist.TCPStore(address, int(port), size, is_master=False)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=size)
    return rival_on_gloo(dist)
