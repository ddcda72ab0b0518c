"""Lets the first rank of a replica take part in asynchronous DiLoCo for all ranks of the replica.

The first rank has the anchor, sends contributions, and receives the answers. The other ranks, its followers, take no
part in the protocol. A contribution therefore contains the whole model, and is applied completely or not at all,
whichever rank is lost.

Under DDP, all ranks of the replica have the whole model, and the followers only receive the new weights. Under
`fully_shard`, the followers send their shards before each contribution, and receive their new shards afterwards. The
first rank has copies of all shards in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asyncdist import Group
from asyncdist.collectives.agreed_start import Start
from asyncdist.collectives.groups import free_all
from asyncdist.protocols.exchange.layout.wire_layout import WireLayout
from asyncdist.protocols.exchange.replicas.division import broadcast, write_parts
from asyncdist.protocols.exchange.replicas.group import ReplicaGroup
from asyncdist.protocols.joining.state_transfer import broadcast_bytes
from asyncdist.tensors.byte_views import new_memory
from asyncdist.tensors.codecs import find_codec
from asyncdist.tensors.flat_state import Entry


class FollowerLinks:
    """Copies weights between this rank and the other ranks of its replica.

    Args:
        replica: Ranks of this rank's replica. The first rank contributes.
        links: Groups over which the first rank sends weights, each with the layout of these weights in ``entries``. All
            ranks of a group receive the same weights.
        is_sharded: Whether each link belongs to one follower, which alone has the entries of its layout.
        entries: Entries that this rank contributes. On the first rank of a sharded replica, the entries of all its
            ranks.
        parameters: Names of the parameters among these entries.
        follower_shards: Copies of the followers' shards on the first rank of a sharded replica; otherwise empty.

    Attributes:
        leads: Whether this rank is the first rank of its replica.
    """

    def __init__(
        self,
        replica: ReplicaGroup,
        links: Sequence[tuple[Group, WireLayout]],
        entries: Sequence[Entry],
        parameters: set[str],
        follower_shards: Sequence[Tensor] = (),
        *,
        is_sharded: bool,
    ) -> None:
        self._world = replica.world
        self._is_sharded = is_sharded
        self._links = links
        self._follower_shards = list(follower_shards)
        self.replica, self.entries, self.parameters = replica, entries, parameters
        self.leads = replica.world.rank == replica.ranks[0]

    def tensors(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of all entries: this rank's tensors ``own``, and the copies of the followers' shards."""
        return [*own, *self._follower_shards]

    async def collect(self, own: Sequence[Tensor]) -> None:
        """Copy the followers' shards to the first rank, unless all ranks have the whole model."""
        if self._is_sharded:
            for group, layout in self._links:
                await self._send(group, layout, group.ranks[1], own)

    async def deliver(self, own: Sequence[Tensor]) -> None:
        """Copy the first rank's weights to the followers' models."""
        for group, layout in self._links:
            await self._send(group, layout, group.ranks[0], own)

    async def _send(self, group: Group, layout: WireLayout, root: int, own: Sequence[Tensor]) -> None:
        tensors = self.tensors(own)
        write_parts(await broadcast(self._world, group, root, layout, tensors), tensors)

    async def collect_bytes(self, own: Tensor) -> list[Tensor]:
        """Copy the followers' uint8 tensors ``own`` to the first rank of a sharded replica, which returns them."""
        return [await broadcast_bytes(self._world, own, group, group.ranks[1]) for group, _ in self._links]

    async def deliver_bytes(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy one uint8 tensor of the first rank to each link. Return the tensor that a follower has received."""
        own = tensors or [new_memory(0)] * len(self._links)
        received = new_memory(0)
        for (group, _), each in zip(self._links, own, strict=True):
            received = await broadcast_bytes(self._world, each, group, group.ranks[0])
        return received

    async def free(self) -> None:
        """Free the groups of the replica and of its links."""
        if self._is_sharded:
            await free_all(group for group, _ in self._links)
        await self.replica.free()


async def new_follower_links(
    start: Start[Any] | None,
    replica: ReplicaGroup,
    entries: Sequence[Entry],
    parameters: set[str],
    timeout_s: float,
    *,
    is_sharded: bool,
) -> FollowerLinks:
    """Create the links of ``replica``, or free the replica if that fails. Collective among the replica's ranks.

    Args:
        start: Start of the policy, as part of which groups are created. None if the replica was restarted.
        entries: Entries of this rank's model, or of its shards.
        parameters: Names of this rank's parameters.
        is_sharded: Whether each rank of the replica has a different part of the model.
    """
    try:
        if is_sharded:
            return await _sharded_follower_links(start, replica, entries, parameters, timeout_s)
        links = [(replica.group, _layout(entries, range(len(entries)), parameters))]
        return FollowerLinks(replica, links, entries, parameters, is_sharded=False)
    except BaseException:
        await replica.free()
        raise


async def _sharded_follower_links(
    start: Start[Any] | None,
    replica: ReplicaGroup,
    entries: Sequence[Entry],
    parameters: set[str],
    timeout_s: float,
) -> FollowerLinks:
    world, (first, *followers) = replica.world, replica.ranks
    is_first = world.rank == first
    pairs = [(first, rank) for rank in followers if is_first or rank == world.rank]
    groups = await world.peers.groups.new_groups(pairs, timeout_s, part_of=start)
    try:
        described = await replica.gathered(_described(entries, parameters))
    except BaseException:
        await free_all(groups)
        raise
    if not is_first:
        links = [(groups[0], _layout(entries, range(len(entries)), parameters))]
        return FollowerLinks(replica, links, entries, parameters, is_sharded=True)
    whole, named, bounds = list(entries), set(parameters), []
    for rank, lines in zip(followers, described[1:], strict=True):
        bounds.append(range(len(whole), len(whole) + len(lines)))
        for names, shape, dtype, averaged, is_parameter in lines:
            own = tuple(f"rank {rank}: {name}" for name in names)
            whole.append(Entry(own, tuple(shape), getattr(torch, dtype), averaged, 0))
            named.update(own if is_parameter else ())
    follower_shards = [_new_shard(each) for each in whole[len(entries) :]]
    links = [(group, _layout(whole, chosen, named)) for group, chosen in zip(groups, bounds, strict=True)]
    return FollowerLinks(replica, links, whole, named, follower_shards, is_sharded=True)


def _layout(entries: Sequence[Entry], chosen: Sequence[int], parameters: set[str]) -> WireLayout:
    return WireLayout(entries, chosen, parameters, 1, find_codec("float32"))


@torch.inference_mode(False)
def _new_shard(entry: Entry) -> Tensor:
    return torch.zeros(entry.shape, dtype=entry.dtype, device="cpu")


def _described(entries: Sequence[Entry], parameters: set[str]) -> tuple[Any, ...]:
    return tuple(
        (
            each.names,
            each.shape,
            str(each.dtype).removeprefix("torch."),
            each.averaged,
            not parameters.isdisjoint(each.names),
        )
        for each in entries
    )
