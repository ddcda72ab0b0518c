"""Tracks which other ranks have returned from ``main``, left, failed or been lost, by exchanging messages with them.

The runtimes of all ranks communicate on one channel, the system channel. It also carries the messages of agreements and
of freed groups. In a small world, each rank notifies all others when it leaves, ends or fails. In a larger world, it
notifies the ranks with which it has exchanged messages. The others are notified along a tree
(:mod:`asyncdist.runtime.departing.announcements`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from asyncdist import tags
from asyncdist.collectives.agreement import messages
from asyncdist.collectives.agreement.agreements import Agreements
from asyncdist.collectives.agreement.messages import Losses, is_in, runs_of
from asyncdist.collectives.agreement.tree_shape import DIRECT_COUNT_MAX
from asyncdist.collectives.collectives import Collectives
from asyncdist.collectives.group_ledger import Freed
from asyncdist.collectives.groups import Group
from asyncdist.collectives.membership import MembershipLog
from asyncdist.errors import BusyError, RankLostError
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel, Envelope
from asyncdist.messaging.services import Services
from asyncdist.runtime.departing.announcements import Announcements
from asyncdist.runtime.departing.departures import Departure, Stage
from asyncdist.runtime.group_creation import GroupCreation
from asyncdist.transports.rank_sets import RankSet

logger = logging.getLogger("asyncdist.runtime.peers")

#: Size of the largest world in which each rank notifies all others directly. If ranks can be restarted, they do so in
#: worlds of any size.
FLAT_SIZE_MAX: Final = DIRECT_COUNT_MAX


@dataclass(frozen=True, slots=True)
class Leave:
    """Notifies every other rank that the sender's ``main`` has returned. The sender starts no further collectives.

    Attributes:
        started: Pairs of a group's tag and the number of collectives that the sender has started in the group.
        lost: Ranks that the sender knows to be lost.
    """

    started: tuple[tuple[int, int], ...] = ()
    lost: Losses = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """Notifies every other rank that the sender has failed and that the job must stop."""

    summary: str


@dataclass(frozen=True, slots=True)
class Finalize:
    """Notifies every other rank that the sender has ended.

    Repeats the data of a :class:`Leave` that may have been lost.
    """

    started: tuple[tuple[int, int], ...] = ()
    lost: Losses = ()


@dataclass(frozen=True, slots=True)
class DropMessages:
    """Answer to :class:`Leave`: messages on ``tag`` may be in transit to the receiver, which must drop them."""

    tag: int


@dataclass(frozen=True, slots=True)
class FailureAcknowledged:
    """Answer to :class:`Failed`: the sender has stopped because the job has failed."""


FinalMessage: TypeAlias = Leave | Failed | Finalize | FailureAcknowledged


class Peers:
    """Records the state of all other ranks, and exchanges messages with their runtimes.

    Attributes:
        answered: Ranks that have acknowledged a failure, have failed, or have ended.
        announcements: Exchange of end notices along the tree, or None if this rank notifies all others directly.
        warns_of_losses: Whether the lowest present rank logs a warning for each lost rank. False if the launcher or the
            transport logs the losses.
    """

    def __init__(self, services: Services, group: Group) -> None:
        self.answered = RankSet()
        self.warns_of_losses = False
        self.attendance = MembershipLog()
        self._services = services
        self._lost: set[int] = set()
        self._has_returned = False
        self._final_messages: list[FinalMessage] = []  # messages to repeat to ranks that are restarted later
        self._failure_listeners: list[Callable[[int, str], None]] = []
        self._system: Channel[Any] = services.open_channel(
            functools.reduce(operator.or_, _HANDLERS),
            tag=tags.CONTROL,
            scope=wire.scope_of(group.ranks, "system", 0),
            name="system",
            handler=self._on_message,
            admits_restarted=True,
        )
        self.agreements = Agreements(services.engine, self._system, services.rank)
        self.agreements.is_unmet = services.is_unmet
        self.collectives = Collectives(services.engine, services.rank, services.spawn_service, self.attendance)
        self.groups = GroupCreation(services, self.agreements, self.collectives, self.attendance, self._system)
        self.announcements: Announcements | None = None
        if services.size > FLAT_SIZE_MAX and not services.may_return:
            self.announcements = Announcements(services, group.ranks, self._on_departure, self._on_failure)
        # The group of all ranks contains the previous process of a restarted rank, not this process.
        if services.engine.transport.incarnation:
            self.attendance.on_lost(services.rank)
        for rank in sorted(services.lost_ranks()):  # ``main`` must see these losses from its start.
            self.mark_lost(rank)
        services.engine.transport.set_loss_listener(self.mark_lost)
        services.engine.transport.set_return_listener(self.mark_returned)

    def on_failure(self, listener: Callable[[int, str], None]) -> None:
        """Call ``listener(rank, summary)`` when another rank has failed."""
        self._failure_listeners.append(listener)

    def mark_gone(self, ranks: RankSet, *, of_a_failure: bool = False, is_lost: bool = False) -> None:
        """Record that ranks no longer take part, because they have left, are lost, or stopped after another failure."""
        services = self._services
        new = ranks - services.gone
        if new:
            services.gone |= new
            for rank in new if is_lost else ():
                services.events.add("lost", rank, services.engine.turn, services.engine.woken_count)
            if not of_a_failure:
                self.agreements.on_gone(new, is_lost=is_lost)
                self.groups.ledger.on_gone()
            services.notify_gone(new)

    def mark_lost(self, rank: int) -> None:
        """Record that ``rank`` is lost, possibly after its ``main`` returned, and stop everything that awaits it."""
        if rank in self._lost:
            return
        self._lost.add(rank)
        if self.warns_of_losses and rank not in self._services.gone:
            self._warn_of_loss(rank)
        self._services.left.discard(rank)
        self._services.forget_returned(rank)
        self._services.gone.discard(rank)  # so that mark_gone also reports the loss of a rank that had left
        self.attendance.on_lost(rank)
        self.mark_gone(RankSet((rank,)), is_lost=True)
        if self.announcements is not None:
            self.announcements.on_lost(rank)

    def _warn_of_loss(self, rank: int) -> None:
        services = self._services
        there = (each for each in range(services.size) if each not in services.gone and each not in self._lost)
        if services.engine.failure is None and min(there) == services.rank:
            logger.warning("rank %d is lost: its process or its host has ended; the others continue without it", rank)

    def mark_returned(self, rank: int, incarnation: int) -> None:
        """Connect to the new process of a restarted ``rank``, and repeat this rank's last announcements to it."""
        services = self._services
        services.engine.poll()  # Deliver the messages of the previous process first.
        if not services.engine.transport.accept(rank, incarnation):
            return
        self._lost.discard(rank)
        services.left.discard(rank)
        services.gone.discard(rank)
        self.answered.discard(rank)
        self.attendance.on_returned(rank, incarnation)
        self.agreements.on_returned(rank, incarnation)
        services.note_restarted(rank, incarnation)
        for message in self._final_messages:
            self._send(message, rank)
        services.notify_returned(rank)

    def _on_message(self, envelope: Envelope[Any]) -> None:
        message, source = envelope.message, envelope.source
        if isinstance(message, (messages.Keyed, messages.Spread)):
            message.key.check(self._services.size)
        _HANDLERS[type(message)](self, message, source)
        self._services.engine.recheck()

    def _on_withdraw(self, message: messages.Withdraw, source: int) -> None:
        self._note_losses(message.lost)
        self.agreements.on_withdraw(message, source)

    def _on_freed(self, message: Freed, source: int) -> None:
        messages.AgreementKey("freed group", message.ranks).check(self._services.size)
        self._note_losses(message.lost)
        self.groups.ledger.on_freed(message, source)

    def _on_leave(self, message: Leave | Finalize, source: int) -> None:
        if isinstance(message, Finalize):
            self.answered.add(source)
        self._note_left(RankSet((source,)), message.started, message.lost)

    def _on_failed(self, message: Failed, source: int) -> None:
        if self.announcements is not None:
            self.announcements.fail(source, message.summary, source)
        self._on_failure(source, message.summary)

    def _on_acknowledged(self, _: FailureAcknowledged, source: int) -> None:
        self.answered.add(source)
        self._services.left.add(source)
        self.mark_gone(RankSet((source,)), of_a_failure=True)

    def _on_drop_messages(self, message: DropMessages, _: int) -> None:
        if self._has_returned:
            self._services.drop_messages(message.tag)

    def _on_failure(self, rank: int, summary: str) -> None:
        """Record that another rank has failed, and acknowledge that if this rank has already stopped."""
        is_new = rank not in self.answered
        self.answered.add(rank)
        for listener in self._failure_listeners:
            listener(rank, summary)
        if self.announcements is not None and is_new:
            for message in self._final_messages:
                if isinstance(message, (Failed, FailureAcknowledged)):
                    self._send(message, rank)

    def _on_departure(self, departure: Departure) -> None:
        """Handle departures announced along the tree. Skip ranks that also notify this rank directly.

        The end of a rank is always recorded, because all its messages have arrived by then.
        """
        services = self._services
        if self._has_returned and not services.task_count and not services.is_sending:
            return
        if is_in(services.rank, departure.told):
            return  # Messages that the rank sent earlier must be delivered first.
        ranks = departure.ranks - services.left - services.lost_ranks()
        ranks.discard(services.rank)
        if departure.stage == Stage.LEFT:
            ranks -= services.contacts
        if ranks:
            self._note_left(ranks, departure.started, departure.lost)

    def _note_left(self, ranks: RankSet, started: tuple[tuple[int, int], ...], lost: Losses) -> None:
        self._services.left |= ranks
        self._note_losses(lost)
        self.attendance.on_left(ranks, started)
        for tag, rank in self._services.note_returned(ranks):
            self._system.send_nowait(DropMessages(tag), rank)
        self.mark_gone(ranks)

    def _note_losses(self, losses: Losses) -> None:
        """Record the losses that a leaving rank has reported. A loss may be the reason why that rank has left."""
        for rank, incarnation in losses:
            is_peer = 0 <= rank < self._services.size and rank != self._services.rank
            if is_peer and not self.attendance.knows_loss(rank, incarnation):
                self.attendance.on_lost(rank)
                self.agreements.on_gone(RankSet((rank,)), is_lost=True)

    def leave(self) -> None:
        """Notify every other rank that ``main`` has returned on this rank."""
        self._has_returned = True
        self._services.stop_reading()
        self.agreements.leave()
        self.attendance.leave()
        self.announce(Leave(self.attendance.started(), self.groups.losses()))
        if self.announcements is not None:
            self._services.watch_contacts(self._notify_contact)
            self.announcements.depart(self._departure(Stage.LEFT))

    def finalize(self) -> None:
        """Notify every other rank that this rank has ended."""
        self.announce(Finalize(self.attendance.started(), self.groups.losses()))
        if self.announcements is not None:
            self.announcements.depart(self._departure(Stage.ENDED))

    def announce(self, message: FinalMessage) -> None:
        """Send ``message`` to every other rank that can still receive it, directly or along the tree."""
        services = self._services
        self._final_messages.append(message)
        peers: Collection[int] = range(services.size)
        if self.announcements is not None:
            if isinstance(message, Failed):
                self.announcements.fail(services.rank, message.summary, services.rank)
            is_departure = isinstance(message, (Leave, Finalize))
            peers = sorted(services.contacts if is_departure else self.announcements.failed)
        lost = services.lost_ranks()
        for rank in peers:
            if rank != services.rank and rank not in lost:
                self._send(message, rank)

    def notify_silent(self, message: Failed) -> None:
        """Send ``message`` directly to ranks that have not answered, because the ranks that relay it may be busy."""
        for rank in set(range(self._services.size)) - self.answered - {self._services.rank}:
            self._send(message, rank)

    @property
    def is_failure_led_by_lower_rank(self) -> bool:
        """Whether a lower rank has failed, too, and is therefore responsible for stopping all ranks."""
        return (
            self.announcements is not None
            and min(self.announcements.failed, default=self._services.size) < self._services.rank
        )

    def close(self) -> None:
        """Stop sending announcements along the tree."""
        if self.announcements is not None:
            self.announcements.close()

    def _departure(self, stage: Stage) -> Departure:
        told = runs_of(tuple(sorted(self._services.sent_to - self._services.received_from)))
        return Departure.of(self._services.rank, stage, self.attendance.started(), self.groups.losses(), told)

    def _notify_contact(self, rank: int) -> None:
        """Notify a rank whose first message arrived after ``main`` had returned on this rank."""
        for message in self._final_messages:
            if isinstance(message, (Leave, Finalize)) and rank != self._services.rank:
                self._send(message, rank)

    def _send(self, message: FinalMessage, rank: int) -> None:
        with contextlib.suppress(RankLostError, BusyError):
            self._system.send_nowait(message, rank)


