"""Requests snapshots, or parts of them, from donors, and averages the snapshots as they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from asyncdist import AsyncdistError
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.engine import yield_to_loop
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import WINDOW_COUNT, Cancel, Grant, InboundStream
from asyncdist.protocols.parameter_stream import messages
from asyncdist.protocols.parameter_stream.messages import PartGrant, StreamMessage
from asyncdist.protocols.parameter_stream.neighbours import Neighbours, Piece, Reading
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.protocols.parameter_stream.receive_layout import ASKED_COUNT_MAX, ChunkRing, ReceivedChunk
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.tensors.flat_state import FlatBuffers
from asyncdist.tensors.means import WeightedMean

#: Number of bytes per read, small enough that they are still in the CPU cache when they are added.
READ_NBYTES: Final = 1 << 18


def ask_for_part(
    services: Services,
    server: SnapshotServer,
    source: int,
    into: FlatBuffers,
    part: Part,
    *,
    sizes: Mapping[torch.dtype, int],
    round: int,
    exact: bool = True,
    of_mean: bool = False,
    chunk_count: int | None = None,
) -> InboundStream | Reading | None:
    """Request a part of a rank's snapshot of its weights, or the mean of that part, and start receiving it.

    Args:
        source: Rank that sends the part. For a mean, the part's reducer or a rank that has fetched the mean.
        sizes: Number of elements of the whole state, by dtype.
        exact: Whether the integer and bool tensors are requested as well.
        of_mean: Whether the mean of the part is requested instead of the source's own part.
        chunk_count: Usual number of chunks with which the source offers the part.

    Returns:
        The stream or memory reading, which the caller must finish with :func:`cancel_stream`. None if the part is
        empty.

    Raises:
        RankLostError: The rank is lost.
        BusyError: All slots of the rank are taken.
    """
    channel, nbytes = server.channel, messages.stream_nbytes(into, exact=exact)
    if not nbytes:
        return None
    reading = server.neighbours.ask(source, nbytes, round=round, mean_of=part if of_mean else None)
    if reading is not None:
        reading.pieces = _pieces(into, part, sizes, exact=exact, is_alone=of_mean)
        return reading
    chunk_nbytes = messages.part_chunk_nbytes(nbytes, chunk_count)
    stream = InboundStream(services.slots, source, messages.chunks_of(into, exact, chunk_nbytes), WINDOW_COUNT)
    stream.flow()
    grant = PartGrant(stream.slot, nbytes, chunk_nbytes, *part, of_mean)
    try:
        channel.send_nowait(grant, source, round=round)
    except AsyncdistError:
        stream.finish(lambda stream: cancel_stream(services, channel, stream, round))
        raise
    return stream


def _pieces(
    into: FlatBuffers, part: Part, sizes: Mapping[torch.dtype, int], *, exact: bool, is_alone: bool
) -> list[Piece]:
    """Return the pieces for :meth:`Reading.whole`. If ``is_alone``, the source stores only the requested part."""
    pieces = []
    for number, (dtype, tensor) in enumerate(messages.parts_of(into, exact)):
        first = 0 if is_alone else part.bounds(sizes[dtype])[0]
        count = messages.CHUNK_NBYTES * WINDOW_COUNT // tensor.itemsize
        pieces += [(number, first + place, tensor[place : place + count]) for place in range(0, len(tensor), count)]
    return pieces


def cancel_stream(services: Services, channel: Channel[StreamMessage], stream: InboundStream, round: int) -> None:
    """Ask the sender of a stream to stop, unless the sender is lost or has left."""
    if stream.source not in services.gone:
        channel.send_nowait(Cancel(stream.slot), stream.source, round=round)


def new_ring() -> ChunkRing:
    """Return a ring of buffers for the chunks of parameter streams."""
    return ChunkRing(messages.CHUNK_NBYTES)


class SnapshotReceiver:
    """Computes the weighted mean of other ranks' snapshots (copies of their weights) while these arrive.

    Args:
        accumulator: Flat tensors in the accumulation dtypes. The mean overwrites them.
        donors: Ranks of the donors, in the order of summation.
        best: Donor whose integer and bool tensors are copied.
        part: Part of the snapshots to average, or None for whole snapshots.
        neighbours: Reader of snapshots in the memory of ranks on this host, or None to stream all snapshots.

    Attributes:
        donor: Donor whose snapshot is requested or awaited. If :meth:`run` raises, the donor that caused the failure.
        read_nbytes: Number of received bytes that were read directly from the donors' memory.
    """

    def __init__(
        self,
        services: Services,
        channel: Channel[StreamMessage],
        accumulator: FlatBuffers,
        ring: ChunkRing,
        *,
        donors: Sequence[int],
        best: int,
        round: int,
        part: Part | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        self._services = services
        self._channel = channel
        self._part = part
        self._neighbours = neighbours
        self.accumulator = accumulator
        self.donors = donors
        self.best = best
        self._round = round
        self._streams: list[InboundStream] = []
        self._readings: list[Reading] = []
        self._ring = ring
        self._layout = ring.layout_of(accumulator)
        self._page = self._offset = 0
        # Each requested snapshot's stream and chunks, or the reading of the donor's memory. None for an empty snapshot.
        self._asked: deque[tuple[InboundStream | Reading | None, Sequence[ReceivedChunk]]] = deque()
        self._asked_count = 0
        self._is_asking = True  # whether any receives are not posted yet
        self._posting: InboundStream | None = None  # stream of the most recently asked donor
        self._unposted: deque[ReceivedChunk] = deque()  # chunks of the current stream whose receives are not posted
        self._posted_count = 0
        self._under_way: deque[ReceivedChunk] = deque()  # chunks with posted receives that are not added yet
        self.donor = donors[0]
        self.received_nbytes = self.read_nbytes = 0
        self.mean = WeightedMean(len(donors))

    @property
    def is_agreed(self) -> bool:
        """True if infinite values are the same in all donors' snapshots."""
        return self.mean.is_agreed

    def ask(self) -> None:
        """Request the snapshots of as many donors as the receive buffers have space for. :meth:`run` adds their chunks.

        Raises:
            RankLostError: A donor is lost.
            BusyError: All slots of a donor are taken.
        """
        self._post()
        while not self._unposted and self._asked_count < len(self.donors) and len(self._asked) < ASKED_COUNT_MAX:
            self.donor = donor = self.donors[self._asked_count]
            is_first = not self._asked_count
            reading = self._reading(donor)
            if reading is not None:
                self._readings.append(reading)
                self._asked.append((reading, ()))
                self._asked_count += 1
                continue
            expected = self._layout.donor_chunks(
                self._ring, self._page, self._offset, first=is_first, exact=donor == self.best
            )
            self._page, self._offset = expected.page, expected.offset
            if not expected.nbytes:  # a request for no bytes would still occupy a slot
                self._asked.append((None, ()))
                self._asked_count += 1
                continue
            stream = InboundStream(self._services.slots, donor, expected.targets, 0)
            self._streams.append(stream)
            self._asked.append((stream, expected.chunks))
            self._asked_count += 1
            self._posting, self._posted_count = stream, 0
            self._unposted.extend(expected.chunks)
            self._post()
            size = stream.slot, expected.nbytes, messages.CHUNK_NBYTES
            grant = Grant(*size) if self._part is None else PartGrant(*size, *self._part)
            self._channel.send_nowait(grant, donor, round=self._round)
        self._is_asking = bool(self._unposted) or self._asked_count < len(self.donors)

    async def run(self, weights: Sequence[float], *, deadline: float) -> None:
        """Request the remaining snapshots, and average all snapshots into the accumulator.

        **Cancellation**: The donors are asked to stop. The accumulator and the ring remain in use until the donors have
        answered.

        Raises:
            StreamAborted: A donor has aborted its stream.
            RankLostError: A donor is lost.
            TimeoutError: The deadline has passed.
            BusyError: All slots of a donor are taken.
        """
        try:
            self.ask()
            for place, donor in enumerate(self.donors):
                self.mean.begin(weights[place])
                asked, chunks = self._asked.popleft()
                if isinstance(asked, Reading):
                    self.donor = donor
                    await self._read(asked, deadline, is_first=place == 0)
                elif asked is not None:
                    await self._receive(asked, chunks, donor, deadline)
                if self._is_asking:
                    self.ask()
        finally:
            self.close()

    def close(self) -> None:
        """Ask donors that are still sending to stop. Until they answer, the accumulator and the ring remain in use."""
        while self._readings:
            self._readings.pop().finish()
        while self._streams:
            stream = self._streams.pop()
            stream.finish(lambda stream: cancel_stream(self._services, self._channel, stream, self._round))

    def _post(self) -> None:
        while self._unposted and self._posting is not None:
            if self._under_way and self._unposted[0].page - self._under_way[0].page >= WINDOW_COUNT:
                return
            self._under_way.append(self._unposted.popleft())
            self._posted_count += 1
            self._posting.post_up_to(self._posted_count)

    async def _receive(
        self, stream: InboundStream, chunks: Sequence[ReceivedChunk], donor: int, deadline: float
    ) -> None:
        """Add the chunks of a donor's stream to the mean as they arrive, and request further snapshots meanwhile."""
        for index, received in enumerate(chunks):
            self.donor = donor
            await stream.arrival(index, deadline=deadline)
            self._take(received)
            if self._is_asking:
                self.ask()
        self.received_nbytes += stream.received_nbytes

    def _take(self, received: ReceivedChunk) -> None:
        if received.chunk.averaged:
            self.mean.add(received.chunk.into, received.memory)
        self._under_way.popleft()

    def _reading(self, donor: int) -> Reading | None:
        if self._neighbours is None:
            return None
        nbytes = sum(chunk.nbytes for chunk in self._layout.chunks if chunk.averaged)
        return self._neighbours.ask(donor, nbytes, round=self._round)

    async def _read(self, reading: Reading, deadline: float, *, is_first: bool) -> None:
        """Read a snapshot from the donor's memory and add it to the mean. Other tasks run after each window."""
        await reading.located(deadline=deadline)
        burst_nbytes = 0
        for chunk in self._layout.chunks:
            if not (chunk.averaged or reading.donor == self.best):
                continue
            is_in_place = chunk.view is not None and (is_first or not chunk.averaged)
            count = min(READ_NBYTES, messages.CHUNK_NBYTES) // chunk.dtype.itemsize
            for start in range(0, chunk.into.numel(), count):
                into = chunk.into[start : start + count]
                scratch = None if is_in_place else self._ring.scratch(chunk.dtype, into.numel())
                reading.read(chunk.number, chunk.first + start, into if scratch is None else scratch)
                if chunk.averaged:
                    self.mean.add(into, scratch)
                burst_nbytes += into.numel() * chunk.dtype.itemsize
            if burst_nbytes >= messages.CHUNK_NBYTES * WINDOW_COUNT:
                burst_nbytes = 0
                await yield_to_loop()
                if self._services.time() > deadline:
                    raise TimeoutError(f"rank {reading.donor}'s snapshot was not read in time")
        reading.complete()
        self.received_nbytes += reading.received_nbytes
        self.read_nbytes += reading.received_nbytes
