"""The parameter-stream protocol: one donor's snapshot into one replacer's accumulator.

The replacer asks (:class:`asyncdist.streams.Grant`, with the round in the frame's header) and names the bytes it has
posted: the averaged tensors, or those and the exact ones. The donor answers with exactly these bytes or with the
abort. Tensors travel as they are stored, dtype after dtype in the order of the flat state, each cut into chunks of its
own.

The first donor's chunks land in the accumulator itself, where its dtype is the stored one; further ones pass through a
ring of ``WINDOW_COUNT`` chunks and are added as they come. So a replacer holds one accumulator and one ring, however
many donors there are, and a donor one snapshot, however many replacers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from asyncdist import Envelope, RankLostError, World, tags
from asyncdist.channels import Channel
from asyncdist.flat import FlatBuffers, accumulate
from asyncdist.streams import CHUNK_NBYTES, WINDOW_COUNT, Cancel, Grant, OutboundStream, byte_view, split

logger = logging.getLogger("protocols.parameter_stream")

StreamMessage = Grant | Cancel


@dataclass(slots=True, eq=False)
class Offer:
    """A donor's snapshot for one round. Its buffers are in use until the offer is withdrawn and nothing streams."""

    round: int
    snapshot: FlatBuffers
    on_free: Callable[[FlatBuffers], None]
    streams: dict[tuple[int, int], OutboundStream] = field(default_factory=dict)
    withdrawn: bool = False


class DonorDesk:
    """A donor's end of the protocol: answers every grant, by the snapshot on offer for its round or by the abort.

    It outlives its policy, since a replacer may ask late and must not wait for an answer that nobody gives; but once
    its offer is withdrawn it holds no tensors.

    Args:
        world: this rank's.
        scope: of the policy's members.

    Attributes:
        channel: carries grants and cancels, both ways.
        sent_nbytes: streamed so far.
    """

    def __init__(self, world: World, scope: int) -> None:
        self._world = world
        self._offers: list[Offer] = []
        self.sent_nbytes = 0
        self.channel: Channel[StreamMessage] = world.open_channel(
            StreamMessage, tag=tags.PARAM, scope=scope, name="parameter streams", handler=self._on_message
        )

    def offer(self, round: int, snapshot: FlatBuffers, on_free: Callable[[FlatBuffers], None]) -> Offer:
        """Give ``snapshot`` to whoever asks in that round; ``on_free`` gets it back when it is not in use any more."""
        offer = Offer(round, snapshot, on_free)
        self._offers.append(offer)
        return offer

    def withdraw(self, offer: Offer) -> None:
        """Stop the streams of ``offer`` and start no more."""
        offer.withdrawn = True
        for stream in offer.streams.values():
            stream.stop()
        self._free(offer)

    @property
    def is_idle(self) -> bool:
        """Whether every snapshot has been given back."""
        return not self._offers

    def _free(self, offer: Offer) -> None:
        if offer.withdrawn and not offer.streams and offer in self._offers:
            self._offers.remove(offer)
            offer.on_free(offer.snapshot)
            self._world.engine.recheck()

    def _on_message(self, envelope: Envelope[StreamMessage]) -> None:
        message, key = envelope.message, (envelope.source, envelope.message.slot)
        if isinstance(message, Cancel):
            for offer in self._offers:
                if key in offer.streams:
                    offer.streams[key].stop()
            return
        for offer in self._offers:
            if offer.round == envelope.round and not offer.withdrawn:
                chunks = snapshot_chunks(offer.snapshot, message)
                if chunks is not None:
                    stream = OutboundStream(self._world.engine, chunks, *key)
                    offer.streams[key] = stream
                    self._world.spawn_service(self._send(offer, stream, key), name=f"stream to rank {key[0]}")
                    return
        self._world.spawn_service(self._refuse(OutboundStream(self._world.engine, [], *key)), name="abort")

    async def _send(self, offer: Offer, stream: OutboundStream, key: tuple[int, int]) -> None:
        try:
            await stream.run()
        except RankLostError as error:
            logger.info("round %d: %s", offer.round, error)
        finally:
            self.sent_nbytes += stream.sent_nbytes
            self._world.stream_sent_nbytes += stream.sent_nbytes
            del offer.streams[key]
            self._free(offer)

    async def _refuse(self, stream: OutboundStream) -> None:
        try:
            await stream.abort()
        except RankLostError as error:
            logger.debug("nobody to answer: %s", error)


def stream_nbytes(buffers: FlatBuffers, *, exact: bool) -> int:
    """Bytes of a stream of that state as it is stored, with the exact (integer and bool) tensors or without."""
    return sum(tensor.numel() * dtype.itemsize for dtype, tensor in _parts(buffers, exact))


