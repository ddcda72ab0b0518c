"""Makes a mean of the donors' snapshots at the receiver's end, as they come; and asks for single parts."""

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
from asyncdist.protocols.parameter_stream.landing import ASKED_COUNT_MAX, ChunkRing, Landing
from asyncdist.protocols.parameter_stream.messages import (
    PartGrant,
    StreamMessage,
    chunks_of,
    part_chunk_nbytes,
    parts_of,
    stream_nbytes,
)
from asyncdist.protocols.parameter_stream.neighbours import Neighbours, PartReading, Reading
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.tensors.flat_state import FlatBuffers
from asyncdist.tensors.means import WeightedMean

#: What is read at a time, and added while the cache holds it.
_READ_NBYTES: Final = 1 << 18


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
) -> InboundStream | PartReading | None:
    """Ask one rank for a part of its snapshot, or of the mean that it makes; all of it lands in place.

    Args:
        services: of this rank.
        server: has the channel of the policy's parameter streams, and the neighbours.
        source: the rank.
        into: where the part lands.
        part: which one.
        sizes: the elements of the whole state, by dtype.
        round: goes into the frame's header.
        exact: whether the integer and bool tensors are asked for, too.
        of_mean: whether the mean is asked for, of its reducer or of a rank that has it.

    Returns:
        The stream, to be finished with :func:`cancel_stream`; None where there is nothing to be sent.

    Raises:
        RankLostError: the rank is gone.
        BusyError: all of its slots are taken.
    """
    channel, nbytes = server.channel, stream_nbytes(into, exact=exact)
    if not nbytes:
        return None
    reading = server.neighbours.ask(source, nbytes, round=round, mean_of=part if of_mean else None)
    if reading is not None:
        return PartReading(reading, _pieces(into, part, sizes, exact=exact, is_alone=of_mean))
    chunk_nbytes = part_chunk_nbytes(nbytes)
    stream = InboundStream(services.slots, source, chunks_of(into, exact, chunk_nbytes), WINDOW_COUNT)
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
) -> list[tuple[int, int, torch.Tensor]]:
    """Cut a part that is read; it lies alone, as a mean does, or in the whole snapshot."""
    pieces = []
    for number, (dtype, tensor) in enumerate(parts_of(into, exact)):
        first = 0 if is_alone else part.bounds(sizes[dtype])[0]
        count = messages.CHUNK_NBYTES * WINDOW_COUNT // tensor.itemsize
        pieces += [(number, first + place, tensor[place : place + count]) for place in range(0, len(tensor), count)]
    return pieces


def cancel_stream(services: Services, channel: Channel[StreamMessage], stream: InboundStream, round: int) -> None:
    """Tell the sender of a stream that is given up, unless it is gone."""
    if stream.source not in services.gone:
        channel.send_nowait(Cancel(stream.slot), stream.source, round=round)


def new_ring() -> ChunkRing:
    """Return a ring for the chunks of parameter streams."""
    return ChunkRing(messages.CHUNK_NBYTES)


