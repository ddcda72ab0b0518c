"""Carries out the rounds of an exchange on one member: offers its contributions, and merges the means of all members.

Each slice of a fragment has an owner, which requests the slice from all donors, averages it, and offers the mean to
all members. Blobs are requested from a :class:`SnapshotServer`, which sends them as streams, or lets ranks on the same
host read them from its memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

from asyncdist import RankLostError
from asyncdist.messaging.engine import yield_to_loop
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import InboundStream, StreamAborted
from asyncdist.protocols.exchange.ledger import Standing, Verdict
from asyncdist.protocols.exchange.wire_layout import WireLayout
from asyncdist.protocols.parameter_stream.neighbours import PartReading
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.protocols.parameter_stream.receiver import ask_for_part, cancel_stream
from asyncdist.protocols.parameter_stream.server import Offer, SnapshotServer
from asyncdist.tensors.flat_state import FlatBuffers

logger = logging.getLogger("protocols.exchange.rounds")

#: Number of blobs of one round that a server can distinguish: contributions, and the means of all attempts.
_LABEL_COUNT: Final = 1 << 30
#: Number of requests for a blob, of a rank that is not lost, before the round waits for the leader.
_REQUEST_COUNT_MAX: Final = 8


class Exchanged(Protocol):
    """One fragment of a policy's model.

    Attributes:
        layout: Vectors and slices of the fragment.
    """

    layout: WireLayout

    def merge(self, verdict: Verdict, blobs: Sequence[Tensor]) -> None:
        """Take the encoded mean of all donors; ``blobs`` is empty if there were no donors."""


@dataclass(slots=True, eq=False)
class MemberRound:
    """State of one round on one member, until it is retired.

    Attributes:
        contribution: Blobs of this member's contribution; empty before the capture.
        attempt: Attempt of the last verdict.
        verdict: Verdict whose mean this member receives or has; None before the verdict, and while it holds.
        mean: Blobs of the mean; empty until they are requested.
        has_merged: Whether the member has the mean.
        offers: Offers of this member's blobs.
        received_nbytes: Number of bytes received for this round, as an owner and as a member.
        is_clean: Whether no stopped stream can still write into the blobs.
    """

    number: int
    fragment: int
    contribution: Sequence[Tensor] = ()
    weight: float = 0.0
    norm: float = 0.0
    attempt: int = 0
    verdict: Verdict | None = None
    mean: list[Tensor] = field(default_factory=list)
    has_merged: bool = False
    task: asyncio.Task[None] | None = None
    offers: list[Offer] = field(default_factory=list)
    received_nbytes: int = 0
    is_clean: bool = True

    def standing(self) -> Standing:
        """Return this member's standing in the round."""
        verdict = self.verdict if self.has_merged else None
        of_mean = () if verdict is None else (verdict.donors, verdict.weights, verdict.norms)
        return Standing(self.number, self.attempt, self.has_merged, self.weight, self.norm, *of_mean)


class BlobPool:
    """Reuses the blobs of one layout, so that no memory is allocated after the first rounds."""

    def __init__(self, layout: WireLayout) -> None:
        self._layout = layout
        self._free: list[list[Tensor]] = []

    def acquire(self) -> list[Tensor]:
        """Return blobs with undefined contents."""
        return self._free.pop() if self._free else self._layout.new_blobs()

    def release(self, lent: list[list[Tensor]]) -> None:
        """Return sets of blobs that no stream uses any more."""
        self._free.extend(lent)


