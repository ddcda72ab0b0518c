"""Serves asynchronous DiLoCo on the leader: fetches contributions, and offers the updated common weights (the anchor).

A new leader begins with an election: all living members report their newest anchors and unanswered contributions. The
leader takes the newest anchor (:func:`~protocols.async_diloco.arrivals.newest`), and handles the contributions as new
arrivals. All work is done in service tasks, never inside a step.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

from torch import Tensor

from asyncdist.messaging.services import Services
from asyncdist.protocols.async_diloco.anchor import Anchor, Contribution, Outcome
from asyncdist.protocols.async_diloco.arrivals import (
    Arrival,
    Arrivals,
    Handling,
    Quorum,
    newest,
    weight_of,
)
from asyncdist.protocols.async_diloco.blocks import Block
from asyncdist.protocols.async_diloco.islands.regional import Regional
from asyncdist.protocols.async_diloco.member_store import Answer, HeldAnchor, MemberStore
from asyncdist.protocols.async_diloco.messages import (
    AnchorOffer,
    AnchorRequest,
    AnchorTaken,
    Applied,
    Arrived,
    AsyncMessage,
    MemberState,
    Registered,
)
from asyncdist.protocols.async_diloco.options import ServerOptions
from asyncdist.protocols.async_diloco.timing import SyncTimes, grace_period, steps_at_speed
from asyncdist.protocols.exchange.fetch import SECOND, Offers
from asyncdist.protocols.joining.membership import Membership
from asyncdist.protocols.joining.policy_channel import PolicyChannel
from asyncdist.protocols.joining.state_transfer import packed, unpacked
from asyncdist.tensors.byte_views import new_memory
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.async_diloco.server")


class Server:
    """Applies contributions to the anchor (common weights), and offers each new version to the members.

    Args:
        store: This rank's own state as a member.
        contributions, anchors: Channels on which contributions and anchors are offered and fetched.
        regional: Connection to the global server; None without islands, and on the global server.

    Attributes:
        anchor: The anchor; None until this leader has received the members' newest anchor.
        staleness_sum: Sum of the staleness of the applied contributions in versions.
        grace_sum_s: Seconds of waiting in grace periods.
        lost_outer_state_count: Number of times that this leader began with an outer optimizer's state older than its
            anchor.
    """

    def __init__(
        self,
        services: Services,
        channel: PolicyChannel[AsyncMessage],
        membership: Membership,
        store: MemberStore,
        contributions: Offers,
        anchors: Offers,
        options: ServerOptions,
        regional: Regional | None,
    ) -> None:
        self._services = services
        self._channel = channel
        self._membership = membership
        self._layouts = store.layouts
        self._store = store
        self._contributions = contributions
        self._anchors = anchors
        self._options = options
        self._regional = regional
        self._registering: list[int] = []  # new servers of islands with unanswered registrations
        self._serving: dict[int, int] = {}  # by island: rank of its registered server
        self._arrivals = Arrivals(map(options.worker_of, membership.living), options.own.quorum)
        self._member_states: dict[int, MemberState] = {}
        # Offers of anchors or outer optimizers' states, by rank and version.
        self._anchor_offers: dict[tuple[int, int], AnchorOffer] = {}
        self._speeds: dict[int, float] = {}  # last reported steps per second, by rank
        self._early: list[tuple[int, int, Arrived]] = []  # contributions reported before this leader had an anchor
        # Encoded contributions that have arrived, by rank and sequence number.
        self._blocks: dict[tuple[int, int], Tensor] = {}
        self._task: asyncio.Task[None] | None = None  # task that chooses the first anchor, or makes new versions
        self._outcome = Outcome((), (), math.nan, math.nan)
        self._current: Block | None = None  # copy of the newest anchor, made when the anchor is first offered
        self._grace_s = 0.0  # length of the newest version's grace period
        self._sync_times = SyncTimes()
        self._mirrored_at = 0
        self._is_frozen = False
        self._is_leaving = False  # whether the next leader answers registrations
        self.anchor: Anchor | None = None
        self.applied_count = self.staleness_sum = self.lost_outer_state_count = self.version_count = 0
        self.grace_sum_s = 0.0

    # -- the beginning ----------------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """True if this leader has the members' newest anchor (common weights)."""
        return self.anchor is not None

    def on_member_state(self, rank: int, member_state: MemberState) -> None:
        """Record a member's report. When all living members have reported, fetch the newest common weights."""
        self._member_states[rank] = member_state
        self.start_due_task()

    async def _elect(self) -> None:
        """Start serving with the newest anchor and the newest outer optimizer's state of the living members."""
        me = self._services.rank
        held: HeldAnchor | None = None
        outer: tuple[int, Tensor] | None = None
        while True:
            member_states = {rank: self._member_states[rank] for rank in self._membership.living}
            if held is None:
                version, holder = newest({rank: each.version for rank, each in member_states.items()}, me)
                held = self._store.newest if holder == me else await self._fetch_anchor(holder, version)
                continue
            version, holder = newest({rank: each.outer_version for rank, each in member_states.items()}, me)
            if outer is not None or version < 0:
                break
            outer = self._store.outer if holder == me else await self._fetch_outer(holder, version)
        elected = held
        if self._regional is not None:
            state = None if outer is None else unpacked(outer[1])["regional"]
            sent = {rank: each.sequence for rank, each in self._member_states.items() if each.outstanding}
            held = await self._regional.resumed(held, state, sent)
        self._begin(held, outer, elected.version)

    async def _fetch_anchor(self, holder: int, version: int) -> HeldAnchor | None:
        block = self._layouts.new_block()
        given = await self._request_offer(holder, version, is_outer=False)
        if given is None or not await self._anchors.fetch(holder, version, block[0], "the anchor"):
            return None
        self._channel.post(AnchorTaken(), holder, version)
        return HeldAnchor(version, given.applied, block, given.merged)

    async def _fetch_outer(self, holder: int, version: int) -> tuple[int, Tensor] | None:
        given = await self._request_offer(holder, version, is_outer=True)
        if given is None:
            return None
        outer = self._layouts.new_outer(given.outer_nbytes, holder)
        if not await self._anchors.fetch(holder, version, outer, "the outer state", SECOND):
            return None
        self._channel.post(AnchorTaken(), holder, version)
        return version, outer

    async def _request_offer(self, holder: int, version: int, *, is_outer: bool) -> AnchorOffer | None:
        self._anchor_offers.pop((holder, version), None)
        self._channel.post(AnchorRequest(is_outer), holder, version)

        def has_news() -> bool:
            return (holder, version) in self._anchor_offers or holder not in self._membership.living

        await self._services.engine.until(has_news, WaitId(WaitKind.CONTRIBUTIONS))
        return self._anchor_offers.pop((holder, version), None)

    def on_anchor_offer(self, source: int, version: int, given: AnchorOffer) -> None:
        """Record that a member offers its common weights, or its copy of the outer optimizer's state."""
        self._anchor_offers[source, version] = given
        self._services.engine.recheck()

    def _begin(self, held: HeldAnchor, outer: tuple[int, Tensor] | None, elected: int) -> None:
        """Start serving an anchor (common weights) with the state of an outer optimizer.

        Args:
            elected: Version of the members' newest anchor. The outer optimizer's state should be of the same version.
        """
        own = self._options.own
        anchor = Anchor(self._layouts, own, held.block, held.version)
        if outer is not None:
            anchor.load_outer_state(unpacked(outer[1])["outer"])
        if elected > (0 if outer is None else outer[0]):
            self.lost_outer_state_count += 1
            found = "the initial version" if outer is None else f"version {outer[0]}"
            logger.warning(
                "rank %d replaces the last leader, which was lost or whose checkpoint was not loaded, and continues "
                "from version %d of the anchor, but has only %s of the outer optimizer's state; the outer momentum of "
                "later versions is lost",
                self._services.rank,
                elected,
                found,
            )
        self.anchor, self._mirrored_at = anchor, held.version
        members = map(self._options.worker_of, self._membership.living)
        self._arrivals = Arrivals(members, own.quorum, dict(held.applied))
        self._arrivals.settling = self._membership.settling
        for rank, member_state in sorted(self._member_states.items()):
            for report in member_state.outstanding:
                self.on_arrived(rank, member_state.sequence, report)
        early, self._early = self._early, []
        for each in early:
            self.on_arrived(*each)
        if self._regional is not None:
            self._regional.contribute_if_due(anchor)

    # -- members ----------------------------------------------------------------------------------------------------

    def on_lost(self, rank: int) -> None:
        """Stop waiting for a member that is lost or has left."""
        self._member_states.pop(rank, None)
        self._speeds.pop(rank, None)
        self._sync_times.on_gone(rank)
        worker = self._options.worker_of(rank)
        if worker in map(self._options.worker_of, self._membership.living):
            self._arrivals.forget(worker, rank)
        else:
            self._arrivals.on_gone(worker)
        if self._regional is not None:
            self._regional.release()
        self.start_due_task()
        self._services.engine.recheck()

    def on_admitted(self, rank: int) -> None:
        """Accept contributions from a rank that has joined."""
        self._arrivals.on_admitted(rank)

    def on_settling(self) -> None:
        """Stop waiting for contributions from members that take no steps for now."""
        self._arrivals.settling = self._membership.settling
        self.start_due_task()
        self._services.engine.recheck()

    # -- contributions ----------------------------------------------------------------------------------------------

    def on_arrived(self, rank: int, sequence: int, report: Arrived) -> None:
        """Fetch a reported contribution, or answer it if the anchor already contains it."""
        if self.anchor is None:
            self._early.append((rank, sequence, report))
            return
        self._membership.note_resumed(rank)
        self._arrivals.settling.discard(rank)
        worker = self._options.worker_of(rank)
        if self._serving.setdefault(worker, rank) != rank:
            logger.debug("rank %d no longer serves island %d: its contribution is not used", rank, worker)
            return
        own = self._store.outstanding if rank == self._services.rank else None
        if rank == self._services.rank and (own is None or own.sequence != sequence):
            return  # this rank has withdrawn the contribution
        if report.speed:
            self._speeds[rank] = report.speed
        facts = report.base_version, report.steps, report.tokens, report.norm, report.speed
        arrival = Arrival(worker, sequence, *facts, source=rank)
        match self._arrivals.on_arrived(arrival, self._services.time()):
            case Handling.ANSWER:
                self._answer(arrival, 0)
            case Handling.FETCH if not math.isfinite(arrival.norm):
                self._note_received(arrival)
            case Handling.FETCH if own is not None:
                self._blocks[worker, sequence] = own.block[0]
                self._note_received(arrival)
            case Handling.FETCH:
                self._anchors.spawn(self._fetch(arrival), f"contribution {sequence} of rank {rank}")

    async def _fetch(self, arrival: Arrival) -> None:
        memory, _ = self._layouts.new_contribution()
        source, sequence = arrival.source, arrival.sequence
        if not await self._contributions.fetch(source, sequence, memory, f"contribution {sequence}"):
            return  # the rank is lost or leaves the policy
        if self._arrivals.is_awaited(arrival):
            self._blocks[arrival.rank, arrival.sequence] = memory
        self._note_received(arrival)

    def _note_received(self, arrival: Arrival) -> None:
        self._arrivals.on_received(arrival, self._services.time())
        self.start_due_task()
        self._services.engine.recheck()

    def start_due_task(self) -> None:
        """Start the election if all members have reported, or make versions if enough contributions have arrived."""
        if self._task is not None:
            return
        if self.anchor is None:
            if self._membership.living <= self._member_states.keys():
                self._task = self._anchors.spawn(self._elect(), "election of the anchor")
        elif self._is_frozen and not self._is_leaving:
            self._answer_registrations()  # changes no anchor, and the save may be waiting for a new server's election
        elif self._can_make_version():
            self._task = self._anchors.spawn(self._make_versions(), "versions of the anchor")
        if self._task is not None:
            self._task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and task.exception() is None:
            self.start_due_task()
            self._services.engine.recheck()

    async def _make_versions(self) -> None:
        """Update the anchor, merge global anchors, and answer registrations until nothing is left to do."""
        engine, arrivals, wait = self._services.engine, self._arrivals, WaitId(WaitKind.CONTRIBUTIONS)
        while self._can_make_version():
            self._answer_registrations()
            self._merge()
            quorum = arrivals.quorum()
            if quorum is None:
                continue
            grace_s = self._grace_of(quorum)
            if grace_s:
                decided_at = quorum.met_at + grace_s
                await engine.until(lambda: arrivals.is_complete or self._is_frozen, wait, deadline=decided_at)
            if self._can_make_version() and arrivals.quorum() is not None:
                self._grace_s = min(grace_s, self._services.time() - quorum.met_at)
                self.grace_sum_s += self._grace_s
                await self._make_version(arrivals.take(takes_all=grace_s > 0))

    def _grace_of(self, quorum: Quorum) -> float:
        own = self._options.own
        if not own.grace_steps or not self._speeds:
            return own.grace_s
        quorum_s, sync_s = quorum.met_at - quorum.reported_at, self._sync_times.longest_s(quorum.ranks)
        return grace_period(own.grace_steps, 1.0 / max(self._speeds.values()), quorum_s, sync_s)

    def _can_make_version(self) -> bool:
        is_stopped = self._is_frozen or self._membership.is_broken
        has_answer = self._regional is not None and self._regional.has_answer
        return not is_stopped and bool(has_answer or self._registering or self._arrivals.quorum())

    async def _make_version(self, arrivals: Sequence[Arrival]) -> None:
        anchor, me = self.anchor, self._services.rank
        assert anchor is not None, "versions are made after the election"
        given = []
        for arrival in arrivals:
            weight = weight_of(arrival.tokens, arrival.steps, self._options.own.weights)
            staleness = max(0, anchor.version - arrival.base_version)
            self.staleness_sum += staleness
            given.append(Contribution(arrival.rank, weight, arrival.norm, staleness, self._encoded(arrival)))
        self.applied_count += len(arrivals)
        self.version_count += 1
        self._sync_times.on_decided(anchor.version + 1, (each.source for each in arrivals), self._services.time())
        self._outcome = await anchor.step(given, len(self._arrivals.members))
        self._arrivals.note_applied()
        self._current = None
        every = self._options.mirror_every
        others = [each for each in arrivals if each.source != me and each.source in self._membership.living]
        mirror = others[0] if others and every and anchor.version - self._mirrored_at >= every else None
        for arrival, each in zip(arrivals, given, strict=True):
            self._answer(arrival, each.staleness, is_mirror=arrival is mirror)
        if self._regional is not None:
            self._regional.contribute_if_due(anchor)

    def _encoded(self, arrival: Arrival) -> Sequence[Tensor]:
        """Return the encoded vectors of a contribution, or () if its norm is not finite."""
        if not math.isfinite(arrival.norm):
            return ()
        return self._layouts.wire.encoded_in(self._blocks.pop((arrival.rank, arrival.sequence)))

    # -- answers ----------------------------------------------------------------------------------------------------

    def _answer(self, arrival: Arrival, staleness: int, *, is_mirror: bool = False) -> None:
        """Offer the newest anchor to the worker of ``arrival``, whose contribution the anchor contains."""
        anchor, rank, me = self.anchor, arrival.source, self._services.rank
        assert anchor is not None, "contributions are answered after the election"
        if rank not in self._membership.living:
            return
        block = self._block()
        outer = new_memory(0)
        if self._regional is not None and rank != me and self._regional.needs_mirror(rank, anchor.version):
            is_mirror = True
        if is_mirror:
            outer, self._mirrored_at = self._state(), anchor.version
        report = Applied(
            anchor.version,
            self._arrivals.applications(),
            self._outcome.donors,
            self._outcome.weights,
            staleness,
            self._outcome.norm,
            self._outcome.cosine,
            self._steps_of(rank),
            outer.numel(),
            self._grace_s,
            self._merged,
        )
        if rank == me:
            if self._store.outstanding is not None:
                self._store.take_answer(Answer(report, block), self._options.sender_of(me))
                self._services.engine.recheck()
            return
        if is_mirror:
            self._anchors.offer(anchor.version, outer, rank, SECOND)
        self._anchors.offer(anchor.version, block[0], rank)
        self._channel.post(report, rank, arrival.sequence)

    def _steps_of(self, rank: int) -> int:
        every = self._options.average_every
        return steps_at_speed(every, rank, self._speeds) if self._options.own.dynamic_steps else every

    def on_taken(self, rank: int, version: int) -> None:
        """Record that a rank has received a version of the common weights."""
        self._sync_times.on_taken(version, rank, self._services.time())
        if self._regional is not None:
            self._regional.on_held(rank, version)

    @property
    def _merged(self) -> int:
        return 0 if self._regional is None else self._regional.merged

    def _state(self) -> Tensor:
        """Return, as bytes, the state that the next server needs in addition to the anchor."""
        assert self.anchor is not None, "there is no state before the end of the election"
        regional = None if self._regional is None else self._regional.state()
        return packed({"outer": self.anchor.outer_state(), "regional": regional})

    def _block(self) -> Block:
        """Return a copy of the newest common weights. It is made once per version."""
        assert self.anchor is not None, "the anchor is offered after the election"
        if self._current is None:
            self._current = self.anchor.copy_into(self._layouts.new_block())
        return self._current

    # -- islands ----------------------------------------------------------------------------------------------------

    def on_register(self, rank: int) -> None:
        """Accept a rank as its island's server, and answer with the global anchor."""
        self._registering.append(rank)
        self.start_due_task()

    def _answer_registrations(self) -> None:
        """Drop the unapplied contributions of islands with new servers, and offer the anchor to these servers."""
        assert self.anchor is not None, "registrations are answered after the election"
        registering, self._registering = self._registering, []
        for rank in registering:
            worker = self._options.worker_of(rank)
            self._serving[worker] = rank
            self._arrivals.forget(worker)
            self._blocks = {key: memory for key, memory in self._blocks.items() if key[0] != worker}
            version, applied, block = self.anchor.version, self._arrivals.applications(), self._block()
            if rank == self._services.rank:
                self._store.registration = HeldAnchor(version, applied, block)
                self._services.engine.recheck()
            elif rank in self._membership.living:
                self._anchors.offer(version, block[0], rank)
                self._channel.post(Registered(applied), rank, version)

    def _merge(self) -> None:
        if self._regional is not None and self._regional.has_answer:
            assert self.anchor is not None, "an island contributes after its election"
            self._regional.merge(self.anchor)
            self._current = None

    # -- the end ----------------------------------------------------------------------------------------------------

    async def freeze(self, deadline: float | None = None) -> bool:
        """Stop changing the common weights until :meth:`unfreeze`, so that they can be saved.

        Wait for a pending change or election. Return False if the deadline passes first.
        """
        self._is_frozen = True
        self._services.engine.recheck()
        wait = WaitId(WaitKind.OWN_ROUND)
        return await self._services.engine.until(lambda: self._task is None, wait, deadline=deadline)

    def unfreeze(self) -> None:
        """Resume changing the common weights after :meth:`freeze`, unless this rank is leaving."""
        if self._is_frozen and not self._is_leaving:
            self._is_frozen = False
            self.start_due_task()

    def last_reported(self, rank: int) -> int:
        """Return the sequence number of a rank's last reported contribution, or 0."""
        return self._arrivals.reported.get(rank, 0)

    def held(self) -> tuple[HeldAnchor, Tensor]:
        """Return the anchor, and this server's further state as bytes. The anchor must not be changing."""
        assert self.anchor is not None, "there is no anchor before the end of the election"
        held = HeldAnchor(self.anchor.version, self._arrivals.applications(), self._block(), self._merged)
        return held, self._state()

    async def settled(self, deadline: float) -> bool:
        """Hand the anchor and the outer optimizer's state over to the next leader, if there is another member.

        A regional server also contributes the rest of its island's progress. It hands its state over before each
        contribution, so that the state is not lost with this rank, and once more after the last contribution.

        Returns:
            False if the deadline passed first.
        """
        self._is_leaving = True
        while True:
            if not await self.freeze(deadline):
                return False
            if self._regional is not None and self.anchor is not None:
                self._regional.prepare_leaving(self.anchor)
            if not await self._hand_over(deadline):
                return False
            if self._regional is None or self.anchor is None:
                return True
            if not await self._regional.merge_last(self.anchor, deadline):
                return True
            self._current = None

    async def _hand_over(self, deadline: float) -> bool:
        engine, me, wait = self._services.engine, self._services.rank, WaitId(WaitKind.OWN_ROUND)
        if not await engine.until(lambda: self.has_begun, wait, deadline=deadline):
            return False
        if not await self.freeze(deadline):
            return False
        if not await engine.until(lambda: self._anchors.is_idle, wait, deadline=deadline):
            return False
        while others := [rank for rank in self._membership.members() if rank != me]:
            successor = others[0]
            held, outer = self.held()
            self._anchors.offer(held.version, outer, successor, SECOND)
            self._anchors.offer(held.version, held.block[0], successor)
            self._channel.post(AnchorOffer(held.applied, outer.numel(), held.merged), successor, held.version)
            if not await engine.until(lambda: self._anchors.is_idle, wait, deadline=deadline):
                return False
            if successor in self._membership.living:
                break
        return True

    def close(self) -> None:
        """Stop changing the common weights, because this rank leaves."""
        self._is_frozen = self._is_leaving = True
