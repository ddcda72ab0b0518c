"""Runs the coordinator on the coordinating rank, and exchanges the messages that determine a new coordinator.

:mod:`protocols.selective.succession` decides which rank coordinates. This module carries out the decisions. The
coordinating rank may be reserved for :func:`coordinate`. It is then not a member, and does not train.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import zlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final, TypeAlias

from asyncdist import ClosedError, World, validation
from asyncdist.messaging.services import Services
from asyncdist.protocols.joining.dispatcher import (
    IslandMessage,
    PolicyDispatcher,
    Refusal,
    Request,
    SuccessionMessage,
    Welcome,
    digest_of,
    key_of,
)
from asyncdist.protocols.joining.messages import Declined, Nomination, TakeOver
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.journal import Journal
from asyncdist.protocols.policy import START
from asyncdist.protocols.selective.coordinator import Coordinator
from asyncdist.protocols.selective.islands.migration import Migration
from asyncdist.protocols.selective.messages import Report
from asyncdist.protocols.selective.roles.member_roles import MemberRoles
from asyncdist.protocols.selective.selection import SelectiveRules
from asyncdist.protocols.selective.statistics import CoordinatorStatistics
from asyncdist.protocols.selective.succession import (
    WATCHER_COUNT,
    Claim,
    Follow,
    Inform,
    Nominate,
    ReportedCoordinator,
    Steps,
    Succession,
    Watch,
)
from asyncdist.protocols.starting.differences import explaining_conflicts
from asyncdist.runtime.world import world_to_await

logger = logging.getLogger("protocols.selective.leadership")

_UNKNOWN: Final = "after a rank that is lost or has left"  # logged if the previous coordinator is unknown


class Leadership:
    """Tracks which rank coordinates one policy, and runs the coordinator if this rank coordinates.

    Args:
        roles: Object that is notified when the coordinator changes and when a restarted rank is admitted. None on a
            reserved coordinator, which is not a member.
        replaced: Members that were lost while the ranks agreed on the start. Some may have been restarted since.
    """

    def __init__(
        self,
        services: Services,
        succession: Succession,
        members: Sequence[int],
        rules: SelectiveRules,
        scopes: PolicyScopes,
        *,
        model_nbytes: int,
        roles: MemberRoles | None,
        replaced: Sequence[int] = (),
        migration: Migration | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._migration = migration
        self._services = services
        self._members = tuple(members)
        # For the whole world, use a range: a list of thousands of ranks on each rank would need much memory.
        is_world = len(members) == services.size
        coordinator = succession.coordinator
        assert coordinator is not None, "a policy begins with a coordinator"
        self._participants = range(services.size) if is_world else dict.fromkeys((*members, coordinator))
        self._scopes = scopes
        self._new_coordinator = functools.partial(
            Coordinator,
            services,
            ranks=self._members,
            rules=rules,
            scopes=scopes,
            model_nbytes=model_nbytes,
            migration=migration,
            journal=journal,
        )
        self._roles = roles
        self._succession = succession
        self._has_left = self._is_reserved = roles is None
        self._is_closed = False
        self._predecessor = _UNKNOWN
        self._watch = Watch()
        self._serving: Coordinator | None = None
        self._served: CoordinatorStatistics | None = None
        self.report_count = self.nonfinite_count = 0
        self._host = self._reported_call = 0  # set by begin_reports
        self._reported_at = 0.0
        # By rank: incarnation (number of restarts) of each admitted restarted rank. A restarted rank stores those of
        # all members.
        self._admitted: dict[int, int] = {}
        self._replaced = tuple(replaced)
        self._unhandled: list[int] = []  # departed ranks, handled in the event loop's next iteration
        self._dispatcher = services.shared(PolicyDispatcher)
        self._dispatcher.open(scopes.policy, self._on_message, key_of(members, scopes.values), self._on_request)
        if migration is not None:
            self._dispatcher.open(scopes.between, self._on_island_message)
        if self._is_reserved:
            self._dispatcher.leave(scopes.policy)
        services.on_gone(self._on_peer_gone, among=self._participants)
        services.on_returned(self._on_connected)
        if services.rank == coordinator:
            self._serve(epoch=0, members=[rank for rank in self._members if rank not in self._replaced])

    def begin(self) -> None:
        """Handle the ranks that were lost or have left since all members agreed to start the policy."""
        absent = sorted({*self._services.gone, *self._replaced})
        self._unhandled.extend(absent)  # set first, so that no such rank becomes a member if this rank takes over
        for rank in absent:
            self._handle_gone(rank)

    @property
    def coordinator(self) -> int | None:
        """Rank of the coordinator, as far as this rank knows, or None if the coordinator is lost or has stopped."""
        return self._succession.coordinator

    @property
    def epoch(self) -> int:
        """Number of the current coordinator: 0 for the first, and larger for each successor."""
        return self._succession.epoch

    def statistics(self) -> CoordinatorStatistics | None:
        """Return the statistics of this rank as a coordinator, or None if it has never coordinated."""
        return self._serving.core.statistics() if self._serving is not None else self._served

    def note_stopped(self, rank: int) -> None:
        """Look for a new coordinator, because ``rank`` has announced that it stops coordinating."""
        if rank == self._succession.coordinator:
            self._lose_coordinator("has stopped", rank)

    def note_admitted(self, rank: int, incarnation: int) -> None:
        """Record that a restarted process of ``rank`` (possibly this rank) was admitted to the policy."""
        if rank in self._participants:
            # A message about an earlier process of the rank may arrive late.
            self._admitted[rank] = max(incarnation, self._admitted.get(rank, 0))
            self._accept_if_admitted(rank)

    def _accept_if_admitted(self, rank: int) -> None:
        """Accept a restarted rank as a member if the coordinator has admitted its current process."""
        services = self._services
        known = services.incarnation if rank == services.rank else services.restarted.get(rank, 0)
        if self._admitted.get(rank) == known and rank not in services.gone:
            self._succession.on_admitted(rank)
            if self._roles is not None:
                self._roles.admit(rank, known)

    def note_welcome(self, welcome: Welcome, rank: int) -> None:
        """Record the members and the coordinator that ``rank`` has sent in answer to this rank's admission request."""
        for member in welcome.members:
            self.note_admitted(*member)
        self._carry_out(self._succession.on_claim(welcome.epoch, rank, rank))

    def begin_reports(self, call: int, hostname: str) -> None:
        """Start measuring step times, as if step ``call - 1`` had just sent a report."""
        self._host = zlib.crc32(hostname.encode(errors="replace"))
        self._reported_at, self._reported_call = self._services.time(), call - 1

    def report(self, iteration: int, call: int, value: float) -> None:
        """Send this member's metric and the duration of its steps to the coordinator, if there is one."""
        if self._roles is None:
            raise ClosedError("this rank has left the policy")
        now = self._services.time()
        interval_s = now - self._reported_at
        step_s = interval_s / max(1, call - self._reported_call)
        self._reported_at, self._reported_call = now, call
        asks = self._watches(call, interval_s)
        self._roles.member.newest = report = Report(iteration, value, step_s, interval_s, asks, self._host)
        self.report_count += 1
        self.nonfinite_count += not math.isfinite(value)
        if self.coordinator is not None:
            self._roles.channels.report(report, self.coordinator)

    def _watches(self, step: int, interval_s: float) -> bool:
        """Return whether this rank's next report must ask the coordinator for an answer.

        Before that, continue to look for a coordinator if there is none, and take over if the coordinator does not
        answer.
        """
        if self._succession.coordinator is None:
            self._carry_out(self._succession.on_cadence())
        place = self._succession.place(WATCHER_COUNT)
        if place is None or self._succession.coordinator is None:
            return False
        self._watch.on_report(step, interval_s, self._services.time())
        why = self._watch.suspicion(place)
        if why is not None:
            self._predecessor = f"after rank {self._succession.coordinator}, which {why}"
            self._carry_out(self._succession.on_suspicion())
        return why is None

    def note_answer(self, step: int) -> None:
        """Record that the coordinator has answered a report. ``step`` is this rank's current step."""
        self._watch.on_answer(step, self._services.time())

    async def serve_reserved(self) -> CoordinatorStatistics:
        """Coordinate in the caller's task until every member has left or another rank has taken over."""
        assert self._serving is not None, "this rank is not a reserved coordinator"
        return await self._run(self._serving)

    def leave(self) -> None:
        """Leave the policy as a member. A coordinator on this rank continues until the other members have left."""
        self._has_left = True
        self._dispatcher.leave(self._scopes.policy)
        if self._migration is not None:
            self._migration.leave()
        self._succession.leave()
        self._roles = None  # frees the model, which the roles refer to
        if self._serving is None:
            self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._services.off_gone(self._on_peer_gone)
            self._services.off_returned(self._on_connected)
            self._dispatcher.close(self._scopes.policy)
            if self._migration is not None:
                self._dispatcher.close(self._scopes.between)

    def _on_request(self, request: Request, source: int) -> bool:
        """Answer an admission request if this rank coordinates. Return whether the request may still be granted."""
        if self._serving is None or source not in self._members:
            is_waiting = (
                self._succession.is_newcomer and self._admitted.get(self._services.rank) != self._services.incarnation
            )
            return not is_waiting or self.coordinator not in (None, *self._services.gone)
        scopes, members = self._scopes, self._serving.core.members()
        if request.digest != digest_of(self._members, scopes.values):
            self._dispatcher.send(Refusal(request.key, tuple(scopes.values.items())), source)
        else:
            facts = scopes.policy, scopes.to_members, scopes.to_coordinator, self.epoch, members, scopes.between
            self._dispatcher.send(Welcome(request.key, *facts), source)
            self._serving.note_newcomer(source, request.incarnation)
        return True

    # -- events -----------------------------------------------------------------------------------------------------

    def _on_peer_gone(self, rank: int) -> None:
        self._unhandled.append(rank)
        self._services.engine.loop.call_soon(self._handle_gone, rank)

    def _on_connected(self, rank: int) -> None:
        if rank in self._admitted:
            self._services.engine.loop.call_soon(self._accept_if_admitted, rank)

    def _handle_gone(self, rank: int) -> None:
        """Handle a rank that is lost or has left the world. A rank that has left may still coordinate."""
        if rank in self._unhandled:
            self._unhandled.remove(rank)
        if rank not in self._participants or self._is_closed:
            return
        if rank in self._services.left:
            self._carry_out(self._succession.on_left(rank))
        elif rank == self._succession.coordinator:
            self._lose_coordinator("is gone", rank)
        else:
            self._carry_out(self._succession.on_lost(rank))

    def _lose_coordinator(self, why: str, rank: int) -> None:
        steps = self._succession.on_lost(rank)
        logger.info("rank %d, the coordinator, %s", rank, why)
        self._predecessor = f"after rank {rank}, which {why}"
        if self._roles is not None:
            self._roles.lose_coordinator(why)
        self._carry_out(steps)

    def _on_message(self, message: SuccessionMessage, source: int) -> None:
        if source not in self._participants:
            logger.debug("rank %d, which is not a member, sent a %s", source, type(message).__name__)
            return
        match message:
            case Declined():
                if self._serving is not None:
                    self._serving.note_left(source)
                self._carry_out(self._succession.on_left(source))
            case Nomination(_, epoch) if self._has_left and (self._serving is None or epoch > self.epoch):
                self._dispatcher.send(Declined(self._scopes.policy), source)
            case Nomination(_, epoch):
                self._carry_out(self._succession.on_nomination(source, epoch))
            case TakeOver(_, epoch, coordinator, incarnation) if coordinator in self._participants:
                if incarnation or self._services.incarnation:
                    self.note_admitted(coordinator, incarnation)
                self._carry_out(self._succession.on_claim(epoch, coordinator, source))

    def _on_island_message(self, message: IslandMessage, source: int) -> None:
        assert self._migration is not None, "a message from another island has arrived, but there are no islands"
        news = self._migration.on_message(message, source, is_serving=self._serving is not None)
        if self._serving is not None and news is not None:
            rank, incarnation = news
            if incarnation is None:
                self._serving.note_left(rank)
            else:
                self._serving.note_guest(rank, incarnation)

    def _carry_out(self, steps: Steps) -> None:
        policy = self._scopes.policy
        for step in steps:
            match step:
                case Nominate(dest):
                    self._dispatcher.send(Nomination(policy, self.epoch), dest)
                case Inform(dest):
                    self._inform(dest)
                case Follow(epoch, coordinator):
                    self._follow(epoch, coordinator)
                case Claim(epoch):
                    self._claim(epoch)

    def _follow(self, epoch: int, coordinator: int) -> None:
        if self._serving is not None:
            logger.info("rank %d is now the coordinator, instead of this rank", coordinator)
            self._serving.stop(self._inform)
        if self._has_left:
            self._dispatcher.send(Declined(self._scopes.policy), coordinator)
        else:
            self._predecessor = _UNKNOWN
            self._watch.begin()
            self._notify_member(epoch, coordinator)

    def _notify_member(self, epoch: int, coordinator: int) -> None:
        if self._roles is not None:
            self._roles.follow(epoch, coordinator)

    def _inform(self, rank: int) -> None:
        """Notify ``rank``, which still treats this rank as the coordinator, of the current coordinator."""
        if self.coordinator is not None:
            self._dispatcher.send(self._claim_of(self.coordinator), rank)

    def _claim_of(self, coordinator: int) -> TakeOver:
        services = self._services
        is_own = coordinator == services.rank
        incarnation = services.incarnation if is_own else services.restarted.get(coordinator, 0)
        return TakeOver(self._scopes.policy, self.epoch, coordinator, incarnation)

    def _claim(self, epoch: int) -> None:
        services = self._services
        available = self._succession.is_available
        members = [rank for rank in self._members if available(rank) and rank not in self._unhandled]
        if self._serving is not None:  # this rank still coordinates an earlier epoch
            self._serving.stop(self._inform)
        self._serve(epoch=epoch, members=members)
        for rank in self._participants:
            if rank != services.rank and rank not in services.gone:
                self._dispatcher.send(self._claim_of(services.rank), rank)
        logger.warning("this rank is now the coordinator, %s", self._predecessor)
        self._notify_member(epoch, services.rank)

    def _serve(self, *, epoch: int, members: Sequence[int]) -> None:
        self._serving = self._new_coordinator(members=members, epoch=epoch)
        if not self._is_reserved:
            self._services.spawn_service(self._run(self._serving), name="coordinator")

    async def _run(self, coordinator: Coordinator) -> CoordinatorStatistics:
        try:
            await coordinator.serve(is_reserved=self._is_reserved)
            return coordinator.core.statistics()
        finally:
            if self._serving is coordinator:
                self._serving, self._served = None, coordinator.core.statistics()
                if self._has_left:
                    self._close()


