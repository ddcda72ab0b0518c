"""Takes part in asynchronous DiLoCo for one rank: offers contributions, and receives the new common weights.

The leader also has a :class:`~protocols.async_diloco.server.Server`. If the leader is lost or leaves, each rank reports
its newest anchor and unanswered contribution to the next leader. Messages and data move only at safe points, calls in
which training code lets them move.
"""

from __future__ import annotations

import asyncio
import logging

from torch import Tensor

from asyncdist import Envelope
from asyncdist.messaging.services import Services
from asyncdist.protocols.async_diloco.blocks import Block
from asyncdist.protocols.async_diloco.islands.regional import Regional
from asyncdist.protocols.async_diloco.member_store import Answer, HeldAnchor, MemberStore, Outstanding
from asyncdist.protocols.async_diloco.messages import (
    AnchorOffer,
    AnchorRequest,
    AnchorTaken,
    Applications,
    Applied,
    Arrived,
    AsyncMessage,
    MemberState,
    Register,
    Registered,
)
from asyncdist.protocols.async_diloco.options import ServerOptions
from asyncdist.protocols.async_diloco.server import Server
from asyncdist.protocols.exchange.fetch import SECOND, Offers
from asyncdist.protocols.joining.membership import Membership
from asyncdist.protocols.joining.policy_channel import PolicyChannel
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.async_diloco")