def snapshot_chunks(snapshot: FlatBuffers, grant: Grant) -> list[memoryview] | None:
    """What a donor sends for ``grant``; None when the grant fits no stream of this state."""
    for exact in (False, True):
        if grant.nbytes == stream_nbytes(snapshot, exact=exact) and grant.chunk_nbytes == CHUNK_NBYTES:
            parts = _parts(snapshot, exact)
            return [chunk for _, tensor in parts for chunk in split(byte_view(tensor), grant.chunk_nbytes)]
    return None


def safe_point_count(nbytes: int) -> int:
    """Safe points that a stream of so many bytes needs at each end: chunks over the window, rounded up."""
    return max(1, -(-nbytes // (CHUNK_NBYTES * WINDOW_COUNT)))


class ChunkRing:
    """``WINDOW_COUNT`` buffers of one chunk each, allocated when first needed.

    Args:
        chunk_nbytes: of each; those of a parameter stream by default.
    """

    def __init__(self, chunk_nbytes: int | None = None) -> None:
        self._chunk_nbytes = chunk_nbytes
        self._buffers: list[torch.Tensor] = []
        self._next = 0

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """The next buffer, as ``count`` elements of ``dtype``."""
        if len(self._buffers) < WINDOW_COUNT:
            self._buffers.append(torch.empty(self._chunk_nbytes or CHUNK_NBYTES, dtype=torch.uint8))
        buffer = self._buffers[self._next % WINDOW_COUNT]
        self._next += 1
        return buffer[: count * dtype.itemsize].view(dtype)

    @property
    def nbytes(self) -> int:
        """What it holds."""
        return sum(buffer.nbytes for buffer in self._buffers)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where one chunk belongs. ``landing`` is where it is received: ``into`` itself, or a buffer of the ring."""

    into: torch.Tensor
    landing: torch.Tensor
    averaged: bool


async def receive_donor(
    world: World,
    channel: Channel[StreamMessage],
    accumulator: FlatBuffers,
    ring: ChunkRing,
    *,
    donor: int,
    weight: float,
    first: bool,
    exact: bool,
    round: int,
    deadline: float,
) -> int:
    """Stream one donor's snapshot into ``accumulator``: weight * snapshot, added to what is there.

    Args:
        world: this rank's.
        channel: the policy's parameter-stream channel.
        accumulator: flat tensors in the accumulation dtypes.
        ring: for chunks that cannot land in place.
        donor: the sender.
        weight: its weight, not normalised.
        first: overwrite the accumulator instead of adding to it.
        exact: take the integer and bool tensors too.
        round: goes into the frames' headers.
        deadline: on the loop's clock.

    Returns:
        Bytes received.

    Raises:
        StreamAborted: the donor gave up.
        RankLostError: the donor is gone.
        TimeoutError: the deadline passed.
    """
    pieces = _pieces(accumulator, ring, first=first, exact=exact)

    def cancel(slot: int) -> None:
        if donor not in world.gone:
            channel.send_nowait(Cancel(slot), donor, round=round)

    with world.slots.inbound(donor, [byte_view(piece.landing) for piece in pieces], cancel) as stream:
        nbytes = stream_nbytes(accumulator, exact=exact)
        channel.send_nowait(Grant(stream.slot, nbytes, CHUNK_NBYTES), donor, round=round)
        async for index in stream.chunks(deadline=deadline):
            piece = pieces[index]
            if piece.landing is not piece.into:
                accumulate(piece.into, piece.landing, weight, first=first)
            elif piece.averaged and weight != 1.0:
                piece.into.mul_(weight)
    world.stream_received_nbytes += stream.received_nbytes
    return stream.received_nbytes


def _pieces(accumulator: FlatBuffers, ring: ChunkRing, *, first: bool, exact: bool) -> list[_Piece]:
    pieces = []
    averaged = accumulator.averaged().keys()
    for dtype, tensor in _parts(accumulator, exact):
        in_place = dtype not in averaged or (first and tensor.dtype == dtype)
        count = CHUNK_NBYTES // dtype.itemsize
        for into in torch.split(tensor, count) if tensor.numel() else ():
            landing = into if in_place else ring.take(dtype, into.numel())
            pieces.append(_Piece(into, landing, dtype in averaged))
    return pieces


def _parts(buffers: FlatBuffers, exact: bool) -> list[tuple[torch.dtype, torch.Tensor]]:
    """The tensors of a stream in their order, each with the dtype that it has on the wire."""
    parts = list(buffers.averaged().items())
    return parts + list(buffers.exact().items()) if exact else parts
