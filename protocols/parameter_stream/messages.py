"""Defines the messages between senders and receivers of parameter streams, and the sizes of streams and chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from asyncdist.host_memory.shared_memory import Address
from asyncdist.messaging import streams
from asyncdist.messaging.streams import WINDOW_COUNT, Cancel, Grant
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.tensors.byte_views import byte_view, split
from asyncdist.tensors.flat_state import FlatBuffers

#: Size in bytes of each chunk, except the last chunk of each tensor.
CHUNK_NBYTES = streams.CHUNK_NBYTES
#: Usual number and minimum size of a part's chunks. Small chunks allow a mean to be sent while it is computed.
PART_CHUNK_COUNT: Final = 32
PART_CHUNK_NBYTES_MIN: Final = 128 << 10
#: Chunk sizes are multiples of this number of bytes, so that no element spans two chunks.
_CHUNK_UNIT: Final = 4096


@dataclass(frozen=True, slots=True)
class PartGrant:
    """Receiver to sender: requests one part of the sender's snapshot, or the mean of that part, as a stream.

    Attributes:
        slot: Slot of the sender that the stream uses.
        chunk_nbytes: Size of each chunk, except the last chunk of each tensor.
        part, part_count: Number of the part, from 0, and number of parts.
        of_mean: Whether the mean of the part is requested, instead of the part of a snapshot.
    """

    slot: int
    nbytes: int
    chunk_nbytes: int
    part: int
    part_count: int
    of_mean: bool = False

    def __post_init__(self) -> None:
        Grant(self.slot, self.nbytes, self.chunk_nbytes)
        if not 0 <= self.part < self.part_count:
            raise ValueError(f"part must be from 0 to {self.part_count - 1}, got {self.part}")


@dataclass(frozen=True, slots=True)
class LocateRequest:
    """Receiver to sender: asks for the address of the round's snapshot, to read it from the sender's memory.

    Attributes:
        slot: Number of the request, negative to distinguish it from the slots of streams.
        part: Number of the part whose mean is requested, or -1 for a donor's snapshot.
    """

    slot: int
    part: int = -1
    part_count: int = 0

    def __post_init__(self) -> None:
        if self.slot >= 0:
            raise ValueError(f"slot must be < 0 (slots >= 0 belong to streams), got {self.slot}")
        if not -1 <= self.part < max(0, self.part_count):
            raise ValueError(f"part must be from -1 to {self.part_count - 1}, got {self.part}")


@dataclass(frozen=True, slots=True)
class Location:
    """Sender to receiver: answers :class:`LocateRequest` with the address of the requested snapshot.

    At the start of a policy, a rank sends it unasked, with the address of a few bytes that the receiver tries to read.

    Attributes:
        slot: Number of the request; 0 without a request.
        pid, address, token: Fields of an :class:`~asyncdist.host_memory.cross_memory_attach.AttachToken`. The sender
        revokes this token before it reuses the snapshot's memory.
        tensors: Address of each tensor of :func:`parts_of`, including exact tensors. Empty if the sender has no
            snapshot for the round.
        memory: Packed :class:`~asyncdist.host_memory.shared_memory.Address` of the shared memory that contains all
            tensors. Empty if they are not in shared memory.
        start: Address of the shared memory in the sender's process.
    """

    slot: int
    pid: int = 0
    address: int = 0
    token: bytes = b""
    tensors: tuple[int, ...] = ()
    memory: bytes = b""
    start: int = 0

    def __post_init__(self) -> None:
        if len(self.memory) not in (0, Address.PACKED_NBYTES):
            raise ValueError(f"memory must have 0 or {Address.PACKED_NBYTES} bytes, got {len(self.memory)}")


Request = Grant | PartGrant | LocateRequest  #: Requests to a donor or a reducer.
StreamMessage = Grant | PartGrant | Cancel | LocateRequest | Location


def mean_asked(request: Request) -> Part | None:
    """Return the part whose mean ``request`` asks for, or None if it asks for a donor's snapshot."""
    if isinstance(request, Grant) or (isinstance(request, PartGrant) and not request.of_mean) or request.part < 0:
        return None
    return Part(request.part, request.part_count)


def stream_nbytes(buffers: FlatBuffers, *, exact: bool) -> int:
    """Return the size in bytes of a stream of ``buffers``. ``exact`` includes the integer and bool tensors."""
    return sum(tensor.nbytes for _, tensor in parts_of(buffers, exact))


def parts_of(buffers: FlatBuffers, exact: bool) -> list[tuple[torch.dtype, torch.Tensor]]:
    """Return a stream's tensors in the order in which they are sent, each with its dtype in the stream."""
    parts = list(buffers.averaged().items())
    return parts + list(buffers.exact().items()) if exact else parts


def chunks_of(buffers: FlatBuffers, exact: bool, chunk_nbytes: int) -> list[memoryview]:
    """Return the chunks of a stream as views of ``buffers``. Each chunk is within one tensor."""
    return [chunk for _, tensor in parts_of(buffers, exact) for chunk in split(byte_view(tensor), chunk_nbytes)]


def part_chunk_nbytes(nbytes: int, chunk_count: int | None = None) -> int:
    """Return the chunk size in bytes for a part of a snapshot, or its mean, that has ``nbytes`` bytes.

    Args:
        chunk_count: Usual number of chunks, ``PART_CHUNK_COUNT`` by default.
    """
    size = -(-nbytes // ((chunk_count or PART_CHUNK_COUNT) * _CHUNK_UNIT)) * _CHUNK_UNIT
    return min(max(size, PART_CHUNK_NBYTES_MIN), CHUNK_NBYTES)


def safe_point_count(nbytes: int) -> int:
    """Return the number of safe points (calls that let messages move) at each end of a stream with ``nbytes`` bytes.

    One window of chunks moves at each safe point.
    """
    return max(1, -(-nbytes // (CHUNK_NBYTES * WINDOW_COUNT)))
