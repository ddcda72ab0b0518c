"""Opens a member's channels for metric reports, messages about rounds, and weights in selective averaging."""

from __future__ import annotations

import logging

from asyncdist import BusyError, RankLostError, tags
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.services import Services
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.protocols.selective.messages import ControlMessage, Report

logger = logging.getLogger("protocols.selective.roles.member_channels")


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

    def report(self, report: Report, coordinator: int) -> None:
        """Send a report to the coordinator, or drop it if the coordinator is lost or the channel is full."""
        try:
            self._reports.send_nowait(report, coordinator)
        except (RankLostError, BusyError) as error:  # the Leadership object handles a loss
            logger.debug("a report is dropped: %s", error)

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
