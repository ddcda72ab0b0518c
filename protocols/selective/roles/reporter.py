"""Reports a member's metric and step durations to the coordinator."""

from __future__ import annotations

import math
import zlib

from asyncdist.messaging.services import Services
from asyncdist.protocols.selective.member import RoundMember
from asyncdist.protocols.selective.messages import Report
from asyncdist.protocols.selective.roles.coordinator_tracking import CoordinatorTracker
from asyncdist.protocols.selective.roles.member_channels import MemberChannels


class Reporter:
    """Sends one member's metric and the duration of its steps to the coordinator."""

    def __init__(
        self,
        services: Services,
        channels: MemberChannels,
        tracker: CoordinatorTracker,
        member: RoundMember,
        call: int,
        *,
        hostname: str,
    ) -> None:
        self._services = services
        self._channels = channels
        self._tracker = tracker
        self._member = member
        self._host = zlib.crc32(hostname.encode(errors="replace"))
        self.report_count = self.nonfinite_count = 0
        self.begin(call)

    def begin(self, call: int) -> None:
        """Restart the measurement of step times, as if step ``call - 1`` had just sent a report."""
        self._reported_at, self._reported_call = self._services.time(), call - 1

    def report(self, iteration: int, call: int, value: float) -> None:
        """Send a report with this metric to the coordinator, if there is one."""
        now = self._services.time()
        interval_s = now - self._reported_at
        step_s = interval_s / max(1, call - self._reported_call)
        self._reported_at, self._reported_call = now, call
        asks = self._tracker.on_report(call, interval_s)
        self._member.newest = report = Report(iteration, value, step_s, interval_s, asks, self._host)
        self.report_count += 1
        self.nonfinite_count += not math.isfinite(value)
        coordinator = self._tracker.coordinator
        if coordinator is not None:
            self._channels.report(report, coordinator)