class AsyncMember:
    """Sends one rank's contributions to the leader, and receives the updated common weights (anchors) as answers.

    Args:
        membership: Members of the policy; opened by this object.
        store: State of this rank that a new leader needs.
        name: Name of the channel in reports on what ranks are waiting for.
        regional: Connection to the global server, used if this rank leads its island; None without islands.

    Attributes:
        server: This rank's server; None if it does not lead.
    """

    def __init__(
        self,
        services: Services,
        scopes: PolicyScopes,
        membership: Membership,
        store: MemberStore,
        options: ServerOptions,
        *,
        name: str = "asynchronous DiLoCo",
        regional: Regional | None = None,
    ) -> None:
        self._services = services
        self._membership = membership
        self._layouts = store.layouts
        self._store = store
        self._options = options
        self._regional = regional
        self._name = name
        # Messages to the leader that arrived before this rank led.
        self._early: list[tuple[int, int, AsyncMessage]] = []
        self._fetching: asyncio.Task[None] | None = None  # fetches the answer to the contribution
        self._has_inherited = False  # whether this rank has received a leaving leader's state
        self._has_settled = False  # whether this rank is leaving, and no longer takes over state
        self._is_closed = False
        self.server: Server | None = None
        is_overlapped = options.own.late == "skip"
        self._contributions = Offers(services, scopes.to_members, is_overlapped=is_overlapped)
        self._anchors = Offers(services, scopes.to_coordinator, is_overlapped=is_overlapped)
        self._channel: PolicyChannel[AsyncMessage] = PolicyChannel(
            services, AsyncMessage, scope=scopes.to_members, name=name, listener=self
        )
        membership.open(self)
        if not membership.is_joining:
            self._report()

    # -- the policy's calls -----------------------------------------------------------------------------------------

    def contribute(self, block: Block, report: Arrived, sequence: int | None = None) -> None:
        """Offer a contribution to the leader, which fetches it. The caller must not change ``block`` afterwards."""
        own = self._store
        own.sequence = own.sequence + 1 if sequence is None else sequence
        own.outstanding = Outstanding(own.sequence, block, report)
        self._offer_contribution()
        self._send_to_leader(report, own.sequence)

    async def answered(self) -> None:
        """Wait until the leader has answered this rank's contribution, or a rank of its replica is lost."""
        own, members = self._store, self._membership
        wait = WaitId(WaitKind.CONTRIBUTION_ANSWER, number=own.sequence)
        await self._services.engine.until(lambda: own.outstanding is None or members.is_broken, wait)

    async def is_answered(self, deadline: float) -> bool:
        """Wait for the answer to this rank's contribution. Return False if the deadline passes first."""
        wait = WaitId(WaitKind.OWN_ROUND)
        return await self._services.engine.until(lambda: self._store.outstanding is None, wait, deadline=deadline)

    def withdraw(self) -> None:
        """Withdraw the contribution that the leader has not answered yet."""
        self._store.outstanding = None
        self._contributions.note_taken(self._membership.leader)

    async def registered(self) -> HeldAnchor:
        """Register this rank as its island's server, and return the global anchor."""
        own, membership, wait = self._store, self._membership, WaitId(WaitKind.CONTRIBUTIONS)
        asked = -1

        def has_news() -> bool:
            return own.registration is not None or membership.leader != asked

        while own.registration is None:
            if asked != membership.leader:
                asked = membership.leader
                self._send_to_leader(Register(), 0)
            await self._services.engine.until(has_news, wait)
        found, own.registration = own.registration, None
        own.base, own.outstanding, own.answer = found, None, None
        return found

    async def _take_registration(self, leader: int, version: int, applied: Applications) -> None:
        block = self._layouts.new_block()
        if not await self._anchors.fetch(leader, version, block[0], f"global anchor {version}"):
            return  # registered() retries with the next leader
        self._store.registration = HeldAnchor(version, applied, block)
        self._services.engine.recheck()
        self._channel.post(AnchorTaken(), leader, version)

    async def settled(self, deadline: float) -> bool:
        """Wait until this rank may leave. Its contribution must be answered, and the next leader must have the anchor.

        A rank that has received the anchor of a leaving leader waits until it leads, and then passes the anchor on.
        Otherwise the anchor would be lost if the old and the new leader left at the same time.

        Return at once if a rank of this rank's replica is lost, because its replica is then no longer a member.

        Returns:
            False if the deadline passed first, which is logged.
        """
        is_settled = await self._services.engine.until(self._may_leave, WaitId(WaitKind.OWN_ROUND), deadline=deadline)
        if is_settled and self.server is not None and not self._membership.is_broken:
            is_settled = await self.server.settled(deadline)
        self._has_settled = True
        if not is_settled:
            self._warn_not_settled()
        return is_settled

    def _may_leave(self) -> bool:
        own, members = self._store, self._membership
        is_free = own.outstanding is None and (members.leads or not self._has_inherited)
        return is_free or members.is_broken

    def _warn_not_settled(self) -> None:
        me, own = self._services.rank, self._store
        if own.outstanding is not None:
            logger.warning(
                "rank %d leaves %s before the leader has answered its contribution %d", me, self._name, own.sequence
            )
        elif self.server is not None or self._has_inherited:
            logger.warning(
                "rank %d leaves %s before another rank has its anchor; the newest versions may be lost", me, self._name
            )

    async def settle(self) -> None:
        """Notify the leader that this rank takes no steps for now, and wait for the answer to its contribution."""
        await self._membership.settle(lambda: self._store.outstanding is None)

    def leave(self) -> None:
        """Leave the policy, and withdraw the unanswered contribution."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.server is not None:
            self.server.close()
        self._membership.leave()
        self._contributions.close()
        self._anchors.close()
        self._channel.close()

    def begin_joined(self) -> None:
        """Complete the admission of this restarted rank, which has loaded the leader's state."""
        self._membership.complete_joining()

    # -- changes of the members -------------------------------------------------------------------------------------

    def may_admit(self) -> bool:
        """Return whether this leader has an anchor (common weights) that it can send to a joining rank."""
        return self.server is not None and self.server.has_begun

    def on_lost(self, rank: int) -> None:
        """Stop offering data to a lost member."""
        self._contributions.note_taken(rank)
        self._anchors.note_taken(rank)
        if self.server is not None:
            self.server.on_lost(rank)

    def on_new_leader(self) -> None:
        """Report this rank's newest common weights and unanswered contribution to the new leader."""
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None
        for rank in self._membership.known - self._membership.living:
            self._contributions.note_taken(rank)
            self._anchors.note_taken(rank)
        self._report()
        self._services.engine.recheck()

    def on_reachable(self, rank: int) -> None:
        """Allow messages to and from a restarted member."""
        self._channel.admit(rank)
        self._contributions.admit(rank)
        self._anchors.admit(rank)

    def on_admitted(self, rank: int) -> None:
        """As the leader, accept contributions from a rank that has joined."""
        assert self.server is not None, "only a leader admits"
        self.server.on_admitted(rank)

    def on_settling(self) -> None:
        """As the leader, stop waiting for the members that take no steps for now."""
        if self.server is not None:
            self.server.on_settling()

    def _report(self) -> None:
        """Start the server if this rank leads, and send this rank's :class:`MemberState` to the leader."""
        if self._membership.leads:
            self.server = Server(
                self._services,
                self._channel,
                self._membership,
                self._store,
                self._contributions,
                self._anchors,
                self._options,
                self._regional,
            )
        if self._store.outstanding is not None:
            self._offer_contribution()
        self._send_to_leader(self._store.member_state(), 0)
        early, self._early = self._early, []
        for each in early:
            self._handle(*each)

    def _offer_contribution(self) -> None:
        own, leader = self._store.outstanding, self._membership.leader
        if own is not None and not self._membership.leads:
            self._contributions.offer(own.sequence, own.block[0], leader)

    # -- messages ---------------------------------------------------------------------------------------------------

    def on_message(self, envelope: Envelope[AsyncMessage]) -> None:
        """Handle a message from another member."""
        message, source, number = envelope.message, envelope.source, envelope.round
        if source not in self._membership.known:
            logger.debug("rank %d, which is not a member, sent a %s", source, type(message).__name__)
        elif isinstance(message, AnchorTaken):
            self._anchors.note_taken(source, number)
            if self.server is not None:
                self.server.on_taken(source, number)
        elif isinstance(message, Arrived | MemberState | Register):
            self._handle(source, number, message)
        elif source == self._membership.leader:
            self._handle_from_leader(source, number, message)
        elif isinstance(message, AnchorOffer) and self.server is not None:
            self.server.on_anchor_offer(source, number, message)

    def _handle(self, source: int, number: int, message: AsyncMessage) -> None:
        """Handle a message to the leader, or keep it until this rank's server has started."""
        if self.server is None:
            self._early.append((source, number, message))
        elif isinstance(message, MemberState):
            self.server.on_member_state(source, message)
        elif isinstance(message, Arrived):
            self.server.on_arrived(source, number, message)
        elif isinstance(message, Register):
            self.server.on_register(source)

    def _handle_from_leader(self, leader: int, number: int, message: AsyncMessage) -> None:
        own = self._store
        match message:
            case Applied():
                is_new = own.outstanding is not None and number == own.outstanding.sequence and self._fetching is None
                if is_new:
                    task = self._take_answer(leader, number, message)
                    self._fetching = self._anchors.spawn(task, f"anchor {message.version}")
                elif self._fetching is None:  # the answer is for a contribution of this rank's previous process
                    self._channel.post(AnchorTaken(), leader, message.version)
            case Registered(applied):
                task = self._take_registration(leader, number, applied)
                self._anchors.spawn(task, f"global anchor {number}")
            case AnchorRequest(is_outer):
                self._offer_to_new_leader(leader, number, is_outer=is_outer)
            case AnchorOffer():
                self._anchors.spawn(self._inherit(leader, number, message), f"anchor {number} of rank {leader}")

    async def _take_answer(self, leader: int, number: int, report: Applied) -> None:
        """Fetch the common weights with this rank's contribution, and the outer optimizer's state if it is offered."""
        block, outer = self._layouts.new_block(), None
        try:
            if report.outer_nbytes:
                outer = self._layouts.new_outer(report.outer_nbytes, leader)
            if not await self._fetch_anchor(leader, report.version, block, outer):
                return  # the contribution is reported to the next leader
        finally:
            if self._fetching is asyncio.current_task():
                self._fetching = None
        if outer is not None:
            self._store.outer = report.version, outer
        self._contributions.note_taken(leader)
        self.take_answer(number, Answer(report, block))
        self._channel.post(AnchorTaken(), leader, report.version)

    def take_answer(self, number: int, answer: Answer) -> None:
        """Record the leader's answer to this rank's contribution ``number``."""
        own = self._store
        if own.outstanding is not None and own.outstanding.sequence == number:
            own.take_answer(answer, self._options.sender_of(self._services.rank))
            self._services.engine.recheck()

    def _offer_to_new_leader(self, leader: int, version: int, *, is_outer: bool) -> None:
        """Offer this rank's common weights, or its copy of the outer optimizer's state, to a new leader."""
        held, outer = self._store.anchor_of(version), self._store.outer
        if is_outer and outer is not None and outer[0] == version:
            self._anchors.offer(version, outer[1], leader, SECOND)
            self._channel.post(AnchorOffer((), outer[1].numel(), 0), leader, version)
        elif not is_outer and held is not None:
            self._anchors.offer(version, held.block[0], leader)
            self._channel.post(AnchorOffer(held.applied, 0, held.merged), leader, version)

    async def _inherit(self, leader: int, version: int, given: AnchorOffer) -> None:
        """Fetch the common weights and the outer optimizer's state of a leaving leader."""
        block, outer = self._layouts.new_block(), self._layouts.new_outer(given.outer_nbytes, leader)
        is_whole = await self._fetch_anchor(leader, version, block, outer)
        if not is_whole or self._has_settled:  # the leader offers the state to another rank once this rank has left
            return
        self._has_inherited = True
        self._store.inherited = HeldAnchor(version, given.applied, block, given.merged)
        self._store.outer = version, outer
        self._channel.post(AnchorTaken(), leader, version)

    async def _fetch_anchor(self, leader: int, version: int, block: Block, outer: Tensor | None) -> bool:
        """Fetch a version of the anchor and, unless ``outer`` is None, the outer optimizer's state."""
        name = f"anchor {version}"
        if outer is not None and not await self._anchors.fetch(leader, version, outer, name, SECOND):
            return False
        return await self._anchors.fetch(leader, version, block[0], name)

    # -- sending ----------------------------------------------------------------------------------------------------

    def _send_to_leader(self, message: Arrived | MemberState | Register, number: int) -> None:
        leader = self._membership.leader
        if self._membership.leads:
            self._handle(leader, number, message)
        else:
            self._channel.post(message, leader, number)
