"""Opens a member's channels, and defines how a member finds its coordinator."""

from __future__ import annotations

import logging
from typing import Protocol

from asyncdist import BusyError, RankLostError, tags
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.services import Services
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.protocols.selective.messages import ControlMessage, Report
from asyncdist.protocols.selective.statistics import CoordinatorStatistics

logger = logging.getLogger("protocols.selective.roles.member_channels")


class CoordinatorView(Protocol):
    """Interface of objects that know the current coordinator's rank.

    It is a ``Succession`` on a member, and a :class:`ReportedCoordinator` on a rank that another member represents.
    """

    @property
    def coordinator(self) -> int | None:
        """Rank of the coordinator as far as known to this rank, or None if the coordinator is lost or has stopped."""


class CoordinatorTracker(CoordinatorView, Protocol):
    """Interface through which a member finds and watches its coordinator, and may take over from it."""

    @property
    def epoch(self) -> int:
        """Number of the current coordinator: 0 for the first, and larger for each successor."""

    def statistics(self) -> CoordinatorStatistics | None:
        """Return the statistics of this rank as a coordinator, or None if it has never coordinated."""

    def on_report(self, step: int, interval_s: float) -> bool:
        """Return whether the next report must ask the coordinator for an answer. Take over if answers are missing."""

    def leave(self) -> None:
        """Leave the policy, so that this rank no longer watches or replaces the coordinator."""


class ReportedCoordinator:
    """Stores the current coordinator, as reported by other ranks, on a rank that never coordinates."""

    def __init__(self) -> None:
        self.coordinator: int | None = None
        self.epoch = 0

    def follow(self, epoch: int, coordinator: int | None) -> None:
        """Store a new coordinator and its number ``epoch``, or None if there is no coordinator at present."""
        self.epoch, self.coordinator = epoch, coordinator

    def statistics(self) -> None:
        """Return None, because this rank never coordinates."""

    def on_report(self, step: int, interval_s: float) -> bool:
        """Return False, because this rank does not watch the coordinator."""
        del step, interval_s
        return False

    def leave(self) -> None:
        """Do nothing, because this rank does not watch or replace the coordinator."""


class MemberChannels:
    """A member's channels to the coordinator and to the other members."""

    def __init__(self, services: Services, scopes: PolicyScopes) -> None:
        self._services = services
        self._reports: Channel[Report] = services.open_channel(
            Report,
            tag=tags.METRIC,
            scope=scopes.to_members,
            peer_scope=scopes.to_coordinator,
            name="metric reports, out",
            epoch=0,
        )
        self.control: Channel[ControlMessage] = services.open_channel(
            ControlMessage,
            tag=tags.CONTROL,
            scope=scopes.to_members,
            peer_scope=scopes.to_coordinator,
            name="control",
            epoch=0,
        )
        self.server = SnapshotServer(services, scopes.to_members)

    def report(self, report: Report, coordinator: int) -> bool:
        """Send a report to the coordinator. Return False if it is dropped because the channel is full."""
        try:
            self._reports.send_nowait(report, coordinator)
        except RankLostError as error:  # the Leadership object handles the loss
            logger.debug("the coordinator is lost, so a report is dropped: %s", error)
        except BusyError:
            return False
        return True

    def send_to_coordinator(self, message: ControlMessage, coordinator: int, round: int) -> None:
        """Send the coordinator a message about an averaging round, or drop the message if the job has failed."""
        if self._services.engine.failure is not None:
            return
        try:
            self.control.send_nowait(message, coordinator, round=round)
        except RankLostError as error:
            logger.debug("the coordinator is lost, so an answer is dropped: %s", error)

    def exclude(self, rank: int) -> None:
        """Block messages to the new process of a rank that was lost or restarted since the start was agreed on."""
        for channel in (self.control, self._reports, self.server.channel):
            channel.on_restarted(rank)

    def admit(self, rank: int) -> None:
        """Allow messages to the new process of a restarted rank, which was admitted or coordinates."""
        for channel in (self.control, self._reports, self.server.channel):
            channel.admit(rank)

    def enter_epoch(self, epoch: int) -> None:
        """From now on, send and accept only messages of the coordinator with number ``epoch``."""
        self.control.enter_epoch(epoch)
        self._reports.enter_epoch(epoch)
        self.server.enter_epoch(epoch)

    def close(self) -> None:
        """Close all channels. Later requests for this rank's weights are still aborted."""
        self.control.close()
        self._reports.close()
        self.server.close()
