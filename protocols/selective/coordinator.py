"""Runs the task that coordinates the members of a selective-averaging policy.

The task passes the members' messages to a state machine (:mod:`protocols.selective.rounds`), and sends the messages
that the state machine returns. It runs on the group's first rank, during calls such as ``policy.step`` that let
messages move, or on a reserved rank that does not train. After its own rank has left the policy, the task continues
until the last member has left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, assert_never

from asyncdist import Envelope, RankLostError, tags
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.services import Services
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.journal import Journal
from asyncdist.protocols.metric_trend import blank_warning, trend_warning
from asyncdist.protocols.parameter_stream.messages import safe_point_count
from asyncdist.protocols.selective.islands.migration import Migration
from asyncdist.protocols.selective.messages import (
    Abandoned,
    Admitted,
    Applied,
    ControlMessage,
    Decline,
    End,
    Joined,
    Leave,
    PackedAssign,
    PackedFrozen,
    Ready,
    Rejoin,
    Report,
    ReportAcknowledged,
)
from asyncdist.protocols.selective.plan import unpack_freeze, unpack_plan
from asyncdist.protocols.selective.roster import Send
from asyncdist.protocols.selective.rounds import RoundCoordinator
from asyncdist.protocols.selective.selection import SelectiveRules
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.selective.coordinator")

_ACKNOWLEDGED: Final = ReportAcknowledged()


class Coordinator:
    """Receives the members' messages, and sends the messages that the coordinator's state machine returns.

    Args:
        members: Ranks that are known to take part in the policy.
        epoch: Number of the coordinator: 0 for the first, which the members agreed on, and larger for each successor.
    """

    def __init__(
        self,
        services: Services,
        members: Sequence[int],
        ranks: Sequence[int],
        rules: SelectiveRules,
        scopes: PolicyScopes,
        *,
        epoch: int,
        model_nbytes: int,
        migration: Migration | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._services = services
        self._journal = journal or Journal("")
        # Type and round of the last message recorded in the journal.
        self._last_recorded: tuple[type, int] = type(None), 0
        self._migration = migration
        self._metric_mode = rules.metric_mode
        self._scopes = scopes
        self._epoch = epoch
        self.core = RoundCoordinator(
            members,
            rules,
            stream_safe_points=safe_point_count(model_nbytes),
            model_nbytes=model_nbytes,
            may_join=ranks if epoch else None,
            incarnations={**services.restarted, services.rank: services.incarnation},
        )
        self._is_stopped = False
        self._inform: Callable[[int], None] = lambda rank: None  # after stop(): notifies a rank of the new coordinator
        self._left: list[int] = []
        self._newcomers: dict[int, int] = {}  # by rank: incarnation (number of restarts) in a pending admission request
        self._guests: dict[int, int] = {}  # by rank: incarnation of each rank of another island to invite
        self._gone = [rank for rank in members if rank in services.gone]
        services.on_gone(self._gone.append)
        self._reports: Channel[Report] = services.open_channel(
            Report, tag=tags.METRIC, scope=scopes.to_coordinator, name="metric reports", overflow="latest", epoch=epoch
        )
        self._control: Channel[ControlMessage] = services.open_channel(
            ControlMessage,
            tag=tags.CONTROL,
            scope=scopes.to_coordinator,
            peer_scope=scopes.to_members,
            name="coordinator",
            epoch=epoch,
        )

    async def serve(self, *, is_reserved: bool = False) -> None:
        """Coordinate until every member has left or is lost, or until :meth:`stop` is called."""
        core, services = self.core, self._services
        try:
            while not self._is_over():
                # Handle all arrived messages before checking a deadline: they may have waited while this rank was
                # computing.
                self._handle_all(self._control)
                self._handle_all(self._reports)
                while self._gone:
                    self._send(core.on_lost(self._gone.pop(0), services.time()))
                while self._left:
                    self._send(core.on_leave(self._left.pop(0), services.time()))
                while self._newcomers:
                    rank = next(iter(self._newcomers))
                    self._handle_newcomer(rank, self._newcomers.pop(rank))
                while self._guests:
                    self._handle_guest(*self._guests.popitem())
                is_first = self._migration is None or self._migration.is_first
                wrong = core.trend.take_wrong()
                if wrong is not None and is_first and not self._journal.is_direction_certain:
                    logger.warning("%s", trend_warning(self._journal.title(), self._metric_mode, wrong))
                if core.blanks.take_found():
                    logger.warning("%s", blank_warning(self._journal.title(), "the metric of every rank"))
                for rank in core.departures.take_early():
                    text = "%s: rank %d has left the policy; the others continue to average without it"
                    logger.warning(text, self._journal.title(), rank)
                deadline = core.next_deadline()
                if deadline is not None and services.time() >= deadline:
                    self._send(core.on_time(services.time()))
                elif not self._is_over():
                    await services.engine.until(self._has_work, WaitId(WaitKind.REPORTS), deadline=deadline)
        except asyncio.CancelledError:
            if is_reserved and services.engine.failure is None:
                # Notify the members, because the donors would otherwise wait until their round times out.
                self._send(core.on_stop())
            raise
        finally:
            services.off_gone(self._gone.append)
            self._close()

    def stop(self, inform: Callable[[int], None]) -> None:
        """Stop, because another rank has become coordinator.

        ``inform(rank)`` is then called for each rank that still sends messages to this coordinator.
        """
        if not self._is_stopped:
            self._send(self.core.migrants.end_messages())
        self._is_stopped, self._inform = True, inform
        self._close(afterwards=lambda envelope: inform(envelope.source))

    def _close(self, *, afterwards: Callable[[Envelope[Any]], None] | None = None) -> None:
        self._reports.close(afterwards=afterwards)
        self._control.close(afterwards=afterwards)

    def note_left(self, rank: int) -> None:
        """Queue the removal of a rank that has left the policy."""
        self._left.append(rank)
        self._services.engine.recheck()

    def note_newcomer(self, rank: int, incarnation: int) -> None:
        """Queue a restarted rank's request to be admitted to the policy."""
        self._newcomers[rank] = incarnation
        self._services.engine.recheck()

    def note_guest(self, rank: int, incarnation: int) -> None:
        """Queue an invitation for a rank of another island to send its weights to this island."""
        self._guests[rank] = incarnation
        self._services.engine.recheck()

    def _is_over(self) -> bool:
        return self._is_stopped or self.core.finished

    def _has_work(self) -> bool:
        return (
            self._is_stopped
            or self._control.is_ready
            or self._reports.is_ready
            or bool(self._gone or self._left or self._newcomers or self._guests)
        )

    def _handle_newcomer(self, rank: int, incarnation: int) -> None:
        services = self._services
        if rank not in services.gone and services.restarted.get(rank, 0) == incarnation:
            self._control.admit(rank)
            self._send(self.core.on_newcomer(rank, incarnation, services.time()))

    def _handle_guest(self, rank: int, incarnation: int) -> None:
        services, scopes = self._services, self._scopes
        if self._migration is not None and rank not in services.gone and services.restarted.get(rank, 0) == incarnation:
            self._control.admit(rank)
            self.core.migrants.invite(rank, incarnation)
            self._migration.invite(rank, scopes.to_members, scopes.to_coordinator, self._epoch)

    def _handle_all(self, channel: Channel[Report] | Channel[ControlMessage]) -> None:
        """Handle all messages that have arrived on a channel as if they had arrived at the same moment."""
        if self._is_stopped or not channel.is_ready:
            return
        now, envelopes = self._services.time(), channel.receive_all()
        for message, rank, number in envelopes:
            if sends := self._handle(message, rank, number, now):
                self._send(sends)

    def _handle(self, message: Report | ControlMessage, rank: int, number: int, now: float) -> Sequence[Send]:
        core = self.core
        if self._is_stopped:  # an earlier message of the batch has stopped this coordinator
            self._inform(rank)
            return ()
        match message:
            case Report() as report:  # reports are frequent, and a pattern that binds fields takes 5 times as long
                if report.asks:
                    self._answer(rank)
                if report.host:
                    core.roster.note_host(rank, report.host)
                self._journal.record("heard", rank, report.iteration, report.value)
                iteration, value, step_s = report.iteration, report.value, report.step_time_s
                return core.on_report(rank, iteration, value, step_s, now, interval_s=report.interval_s)
            case Ready() as ready:
                return core.on_ready(rank, number, ready.iteration, now, state_safe_points=ready.state_safe_points)
            case Decline(reason):
                return core.on_decline(rank, number, reason, now)
            case Applied(iteration):
                return core.on_applied(rank, number, iteration, now)
            case Abandoned(reason):
                return core.on_abandoned(rank, number, reason, now)
            case Leave():
                return core.on_leave(rank, now)
            case Joined() as joined:
                return core.on_joined(rank, joined, now)
            case PackedAssign() | PackedFrozen() | End() | Rejoin() | ReportAcknowledged() | Admitted():
                return ()  # only coordinators send these messages
            case unknown:
                assert_never(unknown)

    def _answer(self, rank: int) -> None:
        try:
            self._control.send_nowait(_ACKNOWLEDGED, rank)
        except RankLostError:
            self._gone.append(rank)

    def _send(self, sends: Sequence[Send]) -> None:
        post = self._control.send_nowait
        last_type, last_round = self._last_recorded
        for send in sends:
            dest, number, message = send
            if number and (type(message) is not last_type or number != last_round):
                last_type, last_round = self._last_recorded = type(message), number
                self._record_round(send)
            try:
                post(message, dest, round=number)
            except RankLostError:
                self._gone.append(dest)
        emigrant = self.core.migrants.take_emigrant()
        if emigrant is not None and self._migration is not None:
            self._migration.emigrate(*emigrant)

    def _record_round(self, send: Send) -> None:
        """Record in the journal that ``send`` starts a round, makes its donors final, or ends it."""
        match send.message:
            case PackedAssign(packed):
                plan = unpack_plan(packed)
                route = "sharded" if plan.reducers else "direct"
                self._journal.add("decided", send.round, plan.donors, plan.replacers, route)
            case PackedFrozen(packed):
                self._journal.add("frozen", send.round, unpack_freeze(packed).donors)
            case End(reason):
                self._journal.add("ended", send.round, reason)
