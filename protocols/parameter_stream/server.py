"""Answers what receivers of parameter streams ask for: the donor's end, and the reducer's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from asyncdist import AsyncdistError, Envelope, RankLostError, tags
from asyncdist.host_memory.cross_memory_attach import AttachToken
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import Cancel, Grant
from asyncdist.protocols.parameter_stream import messages
from asyncdist.protocols.parameter_stream.messages import (
    LocateRequest,
    Location,
    PartGrant,
    Request,
    StreamMessage,
    chunks_of,
    mean_asked,
    part_chunk_nbytes,
    parts_of,
    stream_nbytes,
)
from asyncdist.protocols.parameter_stream.neighbours import Neighbours
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.tensors.flat_state import FlatBuffers

logger = logging.getLogger("protocols.parameter_stream.server")

EARLY_COUNT_MAX: Final = 4096  #: Grants that wait at a donor for its snapshot; further ones get the abort.


@dataclass(slots=True, eq=False)
class Offer:
    """A donor's snapshot for one round. Its buffers are in use until the offer is withdrawn and nothing streams.

    Or the mean of one part, at its reducer, or at a rank that has fetched it: ``mean_of``. ``chunks_made`` are views of
    a snapshot, by a grant's two sizes: for all replacers, and all rounds that use the same buffers. ``streams`` are
    under way, each with its receiver and slot. Two may have the same: a replacer that has all of one stream may take
    its slot for the next before the donor knows that the first one has left.
    A mean that is not whole yet has ``ready_count`` chunks; None where all is there.
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

    def answers(self, round: int, request: Request) -> bool:
        """Return whether a request of that round is for this, as far as it is there: what is read has to be whole."""
        is_there = self.ready_count is None or not isinstance(request, LocateRequest)
        return is_there and self.round == round and self.mean_of == mean_asked(request)

    def location(self, slot: int) -> Location:
        """Return where the snapshot can be read until the offer is withdrawn."""
        self.token = token = self.token or AttachToken()
        tensors = tuple(tensor.data_ptr() for _, tensor in parts_of(self.snapshot, exact=True))
        return Location(slot, token.pid, token.address, token.token, tensors)

    def _mean_size(self) -> tuple[int, int]:
        nbytes = stream_nbytes(self.snapshot, exact=True)
        return nbytes, part_chunk_nbytes(nbytes)

    def mean_chunks(self) -> list[memoryview]:
        """Return what is sent of a mean, whole or not."""
        size = self._mean_size()
        if size not in self.chunks_made:
            self.chunks_made[size] = chunks_of(self.snapshot, True, size[1])
        return self.chunks_made[size]

    def chunks(self, grant: Grant | PartGrant) -> list[memoryview] | None:
        """Return what is sent for ``grant``; None when it fits no stream of this state."""
        if isinstance(grant, PartGrant):  # asked for once in a round, so the views are not kept
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
    """Answers every grant at the donor's end, by the snapshot on offer for its round or by the abort.

    A grant of a round to come is answered when there is an offer for it, or when the round is over. The server outlives
    its policy, since a replacer may ask late; without an offer it holds no tensors.

    Args:
        services: of this rank.
        scope: of the policy's members.

    Attributes:
        channel: carries requests and cancels, both ways.
        neighbours: the ranks whose snapshots this one reads by itself.
        sent_nbytes: streamed so far.
    """

    def __init__(self, services: Services, scope: int) -> None:
        self._services = services
        self._offers: list[Offer] = []
        self._chunks: WeakKeyDictionary[FlatBuffers, dict[tuple[int, int], list[memoryview]]] = WeakKeyDictionary()
        # By source and slot: round and grant.
        self._early: dict[tuple[int, int], tuple[int, Request]] = {}
        self._over: float = 0
        self._means_over = 0
        self._no_means: set[tuple[int, Part]] = set()  # of rounds that are not over
        self.sent_nbytes = 0
        self.channel: Channel[StreamMessage] = services.open_channel(
            StreamMessage,
            tag=tags.PARAM,
            scope=scope,
            name="parameter streams",
            handler=self.on_message,
            epoch=0,
            earlier_handler=self._on_earlier,
        )
        self.neighbours = Neighbours(services, self.channel)
        services.on_returned(self._forget)

    def _forget(self, rank: int) -> None:
        """Drop what the process before has asked for, in whose place another one is, and how its memory was read."""
        self.neighbours.forget(rank)
        for key in [key for key in self._early if key[0] == rank]:
            del self._early[key]

    def offer(
        self,
        round: int,
        snapshot: FlatBuffers,
        on_free: Callable[[FlatBuffers], None],
        *,
        mean_of: Part | None = None,
        ready_count: int | None = None,
    ) -> Offer:
        """Give ``snapshot`` to all replacers that ask in that round, or have asked.

        ``on_free`` gets it back when it is not in use any more. Rounds before this one are over. With ``mean_of`` it is
        the mean of that part, of which only ``ready_count`` chunks may be there; the others follow by :meth:`grow`.
        """
        chunks_made = self._chunks.setdefault(snapshot, {})
        offer = Offer(round, snapshot, on_free, chunks_made, mean_of=mean_of, ready_count=ready_count)
        self._offers.append(offer)
        self.end_rounds(round - 1)
        self._serve_early(offer)
        return offer

    def grow(self, offer: Offer, ready_count: int | None) -> None:
        """Send more chunks of a mean, as many in all; None for all of them."""
        first, offer.ready_count = offer.ready_count, ready_count
        more = offer.mean_chunks()[first:ready_count]
        for stream in list(offer.streams):
            stream.send_more(more, is_last=ready_count is None)
        if ready_count is None:
            self._serve_early(offer)

    def _serve_early(self, offer: Offer) -> None:
        """Answer the requests that have waited for an offer."""
        asked = [key for key, (asked_for, grant) in self._early.items() if offer.answers(asked_for, grant)]
        # Each sender begins with another receiver: not all of them with the first.
        for key in sorted(asked, key=lambda key: ((key[0] - self._services.rank) % self._services.size, key[1])):
            self._serve(offer, self._early.pop(key)[1], key)

    def withdraw(self, offer: Offer) -> None:
        """Stop the streams of ``offer`` and start no more."""
        offer.withdrawn = True
        if offer.token is not None:
            offer.token.revoke()
        for stream in offer.streams:
            stream.stop()
        self._free(offer)
        if offer.mean_of is None:
            self._over = max(self._over, offer.round)
        else:
            self.end_mean(offer.round, offer.mean_of)

    def end_rounds(self, last: float) -> None:
        """Answer requests for rounds up to ``last`` by the abort: no snapshot will be on offer for these any more."""
        self._over = max(self._over, last)
        self._no_means = {each for each in self._no_means if each[0] > last}
        for key in [key for key, (asked_for, _) in self._early.items() if asked_for <= last]:
            del self._early[key]
            self._refuse(key)

    def end_means(self, last: int) -> None:
        """Answer requests for means of rounds up to ``last`` by the abort: this rank will have none any more."""
        self._means_over = max(self._means_over, last)
        for key in [key for key, (asked, request) in self._early.items() if asked <= last and mean_asked(request)]:
            del self._early[key]
            self._refuse(key)

    def end_mean(self, round: int, part: Part) -> None:
        """Answer requests for the mean of one part by the abort: this rank will not have it any more."""
        self._no_means.add((round, part))
        for key, (asked, request) in list(self._early.items()):
            if asked == round and mean_asked(request) == part:
                del self._early[key]
                self._refuse(key)

    def enter_epoch(self, epoch: int) -> None:
        """Answer requests of earlier epochs by the abort: their rounds are over, and later ones have their numbers."""
        while self._early:
            self._refuse(self._early.popitem()[0])
        self.channel.enter_epoch(epoch)

    def close(self) -> None:
        """Offer no more. Requests that still come are answered by the abort, once the rounds have ended."""
        self.channel.close(afterwards=self.on_message)
        self._services.off_returned(self._forget)

    @property
    def is_idle(self) -> bool:
        """Whether every snapshot has been given back."""
        return not self._offers

    def _free(self, offer: Offer) -> None:
        if offer.withdrawn and not offer.streams and offer in self._offers:
            self._offers.remove(offer)
            offer.on_free(offer.snapshot)
            self._services.engine.recheck()

    def _on_earlier(self, envelope: Envelope[StreamMessage]) -> None:
        if not isinstance(envelope.message, Cancel | Location):
            return self._refuse((envelope.source, envelope.message.slot))
        return self.on_message(envelope)

    def on_message(self, envelope: Envelope[StreamMessage]) -> None:
        """Take a request, a cancel, or the answer to a request of this rank's own."""
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
        """Give it, refuse it, or keep the request until it is known which."""
        for offer in self._offers:
            if offer.answers(round, request) and not offer.withdrawn:
                self._serve(offer, request, key)
                return
        part = mean_asked(request)
        is_over = round <= self._over or (part and (round <= self._means_over or (round, part) in self._no_means))
        if not is_over and len(self._early) < EARLY_COUNT_MAX:
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
            self.channel.send_nowait(location, dest, round=round)
        except AsyncdistError as error:  # it is gone, or so slow that its round will not wait for it
            logger.info("rank %d does not hear where a snapshot lies, %s", dest, error)

    def _refuse(self, key: tuple[int, int]) -> None:
        if key[1] < 0:
            self._locate(Location(key[1]), key[0])
            return
        self._services.spawn_service(self._abort(OutboundStream(self._services.slots, [], *key)), name="abort")

    def _stream(self, offer: Offer, grant: Grant | PartGrant, key: tuple[int, int]) -> None:
        """Send at once what the transport takes; a task sends the rest."""
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
    """Return what a donor sends for ``grant``; None when the grant fits no stream of this state."""
    sizes = {messages.CHUNK_NBYTES, *([part_chunk_nbytes(grant.nbytes)] if isinstance(grant, PartGrant) else [])}
    for exact in (False, True):
        if grant.nbytes == stream_nbytes(snapshot, exact=exact) and grant.chunk_nbytes in sizes:
            return chunks_of(snapshot, exact, grant.chunk_nbytes)
    return None
