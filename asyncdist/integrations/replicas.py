"""Lets a library see the ranks of one replica in place of all: as its own launcher would have started them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncdist import environment, local_host, validation
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
    validation.count("replica_size", size, least=2)
    if world.size == 1:
        return Replica(0, 0, 1)
    if world.size % size:
        validation.refuse("replica_size", size, f"a divisor of the number of ranks, {world.size}")
    replica = Replica(world.rank // size, world.rank % size, size)
    first = world.rank - replica.place
    mine = [*world.hostname.encode()[:64].ljust(64), world.local_rank, local_host.find_free_port()]
    places = [each.tolist() for each in all_gather(torch.tensor(mine, device="cpu"))[first : first + size]]
    if any(place[:64] != mine[:64] for place in places):
        raise ValueError(f"the ranks {first} to {first + size - 1} are on several hosts; a trainer's replica is on one")
    environment.show_as_ranks(
        {
            "RANK": str(replica.place),
            "LOCAL_RANK": str(replica.place),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(places[0][-1]),
        }
    )
    choose_gpus([place[64] for place in places])
    return replica
