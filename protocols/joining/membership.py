"""Tracks the members of a policy that has a leader: losses, departures, admissions and new leaders.

The leader is the first member that is not lost and has not left. If the leader is lost, the next member leads. Messages
between two ranks arrive in order, so a new leader and its members need no agreement about the succession. A leader may
also *abdicate*: the next member then leads. A member that has abdicated leads again only if no member that has
abdicated less often can lead. The resulting leader does not depend on the order in which messages of several abdicating
leaders arrive.

The leader admits restarted ranks (*newcomers*) one at a time. It copies its whole state at the moment when the newcomer
becomes a member. The newcomer gets this state when all other members count it as a member. If the leader is lost, the
next leader therefore knows every newcomer that has a state. Other newcomers repeat their requests
(:mod:`protocols.joining.admission`). The ranks of a restarted replica are admitted at the same moment, and each of them
gets the state of its counterpart in the leader's replica.

Before the members save their states, they can wait for each other (:meth:`Membership.settle`). No member takes a step
during this wait, so the saved states are consistent.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from asyncdist import Envelope
from asyncdist.messaging import wire
from asyncdist.messaging.services import Services
from asyncdist.protocols.joining.messages import (
    Abdicated,
    AdmissionConfirmed,
    Admitted,
    Left,
    MembershipMessage,
    Settled,
    Settling,
)
from asyncdist.protocols.joining.policy_channel import PolicyChannel
from asyncdist.protocols.joining.replica_layout import SINGLE, Replicas
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.joining.membership")


class MembershipListener(Protocol):
    """Interface of objects that are notified of lost, departed and new members, and of a new leader."""

    def may_admit(self) -> bool:
        """Return whether a restarted rank could continue from this leader's present state."""

    def on_lost(self, rank: int) -> None:
        """Handle the loss or the departure of a member that is not the leader."""

    def on_new_leader(self) -> None:
        """Handle the loss of the leader. :attr:`Membership.leader` is already its successor, possibly this rank."""

    def on_reachable(self, rank: int) -> None:
        """Open this rank's channels to the new process of a restarted member."""

    def on_admitted(self, rank: int) -> None:
        """As the leader, treat a restarted rank as a member from now on, because it receives this rank's state."""

    def on_settling(self) -> None:
        """As the leader, handle a change of the members waiting between two steps (:attr:`Membership.settling`)."""


