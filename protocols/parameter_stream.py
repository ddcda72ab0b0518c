"""Carries the donors' snapshots into one replacer's accumulator: the parameter-stream protocol.

The replacer asks (:class:`asyncdist.messaging.streams.Grant`, with the round in the frame's header) and names the bytes
that it expects: the averaged tensors, or those and the exact ones. The donor answers with these bytes or with the
abort. Tensors travel as they are stored, dtype after dtype as in the flat state, each cut into chunks of its own.

It asks as soon as it knows the donors: a grant waits at its donor for the snapshot, which leaves in the step that takes
it. Nothing is added before the round is frozen, so no more comes than the window holds; if it is frozen without some
donor, all is asked for anew. A round takes 4.8 steps of each rank, and 5.8 where the replacer asks when it is frozen
(eight ranks, a report in each step).

All chunks of an exchange, donor after donor, pass through one window of ``WINDOW_COUNT`` pages of ``CHUNK_NBYTES``
each, and are added in that order. So a replacer holds one accumulator and one window, for any number of donors, and a
donor one snapshot. The first donor's chunks land in the accumulator itself, where its dtype is the stored one.

Small states share a page, so many donors may be under way at once. Of large ones the next donor is asked while the
last chunks of the one before it are under way.

On the sharded route (:mod:`protocols.selective.roles.reducer`) receivers ask for one part of a snapshot, or for the
mean of one part, by :class:`PartGrant`.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from asyncdist import AsyncdistError, Envelope, RankLostError, tags
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import CHUNK_NBYTES, WINDOW_COUNT, Cancel, Grant, InboundStream
from asyncdist.tensors.byte_views import byte_view, split
from asyncdist.tensors.flat_state import FlatBuffers
from asyncdist.tensors.means import WeightedMean
from protocols.landing import ASKED_COUNT_MAX, ChunkRing, Landing, parts_of
from protocols.parts import Part

logger = logging.getLogger("protocols.parameter_stream")


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


StreamMessage = Grant | PartGrant | Cancel

EARLY_COUNT_MAX: Final = 4096  #: Grants that wait at a donor for its snapshot; further ones get the abort.


@dataclass(slots=True, eq=False)
class Offer:
    """A donor's snapshot for one round. Its buffers are in use until the offer is withdrawn and nothing streams.

    Or a reducer's mean of one part: ``mean_of``. ``chunks_made`` are views of a snapshot, by a grant's two sizes: for
    all replacers, and all rounds that use the same buffers. ``streams`` are under way, each with its receiver and slot.
    Two may have the same: a replacer that has all of one stream may take its slot for the next before the donor knows
    that the first one has left.
    """

    round: int
    snapshot: FlatBuffers
    on_free: Callable[[FlatBuffers], None]
    chunks_made: dict[tuple[int, int], list[memoryview]] = field(default_factory=dict)
    streams: dict[OutboundStream, tuple[int, int]] = field(default_factory=dict)
    withdrawn: bool = False
    mean_of: Part | None = None

    def answers(self, round: int, grant: Grant | PartGrant) -> bool:
        """Return whether a grant of that round is for this."""
        return self.round == round and _is_of_mean(grant) == (self.mean_of is not None)

    def chunks(self, grant: Grant | PartGrant) -> list[memoryview] | None:
        """Return what is sent for ``grant``; None when it fits no stream of this state."""
        if isinstance(grant, PartGrant):  # asked for once in a round, so the views are not kept
            part = Part(grant.part, grant.part_count)
            if self.mean_of is not None:
                return snapshot_chunks(self.snapshot, grant) if part == self.mean_of else None
            return snapshot_chunks(part.of(self.snapshot), grant)
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
        channel: carries grants and cancels, both ways.
        sent_nbytes: streamed so far.
    """

    def __init__(self, services: Services, scope: int) -> None:
        self._services = services
        self._offers: list[Offer] = []
        self._chunks: WeakKeyDictionary[FlatBuffers, dict[tuple[int, int], list[memoryview]]] = WeakKeyDictionary()
        # By source and slot: round and grant.
        self._early: dict[tuple[int, int], tuple[int, Grant | PartGrant]] = {}
        self._over: float = 0
        self._means_over = 0
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
        services.on_returned(self._forget)

    def _forget(self, rank: int) -> None:
        """Drop what the process before has asked for, in whose place another one is."""
        for key in [key for key in self._early if key[0] == rank]:
            del self._early[key]

    def offer(
        self,
        round: int,
        snapshot: FlatBuffers,
        on_free: Callable[[FlatBuffers], None],
        *,
        mean_of: Part | None = None,
    ) -> Offer:
        """Give ``snapshot`` to all replacers that ask in that round, or have asked.

        ``on_free`` gets it back when it is not in use any more. Rounds before this one are over. With ``mean_of`` it is
        the mean of that part.
        """
        offer = Offer(round, snapshot, on_free, self._chunks.setdefault(snapshot, {}), mean_of=mean_of)
        self._offers.append(offer)
        self.end_rounds(round - 1)
        asked = [key for key, (asked_for, grant) in self._early.items() if offer.answers(asked_for, grant)]
        # Each sender begins with another receiver: not all of them with the first.
        for key in sorted(asked, key=lambda key: ((key[0] - self._services.rank) % self._services.size, key[1])):
            self._stream(offer, self._early.pop(key)[1], key)
        return offer

    def withdraw(self, offer: Offer) -> None:
        """Stop the streams of ``offer`` and start no more."""
        offer.withdrawn = True
        for stream in offer.streams:
            stream.stop()
        self._free(offer)
        if offer.mean_of is None:
            self._over = max(self._over, offer.round)
        else:
            self.end_means(offer.round)

    def end_rounds(self, last: float) -> None:
        """Answer requests for rounds up to ``last`` by the abort: no snapshot will be on offer for these any more."""
        self._over = max(self._over, last)
        for key in [key for key, (asked_for, _) in self._early.items() if asked_for <= last]:
            del self._early[key]
            self._refuse(key)

    def end_means(self, last: int) -> None:
        """Answer requests for means of rounds up to ``last`` by the abort: this rank will make none any more."""
        self._means_over = max(self._means_over, last)
        for key in [key for key, (asked, grant) in self._early.items() if _is_of_mean(grant) and asked <= last]:
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
        if not isinstance(envelope.message, Cancel):
            return self._refuse((envelope.source, envelope.message.slot))
        return self.on_message(envelope)

    def on_message(self, envelope: Envelope[StreamMessage]) -> None:
        """Take a grant or a cancel."""
        message, key = envelope.message, (envelope.source, envelope.message.slot)
        if isinstance(message, Cancel):
            if self._early.pop(key, None) is not None:
                self._refuse(key)
            for offer in self._offers:
                for stream, its_key in offer.streams.items():
                    if its_key == key:
                        stream.stop()
        else:
            self._answer(envelope.round, message, key)

    def _answer(self, round: int, grant: Grant | PartGrant, key: tuple[int, int]) -> None:
        """Stream, abort, or keep the grant until it is known which."""
        for offer in self._offers:
            if offer.answers(round, grant) and not offer.withdrawn:
                self._stream(offer, grant, key)
                return
        over = max(self._over, self._means_over) if _is_of_mean(grant) else self._over
        if round > over and len(self._early) < EARLY_COUNT_MAX:
            self._early[key] = round, grant
        else:
            self._refuse(key)

    def _refuse(self, key: tuple[int, int]) -> None:
        self._services.spawn_service(self._abort(OutboundStream(self._services.slots, [], *key)), name="abort")

    def _stream(self, offer: Offer, grant: Grant | PartGrant, key: tuple[int, int]) -> None:
        """Send at once what the transport takes; a task sends the rest."""
        chunks = offer.chunks(grant)
        if chunks is None:
            self._refuse(key)
            return
        stream = OutboundStream(self._services.slots, chunks, *key)
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


