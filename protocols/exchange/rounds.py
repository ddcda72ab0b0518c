"""Transfers one member's contributions to averaging rounds, and receives the means.

Each fragment is divided into slices. The owner of a slice requests it from all donors (the ranks whose contributions
are averaged), averages it, and offers the mean to all members. Slices are requested from a :class:`SnapshotServer`,
which sends them as streams, or lets ranks on the same host read its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from asyncdist import RankLostError, RemoteProtocolError
from asyncdist.host_memory.shared_memory import SharedMemory
from asyncdist.messaging.engine import yield_to_loop
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import WINDOW_COUNT, StreamAborted
from asyncdist.protocols.exchange.fetch import REQUEST_COUNT_MAX, Fetch, as_buffers
from asyncdist.protocols.exchange.fragment import Fragment
from asyncdist.protocols.exchange.layout.wire_layout import Slice, WireLayout
from asyncdist.protocols.exchange.ledger import Report
from asyncdist.protocols.exchange.messages import RoundState, Verdict
from asyncdist.protocols.parameter_stream import neighbours
from asyncdist.protocols.parameter_stream.messages import PART_CHUNK_COUNT
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.protocols.parameter_stream.server import Offer, SnapshotServer
from asyncdist.tensors.byte_views import new_memory
from asyncdist.tensors.flat_state import FlatBuffers

logger = logging.getLogger("protocols.exchange.rounds")

#: Maximum number of labels in one round: one for each slice of a contribution, and one for each slice of the mean in
#: each attempt.
_LABEL_COUNT: Final = 1 << 30
_NO_REPORT: Final = Report(0.0, 0.0)  # report of a member that has not contributed
_YIELD_NBYTES: Final = 4 << 20  # number of bytes that are averaged before other tasks run


def has_merged(fragments: Sequence[Fragment], number: int) -> bool:
    """Return whether this member has a round's mean, or has loaded a state that includes it."""
    return (number - 1) // len(fragments) < fragments[(number - 1) % len(fragments)].version