#: Object through which a member finds its coordinator, and reports to it.
CoordinatorTracker: TypeAlias = Leadership | ReportedCoordinator


async def coordinate(
    members: Sequence[int], *, world: World | None = None, start_timeout_s: float = 60.0
) -> CoordinatorStatistics:
    """Coordinate one policy on a reserved rank, which is not a member and does not train.

    The members pass this rank as ``coordinator=`` to their policy, and a group without this rank as ``group=``, such as
    ``await ad.new_group(members)``. The call returns when all members have left, or when a member has taken over
    because this rank did not answer.

    Args:
        members: Ranks of the policy's group, in the group's order.
        world: World of the policy; the current world by default.
        start_timeout_s: Seconds to wait at the start for the last member.

    Returns:
        Counts of the coordinator's reports, decisions and rounds.

    Raises:
        TypeError, ValueError: ``members`` is not a list of distinct ranks, is empty or contains this rank; or the
            timeout is out of range.
        StartTimeoutError: A member has not arrived in time.
        DisagreementError: The ranks have passed different arguments.

    **Cancellation**: The members are notified and log a warning, and one of them takes over.
    """
    world = world_to_await(world)
    _check_members(members, world)
    validation.seconds("start_timeout_s", start_timeout_s)
    ranks = (*members, world.rank)
    meeting = world.agreements.next_request(ranks, START, world.rank)
    with explaining_conflicts(world.agreements, meeting):
        agreed = await world.agreements.meet(meeting, {}, timeout_s=start_timeout_s)
    options = {
        key.removeprefix("option "): json.loads(value)
        for key, value in agreed.values.items()
        if key.startswith("option ")
    }
    rules = SelectiveRules(**{entry.name: options[entry.name] for entry in fields(SelectiveRules)})
    scopes = PolicyScopes.of_start(ranks, agreed)
    journal = Journal("")
    journal.begin_reserved(world.services)
    leadership = Leadership(
        world.services,
        Succession(world.rank, members, world.rank),
        members,
        rules,
        scopes,
        model_nbytes=int(options["model_nbytes"]),
        roles=None,
        journal=journal,
    )
    leadership.begin()
    return await leadership.serve_reserved()


def _check_members(members: Any, world: World) -> None:
    others = f"a list of distinct ranks from 0 to {world.size - 1} without this rank, {world.rank}"
    if isinstance(members, str) or not isinstance(members, Sequence):
        validation.refuse("members", members, others, TypeError)
    wrong = [rank for rank in members if type(rank) is not int or not 0 <= rank < world.size or rank == world.rank]
    if wrong or not members or len(set(members)) != len(members):
        validation.refuse("members", members, others)
