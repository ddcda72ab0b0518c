"""Answers requests for a rank's weights, or for a mean that it has computed, with a stream or an abort."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final
from weakref import WeakKeyDictionary

from asyncdist import AsyncdistError, Envelope, RankLostError, tags
from asyncdist.host_memory.cross_memory_attach import AttachToken
from asyncdist.host_memory.shared_memory import SharedMemory
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import Cancel, Grant
from asyncdist.protocols.parameter_stream import messages
from asyncdist.protocols.parameter_stream.messages import LocateRequest, Location, PartGrant, Request, StreamMessage
from asyncdist.protocols.parameter_stream.neighbours import Neighbours
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.tensors.flat_state import FlatBuffers

logger = logging.getLogger("protocols.parameter_stream.server")

#: Maximum number of requests, per rank of the job, that may wait for an offer. Further requests are aborted.
EARLY_COUNT_MAX: Final = 1024


@dataclass(slots=True, eq=False)
class Offer:
    """A snapshot of this rank's weights, or the mean of one part, that other ranks can request in one round.

    The buffers remain in use until the offer is withdrawn and all its streams have ended.

    Attributes:
        on_free: Function called with the buffers when they are no longer in use.
        chunks_made: Cached chunks, by stream size and chunk size. All rounds with the same buffers share this cache.
        streams: Active streams, each with its receiver and slot. Two streams may have the same slot, since a receiver
            can reuse a slot before the sender has noticed the end of the slot's first stream.
        mean_of: Part whose mean is offered, or None for a snapshot.
        ready_count: Number of finished chunks of an incomplete mean, or None if all chunks are finished.
            :meth:`SnapshotServer.mark_ready` adds the others.
        memory: Shared memory that contains all buffers, or None if receivers on this host must copy the buffers.
        token: Token with which receivers check that the memory was valid while they read it. None before the first
            receiver asks for the memory's address.
        chunk_count: Usual number of chunks of a mean. Receivers request the same number.
    """

    round: int
    snapshot: FlatBuffers
    on_free: Callable[[FlatBuffers], None]
    chunks_made: dict[tuple[int, int], list[memoryview]] = field(default_factory=dict)
    streams: dict[OutboundStream, tuple[int, int]] = field(default_factory=dict)
    withdrawn: bool = False
    mean_of: Part | None = None
    ready_count: int | None = None
    token: AttachToken | None = None
    chunk_count: int | None = None
    memory: SharedMemory | None = None

    def answers(self, round: int, request: Request) -> bool:
        """Return whether this offer can answer a request. An incomplete mean cannot be read from memory."""
        is_there = self.ready_count is None or not isinstance(request, LocateRequest)
        return is_there and self.round == round and self.mean_of == messages.mean_asked(request)

    def location(self, slot: int) -> Location:
        """Return the message with the addresses at which the snapshot can be read until the offer is withdrawn."""
        self.token = token = self.token or AttachToken()
        tensors = tuple(tensor.data_ptr() for _, tensor in messages.parts_of(self.snapshot, exact=True))
        location = Location(slot, token.pid, token.address, token.token, tensors)
        if self.memory is None:
            return location
        return replace(location, memory=self.memory.address.pack(), start=self.memory.tensor.data_ptr())

    def _mean_size(self) -> tuple[int, int]:
        nbytes = messages.stream_nbytes(self.snapshot, exact=True)
        return nbytes, messages.part_chunk_nbytes(nbytes, self.chunk_count)

    def mean_chunks(self) -> list[memoryview]:
        """Return all chunks of the mean, including unfinished ones."""
        size = self._mean_size()
        if size not in self.chunks_made:
            self.chunks_made[size] = messages.chunks_of(self.snapshot, True, size[1])
        return self.chunks_made[size]

    def chunks(self, grant: Grant | PartGrant) -> list[memoryview] | None:
        """Return the chunks to send for ``grant``, or None if its sizes do not match the offered buffers."""
        if isinstance(grant, PartGrant):  # not cached, since each part is requested only once in a round
            part = Part(grant.part, grant.part_count)
            if self.mean_of is None:
                return snapshot_chunks(part.of(self.snapshot), grant)
            is_right = part == self.mean_of and self._mean_size() == (grant.nbytes, grant.chunk_nbytes)
            return self.mean_chunks() if is_right else None
        size = grant.nbytes, grant.chunk_nbytes
        chunks = self.chunks_made.get(size)
        if chunks is None:
            chunks = snapshot_chunks(self.snapshot, grant)
            if chunks is not None:
                self.chunks_made[size] = chunks
        return chunks


class SnapshotServer:
    """Answers requests for this rank's weights, or for a mean of one part, with a stream or an abort.

    A request for a future round waits until the round has an offer or has ended. Requests may arrive late, so the
    server remains open after its policy has ended.
    """

    def __init__(self, services: Services, scope: int) -> None:
        self._services = services
        self._offers: list[Offer] = []
        self._chunks: WeakKeyDictionary[FlatBuffers, dict[tuple[int, int], list[memoryview]]] = WeakKeyDictionary()
        # Waiting requests and their rounds, by source and slot.
        self._early: dict[tuple[int, int], tuple[int, Request]] = {}
        self._ended_round: float = 0
        self._ended_mean_round = 0
        self._no_means: set[tuple[int, Part]] = set()  # means of rounds in progress that this rank will not offer
        self.sent_nbytes = 0
        self.neighbours = Neighbours(services)  # made first, because the new channel may deliver early messages
        self.channel: Channel[StreamMessage] = services.open_channel(
            StreamMessage,
            tag=tags.PARAM,
            scope=scope,
            name="parameter streams",
            handler=self.on_message,
            epoch=0,
            earlier_handler=self._on_earlier_epoch,
        )
        self.neighbours.channel = self.channel
        services.on_returned(self._forget)

    def _forget(self, rank: int) -> None:
        """Drop requests from a restarted rank's previous process, and test again whether its memory can be read."""
        self.neighbours.forget(rank)
        for key in [key for key in self._early if key[0] == rank]:
            del self._early[key]

    def offer(self, offer: Offer, *, ends_earlier: bool = True) -> Offer:
        """Send an offer's snapshot to all ranks that request it in its round, and return the offer.

        Args:
            ends_earlier: Whether to abort the requests of earlier rounds.
        """
        offer.chunks_made = self._chunks.setdefault(offer.snapshot, {})
        self._offers.append(offer)
        if ends_earlier:
            self.end_rounds(offer.round - 1)
        self._serve_early(offer)
        return offer

    def mark_ready(self, offer: Offer, ready_count: int | None) -> None:
        """Send further chunks of a mean, after its first ``ready_count`` chunks (None for all) have been finished."""
        first, offer.ready_count = offer.ready_count, ready_count
        more = offer.mean_chunks()[first:ready_count]
        for stream in list(offer.streams):
            stream.send_more(more, is_last=ready_count is None)
        if ready_count is None:
            self._serve_early(offer)

    def _serve_early(self, offer: Offer) -> None:
        asked = [key for key, (asked_for, grant) in self._early.items() if offer.answers(asked_for, grant)]
        # Each sender starts with a different receiver, so that no receiver gets the first streams of all senders.
        for key in sorted(asked, key=lambda key: ((key[0] - self._services.rank) % self._services.size, key[1])):
            self._serve(offer, self._early.pop(key)[1], key)

    def withdraw(self, offer: Offer) -> None:
        """Stop the streams of ``offer``, and abort later requests for its buffers."""
        offer.withdrawn = True
        if offer.token is not None:
            offer.token.revoke()
        for stream in offer.streams:
            stream.stop()
        self._free(offer)
        if offer.mean_of is None:
            self._ended_round = max(self._ended_round, offer.round)
        else:
            self.end_mean(offer.round, offer.mean_of)

    def end_rounds(self, last: float) -> None:
        """Abort all requests for rounds up to ``last``, in which this rank offers no further snapshot."""
        self._ended_round = max(self._ended_round, last)
        self._no_means = {each for each in self._no_means if each[0] > last}
        self._refuse_early(lambda number, _: number <= last)

    def end_means(self, last: int) -> None:
        """Abort all requests for means of rounds up to ``last``, in which this rank offers no mean."""
        self._ended_mean_round = max(self._ended_mean_round, last)
        self._refuse_early(lambda number, part: part is not None and number <= last)

    def end_mean(self, round: int, part: Part) -> None:
        """Abort all requests for the mean of ``part`` in ``round``. This rank no longer offers that mean."""
        self._no_means.add((round, part))
        self._refuse_early(lambda *asked: asked == (round, part))

    def _refuse_early(self, is_over: Callable[[int, Part | None], bool]) -> None:
        """Refuse waiting requests that will get no offer: ``is_over`` is true for their round and part of a mean."""
        waiting = self._early.items()
        over = [key for key, (number, request) in waiting if is_over(number, messages.mean_asked(request))]
        for key in over:
            del self._early[key]
            self._refuse(key)

    def enter_epoch(self, epoch: int) -> None:
        """Follow the coordinator with number ``epoch``. Abort all waiting requests, because their rounds have ended."""
        while self._early:
            self._refuse(self._early.popitem()[0])
        self.channel.enter_epoch(epoch)

    def close(self) -> None:
        """Close the channel, and unmap other ranks' memory. Late requests are still answered, usually with an abort."""
        self.end_rounds(math.inf)
        self.channel.close(afterwards=self.on_message)
        self.neighbours.release()
        self._services.off_returned(self._forget)

    @property
    def is_idle(self) -> bool:
        """True if this rank offers and sends no weights or means at present."""
        return not self._offers

    def _free(self, offer: Offer) -> None:
        if offer.withdrawn and not offer.streams and offer in self._offers:
            self._offers.remove(offer)
            offer.on_free(offer.snapshot)
        self._services.engine.recheck()

    def _on_earlier_epoch(self, envelope: Envelope[StreamMessage]) -> None:
        if not isinstance(envelope.message, Cancel | Location):
            return self._refuse((envelope.source, envelope.message.slot))
        return self.on_message(envelope)

    def on_message(self, envelope: Envelope[StreamMessage]) -> None:
        """Handle a request for weights, its cancellation, or the answer to this rank's own request."""
        message, key = envelope.message, (envelope.source, envelope.message.slot)
        if isinstance(message, Location):
            self.neighbours.on_location(envelope.source, message)
        elif isinstance(message, Cancel):
            if self._early.pop(key, None) is not None:
                self._refuse(key)
            for offer in self._offers:
                for stream, its_key in offer.streams.items():
                    if its_key == key:
                        stream.stop()
        else:
            self._answer(envelope.round, message, key)

    def _answer(self, round: int, request: Request, key: tuple[int, int]) -> None:
        """Answer or refuse a request, or queue it until its round has an offer or has ended."""
        for offer in self._offers:
            if offer.answers(round, request) and not offer.withdrawn:
                self._serve(offer, request, key)
                return
        part = messages.mean_asked(request)
        has_no_mean = part and (round <= self._ended_mean_round or (round, part) in self._no_means)
        is_over = round <= self._ended_round or has_no_mean
        if not is_over and len(self._early) < EARLY_COUNT_MAX * self._services.size:
            self._early[key] = round, request
        else:
            self._refuse(key)

    def _serve(self, offer: Offer, request: Request, key: tuple[int, int]) -> None:
        if isinstance(request, LocateRequest):
            self._locate(offer.location(request.slot), key[0], offer.round)
        else:
            self._stream(offer, request, key)

    def _locate(self, location: Location, dest: int, round: int = 0) -> None:
        try:
            self.channel.answer_nowait(location, dest, round=round)
        except AsyncdistError as error:  # the rank is lost or its queue is full, so it cannot complete the round
            logger.info("the address of a snapshot was not sent to rank %d: %s", dest, error)

    def _refuse(self, key: tuple[int, int]) -> None:
        if key[1] < 0:
            self._locate(Location(key[1]), key[0])
            return
        self._services.spawn_service(self._abort(OutboundStream(self._services.slots, [], *key)), name="abort")

    def _stream(self, offer: Offer, grant: Grant | PartGrant, key: tuple[int, int]) -> None:
        """Send as much of a stream as the transport accepts immediately, and start a task that sends the rest."""
        chunks = offer.chunks(grant)
        if chunks is None:
            self._refuse(key)
            return
        ready, is_open = chunks[: offer.ready_count], offer.ready_count is not None
        stream = OutboundStream(self._services.slots, ready, *key, is_open=is_open)
        if stream.start():
            self.sent_nbytes += stream.sent_nbytes
            return
        offer.streams[stream] = key
        self._services.spawn_service(self._send(offer, stream), name=f"stream to rank {key[0]}")

    async def _send(self, offer: Offer, stream: OutboundStream) -> None:
        try:
            await stream.run()
        except RankLostError as error:
            logger.info("round %d: %s", offer.round, error)
        finally:
            self.sent_nbytes += stream.sent_nbytes
            del offer.streams[stream]
            self._free(offer)

    async def _abort(self, stream: OutboundStream) -> None:
        with contextlib.suppress(RankLostError):
            await stream.abort()


def snapshot_chunks(snapshot: FlatBuffers, grant: Grant | PartGrant) -> list[memoryview] | None:
    """Return the chunks of a snapshot that ``grant`` requests, or None if its sizes do not match the snapshot."""
    sizes = {messages.CHUNK_NBYTES}
    if isinstance(grant, PartGrant):
        sizes.add(messages.part_chunk_nbytes(grant.nbytes))
    for exact in (False, True):
        if grant.nbytes == messages.stream_nbytes(snapshot, exact=exact) and grant.chunk_nbytes in sizes:
            return messages.chunks_of(snapshot, exact, grant.chunk_nbytes)
    return None
