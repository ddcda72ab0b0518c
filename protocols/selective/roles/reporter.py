"""Reports a member's metric to the coordinator, with the time that its steps take, and looks after the coordinator."""

from __future__ import annotations

import math
import zlib

from asyncdist.messaging.services import Services
from asyncdist.protocols.selective.member import RoundMember
from asyncdist.protocols.selective.messages import Report
from asyncdist.protocols.selective.roles.coordination import Coordination
from asyncdist.protocols.selective.roles.member_channels import MemberChannels


class Reporter:
    """Makes the reports of one member.

    Args:
        services: of this rank.
        channels: send them.
        coordination: Knows to which rank, and whether it is to answer.
        member: Keeps the newest report.
        call: the number of the call of ``step`` before which this rank begins.
        hostname: of this rank's host.

    Attributes:
        report_count, nonfinite_count: reports, and those whose metric was NaN or infinite.
    """

    def __init__(
        self,
        services: Services,
        channels: MemberChannels,
        coordination: Coordination,
        member: RoundMember,
        call: int,
        *,
        hostname: str,
    ) -> None:
        self._services = services
        self._channels = channels
        self._coordination = coordination
        self._member = member
        self._host = zlib.crc32(hostname.encode(errors="replace"))
        self.report_count = self.nonfinite_count = 0
        self.begin(call)

    def begin(self, call: int) -> None:
        """Measure from now on, as if call ``call - 1`` had been the last that reported."""
        self._reported_at, self._reported_call = self._services.time(), call - 1

    def report(self, iteration: int, call: int, value: float) -> None:
        """Report a metric.

        Args:
            iteration: the policy's number of this step.
            call: how many calls came before: messages are answered once in a call, not in an iteration.
            value: the metric.
        """
        now = self._services.time()
        interval_s = now - self._reported_at
        step_s = interval_s / max(1, call - self._reported_call)
        self._reported_at, self._reported_call = now, call
        asks = self._coordination.on_report(call, interval_s)
        self._member.newest = report = Report(iteration, value, step_s, interval_s, asks, self._host)
        self.report_count += 1
        self.nonfinite_count += not math.isfinite(value)
        coordinator = self._coordination.coordinator
        if coordinator is not None:
            self._channels.report(report, coordinator)
