"""Defines what donors and receivers of parameter streams say to each other, and how large streams and chunks are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from asyncdist.messaging import streams
from asyncdist.messaging.streams import WINDOW_COUNT, Cancel, Grant
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.tensors.byte_views import byte_view, split
from asyncdist.tensors.flat_state import FlatBuffers

#: Of each chunk but the last of each dtype.
CHUNK_NBYTES = streams.CHUNK_NBYTES
#: Parts that are reduced come in more chunks, down to such small ones. A mean leaves as far as it is made, so what is
#: under way at once, ``WINDOW_COUNT`` chunks, is how far it lags behind.
PART_CHUNK_COUNT: Final = 32
PART_CHUNK_NBYTES_MIN: Final = 128 << 10
#: Elements are not cut.
_CHUNK_UNIT: Final = 4096


@dataclass(frozen=True, slots=True)
class PartGrant:
    """Receiver to sender: as :class:`Grant`, for one part of its snapshot, or of the mean that it makes of that part.

    Attributes:
        slot, nbytes, chunk_nbytes: as there.
        part, part_count: which of how many parts.
        of_mean: whether the mean is asked for.
    """

    slot: int
    nbytes: int
    chunk_nbytes: int
    part: int
    part_count: int
    of_mean: bool = False

    def __post_init__(self) -> None:
        """Refuse what no receiver of ours grants."""
        Grant(self.slot, self.nbytes, self.chunk_nbytes)
        if not 0 <= self.part < self.part_count:
            raise ValueError(f"part {self.part} of {self.part_count}")


@dataclass(frozen=True, slots=True)
class LocateRequest:
    """Receiver to sender: say where the round's snapshot lies, since I read it in your memory.

    Attributes:
        slot: A number of the receiver's, below 0: no stream has it.
        part, part_count: Which part of the mean is meant, of how many; -1 for a donor's snapshot.
    """

    slot: int
    part: int = -1
    part_count: int = 0

    def __post_init__(self) -> None:
        """Refuse the number of a stream, and a part that is none."""
        if self.slot >= 0:
            raise ValueError(f"{self.slot} is a stream's slot")
        if not -1 <= self.part < max(0, self.part_count):
            raise ValueError(f"part {self.part} of {self.part_count}")


@dataclass(frozen=True, slots=True)
class Location:
    """Sender to receiver: the answer to :class:`LocateRequest`.

    Attributes:
        slot: that of the request.
        pid, address, token: of an :class:`~asyncdist.host_memory.cross_memory_attach.AttachToken`, which is revoked
            before the snapshot's memory is used for anything else.
        tensors: where each tensor of :func:`parts_of` begins, the exact ones included; empty where this rank gives no
            snapshot in that round.
    """

    slot: int
    pid: int = 0
    address: int = 0
    token: bytes = b""
    tensors: tuple[int, ...] = ()


Request = Grant | PartGrant | LocateRequest  #: What a donor or a reducer is asked for.
StreamMessage = Grant | PartGrant | Cancel | LocateRequest | Location


def mean_asked(request: Request) -> Part | None:
    """Return the part whose mean is asked for; None where a donor's snapshot is."""
    if isinstance(request, Grant) or (isinstance(request, PartGrant) and not request.of_mean) or request.part < 0:
        return None
    return Part(request.part, request.part_count)


def stream_nbytes(buffers: FlatBuffers, *, exact: bool) -> int:
    """Return the bytes of a stream of that state, with the exact (integer and bool) tensors or without."""
    return sum(tensor.nbytes for _, tensor in parts_of(buffers, exact))


def parts_of(buffers: FlatBuffers, exact: bool) -> list[tuple[torch.dtype, torch.Tensor]]:
    """Return the tensors of a stream in their order, each with the dtype that it has on the wire."""
    parts = list(buffers.averaged().items())
    return parts + list(buffers.exact().items()) if exact else parts


def chunks_of(buffers: FlatBuffers, exact: bool, chunk_nbytes: int) -> list[memoryview]:
    """Cut a stream into chunks; none is of two tensors."""
    return [chunk for _, tensor in parts_of(buffers, exact) for chunk in split(byte_view(tensor), chunk_nbytes)]


def part_chunk_nbytes(nbytes: int) -> int:
    """Return the bytes of a chunk of a part that is reduced, or of its mean, whose stream has so many bytes."""
    size = -(-nbytes // (PART_CHUNK_COUNT * _CHUNK_UNIT)) * _CHUNK_UNIT
    return min(max(size, PART_CHUNK_NBYTES_MIN), CHUNK_NBYTES)


def safe_point_count(nbytes: int) -> int:
    """Return the safe points that a stream of ``nbytes`` needs at each end: chunks over the window, rounded up."""
    return max(1, -(-nbytes // (CHUNK_NBYTES * WINDOW_COUNT)))