def _is_of_mean(grant: Grant | PartGrant) -> bool:
    return isinstance(grant, PartGrant) and grant.of_mean


def stream_nbytes(buffers: FlatBuffers, *, exact: bool) -> int:
    """Return the bytes of a stream of that state, with the exact (integer and bool) tensors or without."""
    return sum(tensor.nbytes for _, tensor in parts_of(buffers, exact))


def snapshot_chunks(snapshot: FlatBuffers, grant: Grant | PartGrant) -> list[memoryview] | None:
    """Return what a donor sends for ``grant``; None when the grant fits no stream of this state."""
    for exact in (False, True):
        if grant.nbytes == stream_nbytes(snapshot, exact=exact) and grant.chunk_nbytes == CHUNK_NBYTES:
            parts = parts_of(snapshot, exact)
            return [chunk for _, tensor in parts for chunk in split(byte_view(tensor), grant.chunk_nbytes)]
    return None


def ask_for_part(
    services: Services,
    channel: Channel[StreamMessage],
    source: int,
    into: FlatBuffers,
    part: Part,
    *,
    round: int,
    exact: bool = True,
    of_mean: bool = False,
) -> InboundStream | None:
    """Ask one rank for a part of its snapshot, or of the mean that it makes; all of it lands in place.

    Args:
        services: of this rank.
        channel: of the policy's parameter streams.
        source: the rank.
        into: where the part lands.
        part: which one.
        round: goes into the frame's header.
        exact: whether the integer and bool tensors are asked for, too.
        of_mean: whether the mean is asked for.

    Returns:
        The stream, to be finished with :func:`cancel_stream`; None where there is nothing to be sent.

    Raises:
        RankLostError: the rank is gone.
        BusyError: all of its slots are taken.
    """
    targets = [chunk for _, tensor in parts_of(into, exact) for chunk in split(byte_view(tensor), CHUNK_NBYTES)]
    if not targets:
        return None
    stream = InboundStream(services.slots, source, targets, WINDOW_COUNT)
    stream.flow()
    grant = PartGrant(stream.slot, sum(map(len, targets)), CHUNK_NBYTES, *part, of_mean)
    try:
        channel.send_nowait(grant, source, round=round)
    except AsyncdistError:
        stream.finish(lambda stream: cancel_stream(services, channel, stream, round))
        raise
    return stream