def copy_encoded(saved: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Copy a saved contribution into encoded vectors.

    Raises:
        ValueError: The sizes of the saved contribution and of the encoded vectors differ.
    """
    if [each.shape for each in into] != [each.shape for each in saved]:
        raise ValueError("the state's contributions must be encoded as by this policy; use the saved run's wire")
    for own, each in zip(into, saved, strict=True):
        own.copy_(each)


@dataclass(slots=True, eq=False)
class MemberRound:
    """State of one averaging round on one member, until the round's memory is freed.

    Attributes:
        contribution: This member's encoded contribution, by vector. Empty before it is made.
        report: This member's report on its contribution.
        attempt: Number of the leader's last decision (verdict) on the round, or 0.
        verdict: Decision whose mean this member receives or has. None before it, and while members report after a loss.
        mean: The encoded mean, by vector. Empty until it is requested.
        read_in_place: Slices of the mean that are read from their owners' memory and are therefore missing from
            ``mean``.
        has_received: Whether the member has received the mean. If replicas have several ranks, the mean is added to the
            fragment when all members have it; otherwise immediately.
        offers: This member's slices that other ranks can request.
    """

    number: int
    fragment: int
    contribution: Sequence[Tensor] = ()
    report: Report = _NO_REPORT
    attempt: int = 0
    verdict: Verdict | None = None
    mean: list[Tensor] = field(default_factory=list)
    read_in_place: dict[Slice, Tensor] = field(default_factory=dict)
    has_received: bool = False
    has_merged: bool = False
    task: asyncio.Task[None] | None = None
    offers: list[Offer] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        """True if this member has not contributed, or knows that its contribution counts in this round."""
        return not self.contribution or self.attempt > 0

    @property
    def has_sent(self) -> bool:
        """True if no rank is still receiving a slice from this member."""
        return not any(offer.streams for offer in self.offers)

    def round_state(self) -> RoundState:
        """Return this member's report on the round, from which a new leader decides how to continue the round."""
        of_mean: dict[str, Any] = {}
        if self.has_merged and self.verdict is not None:
            verdict = self.verdict
            of_mean = {"donors": verdict.donors, "weights": verdict.weights, "norms": verdict.norms}
            of_mean |= {"donor_scores": verdict.scores, "late": verdict.late}
        return RoundState(self.number, self.attempt, self.has_merged, **self.report._asdict(), **of_mean)


class RoundTransfers:
    """Sends and receives the slices of one member's averaging rounds, and reuses their memory.

    Args:
        is_overlapped: Whether the ranks train during transfers. A training rank sends each slice in one window of large
            chunks, since it sends one window per safe point. A waiting rank sends small chunks, so that large slices do
            not delay each other.
        merges_at_once: Whether to merge a mean when it is received, without a call of :meth:`merge`.
        keeps_means: Whether owners keep a mean unchanged until all members have merged it.
    """

    def __init__(
        self,
        services: Services,
        server: SnapshotServer,
        fragments: Sequence[Fragment],
        *,
        is_overlapped: bool,
        merges_at_once: bool = True,
        keeps_means: bool = True,
    ) -> None:
        self._merges_at_once = merges_at_once
        self._reads_means = merges_at_once and keeps_means
        self._chunk_count = WINDOW_COUNT if is_overlapped else PART_CHUNK_COUNT
        self._services = services
        self._server = server
        self._fragments = fragments
        # Sizes of memory blocks that can contain any fragment's encoded contribution, or its encoded mean.
        self._block_nbytes = tuple(
            max([1, *(each.layout.memory_nbytes(of_mean=of_mean) for each in fragments if each.is_frequent)])
            for of_mean in (False, True)
        )
        self._free: dict[int, list[Tensor]] = {nbytes: [] for nbytes in self._block_nbytes}  # by size: free memory
        self._in_use: dict[int, Tensor] = {}  # by address: memory blocks in use
        self._shared: dict[int, SharedMemory] = {}  # by address: blocks that other ranks on this host can map
        self._kept: dict[int, list[Tensor]] = {}  # by fragment: unapplied mean of an ended round
        self._scratch: list[Tensor] = []  # memory for parts of slices that are read from donors
        self._allocate_first()

    def _allocate_first(self) -> None:
        """Allocate and touch the shared memory for the first round in advance, to avoid page faults in that round.

        For a model of 64 MiB, these page faults took 80 to 100 ms of CPU time, more than the round itself.
        """
        for nbytes in self._block_nbytes if self._services.shares_memory else ():
            if nbytes >= neighbours.READ_NBYTES_MIN:
                self._free[nbytes].append(self._new_block(nbytes, is_kept=True).zero_())

    def new_encoded(self, fragment: int, *, of_mean: bool = False) -> list[Tensor]:
        """Return memory for the encoded vectors of a contribution or a mean, with undefined contents."""
        given, nbytes = self._fragments[fragment], self._block_nbytes[of_mean]
        if not given.layout.vectors:
            return []
        if not given.is_frequent:
            nbytes = max(1, given.layout.memory_nbytes(of_mean=of_mean))
        free = self._free.get(nbytes)
        block = free.pop() if free else self._new_block(nbytes, is_kept=free is not None)
        self._in_use[_address(block)] = block
        return given.layout.encoded_in(block, of_mean=of_mean)

    def _new_block(self, nbytes: int, *, is_kept: bool) -> Tensor:
        """Allocate memory. If the memory is large and kept for later rounds, other ranks on this host can map it."""
        if is_kept and nbytes >= neighbours.READ_NBYTES_MIN and self._services.shares_memory:
            with contextlib.suppress(OSError):  # if shared memory or file descriptors run out, use ordinary memory
                memory = SharedMemory(nbytes)
                self._shared[_address(memory.tensor)] = memory
                return memory.tensor
        return new_memory(nbytes)

    def note_applied(self, fragment: int) -> None:
        """Allow the memory of a model fragment's last mean to be reused."""
        if fragment in self._kept:
            self._release(self._kept.pop(fragment))

    def _release(self, encoded: Sequence[Tensor]) -> None:
        if encoded:
            block = self._in_use.pop(_address(encoded[0]))
            if block.nbytes in self._free:
                self._free[block.nbytes].append(block)

    def offer_contribution(self, own: MemberRound) -> None:
        """Let the ranks that average the slices request their slices of this member's contribution."""
        layout = self._fragments[own.fragment].layout
        for each in layout.slices:
            self._offer(own, layout.part(own.contribution, each), _label(0, each, layout))

    def offer_mean(self, own: MemberRound, verdict: Verdict) -> None:
        """Offer all slices of this member's mean, because a new decision names this member as the source."""
        layout = self._fragments[own.fragment].layout
        for each, part in own.read_in_place.items():
            layout.part(own.mean, each, of_mean=True).copy_(part)
        own.read_in_place = {}
        for each in layout.slices if own.mean else ():
            self._offer(own, layout.part(own.mean, each, of_mean=True), _label(verdict.attempt, each, layout))

    def move_contribution(self, own: MemberRound, later: MemberRound) -> None:
        """Move a contribution from round ``own`` to ``later``. No rank may have requested a slice of it."""
        offers, own.offers = own.offers, []
        for offer in offers:
            self._server.withdraw(offer)
        later.contribution, later.report = own.contribution, own.report
        own.contribution, own.report = (), _NO_REPORT
        self.offer_contribution(later)

    def begin(self, own: MemberRound, verdict: Verdict) -> asyncio.Task[None]:
        """Start a task that receives the mean that ``verdict`` defines and, with ``merges_at_once``, merges it."""
        return self._services.spawn_service(self._take(own, verdict), name=f"mean of round {own.number}")

    def merge(self, own: MemberRound) -> None:
        """Add a round's received mean to its model fragment's state, unless the state already includes it."""
        assert own.has_received and own.verdict is not None, f"the mean of round {own.number} was not received"
        fragment = self._fragments[own.fragment]
        # Skip a mean that is not for this member, or that its received state already includes.
        if fragment.takes(own.number) and not has_merged(self._fragments, own.number):
            own_parts = [[each] for each in own.mean]
            if fragment.has_outer_step and own.mean:
                own_parts = fragment.layout.divided(own.mean, own.read_in_place)
            fragment.merge(own.verdict, own_parts)
        own.has_merged = True

    def stop(self, own: MemberRound) -> None:
        """Stop receiving a round's mean. The mean is not added to the fragment after this call."""
        own.verdict = None
        if own.task is not None and not own.task.done():
            own.task.cancel()
        own.task = None
        if not own.has_merged:
            own.has_received = False
            self._forget(own.mean)
            own.mean, own.read_in_place = [], {}

    def retire(self, own: MemberRound) -> None:
        """Stop offering the slices of a round, and reuse their memory when the last transfer has ended."""
        offers, own.offers = own.offers, []
        contribution, mean = list(own.contribution), own.mean
        own.contribution, own.mean, own.read_in_place = (), [], {}
        if not own.has_merged:
            self._forget(mean)
            mean = []
        remaining = len(offers)

        def reuse() -> None:
            self._release(contribution)
            fragment = self._fragments[own.fragment]
            is_newest = fragment.version == (own.number - 1) // len(self._fragments) + 1
            if mean and is_newest and fragment.holds_mean and fragment.takes(own.number):
                self._release(self._kept.pop(own.fragment, ()))
                self._kept[own.fragment] = mean
            else:
                self._release(mean)

        def on_free(_: FlatBuffers) -> None:
            nonlocal remaining
            remaining -= 1
            if not remaining:
                reuse()

        for offer in offers:
            offer.on_free = on_free
            self._server.withdraw(offer)
        if not offers:
            reuse()

    def _forget(self, encoded: Sequence[Tensor]) -> None:
        """Do not reuse the memory of an incomplete mean, because a stopped stream may still write into it."""
        if encoded:
            del self._in_use[_address(encoded[0])]
            self._shared.pop(_address(encoded[0]), None)

    def _offer(self, own: MemberRound, part: Tensor, label: Part) -> None:
        buffers = as_buffers(part)
        memory = self._shared.get(_address(part))
        offer = Offer(own.number, buffers, lambda _: None, mean_of=label, chunk_count=self._chunk_count, memory=memory)
        own.offers.append(self._server.offer(offer, ends_earlier=False))

    async def _take(self, own: MemberRound, verdict: Verdict) -> None:
        try:
            if verdict.donors:
                own.mean = self.new_encoded(own.fragment, of_mean=True)
                await self._receive(own, verdict)
            own.has_received = True
            if self._merges_at_once:
                self.merge(own)
        except (RankLostError, StreamAborted) as error:  # the leader decides the round again when it detects the loss
            logger.info("the mean of round %d did not arrive: %s", own.number, error)
            return
        self._services.engine.recheck()

    async def _receive(self, own: MemberRound, verdict: Verdict) -> None:
        """Average the slices that this member owns, and receive the means of all other slices."""
        fragment, me = self._fragments[own.fragment], self._services.rank
        layout, reads_means = fragment.layout, self._reads_means and fragment.has_outer_step
        owned = [each for each in layout.slices if verdict.source_of(each.owner) == me]
        others = [each for each in layout.slices if verdict.source_of(each.owner) != me]
        if owned and me in verdict.donors and not own.contribution:
            raise RemoteProtocolError(
                f"the leader must choose ranks that have contributed to round {own.number}, but chose this rank, "
                "which has not"
            )
        given: dict[tuple[Slice, int], Fetch] = {}
        means: dict[Slice, Fetch] = {}
        try:
            for each in owned:
                for donor in verdict.donors:
                    if donor != me:
                        into = new_memory(layout.nbytes_of(each))
                        given[each, donor] = self._fetch(own, donor, into, _label(0, each, layout))
            for each in others:
                into = layout.part(own.mean, each, of_mean=True)
                label = _label(verdict.attempt, each, layout)
                means[each] = self._fetch(own, verdict.source_of(each.owner), into, label)
            for each in owned:
                await self._average(own, verdict, each, [given.get((each, donor)) for donor in verdict.donors])
                if verdict.receiver < 0:
                    self._offer(own, layout.part(own.mean, each, of_mean=True), _label(verdict.attempt, each, layout))
            for each in others:
                may_read_in_place = reads_means and layout.vectors[each.vector].role == "stepped"
                part = await means[each].whole(in_place=may_read_in_place)
                if not means[each].is_whole:
                    own.read_in_place[each] = part
            for each in own.read_in_place:  # from now on, owners keep these slices until this rank has merged them
                means[each].check()
                means[each].complete()
        finally:
            for fetch in (*given.values(), *means.values()):
                fetch.close()

    async def _average(self, own: MemberRound, verdict: Verdict, each: Slice, given: Sequence[Fetch | None]) -> None:
        """Average one slice. ``given`` has the pending request to each donor, and None for this rank."""
        fetches = [fetch for fetch in given if fetch is not None]
        for count in range(REQUEST_COUNT_MAX):
            try:
                for fetch in fetches:
                    await fetch.ready()
                await self._average_ready(own, verdict, each, given)
                for fetch in fetches:
                    fetch.check()
                break
            except StreamAborted as error:
                if count + 1 == REQUEST_COUNT_MAX or error.rank in self._services.gone:
                    raise
                for fetch in fetches:
                    fetch.renew()
        for fetch in fetches:
            fetch.complete()

    async def _average_ready(
        self, own: MemberRound, verdict: Verdict, each: Slice, given: Sequence[Fetch | None]
    ) -> None:
        fragment = self._fragments[own.fragment]
        layout = fragment.layout
        into, unread_nbytes = layout.part(own.mean, each, of_mean=True), 0
        own_part = layout.part(own.contribution, each) if None in given else into
        for number, (first, end, mean_first, mean_end) in enumerate(layout.pieces(each)):
            scratch = self._scratch_of(len(given), end - first)
            parts = [
                own_part[first:end] if fetch is None else fetch.piece(first, end, place)
                for fetch, place in zip(given, scratch, strict=True)
            ]
            fragment.combine(each, number, parts, verdict.weights, into[mean_first:mean_end])
            unread_nbytes += end - first
            if unread_nbytes >= _YIELD_NBYTES:
                unread_nbytes = 0
                await yield_to_loop()

    def _scratch_of(self, count: int, nbytes: int) -> list[Tensor]:
        if not self._scratch or len(self._scratch[0]) < nbytes:
            self._scratch = [new_memory(nbytes)]
        while len(self._scratch) < count:
            self._scratch.append(new_memory(len(self._scratch[0])))
        return self._scratch[:count]

    def _fetch(self, own: MemberRound, source: int, into: Tensor, label: Part) -> Fetch:
        fetch = Fetch(self._services, self._server, own.number, source, into, label, self._chunk_count)
        fetch.ask()
        return fetch


def _address(tensor: Tensor) -> int:
    """Return the address of the memory that a possibly empty tensor views."""
    return tensor.untyped_storage().data_ptr()


def _label(attempt: int, each: Slice, layout: WireLayout) -> Part:
    """Return the label that identifies a slice of a contribution (attempt 0), or of the mean of an attempt."""
    return Part(attempt * len(layout.slices) + each.number, _LABEL_COUNT)
