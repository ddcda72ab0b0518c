"""Lets a library, or DDP, see the ranks of one replica in place of all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncdist import LocalProtocolError, environment, local_host, validation
from asyncdist.blocking.callers import SwitchingCaller
from asyncdist.blocking.helpers import all_gather
from asyncdist.blocking.world import World
from asyncdist.integrations.joining import choose_gpus


@dataclass(frozen=True, slots=True)
class Replica:
    """Describes the replica of this rank.

    Attributes:
        number: of the replica, from 0.
        place: of this rank in it, from 0.
        size: how many ranks hold it.
    """

    number: int
    place: int
    size: int


def show_replica(world: World, size: int) -> Replica:
    """Let a library that reads a launcher's variables from now on train with the ranks of this rank's replica.

    All ranks call it together. Alone, nothing is changed.

    Raises:
        TypeError, ValueError: the ranks cannot be divided so, or a replica's ranks are on several hosts.
    """
    replica = replica_of(world, size)
    if world.size == 1:
        return replica
    places = _gather_places(world, replica, local_host.find_free_port())
    if any(place.hostname != places[0].hostname for place in places):
        first = world.rank - replica.place
        raise ValueError(f"the ranks {first} to {first + size - 1} are on several hosts; a trainer's replica is on one")
    environment.show_as_ranks(
        {
            "RANK": str(replica.place),
            "LOCAL_RANK": str(replica.place),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(places[0].port),
        }
    )
    choose_gpus([place.local_rank for place in places])
    return replica


def new_process_group(world: World, size: int, backend: str | None) -> dist.ProcessGroup:
    """Return the process group of torch.distributed of this rank's replica; all ranks call it together.

    Raises:
        TypeError, ValueError: the ranks cannot be divided so.
        LocalProtocolError: torch.distributed was started with other ranks than the world's; or ranks share a process.
    """
    replica = replica_of(world, size)
    if world.size > 1 and isinstance(world._caller, SwitchingCaller):
        raise LocalProtocolError(
            "ranks that share a process, as in a simulation or a replay, make no process group of torch.distributed: "
            "its first member would wait for the others in their common thread",
            rank=world.rank,
        )
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
            raise LocalProtocolError(
                f"torch.distributed was started as rank {dist.get_rank()} of {dist.get_world_size()}, and this is rank "
                f"{world.rank} of {world.size}; allowed: all ranks in their order, or not started",
                rank=world.rank,
            )
        starts = range(0, world.size, replica.size)
        groups = [dist.new_group(list(range(start, start + replica.size)), backend=backend) for start in starts]
        own: dist.ProcessGroup = groups[replica.number]
        return own
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if replica.place == 0 else None
    first, *others = _gather_places(world, replica, store.port if store is not None else 0)
    if store is None:
        is_near = all(place.hostname == first.hostname for place in others)
        store = TCPStore("127.0.0.1" if is_near else first.hostname, first.port)
    dist.init_process_group(backend, store=store, rank=replica.place, world_size=replica.size)
    group = dist.group.WORLD
    assert group is not None, "torch.distributed has been started"
    return group


def replica_of(world: World, size: int) -> Replica:
    """Return the replica of this rank. Raises TypeError or ValueError if the ranks cannot be divided so."""
    validation.count("replica_size", size, least=2)
    if world.size == 1:
        return Replica(0, 0, 1)
    if world.size % size:
        validation.refuse("replica_size", size, f"a divisor of the number of ranks, {world.size}")
    return Replica(world.rank // size, world.rank % size, size)


@dataclass(frozen=True, slots=True)
class _Place:
    """Says where a rank of the replica is.

    Attributes:
        hostname: of its host.
        local_rank: its number there.
        port: at which others can reach it; 0 for none.
    """

    hostname: str
    local_rank: int
    port: int


def _gather_places(world: World, replica: Replica, port: int) -> list[_Place]:
    """Return the places of the replica's ranks, in their order; all ranks of the world call it together."""
    mine = [*world.hostname.encode()[:64].ljust(64), world.local_rank, port]
    first = world.rank - replica.place
    gathered = all_gather(torch.tensor(mine, device="cpu"))[first : first + replica.size]
    return [
        _Place(bytes(name).decode(errors="replace").rstrip(), number, found)
        for *name, number, found in (each.tolist() for each in gathered)
    ]
