"""Lets an exchange decide on replicas of several ranks as a whole, and divides the model among a replica's ranks.

Only counterparts (ranks with the same part of the model) exchange data, but all ranks are members of one exchange. A
replica contributes all of its parts or none. A replica with a lost rank or a non-finite part is left out.

A mean is added to the fragments' states only when all members have received it. If a rank is lost before that, no
member has added any part, and the round is decided again for all parts. All parts of a round therefore have the same
donors.

Under DDP, all ranks of a replica have the whole model, but each rank exchanges only its part with its counterparts. It
then copies the new values of its part to the other ranks (:class:`ReplicaParts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor

from asyncdist import Group, World
from asyncdist.protocols.exchange.layout.copies import checksum_of, gather, scatter
from asyncdist.protocols.exchange.layout.wire_layout import Vector, WireLayout
from asyncdist.protocols.exchange.ledger import Report, Weighing
from asyncdist.protocols.exchange.replicas.group import ReplicaGroup
from asyncdist.protocols.joining.replica_layout import Replicas
from asyncdist.tensors.codecs import Codec
from asyncdist.tensors.flat_state import Entry


def weighing_of(replicas: Replicas, weigh: Weighing) -> Weighing:
    """Convert ``weigh``, which decides on replicas, into a function that decides on ranks.

    ``weigh`` gets one report for each replica whose ranks have all reported, keyed by the replica's first rank. This
    report has the means of the ranks' weights and scores, and the norm of all parts together. The new function returns
    the weight of each rank.
    """
    if replicas.size == 1:
        return weigh

    def weigh_replicas(reports: Mapping[int, Report]) -> Mapping[int, float]:
        whole = {}
        for first in replicas.ranks[:: replicas.size]:
            replica_ranks = replicas.replica_ranks(first)
            if all(rank in reports for rank in replica_ranks):
                whole[first] = _joint([reports[rank] for rank in replica_ranks])
        return {rank: weight for first, weight in weigh(whole).items() for rank in replicas.replica_ranks(first)}

    return weigh_replicas


def _joint(reports: Sequence[Report]) -> Report:
    weight = math.fsum(report.weight for report in reports) / len(reports)
    scores = tuple(sum(each) / len(reports) for each in zip(*(report.scores for report in reports), strict=False))
    return Report(weight, math.hypot(*(report.norm for report in reports)), scores)


def parts_of(
    entries: Sequence[Entry], chosen: Sequence[int], parameters: set[str], count: int
) -> tuple[tuple[int, ...], ...]:
    """Divide a fragment into ``count`` parts of similar size, for replicas whose ranks all have the whole model.

    Parameters are divided by size. All other entries, such as BatchNorm's statistics, belong to part 0, because DDP
    uses the first rank's values.

    Args:
        chosen: Indices of the fragment's entries.
        parameters: Names of the model's parameters.

    Returns:
        The indices of each part's entries in ascending order. A part may be empty.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    nbytes = [0] * count
    sizes = {index: math.prod(entries[index].shape) * entries[index].dtype.itemsize for index in chosen}
    trained = {index for index in chosen if not parameters.isdisjoint(entries[index].names)}
    for index in sorted(chosen, key=lambda index: (index in trained, -sizes[index], index)):
        part = nbytes.index(min(nbytes)) if index in trained else 0
        parts[part].append(index)
        nbytes[part] += sizes[index]
    return tuple(tuple(sorted(part)) for part in parts)


class ReplicaParts:
    """Stores the layouts of all ranks' parts of each fragment.

    Args:
        size: Number of ranks of the replica.
        index: Index of this rank in its replica.
    """

    def __init__(self, size: int, index: int) -> None:
        self._size = size
        self._index = index
        self._layouts: list[list[WireLayout]] = []  # by fragment: layouts of the ranks' parts, in the ranks' order

    def divide(
        self,
        entries: Sequence[Entry],
        chosen: Sequence[int],
        parameters: set[str],
        owner_count: int,
        codec: Codec,
        divisible: Set[str] | None,
    ) -> WireLayout:
        """Divide the next fragment, and return the layout of this rank's part. See :class:`WireLayout`."""
        parts = parts_of(entries, chosen, parameters, self._size)
        self._layouts.append([WireLayout(entries, part, parameters, owner_count, codec, divisible) for part in parts])
        return self._layouts[-1][self._index]

    def checksum(self, fragment: int, tensors: Sequence[Tensor]) -> int:
        """Return a checksum of a model fragment's parameters, which must be equal on all ranks of a replica."""
        return checksum_of((vector for layout in self._layouts[fragment] for vector in layout.stepped), tensors)

    async def share(
        self, replica: ReplicaGroup, fragments: Sequence[int], tensors: Sequence[Tensor]
    ) -> list[tuple[Vector, Tensor]]:
        """Send this rank's part of some fragments to the replica's other ranks, and return the parts of these ranks.

        After a mean is applied, a rank has new values only in its own part.
        """
        received = []
        for fragment in fragments:
            for rank, layout in zip(replica.ranks, self._layouts[fragment], strict=True):
                received += await broadcast(replica.world, replica.group, rank, layout, tensors)
        return received


async def broadcast(
    world: World, group: Group, root: int, layout: WireLayout, tensors: Sequence[Tensor]
) -> list[tuple[Vector, Tensor]]:
    """Send the values of ``layout`` from rank ``root`` to the other ranks of ``group``.

    Returns:
        The vectors, each with the received flat values. Empty on ``root``.
    """
    received = []
    for vector in layout.vectors:
        flat = vector.new_flat()
        if root == world.rank:
            gather(vector, tensors, flat)
        await world.collectives.broadcast(flat, group, root)
        if root != world.rank:
            received.append((vector, flat))
    return received


@torch.no_grad()
def write_parts(received: Sequence[tuple[Vector, Tensor]], tensors: Sequence[Tensor]) -> None:
    """Write the values that :func:`broadcast` has returned into the model's tensors."""
    for vector, flat in received:
        scatter(vector, flat, tensors)
