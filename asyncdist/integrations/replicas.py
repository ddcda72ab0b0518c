"""Makes a library or DDP train with only the ranks of one replica.

A replica is a copy of the model on several ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncdist import Group, LocalProtocolError, validation
from asyncdist.blocking import all_gather, gather
from asyncdist.blocking.callers import SwitchingCaller
from asyncdist.blocking.world import World
from asyncdist.integrations.joining import choose_gpus
from asyncdist.launchers import addresses, child_environment
from asyncdist.protocols.joining.state_transfer import packed, unpacked

#: Key in a checkpoint of the policy states of a replica's ranks.
_STATES: Final = "states of a replica's ranks"
#: Seconds in which all ranks of a replica must request a group, as for :meth:`World.new_group`.
_GROUP_TIMEOUT_S: Final = 60.0
#: Seconds in which all ranks of a replica must save a checkpoint: the timeout of torch's process groups. The first rank
#: may upload files before it saves, for example.
_SAVE_TIMEOUT_S: Final = 1800.0


@dataclass(frozen=True, slots=True)
class Replica:
    """The replica to which this rank belongs, with ``size`` ranks. ``place`` is this rank's index among them.

    Without replicas, ``number`` is the rank.
    """

    number: int
    place: int = 0
    size: int = 1

    @property
    def folder(self) -> str:
        """Name of the subfolder to which the replica writes if there are several."""
        return f"rank{self.number}" if self.size == 1 else f"replica{self.number}"


def show_replica(world: World, size: int) -> Replica:
    """Set the launcher's environment variables so that a library trains with the ranks of this rank's replica.

    All ranks of the replica must call this function. TypeError or ValueError is raised if ``size`` does not divide the
    number of ranks, or if the replica is on several hosts.
    """
    replica = replica_of(world, size)
    if world.size == 1:
        return replica
    places = _gather_addresses(world, replica, addresses.find_free_port())
    if any(place.hostname != places[0].hostname for place in places):
        first = world.rank - replica.place
        raise ValueError(f"the ranks {first} to {first + size - 1} of one replica must be on one host")
    child_environment.show_as_ranks(
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
    """Return a torch.distributed process group of the ranks of this rank's replica.

    All ranks of the replica must call this function, or all ranks of the job if torch.distributed was initialized with
    all of them. If torch.distributed is not initialized, it is initialized with the ranks of the replica.

    TypeError or ValueError is raised if ``size`` does not divide the number of ranks. LocalProtocolError is raised if
    torch.distributed has neither the ranks of the world nor the replica's, or if ranks share a process.
    """
    replica = replica_of(world, size)
    if world.size > 1 and isinstance(world._caller, SwitchingCaller):
        raise LocalProtocolError(
            "new_process_group() cannot be used by ranks that share a process, as in a simulation or a replay: the "
            "first member would wait forever for the others in the same thread",
            rank=world.rank,
        )
    if dist.is_initialized():
        return _added_group(world, replica, backend)
    hostnames = [place.hostname for place in _gather_addresses(world, replica, 0)]
    address = "127.0.0.1" if len(set(hostnames)) == 1 else hostnames[0]
    store = _served_store(address) if replica.place == 0 else None
    port = _gather_addresses(world, replica, 0 if store is None else store.port)[0].port
    if store is None:
        store = TCPStore(address, port)
    dist.init_process_group(backend, store=store, rank=replica.place, world_size=replica.size)
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is started"
    return group


def _served_store(address: str) -> TCPStore:
    """Serve a store at an address of this host, or at all addresses of this host if ``address`` is a name."""
    listener = addresses.listen_at(address, 0)
    if listener is None:
        return TCPStore(address, 0, is_master=True, wait_for_workers=False)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _added_group(world: World, replica: Replica, backend: str | None) -> dist.ProcessGroup:
    """Make a process group of the replica's ranks, when torch.distributed has all ranks or only the replica's."""
    place, size = dist.get_rank(), dist.get_world_size()
    own: dist.ProcessGroup
    if (place, size) == (world.rank, world.size):
        starts = range(0, world.size, replica.size)
        groups = [dist.new_group(list(range(start, start + replica.size)), backend=backend) for start in starts]
        own = groups[replica.number]
    elif (place, size) == (replica.place, replica.size):
        own = dist.new_group(backend=backend)
    else:
        raise LocalProtocolError(
            "torch.distributed must be started with the same ranks as the world, but this process is rank "
            f"{place} of {size} there and rank {world.rank} of {world.size} here; start it with all ranks in the same "
            "order, or do not start it",
            rank=world.rank,
        )
    return own


def replica_of(world: World, size: int) -> Replica:
    """Return this rank's replica. Raise TypeError or ValueError if ``size`` does not divide the number of ranks."""
    validation.count("replica_size", size, least=2)
    if world.size == 1:
        return Replica(0)
    if world.size % size:
        validation.refuse("replica_size", size, f"a divisor of the number of ranks ({world.size})")
    return Replica(world.rank // size, world.rank % size, size)


def states_of_replica(world: World, replica: Replica, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy states of all ranks of this rank's replica, for a checkpoint that its first rank saves.

    All ranks of the replica must call this function. It returns an empty dict on all but the first.
    """
    group = _new_group(world, replica, _SAVE_TIMEOUT_S)
    try:
        data = packed(state)
        sizes = [int(each) for each in all_gather(torch.tensor(data.numel(), device="cpu"), group=group)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        found = gather(padded, group.ranks[0], group=group)
    finally:
        world.call(group.free)
    if found is None:
        return {}
    return {_STATES: [each[:size].clone() for each, size in zip(found, sizes, strict=True)]}


def state_of_rank(replica: Replica, states: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return this rank's policy state from a result of :func:`states_of_replica`.

    Raises:
        ValueError: The replica that saved the states had a different number of ranks.
    """
    found = states.get(_STATES, [])
    if len(found) != replica.size:
        raise ValueError(
            f"the checkpoint must have the policy's states of {replica.size} ranks, like this replica, got "
            f"{len(found)}; use the replica_size of the run that saved it"
        )
    state: Mapping[str, Any] = unpacked(found[replica.place])
    return state


@dataclass(frozen=True, slots=True)
class _RankAddress:
    """Host and local rank of a rank in a replica, and the port that the rank offers, or 0 if it offers none."""

    hostname: str
    local_rank: int
    port: int


def _gather_addresses(world: World, replica: Replica, port: int) -> list[_RankAddress]:
    """Return the :class:`_RankAddress` of each rank in the replica, in rank order. Collective among its ranks.

    The ranks make a new group, because a restarted replica is not in the group of all ranks.
    """
    mine = [*world.hostname.encode()[:64].ljust(64), world.local_rank, port]
    group = _new_group(world, replica, _GROUP_TIMEOUT_S)
    try:
        gathered = all_gather(torch.tensor(mine, device="cpu"), group=group)
    finally:
        world.call(group.free)
    return [
        _RankAddress(bytes(name).decode(errors="replace").rstrip(), number, found)
        for *name, number, found in (each.tolist() for each in gathered)
    ]


def _new_group(world: World, replica: Replica, timeout_s: float) -> Group:
    first = world.rank - replica.place
    groups = world.awaited.peers.groups
    return world.call(groups.replica_group, range(first, first + replica.size), timeout_s)
