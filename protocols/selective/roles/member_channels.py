"""Opens the channels of a member of selective averaging, and takes them from one epoch to the next."""

from __future__ import annotations

import logging

from asyncdist import BusyError, RankLostError, tags
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.services import Services
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.protocols.selective.messages import ControlMessage, Report
from asyncdist.protocols.selective.scopes import PolicyScopes

logger = logging.getLogger("protocols.selective.roles.member_channels")


class MemberChannels:
    """Talks to the coordinator and to the other members.

    Args:
        services: of this rank.
        scopes: of the policy.

    Attributes:
        control: messages of the coordinator.
        server: gives this rank's snapshots to replacers; it outlives the policy.
    """

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
        """Send a report; return False if thousands are unheard: a newer one will count when the coordinator listens."""
        try:
            self._reports.send_nowait(report, coordinator)
        except RankLostError as error:  # the world tells that to all who must know
            logger.debug("no coordinator to report to: %s", error)
        except BusyError:
            return False
        return True

    def tell(self, message: ControlMessage, coordinator: int, round: int) -> None:
        """Send the coordinator a message about a round, unless the job has failed."""
        if self._services.engine.failure is not None:
            return
        try:
            self.control.send_nowait(message, coordinator, round=round)
        except RankLostError as error:
            logger.debug("no coordinator to answer: %s", error)

    def exclude(self, rank: int) -> None:
        """Send nothing to the new process of a rank, which was lost since the start was agreed on."""
        for channel in (self.control, self._reports, self.server.channel):
            channel.on_restarted(rank)

    def admit(self, rank: int) -> None:
        """Send to the new process of a rank that was started again: it takes part, as the coordinator says or is it."""
        for channel in (self.control, self._reports, self.server.channel):
            channel.admit(rank)

    def enter_epoch(self, epoch: int) -> None:
        """Leave what an earlier coordinator has begun behind."""
        self.control.enter_epoch(epoch)
        self._reports.enter_epoch(epoch)
        self.server.enter_epoch(epoch)

    def close(self) -> None:
        """Send and receive no more, except that the server answers."""
        self.control.close()
        self._reports.close()
        self.server.close()