class RoundTransfers:
    """Moves the blobs of one member's rounds.

    Args:
        fragments: Fragments of the policy's model.
    """

    def __init__(self, services: Services, server: SnapshotServer, fragments: Sequence[Exchanged]) -> None:
        self._services = services
        self._server = server
        self._fragments = fragments
        self._pools = [BlobPool(fragment.layout) for fragment in fragments]

    def new_blobs(self, fragment: int) -> list[Tensor]:
        """Return blobs for a contribution to a fragment's next round."""
        return self._pools[fragment].acquire()

    def offer_contribution(self, own: MemberRound) -> None:
        """Offer this member's contribution to the owners."""
        for number, blob in enumerate(own.contribution):
            self._offer(own, blob, _label(0, number, len(own.contribution)))

    def offer_mean(self, own: MemberRound, verdict: Verdict) -> None:
        """Offer all slices of a mean that this member holds, under a new verdict."""
        for number, blob in enumerate(own.mean):
            self._offer(own, blob, _label(verdict.attempt, number, len(own.mean)))

    def begin(self, own: MemberRound, verdict: Verdict) -> asyncio.Task[None]:
        """Start a task that receives and merges the mean of a verdict."""
        return self._services.spawn_service(self._merge(own, verdict), name=f"merge of round {own.number}")

    def stop(self, own: MemberRound) -> None:
        """Stop receiving the mean of a round; no mean is merged after this call."""
        own.verdict = None
        if own.task is not None and not own.task.done():
            own.task.cancel()
            own.is_clean = False

    def retire(self, own: MemberRound) -> None:
        """Stop offering the blobs of a round, and reuse them when the last stream has ended."""
        offers, own.offers = own.offers, []
        lent = [list(blobs) for blobs in (own.contribution, own.mean) if blobs]
        own.contribution, own.mean = (), []
        remaining = len(offers)

        def on_free(_: FlatBuffers) -> None:
            nonlocal remaining
            remaining -= 1
            if not remaining and own.is_clean:
                self._pools[own.fragment].release(lent)

        for offer in offers:
            offer.on_free = on_free
            self._server.withdraw(offer)

    def _offer(self, own: MemberRound, blob: Tensor, label: Part) -> None:
        if blob.numel():
            buffers = _as_buffers(blob)
            own.offers.append(
                self._server.offer(own.number, buffers, lambda _: None, mean_of=label, ends_earlier=False)
            )

    async def _merge(self, own: MemberRound, verdict: Verdict) -> None:
        try:
            if verdict.donors:
                own.mean = self._pools[own.fragment].acquire()
                await self._receive(own, verdict)
            self._fragments[own.fragment].merge(verdict, own.mean)
        except (RankLostError, StreamAborted) as error:  # the leader takes a census when it notices the loss
            logger.info("round %d: %s", own.number, error)
            return
        own.has_merged = True
        self._services.engine.recheck()

    async def _receive(self, own: MemberRound, verdict: Verdict) -> None:
        """Average the slices that this member owns, and receive the means of all others."""
        layout = self._fragments[own.fragment].layout
        me, count = self._services.rank, layout.slice_count
        numbers = [number for number in range(count) if layout.blob_nbytes(number)]
        owned = [number for number in numbers if verdict.source_of(number) == me]
        fetches: dict[tuple[int, int], _Fetch] = {}
        given: dict[int, list[Tensor]] = {}
        try:
            for number in owned:
                given[number] = []
                for donor in verdict.donors:
                    if donor == me:
                        given[number].append(own.contribution[number])
                        continue
                    blob = torch.empty(layout.blob_nbytes(number), dtype=torch.uint8, device="cpu")
                    given[number].append(blob)
                    fetches[donor, number] = self._fetch(own, donor, blob, _label(0, number, count))
            for number in numbers:
                source = verdict.source_of(number)
                if source != me:
                    label = _label(verdict.attempt, number, count)
                    fetches[-1, number] = self._fetch(own, source, own.mean[number], label)
            for number in owned:
                for donor in verdict.donors:
                    if donor != me:
                        await fetches.pop((donor, number)).whole()
                layout.average(number, given.pop(number), verdict.weights, own.mean[number])
                self._offer(own, own.mean[number], _label(verdict.attempt, number, count))
            for number in numbers:
                if verdict.source_of(number) != me:
                    await fetches.pop((-1, number)).whole()
        finally:
            for fetch in fetches.values():
                fetch.close()

    def _fetch(self, own: MemberRound, source: int, into: Tensor, label: Part) -> _Fetch:
        fetch = _Fetch(self._services, self._server, own, source, into, label)
        fetch.ask()
        return fetch


class _Fetch:
    """One request for a blob, repeated if the source's memory could not be read."""

    def __init__(
        self, services: Services, server: SnapshotServer, own: MemberRound, source: int, into: Tensor, label: Part
    ) -> None:
        self._services = services
        self._server = server
        self._own = own
        self._source = source
        self._into = _as_buffers(into)
        self._label = label
        self._stream: InboundStream | PartReading | None = None

    def ask(self) -> None:
        """Request the blob."""
        self._stream = ask_for_part(
            self._services,
            self._server,
            self._source,
            self._into,
            self._label,
            sizes={},
            round=self._own.number,
            of_mean=True,
        )

    async def whole(self) -> None:
        """Wait until the blob has arrived.

        Raises:
            RankLostError: The source is lost.
            StreamAborted: The source does not offer the blob.
        """
        try:
            for _ in range(_REQUEST_COUNT_MAX - 1):
                try:
                    return await self._arrival()
                except StreamAborted:
                    if self._source in self._services.gone:
                        raise
                    self.close()
                    await yield_to_loop()
                    self.ask()
            await self._arrival()
        finally:
            self.close()

    async def _arrival(self) -> None:
        if self._stream is not None:
            await self._stream.whole()
            self._own.received_nbytes += self._stream.received_nbytes

    def close(self) -> None:
        """Ask the source to stop, unless the blob has arrived."""
        stream, self._stream = self._stream, None
        if stream is not None:
            channel, number = self._server.channel, self._own.number
            stream.finish(lambda stream: cancel_stream(self._services, channel, stream, number))


def _as_buffers(blob: Tensor) -> FlatBuffers:
    return FlatBuffers((), {torch.uint8: blob}, ())


def _label(attempt: int, number: int, count: int) -> Part:
    """Return the label of a blob: of slice ``number`` of a contribution (attempt 0), or of the mean of an attempt."""
    return Part(attempt * count + number, _LABEL_COUNT)