class Membership:
    """Tracks which ranks are members of a policy and which member leads. On the leader, admits restarted ranks.

    Args:
        members: Members in the order in which they may lead, including this rank.
        known: All ranks that may become members; by default the members.
        replaced: Members that were lost or restarted before this rank opened the membership.
        admitted: Number of restarts of each restarted member.
        leader: Rank that has answered this rank's admission request if this rank was restarted; otherwise None.
        attempt: Number of this restarted rank's attempt to join; 0 on an initial member.
        replicas: Groups of ranks that train one model together. Either all ranks are members, or the first rank of each
            replica. If a rank is lost or leaves, all members of its replica are removed.

    Attributes:
        living: Members that are not lost and have not left.
        is_broken: Whether another rank of this rank's replica is lost or has left.
        is_joining: Whether this rank was restarted and has not loaded a state yet.
        admission: Number of the state that the leader offers to this restarted rank, or 0 before the admission.
    """

    def __init__(
        self,
        services: Services,
        scopes: PolicyScopes,
        members: Sequence[int],
        *,
        known: Sequence[int] = (),
        replaced: Collection[int] = (),
        admitted: Mapping[int, int] | None = None,
        leader: int | None = None,
        attempt: int = 0,
        replicas: Replicas = SINGLE,
    ) -> None:
        self._services = services
        self._scope = wire.scope_of((), f"membership of policy {scopes.policy}", 0)
        self._order = list(members)  # members in the order in which they may lead, newcomers last
        self._abdications: Counter[int] = Counter()  # by rank: number of abdications since the last admission of a rank
        # By rank: last incarnation and attempt of members that were restarted, and of members that have left.
        self._admitted = {rank: (incarnation, 0) for rank, incarnation in (admitted or {}).items()}
        self._left: dict[int, tuple[int, int]] = {}
        self._admitted_by: dict[int, int] = {}  # by restarted rank: leader whose message has admitted that rank
        # By restarted rank that is not a member itself, but belongs to a member's replica: incarnation when that member
        # was admitted.
        self._followers: dict[int, int] = {}
        self._admission_count = 0
        # By restarted rank that this leader has answered but not admitted yet: its incarnation and attempt.
        self._welcomed: dict[int, tuple[int, int]] = {}
        self._newcomers: tuple[tuple[int, int, int], ...] = ()  # restarted ranks that this leader is admitting
        self._unconfirmed: set[int] = set()  # members that have not confirmed the admission; then the newcomers
        self._on_admission_end: Callable[[], None] = lambda: None
        self._state_receiver = -1  # in the leader's replica: restarted rank that gets this rank's state, or -1
        self._on_leading: Callable[[], None] = lambda: None
        self._attempt = attempt
        self._settling = Settling(0)  # this member's last call of settle()
        self._settled = Settled(0)  # the leader's last Settled message
        self._settlings: dict[int, Settling] = {}  # on the leader: last call of settle() by rank
        self._resumed: set[int] = set()  # on the leader: members that have taken a step since this call
        self._is_closed = False
        self._early: list[Envelope[MembershipMessage]] | None = []  # messages received before open(); None afterwards
        self._channel: PolicyChannel[MembershipMessage]
        self._listener: MembershipListener
        self.leader = self._order[0] if leader is None else leader
        self.living = set(members)
        self.known = frozenset(known or members)
        self._replaced = frozenset(replaced).intersection(members)
        self.replicas = replicas
        self.is_broken = False
        self.is_joining = leader is not None
        self.admission = 0

    def open(self, listener: MembershipListener) -> None:
        """Start tracking the members, and notify ``listener`` of changes among them."""
        services = self._services
        self._listener = listener
        self._channel = PolicyChannel(services, MembershipMessage, scope=self._scope, name="membership", listener=self)
        needed = {each for rank in self.known for each in self.replicas.replica_ranks(rank)}
        services.on_gone(self._on_gone, among=frozenset(needed))
        services.on_returned(self._on_returned)
        for rank in sorted(needed.intersection(services.gone)):
            if not (self.replicas.size > 1 and services.is_unmet(rank)):  # the leader's replica may connect later
                services.engine.loop.call_soon(self._note_gone, rank)
        for rank in sorted(self._replaced - services.gone):
            services.engine.loop.call_soon(self._note_gone, rank)
        early, self._early = self._early or [], None
        for envelope in early:
            self.on_message(envelope)

    def call_when_leading(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when this rank becomes the leader."""
        self._on_leading = listener

    @property
    def leads(self) -> bool:
        """True if this rank is the leader."""
        return self.leader == self._services.rank

    def members(self) -> tuple[int, ...]:
        """Return the living members in the order in which they may lead."""
        order = sorted(self._order, key=self._abdications.__getitem__) if self._abdications else self._order
        return tuple(rank for rank in order if rank in self.living)

    def member_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks in the replica of ``rank`` that may be members: all of them, or only the first."""
        return tuple(each for each in self.replicas.replica_ranks(rank) if each in self.known)

    def own_followers(self) -> tuple[tuple[int, int], ...]:
        """Return the rank and incarnation of each rank of this rank's replica that is not a member itself."""
        mates, restarted = self.replicas.replica_ranks(self._services.rank), self._services.restarted
        return tuple((rank, restarted.get(rank, 0)) for rank in mates if rank not in self.known)

    def is_reachable(self, rank: int) -> bool:
        """Return whether this rank is connected to the admitted process of a member, or of a rank in its replica."""
        return rank == self._services.rank or self.is_connected(rank, self._incarnation_of(rank))

    def is_connected(self, rank: int, incarnation: int) -> bool:
        """Return whether this rank is connected to the process of another rank that has this incarnation."""
        return rank not in self._services.gone and self._services.restarted.get(rank, 0) == incarnation

    def _incarnation_of(self, rank: int) -> int:
        """Return the incarnation that a member, or another rank of its replica, had when the member was admitted."""
        return self._identity_of(rank)[0] if rank in self.known else self._followers.get(rank, 0)

    def _identity_of(self, rank: int) -> tuple[int, int]:
        """Return a member's number of restarts and attempt at its admission; zeros for an initial member."""
        return self._admitted.get(rank, (0, 0))

    @property
    def departed(self) -> set[int]:
        """Former members that have left the policy, unlike lost members."""
        return {rank for rank in self._left if self._has_left(rank)} - self.living

    def _has_left(self, rank: int) -> bool:
        return rank in self._left and self._left[rank] >= self._identity_of(rank)

    def leave(self) -> None:
        """Notify the other members that this rank leaves the policy, and stop tracking them."""
        if self._is_closed:
            return
        self._is_closed = True
        self._services.off_gone(self._on_gone)
        self._services.off_returned(self._on_returned)
        if self._services.engine.failure is None:
            for rank in sorted(self.living - {self._services.rank}):
                self._post(Left(self._services.incarnation, self._attempt), rank)
        self._channel.close()

    # -- waiting for each other ---------------------------------------------------------------------------------------

    async def settle(self, is_over: Callable[[], bool], progress: Sequence[int] = ()) -> tuple[int, ...]:
        """Wait between two steps until all members have called this method the same number of times.

        Args:
            is_over: Function that returns whether this member may stop waiting.
            progress: Counters that grow with this member's steps.

        Returns:
            The smallest value of each counter among the members, or ``progress`` if not all members have called this
            method.
        """
        if self._is_closed:
            return tuple(progress)
        own = self._settling = Settling(self._settling.count + 1, tuple(progress))
        self._report_settling()
        wait = WaitId(WaitKind.SETTLING)
        await self._services.engine.until(
            lambda: self._settled.count >= own.count or is_over() or self._is_closed or self.is_broken, wait
        )
        return self._settled.least if self._settled.count >= own.count else own.progress

    @property
    def settling(self) -> set[int]:
        """On the leader: members that are waiting in :meth:`settle` and therefore take no step."""
        waiting = {rank for rank in self.living if self._settle_count_of(rank) > self._settled.count}
        return waiting - self._resumed

    def note_resumed(self, rank: int) -> None:
        """On the leader, record that a member takes steps again, even if not all members have called :meth:`settle`."""
        self._resumed.add(rank)

    def _settle_count_of(self, rank: int) -> int:
        return self._settlings[rank].count if rank in self._settlings else 0

    def _report_settling(self) -> None:
        if self._settling.count and self.leads:
            self._note_settling(self._services.rank, self._settling)
        elif self._settling.count:
            self._post(self._settling, self.leader)

    def _note_settling(self, rank: int, message: Settling) -> None:
        self._settlings[rank] = message
        self._resumed.discard(rank)
        self._answer_settled()

    def _answer_settled(self) -> None:
        """As the leader, answer the waiting members when all members have called :meth:`settle` again."""
        if not self._settlings or not self.leads:
            return
        count = min(map(self._settle_count_of, self.living))
        if count > self._settled.count:
            rows = [self._settlings[rank].progress for rank in sorted(self.living)]
            self._note_settled(Settled(count, tuple(map(min, zip(*rows, strict=False)))))
            for rank in sorted(self.living - {self._services.rank}):
                self._post(self._settled, rank)
        self._listener.on_settling()

    def _note_settled(self, message: Settled) -> None:
        if message.count > self._settled.count:
            self._settled = message
            self._services.engine.recheck()

    # -- admission by this leader -----------------------------------------------------------------------------------

    @property
    def can_admit(self) -> bool:
        """True if this rank leads, is admitting no other rank, and a restarted rank could continue from its state."""
        return self.leads and not self._newcomers and not self._is_closed and self._listener.may_admit()

    def drop_earlier_process(self, rank: int, incarnation: int, attempt: int) -> bool:
        """Count a member's earlier process as lost, because the member has asked for admission again.

        Returns:
            False if the request is outdated, because this incarnation and attempt, or a later one, was already
            admitted.
        """
        if (incarnation, attempt) <= self._identity_of(rank):
            return False
        self._note_gone(rank)
        self._welcomed[rank] = incarnation, attempt
        return True

    def admit(
        self,
        newcomers: Sequence[tuple[int, int, int]],
        on_end: Callable[[], None],
        followers: Sequence[tuple[int, int]] = (),
    ) -> int:
        """Admit a restarted rank, or all ranks of a restarted replica. Return the number with which to offer the state.

        Args:
            newcomers: Rank, number of restarts, and number of the attempt to join, of each rank.
            on_end: Function that is called when the restarted ranks have their states or one of them is lost.
            followers: Rank and number of restarts of each rank of the replica that does not become a member itself.
        """
        me, ranks = self._services.rank, [rank for rank, *_ in newcomers]
        assert self.can_admit, "only a leader that is not busy admits"
        self._admission_count += 1
        self._order = [*self.members(), *ranks]
        self._abdications.clear()
        self._unconfirmed = self.living - {me}
        self.living.update(ranks)
        for rank, *identity in newcomers:
            self._admitted[rank] = (identity[0], identity[1])
            self._welcomed.pop(rank, None)
            self._make_reachable(rank)
        self._followers.update(followers)
        self._newcomers, self._on_admission_end = tuple(newcomers), on_end
        for member in sorted(self._unconfirmed):
            self._post(self._admitted_message(), member, self._admission_count)
        for rank in ranks:
            self._listener.on_admitted(rank)
        self._note_confirmed(me)
        return self._admission_count

    def _note_confirmed(self, member: int) -> None:
        """Record that ``member`` has confirmed the admission in progress. Continue when all members have."""
        if not self._newcomers:
            return
        ranks = {rank for rank, *_ in self._newcomers}
        are_given = not ranks.isdisjoint(self._unconfirmed)
        self._unconfirmed.discard(member)
        if not ranks <= self.living or (are_given and not self._unconfirmed):
            self._newcomers = ()
            self._on_admission_end()
        elif not self._unconfirmed:
            self._unconfirmed = ranks
            for rank in sorted(ranks):
                self._post(self._admitted_message(), rank, self._admission_count)

    def _admitted_message(self) -> Admitted:
        order = tuple((rank, *self._identity_of(rank)) for rank in self.members())
        return Admitted(order, self._newcomers[0], self._settling.count, tuple(sorted(self._followers.items())))

    # -- admission by the other ranks of the leader's replica --------------------------------------------------------

    async def wait_for_admission(self, number: int) -> bool:
        """Wait for the leader's message about admission ``number``. Return False if a rank of the replica is lost.

        The leader ends no averaging round between this message and the newcomers' answers. The ranks of its replica
        have therefore applied the means of the same rounds as the leader had when it copied its state.
        """
        wait = WaitId(WaitKind.POLICY_ADMISSION)
        await self._services.engine.until(lambda: self.admission >= number or self.is_broken, wait)
        return not self.is_broken

    def confirm_admission(self, on_end: Callable[[], None]) -> None:
        """Acknowledge the leader's last admission, because this rank now offers its state to a restarted rank.

        Args:
            on_end: Function that is called when the restarted rank has the state or is lost.
        """
        self._on_admission_end = on_end
        self._add_if_reachable(self._state_receiver)

    def _end_offer(self) -> None:
        self._state_receiver = -1
        self._on_admission_end()

    # -- this newcomer ----------------------------------------------------------------------------------------------

    @property
    def donor(self) -> int:
        """The member whose state this restarted rank gets: the rank of the leader's replica with the same index."""
        return self.replicas.replica_ranks(self.leader)[self.replicas.index(self._services.rank)]

    def complete_joining(self) -> None:
        """Record that this restarted rank has loaded its donor's state, and notify the donor and the leader.

        If the leader has left since it sent the state, the next member leads.
        """
        self.is_joining = False
        for rank in sorted({self.donor, self.leader}):
            self._post(AdmissionConfirmed(self.identity), rank)
        if self.leader not in self.living:
            self._services.engine.loop.call_soon(self._follow_next)

    @property
    def identity(self) -> tuple[int, int, int]:
        """This rank's number, its number of restarts, and the number of its attempt to join."""
        return self._services.rank, self._services.incarnation, self._attempt

    # -- events -----------------------------------------------------------------------------------------------------

    def _on_gone(self, rank: int) -> None:
        call_soon, restarted = self._services.engine.loop.call_soon, self._services.restarted
        if rank in self.replicas.replica_ranks(self._services.rank):
            call_soon(self._note_broken, rank)
        else:
            call_soon(self._note_gone, rank, restarted.get(rank, 0))

    def _note_broken(self, _: int) -> None:
        if not self._is_closed:
            self.is_broken = True
            self._services.engine.recheck()

    def _note_gone(self, rank: int, incarnation: int | None = None) -> None:
        """Handle the departure of a rank, or its loss. A loss removes all ranks of the lost rank's replica.

        After a departure, the other ranks of the replica remain members until they leave as well. If one of them leads,
        some members may still wait for its decisions.

        Args:
            incarnation: Incarnation of the process that is lost. The loss of an earlier process of a rank that is not a
                member itself does not remove the replica that was admitted since. None for any process.
        """
        if incarnation is not None:
            self._note_not_welcomed(rank, incarnation, math.inf)
        if incarnation is not None and rank not in self.known and incarnation < self._followers.get(rank, 0):
            return
        replica_ranks = self.replicas.replica_ranks(rank)
        gone = self.living.intersection([rank] if self._has_left(rank) else replica_ranks)
        if not gone or self._is_closed:
            return
        if self._services.rank in replica_ranks:
            self._note_broken(rank)
            return
        self.living -= gone
        if self._state_receiver in gone:
            self._end_offer()
        for each in gone:
            self._settlings.pop(each, None)
        if self.leader not in gone:
            for each in sorted(gone):
                self._listener.on_lost(each)
                self._note_confirmed(each)
            self._answer_settled()
        elif self.is_joining:  # this restarted rank will request admission again
            self._services.engine.recheck()
        else:
            self._follow_next()

    def _note_not_welcomed(self, rank: int, incarnation: int, attempt: float) -> None:
        """Stop waiting for a restarted rank that was lost or left before its admission, unless it has asked again."""
        if rank in self._welcomed and self._welcomed[rank] <= (incarnation, attempt):
            del self._welcomed[rank]

    def _follow_next(self) -> None:
        """Make the first living member in the order of succession the leader, unless it already leads."""
        if self._is_closed:
            return
        former, self.leader = self.leader, self.members()[0]
        if self.leader == former:
            return
        logger.info("rank %d now leads, after rank %d", self.leader, former)
        self._listener.on_new_leader()
        self._report_settling()
        self._answer_settled()
        if self.leads:
            self._on_leading()

    def abdicate(self) -> None:
        """Let the next member lead, unless this rank is the only member or is admitting a restarted rank."""
        me, others = self._services.rank, self.living - {self._services.rank}
        if not self.leads or not others or self._newcomers or self._welcomed or self._is_closed:
            return
        count = self._abdications[me] + 1
        for rank in sorted(others):
            self._post(Abdicated(count), rank)
        self._note_abdicated(me, count)

    def _note_abdicated(self, rank: int, count: int) -> None:
        self._abdications[rank] = count
        self._follow_next()

    def on_message(self, envelope: Envelope[MembershipMessage]) -> None:
        """Handle a message from another member."""
        message, source = envelope.message, envelope.source
        if self._early is not None:
            self._early.append(envelope)
            return
        if source not in self.known:
            logger.debug("rank %d, which is not a member, sent a %s", source, type(message).__name__)
            return
        match message:
            case Left(incarnation, attempt):
                self._note_not_welcomed(source, incarnation, attempt)
                self._left[source] = max(self._left.get(source, (0, 0)), (incarnation, attempt))
                if self._has_left(source):
                    self._note_gone(source)
            case Abdicated(count) if source in self.living:
                self._note_abdicated(source, count)
            case AdmissionConfirmed((rank, *_)) if source == rank == self._state_receiver:
                self._end_offer()
            case AdmissionConfirmed(newcomer) if newcomer in self._newcomers:
                if newcomer[0] == source or source not in self.replicas.replica_ranks(newcomer[0]):
                    self._note_confirmed(source)
            case Admitted() if source == self.leader:
                self._note_admitted(envelope.round, message)
            case Settling() if source in self.living:
                self._note_settling(source, message)
            case Settled() if source == self.leader:
                self._note_settled(message)

    def _note_admitted(self, number: int, message: Admitted) -> None:
        rank, *_ = message.newcomer
        replica_ranks, ranks = self.replicas.replica_ranks(rank), [each for each, *_ in message.order]
        is_sound = message.newcomer in message.order and len(set(ranks)) == len(ranks) and self.known.issuperset(ranks)
        if not is_sound or self._services.rank not in ranks:
            logger.warning("rank %d sent an invalid list of members, which is ignored: %.300r", self.leader, message)
            return
        self._order = ranks
        self._abdications.clear()
        self._admission_count = max(self._admission_count, number)
        self._followers.update(message.followers)
        if self.identity in message.order and self._services.rank in replica_ranks:
            self.admission = number
            self._settling, self._settled = Settling(message.settle_count), Settled(message.settle_count)
            self._admitted.update({each: (incarnation, attempt) for each, incarnation, attempt in message.order})
            gone, is_unmet = self._services.gone, self._services.is_unmet
            lost = {each for each in gone if not (self._has_left(each) or is_unmet(each))}
            present = {each for each in self._order if each not in gone and not self._has_left(each)}
            self.living = {each for each in present if lost.isdisjoint(self.replicas.replica_ranks(each))}
            for each in self.living - {self._services.rank}:
                self._add_if_reachable(each)
            self._services.engine.recheck()
            return
        self._admitted.update({each: (inc, attempt) for each, inc, attempt in message.order if each in replica_ranks})
        self._admitted_by.update(dict.fromkeys(replica_ranks, self.leader))
        if self._services.rank in self.replicas.replica_ranks(self.leader):  # this rank must offer its state first
            self.admission, self._state_receiver = number, replica_ranks[self.replicas.index(self._services.rank)]
            self._services.engine.recheck()
        else:
            self._add_if_reachable(rank)

    def _on_returned(self, rank: int) -> None:
        self._services.engine.loop.call_soon(self._add_if_reachable, rank)

    def _add_if_reachable(self, rank: int) -> None:
        """Count a restarted rank as a member if this rank is connected to the process that the leader has admitted.

        The ranks of a restarted replica become members together. If the leader is lost before all members have counted
        them, these ranks have no state, and ask the next leader.
        """
        members = self.member_ranks(rank)
        is_closed = self._is_closed or any(map(self._has_left, members))
        if self._admitted_by.get(rank, self.leader) != self.leader:
            return
        is_present = all(map(self.is_reachable, self.replicas.replica_ranks(rank)))
        if self._admitted.keys() >= set(members) and is_present and not is_closed:
            self.living.update(members)
            for each in members:
                if each != self._services.rank:
                    self._make_reachable(each)
            if not self.leads:
                first = members[0]  # `rank` may be a follower
                self._post(AdmissionConfirmed((first, *self._admitted[first])), self.leader)

    def _make_reachable(self, rank: int) -> None:
        self._channel.admit(rank)
        self._listener.on_reachable(rank)

    def _post(self, message: MembershipMessage, dest: int, number: int = 0) -> None:
        self._channel.post(message, dest, number)
