"""Divides the fragments among the ranks of a replica under DDP, and copies each rank's part to the other ranks.

All ranks of such a replica have the whole model, but each rank exchanges only its part with its counterparts.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence, Set

import torch
from torch import Tensor

from asyncdist.protocols.exchange.layout.copies import gather, scatter
from asyncdist.protocols.exchange.layout.wire_layout import Vector, WireLayout
from asyncdist.protocols.exchange.replicas.division import parts_of
from asyncdist.protocols.exchange.replicas.group import ReplicaGroup
from asyncdist.tensors.byte_views import byte_view
from asyncdist.tensors.codecs import Codec
from asyncdist.tensors.flat_state import Entry


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
        found = 0
        for vector in (vector for layout in self._layouts[fragment] for vector in layout.stepped):
            flat = vector.new_flat()
            gather(vector, tensors, flat)
            found = zlib.crc32(byte_view(flat), found)
        return found

    async def share(
        self, replica: ReplicaGroup, fragments: Sequence[int], tensors: Sequence[Tensor]
    ) -> list[tuple[Vector, Tensor]]:
        """Send this rank's part of some fragments to the replica's other ranks, and return their parts.

        After a mean is applied, a rank has new values only in its own part.
        """
        return await replica.share([self._layouts[each] for each in fragments], tensors)


@torch.no_grad()
def write_parts(received: Sequence[tuple[Vector, Tensor]], tensors: Sequence[Tensor]) -> None:
    """Write the parts that :meth:`ReplicaParts.share` has returned into the model's tensors."""
    for vector, flat in received:
        scatter(vector, flat, tensors)