def cancel_stream(services: Services, channel: Channel[StreamMessage], stream: InboundStream, round: int) -> None:
    """Tell the sender of a stream that is given up, unless it is gone."""
    if stream.source not in services.gone:
        channel.send_nowait(Cancel(stream.slot), stream.source, round=round)


def safe_point_count(nbytes: int) -> int:
    """Return the safe points that a stream of ``nbytes`` needs at each end: chunks over the window, rounded up."""
    return max(1, -(-nbytes // (CHUNK_NBYTES * WINDOW_COUNT)))


def new_ring() -> ChunkRing:
    """Return a ring for the chunks of parameter streams."""
    return ChunkRing(CHUNK_NBYTES)


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

    Attributes:
        accumulator, donors, best: as given.
        donor: who is asked or waited for: when :meth:`run` raises, on account of this one.
        received_nbytes: of the donors whose snapshots have been added.
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
    ) -> None:
        self._services = services
        self._channel = channel
        self._part = part
        self.accumulator = accumulator
        self.donors = donors
        self.best = best
        self._round = round
        self._streams: list[InboundStream] = []
        self._ring = ring
        self._layout = ring.layout_of(accumulator)
        self._page = self._offset = 0
        self._asked: deque[tuple[InboundStream | None, Sequence[Landing]]] = deque()
        self._asked_count = 0
        self._is_asking = True  # until all that all donors will send has its receives posted
        self._posting: InboundStream | None = None  # of the donor that was asked last
        self._unposted: deque[Landing] = deque()  # its chunks
        self._posted_count = 0
        self._under_way: deque[Landing] = deque()  # posted, and not taken
        self.donor = donors[0]
        self.received_nbytes = 0
        self.mean = WeightedMean()

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
            size = stream.slot, share.nbytes, CHUNK_NBYTES
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
                self.mean.begin(weights[place], is_last=place == len(self.donors) - 1)
                stream, landings = self._asked.popleft()
                for index, landing in enumerate(landings):
                    assert stream is not None, "a stream without chunks has no landings"
                    self.donor = donor
                    await stream.arrival(index, deadline=deadline)
                    self._take(landing)
                    if self._is_asking:
                        self.ask()
                self.received_nbytes += 0 if stream is None else stream.received_nbytes
                if self._is_asking:
                    self.ask()
        finally:
            self.close()

    def close(self) -> None:
        """Tell donors that have not answered to stop; accumulator and ring are in use until they have answered."""
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