class SnapshotReceiver:
    """Makes the weighted mean of the snapshots of a round's donors at the replacer's end, added as they arrive.

    Args:
        services: of this rank.
        channel: the policy's parameter-stream channel.
        accumulator: flat tensors in the accumulation dtypes; what is in them is overwritten.
        ring: for chunks that cannot land in place.
        donors: the senders, in the order in which they are added.
        best: the donor whose integer and bool tensors are taken.
        round: goes into the frames' headers.
        part: which part of the snapshots the accumulator is for; None for all of them.
        neighbours: reads the snapshots that it can read; None where all are to be streamed.

    Attributes:
        accumulator, donors, best: as given.
        donor: who is asked or waited for: when :meth:`run` raises, on account of this one.
        received_nbytes: of the donors whose snapshots have been added.
        read_nbytes: of these, read in the donors' memory.
        mean: of what has been added.
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
        self._asked: deque[tuple[InboundStream | Reading | None, Sequence[Landing]]] = deque()
        self._asked_count = 0
        self._is_asking = True  # until all that all donors will send has its receives posted
        self._posting: InboundStream | None = None  # of the donor that was asked last
        self._unposted: deque[Landing] = deque()  # its chunks
        self._posted_count = 0
        self._under_way: deque[Landing] = deque()  # posted, and not taken
        self.donor = donors[0]
        self.received_nbytes = self.read_nbytes = 0
        self.mean = WeightedMean(len(donors))

    @property
    def is_agreed(self) -> bool:
        """Whether the donors agree in their infinite values."""
        return self.mean.is_agreed

    def ask(self) -> None:
        """Ask as many donors as the window can hold. What they send waits for :meth:`run`, or :meth:`close`.

        Raises:
            RankLostError: a donor is gone.
            BusyError: all slots of a donor are taken.
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
            share = self._layout.share(self._ring, self._page, self._offset, first=is_first, exact=donor == self.best)
            self._page, self._offset = share.page, share.offset
            if not share.nbytes:  # nothing would be the answer: a slot must not be used again before its answer
                self._asked.append((None, ()))
                self._asked_count += 1
                continue
            stream = InboundStream(self._services.slots, donor, share.targets, 0)
            self._streams.append(stream)
            self._asked.append((stream, share.landings))
            self._asked_count += 1
            self._posting, self._posted_count = stream, 0
            self._unposted.extend(share.landings)
            self._post()
            size = stream.slot, share.nbytes, messages.CHUNK_NBYTES
            grant = Grant(*size) if self._part is None else PartGrant(*size, *self._part)
            self._channel.send_nowait(grant, donor, round=self._round)
        self._is_asking = bool(self._unposted) or self._asked_count < len(self.donors)

    async def run(self, weights: Sequence[float], *, deadline: float) -> None:
        """Ask the donors that have not been asked, and average what arrives: the accumulator holds the mean then.

        Args:
            weights: the donors', not normalised.
            deadline: on the loop's clock, for all of it.

        **Cancellation**: the donors are told to stop; accumulator and ring are in use until they have answered.

        Raises:
            StreamAborted: a donor gave up.
            RankLostError: a donor is gone.
            TimeoutError: the deadline passed.
            BusyError: all slots of a donor are taken.
        """
        try:
            self.ask()
            for place, donor in enumerate(self.donors):
                self.mean.begin(weights[place])
                stream, landings = self._asked.popleft()
                if isinstance(stream, Reading):
                    self.donor = donor
                    await self._read(stream, deadline, is_first=place == 0)
                for index, landing in enumerate(landings):
                    assert isinstance(stream, InboundStream), "only a stream has landings"
                    self.donor = donor
                    await stream.arrival(index, deadline=deadline)
                    self._take(landing)
                    if self._is_asking:
                        self.ask()
                self.received_nbytes += 0 if stream is None else stream.received_nbytes
                self.read_nbytes += stream.received_nbytes if isinstance(stream, Reading) else 0
                if self._is_asking:
                    self.ask()
        finally:
            self.close()

    def close(self) -> None:
        """Tell donors that have not answered to stop; accumulator and ring are in use until they have answered."""
        while self._readings:
            self._readings.pop().close()
        while self._streams:
            stream = self._streams.pop()
            stream.finish(lambda stream: cancel_stream(self._services, self._channel, stream, self._round))

    def _post(self) -> None:
        """Post the receives that fit into the window."""
        while self._unposted and self._posting is not None:
            if self._under_way and self._unposted[0].page - self._under_way[0].page >= WINDOW_COUNT:
                return
            self._under_way.append(self._unposted.popleft())
            self._posted_count += 1
            self._posting.post_up_to(self._posted_count)

    def _take(self, landing: Landing) -> None:
        """Add the chunk that has landed, and free its place."""
        if landing.piece.averaged:
            self.mean.add(landing.piece.into, landing.chunk)
        self._under_way.popleft()

    def _reading(self, donor: int) -> Reading | None:
        """Ask where the donor's snapshot lies; None where it is to be streamed."""
        if self._neighbours is None:
            return None
        nbytes = sum(piece.nbytes for piece in self._layout.pieces if piece.averaged)
        return self._neighbours.ask(donor, nbytes, round=self._round)

    async def _read(self, reading: Reading, deadline: float, *, is_first: bool) -> None:
        """Read a snapshot and add it, and let the loop run after each window of it."""
        await reading.located(deadline=deadline)
        burst_nbytes = 0
        for piece in self._layout.pieces:
            if not (piece.averaged or reading.donor == self.best):
                continue
            is_in_place = piece.view is not None and (is_first or not piece.averaged)
            count = min(_READ_NBYTES, messages.CHUNK_NBYTES) // piece.dtype.itemsize
            for start in range(0, piece.into.numel(), count):
                into = piece.into[start : start + count]
                chunk = None if is_in_place else self._ring.scratch(piece.dtype, into.numel())
                reading.read(piece.number, piece.first + start, into if chunk is None else chunk)
                if piece.averaged:
                    self.mean.add(into, chunk)
                burst_nbytes += into.numel() * piece.dtype.itemsize
            if burst_nbytes >= messages.CHUNK_NBYTES * WINDOW_COUNT:
                burst_nbytes = 0
                await yield_to_loop()
                if self._services.time() > deadline:
                    raise TimeoutError(f"rank {reading.donor}'s snapshot was not read in time")
        reading.complete()