#: Function that handles each type of message on the system channel. The order of the types is part of the wire format.
_HANDLERS: Final[dict[type, Callable[[Peers, Any, int], object]]] = {
    messages.Join: lambda peers, message, source: peers.agreements.on_join(message, source),
    messages.Verdict: lambda peers, message, source: peers.agreements.on_verdict(message, source),
    messages.Withdraw: Peers._on_withdraw,
    Leave: Peers._on_leave,
    Failed: Peers._on_failed,
    Finalize: Peers._on_leave,
    messages.Objection: lambda peers, message, source: peers.agreements.led.on_objection(message, source),
    messages.Reminder: lambda peers, message, source: peers.agreements.rivals.on_reminder(message, source),
    messages.Inquiry: lambda peers, message, _: peers.agreements.led.on_inquiry(message),
    messages.DecisionRequest: lambda peers, message, source: peers.agreements.on_decision_request(message, source),
    messages.Undecided: lambda peers, message, source: peers.agreements.termination.on_undecided(message, source),
    DropMessages: Peers._on_drop_messages,
    Freed: Peers._on_freed,
    FailureAcknowledged: Peers._on_acknowledged,
    messages.Gathered: lambda peers, message, _: peers.agreements.on_gathered(message),
    messages.Spread: lambda peers, message, source: peers.agreements.on_spread(message, source),
    messages.RollCall: lambda peers, message, source: peers.agreements.join_sender.on_roll_call(message, source),
    messages.NotHere: lambda peers, message, source: peers.agreements.led.on_not_here(message, source),
}
